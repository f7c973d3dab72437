"""Serves a store to other processes: the owner answers calls, and clients run their transactions over these calls.

Read `messages.py` (the calls), `sessions.py` (what a client holds), `server.py` (the owner's side), `remote.py` and
`remote_rows.py` (an oracle and a row store over the wire), `client.py` (`perco.open` of an address), `opening.py`
(`perco.open`: owner or client).
"""
