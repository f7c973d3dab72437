"""Observers: scanners find the changes, and the worker runs the observers. At most one run commits for each change.

Read, in this order: `protocol/claim.py` (whether a row needs an observer to run), `working.py`, `worker.py`,
`scanner.py`, `workers.py`.
"""
