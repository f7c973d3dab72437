"""The protocol of transactions as pure functions and values: no I/O, no clock, no loop.

Read `records.py` (how transactions are stored as cells), `snapshot.py` (what a reader sees), `commit.py` (whether a
transaction commits), `recovery.py` (the outcome of a dead client's transaction), `mutations.py` (each step as checks
and writes), `claim.py` (whether an observer runs), `retention.py` (which versions are kept).
"""
