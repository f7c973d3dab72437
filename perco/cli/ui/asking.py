"""Answers the page of `perco ui`, in plain data. Answers have bounds: of rows, of time, of characters."""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, Final

import trio

import perco
from perco.cli.history import age_of, history_of
from perco.cli.reading import columns_of, table_named, versions_of
from perco.cli.status import owner_of, place_of_store, table_told
from perco.cli.tracing import concerns
from perco.cli.ui.bounds import Busy, bounded
from perco.cli.ui.shelf import Shelf
from perco.cli.ui.watching import EVERY_S, KEPT, Watch
from perco.cli.values import parse_key, parse_moment, parse_prefix, shown
from perco.database.inside import inside
from perco.errors import UsageError
from perco.history.diff import differences
from perco.notify.tracing import Name, Traced, trace
from perco.serve import uses
from perco.serve.client import is_client, remote_owner

_CELL_WIDTH: Final = 120
_KEY_WIDTH: Final = 2000  # keys are shorter: they are shown whole
_VALUE_MOST: Final = 64 * 1024  # characters of a value that is shown whole
_ROW_MOST: Final = 2 << 20  # characters of a row's values that are shown whole
_ROWS_MOST: Final = 500
_VERSIONS_MOST: Final = 30  # of a row's column
_NODES_MOST: Final = 2000  # of a tree of causes
_LIST_MOST: Final = 50  # cells of a transaction, runs that followed from it
_MOMENT_MOST: Final = 40  # characters
_LAGS_MOST: Final = 10_000  # of observers in samples
_SAMPLES_LEAST: Final = 30
_SHORT_S: Final = 20.0
_LONG_S: Final = 120.0


