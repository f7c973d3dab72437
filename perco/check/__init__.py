"""Examines what is stored against the invariants, and repairs what can be repaired."""
