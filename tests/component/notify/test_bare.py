"""Idleness over a store without any capability, in virtual time; alone, and served to clients (N7)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio

import perco
from perco.database.inside import inside, local_owner
from perco.database.making import make
from perco.storage import (
    APPLIED,
    FAILED_LIST,
    LOCK,
    NOTIFY,
    TS_MAX,
    LocalRowStore,
    Mutation,
    NoReply,
    ReadRequest,
    RowCells,
    ScanPage,
    ScanQuery,
    ScanRequest,
    Verdict,
)
from perco.testing.bare import BareStore, SingleRows
from tests.component.notify.kit import LONG_S, memory, settle, until
from tests.support import everywhere

LATE_S = 5.0


class Slow(SingleRows):
    def __init__(self, rows: LocalRowStore) -> None:
        super().__init__(rows, lambda: 0.01)


class World:
    def __init__(self) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT)
        self.body, self.note = self.docs.column("body", perco.TEXT), self.docs.column("note", perco.INT64)
        self.other = perco.Table("other", key=perco.TEXT)
        self.count = self.other.column("count", perco.INT64)
        self.schema = perco.Schema(self.docs, self.other)
        self.ran: list[str] = []

    def observe(self, fails: bool = False) -> None:
        @self.schema.observe(self.body, id="observer")
        async def observer(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
            if fails:
                raise ValueError("no")
            self.ran.append(change.key)


@pytest.fixture(autouse=True)
def only_here(deployment: str) -> None:
    if deployment != everywhere.OWNER:
        pytest.skip("it makes its own stores")


@asynccontextmanager
async def owned(
    schema: perco.Schema, below: Callable[[LocalRowStore], SingleRows] = SingleRows, *, late_s: float = 0.0
) -> AsyncIterator[tuple[perco.Database, LocalRowStore]]:
    """The owner's database over a bare store; and its rows."""
    local = memory()
    backend = BareStore(local, below(local.store), late_s=late_s)
    db = make(backend, schema, perco.Options(seed=1, shared=False))
    try:
        await inside(db).oracle.start()
        await local_owner(db).declare()
        local_owner(db).start()
        yield db, local.store
    finally:
        await inside(db).background.aclose()


async def put(db: perco.Database, column: perco.Column[Any, Any], key: str, value: Any) -> None:
    async with db.transaction() as txn:
        txn.set(column, key, value)


