"""A store for other processes: the owner answers calls, clients run their own transactions over them.

Read `messages.py` (what is asked), `sessions.py` (what a client holds), `server.py` (the owner's side), `remote.py` (a
row store and an oracle that ask), `database.py` (`perco.open` of an address), `opening.py` (which of all it is).
"""
