"""Running transactions: the driver, which performs commits, and the objects that users hold.

Read `driver.py` (performs commits), `resolver.py` (reads, and settles what is in the way), `engine.py` (the parts that
all transactions of a store share), `transaction.py`, `running.py` (`db.run`). Higher packages use `inside.py` to reach
the parts of a transaction, and `runs.py` to set up the transaction of an observer's run.
"""
