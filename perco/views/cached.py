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
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Generic, TypeVar

import msgpack
import trio

from perco.errors import UsageError
from perco.schema.codecs import Codec, encoded
from perco.schema.schema import Column
from perco.txn.engine import Engine
from perco.txn.inside import engine_of
from perco.txn.running import run
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction
from perco.views.batching import Batcher, Item, in_halves

A = TypeVar("A")
V = TypeVar("V")

BATCH_MAX: Final = 10_000
THREADS_MAX: Final = 256
_KEY_BYTES: Final = 16


@dataclass(eq=False, slots=True)
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
        return Later(self, packed, blake2b(packed, digest_size=_KEY_BYTES).digest())

    def call(self, laters: list[Later]) -> list[V | Exception]:
        """Call the function. Returns a value for each argument, or an error if it is none that can be stored.

        Raises: what the function raises; UsageError if it does not return a list with a value for each argument.
        """
        arguments = [later.argument for later in laters]
        values = self.function(list(arguments))
        if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != len(arguments):
            raise UsageError(
                f"{self.id} was called with {len(arguments)} argument(s), and must return a list with a value for "
                f"each (if it makes them one by one: return list(...)), not {values!r:.200}"
            )
        return [self._checked(argument, value) for argument, value in zip(arguments, values, strict=True)]

    def _checked(self, argument: A, value: V) -> V | Exception:
        if value is None:
            return UsageError(
                f"{self.id} returned None for {argument!r:.60}: it must return a value, or raise if there is none"
            )
        try:
            encoded(self.results.codec, value, self.results, "value of ")
        except Exception as error:
            return error
        return value

    def of(self, engine: Engine) -> _Calls:
        """The calls that one open store makes."""
        found: _Calls | None = engine.kept.get(self)
        if found is None:
            found = engine.kept[self] = _Calls(engine, self)
        return found


@dataclass(eq=False, slots=True)
class Later:
    """The value of a cached function for an argument. `packed`: the function's version and the argument, as they were
    when it was called; `key`: of the row that keeps the value."""

    cached: Cached[Any, Any]
    packed: bytes
    key: bytes

    @property
    def argument(self) -> Any:
        """The argument, as msgpack gives it back."""
        return msgpack.unpackb(self.packed, strict_map_key=False)[1]

    def __repr__(self) -> str:
        return f"{self.cached.id}({self.argument!r:.60})"

    def __str__(self) -> str:
        raise UsageError(f"{self!r} is found later: give it as the value of a column, as it is")

    def __format__(self, how: str) -> str:
        return str(self)

    def __bool__(self) -> bool:
        return bool(str(self))


def must_fit(column: Column[Any, Any], later: Later) -> None:
    """Raises: UsageError if the column cannot have the value."""
    codec: Codec[Any] = later.cached.results.codec
    if codec.name != column.codec.name:
        raise UsageError(f"{later!r} gives {codec.name}, but {column!r} takes {column.codec.name}")


class _Calls:
    """Calls a cached function for the runs of one open store. Loop thread only."""

    def __init__(self, engine: Engine, cached: Cached[Any, Any]) -> None:
        self._engine, self._cached = engine, cached
        self._limiter = trio.CapacityLimiter(cached.threads) if cached.threads else None
        self._batcher: Batcher[Later, Any] = Batcher(
            engine.background, f"calls of {cached.id}", self._settle, batch=cached.batch, tasks=max(cached.threads, 1)
        )
        self._items: dict[bytes, Item[Later, Any]] = {}  # by the keys of their arguments, until they are settled

    async def values(self, laters: Iterable[Later]) -> dict[bytes, Any]:
        """Compute and store values; by the keys of their arguments. Raises: the function's errors."""
        items = {}
        for later in laters:
            if later.key not in self._items:
                self._items[later.key] = self._batcher.add(later)
            items[later.key] = self._items[later.key]
        for item in items.values():
            await item.done.wait()
        for item in items.values():
            if item.error is not None:
                raise item.error
        return {key: item.result for key, item in items.items()}

    async def _settle(self, laters: list[Later]) -> Sequence[Any]:
        try:
            return await self._called(laters)
        finally:
            for later in laters:
                del self._items[later.key]

    async def _called(self, laters: list[Later]) -> Sequence[Any]:
        """Call the function for some arguments, and store what it returns (V10)."""
        engine, cached = self._engine, self._cached
        keys = [later.key for later in laters]
        # The snapshots of the runs may be older than a value that another run has stored meanwhile.
        known = await run(engine, engine.retry, False, _known, (cached.results, keys), {})
        missing = [later for later in laters if known[later.key] is None]
        results = await in_halves(cached.call, missing, self._limiter) if missing else []
        made = {later.key: result for later, result in zip(missing, results, strict=True)}
        found = {key: result for key, result in made.items() if not isinstance(result, BaseException)}
        if found:
            made |= await run(engine, engine.retry, False, _store, (cached.results, found), {})
        return [made[key] if key in made else known[key] for key in keys]


async def _known(txn: Transaction, results: Column[bytes, Any], keys: list[bytes]) -> dict[bytes, Any]:
    return await txn.get_many(results, keys)


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
