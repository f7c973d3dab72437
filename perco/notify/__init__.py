"""What an observer is: found by scanners, run by a worker, at most once per change.

Read `claim.py` (does this row need this observer?), `worker.py`, `scanner.py`, `database.py`.
"""
