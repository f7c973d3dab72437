"""Compares the tables of views with what their definition makes of the sources, at one moment (V7)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import perco.aio
import perco.sync
from perco.schema.codecs import encoded
from perco.schema.schema import Column, Table
from perco.txn.row import Row
from perco.txn.snapshot import Snapshot
from perco.views.cached import Cached, Later
from perco.views.declaring import Views
from perco.views.sinking import Delivered, Sinking, readable


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that is not what its view's definition makes of the sources.

    Attributes:
        view: the id of the view that gives the columns.
        key: of the row.
        expected, found: the values by column name; empty: no row.
        owner: the key of the source row, or the group, that gave the row that was found; None: unknown, or no row.
    """

    view: str
    table: str
    key: Any
    expected: dict[str, Any]
    found: dict[str, Any]
    owner: Any


@dataclass(slots=True)
class Checked:
    """The result of a check.

    Attributes:
        ts: the timestamp of the snapshot.
        rows: rows compared, by view; a row that two views write counts for both.
        digests: of what was expected, by view, in hex: equal only for equal tables.
        count: how many rows differ.
        differences: the first of them.
    """

    ts: int
    rows: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    count: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether no row differs."""
        return not self.count


Progress = Callable[[str, int], object]
Reads = Generator["Read | None", Row[Any] | None, Checked]


def _quiet(table: str, rows: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Read:
    """A scan that a check asks for: it takes the rows one by one, and then None."""

    table: Table[Any]
    columns: list[Column[Any, Any]]


async def check(
    views: Views,
    snap: Snapshot | perco.aio.Snapshot,
    *,
    differences_max: int = 20,
    progress: Progress = _quiet,
) -> Checked:
    """Compute the views from their sources at a snapshot, and compare the result with what the store has.

    The check reads one snapshot, so it runs beside writers. At a moment when changes wait for observers, it finds the
    rows that these have still to write: check when the store is idle, or expect differences. The sources and all that
    is made of them are held in memory. `check_blocking` is the same for snapshots of `perco.sync`.

    Args:
        differences_max: how many differences are returned in full.
        progress: called now and then with a table and how many of its rows have been read.

    Raises: whatever the functions of the views raise; UsageError for a row with two owners.
    """
    reads = _reads(views, snap.start_ts, differences_max, progress)
    read = next(reads)
    try:
        while True:
            assert read is not None
            async for row in snap.scan(read.table, columns=read.columns):
                reads.send(row)
            read = reads.send(None)
    except StopIteration as done:
        checked: Checked = done.value
        return checked


def check_blocking(
    views: Views, snap: perco.sync.Snapshot, *, differences_max: int = 20, progress: Progress = _quiet
) -> Checked:
    """`check` for blocking code. Raises: as `check`."""
    reads = _reads(views, snap.start_ts, differences_max, progress)
    read = next(reads)
    try:
        while True:
            assert read is not None
            for row in snap.scan(read.table, columns=read.columns):
                reads.send(row)
            read = reads.send(None)
    except StopIteration as done:
        checked: Checked = done.value
        return checked


def _reads(views: Views, ts: int, differences_max: int, progress: Progress) -> Reads:
    """The check, without I/O. Yields what to read, then takes its rows; None ends them."""
    sources: dict[Table[Any], dict[Any, dict[Column[Any, Any], Any]]] = {}
    for table, columns in views.sources.items():
        rows = sources[table] = {}
        row = yield Read(table, list(columns))
        while row is not None:
            rows[row.key] = {column: row[column] for column in columns if row[column] is not None}
            if len(rows) % 1000 == 0:
                progress(table.name, len(rows))
            row = yield None
        progress(table.name, len(rows))
    results: dict[Cached[Any, Any], dict[bytes, Any]] = {}
    for cached in views.cached_functions.values():
        stored = results[cached] = {}
        row = yield Read(cached.results.table, [cached.results])
        while row is not None:
            stored[row.key] = row[cached.results]
            row = yield None
    expected = views.build(sources, results=results)
    checked = Checked(ts)
    for view in views.declared.values():
        digest, count = blake2b(digest_size=16), 0
        for table, written in view.outputs.items():
            names = sorted(written, key=lambda column: column.name)
            rest = {
                key: kept
                for key, values in expected[table].items()
                if (kept := {column: values[column] for column in names if column in values})
            }
            for key, kept in rest.items():
                _add(digest, table, key, kept)
            count += len(rest)
            row = yield Read(table, [*names, view.owned[table]])
            while row is not None:
                found = {column: row[column] for column in names if row[column] is not None}
                wanted = rest.pop(row.key, {})
                if stored_values(found) != stored_values(wanted):
                    by = row[view.owned[table]]
                    owner = None if by is None else view.table.key.decode(by)
                    _note(checked, differences_max, view.id, table, row.key, wanted, found, owner)
                row = yield None
            for key, wanted in rest.items():
                _note(checked, differences_max, view.id, table, key, wanted, {}, None)
        checked.rows[view.id], checked.digests[view.id] = count, digest.hexdigest()
    for sinking in views.sinks.values():
        delivered = readable(sinking)
        if delivered is not None:
            yield from _sink(checked, sinking, delivered, differences_max)
    return checked


def _sink(
    checked: Checked, sinking: Sinking, rows: Iterable[Delivered], differences_max: int
) -> Generator[Read | None, Row[Any] | None, None]:
    """Compare the rows that a sink has with those of its table."""
    table, columns = sinking.table, {column.name: column for column in sinking.columns}
    found = {table.row(row.key): row for row in rows}
    digest, count = blake2b(digest_size=16), 0
    row = yield Read(table, list(sinking.columns))
    while row is not None:
        wanted = {column: row[column] for column in sinking.columns if row[column] is not None}
        has = found.pop(table.row(row.key), None)
        values = {} if has is None else {columns[name]: value for name, value in (has.values or {}).items()}
        _add(digest, table, row.key, wanted)
        count += 1
        if stored_values(values) != stored_values(wanted):
            _note(checked, differences_max, sinking.id, table, row.key, wanted, values, None)
        row = yield None
    for more in found.values():
        values = {columns[name]: value for name, value in (more.values or {}).items()}
        _note(checked, differences_max, sinking.id, table, more.key, {}, values, None)
    checked.rows[sinking.id], checked.digests[sinking.id] = count, digest.hexdigest()


def stored_values(values: Mapping[Column[Any, Any], Any]) -> dict[str, bytes]:
    """A row's values in stored form, by the names of their columns: values that are equal may differ there."""
    return {
        column.name: b"later " + value.key
        if type(value) is Later
        else encoded(column.codec, value, column, "value of ")
        for column, value in values.items()
    }


def shown_values(values: Mapping[Column[Any, Any], Any]) -> dict[str, Any]:
    """A row's values, by the names of their columns; those of cached functions that were not computed as text."""
    return {column.name: repr(value) if type(value) is Later else value for column, value in values.items()}


def _add(digest: Any, table: Table[Any], key: Any, values: dict[Column[Any, Any], Any]) -> None:
    for part in (table.name.encode(), table.row(key)):
        digest.update(b"%d " % len(part) + part)
    for name, data in sorted(stored_values(values).items()):
        digest.update(b"%d %d " % (len(name.encode()), len(data)) + name.encode() + data)


def _note(
    checked: Checked,
    differences_max: int,
    view: str,
    table: Table[Any],
    key: Any,
    expected: dict[Column[Any, Any], Any],
    found: dict[Column[Any, Any], Any],
    owner: Any,
) -> None:
    checked.count += 1
    if len(checked.differences) < differences_max:
        wanted, there = shown_values(expected), shown_values(found)
        checked.differences.append(Difference(view, table.title, key, wanted, there, owner))
