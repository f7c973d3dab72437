"""Blocks for threads: transactions, snapshots, pins, workers."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from perco.blocks import BlockingOnly
from perco.errors import UsageError
from perco.notify import workers
from perco.notify.options import ObserverCounters
from perco.notify.scanner import ScannerCounters
from perco.protocol.reads import Isolation
from perco.sync.calling import Calling
from perco.sync.held import Snapshot, Transaction
from perco.sync.threads import Port
from perco.txn.inside import fails

T = TypeVar("T")


class Block(BlockingOnly, Generic[T]):
    """An asynchronous context manager of the engine, which a thread enters and leaves."""

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


class SnapshotBlock(Block[Snapshot]):
    """`with db.snapshot() as snap:`: a snapshot while the block lasts."""


class TransactionBlock(BlockingOnly):
    """`with db.transaction() as txn:`: one attempt, which commits at the end of the block."""

    _write = "with db.transaction() as txn:"

    def __init__(self, begin: Callable[..., Transaction], isolation: Isolation | None) -> None:
        self._begin, self._isolation = begin, isolation
        self._txn: Transaction | None = None

    def __enter__(self) -> Transaction:
        if self._txn is not None:
            raise UsageError("a transaction's block can be entered only once; call db.transaction() again")
        txn = self._txn = self._begin(isolation=self._isolation)
        return txn

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        txn = self._txn
        assert txn is not None
        if txn._begun is not None:
            fails(txn._begun, error)
        try:
            if error is None and txn.outcome == "open":
                txn.commit()
        finally:
            txn.discard()


class WorkerHandle(Calling):
    """A running worker, for its statistics."""

    _of: workers.WorkerHandle

    def statistics(self) -> dict[str, ObserverCounters]:
        """Counters of each observer since the worker began, by id."""
        result: dict[str, ObserverCounters] = self._ask("statistics", (), {})
        return result

    def scanner_statistics(self) -> list[ScannerCounters]:
        """Counters of each scanner."""
        result: list[ScannerCounters] = self._ask("scanner_statistics", (), {})
        return result

    def on_run(self, function: Callable[[str, Any, float], None]) -> None:
        """Call a function after each committed run: (observer id, key, seconds)."""
        self._ask("on_run", (function,), {})

    def drain(self, *, timeout: float | None = None) -> bool:
        """Begin no more runs, and wait for those in flight: see `perco.WorkerHandle.drain`."""
        result: bool = self._ask("drain", (), {"timeout": timeout})
        return result
