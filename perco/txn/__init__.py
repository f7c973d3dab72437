"""Transactions that run: the driver of the pure commit, and the objects that users hold.

Read `driver.py` (performs commits), `resolver.py` (reads, and settles what is in the way), `engine.py` (what the
transactions of a store share), `transaction.py`, `running.py` (`db.run`). Packages above reach the parts of a
transaction through `inside.py`, and an observer's run through `runs.py`.
"""
