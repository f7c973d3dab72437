"""Values by collection and key, as JSON, on the store's loop.

A value takes one row, or several if it is long: parts of up to 4 MiB. The first part says how many there are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import perco.aio
import perco.aio.calling
import perco.sync
import perco.sync.calling
from perco.database.database import Database
from perco.errors import UsageError
from perco.schema.codecs import BOOL, BYTES, INT64, TEXT, Tuple
from perco.schema.schema import Column, Table
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction

T = TypeVar("T")
Value = dict[str, Any]

AT_ONCE: Final = 1000  # values in a transaction
BYTES_AT_ONCE: Final = 16 << 20  # in a transaction, unless one value has more
PART_BYTES: Final = 4 << 20

_values: Table[Any] = Table("llamaindex values", key=Tuple(TEXT, TEXT, INT64))  # (collection, key, part)
_data: Column[Any, bytes] = _values.column("data", BYTES)
_parts: Column[Any, int] = _values.column("parts", INT64)  # of part 0: how many
_members: Table[Any] = Table("llamaindex sources", key=Tuple(TEXT, TEXT, TEXT))  # (namespace, source, document)
member: Final[Column[Any, bool]] = _members.column("there", BOOL)

TABLES: Final[tuple[Table[Any], ...]] = (_values, _members)
"""The tables of all stores of this package. Make them a part of the schema with which the store is opened."""


class Front:
    """An opened store, to which coroutine functions are sent from blocking code and from asyncio.

    Raises: UsageError for what is no store opened by `perco.sync` or `perco.aio`.
    """

    def __init__(self, db: perco.sync.Database | perco.aio.Database, what: str) -> None:
        if not isinstance(db, perco.sync.Database | perco.aio.Database):
            raise UsageError(f"{what} takes a store opened by perco.sync or perco.aio, not {db!r}")
        self.db: perco.sync.Database | perco.aio.Database = db

    def ask(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """The result of `function(DATABASE, *args)`. Raises: UsageError for a store of `perco.aio`."""
        if isinstance(self.db, perco.aio.Database):
            raise UsageError("this store was opened with perco.aio: use the async methods, or open it with perco.sync")
        return perco.sync.calling.ask_for(self.db, function, *args)

    async def aask(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """The result of `function(DATABASE, *args)`; with a store of `perco.sync`, in a thread."""
        if isinstance(self.db, perco.aio.Database):
            return await perco.aio.calling.ask_for(self.db, function, *args)
        return await asyncio.to_thread(self.ask, function, *args)


def encoded(value: Value, where: str) -> bytes:
    """A value as JSON; lone surrogates, which some readers of PDF files give, included.

    Raises: UsageError if JSON cannot hold it.
    """
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: JSON cannot hold the value, so change its metadata: {error}") from error


def _decoded(data: bytes) -> Value:
    value: Value = json.loads(data.decode("utf-8", "surrogatepass"))
    return value


# ------------------------------------------------------------ in a transaction


async def put(txn: Transaction, collection: str, key: str, value: Value) -> None:
    """Set a value."""
    await put_data(txn, collection, key, encoded(value, f"{collection}, {key}"))


async def put_data(txn: Transaction, collection: str, key: str, data: bytes) -> None:
    """Set a value that is JSON already."""
    before = await txn.get(_parts, (collection, key, 0)) or 0
    parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
    txn.set(_parts, (collection, key, 0), len(parts))
    for number, part in enumerate(parts):
        txn.set(_data, (collection, key, number), part)
    for number in range(len(parts), before):
        txn.delete(_data, (collection, key, number))


async def get(txn: Transaction | Snapshot, collection: str, key: str) -> Value | None:
    """A value; None: there is none."""
    return (await get_many(txn, collection, [key]))[key]


async def get_many(txn: Transaction | Snapshot, collection: str, keys: Sequence[str]) -> dict[str, Value | None]:
    """Values by key."""
    counts = await txn.get_many(_parts, [(collection, key, 0) for key in keys])
    rows = [(*place[:2], number) for place, count in counts.items() for number in range(count or 0)]
    data = await txn.get_many(_data, rows)
    found: dict[str, Value | None] = {}
    for key in keys:
        count = counts[collection, key, 0]
        parts = (data[collection, key, number] or b"" for number in range(count or 0))
        found[key] = None if count is None else _decoded(b"".join(parts))
    return found


async def delete(txn: Transaction, collection: str, key: str) -> bool:
    """Remove a value. Returns whether there was one."""
    count = await txn.get(_parts, (collection, key, 0))
    if count is None:
        return False
    txn.delete(_parts, (collection, key, 0))
    for number in range(count):
        txn.delete(_data, (collection, key, number))
    return True


# ------------------------------------------------------------ with transactions of their own


def in_parts(items: Iterable[T], size: Callable[[T], tuple[int, int]]) -> Iterator[list[T]]:
    """Items, as many as go into a transaction. `size` says how many values, and bytes, an item has."""
    some: list[T] = []
    count = bytes_ = 0
    for item in items:
        own, own_bytes = size(item)
        if some and (count + own > AT_ONCE or bytes_ + own_bytes > BYTES_AT_ONCE):
            yield some
            some, count, bytes_ = [], 0, 0
        some.append(item)
        count += own
        bytes_ += own_bytes
    if some:
        yield some


async def put_all(
    db: Database, collection: str, pairs: Sequence[tuple[str, Value]], bytes_max: int | None = None
) -> None:
    """Set values: up to a thousand, and 16 MiB, in a transaction. Values that are longer than `bytes_max` as JSON are
    left out."""

    async def write(txn: Transaction, some: list[tuple[str, bytes]]) -> None:
        for key, data in some:
            await put_data(txn, collection, key, data)

    data = [(key, encoded(value, f"{collection}, {key}")) for key, value in pairs]
    short = [each for each in data if bytes_max is None or len(each[1]) <= bytes_max]
    for some in in_parts(short, lambda each: (1, len(each[1]))):
        await db.run(write, some)


async def get_now(db: Database, collection: str, keys: Sequence[str]) -> dict[str, Value | None]:
    """Values by key, of one snapshot."""
    async with db.snapshot() as snap:
        return await get_many(snap, collection, keys)


async def get_all(db: Database, collection: str) -> dict[str, Value]:
    """All values of a collection, of one snapshot, in the order of their keys."""
    async with db.snapshot() as snap:
        return await everything(snap, collection)


async def everything(txn: Transaction | Snapshot, collection: str) -> dict[str, Value]:
    """All values of a collection."""
    parts: dict[str, list[bytes]] = {}
    async for row in txn.scan(_values, prefix=(collection,), columns=[_data]):
        parts.setdefault(row.key[1], []).append(row[_data] or b"")
    return {key: _decoded(b"".join(some)) for key, some in parts.items()}


async def delete_now(db: Database, collection: str, key: str) -> bool:
    """Remove a value. Returns whether there was one."""
    return await db.run(delete, collection, key)


async def clear(db: Database, collection: str) -> None:
    """Remove all values of a collection, a thousand rows in a transaction."""

    async def some(txn: Transaction) -> bool:
        count = 0
        async for row in txn.scan(_values, prefix=(collection,), columns=[_parts, _data]):
            for column in (_parts, _data):
                txn.delete(column, row.key)
            count += 1
            if count == AT_ONCE:
                return True
        return False

    while await db.run(some):
        pass
