"""An open store, for threads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from perco.errors import BlockingOnly, UsageError
from perco.fronts.tries import Tries, limited
from perco.notify import database as engine
from perco.notify.worker import WorkerOptions
from perco.sync.attempts import Attempts, Retrying
from perco.sync.held import PinnedSnapshot, Snapshot, Transaction
from perco.sync.threads import Port, Threads, asking, blocking
from perco.txn.client import Client, Options
from perco.txn.reads import Isolation
from perco.txn.schema import Schema

P = ParamSpec("P")
T = TypeVar("T")


class _Block(BlockingOnly, Generic[T]):
    """An asynchronous context manager of the engine, entered and left by a thread."""

    def __init__(self, port: Port, block: Any, wrap: Callable[[Any], T], write: str) -> None:
        self._port, self._block, self._wrap, self._write = port, block, wrap, write
        self._entered = False

    async def _enter(self) -> Any:
        given = await self._block.__aenter__()
        self._entered = True
        return given

    def __enter__(self) -> T:
        try:
            return self._wrap(self._port.ask(self._enter, (), {}))
        except BaseException:
            if self._entered:
                self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def leave() -> None:
            try:
                await self._block.__aexit__(kind, error, None)
            except BaseException as raised:
                if raised is not error:
                    raise

        self._entered = False
        self._port.ask(leave, (), {})


class SnapshotBlock(_Block[Snapshot]):
    """`with db.snapshot() as snap:`: a snapshot while the block lasts."""


class TransactionBlock(BlockingOnly):
    """`with db.transaction() as txn:`: one try, committed at the end of the block."""

    _write = "with db.transaction() as txn:"

    def __init__(self, port: Port, client: Client, isolation: Isolation | None) -> None:
        self._port, self._client, self._isolation = port, client, isolation
        self._txn: Transaction | None = None

    def __enter__(self) -> Transaction:
        if self._txn is not None:
            raise UsageError("a transaction's block is entered once; call db.transaction() again")
        begun = self._port.ask(self._client.begin, (), {"isolation": self._isolation})
        txn = self._txn = Transaction(self._port, self._client, begun)
        return txn

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        txn = self._txn
        assert txn is not None
        try:
            if error is None and txn.outcome == "open":
                txn.commit()
        finally:
            txn.discard()


class WorkerHandle:
    """A running worker: its statistics."""

    def __init__(self, port: Port, of: engine.WorkerHandle) -> None:
        self._port, self._of = port, of

    def _ask(self, function: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
        return self._port.ask(function, (self._of, *args), kwargs)

    statistics = asking(engine.WorkerHandle.statistics)
    scanner_statistics = asking(engine.WorkerHandle.scanner_statistics)
    on_run = asking(engine.WorkerHandle.on_run)


class Database:
    """An open store, for any number of threads. Made by `perco.sync.open`; use it inside that block only."""

    def __init__(self, port: Threads, of: engine.Database) -> None:
        self._port, self._of = port, of
        self.schema: Schema = of.schema
        self.config: Options = of.config
        self._default = limited(of, None, None, None)

    def _ask(self, function: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
        return self._port.ask(function, (self._of, *args), kwargs)

    def run(self, function: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a transaction and commit; again from its beginning on a TransientError: see
        `perco.Database.run`. The function runs in the calling thread; its transaction begins with its first read, or
        else with the commit.
        """
        return Retrying(self._port, self._of, *self._default).run(function, *args, **kwargs)

    def attempts(self) -> Attempts:
        """The same without a function: `for attempt in db.attempts(): with attempt as txn: ...`."""
        return Attempts(self._port, Tries(self._of, *self._default))

    def options(
        self, *, attempts: int | None = None, timeout: float | None = None, isolation: Isolation | None = None
    ) -> Retrying:
        """`run` and `attempts` with other limits: see `perco.Database.options`. A thread cannot be stopped: past the
        timeout the function's next read raises Unavailable, or its commit does.
        """
        return Retrying(self._port, self._of, *limited(self._of, attempts, timeout, isolation))

    def begin(self, *, isolation: Isolation | None = None) -> Transaction:
        """A transaction that the caller ends with `commit` or `discard`; prefer `transaction()` or `run`."""
        return Transaction(self._port, self._of, self._port.ask(self._of.begin, (), {"isolation": isolation}))

    def transaction(self, *, isolation: Isolation | None = None) -> TransactionBlock:
        """One try: commits at the end of the block; an exception discards it."""
        return TransactionBlock(self._port, self._of, isolation)

    def snapshot(self, *, ts: int | None = None, at: datetime | None = None) -> SnapshotBlock:
        """The store as of now, of a timestamp `ts`, or of a wall time `at` (an aware datetime)."""
        block = self._of.snapshot(ts=ts, at=at)
        return SnapshotBlock(self._port, block, lambda of: Snapshot(self._port, of), "with db.snapshot() as snap:")

    def snapshot_at(self, *, ts: int | None = None, at: datetime | None = None) -> Snapshot:
        """As `snapshot`; whoever takes it calls its `end`."""
        return Snapshot(self._port, self._port.ask(self._of.snapshot_at, (), {"ts": ts, "at": at}))

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
        return _Block(self._port, block, lambda of: PinnedSnapshot(self._port, of), "with db.pin(...) as pin:")

    def worker(
        self, *, concurrency: int = 64, scanners: int | None = None, options: WorkerOptions | None = None
    ) -> _Block[WorkerHandle]:
        """Run the schema's observers while the block lasts, on the store's loop: see `perco.Database.worker`. Plain
        functions are observers by `@perco.sync.observer`."""
        block = self._of.worker(concurrency=concurrency, scanners=scanners, options=options)
        return _Block(self._port, block, lambda of: WorkerHandle(self._port, of), "with db.worker():")

    pins = blocking(engine.Database.pins)
    drop_pin = blocking(engine.Database.drop_pin)
    outcome = blocking(engine.Database.outcome)
    vacuum = blocking(engine.Database.vacuum)
    backfill = blocking(engine.Database.backfill)
    split = blocking(engine.Database.split)
    compact = blocking(engine.Database.compact)
    wait_idle = blocking(engine.Database.wait_idle)
    wait_for = blocking(engine.Database.wait_for)
    waiting = blocking(engine.Database.waiting)
    observers = blocking(engine.Database.observers)
    pause = blocking(engine.Database.pause)
    resume = blocking(engine.Database.resume)
    failed = blocking(engine.Database.failed)
    replay_failed = blocking(engine.Database.replay_failed)
    drop_failed = blocking(engine.Database.drop_failed)
    failed_count = blocking(engine.Database.failed_count)
    pending = blocking(engine.Database.pending)
    is_idle = blocking(engine.Database.is_idle)
    paused = blocking(engine.Database.paused)
    unserved = blocking(engine.Database.unserved)
    statistics = asking(engine.Database.statistics)
