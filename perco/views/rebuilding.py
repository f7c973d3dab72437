"""Rebuilds views: makes their tables what the definition says, whatever they hold now, while writers go on.

For each owner, a transaction calls the function, reads the rows that are there, and writes the difference between the
two. So it does not rely on the owner's memory, and mends that, too. Last, the rows that no owner gave are deleted.

V1  The transaction that mends rows also mends the owner's memory.
V2  It conflicts with a run for the same owner that gives other rows. For a source row, it reads the inputs under a read
    lock (T14): if they change meanwhile, it fails and tries again; if they change later, the observer's run sees what
    it wrote.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import trio

import perco.aio
import perco.aio.calling
import perco.sync
import perco.sync.calling
from perco.database.database import Database
from perco.database.inside import inside
from perco.errors import TransientError, UsageError
from perco.schema.schema import Table
from perco.txn.engine import Engine
from perco.txn.inside import lock, size_of
from perco.txn.transaction import Transaction
from perco.views.cached import find
from perco.views.checking import stored_values
from perco.views.compiled import CoGrouped, Components, Each, Grouped, Joined, Owners, View, codecs_of, key_of
from perco.views.components import component, neighbours
from perco.views.declaring import Views
from perco.views.memory import Given, Memory, Where, digest_of, fill, given, laters
from perco.views.running import (
    earlier,
    found_of,
    group_now,
    has_members,
    in_order,
    is_there,
    puts,
    remember,
    table_of,
    telling,
    write,
)
from perco.views.sinking import Delivered, Sinking, readable

T = TypeVar("T")

_AT_ONCE: Final = 16  # transactions
_TRIES: Final = 10  # for an owner that others change all the time, each of many attempts
_PAUSE_S: Final = 0.5


@dataclass(slots=True)
class Rebuilt:
    """The result of a rebuild of one view.

    Attributes:
        owners: source rows, groups or left rows that were computed; of a sink, rows that were delivered.
        mended: of these, how many had rows, or a memory, that were not what the definition says.
        strays: rows that no owner gave, and that were deleted; in a sink, those that the table does not have.
    """

    view: str
    owners: int = 0
    mended: int = 0
    strays: int = 0


Progress = Callable[[Rebuilt], object]


def _quiet(rebuilt: Rebuilt) -> None:
    pass


async def rebuild(
    views: Views, db: Database | perco.aio.Database, view: str | None = None, *, progress: Progress = _quiet
) -> list[Rebuilt]:
    """Make the tables of views what their definition says, whatever they hold now.

    Use it if a program has written to these tables by mistake, or after a change of code without a new version. Only
    rows that differ are written. The store may be in use meanwhile. Observers of these tables are notified as ever, so
    let a worker run. If it is interrupted, call it again. `rebuild_blocking` is the same for blocking code.

    Args:
        view: only this one, or this sink, by its id; by default, all in the order of their declaration, and then the
            sinks. To a sink, all rows are delivered again.
        progress: called now and then, with what has been done to the present view.

    Returns what was done, by view.

    Raises: UsageError for an unknown view; what the functions of the views raise; whatever `Database.run` raises.
    """
    if isinstance(db, perco.aio.Database):
        return await perco.aio.calling.ask_for(db, _rebuild, views, view, progress)
    return await _rebuild(db, views, view, progress)


def rebuild_blocking(
    views: Views, db: perco.sync.Database, view: str | None = None, *, progress: Progress = _quiet
) -> list[Rebuilt]:
    """`rebuild` for blocking code; `progress` is called on the store's own thread. Raises: as `rebuild`."""
    return perco.sync.calling.ask_for(db, _rebuild, views, view, progress)


async def _rebuild(db: Database, views: Views, view: str | None, progress: Progress) -> list[Rebuilt]:
    out = []
    chosen = views.chosen(view) if view not in views.sinks else []
    for each in chosen:
        must_be_registered(views, each.id, inside(db).engine)
    for each in chosen:
        rebuilt = Rebuilt(each.id)
        if isinstance(each, Grouped | Joined | Components) and isinstance(each.copier, Each):
            await _all(each.copier, db, rebuilt, progress)
        await _all(each, db, rebuilt, progress)
        progress(rebuilt)
        out.append(rebuilt)
    for id, sinking in views.sinks.items():
        if view in (None, id):
            out.append(await _deliver(sinking, db, progress))
    return out


