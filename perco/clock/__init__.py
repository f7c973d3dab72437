"""Time and liveness: timestamps, the holds on the watermark, notes of the wall clock, heartbeats."""
