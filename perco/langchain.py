"""A record manager for LangChain's indexing API: which documents a vector store has, and from which sources.

    schema = perco.Schema(*perco.langchain.TABLES)
    with perco.sync.open("records", schema) as db:
        manager = perco.langchain.RecordManager("docs", db)
        index(documents, manager, vector_store, cleanup="scoped_full", source_id_key="source")

It differs from others in three ways:

- Its time is the store's: timestamps, which never go back, even if a host's clock does. A key that a call has
  updated is never older than what `get_time` returned before, in any process.
- A key may belong to several groups (sources). It is listed for deletion only if all of them have given it up. So if
  two sources have the same document, and one of them loses it, the document stays; if both do, it goes.
- A call with up to a thousand keys is one transaction: after a crash, it is done, or not begun.

Use `cleanup="scoped_full"`, not "incremental". With "incremental", LangChain cleans up after each batch: it deletes
documents that later batches of the same source still contain, and embeds them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import perco.aio
import perco.aio.calling
import perco.sync
import perco.sync.calling
from perco.database.database import Database
from perco.errors import UsageError
from perco.schema.codecs import BOOL, INT64, MSGPACK, TEXT, Tuple
from perco.schema.schema import Column, Table
from perco.txn.transaction import Transaction

try:
    from langchain_core.indexing import RecordManager as _Base
except ImportError as _error:  # pragma: no cover
    raise ImportError("perco.langchain needs langchain-core: pip install 'perco[langchain]'") from _error

T = TypeVar("T")

_AT_ONCE: Final = 1000  # keys in a transaction

_records: Table[Any] = Table("langchain records", key=Tuple(TEXT, TEXT))  # (namespace, key)
_held: Column[Any, Any] = _records.column("held", MSGPACK)  # when it was updated, and by group the same
_ages: Table[Any] = Table("langchain ages", key=Tuple(TEXT, INT64, TEXT))  # (namespace, when, key)
_there: Column[Any, bool] = _ages.column("there", BOOL)
_groups: Table[Any] = Table("langchain groups", key=Tuple(TEXT, TEXT, TEXT))  # (namespace, group, key)
_since: Column[Any, int] = _groups.column("since", INT64)

TABLES: Final[tuple[Table[Any], ...]] = (_records, _ages, _groups)
"""The tables of all record managers. Make them a part of the schema with which the store is opened."""


class RecordManager(_Base):
    """Keeps track of the documents that LangChain's `index` and `aindex` have written to a vector store.

    Args:
        namespace: separates managers in one store.
        db: a store that `perco.sync.open` has opened, for `index`; its methods also work with `aindex`, in threads. Or
            one that `perco.aio.open` has opened, for `aindex` only.

    Raises: UsageError.
    """

    namespace: str

    def __init__(self, namespace: str, db: perco.sync.Database | perco.aio.Database) -> None:
        super().__init__(namespace)
        if not isinstance(db, perco.sync.Database | perco.aio.Database):
            raise UsageError(f"RecordManager takes a store opened by perco.sync or perco.aio, not {db!r}")
        self._db = db

    # ------------------------------------------------------------ the calls

    def create_schema(self) -> None:
        """Do nothing: the tables are made when the store is opened."""

    async def acreate_schema(self) -> None:
        """Do nothing: the tables are made when the store is opened."""

    def get_time(self) -> float:
        """A timestamp of the store: keys that are updated later have at least this time."""
        return self._ask(_time)

    async def aget_time(self) -> float:
        """See `get_time`."""
        return await self._aask(_time)

    def update(
        self,
        keys: Sequence[str],
        *,
        group_ids: Sequence[str | None] | None = None,
        time_at_least: float | None = None,
    ) -> None:
        """Note that the vector store has these keys now, each for its group. Without `group_ids`, they keep their
        groups.

        Raises: ValueError if the lists differ in length, or if the store's time is before `time_at_least`.
        """
        self._ask(_update, self.namespace, _paired(keys, group_ids), time_at_least)

    async def aupdate(
        self,
        keys: Sequence[str],
        *,
        group_ids: Sequence[str | None] | None = None,
        time_at_least: float | None = None,
    ) -> None:
        """See `update`."""
        await self._aask(_update, self.namespace, _paired(keys, group_ids), time_at_least)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """For each key, whether it is known."""
        return self._ask(_exists, self.namespace, list(keys))

    async def aexists(self, keys: Sequence[str]) -> list[bool]:
        """See `exists`."""
        return await self._aask(_exists, self.namespace, list(keys))

    def list_keys(
        self,
        *,
        before: float | None = None,
        after: float | None = None,
        group_ids: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> list[str]:
        """Keys that were last updated before and after these times.

        With `group_ids` and `before`: keys that these groups have given up, and no other group holds. A key that
        another group holds is taken out of these groups, and is not listed.
        """
        return self._ask(_list, self.namespace, before, after, group_ids, limit)

    async def alist_keys(
        self,
        *,
        before: float | None = None,
        after: float | None = None,
        group_ids: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> list[str]:
        """See `list_keys`."""
        return await self._aask(_list, self.namespace, before, after, group_ids, limit)

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Forget keys, and their groups."""
        self._ask(_delete, self.namespace, list(keys))

    async def adelete_keys(self, keys: Sequence[str]) -> None:
        """See `delete_keys`."""
        await self._aask(_delete, self.namespace, list(keys))

    # ------------------------------------------------------------ the store

    def _ask(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        if isinstance(self._db, perco.aio.Database):
            raise UsageError("this store was opened with perco.aio: use aindex(...), or open it with perco.sync")
        return perco.sync.calling.ask_for(self._db, function, *args)

    async def _aask(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        if isinstance(self._db, perco.aio.Database):
            return await perco.aio.calling.ask_for(self._db, function, *args)
        return await asyncio.to_thread(self._ask, function, *args)


def _paired(keys: Sequence[str], group_ids: Sequence[str | None] | None) -> list[tuple[str, str | None]]:
    if group_ids is not None and len(group_ids) != len(keys):
        raise ValueError(f"there are {len(keys)} keys and {len(group_ids)} groups")
    return list(zip(keys, group_ids or [None] * len(keys), strict=True))


# ------------------------------------------------------------ on the loop


async def _time(db: Database) -> float:
    async with db.snapshot() as snap:
        return float(snap.start_ts)


async def _in_parts(db: Database, items: list[Any], body: Callable[[Transaction, list[Any]], Awaitable[None]]) -> None:
    for at in range(0, len(items), _AT_ONCE):
        await db.run(body, items[at : at + _AT_ONCE])


async def _update(
    db: Database, namespace: str, pairs: list[tuple[str, str | None]], time_at_least: float | None
) -> None:
    async def write(txn: Transaction, some: list[tuple[str, str | None]]) -> None:
        known = await txn.get_many(_held, [(namespace, key) for key, _ in some])
        now = txn.start_ts
        if time_at_least is not None and now < time_at_least:
            raise ValueError(f"the store's time is {now}, before {time_at_least:g}: that is the time of another store")
        for key, group in some:
            place = namespace, key
            when, groups = known[place] or (None, {})
            if when is not None and when != now:
                txn.delete(_there, (namespace, when, key))
            txn.set(_there, (namespace, now, key), True)
            if group is not None:
                groups = {**groups, group: now}
                txn.set(_since, (namespace, group, key), now)
            known[place] = now, groups
            txn.set(_held, place, known[place])

    await _in_parts(db, pairs, write)


async def _exists(db: Database, namespace: str, keys: list[str]) -> list[bool]:
    async with db.snapshot() as snap:
        known = await snap.get_many(_held, [(namespace, key) for key in keys])
    return [known[namespace, key] is not None for key in keys]


async def _delete(db: Database, namespace: str, keys: list[str]) -> None:
    async def forget(txn: Transaction, some: list[str]) -> None:
        for (_, key), held in (await txn.get_many(_held, [(namespace, key) for key in some])).items():
            if held is not None:
                when, groups = held
                txn.delete(_held, (namespace, key))
                txn.delete(_there, (namespace, when, key))
                for group in groups:
                    txn.delete(_since, (namespace, group, key))

    await _in_parts(db, keys, forget)


async def _list(
    db: Database,
    namespace: str,
    before: float | None,
    after: float | None,
    group_ids: Sequence[str] | None,
    limit: int | None,
) -> list[str]:
    if limit is not None and limit < 1:
        return []
    if group_ids is None:
        return await _by_age(db, namespace, before, after, limit)
    body = partial(_given_up, namespace=namespace, before=before, after=after, limit=limit)
    while True:
        found, ended = await db.run(body, set(group_ids))
        if ended:
            return found


def _within(when: int, before: float | None, after: float | None) -> bool:
    return (before is None or when < before) and (after is None or when > after)


async def _by_age(
    db: Database, namespace: str, before: float | None, after: float | None, limit: int | None
) -> list[str]:
    found: list[str] = []
    async with db.snapshot() as snap:
        async for row in snap.scan(_ages, prefix=(namespace,), columns=[_there]):
            _, when, key = row.key
            if before is not None and when >= before:
                break
            if _within(when, before, after):
                found.append(key)
                if len(found) == limit:
                    break
    return found


async def _given_up(
    txn: Transaction,
    groups: set[str],
    *,
    namespace: str,
    before: float | None,
    after: float | None,
    limit: int | None,
) -> tuple[list[str], bool]:
    """See `RecordManager.list_keys`. Also returns whether these are all keys, or as many as are wanted: if not, the
    transaction has taken out so many keys that another one must go on."""
    found: dict[str, None] = {}
    taken_out = 0
    for group in sorted(groups):
        async for row in txn.scan(_groups, prefix=(namespace, group), columns=[_since]):
            key = row.key[2]
            if key in found or not _within(row[_since] or 0, before, after):
                continue
            when, holders = await txn.get(_held, (namespace, key)) or (0, {})
            held = any(each not in groups or not _within(since, before, after) for each, since in holders.items())
            if before is not None and held:
                txn.delete(_since, row.key)
                txn.set(_held, (namespace, key), (when, {each: holders[each] for each in holders if each != group}))
                taken_out += 1
            else:
                found[key] = None
            if len(found) == limit:
                return list(found), True
            if taken_out == _AT_ONCE:
                return list(found), False
    return list(found), True
