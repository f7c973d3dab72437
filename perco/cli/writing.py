"""`perco set`: one cell, in a transaction of its own."""

from __future__ import annotations

from typing import Any

import perco
from perco.cli.reading import column_named, table_named
from perco.cli.screen import FINE, show_json
from perco.cli.values import parse_key, parse_value
from perco.txn.catalogue import schema_of


async def set_cell(store: str, table: str, key: str, column: str, value: str, *, json: bool) -> int:
    """Write a cell; its observers are notified, for the catalogue knows them (N10)."""
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(db.catalogue)
        chosen = column_named(table_named(db, table), column)
        parsed, new = parse_key(chosen.table.key, key), parse_value(chosen.codec, value)
    async with perco.open(store, schema) as db:
        commit_ts = await db.run(_set, column_named(table_named(db, table), column), parsed, new)
        entries = db.catalogue.observers.items()
        observers = [id for id, entry in entries if (entry.table, entry.column) == (table, column)]
    if json:
        show_json({"table": table, "key": parsed, "column": column, "commit_ts": commit_ts, "observers": observers})
        return FINE
    print(f"committed at {commit_ts}")
    if observers:
        print(f"notified: {', '.join(observers)}; they run as soon as a worker has the store open")
    return FINE


async def _set(txn: perco.Transaction, column: perco.Column[Any, Any], key: Any, value: Any) -> int:
    txn.set(column, key, value)
    return await txn.commit()