def must_be_registered(views: Views, id: str, engine: Engine) -> None:
    """Raises: UsageError if the store does not know the view, or knows another version."""
    known = engine.known.catalogue.observers
    for observer in views.observers(id):
        entry, version = known.get(observer), views.declared[id].version
        if entry is None or entry.version != version:
            what = "does not know it" if entry is None else f"has version {entry.version}"
            raise UsageError(
                f"the program declares version {version} of view {id!r}, and the store {what}. Run the program first: "
                "when it opens the store for writing, it registers its views"
            )


async def _deliver(sinking: Sinking, db: Database, progress: Progress) -> Rebuilt:
    """Deliver all rows of a table again; and for rows that a sink has, and the table has not, that they are gone."""
    rebuilt = Rebuilt(sinking.id)
    engine = inside(db).engine

    async def deliver(row: Delivered) -> None:
        await sinking.deliver(engine, row)
        rebuilt.owners += row.values is not None
        rebuilt.strays += row.values is None
        if (rebuilt.owners + rebuilt.strays) % 1000 == 0:
            progress(rebuilt)

    async def rows() -> AsyncGenerator[Delivered, None]:
        async with db.snapshot() as snap:
            there = set()
            async for row in snap.scan(sinking.table, columns=sinking.columns):
                there.add(sinking.table.row(row.key))
                yield Delivered(row.key, row.values(), snap.start_ts)
            for has in await trio.to_thread.run_sync(lambda: list(readable(sinking) or ())):
                if sinking.table.row(has.key) not in there:
                    yield Delivered(has.key, None, snap.start_ts)

    await for_each(rows(), deliver)
    progress(rebuilt)
    return rebuilt


async def _all(view: View, db: Database, rebuilt: Rebuilt, progress: Progress) -> None:
    """Mend the rows of all owners, and then delete the strays."""
    # A source row counts once, not again for its copy.
    counted = Rebuilt(view.id) if isinstance(view, Each) and view.tells is not None else rebuilt

    busy: list[Any] = []

    async def mend(owner: Any) -> None:
        try:
            mended = await db.run(_mend, view, owner)
        except TransientError:  # its rows change all the time: come back later
            busy.append(owner)
            return
        except Exception as error:
            error.add_note(f"view {view.id!r}, for {view.table.name}[{owner!r}]")
            raise
        counted.mended += mended
        counted.owners += 1
        if counted.owners % 1000 == 0:
            progress(rebuilt)

    async def stray(found: tuple[Table[Any], Any]) -> None:
        dropped = await db.run(_drop_stray, view, *found)
        rebuilt.strays += dropped

    await for_each(_owners(view, db), mend)
    for owner in busy:
        await _until_done(db, view, owner)
        counted.owners += 1
    await for_each(_strays(view, db), stray)


async def _until_done(db: Database, view: View, owner: Any) -> None:
    """Mend the rows of an owner beside transactions that conflict all the time. Raises: TransientError in the end."""
    for left in range(_TRIES, 0, -1):
        try:
            await db.run(_mend, view, owner)
        except TransientError:
            if left == 1:
                raise
            await trio.sleep(_PAUSE_S)
        else:
            return


async def for_each(items: AsyncGenerator[T, None], task: Callable[[T], Awaitable[None]]) -> None:
    """Call a function with each item, some at a time. Raises the first error of a call, not an ExceptionGroup."""
    send, receive = trio.open_memory_channel[T](0)
    errors: list[Exception] = []

    async def take(scope: trio.CancelScope) -> None:
        try:
            async for item in receive:
                await task(item)
        except Exception as error:
            errors.append(error)
            scope.cancel()

    try:
        async with trio.open_nursery() as nursery, send, aclosing(items):
            for _ in range(_AT_ONCE):
                nursery.start_soon(take, nursery.cancel_scope)
            async for item in items:
                await send.send(item)
    except BaseExceptionGroup as group:  # of the scan, or a cancellation
        raise _first(group) from None
    if errors:
        raise errors[0]


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# ------------------------------------------------------------ owners


