"""The definition itself: the views, computed from all source rows at once.

It is as plain as possible, so that it cannot go wrong in the same way as the incremental runs: no memory, no deltas, no
signals. Only the functions of the views, the exact sums and the order of values are the same.

V7  When no change waits, and none is on the failed list, the tables of the views equal this build of their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from perco.errors import UsageError
from perco.schema.schema import Column, Table
from perco.txn.row import Row
from perco.views.aggregates import Ordered, tallied
from perco.views.cached import Cached, Later
from perco.views.compiled import CoGrouped, Components, Each, Found, Grouped, Joined, View
from perco.views.components import labels
from perco.views.memory import Given, Where, fill, given, laters
from perco.views.rows import Group, Put, in_order

Rows = Mapping[Any, Mapping[Column[Any, Any], Any]]
"""A table's rows: by key, the values by column."""

Results = Mapping[Cached[Any, Any], Mapping[bytes, Any]]
"""Known values of cached functions, by the keys of their arguments."""

Puts = Callable[[], Iterable[Put[Any]]]
Stored = dict[Table[Any], dict[bytes, dict[Column[Any, Any], Any]]]


def build(
    declared: Iterable[View], sources: Mapping[Table[Any], Rows], results: Results
) -> dict[Table[Any], dict[Any, dict[Column[Any, Any], Any]]]:
    """See `Views.build`."""
    views = list(declared)
    stored: Stored = {}
    for table, rows in sources.items():
        at = stored.setdefault(table, {})
        for key, values in rows.items():
            at[table.row(key)] = {
                column: column.codec.decode(column.codec.encode(value))
                for column, value in values.items()
                if value is not None
            }
    for view in views:
        owners: dict[Where, Any] = {}
        rows_of_view: dict[Where, Given] = {}
        for owner, puts in owned(view, *(_rows(columns, stored) for columns in inputs_of(view))):
            try:
                gave = given(view.id, puts(), view.outputs)
            except Exception as error:
                error.add_note(f"view {view.id!r}, for {view.table.name}[{owner!r}]")
                raise
            for where, row in gave.items():
                if where in owners:
                    raise UsageError(
                        f"view {view.id!r} gives {row.table.name}[{row.key!r}] for {owners[where]!r} and for "
                        f"{owner!r}: a row has one owner"
                    )
                owners[where] = owner
                rows_of_view[where] = row
        _compute(rows_of_view.values(), results)
        for where, row in rows_of_view.items():
            _store(stored, where, row)
    written: dict[Table[Any], set[Column[Any, Any]]] = {}
    for view in views:
        for table, columns in view.outputs.items():
            written.setdefault(table, set()).update(columns)
    out: dict[Table[Any], dict[Any, dict[Column[Any, Any], Any]]] = {}
    for table, columns_of in written.items():
        rows_of = out[table] = {}
        for stored_key, values in sorted(stored.get(table, {}).items()):
            present = {column: value for column, value in values.items() if column in columns_of}
            if present:
                rows_of[table.key.decode(stored_key)] = present
    return out


def _compute(rows: Iterable[Given], results: Results) -> None:
    """Find the values of cached functions, among results or by calls."""
    late = [row for row in rows if row.later]
    by: dict[Cached[Any, Any], dict[bytes, Later]] = {}
    for later in laters(late):
        by.setdefault(later.cached, {})[later.key] = later
    found: dict[tuple[Cached[Any, Any], bytes], Any] = {}
    for cached, wanted in by.items():
        known = results.get(cached, {})
        missing = [later for key, later in wanted.items() if key not in known]
        found.update({(cached, key): known[key] for key in wanted if key in known})
        for at in range(0, len(missing), cached.batch):
            some = missing[at : at + cached.batch]
            for later, value in zip(some, cached.call(some), strict=True):
                if isinstance(value, Exception):
                    raise value
                found[cached, later.key] = value
    fill(late, {later: found[later.cached, later.key] for later in laters(late)})


def _rows(columns: Sequence[Column[Any, Any]], stored: Stored) -> list[Row[Any]]:
    """The rows that have a value in one of the columns, in the order of their keys."""
    table = columns[0].table
    found = []
    for row, values in sorted(stored.get(table, {}).items()):
        cells = {column: (values.get(column), 0) for column in columns}
        if any(value is not None for value, _ in cells.values()):
            found.append(Row(table.key.decode(row), cells))
    return found


