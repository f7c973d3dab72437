"""The objects that users of `perco.aio` hold: snapshots, transactions, scans."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from perco.aio.guest import Guests, awaiting, direct
from perco.aio.limits import Limit
from perco.errors import AsyncOnly
from perco.fronts.tries import Tries, tell
from perco.txn.client import Client
from perco.txn.holds import Pin
from perco.txn.past import PinnedSnapshot as _PinnedSnapshot
from perco.txn.reads import Isolation
from perco.txn.scan import Scan as _Scan
from perco.txn.transaction import Row, Snapshot as _Snapshot, Transaction as _Transaction

P = ParamSpec("P")
K = TypeVar("K")
T = TypeVar("T")


class Scan(AsyncOnly, Generic[K]):
    """An asynchronous iterator over rows; they are fetched by the page. May be left at any point."""

    _write = "async for row in snap.scan(...):` or `await snap.scan(...).all()"

    def __init__(self, snapshot: Snapshot, of: _Scan[K]) -> None:
        self._snapshot, self._of = snapshot, of

    def __aiter__(self) -> Scan[K]:
        return self

    async def __anext__(self) -> Row[K]:
        while True:
            row = self._of.take()
            if row is not None:
                return row
            if self._of.ended:
                raise StopAsyncIteration
            await self._snapshot._ask(_fetch, (self._of,), {})

    async def all(self) -> list[Row[K]]:
        """The rest of the rows as a list."""
        return [row async for row in self]


async def _fetch(_: _Snapshot, scan: _Scan[Any]) -> None:
    await scan.fetch()


def _scanning(method: Callable[Concatenate[Any, P], _Scan[K]]) -> Callable[Concatenate[Any, P], Scan[K]]:
    begin = direct(method)

    @functools.wraps(method)
    def scan(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Scan[K]:
        return Scan(self, begin(self, *args, **kwargs))

    return scan


class Snapshot:
    """The store as of one timestamp. Any number of tasks may read it.

    Attributes: `start_ts`, the timestamp; `wall`: see `perco.Snapshot`.
    """

    def __init__(self, port: Guests, of: _Snapshot) -> None:
        self._port, self._of = port, of

    def _ask(
        self, function: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Coroutine[Any, Any, T]:
        return self._port.ask(function, (self._of, *args), kwargs)

    get = awaiting(_Snapshot.get)
    get_many = awaiting(_Snapshot.get_many)
    row = awaiting(_Snapshot.row)
    scan = _scanning(_Snapshot.scan)

    @property
    def start_ts(self) -> int:
        return self._of.start_ts

    @property
    def wall(self) -> float | None:
        return self._of.wall

    def end(self) -> None:
        """Nothing is read any more; the versions that it needed may go (G1)."""
        self._of.end()


class PinnedSnapshot(Snapshot):
    """The store as of a pin's timestamp: see `perco.PinnedSnapshot`."""

    _of: _PinnedSnapshot

    renew = awaiting(_PinnedSnapshot.renew)

    @property
    def pin(self) -> Pin:
        return self._of.pin


class Transaction(Snapshot):
    """Reads and writes that become visible together, or not at all: see `perco.Transaction`."""

    _of: _Transaction

    def __init__(self, port: Guests, client: Client, of: _Transaction, tries: Tries | None = None) -> None:
        super().__init__(port, of)
        self._client, self._tries = client, tries
        self._limit = Limit(tries, of) if tries is not None and tries.retry.timeout_s is not None else None

    def _ask(
        self, function: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Coroutine[Any, Any, T]:
        tries = self._tries
        if tries is None or tries.retry.timeout_s is None:
            return self._port.ask(function, (self._of, *args), kwargs)
        return self._in_time(tries, functools.partial(function, self._of, *args, **kwargs), waits=False)

    async def _in_time(self, tries: Tries, do: Callable[[], Awaitable[T]], *, waits: bool) -> T:
        call = self._port.ask(tries.in_time, (lambda: self._of, do), {}, waits)
        done: T = await (call if self._limit is None else self._limit.asking(call))
        return done

    set = direct(_Transaction.set)
    delete = direct(_Transaction.delete)
    signal = direct(_Transaction.signal)
    discard = direct(_Transaction.discard)

    async def commit(self) -> int:
        """Commit; see `perco.Transaction.commit`. A task that is cancelled in it is told by a note, and by `outcome`,
        if it has committed all the same (T10)."""
        try:
            tries = self._tries
            if tries is None or tries.retry.timeout_s is None:
                return await self._port.ask(self._of.commit, (), {}, True)
            return await self._in_time(tries, self._of.commit, waits=True)
        except asyncio.CancelledError as error:
            tell(error, self._of)
            raise

    @property
    def commit_ts(self) -> int:
        return self._of.commit_ts

    @property
    def outcome(self) -> str:
        return self._of.outcome

    @property
    def token(self) -> str:
        """What `db.outcome` takes, from any process; "" for a transaction that never began to commit."""
        return self._of.token

    @property
    def isolation(self) -> Isolation:
        """Its isolation: "snapshot" or "serializable"."""
        return self._of.isolation
