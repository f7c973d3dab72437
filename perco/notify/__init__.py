"""Observers: scanners find their changes, a worker runs them, at most once per change.

Read `claim.py` (does this row need this observer?), `worker.py`, `scanner.py`, `database.py`.
"""
