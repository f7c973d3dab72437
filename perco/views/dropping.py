"""Drops views: unregisters their observers, retracts their rows, and removes what perco kept for them.

It needs no declaration of the view: the catalogue names its observers and hidden columns, and the memories of its
owners list the rows. So it also drops a view that the program no longer declares.

V15 First the observers are dropped (N12), so that no run gives rows again. Then transactions of a bounded size take the
    rows out of the tables and out of their owners' memories, together (V1). Last, the copies, aggregates and marks are
    removed. So a drop may be interrupted at any moment, and another one completes it. Views and observers that read the
    rows are notified of each retraction, as of any change. A column that another view writes now is left as it is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import perco.aio
import perco.aio.calling
import perco.sync
import perco.sync.calling
from perco.database.database import Database
from perco.database.inside import inside
from perco.errors import UsageError
from perco.schema.catalogue import Catalogue
from perco.schema.codecs import BYTES
from perco.schema.schema import Column, Table
from perco.txn.inside import read_encoded, write_encoded
from perco.txn.transaction import Transaction
from perco.views import wiring
from perco.views.declaring import Views
from perco.views.memory import Memory, Where
from perco.views.rebuilding import for_each

_CELLS_MAX: Final = 1000  # that a transaction deletes
_KINDS: Final = ("members", "rights", "sides")  # of views for single rows, which keep copies for others
_PARTS: Final = {"groups": set[str](), "keys": set[str](), "deltas": {"delta"}, "lefts": {"left"}, "sides": {"side"}}


@dataclass(slots=True)
class Dropped:
    """The rows and records that a drop of a view has removed, or would remove.

    Attributes:
        observers: ids of the view's observers.
        owners: source rows, groups or left rows that gave rows, or keep something of the view.
        rows: how many derived rows are retracted, by table.
        kept: cells that perco kept for the view: copies, aggregates, marks of owners.
        changes: changes that waited for the observers, or were on the failed list.
    """

    view: str
    observers: tuple[str, ...] = ()
    owners: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    changes: int = 0


Progress = Callable[[Dropped], object]


def _quiet(dropped: Dropped) -> None:
    pass


async def would_drop(views: Views, db: Database | perco.aio.Database, view: str) -> Dropped:
    """What `drop` would remove; nothing is changed. Raises: as `drop`. `would_drop_blocking` is the same for blocking
    code."""
    if isinstance(db, perco.aio.Database):
        return await perco.aio.calling.ask_for(db, _would_drop, views, view)
    return await _would_drop(db, views, view)


def would_drop_blocking(views: Views, db: perco.sync.Database, view: str) -> Dropped:
    """`would_drop` for blocking code. Raises: as `drop`."""
    return perco.sync.calling.ask_for(db, _would_drop, views, view)


async def drop(views: Views, db: Database | perco.aio.Database, view: str, *, progress: Progress = _quiet) -> Dropped:
    """Drop a view, or a sink: delete all rows that it gave, and all that perco keeps for it, and unregister its
    observers (V15).

    The store may be in use meanwhile, but no worker may have the view. If the call is interrupted, call it again. Views
    that read the rows follow as usual, so let a worker run for them. A program that opens the store and still declares
    the view registers it again, as a new one. Rows that a sink has delivered stay. `drop_blocking` is the same for
    blocking code.

    Args:
        views: the views that your program declares now, with or without this one. Their columns and observers are not
            touched.
        db: opened with the schema of a program that has the view's tables, or without any (`perco.open(path)`).
        view: its id.
        progress: called now and then, with what has been removed so far.

    Raises: UsageError for a view that the store does not have, or that a running worker has; ReadOnly; whatever
    `Database.run` raises.
    """
    if isinstance(db, perco.aio.Database):
        return await perco.aio.calling.ask_for(db, _drop, views, view, progress)
    return await _drop(db, views, view, progress)


def drop_blocking(views: Views, db: perco.sync.Database, view: str, *, progress: Progress = _quiet) -> Dropped:
    """`drop` for blocking code; `progress` is called on the store's own thread. Raises: as `drop`."""
    return perco.sync.calling.ask_for(db, _drop, views, view, progress)


# ------------------------------------------------------------ the plan


@dataclass(slots=True)
class _Plan:
    """The data of a view in a store.

    Attributes:
        observers: ids of its observers, those that are dropped already included.
        memories: the hidden columns with its owners' memories.
        marks: by table, the hidden column that names a row's owner (V5).
        own: the tables that perco keeps for it alone.
        kept: by table, all columns that perco keeps for it, except memories.
        spared: the columns that other views write now, as (table, column).
    """

    view: str
    tables: dict[str, Table[Any]]
    observers: list[str]
    memories: list[Column[Any, bytes]]
    marks: dict[str, Column[Any, bytes]]
    own: set[str]
    kept: list[tuple[Table[Any], list[Column[Any, Any]]]]
    spared: set[tuple[str, str]]
    columns: dict[tuple[str, str], Column[Any, Any]] = field(default_factory=dict)

    def columns_of(self, table: str, names: Sequence[str]) -> list[Column[Any, Any]]:
        """The columns of a table that the view has written, but for those that another view writes now."""
        found = []
        for name in names:
            where = table, name
            if where not in self.spared:
                if where not in self.columns:
                    known = {column.first_name: column for column in self.tables[table].columns.values()}
                    self.columns[where] = known.get(name) or _column(self.tables[table], name)
                found.append(self.columns[where])
        return found


