"""`perco set`, `perco delete`, `perco signal`: change one row, in a transaction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import perco
from perco.cli.looks import observed_by
from perco.cli.reading import column_named, table_named
from perco.cli.screen import FINE, FOUND, complain, show_json
from perco.cli.values import parse_key, parse_value
from perco.database.inside import inside
from perco.errors import UsageError
from perco.schema.catalogue import schema_of


async def set_cell(store: str, table: str, key: str, column: str, value: str, *, json: bool) -> int:
    """Write a cell and notify its observers, which the catalogue lists (N10)."""
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(inside(db).catalogue)
        chosen = column_named(table_named(db, table), column)
        parsed, new = parse_key(chosen.table.key, key), parse_value(chosen.codec, value)
        if new is None:
            raise UsageError("null is not a value; to empty a cell: perco delete STORE TABLE KEY COLUMN")
    async with perco.open(store, schema) as db:
        commit_ts = await db.run(_set, column_named(table_named(db, table), column), parsed, new)
        observers, paused = observed_by(inside(db).catalogue, table, column), await db.paused()
    if json:
        show_json({"table": table, "key": parsed, "column": column, "commit_ts": commit_ts, "observers": observers})
    else:
        _tell(commit_ts, observers, paused)
    return FINE


async def delete_cells(store: str, table: str, key: str, columns: Sequence[str], *, json: bool) -> int:
    """Delete cells of a row, all by default, and notify their observers (N10)."""
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(inside(db).catalogue)
        here = table_named(db, table)
        for name in columns:
            column_named(here, name)
        parsed = parse_key(here.key, key)
    async with perco.open(store, schema) as db:
        here = table_named(db, table)
        chosen = [column_named(here, name) for name in columns] or list(here.columns.values())
        commit_ts, deleted = await db.run(_delete, here, chosen, parsed)
        found = (id for name in deleted for id in observed_by(inside(db).catalogue, table, name))
        observers, paused = list(dict.fromkeys(found)), await db.paused()
    if json:
        told = {"table": table, "key": parsed, "deleted": deleted, "commit_ts": commit_ts or None}
        show_json({**told, "observers": observers})
    elif deleted:
        print(f"deleted {', '.join(deleted)}")
        _tell(commit_ts, observers, paused)
    if not deleted:
        complain(f"{table}[{parsed!r}] has no value" + (f" in {' or '.join(columns)}" if columns else ""))
    return FINE if deleted else FOUND


async def raise_signal(store: str, table: str, key: str, name: str, *, json: bool) -> int:
    """Raise a signal, if it has observers (N5)."""
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(inside(db).catalogue)
        here = table_named(db, table)
        if name not in here.signals:
            known = ", ".join(here.signals) or "none"
            raise UsageError(f"table {table!r} has no signal {name!r}; it has: {known}")
        parsed = parse_key(here.key, key)
    async with perco.open(store, schema) as db:
        commit_ts = await db.run(_signal, table_named(db, table).signals[name], parsed)
        observers, paused = observed_by(inside(db).catalogue, table, name), await db.paused()
    if json:
        told = {"table": table, "key": parsed, "signal": name, "commit_ts": commit_ts or None}
        show_json({**told, "observers": observers})
    elif observers:
        _tell(commit_ts, observers, paused)
    if not observers:
        complain(f"{table}.{name} has no observer: nothing was raised")
    return FINE if observers else FOUND


def _tell(commit_ts: int, observers: Sequence[str], paused: Collection[str]) -> None:
    print(f"committed at {commit_ts}")
    if observers:
        print(f"notified: {', '.join(observers)}; they run as soon as a worker has the store open")
    if resting := [id for id in observers if id in paused]:
        print(f"paused: {', '.join(resting)}; their changes wait until perco resume")


async def _set(txn: perco.Transaction, column: perco.Column[Any, Any], key: Any, value: Any) -> int:
    txn.set(column, key, value)
    return await txn.commit()


async def _signal(txn: perco.Transaction, signal: perco.Signal[Any], key: Any) -> int:
    txn.signal(signal, key)
    return await txn.commit()


async def _delete(
    txn: perco.Transaction, table: perco.Table[Any], columns: Sequence[perco.Column[Any, Any]], key: Any
) -> tuple[int, list[str]]:
    """Delete the cells that have a value. Returns the commit timestamp (0: no such cell) and their columns."""
    row = await txn.row(table, key, columns)
    present = [column for column in columns if column in row]
    for column in present:
        txn.delete(column, key)
    return await txn.commit() if present else 0, [column.name for column in present]
