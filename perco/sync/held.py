"""The objects that users of `perco.sync` hold: snapshots and transactions."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from perco.clock.holds import Pin
from perco.errors import TooLarge, TransactionClosed
from perco.fronts.tries import Tries, tell
from perco.protocol.reads import Isolation
from perco.schema.codecs import encoded
from perco.schema.schema import Column, Signal
from perco.storage import VALUE_BYTES_MAX
from perco.sync.calling import call, first_page
from perco.sync.reading import Reading
from perco.sync.threads import Port
from perco.txn.engine import Engine
from perco.txn.inside import drawn, is_open, size_of, starts, write_encoded
from perco.txn.scan import Scan
from perco.txn.snapshot import Snapshot as _Snapshot
from perco.txn.transaction import Transaction as _Transaction

P = ParamSpec("P")
K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class Snapshot(Reading):
    """The store as of one timestamp. Any number of threads may read it.

    Attributes: `start_ts`, the timestamp; `wall`: see `perco.Snapshot`.
    """

    def __init__(self, port: Port, of: _Snapshot | None) -> None:
        super().__init__(port, of)

    def _there(self) -> Any:
        return self._of

    @property
    def start_ts(self) -> int:
        ts: int = self._there().start_ts
        return ts

    @property
    def wall(self) -> float | None:
        wall: float | None = self._there().wall
        return wall

    def end(self) -> None:
        """End the snapshot: it can read no more, and the versions that only it needed may be removed (G1)."""
        if self._of is not None:
            self._of.end()


class PinnedSnapshot(Snapshot):
    """The store as of a pin's timestamp: see `perco.PinnedSnapshot`."""

    def renew(self, lease_s: float | None = None) -> None:
        """Restart the lease: see `perco.PinnedSnapshot.renew`."""
        self._ask("renew", (lease_s,), {})

    @property
    def pin(self) -> Pin:
        pin: Pin = self._there().pin
        return pin


