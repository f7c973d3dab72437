"""Explains a derived row: which inputs, which version and which code made it, and whether they make it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import perco.aio
import perco.aio.calling
import perco.sync
import perco.sync.calling
from perco.errors import UsageError
from perco.schema.schema import Table
from perco.txn.inside import engine_of
from perco.txn.row import Row
from perco.txn.snapshot import Snapshot
from perco.views import batch
from perco.views.cached import find
from perco.views.checking import shown_values, stored_values
from perco.views.code import place_of
from perco.views.compiled import CoGrouped, Components, Grouped, Joined, View
from perco.views.components import component, neighbours
from perco.views.declaring import Views
from perco.views.joining import matches
from perco.views.memory import Memory, fill, given, laters
from perco.views.running import found_of, is_there, members

MEMBERS_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class Input:
    """A row that a view's function read. Attributes: by column name, `values` and the `commit_ts` of each."""

    table: str
    key: Any
    values: dict[str, Any]
    commit_ts: dict[str, int]


@dataclass(slots=True)
class Reason:
    """Why a row has the values that one view gives it.

    Attributes:
        table, key: the row; `values`: by column name, of the view's columns.
        owner: the source row, group or left row that gave it; None: no view did.
        version: of the view whose run gave it; 0: no view did.
        newest: the version that the program declares.
        function: where the view's function is: "FILE:LINE, NAME"; of components, "perco".
        code: the view's fingerprint (`Views.fingerprint`); `registered`: the one with which the newest version was
            registered. "": unknown.
        inputs: the rows that the owner's run reads; `more`: how many others there are.
        again: what the function gives for these inputs now; empty: not this row; None: not computed.
        error: what the function raised, or why it was not called.
    """

    view: str
    table: str
    key: Any
    values: dict[str, Any]
    owner: Any
    version: int
    newest: int
    function: str
    code: str
    registered: str
    inputs: list[Input] = field(default_factory=list)
    more: int = 0
    again: dict[str, Any] | None = None
    error: Exception | None = None
    same: bool = False
    """Whether the function gives the same values again, byte by byte in stored form."""


async def why(
    views: Views,
    snap: Snapshot | perco.aio.Snapshot,
    table: Table[Any],
    key: Any,
    *,
    inputs_max: int = 20,
    members_max: int = MEMBERS_MAX,
) -> list[Reason]:
    """Explain a row, as of a snapshot: for each view that gives it values, from which inputs they came, and whether
    the view's function makes the same bytes of them again. `why_blocking` is the same for blocking code.

    For a past moment, take the snapshot with `ts=` or `at=`. The function is the program's present one.

    Args:
        inputs_max: how many inputs are returned for each view.
        members_max: a group with more members is not computed again: `Reason.error` says so.

    Returns the reasons, in the order of the views' declaration; none if no view gives the row any value.

    Raises: UsageError if no view writes the table.
    """
    if isinstance(snap, perco.aio.Snapshot):
        return await perco.aio.calling.ask_for(snap, _why, views, table, key, inputs_max, members_max)
    return await _why(snap, views, table, key, inputs_max, members_max)


def why_blocking(
    views: Views,
    snap: perco.sync.Snapshot,
    table: Table[Any],
    key: Any,
    *,
    inputs_max: int = 20,
    members_max: int = MEMBERS_MAX,
) -> list[Reason]:
    """`why` for blocking code. Raises: as `why`."""
    return perco.sync.calling.ask_for(snap, _why, views, table, key, inputs_max, members_max)


async def _why(
    snap: Snapshot, views: Views, table: Table[Any], key: Any, inputs_max: int, members_max: int
) -> list[Reason]:
    writers = [view for view in views.declared.values() if table in view.outputs]
    if not writers:
        raise UsageError(
            f"no view writes table {table.title!r}: programs wrote its rows; perco trace shows what followed"
        )
    found = [await _reason(views, view, snap, table, key, inputs_max, members_max) for view in writers]
    return [reason for reason in found if reason is not None]


