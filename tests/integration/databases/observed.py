"""A program with an observer, for worker processes."""

from __future__ import annotations

import perco

things = perco.Table("things", key=perco.TEXT)
source = things.column("source", perco.INT64)
copied = things.column("copied", perco.INT64)
SCHEMA = perco.Schema(things)


@SCHEMA.observe(source, id="copy")
async def copy(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
    """Copy what was written."""
    value = await txn.get(source, change.key)
    if value is not None:
        txn.set(copied, change.key, value)
