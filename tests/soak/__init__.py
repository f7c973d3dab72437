"""Client processes that append to lists, while they, their servers and workers are killed and stopped, and calls are
lost. A checker then judges their combined history.

`python -m tests.soak bigtable --transactions 100000` is the long run; `test_soak.py` makes a short one.
"""
