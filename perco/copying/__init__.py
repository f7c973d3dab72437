"""Copies a store to another place, cell by cell: from a folder to PostgreSQL or Bigtable, and back.

Read `difference.py` (what has to be written so that two rows are equal), `marker.py` (the note that keeps programs out
of an unfinished copy), `passes.py` (one pass over a store), `places.py` (how both stores are opened) and `copy.py` (the
whole copy).
"""
