"""`perco get` and `perco scan`: read a store, beside its owner if it has one."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import perco
from perco.cli.screen import FINE, FOUND, Columns, complain, show_json, show_table
from perco.cli.values import is_number, parse_key, parse_moment, parse_prefix, shown
from perco.database.inside import inside
from perco.errors import UsageError
from perco.protocol.records import DELETE, PUT_DATA, unpack_record
from perco.schema.codecs import decoded
from perco.storage import WRITE
from perco.txn.inside import driver_of, still_kept
from perco.txn.scan import range_of

_CELL_WIDTH = 60
_KEY_WIDTH = 2000  # keys are shorter: they are shown whole, in one line
_BLOCK_ROWS = 100  # how many rows of a scan are printed at a time; the first ones decide the widths of the columns
_VERSIONS_PER_READ = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class When:
    """The moment to read at: a timestamp, a wall time, or neither: the newest visible moment."""

    ts: int | None = None
    at: str | None = None


@asynccontextmanager
async def snapshot(store: str, when: When) -> AsyncIterator[tuple[perco.Database, perco.Snapshot]]:
    """A store opened for reading, and a snapshot of it."""
    at = parse_moment(when.at) if when.at is not None else None
    async with perco.open(store, readonly=True) as db, db.snapshot(ts=when.ts, at=at) as snap:
        yield db, snap


def table_named(db: perco.Database, name: str) -> perco.Table[Any]:
    """A table of the store's own catalogue.

    Raises: UsageError, which names the existing tables.
    """
    found = db.schema.tables.get(name)
    if found is None:
        raise UsageError(f"there is no table {name!r}; the store has: {', '.join(db.schema.tables) or 'none'}")
    return found


def column_named(table: perco.Table[Any], name: str) -> perco.Column[Any, Any]:
    """A column of the table. Raises: UsageError, which names the existing columns."""
    found = table.columns.get(name)
    if name in table.signals:
        raise UsageError(f"{table.name}.{name} is a signal: it has no value; raise it with: perco signal")
    if found is None:
        raise UsageError(f"table {table.name!r} has no column {name!r}; it has: {', '.join(table.columns) or 'none'}")
    return found


# ------------------------------------------------------------------ get


async def get(store: str, table: str, key: str, column: str | None, when: When, *, json: bool, raw: bool) -> int:
    """Print one cell, or all cells of a row."""
    if raw and (column is None or json):
        raise UsageError("--raw prints the bytes of one column: name the column, and leave out --json")
    async with snapshot(store, when) as (db, snap):
        chosen = table_named(db, table)
        columns = [column_named(chosen, column)] if column is not None else list(chosen.columns.values())
        parsed = parse_key(chosen.key, key)
        row = await snap.row(chosen, parsed, columns)
        present = [column for column in columns if column in row]
        if raw and present:
            sys.stdout.buffer.write(present[0].codec.encode(row[present[0]]))
        elif json:
            values = {c.name: {"value": row[c], "commit_ts": row.commit_ts(c)} for c in present}
            show_json({"table": table, "key": parsed, "ts": snap.start_ts, "columns": values})
        elif column is not None and present:
            print(shown(row[present[0]]))
        elif present:
            lines = [(c.name, row.commit_ts(c), shown(row[c], _CELL_WIDTH)) for c in present]
            show_table(("column", "commit_ts", "value"), lines, numbers=["commit_ts"])
    if not present:
        complain(f"{table}[{parsed!r}] has no value" + (f" in {column}" if column else ""))
    return FINE if present else FOUND


async def versions(store: str, table: str, key: str, column: str | None, when: When, *, json: bool) -> int:
    """Print every version of a cell, or of all cells of a row, newest first."""
    async with snapshot(store, when) as (db, snap):
        chosen = table_named(db, table)
        columns = [column_named(chosen, column)] if column is not None else list(chosen.columns.values())
        parsed = parse_key(chosen.key, key)
        found = [(c.name, version) for c in columns for version in await versions_of(db, snap, c, parsed)]
    if json:
        by_column = {
            name: [
                {"commit_ts": ts, "deleted": True} if gone else {"commit_ts": ts, "value": value}
                for ts, gone, value in cells
            ]
            for name, cells in ((name, [cell for _, cell in group]) for name, group in groupby(found, lambda f: f[0]))
        }
        show_json({"table": table, "key": parsed, "ts": snap.start_ts, "versions": by_column})
    elif found:
        lines = [(n, ts, "(deleted)" if gone else shown(value, _CELL_WIDTH)) for n, (ts, gone, value) in found]
        show_table(("column", "commit_ts", "value"), lines, numbers=["commit_ts"])
    if not found:
        complain(f"{table}[{parsed!r}] was never written" + (f" in {column}" if column else ""))
    return FINE if found else FOUND


async def versions_of(
    db: perco.Database, snap: perco.Snapshot, column: perco.Column[Any, Any], key: Any, most: int | None = None
) -> list[tuple[int, bool, Any]]:
    """(commit_ts, deleted, value) up to the snapshot, newest first; `most`: only so many."""
    bound, row = inside(db).known.bind(column), column.table.row(key)
    newest = await snap.row(column.table, key, [column])
    out: list[tuple[int, bool, Any]] = []
    high = snap.start_ts
    while True:
        query = (WRITE, bound.column, 0, high, _VERSIONS_PER_READ)
        [[cells]] = await driver_of(snap).reads.read([(bound.table, row, [query])])
        for ts, value in cells:
            kind, start_ts, body = unpack_record(value)
            if kind == PUT_DATA:
                data = (body.decode(), bound.column, start_ts, start_ts, 1)
                record = (WRITE, bound.column, ts, ts, 1)
                [[still, found]] = await driver_of(snap).reads.read([(bound.table, row, [record, data])])  # in one view
                if not still:
                    continue  # since the record was listed, the vacuum has removed it and its value
                if not found:
                    what = f"the record at {ts} points at missing data"
                    raise perco.errors.Corruption("", what, (bound.table, key, column.name))
                body = found[0][1]
            out.append((ts, kind == DELETE, None if kind == DELETE else decoded(column.codec, body, column, key)))
        if len(cells) < _VERSIONS_PER_READ or (most is not None and len(out) >= most):
            break
        high = cells[-1][0] - 1
    committed = newest.commit_ts(column)
    if committed and (not out or out[0][0] != committed):  # committed, but not yet rolled forward
        out.insert(0, (committed, column not in newest, newest[column]))
    await still_kept(snap, bound.table)  # G5, T9
    return out[:most]


# ------------------------------------------------------------------ scan


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The range of a scan, as written on the command line."""

    prefix: str | None = None
    start: str | None = None
    stop: str | None = None
    columns: Sequence[str] = ()
    limit: int | None = None
    reverse: bool = False