async def _owners(view: View, db: Database) -> AsyncGenerator[Any, None]:
    """The keys of all rows that give something, or gave something."""
    if isinstance(view, Grouped):
        copies = view.members
        last: Any = None
        async with db.snapshot() as snap:
            async for copy in snap.scan(copies.table, columns=list(copies.columns.values())):
                group = copies.split(copy.key)[0]
                if group != last:
                    last = group
                    yield group
            async for row in snap.scan(view.table, columns=[view.memory, view.kept]):
                if not await has_members(view, snap, row.key):
                    yield row.key
            parts = len(codecs_of(view.table.key))
            for column in [*view.orders.values(), *([view.deltas] if view.deltas is not None else [])]:
                last = None
                async for left in snap.scan(column.table, columns=[column]):
                    group = key_of(view.table.key, left.key[:parts])
                    if group != last:
                        last = group
                        row = await snap.row(view.table, group, [view.memory, view.kept])
                        if not row.values() and not await has_members(view, snap, group):
                            yield group
        return
    async with db.snapshot() as snap:
        if isinstance(view, CoGrouped):
            keys: set[bytes] = set()
            for each in view.sides:
                async for source in snap.scan(each.rows.source, columns=list(each.rows.columns)):
                    keys.add(view.table.row(each.rows.split(source.key)[0]))
            async for row in snap.scan(view.table, columns=[view.memory]):
                keys.add(view.table.row(row.key))
            for stored in sorted(keys):
                yield view.table.key.decode(stored)
            return
        if isinstance(view, Components):
            seen: set[bytes] = set()
            async for side in snap.scan(view.sides.table, columns=[view.sides]):
                node = view.ends(side.key)[0]
                if view.table.row(node) not in seen:
                    seen.update(map(view.table.row, await component(view, snap, node)))
                    yield node
            async for row in snap.scan(view.table, columns=[view.memory]):
                if not await neighbours(view, snap, row.key, limit=1):
                    yield row.key
            return
        async for row in snap.scan(view.table, columns=[view.memory, *view.columns]):
            yield row.key


async def _mend(txn: Transaction, view: View, owner: Any) -> bool:
    """Compute what an owner gives, and write what is not there. Returns whether anything was written."""
    if isinstance(view, Components):
        return await _mend_nodes(txn, view, owner)
    if isinstance(view, CoGrouped):
        after = given(view.id, view.gives(owner, await found_of(view, txn, owner)), view.writes)
        known: bytes | None = await txn.get(view.memory, owner)
        return await _mend_rows(txn, view, owner, known, after, False)
    if isinstance(view, Grouped):
        row = await txn.row(view.table, owner, [view.memory, view.kept])
        group = await group_now(view, txn, owner, row[view.kept], recount=True)
        after = given(view.id, () if group is None else view.function(owner, group), view.writes)
        seen = False
    else:
        row = await txn.row(view.table, owner, [*view.columns, view.memory], lock=True)  # V2
        after = given(view.id, await puts(view, txn, owner, row), view.writes)
        seen = view.several and is_there(view, row)
    return await _mend_rows(txn, view, owner, row[view.memory], after, seen)


async def _mend_nodes(txn: Transaction, view: Components, node: Any) -> bool:
    """Mend the labels of a node's component."""
    linked = bool(await neighbours(view, txn, node, limit=1))
    nodes = await component(view, txn, node)
    least, mended = min(nodes, key=view.table.row), False
    for each in nodes:
        lock(txn, view.label, each)  # V13
        after = given(view.id, view.gives(each, least if linked else None), view.writes)
        stored = await txn.get(view.memory, each)
        mended = await _mend_rows(txn, view, each, stored, after, False) or mended
    return mended


