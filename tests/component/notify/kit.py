"""What the tests of observers share: a schema, several clients on one store, and stores that stop or hold still."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import pytest
import trio
import trio.testing

import perco
from perco.database.database import Database
from perco.database.inside import inside, local_owner
from perco.database.making import make
from perco.notify.options import ObserverCounters
from perco.notify.worker import Worker
from perco.protocol.records import ACK, Lock, observer_of, unpack_lock
from perco.schema.catalogue import registered
from perco.schema.schema import Schema
from perco.storage import LOCK, NOTIFY, TS_MAX, LocalRowStore, Mutation, RowCells, ScanPage, ScanQuery, ScanRequest
from perco.storage.cells import ReadRequest, Verdict
from perco.tablets.local import LocalStore
from perco.testing.bare import SingleRows
from tests.support import everywhere
from tests.support.places import local_of
from tests.support.postgresql import DividedRows

T = TypeVar("T")

# New observers are told of what is there when a client says so: `client` does, before it hands itself out.
OPTIONS = perco.Options(seed=4711, backfill=perco.options.BackfillOptions(on=False))
LONG_S = 1000.0  # of virtual time: a task that still waits then waits for ever


class Web:
    """A schema of one table in three tablets (rows below "h", below "p", and the rest) and one of counts.

    Each test adds the observers it needs with `observe`.
    """

    def __init__(self) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
        self.body = self.docs.column("body", perco.TEXT)
        self.size = self.docs.column("size", perco.INT64)
        self.note = self.docs.column("note", perco.TEXT)
        self.counts = perco.Table("counts", key=perco.TEXT)
        self.count = self.counts.column("count", perco.INT64)
        self.schema = perco.Schema(self.docs, self.counts)

    def observe(self, column: perco.Column[Any, Any], *, id: str, **how: Any) -> Callable[[Any], Any]:
        return self.schema.observe(column, id=id, **how)

    async def add(self, txn: perco.Transaction, key: str, by: int = 1) -> None:
        """Count something, in the transaction."""
        txn.set(self.count, key, (await txn.get(self.count, key) or 0) + by)

    def counting(self, column: perco.Column[Any, Any], *, id: str, **how: Any) -> list[perco.Change[Any, Any]]:
        """An observer that counts its runs, in the store, under its id and key; returns the changes it was run for."""
        seen: list[perco.Change[Any, Any]] = []

        @self.observe(column, id=id, **how)
        async def count(txn: perco.Transaction, change: perco.Change[Any, Any]) -> None:
            seen.append(change)
            await self.add(txn, f"{id}/{change.key}")

        return seen


async def put(db: perco.Database, column: perco.Column[Any, Any], key: Any, value: Any) -> int:
    """Write one cell in a transaction of its own; returns its commit_ts."""

    async def write(txn: perco.Transaction) -> perco.Transaction:
        if value is None:
            txn.delete(column, key)
        else:
            txn.set(column, key, value)
        return txn

    return (await db.run(write)).commit_ts


async def get(db: perco.Database, column: perco.Column[Any, Any], key: Any) -> Any:
    async with db.snapshot() as snap:
        return await snap.get(column, key)


async def settle(db: perco.Database) -> None:
    """`wait_idle`, but not for ever."""
    await db.wait_idle(timeout=LONG_S)


async def until(condition: Callable[[], object], *, timeout: float = LONG_S) -> None:
    """Until something holds, looked at again and again as virtual time goes by."""
    with trio.fail_after(timeout):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.05)


# ------------------------------------------------------------------ looking into a store


def tablets_cells(store: LocalRowStore, group: str) -> Iterator[tuple[str, bytes, int, int, bytes]]:
    """Every cell of a group at this moment: (table, row, column, ts, value)."""
    for tablet in store.tablets():
        query = ScanQuery(group, None, 0, TS_MAX, 1 << 20)
        request = ScanRequest(tablet.table, tablet.start, None, (query,), False, 1 << 20, 1 << 30, 1 << 30)
        for row, [cells] in tablet.scan(request).rows:
            for column, ts, value in cells:
                yield tablet.table, row, column, ts, value


def notified(db: perco.Database, id: str | None = None) -> list[tuple[bytes, int]]:
    """(row, ts) of the notify cells that stand now, of one observer or of all."""
    number = inside(db).catalogue.observers[id].number if id is not None else None
    cells = tablets_cells(local_of(db).store, NOTIFY)
    return [(row, ts) for _, row, column, ts, _ in cells if number in (None, observer_of(column))]


def locks(db: perco.Database) -> list[tuple[bytes, Lock]]:
    return [(row, unpack_lock(value)) for _, row, _, _, value in tablets_cells(local_of(db).store, LOCK)]


def observed_locks(db: perco.Database) -> list[tuple[bytes, Lock]]:
    """Locks of observed cells, and of acks."""
    return [(row, lock) for row, lock in locks(db) if lock.observers or lock.kind == ACK]


def nothing_is_left(db: perco.Database) -> bool:
    """No notify cell and no lock of an observed cell anywhere, at this moment (N7)."""
    return not notified(db) and not observed_locks(db)


# ------------------------------------------------------------------ several clients on one store


class _Beside:
    """A store that is open already, as a further client sees it, perhaps through a wrapper."""

    readonly = False
    threaded = False
    remote = False
    forked = False

    def __init__(self, local: LocalStore, store: Any) -> None:
        self._local = local
        self.store = store if store is not None else local.store

    def check(self) -> None:
        self._local.check()

    def clear_dead_readers(self) -> None:
        self._local.clear_dead_readers()

    async def adapt(self, catalogue: Any) -> None:
        await self._local.adapt(catalogue)

    @property
    def local(self) -> LocalStore | None:
        return self._local.local

    def write_from_thread(self, mutation: Any) -> None:
        self._local.write_from_thread(mutation)

    def expire(self, after_s: float) -> None:
        self._local.expire(after_s)


@asynccontextmanager
async def client(
    local: LocalStore,
    schema: Schema,
    *,
    store: Any = None,
    options: perco.Options = OPTIONS,
    beside: Database | None = None,
    sweeping: bool = True,
    one_step: bool = False,
    backfilled: bool = True,
) -> AsyncIterator[Database]:
    """One more client on an open store, as another process would be; its end leaves the store open.

    Where the test runs over clients, it is one of an owner that began with the first of them.

    Args:
        store: a wrapper round `local.store`, through which all that it does goes.
        beside: a client that lives at the same time: they share an oracle, and nothing else.
        sweeping: whether it settles what the dead left.
        backfilled: whether it has told new observers of what is there.
        one_step: whether it commits in one step, as only one may who has the store to itself (C2).
    """
    assert not (one_step and beside), "C2: the memory of entered cells is one process's"
    options = replace(options, commit=replace(options.commit, one_step=one_step))
    if everywhere.over in everywhere.CLIENTS:
        place: everywhere.Place = local.place  # type: ignore[attr-defined]
        async with (
            place.opened(options, sweeping=sweeping) as door,
            door.client(schema, options, store=store, mortal=True) as db,
        ):
            if backfilled:
                await db.backfill()
            yield db
        return
    beside_it: Any = _Beside(local, store)
    if everywhere.over in (everywhere.BARE, everywhere.POSTGRESQL, everywhere.BIGTABLE):
        beside_it = everywhere.bare(local, store)
        if beside is not None and store is None:
            its: Any = inside(beside).engine.place
            if type(its.store._store) in (SingleRows, DividedRows):  # clients of one owner share its counts
                beside_it = its
    db = make(beside_it, schema, options)
    if beside is not None:
        inside(db).engine.oracle = inside(db).driver.oracle = inside(beside).oracle
    else:
        await inside(db).oracle.start()
    try:
        await local_owner(db).declare()
        if backfilled:
            await db.backfill()
        if sweeping:
            inside(db).background.start(local_owner(db).sweeper.run, "sweeper")
        yield db
    finally:
        await inside(db).background.aclose()


class ByHand:
    """A worker without scanners: it runs what it is told to run, also on a row that another process has (N8)."""

    def __init__(self, db: Database, options: perco.WorkerOptions | None = None) -> None:
        self._db = db
        self.worker = Worker(
            inside(db).engine, registered(db.schema, inside(db).catalogue), options or perco.WorkerOptions()
        )

    async def run(self, on: perco.Column[Any, Any] | perco.Signal[Any], key: str) -> None:
        """The one observer of a column or signal, until the change is acknowledged, or somebody else has handled it."""
        bound = (
            inside(self._db).known.bind_signal(on) if isinstance(on, perco.Signal) else inside(self._db).known.bind(on)
        )
        [ack] = bound.acks
        await self.worker.run(on.table.name, key.encode(), ack)

    def counted(self, id: str) -> ObserverCounters:
        return self.worker.statistics()[id]


def memory() -> LocalStore:
    """An empty store without any client."""
    return everywhere.place().local


class StoppedError(Exception):
    """The client has been dropped; nothing that it does reaches the store any more."""


class StoppingStore:
    """A row store that makes so many more mutations and then is gone: so ends a client that dies there.

    A step is one mutation; `backwards`: those of one call are made in reverse, as tablets may.
    """

    chaining = deferring = None

    def tablets_here(self) -> list[Any]:
        return []

    def __init__(self, inner: LocalRowStore, *, backwards: bool = False) -> None:
        self._inner, self._backwards = inner, backwards
        self.left: int | None = None
        self.made = 0
        self.stopped = trio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _check(self) -> None:
        if self.stopped.is_set():
            raise StoppedError

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        self._check()
        return await self._inner.read(requests)

    async def scan(self, request: ScanRequest) -> ScanPage:
        self._check()
        return await self._inner.scan(request)

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        order = range(len(mutations))
        for i in reversed(order) if self._backwards else order:
            self._check()
            if self.left == 0:
                self.stop()
                raise StoppedError
            self.made += 1
            if self.left is not None:
                self.left -= 1
            [verdicts[i]] = await self._inner.apply([mutations[i]])
        return [verdicts[i] for i in order]

    def stop(self) -> None:
        self.stopped.set()


async def work_and_die(first: Database, schema: Schema, rng: Random, steps: int, *, one_step: bool) -> bool:
    """Run a worker in one more client, which may die at one of so many steps. Returns whether it did."""
    store = StoppingStore(local_of(first).store, backwards=rng.random() < 0.5)
    with suppress(StoppedError, BaseExceptionGroup):
        async with client(local_of(first), schema, store=store, one_step=one_step) as doomed:
            store.left = rng.randrange(steps)
            with trio.move_on_after(LONG_S):
                async with doomed.worker(concurrency=4), trio.open_nursery() as nursery:
                    nursery.start_soon(doomed.wait_idle)
                    await store.stopped.wait()
                    nursery.cancel_scope.cancel()
    return store.stopped.is_set()


class HoldingStore:
    """A row store that holds back the mutations that `holds` says, until `let_go` is called.

    `replies`: they are made, and only the answer is held back.
    """

    chaining = deferring = None

    def __init__(self, inner: LocalRowStore, holds: Callable[[Mutation], bool], *, replies: bool = False) -> None:
        self._inner, self._holds, self._replies = inner, holds, replies
        self._gate = trio.Event()
        self.held = trio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        verdicts = await self._inner.apply(mutations) if self._replies else []
        if not self._gate.is_set() and any(map(self._holds, mutations)):
            self.held.set()
            with trio.CancelScope(shield=True):
                await self._gate.wait()
        return verdicts or await self._inner.apply(mutations)

    def let_go(self) -> None:
        self._gate.set()


def writes_to(mutation: Mutation, group: str, row: str) -> bool:
    """Whether a mutation puts a cell into a group of a row."""
    return any(
        at == row.encode() and write[0] == group and write[3] is not None
        for at, _, writes in mutation.rows
        for write in writes
    )


# ------------------------------------------------------------------ seeds


def run_seeded(monkeypatch: pytest.MonkeyPatch, seed: int, main: Callable[[], Awaitable[T]]) -> T:
    """`trio.run` in virtual time, with the order in which tasks run drawn from a seed."""
    run = trio._core._run  # type: ignore[attr-defined]
    monkeypatch.setattr(run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    run._r.seed(seed)
    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