def _column(table: Table[Any], name: str) -> Column[Any, Any]:
    return table.columns[name] if name in table.columns else Column(table, name, BYTES, None)


def _plan(db: Database, views: Views, view: str) -> _Plan:
    """Raises: UsageError."""
    catalogue, tables = inside(db).catalogue, db.schema.tables
    own = {name for name, entry in catalogue.tables.items() if _is_own(views, view, name, catalogue)}
    memories, marks, kept = [], {}, []
    for name, entry in catalogue.tables.items():
        hidden = [column for column in _hidden(view) if column in entry.columns]
        if name in own:
            hidden = [column for column, found in entry.columns.items() if not found.is_signal]
        remembered = [column for column in _memories(view) if column in entry.columns]
        if not hidden and not remembered:
            continue
        if name not in tables:
            raise UsageError(
                f"view {view!r} has rows in table {name!r}, which this program does not declare: open the store "
                "without a schema to drop the view"
            )
        table = tables[name]
        memories += [_column(table, column) for column in remembered]
        if f"_owner {view}" in entry.columns:
            marks[name] = _column(table, f"_owner {view}")
        kept.append((table, [_column(table, column) for column in hidden if column not in _memories(view)]))
    observers = _observers(views, view, catalogue)
    if not observers and not memories:
        known = sorted({o.view for o in views.schema.observers.values() if o.view})
        raise UsageError(f"the store does not have view {view!r}; the program declares {', '.join(map(repr, known))}")
    others = [each for each in views.declared.values() if each.id != view]
    spared = {(c.table.name, c.first_name) for each in others for columns in each.outputs.values() for c in columns}
    return _Plan(view, dict(tables), observers, memories, marks, own, kept, spared)


def _memories(view: str) -> list[str]:
    return [f"_view {view}", *(f"_view {view}.{kind}" for kind in _KINDS)]


def _hidden(view: str) -> list[str]:
    """The names of the hidden columns that perco keeps for a view, except memories."""
    return [f"{name} {view}" for name in ("_owner", "_kept", "_turned", "_reached", "_sunk")]


def _is_own(views: Views, view: str, name: str, catalogue: Catalogue) -> bool:
    """Whether perco keeps a table for the view alone: it has the name and the columns of such a table, and the program
    has not declared it as its own. Copies have the columns of their source, so they are told by the memory there: a
    table of another program may have such a name, too."""
    declared = views.declared.get(view)
    if declared is not None and name in {table.name for table in wiring.own_tables(declared)}:
        return True
    if not name.startswith(f"{view}.") or name in views.schema.tables:
        return False
    part = name.removeprefix(f"{view}.")
    entry = catalogue.tables[name]
    columns = {column for column, found in entry.columns.items() if not found.is_signal and column[:1] != "_"}
    if part in _PARTS:
        return columns <= _PARTS[part]
    if part in _KINDS:
        return any(f"_view {name}" in source.columns for source in catalogue.tables.values())
    return part.startswith("by ") and columns == {"value"}


def _observers(views: Views, view: str, catalogue: Catalogue) -> list[str]:
    """The ids of a view's observers in a store, those that have been dropped already included."""
    heads = (f"{view}: ", *(f"{view}.{kind}: " for kind in _KINDS))
    known = {**{each.id: None for each in catalogue.dropped.values()}, **catalogue.observers}
    others = {id for id, observer in views.schema.observers.items() if observer.view != view}
    found = [id for id in known if (id == view or id.startswith(heads)) and id not in others]
    # Observers of views have fingerprints of their code, if the source could be read. One that is written by hand, and
    # happens to have such a name, has none.
    coded = {id for id in found if id in catalogue.observers and catalogue.observers[id].code}
    return [id for id in found if not coded or id in coded or id not in catalogue.observers]


# ------------------------------------------------------------ the drop


