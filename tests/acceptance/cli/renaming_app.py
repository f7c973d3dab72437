"""A newer version of the program in `stores.py`: it calls a table, a column and an observer otherwise."""

from __future__ import annotations

import perco

docs = perco.Table("documents", key=perco.TEXT, splits=["m"], was="docs")
body = docs.column("body", perco.BYTES, group="raw", was="contents")
size = docs.column("size", perco.INT64)
schema = perco.Schema(docs)


@schema.observe(body, id="length", was="measure")
async def length(txn: perco.Transaction, change: perco.Change[str, bytes]) -> None:
    txn.set(size, change.key, len(change.value or b""))
