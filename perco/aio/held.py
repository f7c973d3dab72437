"""The objects that users of `perco.aio` hold: snapshots and transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from perco.aio.guest import Guests
from perco.aio.limits import Limit
from perco.aio.reading import Reading
from perco.clock.holds import Pin
from perco.fronts.tries import Tries, tell
from perco.history.past import PinnedSnapshot as _PinnedSnapshot
from perco.protocol.reads import Isolation
from perco.schema.schema import Column, Signal
from perco.txn.engine import Engine
from perco.txn.snapshot import Snapshot as _Snapshot
from perco.txn.transaction import Transaction as _Transaction

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class Snapshot(Reading):
    """The store as of one timestamp. Any number of tasks may read it.

    Attributes: `start_ts`, the timestamp; `wall`: see `perco.Snapshot`.
    """

    _of: _Snapshot

    def __init__(self, port: Guests, of: _Snapshot) -> None:
        super().__init__(port, of)

    @property
    def start_ts(self) -> int:
        return self._of.start_ts

    @property
    def wall(self) -> float | None:
        return self._of.wall

    def end(self) -> None:
        """End the snapshot: it can read no more, and the versions that only it needed may be removed (G1)."""
        self._of.end()


class PinnedSnapshot(Snapshot):
    """The store as of a pin's timestamp: see `perco.PinnedSnapshot`."""

    _of: _PinnedSnapshot

    def renew(self, lease_s: float | None = None) -> Coroutine[Any, Any, None]:
        """Restart the lease: see `perco.PinnedSnapshot.renew`."""
        return self._ask("renew", (lease_s,), {})

    @property
    def pin(self) -> Pin:
        return self._of.pin


class Transaction(Snapshot):
    """Reads and writes that become visible together, or not at all: see `perco.Transaction`."""

    _of: _Transaction

    def __init__(self, port: Guests, engine: Engine, of: _Transaction, tries: Tries | None = None) -> None:
        super().__init__(port, of)
        self._engine, self._tries = engine, tries
        self._limit = Limit(tries, of) if tries is not None and tries.retry.timeout_s is not None else None

    def _ask(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Coroutine[Any, Any, Any]:
        if self._limit is None:
            return super()._ask(name, args, kwargs)
        return self._in_time(partial(getattr(self._of, name), *args, **kwargs), waits=False)

    def _ask_for(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Coroutine[Any, Any, Any]:
        return super()._ask_for(function) if self._limit is None else self._in_time(function, waits=False)

    async def _in_time(self, do: Callable[[], Awaitable[T]], *, waits: bool) -> T:
        tries, limit = self._tries, self._limit
        assert tries is not None
        assert limit is not None
        call = self._port.ask(tries.in_time, (lambda: self._of, do), {}, waits)
        done: T = await limit.asking(call)
        return done

    def set(self, column: Column[K, V], key: K, value: V) -> None:
        """Write a cell: see `perco.Transaction.set`. Never blocks."""
        self._now("set", (column, key, value), {})

    def delete(self, column: Column[K, Any], key: K) -> None:
        """Remove a cell's value: see `perco.Transaction.delete`. Never blocks."""
        self._now("delete", (column, key), {})

    def signal(self, signal: Signal[K], key: K) -> None:
        """Raise a signal: see `perco.Transaction.signal`. Never blocks."""
        self._now("signal", (signal, key), {})

    def discard(self) -> None:
        """End without a commit."""
        self._now("discard", (), {})

    async def commit(self) -> int:
        """Commit; see `perco.Transaction.commit`. If the task is cancelled but the transaction commits, a note on the
        exception and `outcome` say so (T10)."""
        try:
            if self._limit is None:
                return await self._port.ask(self._of.commit, (), {}, True)
            return await self._in_time(self._of.commit, waits=True)
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
        """The token for `db.outcome`, in any process; "" for a transaction that never began to commit."""
        return self._of.token

    @property
    def isolation(self) -> Isolation:
        """The isolation level: "snapshot" or "serializable"."""
        return self._of.isolation
