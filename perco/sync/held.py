"""The objects that users of `perco.sync` hold: snapshots, transactions, scans."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from perco.errors import BlockingOnly, TooLarge, TransactionClosed
from perco.fronts.tries import Tries, tell
from perco.storage import VALUE_BYTES_MAX
from perco.sync.threads import Port, blocking
from perco.txn.client import Client
from perco.txn.codecs import encoded
from perco.txn.holds import Pin
from perco.txn.past import PinnedSnapshot as _PinnedSnapshot
from perco.txn.reads import Isolation
from perco.txn.scan import Scan as _Scan
from perco.txn.schema import Column, Signal
from perco.txn.transaction import Row, Snapshot as _Snapshot, Transaction as _Transaction

P = ParamSpec("P")
K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class Scan(BlockingOnly, Generic[K]):
    """An iterator over rows; they are fetched by the page. May be left at any point."""

    _write = "for row in snap.scan(...):"

    def __init__(self, snapshot: Snapshot, of: _Scan[K]) -> None:
        self._snapshot, self._of = snapshot, of

    def __iter__(self) -> Scan[K]:
        return self

    def __next__(self) -> Row[K]:
        while True:
            self._snapshot._settle()
            row = self._of.take()
            if row is not None:
                return row
            if self._of.ended:
                raise StopIteration
            self._snapshot._ask(_fetch, (self._of,), {})

    def all(self) -> list[Row[K]]:
        """The rest of the rows as a list."""
        return list(self)


async def _fetch(_: _Snapshot, scan: _Scan[Any]) -> None:
    await scan.fetch()


async def _begin_scan(snapshot: _Snapshot, *args: Any, **kwargs: Any) -> _Scan[Any]:
    scan = snapshot.scan(*args, **kwargs)
    if not scan.ended:
        await scan.fetch()
    return scan


def _scanning(method: Callable[Concatenate[Any, P], _Scan[K]]) -> Callable[Concatenate[Any, P], Scan[K]]:
    @functools.wraps(method)
    def scan(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Scan[K]:
        return Scan(self, self._ask(_begin_scan, args, kwargs))

    return scan


class Snapshot:
    """The store as of one timestamp. Any number of threads may read it.

    Attributes: `start_ts`, the timestamp; `wall`: see `perco.Snapshot`.
    """

    def __init__(self, port: Port, of: _Snapshot | None) -> None:
        self._port, self._of = port, of

    def _ask(self, function: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
        return self._port.ask(function, (self._of, *args), kwargs)

    def _settle(self) -> None:
        """What was noted shall be seen by reads."""

    def _there(self) -> Any:
        return self._of

    get = blocking(_Snapshot.get)
    get_many = blocking(_Snapshot.get_many)
    row = blocking(_Snapshot.row)
    scan = _scanning(_Snapshot.scan)

    @property
    def start_ts(self) -> int:
        ts: int = self._there().start_ts
        return ts

    @property
    def wall(self) -> float | None:
        wall: float | None = self._there().wall
        return wall

    def end(self) -> None:
        """Nothing is read any more; the versions that it needed may go (G1)."""
        if self._of is not None:
            self._of.end()


class PinnedSnapshot(Snapshot):
    """The store as of a pin's timestamp: see `perco.PinnedSnapshot`."""

    renew = blocking(_PinnedSnapshot.renew)

    @property
    def pin(self) -> Pin:
        pin: Pin = self._there().pin
        return pin


class Transaction(Snapshot):
    """Reads and writes that become visible together, or not at all: see `perco.Transaction`. One thread at a time."""

    def __init__(self, port: Port, client: Client, of: _Transaction | None, tries: Tries | None = None) -> None:
        super().__init__(port, of)
        self._client, self._tries = client, tries
        self._ended = False  # before it began
        self._noted: deque[tuple[Any, ...]] = deque()  # writes that the loop has not been told of
        self._cells = self._bytes = 0  # at least as many as there are

    # ------------------------------------------------------------ on the loop

    def _ask(self, function: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
        result: T = self._port.ask(self._in_time, (function, args, kwargs), {})
        return result

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
            raise TransactionClosed("this transaction has ended; use it inside its block or function only")
        txn = self._of = await self._tries.begin()
        return txn

    def _write(self, txn: Any) -> None:
        """Tell the engine's transaction what was noted."""
        noted = self._noted
        while noted:
            column, row, data = noted.popleft()
            if isinstance(column, Signal):
                txn.signal(column, row)
            else:
                txn._note(txn._usable(column), row, data)
        self._cells = len(txn._writes) + (0 if txn._signals is None else len(txn._signals))
        self._bytes = txn._bytes

    # ------------------------------------------------------------ in the caller's thread

    @property
    def _begun(self) -> _Transaction | None:
        return self._of  # type: ignore[return-value]

    def _there(self) -> Any:
        if self._of is None:
            self._ask(_nothing, (), {})
        return self._of

    def _settle(self) -> None:
        if self._noted:
            self._ask(_nothing, (), {})

    def set(self, column: Column[K, V], key: K, value: V) -> None:
        """Write a cell: see `perco.Transaction.set`. Never blocks, but at a limit."""
        if value is None:
            raise TypeError(f"None means absent; to remove a value use delete({column!r}, key)")
        self._usable(column)
        data = encoded(column.codec, value, column, "value of ")
        if len(data) > VALUE_BYTES_MAX:
            remedy = "Keep it elsewhere, or in pieces."
            raise TooLarge(f"value of {column!r}", len(data), VALUE_BYTES_MAX, remedy, "bytes")
        self._note(column, column.table.row(key), data)

    def delete(self, column: Column[K, Any], key: K) -> None:
        """Remove a cell's value: see `perco.Transaction.delete`. Never blocks, but at a limit."""
        self._usable(column)
        self._note(column, column.table.row(key), None)

    def signal(self, signal: Signal[K], key: K) -> None:
        """Raise a signal: see `perco.Transaction.signal`. Never blocks, but at a limit."""
        self._must_be_open()
        if signal not in self._client.signals:
            self._client.must_be_signal(signal)
        signal.table.row(key)
        self._note(signal, key, None)

    def _usable(self, column: Column[Any, Any]) -> None:
        """Raises what the engine's own would: closed, no column, not declared."""
        self._must_be_open()
        if column not in self._client.bounds:
            self._client.must_be_column(column)

    def _must_be_open(self) -> None:
        txn: Any = self._of
        if self._ended or (txn is not None and not txn._open):
            raise TransactionClosed("this transaction has ended; use it inside its block or function only")

    def _note(self, column: Column[Any, Any] | Signal[Any], key: Any, data: bytes | None) -> None:
        self._noted.append((column, key, data))
        self._cells += 1
        self._bytes += len(data) if data else 0
        options = self._client.config.transaction
        if self._cells > options.cells_max or self._bytes > options.bytes_max:
            self._settle()  # which raises TooLarge if it is so, for this very write

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
        """What `db.outcome` takes, from any process; "" for a transaction that never began to commit."""
        return "" if self._begun is None else self._begun.token

    @property
    def isolation(self) -> Isolation:
        """Its isolation: "snapshot" or "serializable"."""
        if self._begun is not None:
            return self._begun.isolation
        assert self._tries is not None
        return "serializable" if self._tries.serializable else "snapshot"


async def _commit(txn: _Transaction) -> int:
    return await txn.commit()


async def _nothing(_: _Snapshot) -> None:
    """Begins what has not begun, and writes what was noted."""
