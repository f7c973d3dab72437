"""Observers: scanners find their changes, a worker runs them, at most once per change.

Read `protocol/claim.py` (does this row need this observer?), `working.py`, `worker.py`, `scanner.py`, `workers.py`.
"""
