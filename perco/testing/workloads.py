"""What the clients of the simulation do, and what must be true of it at every moment.

    lists    append to lists and read them: the history is checked for snapshot isolation; observers derive from them
             through a chain of two and two that share a column; a list may move to another row: deleted here, written
             there, so deletes that come back, or are lost, show as lists that are there twice or not at all
    bank     transfers: the total is the same in every snapshot, of the past too, and a past one reads the same again
    unique   an index row for each value, kept in the same transaction: never two rows with one value
    locks    some lists are appended to by those who lock all that they read, the others by those who lock nothing: the
             history is checked for serializability
    journal  each append is noted in a row of its own, which nobody reads before the end; some of them are deleted
    signals  each append raises a signal in a row of its own, which nobody raises again; its observer counts its runs
             there and raises another, of one of two rows, whose observer counts the values of all lists; some
             transactions do nothing but signal (N5)
    failing  observers fail now and then and are given up soon; what has failed is replayed, or, of an observer that is
             there for that, dropped: what was dropped and has no newer change may be missing, and nothing else
    held     readers that take their time, row by row
    waits    clients wait until what they wrote has been observed, and look whether it has (one process)
    tokens   always: what became of a transaction is asked again later, and never changes

`World` is what one process knows: its schema. A late one has a column and an observer more (N10).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Any, Final, Protocol

import trio

from perco.errors import NotIdle
from perco.notify.database import Database
from perco.notify.failures import Listed
from perco.storage import FAILED_LIST, NOTIFY, TS_MAX, WRITE, Query
from perco.testing.growth import GROWN
from perco.testing.history import FAIL, OK, UNKNOWN, Ops
from perco.txn.codecs import INT64, MSGPACK, TEXT
from perco.txn.reads import Isolation
from perco.txn.records import observed_column, observer_of, unpack_record
from perco.txn.retention import Keep
from perco.txn.schema import Change, Column, Schema, Table
from perco.txn.transaction import Snapshot, Transaction

KINDS: Final = (
    *("bank", "unique", "moves", "long", "late", "vacuum", "journal", "held", "waits", "napping"),
    *("serializable", "locks"),
)
OFTEN: Final = {"serializable": 0.2, "locks": 0.2, "vacuum": 0.8}  # else half of the seeds have it
SIGNALS_OFTEN: Final = 0.22  # of the seeds have signals
FAILING_OFTEN: Final = 0.3  # of the seeds have observers that fail
MIRRORED_OFTEN: Final = 0.15  # of the seeds read ahead, and have lists that are there twice in a row
_FAILS: Final = 0.4  # of their runs
_ACCOUNTS: Final = [f"a{i}" for i in range(6)]
_FUNDS: Final = 100  # on an account that nobody has touched
_USERS: Final = [f"u{i}" for i in range(5)]
_NAMES: Final = [f"n{i}" for i in range(4)]
_PAST_MAX: Final = 16  # snapshots that are looked at again
_TOKENS_MAX: Final = 40  # transactions that are asked for again
_NAPS_S: Final = (0.0, 0.0, 0.01, 0.03)  # of an observer
_WAIT_S: Final = 0.5  # for observers, at most
_SINCE_MAX: Final = 16  # changes
_PADDING: Final = "-" * 300  # makes what stands in the mirror too long to ride in its record
LONG: Final = 1 << 40  # numbers from here on make a list too long to ride in its record


def twin(key: str) -> str:
    """The other row that a list may live in."""
    return f"{key}~"


def hub_of(number: int) -> str:
    """The row that is touched for a value of a list."""
    return f"h{number % 2}"


def total_of(hub: str, lists: Iterable[list[int] | None]) -> int:
    """How many values of these lists touch a hub."""
    return sum(hub_of(number) == hub for numbers in lists for number in numbers or ())


class FailingError(Exception):
    """What an observer raises that has been told to fail."""


class World:
    """Tables, columns and observers as one process has them."""

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
    ) -> None:
        self.keys = [f"k{i}" for i in range(keys)]
        self._ran = ran  # told which transaction is whose run
        self._naps = naps  # observers take their time
        self._failures = failures  # and fail
        lists = Table("lists", key=TEXT, splits=[self.keys[keys // 3], self.keys[2 * keys // 3]], keep=keep)
        derived = Table("derived", key=TEXT, splits=[self.keys[keys // 2]], keep=keep)
        self.values: Column[str, Any] = lists.column("values", MSGPACK)
        self.mirror: Column[str, Any] = lists.column("mirror", MSGPACK)  # the same, if the run is for that
        self.length = derived.column("length", INT64)
        self.twice = derived.column("twice", INT64)
        self.last = lists.column("last", INT64)
        self.handled = derived.column("handled", MSGPACK)  # the changes that committed runs of one observer were for
        accounts = Table("accounts", key=TEXT, splits=[_ACCOUNTS[3]], keep=keep)
        self.balance = accounts.column("balance", INT64)
        names, users = Table("names", key=TEXT, keep=keep), Table("users", key=TEXT, keep=keep)
        self.owner = names.column("owner", TEXT)
        self.name = users.column("name", TEXT)
        self.picked = derived.column("picked", INT64)
        self.first = derived.column("first", INT64) if late else None
        # Version `grown` of an observer says so in what it makes of the journal, whose rows are written once; and which
        # changes its committed runs were for.
        self.grown = grown
        self.copied = derived.column("copied", TEXT) if grown else None
        self.counted = derived.column("counted", MSGPACK) if grown else None
        journal = Table("journal", key=INT64, keep=keep)
        self.entry = journal.column("entry", TEXT)
        slips, hubs = Table("slips", key=INT64, keep=keep), Table("hubs", key=TEXT, splits=["h1"], keep=keep)
        self.noted, self.seen = slips.signal("noted"), slips.column("seen", INT64)
        self.touched, self.total = hubs.signal("touched"), hubs.column("total", INT64)
        more: tuple[Table[Any], ...] = (slips, hubs) if signals else ()
        meters = Table("meters", key=TEXT, splits=["m4"], keep=keep)
        self.meter = meters.column("value", INT64) if metered else None
        more += (meters,) if metered else ()
        self.schema = Schema(lists, derived, accounts, names, users, journal, *more)
        self.schema.observe(self.values, id="length")(self._length)
        self.schema.observe(self.values, id="last")(self._last)
        self.schema.observe(self.length, id="twice")(self._twice)
        if late:
            self.schema.observe(self.values, id="first")(self._first)
        if failing:
            self.schema.observe(self.values, id="picky")(self._picky)
        if signals:
            self.schema.observe(self.noted, id="relay")(self._relay)
            self.schema.observe(self.noted, id="idler")(self._idler)
            self.schema.observe(self.touched, id="gather")(self._gather)
        if grown:
            delay_s = 0.02 if grown > 1 else 0.0
            self.schema.observe(self.entry, id=GROWN, version=grown, delay_s=delay_s, priority=-grown)(self._copy)

    def derivatives(self) -> Iterator[tuple[Column[str, Any], Callable[[list[int]], int]]]:
        """What observers keep of a list."""
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


class Began(Protocol):
    """Is told of the transaction that a client begins."""

    def note(self, txn: Transaction) -> None: ...
    def __call__(self, manager: AbstractAsyncContextManager[Transaction]) -> AbstractAsyncContextManager[Transaction]:
        """The same block; its transaction is noted."""
        ...


class Clients:
    """What the clients of one run do; shared by all of its processes. `problem` is told what must never be seen."""

    def __init__(self, kinds: frozenset[str], problem: Callable[[str], None]) -> None:
        self.kinds, self._problem = kinds, problem
        self.problem = problem
        self.is_run: Callable[[int], bool] = lambda start_ts: False  # whether an observer's run began then
        self._count = LONG if "long" in kinds else 0
        self._past: list[tuple[int, dict[str, int]]] = []
        self._written: list[tuple[int, set[str]]] = []  # (commit_ts, rows of lists)
        self._fates: dict[str, int | None] = {}  # of transactions by their tokens; None: nobody has been told
        self._entries: list[int] = []  # of the journal, not deleted yet
        self._deleted: dict[int, str] = {}  # those that somebody began to delete, and what became of it
        self._raised: dict[int, str] = {}  # signals without an append, and what became of them
        self._noted: list[tuple[int, int]] = []  # signals that surely were raised: (commit_ts, number)
        self._dropped: set[tuple[str, int]] = set()  # changes (row, commit_ts) that somebody began to drop
        self.waits = 0  # for observers, that came to their end
        self.replayed = 0  # changes that had been given up
        self.answered = 0  # the newest commit of which some client knows

    async def act(self, db: Database, world: World, ops: Ops, rng: random.Random, began: Began) -> None:
        """One transaction, or one look at the past. `began` is told of the transaction before it does anything."""
        chance = rng.random()
        if "signals" in self.kinds and rng.random() < 0.25:
            await self._raise(db, world, rng, began)
        elif chance < 0.12 and "bank" in self.kinds:
            if chance < 0.03 and self._past:
                await self._look_back(db, world, *rng.choice(self._past))
            elif chance < 0.09:
                await self._run_transfer(db, world, rng, began)
            else:
                async with began(db.transaction()) as txn:
                    await self._audit(txn, world, rng)
        elif 0.12 <= chance < 0.24 and "unique" in self.kinds:
            async with began(db.transaction()) as txn:
                await (self._claim(txn, world, rng) if chance < 0.21 else self._audit_names(txn, world))
        elif 0.24 <= chance < 0.27 and self._fates:
            await self._ask_again(db, rng.choice(list(self._fates)))
        elif 0.27 <= chance < 0.33 and "waits" in self.kinds and self._written:
            await self._wait(db, world, *rng.choice(self._written))
        elif 0.33 <= chance < 0.41 and self._entries:
            await self._forget(db, world, rng, began)
        else:
            await self._lists(db, world, ops, rng, began)

    # ------------------------------------------------------------ what became of a transaction

    def begun(self, answered: int, start_ts: int) -> None:
        """`answered`: as it was when the transaction was asked for."""
        if start_ts <= answered:
            self._problem(f"O2: {start_ts} was given to one who came when the commit at {answered} had been answered")

    def ended(self, txn: Transaction, status: str) -> None:
        """It may be asked for again."""
        if status == OK:
            self.answered = max(self.answered, txn.commit_ts)
        if txn.token:
            self._fates[txn.token] = {OK: txn.commit_ts, FAIL: 0}.get(status)
            if len(self._fates) > _TOKENS_MAX:
                del self._fates[next(iter(self._fates))]

    async def _ask_again(self, db: Database, token: str) -> None:
        fate = await db.outcome(token)
        told = self._fates.get(token)
        if told is not None and told != fate:
            self._problem(f"T4: of {token} it was told {told}, and then {fate}")
        elif token in self._fates:
            self._fates[token] = fate

    # ------------------------------------------------------------ what has failed

    async def tend(self, db: Database, rng: random.Random) -> None:
        """Replay some of what has been given up, and drop some of what is there for that."""
        async with aclosing(db.listed(None, None)) as pages:
            found = [listed async for page in pages for listed in page]
        for listed in found:
            (table, row, ack), ts, _ = listed
            queries: list[Query] = [(FAILED_LIST, ack, ts, ts, 1), (NOTIFY, ack, ts, ts, 1)]
            queries += [(WRITE, ack, 0, TS_MAX, 1), (WRITE, observed_column(ack), 0, TS_MAX, 1)]
            [[failed, waits, acks, changes]] = await db.driver.store.read([(table, row, queries)])
            signal = observed_column(ack) in db.catalogue.signals(table)
            if failed and not changes and not signal:
                self._problem(f"G3: the change of {row!r} at {ts} has failed, and the cell is gone")
            if failed and waits and not signal:  # a signal's prewrite has no check: repeated late, it is raised again
                self._problem(f"N6: the change of {row!r} at {ts} has failed, and waits as well")
            # Of a signal more than one run may commit (N5), also one that began before another gave it up.
            if failed and acks and not signal and unpack_record(acks[0][1]).start_ts >= ts:
                self._problem(f"N6: the change of {row!r} at {ts} has failed, and is acknowledged as well")
            if rng.random() < 0.5:
                continue
            if observer_of(listed.ack.column) == db.catalogue.observers["picky"].number and rng.random() < 0.6:
                self._dropped.add((listed.ack.row.decode(), listed.ts))
                await db._drop(listed)
                await self._verify_dropped(db, listed)
            else:
                self.replayed += await db._replay(listed)

    async def _verify_dropped(self, db: Database, listed: Listed) -> None:
        """N3: what has changed since is not acknowledged with it. Another process may have dropped a later change."""
        (table, row, ack), ts, _ = listed
        queries: list[Query] = [(WRITE, ack, 0, TS_MAX, 1), (WRITE, observed_column(ack), ts + 1, TS_MAX, _SINCE_MAX)]
        [[acks, changes]] = await db.driver.store.read([(table, row, queries)])
        seen = unpack_record(acks[0][1]).start_ts if acks else 0
        if self.is_run(seen):
            return
        dropped = max((at for of, at in self._dropped if of == row.decode() and at <= seen), default=0)
        for changed, _ in changes:
            if dropped < changed <= seen:
                self._problem(f"N3: a drop in {row!r} acknowledged {changed}, which nobody ran for or dropped")

    async def _verify_picked(self, snap: Snapshot, world: World, rows: list[str]) -> None:
        for row in rows:
            found = await snap.row(world.values.table, row, [world.values])
            value, picked = found[world.values], await snap.get(world.picked, row)
            wanted = len(value) if value else None
            at = found.commit_ts(world.values)  # 0: it was deleted, and that has been collected
            dropped = {ts for of, ts in self._dropped if of == row}
            if picked != wanted and not (at in dropped if at else dropped):
                self._problem(f"N3, N6: {row} has {wanted} values, and picked is {picked}, though nobody dropped that")

    # ------------------------------------------------------------ lists

    async def _lists(self, db: Database, world: World, ops: Ops, rng: random.Random, began: Began) -> None:
        isolation: Isolation = "serializable" if "serializable" in self.kinds else "snapshot"
        rows: set[str] = set()
        async with began(db.transaction(isolation=isolation)) as txn:
            if rng.random() < 0.3:
                await self._read(txn, world, ops, rng)
            elif "locks" in self.kinds:
                rows = {await self._append_beside(txn, world, ops, rng)}
            else:
                rows = await self._append(txn, world, ops, rng)
        if "journal" in self.kinds:
            self._entries += [value for kind, _, value in ops.made if kind == "a"]
        self._noted = [*self._noted[-9:], *((txn.commit_ts, value) for kind, _, value in ops.made if kind == "a")]
        if rows:
            self._written = [*self._written[-3:], (txn.commit_ts, rows)]

    def one_of(self, key: str, found: dict[str, Any]) -> tuple[str, list[int]]:
        """The row that a list lives in, and the list."""
        rows = [row for row in (key, twin(key)) if found.get(row) is not None]
        if len(rows) > 1:
            self._problem(f"T1, T9: list {key} is there twice: {found[rows[0]]}, {found[rows[1]]}")
        row = rows[0] if rows else key
        return row, list(found.get(row) or ())

    def _rows(self, key: str) -> list[str]:
        return [key, twin(key)] if "moves" in self.kinds else [key]

    async def _read(self, txn: Transaction, world: World, ops: Ops, rng: random.Random) -> None:
        values = world.values
        keys = world.keys[len(world.keys) // 2 :] if "locks" in self.kinds else world.keys
        rows = [row for key in keys for row in self._rows(key)]
        if "held" in self.kinds and rng.random() < 0.5:
            found = {}
            for row in rows:
                found[row] = await txn.get(values, row)
                await trio.sleep(rng.choice((0.0, 0.005, 0.02)))
                await self._in_the_mirror(txn, world, row, found[row])
        elif rng.random() < 0.5:
            found = {row.key: row[values] async for row in txn.scan(values.table, start=keys[0], columns=[values])}
        else:
            found = await txn.get_many(values, rows)
            for row in rows:
                await self._in_the_mirror(txn, world, row, found[row])
        for key in keys:
            ops.read(key, self.one_of(key, found)[1])

    async def _append(self, txn: Transaction, world: World, ops: Ops, rng: random.Random) -> set[str]:
        """Returns the rows that it wrote."""
        written = set()
        for key in rng.sample(world.keys, rng.randint(1, 3)):
            found = {row: await txn.get(world.values, row) for row in self._rows(key)}
            for row in found:
                await self._in_the_mirror(txn, world, row, found[row])
            row, seen = self.one_of(key, found)
            ops.read(key, seen)
            if rng.random() < 0.7:
                written.add(self._append_to(txn, world, ops, rng, key, row, seen))
            if rng.random() < 0.2:
                await trio.sleep(rng.choice((0.0, 0.003)))
        return written

    async def _in_the_mirror(self, txn: Transaction, world: World, row: str, seen: list[int] | None) -> None:
        """What is read of a row later is what was written with what was read of it first, though it may have been read
        ahead."""
        if "mirrored" in self.kinds:
            found = await txn.get(world.mirror, row)
            mirrored = None if found is None else found[1]
            if mirrored != seen:
                self._problem(f"T9: at {txn.start_ts} {row} has {seen}, and in the mirror it has {mirrored}")

    def _append_to(
        self, txn: Transaction, world: World, ops: Ops, rng: random.Random, key: str, row: str, seen: list[int]
    ) -> str:
        self._count += 1
        ops.append(key, self._count)
        if "moves" in self.kinds and seen and rng.random() < 0.3:
            txn.delete(world.values, row)
            if "mirrored" in self.kinds:
                txn.delete(world.mirror, row)
            row = twin(key) if row == key else key
        txn.set(world.values, row, [*seen, self._count])
        if "mirrored" in self.kinds:
            txn.set(world.mirror, row, (_PADDING, [*seen, self._count]))
        if "journal" in self.kinds:
            txn.set(world.entry, self._count, key)
        if "signals" in self.kinds:
            txn.signal(world.noted, self._count)
        return row

    async def _append_beside(self, txn: Transaction, world: World, ops: Ops, rng: random.Random) -> str:
        """T14: those who lock nothing read only what is written under locks, so they overtake nobody who is overtaken.

        Returns the row that it wrote.
        """
        half = len(world.keys) // 2
        lock = rng.random() < 0.5
        target = rng.choice(world.keys[half:] if lock else world.keys[:half])
        for key in rng.sample(world.keys if lock else world.keys[half:], 2):
            if key != target:
                found = {row: await txn.get(world.values, row, lock=lock) for row in self._rows(key)}
                ops.read(key, self.one_of(key, found)[1])
        row, seen = self.one_of(target, {row: await txn.get(world.values, row) for row in self._rows(target)})
        ops.read(target, seen)
        if rng.random() < 0.4:
            await trio.sleep(rng.choice((0.0, 0.003)))
        return self._append_to(txn, world, ops, rng, target, row, seen)

    async def _wait(self, db: Database, world: World, ts: int, rows: set[str]) -> None:
        """N7: what was committed up to `ts` has been observed, and what follows from it."""
        try:
            await db.wait_for(ts, timeout=_WAIT_S)
        except NotIdle:
            return
        self.waits += 1
        async with db.snapshot() as snap:
            for row in sorted(rows):
                handled = max(await snap.get(world.handled, row) or (0,))
                length, twice = await snap.get(world.length, row), await snap.get(world.twice, row)
                # If there is a newer change, what follows from it is not waited for.
                if handled < ts or (handled == ts and twice != (None if length is None else 2 * length)):
                    self._problem(f"N7: {ts} was waited for; {row} was observed at {handled}: {length}, twice {twice}")

        if "signals" in self.kinds:
            await self._wait_seen(db, world, ts)

    # ------------------------------------------------------------ signals

    async def _wait_seen(self, db: Database, world: World, ts: int) -> None:
        noted = [number for commit_ts, number in self._noted if commit_ts <= ts]
        async with db.snapshot() as snap:
            seen = await snap.get_many(world.seen, noted)
        for number in noted:
            if not seen[number]:
                self._problem(f"N5, N7: {ts} was waited for, and the signal of {number} was not run for")

    async def _raise(self, db: Database, world: World, rng: random.Random, began: Began) -> None:
        """A transaction that does nothing but signal."""
        self._count += 1
        number = self._count
        self._raised[number] = UNKNOWN
        async with began(db.transaction()) as txn:
            hub = rng.choice(("h0", "h1"))
            first = rng.random() < 0.5  # the primary is where the first is
            if first:
                txn.signal(world.touched, hub)
            txn.signal(world.noted, number)
            if not first:
                txn.signal(world.touched, hub)
        self._raised[number] = OK
        self._noted.append((txn.commit_ts, number))
        if "waits" in self.kinds and rng.random() < 0.8:
            with suppress(NotIdle):
                await db.wait_for(txn.commit_ts, timeout=_WAIT_S)
                await self._wait_seen(db, world, txn.commit_ts)

    async def _verify_signals(self, snap: Snapshot, world: World, lists: dict[str, list[int]]) -> None:
        raised = {number for numbers in lists.values() for number in numbers}
        seen = {row.key async for row in snap.scan(world.seen.table, columns=[world.seen])}
        for number in sorted(raised | {number for number, fate in self._raised.items() if fate == OK}):
            if number not in seen:
                self._problem(f"N5: nobody has run for the signal of {number}")
        for number in sorted(seen - raised - self._raised.keys()):
            self._problem(f"N5: somebody has run for the signal of {number}, which was never raised")
        totals = await snap.get_many(world.total, ["h0", "h1"])
        for hub, total in totals.items():
            if (total or 0) != total_of(hub, lists.values()):
                self._problem(f"N5: {total} values were counted in {hub}; there are {total_of(hub, lists.values())}")

    # ------------------------------------------------------------ journal

    async def _forget(self, db: Database, world: World, rng: random.Random, began: Began) -> None:
        """Delete an entry that has not been looked at since."""
        number = self._entries.pop(rng.choice((-1, rng.randrange(len(self._entries)))))  # new or old
        self._deleted[number] = UNKNOWN
        async with began(db.transaction()) as txn:
            txn.delete(world.entry, number)
        self._deleted[number] = OK

    async def _verify_journal(self, snap: Snapshot, world: World, lists: dict[str, list[int]]) -> None:
        noted = {number: key for key, numbers in lists.items() for number in numbers}
        found = {row.key: row[world.entry] async for row in snap.scan(world.entry.table)}
        for number in sorted(noted.keys() | found.keys()):
            right = {noted.get(number)} if number not in self._deleted else {noted.get(number), None}
            right = {None} if self._deleted.get(number) == OK else right
            if found.get(number) not in right:
                self._problem(f"T1: {number} is in list {noted.get(number)}, and in the journal of {found.get(number)}")

    # ------------------------------------------------------------ bank

    async def _transfer(self, txn: Transaction, world: World, rng: random.Random) -> None:
        source, target = rng.sample(_ACCOUNTS, 2)
        amount = rng.randint(1, 30)
        for account, change in ((source, -amount), (target, amount)):
            balance = await txn.get(world.balance, account)
            txn.set(world.balance, account, (_FUNDS if balance is None else balance) + change)

    async def _run_transfer(self, db: Database, world: World, rng: random.Random, began: Began) -> None:
        """Again after each conflict, as users do it (T11)."""

        async def attempt(txn: Transaction) -> None:
            began.note(txn)
            await self._transfer(txn, world, rng)

        await db.options(attempts=5).run(attempt)

    async def _audit(self, txn: Transaction, world: World, rng: random.Random) -> None:
        balances = await self._balances(txn, world, scan=rng.random() < 0.5)
        if len(self._past) < _PAST_MAX:
            self._past.append((txn.start_ts, balances))
        else:
            self._past[rng.randrange(_PAST_MAX)] = txn.start_ts, balances

    async def _balances(self, snap: Snapshot, world: World, *, scan: bool) -> dict[str, int]:
        if scan:
            found = {row.key: row[world.balance] async for row in snap.scan(world.balance.table)}
        else:
            found = await snap.get_many(world.balance, _ACCOUNTS)
        balances = dict.fromkeys(_ACCOUNTS, _FUNDS)
        balances.update((account, balance) for account, balance in found.items() if balance is not None)
        if sum(balances.values()) != _FUNDS * len(_ACCOUNTS):
            self._problem(f"T1, T9: at {snap.start_ts} the total is {sum(balances.values())}: {balances}")
        return balances

    async def transfer(self, txn: Transaction, world: World, rng: random.Random) -> None:
        """The total stays as it is."""
        await self._transfer(txn, world, rng)

    async def balances(self, snap: Snapshot, world: World) -> dict[str, int]:
        """Of all accounts, at one moment; their total is what it always is."""
        return await self._balances(snap, world, scan=False)

    async def _look_back(self, db: Database, world: World, ts: int, before: dict[str, int]) -> None:
        if ts > db.oracle.last:
            return  # this process has not been told yet that it was issued
        async with db.snapshot(ts=ts) as snap:
            now = await self._balances(snap, world, scan=False)
        if now != before:
            self._problem(f"T9, T15: at {ts} it was {before}, and now it was {now}")

    # ------------------------------------------------------------ unique index

    async def _claim(self, txn: Transaction, world: World, rng: random.Random) -> None:
        user, name = rng.choice(_USERS), rng.choice([*_NAMES, None])
        old = await txn.get(world.name, user)
        if name == old or (name is not None and await txn.get(world.owner, name) is not None):
            return
        if old is not None:
            txn.delete(world.owner, old)
        if name is None:
            txn.delete(world.name, user)
        else:
            txn.set(world.owner, name, user)
            txn.set(world.name, user, name)

    async def _audit_names(self, snap: Snapshot, world: World) -> None:
        users = sorted([(row.key, row[world.name]) async for row in snap.scan(world.name.table)])
        index = sorted([(row[world.owner], row.key) async for row in snap.scan(world.owner.table)])
        if users != index:
            self._problem(f"T1, T7: at {snap.start_ts} the users are {users} and the index says {index}")

    # ------------------------------------------------------------ the end

    async def verify(self, snap: Snapshot, world: World) -> dict[str, list[int]]:
        """At rest: what is derived is what the lists say. Returns the lists."""
        await self._balances(snap, world, scan=True)
        await self._audit_names(snap, world)
        rows = [*world.keys, *map(twin, world.keys)]
        found = await snap.get_many(world.values, rows)
        for row in rows:
            value = found[row]
            derived = [await snap.get(column, row) for column, _ in world.derivatives()]
            wanted = [make(value) if value else None for _, make in world.derivatives()]
            if derived != wanted:
                self._problem(f"N1: {row} has {len(value or ())} values; derived are {derived}, not {wanted}")
            handled = await snap.get(world.handled, row) or ()
            if len(set(handled)) != len(handled):
                self._problem(f"N3: an observer committed twice for one change of {row}: {handled}")
        if "failing" in self.kinds:
            await self._verify_picked(snap, world, rows)
        lists = {key: self.one_of(key, found)[1] for key in world.keys}
        if "journal" in self.kinds:
            await self._verify_journal(snap, world, lists)
        if "signals" in self.kinds:
            await self._verify_signals(snap, world, lists)
        if world.counted is not None:
            await self._verify_copies(snap, world)
        return lists

    async def _verify_copies(self, snap: Snapshot, world: World) -> None:
        """N3, N10: of all that is there the highest version has made its copy, and run once for each change."""
        assert world.copied is not None
        assert world.counted is not None
        entries = {str(row.key): row[world.entry] async for row in snap.scan(world.entry.table)}
        async for row in snap.scan(world.counted.table):
            runs = [tuple(run) for run in row[world.counted] or ()]
            if len(set(runs)) != len(runs):
                self._problem(f"N3: an observer committed twice for one change of {row.key} and version: {runs}")
            if runs != sorted(runs):
                self._problem(f"N10: a lower version ran after a higher one, or for an older change: {row.key}, {runs}")
            entry = entries.pop(row.key, None)
            copied: str | None = row[world.copied]
            if copied != (None if entry is None else world.copy_of(entry)):
                self._problem(f"N10: the copy of {row.key}, {entry}, is {copied}; runs were {runs}")
        if entries:
            self._problem(f"N10: no run was for {sorted(entries)}")