async def _mend_rows(
    txn: Transaction, view: View, owner: Any, stored: bytes | None, after: dict[Where, Given], seen: bool
) -> bool:
    """Write what an owner's rows and memory should be. `seen`: the memory says how far the owner's runs have seen."""
    unwritten = size_of(txn)  # but for what a group keeps
    memory = Memory.unpack(stored)
    fill(after.values(), await find(txn, laters(after.values()), compute=True))
    before = await _there(view, txn, owner, memory, after)
    await write(view, txn, view.table.row(owner), before, after, 2)  # readers are notified (V12)
    same = memory.version == view.version and memory.rows == {where: each.digest for where, each in after.items()}
    if not same or size_of(txn) != unwritten:
        remember(view, txn, owner, stored, after, txn.start_ts if seen else 0)  # V1
    return size_of(txn) != unwritten


async def _there(view: Owners, txn: Transaction, owner: Any, memory: Memory, after: Mapping[Where, Given]) -> Memory:
    """The memory that an owner should have, for what is in the tables. Columns of a row that is not the owner's, but
    that it is to get, are deleted."""
    places: dict[Table[Any], dict[Any, Where]] = {}
    for where in {**memory.rows, **after}:
        table = after[where].table if where in after else table_of(view, txn, where[0])
        places.setdefault(table, {})[table.key.decode(where[1])] = where
    rows: dict[Where, bytes] = {}
    for table, wheres in places.items():
        columns = in_order({*earlier(view, memory, table), *view.writes.get(table, ())})
        marks = [view.owned[table]] if table in view.owned else []
        for key, where in wheres.items():
            row = await txn.row(table, key, [*columns, *marks])
            values = {column: row[column] for column in columns if row[column] is not None}
            mine = all(row[mark] == view.table.row(owner) for mark in marks)
            if mine and values:
                same = where in after and stored_values(values) == stored_values(after[where].values)
                rows[where] = after[where].digest if same else digest_of(values)
            elif mine and where in after:
                rows[where] = b""  # the row's owner is noted, but its values are gone
            elif where in after and not any(row[mark] is not None for mark in marks):
                for column in values:
                    txn.delete(column, key)
    return replace(memory, rows=rows)


# ------------------------------------------------------------ strays


async def _strays(view: View, db: Database) -> AsyncGenerator[tuple[Table[Any], Any], None]:
    """The rows with values in the view's columns that are in no owner's memory. No transaction in flight gives them
    here, but one may give them a moment later."""
    for table, columns in view.writes.items():
        marks = [view.owned[table]] if table in view.owned else []
        async with db.snapshot() as snap:
            async for row in snap.scan(table, columns=[*columns, *marks]):
                owner = _owner_of(view, table, row.key, row[marks[0]] if marks else None)
                if owner is not None:
                    stored = await snap.get(view.memory, owner)
                if owner is None or (table.name, table.row(row.key)) not in Memory.unpack(stored).rows:
                    yield table, row.key


def _owner_of(view: Owners, table: Table[Any], key: Any, mark: bytes | None) -> Any:
    """The owner of a derived row, by its mark; in the view's own tables, by its key."""
    if table in view.owned:
        return None if mark is None else view.table.key.decode(mark)
    if isinstance(view, Joined):
        return key_of(view.table.key, key[len(codecs_of(view.key)) :])
    assert isinstance(view, Each)
    if isinstance(view.tells, Components):
        return view.tells.link_of(key)
    assert view.copies is not None
    return view.copies.source_key(key)


async def _drop_stray(txn: Transaction, view: View, table: Table[Any], key: Any) -> bool:
    """Delete a row if it is in no owner's memory. Returns whether it was deleted."""
    columns = in_order(view.writes[table])
    marks = [view.owned[table]] if table in view.owned else []
    row = await txn.row(table, key, [*columns, *marks])
    owner = _owner_of(view, table, key, row[marks[0]] if marks else None)
    if owner is not None:
        stored = await txn.get(view.memory, owner, lock=True)
        if (table.name, table.row(key)) in Memory.unpack(stored).rows:
            return False
    there = [column for column in (*columns, *marks) if row[column] is not None]
    for column in there:
        txn.delete(column, key)
    if there and (told := telling(view)) is not None:
        told.again(key)
        await told.write(txn, 1)
    return bool(there)
