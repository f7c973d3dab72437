"""An open store, for asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from perco.aio.attempts import Attempts, Retrying
from perco.aio.guest import Guests, awaiting, direct
from perco.aio.held import PinnedSnapshot, Snapshot, Transaction
from perco.errors import AsyncOnly, UsageError
from perco.fronts.tries import Tries, limited
from perco.notify import database as engine
from perco.notify.worker import WorkerOptions
from perco.txn.client import Options
from perco.txn.reads import Isolation
from perco.txn.schema import Schema

P = ParamSpec("P")
T = TypeVar("T")


class _Block(AsyncOnly, Generic[T]):
    """An asynchronous context manager of the engine, entered and left by a task of asyncio's."""

    def __init__(self, port: Guests, block: Any, wrap: Callable[[Any], T], write: str) -> None:
        self._port, self._block, self._wrap, self._write = port, block, wrap, write
        self._entered = False

    async def _enter(self) -> Any:
        given = await self._block.__aenter__()
        self._entered = True
        return given

    async def __aenter__(self) -> T:
        try:
            return self._wrap(await self._port.ask(self._enter, (), {}))
        except BaseException:
            if self._entered:
                await self.__aexit__(None, None, None)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def leave() -> None:
            try:
                await self._block.__aexit__(kind, error, None)
            except BaseException as raised:
                if raised is not error:
                    raise

        self._entered = False
        await self._port.ask(leave, (), {})


class SnapshotBlock(_Block[Snapshot]):
    """`async with db.snapshot() as snap:`: a snapshot while the block lasts."""


class TransactionBlock(AsyncOnly):
    """`async with db.transaction() as txn:`: one try, committed at the end of the block."""

    _write = "async with db.transaction() as txn:"

    def __init__(self, db: Database, isolation: Isolation | None) -> None:
        self._db, self._isolation = db, isolation
        self._txn: Transaction | None = None

    async def __aenter__(self) -> Transaction:
        if self._txn is not None:
            raise UsageError("a transaction's block is entered once; call db.transaction() again")
        txn = self._txn = await self._db.begin(isolation=self._isolation)
        return txn

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        txn = self._txn
        assert txn is not None
        try:
            if error is None and txn.outcome == "open":
                await txn.commit()
        finally:
            txn.discard()


class WorkerHandle:
    """A running worker: its statistics."""

    def __init__(self, port: Guests, of: engine.WorkerHandle) -> None:
        self._port, self._of = port, of

    statistics = direct(engine.WorkerHandle.statistics)
    scanner_statistics = direct(engine.WorkerHandle.scanner_statistics)
    on_run = direct(engine.WorkerHandle.on_run)


class Database:
    """An open store, for the tasks of a loop. Made by `perco.aio.open`; use it inside that block only."""

    def __init__(self, port: Guests, of: engine.Database) -> None:
        self._port, self._of = port, of
        self.schema: Schema = of.schema
        self.config: Options = of.config
        self._default = limited(of, None, None, None)

    def _ask(
        self, function: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Coroutine[Any, Any, T]:
        return self._port.ask(function, (self._of, *args), kwargs)

    def run(
        self, function: Callable[Concatenate[Transaction, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Run a function in a transaction and commit; again from its beginning on a TransientError: see
        `perco.Database.run`. The function runs in the calling task, and may await whatever asyncio can.
        """
        running = Retrying(self._port, self._of, *self._default).run(function, *args, **kwargs)
        running.__qualname__ = "Database.run"  # type: ignore[attr-defined]  # for Python's "never awaited" warning
        return running

    def attempts(self) -> Attempts:
        """The same without a function: `async for attempt in db.attempts(): async with attempt as txn: ...`."""
        return Attempts(self._port, Tries(self._of, *self._default))

    def options(
        self, *, attempts: int | None = None, timeout: float | None = None, isolation: Isolation | None = None
    ) -> Retrying:
        """`run` and `attempts` with other limits: see `perco.Database.options`. Past the timeout the function, or the
        block, is cancelled where it waits, and raises Unavailable.
        """
        return Retrying(self._port, self._of, *limited(self._of, attempts, timeout, isolation))

    async def begin(self, *, isolation: Isolation | None = None) -> Transaction:
        """A transaction that the caller ends with `commit` or `discard`; prefer `transaction()` or `run`."""
        of = self._begin_nowait(isolation=isolation) if self._port.closed is None else None
        if of is None:
            of = await self._port.ask(self._of.begin, (), {"isolation": isolation})
        return Transaction(self._port, self._of, of)

    _begin_nowait = direct(engine.Database.begin_nowait)

    def transaction(self, *, isolation: Isolation | None = None) -> TransactionBlock:
        """One try: commits at the end of the block; an exception discards it."""
        return TransactionBlock(self, isolation)

    def snapshot(self, *, ts: int | None = None, at: datetime | None = None) -> SnapshotBlock:
        """The store as of now, of a timestamp `ts`, or of a wall time `at` (an aware datetime)."""
        block = self._of.snapshot(ts=ts, at=at)
        return SnapshotBlock(self._port, block, lambda of: Snapshot(self._port, of), block._write)

    async def snapshot_at(self, *, ts: int | None = None, at: datetime | None = None) -> Snapshot:
        """As `snapshot`; whoever takes it calls its `end`."""
        return Snapshot(self._port, await self._port.ask(self._of.snapshot_at, (), {"ts": ts, "at": at}))

    def pin(
        self,
        name: str,
        *,
        lease_s: float,
        ts: int | None = None,
        at: datetime | None = None,
        owner: str | None = None,
        keep: bool = False,
    ) -> _Block[PinnedSnapshot]:
        """A snapshot that stays readable however long it takes, under a name: see `perco.Database.pin`."""
        block = self._of.pin(name, lease_s=lease_s, ts=ts, at=at, owner=owner, keep=keep)
        return _Block(self._port, block, lambda of: PinnedSnapshot(self._port, of), "async with db.pin(...) as pin:")

    def worker(
        self, *, concurrency: int = 64, scanners: int | None = None, options: WorkerOptions | None = None
    ) -> _Block[WorkerHandle]:
        """Run the schema's observers while the block lasts: see `perco.Database.worker`. They are trio's; functions
        that await what is asyncio's are observers by `@perco.aio.observer`."""
        block = self._of.worker(concurrency=concurrency, scanners=scanners, options=options)
        return _Block(self._port, block, lambda of: WorkerHandle(self._port, of), "async with db.worker():")

    pins = awaiting(engine.Database.pins)
    drop_pin = awaiting(engine.Database.drop_pin)
    outcome = awaiting(engine.Database.outcome)
    vacuum = awaiting(engine.Database.vacuum)
    backfill = awaiting(engine.Database.backfill)
    split = awaiting(engine.Database.split)
    compact = awaiting(engine.Database.compact)
    wait_idle = awaiting(engine.Database.wait_idle)
    wait_for = awaiting(engine.Database.wait_for)
    waiting = awaiting(engine.Database.waiting)
    observers = awaiting(engine.Database.observers)
    pause = awaiting(engine.Database.pause)
    resume = awaiting(engine.Database.resume)
    failed = awaiting(engine.Database.failed)
    replay_failed = awaiting(engine.Database.replay_failed)
    drop_failed = awaiting(engine.Database.drop_failed)
    failed_count = awaiting(engine.Database.failed_count)
    pending = awaiting(engine.Database.pending)
    is_idle = awaiting(engine.Database.is_idle)
    paused = awaiting(engine.Database.paused)
    unserved = awaiting(engine.Database.unserved)
    statistics = direct(engine.Database.statistics)