def _store(stored: Stored, where: Where, row: Given) -> None:
    values = stored.setdefault(row.table, {}).setdefault(where[1], {})
    for column, value in row.values.items():
        values[column] = column.codec.decode(column.codec.encode(value))


def inputs_of(view: View) -> list[tuple[Column[Any, Any], ...]]:
    """The columns that a view reads, table by table."""
    if isinstance(view, CoGrouped):
        return [tuple(side.rows.columns) for side in view.sides]
    return [view.columns, tuple(view.rights.columns)] if isinstance(view, Joined) else [view.columns]


def owned(view: View, *rows: Iterable[Row[Any]]) -> Iterable[tuple[Any, Puts]]:
    """All owners that source rows make, each with a function that returns what it gives. `rows`: in the order of
    `inputs_of`."""
    if isinstance(view, CoGrouped):
        return _cogroups(view, rows)
    if isinstance(view, Joined):
        lefts, rights = rows
        return _joins(view, lefts, rights)
    (only,) = rows
    if isinstance(view, Each):
        return _each(view, only)
    return _nodes(view, only) if isinstance(view, Components) else _groups(view, only)


def _each(view: Each, rows: Iterable[Row[Any]]) -> Iterable[tuple[Any, Puts]]:
    for row in rows:
        yield row.key, partial(view.function, row)


def _groups(view: Grouped, rows: Iterable[Row[Any]]) -> Iterable[tuple[Any, Puts]]:
    members: dict[bytes, tuple[Any, list[Row[Any]]]] = {}
    for row in rows:
        group = view.members.key_of(row)
        if group is not None:
            members.setdefault(view.table.row(group), (group, []))[1].append(row)
    for _, (group, found) in sorted(members.items()):
        yield group, partial(view.function, group, group_of(view, found))


def _joins(view: Joined, lefts: Iterable[Row[Any]], rights: Iterable[Row[Any]]) -> Iterable[tuple[Any, Puts]]:
    matches: dict[bytes, list[Row[Any]]] = {}
    for row in rights:
        key = view.rights.key_of(row)
        if key is not None:
            matches.setdefault(view.key.encode(key), []).append(row)
    for row in lefts:
        key = view.key_of_left(row)
        yield row.key, partial(view.gives, row, () if key is None else matches.get(view.key.encode(key), ()))


def _cogroups(view: CoGrouped, rows: Iterable[Iterable[Row[Any]]]) -> Iterable[tuple[Any, Puts]]:
    found: dict[bytes, tuple[Any, list[Found]]] = {}
    for at, (side, some) in enumerate(zip(view.sides, rows, strict=True)):
        for row in some:
            key = side.rows.key_of(row)
            stored = view.table.row(key)
            if stored not in found:
                found[stored] = key, [[] if each.many else None for each in view.sides]
            of = found[stored][1]
            there = of[at]
            if not isinstance(there, list):
                of[at] = row
            elif side.first is None or len(there) < side.first:
                there.append(row)
    for _, (key, of) in sorted(found.items(), key=lambda item: item[0]):
        yield key, partial(view.gives, key, of)


def _nodes(view: Components, links: Iterable[Row[Any]]) -> Iterable[tuple[Any, Puts]]:
    for node, label in labels(view, (link.key for link in links)):
        yield node, partial(view.gives, node, label)


def group_of(view: Grouped, rows: list[Row[Any]]) -> Group[Any]:
    """The group that these members are, as the view's function reads it."""
    if view.deltas is None:
        return Group(rows if view.first is None else rows[: view.first])
    ordered: dict[Ordered, list[tuple[Any, Any]]] = {}
    for each in view.orders:
        if each.first:
            ordered[Ordered(each.column, first=each.first)] = in_order(rows, each.column, each.first, last=False)
        if each.last:
            ordered[Ordered(each.column, last=each.last)] = in_order(rows, each.column, each.last, last=True)
    tally = tallied(view.sums, ([row[each.column] for each in view.sums] for row in rows))
    return Group(None, tally, view.sums, ordered)
