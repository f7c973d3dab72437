"""A client in a process of its own: see `client.py`."""

from bench.brokerage.client import main

main()