async def _would_drop(db: Database, views: Views, view: str) -> Dropped:
    await inside(db).keeper.catch_up()
    plan = _plan(db, views, view)
    registered = [id for id in plan.observers if id in inside(db).catalogue.observers]
    waiting = await inside(db).waiting.counts()
    dropped = Dropped(view, tuple(registered), changes=sum(waiting.get(id, 0) for id in registered))
    for memory in plan.memories:
        async with db.snapshot() as snap:
            async for row in snap.scan(memory.table, columns=[memory]):
                dropped.owners += memory.name == f"_view {view}"
                for name, _ in Memory.unpack(row[memory]).rows:
                    if name not in plan.own:
                        dropped.rows[name] = dropped.rows.get(name, 0) + 1
    for table, columns in plan.kept:
        if columns:
            async with db.snapshot() as snap:
                async for row in snap.scan(table, columns=columns):
                    dropped.kept += sum(row[column] is not None for column in columns)
    return dropped


async def _drop(db: Database, views: Views, view: str, progress: Progress) -> Dropped:
    inside(db).engine.usable(writing=True)
    await inside(db).keeper.catch_up()
    plan = _plan(db, views, view)
    registered = tuple(id for id in plan.observers if id in inside(db).catalogue.observers)
    dropped = Dropped(view, registered)
    dropped.changes = sum((await db.drop_observer(plan.observers)).values())  # N12: first, so that no run gives rows
    for memory in plan.memories:
        await _retract_all(db, plan, memory, dropped, progress)
    for table, columns in plan.kept:
        if columns:
            await _remove(db, table, columns, dropped, progress)
    progress(dropped)
    return dropped


async def _retract_all(
    db: Database, plan: _Plan, memory: Column[Any, bytes], dropped: Dropped, progress: Progress
) -> None:
    """Retract what all owners of a table have given."""

    async def owners() -> AsyncGenerator[bytes, None]:
        async with db.snapshot() as snap:
            async for row in snap.scan(memory.table, columns=[memory]):
                yield memory.table.row(row.key)

    async def retract(owner: bytes) -> None:
        more = True
        while more:
            rows, more = await db.run(_retract, plan, memory, owner)
            for name, count in rows.items():
                dropped.rows[name] = dropped.rows.get(name, 0) + count
        dropped.owners += memory.name == f"_view {plan.view}"
        if dropped.owners % 1000 == 0:
            progress(dropped)

    await for_each(owners(), retract)


async def _retract(
    txn: Transaction, plan: _Plan, memory: Column[Any, bytes], owner: bytes
) -> tuple[dict[str, int], bool]:
    """Take some rows of an owner out of their tables and out of its memory (V1). Returns how many these were, by table,
    and whether rows are left."""
    [[stored]] = await read_encoded(txn, memory.table, [owner], [memory])
    found, some = Memory.unpack(stored), list[Where]()
    cells = 0
    for where in found.rows:
        cells += len(found.columns[where[0]]) + 1
        if some and cells > _CELLS_MAX:
            break
        some.append(where)
    by_table: dict[str, list[bytes]] = {}
    for name, row in some:
        del found.rows[name, row]
        if name not in plan.own:  # these are emptied afterwards
            by_table.setdefault(name, []).append(row)
    counts = {name: await _delete(txn, plan, name, rows, owner, found.columns[name]) for name, rows in by_table.items()}
    left = bool(found.rows)
    write_encoded(txn, memory, owner, found.pack() if left else None)
    return counts, left


async def _delete(
    txn: Transaction, plan: _Plan, name: str, rows: Sequence[bytes], owner: bytes, names: Sequence[str]
) -> int:
    """Delete the values that an owner has given in some rows of a table. Returns how many rows were its own."""
    columns, mark = plan.columns_of(name, names), plan.marks.get(name)
    read = columns if mark is None else [*columns, mark]
    deleted = 0
    for row, values in zip(rows, await read_encoded(txn, plan.tables[name], rows, read), strict=True):
        if mark is not None and values[-1] != owner:
            continue  # V5: another owner has taken it over
        deleted += 1
        for column, value in zip(read, values, strict=True):
            if value is not None:
                write_encoded(txn, column, row, None)
    return deleted


async def _remove(
    db: Database, table: Table[Any], columns: list[Column[Any, Any]], dropped: Dropped, progress: Progress
) -> None:
    """Delete columns of all rows of a table, some rows in each transaction."""

    async def pages() -> AsyncGenerator[list[bytes], None]:
        rows: list[bytes] = []
        async with db.snapshot() as snap:
            async for row in snap.scan(table, columns=columns):
                rows.append(table.row(row.key))
                if len(rows) * len(columns) >= _CELLS_MAX:
                    yield rows
                    rows = []
        if rows:
            yield rows

    async def remove(rows: list[bytes]) -> None:
        dropped.kept += await db.run(_remove_some, table, columns, rows)
        progress(dropped)

    await for_each(pages(), remove)


async def _remove_some(txn: Transaction, table: Table[Any], columns: list[Column[Any, Any]], rows: list[bytes]) -> int:
    removed = 0
    for row, values in zip(rows, await read_encoded(txn, table, rows, columns), strict=True):
        for column, value in zip(columns, values, strict=True):
            if value is not None:
                write_encoded(txn, column, row, None)
                removed += 1
    return removed
