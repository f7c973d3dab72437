"""Bytes <-> frames <-> calls: many calls in flight on one stream. Nothing here depends on rows or transactions.

Read `framing.py` (frames, without I/O), `channel.py` (all waiting messages leave in one frame), `link.py` (a client's
calls, and how it reconnects), `peer.py` (a server's side of a connection), `addresses.py` (where a server listens).
"""