class Transaction(Snapshot):
    """Reads and writes that become visible together, or not at all: see `perco.Transaction`. One thread at a time may
    use it."""

    def __init__(self, port: Port, engine: Engine, of: _Transaction | None, tries: Tries | None = None) -> None:
        super().__init__(port, of)
        self._engine, self._tries = engine, tries
        self._ended = False  # a transaction may end before it has begun
        self._noted: deque[tuple[Any, ...]] = deque()  # writes that have not been sent to the loop yet
        self._cells = self._bytes = 0  # upper bounds of what has been written

    # ------------------------------------------------------------ on the loop

    def _ask(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._port.ask(self._in_time, (call, (name, args, kwargs), {}), {})

    def _scan_from(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Scan[Any]:
        scan: Scan[Any] = self._port.ask(self._in_time, (first_page, (name, args, kwargs), {}), {})
        return scan

    def _fetch(self, scan: Scan[Any]) -> None:
        self._port.ask(self._in_time, (_fetched, (scan,), {}), {})

    async def _in_time(self, function: Callable[..., Awaitable[T]], args: Any, kwargs: Any) -> T:
        if self._tries is None or self._tries.retry.timeout_s is None:
            return await self._do(function, args, kwargs)
        done: T = await self._tries.in_time(lambda: self._begun, lambda: self._do(function, args, kwargs))
        return done

    async def _do(self, function: Callable[..., Awaitable[T]], args: Any, kwargs: Any) -> T:
        txn = await self._begin() if self._of is None else self._of
        if self._noted:
            self._write(txn)
        return await function(txn, *args, **kwargs)

    async def _begin(self) -> _Transaction:
        assert self._tries is not None
        if self._ended:
            raise TransactionClosed("this transaction has ended; use it only inside its block or function")
        txn = self._of = await self._tries.begin()
        return txn

    def _write(self, txn: _Transaction) -> None:
        """Pass the noted writes to the engine's transaction."""
        noted = self._noted
        while noted:
            column, row, data = noted.popleft()
            if isinstance(column, Signal):
                txn.signal(column, row)
            else:
                write_encoded(txn, column, row, data)
        self._cells, self._bytes = size_of(txn)

    # ------------------------------------------------------------ in the caller's thread

    @property
    def _begun(self) -> _Transaction | None:
        begun: _Transaction | None = self._of
        return begun

    def _there(self) -> Any:
        if self._of is None or starts(self._of):
            self._port.ask(self._in_time, (_nothing, (), {}), {})
        return self._of

    def _settle(self) -> None:
        if self._noted:
            self._port.ask(self._in_time, (_nothing, (), {}), {})

    def set(self, column: Column[K, V], key: K, value: V) -> None:
        """Write a cell: see `perco.Transaction.set`. Never blocks, except at a limit."""
        if value is None:
            raise TypeError(f"None means absent; to remove a value use delete({column!r}, key)")
        self._usable(column)
        data = encoded(column.codec, value, column, "value of ")
        if len(data) > VALUE_BYTES_MAX:
            remedy = "Keep it elsewhere, or in pieces."
            raise TooLarge(f"value of {column!r}", len(data), VALUE_BYTES_MAX, remedy, "bytes")
        self._note(column, column.table.row(key), data)

    def delete(self, column: Column[K, Any], key: K) -> None:
        """Remove a cell's value: see `perco.Transaction.delete`. Never blocks, except at a limit."""
        self._usable(column)
        self._note(column, column.table.row(key), None)

    def signal(self, signal: Signal[K], key: K) -> None:
        """Raise a signal: see `perco.Transaction.signal`. Never blocks, except at a limit."""
        self._must_be_open()
        if signal not in self._engine.known.signals:
            self._engine.known.must_be_signal(signal)
        signal.table.row(key)
        self._note(signal, key, None)

    def _usable(self, column: Column[Any, Any]) -> None:
        """Raise what the engine's method would raise: the transaction has ended, or this is not a declared column."""
        self._must_be_open()
        if column not in self._engine.known.bounds:
            self._engine.known.must_be_column(column)

    def _must_be_open(self) -> None:
        txn: Any = self._of
        if self._ended or (txn is not None and not is_open(txn)):
            raise TransactionClosed("this transaction has ended; use it only inside its block or function")

    def _note(self, column: Column[Any, Any] | Signal[Any], key: Any, data: bytes | None) -> None:
        self._noted.append((column, key, data))
        self._cells += 1
        self._bytes += len(data) if data else 0
        options = self._engine.limits
        if self._cells > options.cells_max or self._bytes > options.bytes_max:
            self._settle()  # raises TooLarge if this write does exceed a limit

    def commit(self) -> int:
        """Commit; see `perco.Transaction.commit`."""
        try:
            ts: int = self._port.ask(self._in_time, (_commit, (), {}), {}, True)
            return ts
        except KeyboardInterrupt as error:
            tell(error, self._begun)
            raise

    def discard(self) -> None:
        """End without a commit."""
        self._ended = True
        if self._begun is not None:
            self._begun.discard()

    @property
    def commit_ts(self) -> int:
        return 0 if self._begun is None else self._begun.commit_ts

    @property
    def outcome(self) -> str:
        if self._begun is None:
            return "aborted" if self._ended else "open"
        return self._begun.outcome

    @property
    def token(self) -> str:
        """The token for `db.outcome`, in any process; "" for a transaction that never began to commit."""
        return "" if self._begun is None else self._begun.token

    @property
    def isolation(self) -> Isolation:
        """The isolation level: "snapshot" or "serializable"."""
        if self._begun is not None:
            return self._begun.isolation
        assert self._tries is not None
        return "serializable" if self._tries.serializable else "snapshot"


async def _commit(txn: _Transaction) -> int:
    return await txn.commit()


async def _nothing(txn: _Transaction) -> None:
    """Only draw the timestamp. (The call itself begins the transaction, and passes on the noted writes.)"""
    await drawn(txn)


async def _fetched(_: _Snapshot, scan: Scan[Any]) -> None:
    await scan.fetch()