def columns_of(table: perco.Table[Any], names: Sequence[str]) -> list[perco.Column[Any, Any]]:
    """These columns, or all of the table's. Raises: UsageError."""
    return [column_named(table, name) for name in names] or list(table.columns.values())


def scan_of(
    snap: perco.Snapshot, table: perco.Table[Any], columns: Sequence[perco.Column[Any, Any]], chosen: Range
) -> perco.Scan[Any]:
    """The scan of a range. Raises: UsageError."""
    start, stop, prefix = _bounds(table, chosen)
    return snap.scan(
        table, start=start, stop=stop, prefix=prefix, columns=columns, limit=chosen.limit, reverse=chosen.reverse
    )


def range_in(table: perco.Table[Any], chosen: Range) -> tuple[bytes, bytes | None]:
    """The rows of a range, [low, high), in stored form. Raises: UsageError."""
    return range_of(table, *_bounds(table, chosen))


def _bounds(table: perco.Table[Any], chosen: Range) -> tuple[Any, Any, Any]:
    return (
        None if chosen.start is None else parse_key(table.key, chosen.start),
        None if chosen.stop is None else parse_key(table.key, chosen.stop),
        None if chosen.prefix is None else parse_prefix(table.key, chosen.prefix),
    )


async def scan(store: str, table: str, chosen: Range, when: When, *, json: bool) -> int:
    """Print rows in key order: as text, or a line of JSON for each."""
    async with snapshot(store, when) as (db, snap):
        here = table_named(db, table)
        columns = columns_of(here, chosen.columns)
        if not columns:
            return FINE
        rows = scan_of(snap, here, columns, chosen)
        if json:
            async for row in rows:
                show_json({"key": row.key, "values": row.values()})
        elif sys.stdout.isatty():
            await _scan_on_terminal(rows, columns)
        else:
            print("\t".join(("key", *(column.name for column in columns))))
            async for row in rows:
                print("\t".join(_line(row, columns)))
    return FINE


def _line(row: perco.Row[Any], columns: Sequence[perco.Column[Any, Any]]) -> list[str]:
    return [shown(row.key, _KEY_WIDTH), *("" if c not in row else shown(row[c], _CELL_WIDTH) for c in columns)]


async def _scan_on_terminal(rows: AsyncIterator[perco.Row[Any]], columns: Sequence[perco.Column[Any, Any]]) -> None:
    numbers = [column.name for column in columns if is_number(column.codec)]
    table = Columns(("key", *(column.name for column in columns)), numbers=numbers)
    block: list[list[str]] = []
    none = True
    async for row in rows:
        none = False
        block.append(_line(row, columns))
        if len(block) == _BLOCK_ROWS:
            table.show(block)
            block = []
    if block:
        table.show(block)
    if none:
        print("no rows")