async def _reason(
    views: Views,
    view: View,
    snap: Snapshot,
    table: Table[Any],
    key: Any,
    inputs_max: int,
    members_max: int,
) -> Reason | None:
    columns, mark = sorted(view.outputs[table], key=lambda column: column.name), view.owned[table]
    there = engine_of(snap).known.catalogue.tables.get(table.name)
    if there is None or mark.name not in there.columns:
        return None  # the store does not know the view yet
    columns = [column for column in columns if column.name in there.columns]
    row = await snap.row(table, key, [*columns, mark])
    values = {column: row[column] for column in columns if row[column] is not None}
    by = row[mark]
    if not values:
        return None
    owner = None if by is None else view.table.key.decode(by)
    stored = None if by is None else (await snap.row(view.table, owner, [view.memory]))[view.memory]
    memory = Memory.unpack(stored)
    where = table.name, table.row(key)
    reason = Reason(
        view.id,
        table.title,
        row.key,
        shown_values(values),
        owner,
        memory.version if where in memory.rows else 0,
        view.version,
        "perco" if isinstance(view, Components) else place_of(view.made_of[0]),
        views.fingerprint(view.id),
        _registered(views, view, snap),
    )
    if by is None:
        return reason
    try:
        inputs, puts = await _computed(view, snap, owner, members_max)
        reason.inputs = [await _input(snap, table, row) for table, row in inputs[:inputs_max]]
        reason.more = len(inputs) - len(reason.inputs)
        again = given(view.id, () if puts is None else puts(), view.outputs).get(where)
        if again is not None:
            fill([again], await find(snap, laters([again]), compute=False))
    except Exception as error:
        reason.error = error
        return reason
    reason.again = {} if again is None else shown_values(again.values)
    reason.same = again is not None and stored_values(again.values) == stored_values(values)
    return reason


async def _computed(
    view: View, snap: Snapshot, owner: Any, members_max: int
) -> tuple[Sequence[tuple[Table[Any], Row[Any]]], batch.Puts | None]:
    """The inputs of an owner's run, and a function that returns what it gives."""
    if isinstance(view, Grouped):
        rows = await members(view, snap, owner, members_max)
        found = list(batch.owned(view, rows))
        return [(view.members.source, row) for row in rows], found[0][1] if found else None
    if isinstance(view, CoGrouped):
        sides = await found_of(view, snap, owner)
        read: list[tuple[Table[Any], Row[Any]]] = []
        for side, there in zip(view.sides, sides, strict=True):
            some = there if isinstance(there, list) else [] if there is None else [there]
            read += [(side.rows.source, each) for each in some]
        return read, partial(view.gives, owner, sides) if read else None
    if isinstance(view, Components):
        links = [await snap.row(view.links, link, view.columns) for link in await neighbours(view, snap, owner)]
        label = min(await component(view, snap, owner), key=view.table.row)
        return [(view.links, link) for link in links], partial(view.gives, owner, label) if links else None
    row = await snap.row(view.table, owner, view.columns)
    inputs = [(view.table, row)]
    if not is_there(view, row):
        return [], None
    rights: list[Row[Any]] = []
    if isinstance(view, Joined) and (key := view.on(row)) is not None:
        rights = await matches(view, snap, owner, key)
        inputs += [(view.rights.source, right) for right in rights]
    ((_, puts),) = batch.owned(view, [row], rights) if isinstance(view, Joined) else batch.owned(view, [row])
    return inputs, puts


async def _input(snap: Snapshot, table: Table[Any], row: Row[Any]) -> Input:
    """An input, with the commit timestamps of the source row. (The function may have read a copy.)"""
    columns = [table.columns[name] for name in row.values()]
    source = await snap.row(table, row.key, columns)
    stamps = {
        column.name: (
            source if stored_values({column: source[column]}) == stored_values({column: row[column]}) else row
        )
        for column in columns
        if source[column] is not None
    }
    return Input(table.title, row.key, row.values(), {c.name: stamps.get(c.name, row).commit_ts(c) for c in columns})


def _registered(views: Views, view: View, snap: Snapshot) -> str:
    known = engine_of(snap).known.catalogue.observers
    found = {known[id].code for id in views.observers(view.id) if id in known and known[id].version == view.version}
    return found.pop() if len(found) == 1 else ""
