"""Bytes <-> frames <-> calls: many calls in flight on one stream. Knows nothing of rows or transactions.

Read `framing.py` (frames, without I/O), `channel.py` (what waits goes in one frame), `link.py` (a client's calls, and
its connection made again), `peer.py` (a server's side of a connection), `addresses.py` (where one listens).
"""
