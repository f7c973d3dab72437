"""Transactions: pure cores, one driver, and the objects that users hold.

Read `records.py` (how transactions are written down), `snapshot.py`, `commit.py`, `recovery.py` (the pure cores),
`mutations.py` (each step as checks and writes), `driver.py` (does what they decide), `transaction.py`, `client.py`.
"""
