"""Slow functions, such as an embedding or a request to a service, whose results the store keeps.

A view's function calls a cached function, and gets a `Later`: the value of a column that is still to be found. Once the
view's function has returned, perco looks up the values of those rows that must be written. For values that the store
does not have, it calls the slow function, in a thread, with the arguments of many runs at a time.

V9  A row with such a value is unchanged (V6) if the function's id and version and the argument are. Then its value is
    neither looked up nor computed.
V10 A value is stored before a row that has it is written, and is never replaced. So all rows have the same value for
    one id, version and argument, even if the function does not return the same each time, or was called twice: by two
    processes at once, or by one that died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

import msgpack
import trio

from perco.errors import TransactionClosed, UsageError
from perco.schema.codecs import Codec, encoded
from perco.schema.schema import Column
from perco.txn.engine import Engine
from perco.txn.inside import engine_of
from perco.txn.running import run
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction

A = TypeVar("A")
V = TypeVar("V")

BATCH_MAX: Final = 10_000
THREADS_MAX: Final = 256
_KEY_BYTES: Final = 16


@dataclass(eq=False, slots=True, weakref_slot=True)
class Cached(Generic[A, V]):
    """A slow function of a program, made by `Views.cached`. Call it with one argument, in the function of a view.

    Attributes:
        function: takes a list of arguments, and returns a value for each.
        batch: the longest such list; `threads`: how many calls a process makes at a time.
        results: the column, of a table of its own, that keeps the values.
    """

    id: str
    version: int
    function: Callable[[list[A]], Sequence[V]]
    batch: int
    threads: int
    results: Column[bytes, V]
    _calls: WeakKeyDictionary[Engine, _Calls] = field(default_factory=WeakKeyDictionary)

    def __call__(self, argument: A) -> Later:
        """The value for an argument, to be found later: give it as the value of a column with the same codec.

        Raises: UsageError for an argument that msgpack cannot store.
        """
        try:
            packed = msgpack.packb([self.version, argument])
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"{self.id} takes a str, a number, bytes, or a list or dict of these, not {argument!r}"
            ) from error
        return Later(self, argument, blake2b(packed, digest_size=_KEY_BYTES).digest())

    def call(self, arguments: list[A]) -> Sequence[V]:
        """Call the function. Raises: what it raises; UsageError if it does not return a value for each argument;
        TypeError, ValueError, TooLarge for a value that cannot be stored."""
        values = self.function(arguments)
        if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != len(arguments):
            raise UsageError(
                f"{self.id} was called with {len(arguments)} argument(s), and must return a list with a value for "
                f"each, not {values!r:.200}"
            )
        for value in values:
            if value is None:
                raise UsageError(f"{self.id} returned None for an argument: a cached function returns a value")
            encoded(self.results.codec, value, self.results, "value of ")
        return values

    def of(self, engine: Engine) -> _Calls:
        """The calls that one open store makes."""
        found = self._calls.get(engine)
        if found is None:
            found = self._calls[engine] = _Calls(engine, self)
        return found


@dataclass(eq=False, slots=True)
class Later:
    """The value of a cached function for an argument. `key`: of the row that keeps it."""

    cached: Cached[Any, Any]
    argument: Any
    key: bytes

    def __repr__(self) -> str:
        return f"{self.cached.id}({self.argument!r:.60})"


def must_fit(column: Column[Any, Any], later: Later) -> None:
    """Raises: UsageError if the column cannot have the value."""
    codec: Codec[Any] = later.cached.results.codec
    if codec.name != column.codec.name:
        raise UsageError(f"{later!r} gives {codec.name}, but {column!r} takes {column.codec.name}")


class _Wanted:
    __slots__ = ("done", "error", "later", "value")

    def __init__(self, later: Later) -> None:
        self.later = later
        self.done = trio.Event()
        self.value: Any = None
        self.error: Exception | None = None


class _Calls:
    """Calls a cached function for the runs of one open store. Loop thread only."""

    def __init__(self, engine: Engine, cached: Cached[Any, Any]) -> None:
        self._engine, self._cached = engine, cached
        self._waiting: dict[bytes, _Wanted] = {}
        self._called: dict[bytes, _Wanted] = {}
        self._tasks = 0
        self._limiter = trio.CapacityLimiter(max(cached.threads, 1))

    async def values(self, laters: Iterable[Later]) -> dict[bytes, Any]:
        """Compute and store values; by the keys of their arguments. Raises: the function's errors."""
        wanted = []
        for later in laters:
            found = self._called.get(later.key) or self._waiting.setdefault(later.key, _Wanted(later))
            wanted.append(found)
        while self._tasks < min(max(self._cached.threads, 1), len(self._waiting)):
            self._tasks += 1
            self._engine.background.start(self._work, f"calls of {self._cached.id}")
        for each in wanted:
            await each.done.wait()
        for each in wanted:
            if each.error is not None:
                raise each.error
        return {each.later.key: each.value for each in wanted}

    async def _work(self) -> None:
        try:
            while self._waiting:
                await trio.lowlevel.checkpoint()  # runs that are ready can add to the batch
                keys = list(self._waiting)[: self._cached.batch]
                items = {key: self._waiting.pop(key) for key in keys}
                self._called.update(items)
                try:
                    await self._settle(items)
                finally:
                    for key, item in items.items():
                        del self._called[key]
                        if not item.done.is_set():  # cancelled: the store is closing
                            item.error = TransactionClosed(f"the store was closed before {item.later!r} was computed")
                            item.done.set()
        finally:
            self._tasks -= 1

    async def _settle(self, items: dict[bytes, _Wanted]) -> None:
        """Call the function for some arguments, and store what it returns (V10)."""
        found: dict[bytes, Any] = {}
        try:
            for key, value in zip(
                items, await self._call([item.later.argument for item in items.values()]), strict=True
            ):
                if isinstance(value, Exception):
                    items[key].error = value
                else:
                    found[key] = value
            engine = self._engine
            if found:
                found = await run(engine, engine.retry, False, _store, (self._cached.results, found), {})
        except Exception as error:
            for item in items.values():
                item.error = item.error or error
        for key, item in items.items():
            item.value = found.get(key)
            item.done.set()

    async def _call(self, arguments: list[Any]) -> Sequence[Any]:
        """A value, or an error, for each argument. If a call fails, halves of its arguments are tried, so that an
        argument fails alone."""
        try:
            if self._cached.threads:
                return await trio.to_thread.run_sync(
                    self._cached.call, arguments, limiter=self._limiter, abandon_on_cancel=True
                )
            await trio.lowlevel.checkpoint()
            return self._cached.call(arguments)
        except Exception as error:
            if len(arguments) == 1:
                return [error]
        half = len(arguments) // 2
        return [*await self._call(arguments[:half]), *await self._call(arguments[half:])]


async def _store(txn: Transaction, results: Column[bytes, Any], values: dict[bytes, Any]) -> dict[bytes, Any]:
    """Store values, except where there is one already; returns those that are stored (V10)."""
    out = {}
    for key, there in (await txn.get_many(results, values)).items():
        out[key] = values[key] if there is None else there
        if there is None:
            txn.set(results, key, values[key])
    return out


async def find(snap: Snapshot, laters: Iterable[Later], *, compute: bool) -> dict[Later, Any]:
    """The values, as far as the store has them; with `compute`, all. Raises: the functions' errors."""
    by: dict[Cached[Any, Any], dict[bytes, list[Later]]] = {}
    for later in laters:
        by.setdefault(later.cached, {}).setdefault(later.key, []).append(later)
    out: dict[Later, Any] = {}
    for cached, wanted in by.items():
        found = {
            key: value for key, value in (await snap.get_many(cached.results, wanted)).items() if value is not None
        }
        if compute and len(found) < len(wanted):
            missing = [same[0] for key, same in wanted.items() if key not in found]
            found |= await cached.of(engine_of(snap)).values(missing)
        out.update({later: found[key] for key, same in wanted.items() if key in found for later in same})
    return out
