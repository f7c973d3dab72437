"""Damaged files: `perco check` ends in a report or in a clear error for any bytes in a store's files.

`cases.py` damages one file of a store, by a seed; `running.py` runs commands over the damaged store and judges how they
ended. `python -m tests.damage --cases 10000 --seed 1` is the long run; `test_damage.py` runs a few dozen cases.
"""