@asynccontextmanager
async def traffic(db: perco.Database, column: perco.Column[Any, Any]) -> AsyncIterator[None]:
    """Another task writes the column, all the time."""

    async def write() -> None:
        number = 0
        while True:
            number += 1
            await put(db, column, str(number), number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await trio.sleep(0.5)
        yield
        nursery.cancel_scope.cancel()


async def test_traffic_in_an_unobserved_column_does_not_keep_it_from_being_idle() -> None:  # N7
    world = World()
    world.observe()
    async with owned(world.schema, Slow) as (db, _), db.worker(), traffic(db, world.note):
        await settle(db)
        assert await db.is_idle()


async def test_changes_on_the_failed_list_are_counted_under_traffic() -> None:  # N6, N7
    world = World()
    world.observe(fails=True)
    async with owned(world.schema, Slow) as (db, _), db.worker(options=perco.WorkerOptions(attempts=1)):
        await put(db, world.body, "a", "v")
        assert await db.wait_idle(timeout=LONG_S) == 1
        async with traffic(db, world.count):
            assert await db.wait_idle(timeout=LONG_S) == 1


async def test_a_failed_change_whose_run_ends_after_they_were_counted_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # N6, N7
    """Failed changes are counted first; what waits, after that."""
    world = World()
    fails, counted, ran = True, trio.Event(), trio.Event()

    @world.schema.observe(world.body, id="observer")
    async def observer(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
        if fails:
            raise ValueError("no")
        world.ran.append(change.key)

    async with owned(world.schema) as (db, rows), db.worker(options=perco.WorkerOptions(attempts=1)):
        await put(db, world.body, "a", "v")
        assert await db.wait_idle(timeout=LONG_S) == 1
        fails, store = False, local_owner(db).idle._store
        plain = store.look

        async def look(tables: Collection[str], groups: Sequence[str], *, again: bool = False) -> None:
            await plain(tables, groups, again=again)
            if groups == (FAILED_LIST,) and not counted.is_set():
                counted.set()
                await ran.wait()

        monkeypatch.setattr(store, "look", look)
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                assert await db.wait_idle(timeout=LONG_S) == 0

            nursery.start_soon(wait)
            await counted.wait()
            await put(db, world.body, "a", "better")
            await until(lambda: bool(world.ran) and not any(rows.count("docs", g) for g in (FAILED_LIST, NOTIFY)))
            ran.set()


async def test_what_waits_is_counted_under_traffic_and_nobody_to_run_it_is_an_error() -> None:  # N7
    world = World()
    world.observe()
    async with owned(world.schema, Slow) as (db, rows):
        for number in range(20):
            await put(db, world.body, str(number), "v")
        async with traffic(db, world.note):
            assert await db.pending() == 20 == rows.count("docs", NOTIFY)
            assert not await db.is_idle()
            with pytest.raises(perco.UsageError, match="no worker runs them"):
                await db.wait_idle(timeout=LONG_S)


class LosingNotification(SingleRows):
    """Loses the next mutation that puts a notify cell on its way; it arrives in the midst of the next look for such
    cells, right after it has passed."""

    def __init__(self, rows: LocalRowStore) -> None:
        super().__init__(rows)
        self.armed = False
        self.late: Mutation | None = None
        self.arrived = False

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        out: list[Verdict] = []
        for mutation in mutations:
            puts = any(write[0] == NOTIFY and write[3] is not None for write in mutation.rows[0][2])
            if self.armed and puts:
                self.armed, self.late = False, mutation
                out.append(NoReply("lost"))
            else:
                out += await super().apply([mutation])
        return out

    async def scan(self, request: Any) -> Any:
        page = await super().scan(request)
        [query, *_] = request.queries
        if self.late is not None and query.group == NOTIFY and not query.values and request.table == "docs":
            await self._rows.apply([self.late])
            self.late, self.arrived = None, True
        return page


async def test_a_look_that_an_unanswered_mutation_overtakes_does_not_count() -> None:  # N7
    world = World()
    world.observe()
    made: list[LosingNotification] = []

    def below(rows: LocalRowStore) -> SingleRows:
        made.append(LosingNotification(rows))
        return made[0]

    async with owned(world.schema, below, late_s=LATE_S) as (db, rows):
        await trio.sleep(2 * LATE_S)
        made[0].armed = True
        async with db.transaction() as txn:  # the other table is the primary's: the observed cell follows
            txn.set(world.count, "a", 1)
            txn.set(world.count, "b", 1)
            txn.set(world.body, "z", "v")
        for _ in range(40):
            if await db.is_idle():
                assert not rows.count("docs", NOTIFY)
            await trio.sleep(0.1)
        assert made[0].arrived
        async with db.worker():
            await settle(db)
        assert world.ran == ["z"]


class FormerOwners(SingleRows):
    """Loses all notifications of its owner; the first is late. In the next owner's time it arrives in the midst of the
    first look for such cells, right after that has passed, and before anything is swept."""

    def __init__(self, rows: LocalRowStore, late: Mutation | None) -> None:
        super().__init__(rows)
        self.former, self.late = late is None, late
        self.looked = trio.Event()

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        out: list[Verdict] = []
        for mutation in mutations:
            if self.former and any(write[0] == NOTIFY and write[3] is not None for write in mutation.rows[0][2]):
                self.late = self.late or mutation
                out.append(NoReply("lost"))
            else:
                out += await super().apply([mutation])
        return out

    async def scan(self, request: Any) -> Any:
        groups = {query.group for query in request.queries}
        if not self.former and LOCK in groups:
            await self.looked.wait()
        page = await super().scan(request)
        if not self.former and self.late is not None and groups == {NOTIFY} and request.table == "docs":
            [verdict] = await self._rows.apply([self.late])
            assert verdict is APPLIED
            self.late = None
            self.looked.set()
        return page


async def test_the_first_look_does_not_count_while_locks_of_a_former_owner_are_left() -> None:  # N7
    """Its client's roll-forward may be on its way, and puts a notify cell; the sweep then finds no lock."""
    world = World()
    world.observe()
    local = memory()
    late: Mutation | None = None
    for former in (True, False):
        below = FormerOwners(local.store, late)
        db = make(BareStore(local, below), world.schema, perco.Options(seed=1, shared=False))
        await inside(db).oracle.start()
        await local_owner(db).declare()
        if former:
            async with db.transaction() as txn:
                txn.set(world.count, "a", 1)  # the other table is the primary's: the observed cell follows
                txn.set(world.body, "z", "v")
            await trio.sleep(1)
            late = below.late
            assert late is not None
        else:
            local_owner(db).start()
            assert not await db.is_idle()
            assert below.looked.is_set()
            await trio.sleep(1)
            assert local_owner(db).sweeper.clean
            assert local.store.count("docs", LOCK) == 0
            assert local.store.count("docs", NOTIFY) == 1
            assert not await db.is_idle()
        await inside(db).background.aclose()


async def test_cells_that_a_late_copy_has_removed_are_not_waited_for() -> None:  # N7
    world = World()
    world.observe()
    async with owned(world.schema) as (db, rows):
        await put(db, world.body, "a", "v")
        await trio.sleep(1)
        assert await db.pending() == 1
        await trio.sleep(1)
        assert await db.pending() == 1
        page = await rows.scan(ScanRequest("docs", b"", None, (ScanQuery(NOTIFY, None, 0, TS_MAX, 1, values=False),)))
        [(row, [[(column, ts, *_)]])] = page.rows
        copy = Mutation("docs", ((row, (), ((NOTIFY, column, ts, None),)),))
        assert await rows.apply([copy]) == [APPLIED]
        assert await db.wait_idle(timeout=LONG_S) == 0
        assert await db.pending() == 0


@asynccontextmanager
async def served(
    world: World,
    below: Callable[[LocalRowStore], SingleRows],
    monkeypatch: pytest.MonkeyPatch,
    options: perco.Options | None = None,
) -> AsyncIterator[tuple[perco.Database, LocalRowStore]]:
    """A client of the owner's; and the owner's rows."""
    monkeypatch.setattr(everywhere, "over", everywhere.FOLDER)
    async with (
        owned(perco.Schema(), below) as (owner, rows),
        everywhere.served(owner, perco.Options().wire, None) as door,
        door.client(world.schema, options or perco.Options(seed=2)) as db,
    ):
        yield db, rows


class Keeping(SingleRows):
    """Keeps a copy of the first prewrite of row b."""

    kept: Mutation | None = None

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        for mutation in mutations:
            row, _, writes = mutation.rows[0]
            if Keeping.kept is None and row == b"b" and any(w[0] == LOCK and w[3] is not None for w in writes):
                Keeping.kept = mutation
        return await super().apply(mutations)


async def test_a_late_copy_of_a_prewrite_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # N7, T5
    """No transaction encounters its lock, and the sweep came before it."""
    monkeypatch.setattr(Keeping, "kept", None)
    world = World()
    world.observe()
    async with served(world, Keeping, monkeypatch) as (db, rows), db.worker():
        loser = await db.begin()
        await put(db, world.body, "c", "x")
        for key in ("a", "b", "c"):
            loser.set(world.body, key, "1")
        with pytest.raises(perco.WriteConflict):
            await loser.commit()
        await settle(db)
        assert Keeping.kept is not None
        await rows.apply([Keeping.kept])
        assert rows.count("docs", LOCK) == 1
        await put(db, world.body, "z", "1")  # so that locks are looked for again
        await settle(db)
        assert rows.count("docs", LOCK) == 0


@pytest.mark.parametrize("window_s", [0.0, 0.001])
async def test_a_client_of_a_served_bare_store_sends_single_rows(
    window_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:  # S1, D6
    world = World()
    options = perco.Options(seed=2, batch=perco.options.BatchOptions(window_s=window_s))
    async with served(world, SingleRows, monkeypatch, options) as (db, _):
        async with db.transaction() as txn:
            txn.set(world.count, "a", 1)
            txn.set(world.count, "b", 2)
        async with db.snapshot() as snap:
            assert await snap.get_many(world.count, ["a", "b"]) == {"a": 1, "b": 2}


class Large(SingleRows):
    """A page of a scan takes longer than a server lets a client wait for a change."""

    async def scan(self, request: ScanRequest) -> ScanPage:
        await trio.sleep(1.5)
        return await super().scan(request)


async def test_a_client_waits_for_a_store_that_takes_long_to_search(monkeypatch: pytest.MonkeyPatch) -> None:  # N7
    world = World()
    world.observe()
    async with served(world, Large, monkeypatch) as (db, _), db.worker():
        async with db.transaction() as txn:
            txn.set(world.body, "a", "v")
        await db.wait_for(txn.commit_ts, timeout=LONG_S)
        assert world.ran == ["a"]
        assert await db.wait_idle(timeout=LONG_S) == 0


@pytest.mark.parametrize("cancelled", [False, True])
async def test_looks_share_searches_that_begin_after_them(cancelled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a client that gives up again and again, nothing piles up. `cancelled`: the look that searches gives up."""
    world = World()
    world.observe()
    async with owned(world.schema, Large) as (db, _):
        idle, began = local_owner(db).idle, list[float]()
        await idle.look()
        once = idle._search_once

        async def counted() -> None:
            began.append(trio.current_time())
            await trio.sleep(1)
            await once()

        monkeypatch.setattr(idle, "_search_once", counted)
        looked = list[bool]()

        async def look() -> None:
            looked.append(await idle.look())

        async with trio.open_nursery() as nursery:
            with trio.move_on_after(0.5 if cancelled else LONG_S):
                async with trio.open_nursery() as first:
                    first.start_soon(look)
                    await until(lambda: bool(began))
                    for _ in range(20):
                        nursery.start_soon(look)
        assert len(looked) == (20 if cancelled else 21)
        assert len(began) == 2, "one that was under way, and one for all who came later"


class Broken(SingleRows):
    """Fails reads and writes once it is broken."""

    broken = False

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        if Broken.broken:
            raise perco.Unavailable("the server is gone")
        return await super().apply(mutations)

    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        if Broken.broken:
            raise perco.Unavailable("the server is gone")
        return await super().read_first(requests, bytes_max)


async def test_a_store_that_fails_ends_a_clients_call_and_not_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "broken", False)
    monkeypatch.setattr(everywhere, "over", everywhere.FOLDER)
    world = World()
    options = replace(perco.Options(seed=2), commit=perco.options.CommitOptions(commit_timeout_s=1.0))
    async with (
        owned(perco.Schema(), Broken) as (owner, _),
        everywhere.served(owner, perco.Options().wire, None) as door,
        door.client(world.schema, options) as db,
    ):
        await put(db, world.count, "a", 1)
        Broken.broken = True
        with pytest.raises(perco.StoreError):
            await put(db, world.count, "a", 2)
        async with db.snapshot() as snap:
            with pytest.raises(perco.StoreError):
                await snap.get(world.count, "a")
        Broken.broken = False
        await put(db, world.count, "a", 3)
        assert inside(owner).background.failure() is None
        assert not any(session.applying for session in door.server.sessions.all.values())