class Asking:
    """Answers the page. Loop thread only."""

    def __init__(self, shelf: Shelf, watch: Watch) -> None:
        self._shelf, self._watch = shelf, watch
        self._whole = False  # a question that reads a whole table, or all of the store, is being answered

    async def store(self) -> dict[str, Any]:
        """The store, its tables, its observers: what changes rarely."""
        async with bounded(_SHORT_S), self._shelf.reading() as db:
            now = time.time()
            folder = await place_of_store(db)
            history = await history_of(db, now=now)
            catalogue = inside(db).catalogue
            here = set(inside(db).place.store.tables())
            tables = [
                await table_told(db, folder, name, history["watermark"]["cuts"].get(name, 0), now)
                for name in catalogue.tables
                if name in here and not catalogue.tables[name].dropped
            ]
            return {
                "perco": perco.__version__,
                "store": folder.path or self._shelf.store,
                "owner": await owner_of(db, folder, now=now),
                "durability": folder.mark,
                "catalogue": catalogue.version,
                "tables": tables,
                "observers": [asdict(state) for state in await db.observers()],
                "history": history,
                "every_s": EVERY_S,
                "kept": KEPT,
            }

    async def samples(self, after: int) -> dict[str, Any]:
        """The samples after one: the newest, and fewer if there are many observers."""
        await trio.lowlevel.checkpoint()
        kept = self._watch.samples
        count = _LAGS_MOST // max(len(kept[-1].lag), 1) if kept else 0
        found = [each.plain() for each in [*kept][-max(count, _SAMPLES_LEAST) :] if each.number > after]
        return {"begun": self._watch.begun, "samples": found}

    def owner_answers(self, fresh_s: float) -> bool:
        """Whether the store's owner has answered within that time."""
        newest = self._watch.samples[-1] if self._watch.samples else None
        return newest is not None and bool(newest.owner) and time.time() - newest.at < fresh_s

    async def heat(self) -> dict[str, Any]:
        """The heat map, and the tablets as they are now."""
        async with bounded(_SHORT_S), self._shelf.reading() as db:
            times, bands = self._watch.heat_map()
            return {
                "times": times,
                "bands": [
                    {
                        "table": inside(db).catalogue.title(band.first.table),
                        "start": _start(db, band.first.table, band.first.start),
                        "tablets": band.tablets,
                        "rates": [round(rate, 2) for rate in band.rates],
                    }
                    for band in bands
                    if band.first.table in db.schema.tables
                ],
                "tablets": [
                    {
                        "table": inside(db).catalogue.title(each.table),
                        "number": each.number,
                        "start": _start(db, each.table, each.start),
                        "server": each.server,
                        "process": each.since[0],
                        "mutations": each.mutations,
                        "batches": each.batches,
                        "queued": each.queued,
                        "used_bytes": each.used_bytes,
                    }
                    for each in self._watch.tablets
                    if each.table in db.schema.tables
                ],
            }

    async def uses(self) -> dict[str, Any]:
        """The work of each process with the store, and the cells on which transactions conflict most."""
        async with bounded(_SHORT_S), self._shelf.reading() as db:
            now, processes, cells = time.time(), [], Counter[tuple[str, bytes, int]]()
            own = uses.id_of(remote_owner(db).session) if is_client(db) else ""
            for use in self._watch.uses:
                if use.id == own:
                    continue
                told = use._asdict()
                del told["contended"]
                for name in "oldest", "oldest_past":
                    told[f"{name}_s"] = await age_of(db, told[name], now)
                told["observers"] = sorted(run.id for run in use.observers)
                processes.append(told)
                cells.update({each[:3]: each.conflicts for each in use.contended})
            return {
                "processes": processes,
                "contended": [
                    {
                        **_named_row(db, table, row),
                        "column": inside(db).catalogue.column_name(table, column),
                        "conflicts": conflicts,
                    }
                    for (table, row, column), conflicts in cells.most_common(_LIST_MOST)
                ],
            }

    async def failed(self, observer: str | None, limit: int) -> dict[str, Any]:
        """The beginning of the failed list, with tracebacks."""
        async with bounded(_SHORT_S), self._shelf.reading() as db:
            found = await db.failed(observer, limit=_within(limit, _ROWS_MOST))
            count = await db.failed_count()
            return {
                "count": count,
                "changes": [
                    {
                        **_named(db, change.table, change.key),
                        "observer": change.observer,
                        "column": change.column,
                        "commit_ts": change.commit_ts,
                        "cause": change.cause,
                        "chain": [*change.chain, change.observer],
                        "attempts": change.attempts,
                        "wall": change.wall,
                        "error": change.error[:_VALUE_MOST],
                        "traceback": change.traceback[:_VALUE_MOST],
                    }
                    for change in found
                ],
            }

    # ------------------------------------------------------------ rows

    async def rows(
        self, table: str, *, prefix: str, start: str, after: str | None, limit: int, at: str, columns: Sequence[str]
    ) -> dict[str, Any]:
        """Rows of a table in key order, as of a moment: those with a prefix, or from a key on, or after a row."""
        limit = _within(limit, _ROWS_MOST)
        async with bounded(_SHORT_S), self._shelf.reading() as db, db.snapshot(**_when(at)) as snap:
            here = table_named(db, table)
            chosen = columns_of(here, columns)
            begin = parse_key(here.key, start) if start else None
            if after is not None:
                begin = _key(here, after)
            found: list[dict[str, Any]] = []
            more = False
            if chosen:
                scan = snap.scan(
                    here,
                    start=begin,
                    prefix=parse_prefix(here.key, prefix) if prefix else None,
                    columns=chosen,
                    limit=limit + 2,
                )
                async for row in scan:
                    if after is not None and here.row(row.key) == _bytes(after):
                        continue
                    if len(found) == limit:
                        more = True
                        break
                    found.append({**_named(db, table, row.key), "values": [_cell(row, each) for each in chosen]})
            return {
                "table": table,
                "ts": snap.start_ts,
                "columns": [column.name for column in chosen],
                "rows": found,
                "more": more,
            }

    async def row(self, table: str, *, key: str, ref: str | None, at: str) -> dict[str, Any]:
        """A row: its values, and their older versions."""
        async with bounded(_SHORT_S), self._shelf.reading() as db, db.snapshot(**_when(at)) as snap:
            here = table_named(db, table)
            parsed = parse_key(here.key, key) if ref is None else _key(here, ref)
            room = _ROW_MOST
            now, ages = time.time(), dict[int, float | None]()
            columns = []
            for column in here.columns.values():
                versions = []
                found = await versions_of(db, snap, column, parsed, most=_VERSIONS_MOST)
                for ts, gone, value in found:
                    if ts not in ages:
                        ages[ts] = await age_of(db, ts, now)
                    age_s, text = ages[ts], None if gone else _whole(value)
                    if text is not None and len(text) > room:
                        text = f"(not shown: the row's versions are too large; {len(text)} characters)"
                    room -= len(text or "")
                    versions.append(
                        {
                            "commit_ts": ts,
                            "at": None if age_s is None else now - age_s,
                            "deleted": gone,
                            "value": text,
                        }
                    )
                if versions:
                    columns.append({"name": column.name, "codec": column.codec.name, "versions": versions})
            return {**_named(db, table, parsed), "ts": snap.start_ts, "columns": columns}

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """A block for a question that reads a whole table, or all of the store. Raises: Busy."""
        if self._whole:
            raise Busy("another question of this page reads the whole store now; ask again when it is answered")
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    async def causes(self, table: str, *, key: str, ref: str | None) -> dict[str, Any]:
        """The trees of causes to which a row belongs. Reads all write records of the store."""
        async with (
            self._alone(),
            bounded(_LONG_S, "perco trace has no limit"),
            self._shelf.reading() as db,
        ):
            here = table_named(db, table)
            parsed = parse_key(here.key, key) if ref is None else _key(here, ref)
            found = await trace(inside(db).engine, here.name, here.row(parsed))
            budget = [_NODES_MOST]
            return {
                **_named(db, table, parsed),
                "trees": [_tree(db, tree, (here.name, parsed), budget) for tree in found],
            }

    async def differences(
        self, table: str, begin: str, end: str, limit: int, columns: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The first rows in which two moments of a table differ."""
        if not begin:
            raise UsageError("from= is the older moment: a timestamp, or a time such as 5m or 2026-03-01T12:00")
        limit = _within(limit, _ROWS_MOST)
        async with (
            self._alone(),
            bounded(_LONG_S, "perco diff has no limit"),
            self._shelf.reading() as db,
            db.snapshot(**_when(begin)) as older,
            db.snapshot(**_when(end)) as newer,
        ):
            here = table_named(db, table)
            rows: list[dict[str, Any]] = []
            more = False
            async for change in differences(older, newer, here):
                if len(rows) == limit:
                    more = True
                    break
                cells = [
                    {"column": name, "before": _shown(before), "after": _shown(change.after[name])}
                    for name, before in change.before.items()
                ]
                rows.append({**_named(db, table, change.key), "cells": cells})
            return {"table": table, "from": older.start_ts, "to": newer.start_ts, "rows": rows, "more": more}


# ------------------------------------------------------------------ plain data


def _when(text: str) -> dict[str, Any]:
    """Arguments for `snapshot`: of a timestamp, of a time; "": now."""
    if not text:
        return {}
    if len(text) > _MOMENT_MOST:
        raise UsageError("that is no moment: give a timestamp, or a time such as 5m or 2026-03-01T12:00")
    return {"ts": int(text)} if text.isdecimal() else {"at": parse_moment(text)}


def _within(limit: int, most: int) -> int:
    if not 0 < limit <= most:
        raise UsageError(f"limit={limit}: give a number from 1 to {most}")
    return limit


def _bytes(ref: str) -> bytes:
    try:
        return bytes.fromhex(ref)
    except ValueError:
        raise UsageError(f"ref={ref!r} is no row: it is made of hexadecimal digits") from None


def _key(table: perco.Table[Any], ref: str) -> Any:
    """The key of a row by its `ref`."""
    try:
        return table.key.decode(_bytes(ref))
    except (ValueError, struct.error):
        raise UsageError(f"ref={ref!r} is no row of {table.title}") from None


def _named(db: perco.Database, table: str, key: Any) -> dict[str, Any]:
    """A row: its table, its key in readable form, and `ref`, its exact name for further questions."""
    here = table_named(db, table)
    return {"table": here.title, "key": shown(key, _KEY_WIDTH), "ref": here.row(key).hex()}


def _named_row(db: perco.Database, table: str, row: bytes) -> dict[str, Any]:
    """As `_named`, by the name of a row in the store."""
    return {
        "table": inside(db).catalogue.title(table),
        "key": shown(inside(db).known.key_of(table, row), _KEY_WIDTH),
        "ref": row.hex(),
    }


def _start(db: perco.Database, table: str, row: bytes) -> str:
    return shown(table_named(db, table).key.decode(row), _KEY_WIDTH) if row else ""


def _shown(value: Any) -> str | None:
    return None if value is None else shown(value, _CELL_WIDTH)


def _cell(row: perco.Row[Any], column: perco.Column[Any, Any]) -> str | None:
    return shown(row[column], _CELL_WIDTH) if column in row else None


def _whole(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= _VALUE_MOST else f"{text[:_VALUE_MOST]}... ({len(text)} characters)"


def _tree(db: perco.Database, traced: Traced, row: tuple[str, Any], budget: list[int]) -> dict[str, Any]:
    """A transaction, some of its cells and of the runs that followed: those of the row first."""
    budget[0] -= 1
    writes = sorted(traced.writes, key=lambda name: name[:2] != row)
    runs = sorted(traced.runs, key=lambda run: not concerns(run, row))
    kept = runs[: min(_LIST_MOST, max(budget[0], 0))]
    return {
        "commit_ts": traced.commit_ts,
        "observer": traced.observer,
        "on": None if traced.on is None else _cell_named(db, traced.on),
        "also": len(traced.also),
        "signal": traced.signal,
        "attempts": traced.attempts,
        "through": traced.through,
        "asked": traced.asked,
        "unsure": traced.unsure,
        "writes": [_cell_named(db, name) for name in writes[:_LIST_MOST]],
        "more_writes": max(len(writes) - _LIST_MOST, 0),
        "runs": [_tree(db, run, row, budget) for run in kept],
        "more_runs": len(runs) - len(kept),
    }


def _cell_named(db: perco.Database, name: Name) -> dict[str, Any]:
    table, key, column = name
    return {**_named(db, table, key), "column": column}
