"""The schema of a simulated run, with its observers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import trio

from perco.protocol.retention import Keep
from perco.schema.codecs import INT64, MSGPACK, TEXT
from perco.schema.schema import Change, Column, Schema, Signal, Table
from perco.testing.growth import GROWN
from perco.txn.transaction import Transaction

if TYPE_CHECKING:
    from perco.testing.viewed import Viewed

_FAILS: Final = 0.4  # the share of runs that fail, if observers fail


ACCOUNTS: Final = [f"a{i}" for i in range(6)]


_BATCH: Final = 4  # runs that may share a transaction
_NAPS_S: Final = (0.0, 0.0, 0.01, 0.03)  # of an observer


PADDING: Final = "-" * 300  # makes a value in the mirror too long to be stored in its write record


LONG: Final = 1 << 40  # numbers from here on make a list too long to be stored in its write record


def twin(key: str) -> str:
    """The other row in which a list may be."""
    return f"{key}~"


def hub_of(number: int) -> str:
    """The row whose signal is raised for a value of a list."""
    return f"h{number % 2}"


def total_of(hub: str, lists: Iterable[list[int] | None]) -> int:
    """How many values of these lists belong to a hub."""
    return sum(hub_of(number) == hub for numbers in lists for number in numbers or ())


class FailingError(Exception):
    """The error of an observer that fails on purpose."""


class World:
    """The tables, columns and observers of one process."""

    keys: list[str]
    length: Column[str, int]
    twice: Column[str, int]
    last: Column[str, int]
    handled: Column[str, Any]
    balance: Column[str, int]
    owner: Column[str, str]
    name: Column[str, str]
    picked: Column[str, int]
    first: Column[str, int] | None
    copied: Column[str, str] | None
    counted: Column[str, Any] | None
    entry: Column[int, str]
    noted: Signal[int]
    seen: Column[int, int]
    touched: Signal[str]
    total: Column[str, int]
    meter: Column[str, int] | None
    count: Column[str, int]
    doubled: Column[str, int]
    turn: Column[str, int]
    flag: Column[str, int]
    viewed: Viewed | None
    schema: Schema

    def __init__(
        self,
        keys: int,
        *,
        late: bool,
        ran: Callable[[int, str], None],
        keep: Keep | None = None,
        naps: random.Random | None = None,
        signals: bool = False,
        failing: bool = False,
        failures: random.Random | None = None,
        grown: int = 0,
        metered: bool = False,
        followed: bool = False,
        counting: bool = False,
        batched: bool = False,
        declare: Callable[[Schema, int], Viewed] | None = None,
    ) -> None:
        self.keys = [f"k{i}" for i in range(keys)]
        self._ran = ran  # records, for a transaction, which observer runs in it
        self._naps = naps  # if given, observers are slow
        self._failures = failures  # if given, observers fail
        lists = Table(
            "lists", key=TEXT, splits=[self.keys[keys // 3], self.keys[2 * keys // 3]], keep=keep, changes=followed
        )
        derived = Table("derived", key=TEXT, splits=[self.keys[keys // 2]], keep=keep)
        self.values: Column[str, Any] = lists.column("values", MSGPACK)
        self.mirror: Column[str, Any] = lists.column("mirror", MSGPACK)  # the same, in a run of the kind "mirrored"
        self.length, self.twice = derived.column("length", INT64), derived.column("twice", INT64)
        self.last = lists.column("last", INT64)
        self.handled = derived.column("handled", MSGPACK)  # the changes for which one observer's runs have committed
        accounts = Table("accounts", key=TEXT, splits=[ACCOUNTS[3]], keep=keep, changes=followed)
        self.balance = accounts.column("balance", INT64)
        names = Table("names", key=TEXT, keep=keep, changes=followed)
        users = Table("users", key=TEXT, keep=keep, changes=followed)
        self.owner, self.name = names.column("owner", TEXT), users.column("name", TEXT)
        self.picked = derived.column("picked", INT64)
        self.first = derived.column("first", INT64) if late else None
        # The observer of version `grown` copies the journal, whose rows are written once, and puts its version into
        # each copy. It also notes the changes for which its runs have committed.
        self.grown = grown
        self.copied = derived.column("copied", TEXT) if grown else None
        self.counted = derived.column("counted", MSGPACK, group="counted") if grown else None
        journal = Table("journal", key=INT64, keep=keep)
        self.entry = journal.column("entry", TEXT)
        slips, hubs = Table("slips", key=INT64, keep=keep), Table("hubs", key=TEXT, splits=["h1"], keep=keep)
        self.noted, self.seen = slips.signal("noted"), slips.column("seen", INT64)
        self.touched, self.total = hubs.signal("touched"), hubs.column("total", INT64)
        more: tuple[Table[Any], ...] = (slips, hubs) if signals else ()
        meters = Table("meters", key=TEXT, splits=["m4"], keep=keep)
        self.meter = meters.column("value", INT64) if metered else None
        more += (meters,) if metered else ()
        more += (self._counters(keep),) if counting else ()
        self.schema = Schema(lists, derived, accounts, names, users, journal, *more)
        self._observe(late=late, signals=signals, failing=failing, counting=counting, batch=_BATCH if batched else 1)
        self.viewed = declare(self.schema, grown) if declare is not None else None

    def _observe(self, *, late: bool, signals: bool, failing: bool, counting: bool, batch: int) -> None:
        self.schema.observe(self.values, id="length", batch=batch)(self._length)
        self.schema.observe(self.values, id="last", batch=batch)(self._last)
        self.schema.observe(self.length, id="twice", batch=batch)(self._twice)
        if late:
            self.schema.observe(self.values, id="first")(self._first)
        if failing:
            self.schema.observe(self.values, id="picky", batch=batch)(self._picky)
        if signals:
            self.schema.observe(self.noted, id="relay", batch=batch)(self._relay)
            self.schema.observe(self.noted, id="idler", batch=batch)(self._idler)
            self.schema.observe(self.touched, id="gather", batch=batch)(self._gather)
        if counting:
            self.schema.observe(self.count, id="double")(self._double)
        if self.grown:
            delay_s = 0.02 if self.grown > 1 else 0.0
            self.schema.observe(self.entry, id=GROWN, version=self.grown, delay_s=delay_s, priority=-self.grown)(
                self._copy
            )

    def _counters(self, keep: Keep | None) -> Table[str]:
        """The table of `counting.py`."""
        counters = Table("counters", key=TEXT, splits=["c1"], keep=keep)
        self.count, self.doubled = counters.column("count", INT64), counters.column("doubled", INT64)
        self.turn, self.flag = counters.column("turn", INT64), counters.column("flag", INT64)
        self.log: Column[str, Any] = counters.column("log", MSGPACK)
        return counters

    def derivatives(self) -> Iterator[tuple[Column[str, Any], Callable[[list[int]], int]]]:
        """Yields each column that an observer derives from a list, and the function that derives it."""
        yield self.length, len
        yield self.twice, lambda value: 2 * len(value)
        yield self.last, lambda value: value[-1]
        if self.first is not None:
            yield self.first, lambda value: value[0]

    @staticmethod
    def _put(txn: Transaction, column: Column[str, int], key: str, value: int | None) -> None:
        if value is None:
            txn.delete(column, key)
        else:
            txn.set(column, key, value)

    async def _begins(self, txn: Transaction, name: str) -> None:
        self._ran(txn.start_ts, name)
        if self._failures is not None and self._failures.random() < _FAILS:
            raise FailingError(name)
        if self._naps is not None:
            await trio.sleep(self._naps.choice(_NAPS_S))

    async def _relay(self, txn: Transaction, change: Change[int, None]) -> None:
        await self._begins(txn, f"observer relay of {change.key}")
        txn.set(self.seen, change.key, (await txn.get(self.seen, change.key) or 0) + 1)
        txn.signal(self.touched, hub_of(change.key))

    async def _idler(self, txn: Transaction, change: Change[int, None]) -> None:
        await self._begins(txn, f"observer idler of {change.key}")

    async def _gather(self, txn: Transaction, change: Change[str, None]) -> None:
        await self._begins(txn, f"observer gather of {change.key}")
        rows = [row for key in self.keys for row in (key, twin(key))]
        found = await txn.get_many(self.values, rows)
        txn.set(self.total, change.key, total_of(change.key, found.values()))

    async def _length(self, txn: Transaction, change: Change[str, Any]) -> None:
        await self._begins(txn, f"observer length of {change.key}")
        self._put(txn, self.length, change.key, None if change.value is None else len(change.value))
        txn.set(self.handled, change.key, [*(await txn.get(self.handled, change.key) or ()), change.commit_ts])

    async def _picky(self, txn: Transaction, change: Change[str, Any]) -> None:
        await self._begins(txn, f"observer picky of {change.key}")
        self._put(txn, self.picked, change.key, None if change.value is None else len(change.value))

    async def _last(self, txn: Transaction, change: Change[str, Any]) -> None:
        await self._begins(txn, f"observer last of {change.key}")
        seen = await txn.get(self.values, change.key)
        self._put(txn, self.last, change.key, seen[-1] if seen else None)

    async def _twice(self, txn: Transaction, change: Change[str, int]) -> None:
        await self._begins(txn, f"observer twice of {change.key}")
        length = await txn.get(self.length, change.key)
        self._put(txn, self.twice, change.key, None if length is None else 2 * length)

    async def _double(self, txn: Transaction, change: Change[str, int]) -> None:
        await self._begins(txn, f"observer double of {change.key}")
        txn.set(self.doubled, change.key, 2 * (change.value or 0))

    async def _first(self, txn: Transaction, change: Change[str, Any]) -> None:
        assert self.first is not None
        await self._begins(txn, f"observer first of {change.key}")
        self._put(txn, self.first, change.key, None if change.value is None else change.value[0])

    async def _copy(self, txn: Transaction, change: Change[int, str]) -> None:
        assert self.copied is not None
        assert self.counted is not None
        await self._begins(txn, f"observer copy of {change.key}")
        row = str(change.key)
        if change.value is None:
            txn.delete(self.copied, row)
        else:
            txn.set(self.copied, row, self.copy_of(change.value))
        counted = await txn.get(self.counted, row) or ()
        txn.set(self.counted, row, [*counted, [self.grown, change.commit_ts]])

    def copy_of(self, entry: str) -> str:
        return f"{entry} by version {self.grown}"
