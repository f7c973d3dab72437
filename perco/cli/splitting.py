"""`perco split`: split a tablet in two at a key."""

from __future__ import annotations

import perco
from perco.cli.reading import table_named
from perco.cli.screen import FINE, counted, show_json
from perco.cli.values import parse_key, shown
from perco.database.inside import inside, local_owner
from perco.schema.catalogue import schema_of

_KEY_WIDTH = 40


async def split(store: str, table: str, key: str | None, *, json: bool) -> int:
    """Split in the process that has the store open, or in this process if no other has."""
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(inside(db).catalogue)
        parsed = None if key is None else parse_key(table_named(db, table).key, key)
    async with perco.open(store, schema) as db:
        here = table_named(db, table)
        done = await db.split(here, parsed)
        if inside(db).place.path is not None:
            await local_owner(db).splitting.clear()
    first = here.key.decode(done.row)
    if json:
        told = {"table": table, "tablet": done.tablet, "from": first, "cells": done.cells}
        show_json({**told, "seconds": done.seconds, "paused_s": done.paused_s})
        return FINE
    print(f"tablet {done.tablet} of {table} has the rows from {shown(first, _KEY_WIDTH)} on")
    waited = f"writes to them waited for {1000 * done.paused_s:.0f} ms"
    print(f"{counted(done.cells, 'cell')} copied in {done.seconds:.1f} s; {waited}")
    return FINE
