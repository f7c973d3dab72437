"""The past: removal of old versions, snapshots of earlier moments, pins."""
