"""What the clients of the simulation do, and the conditions that must hold at every moment.

    lists    clients append to lists and read them; the history is checked for snapshot isolation. Observers derive data
             from the lists: two observers form a chain, and two share a column. A list may move to another row (it is
             deleted in one row and written in the other). So if a delete is lost, or deleted data comes back, a list
             exists twice or not at all
    bank     clients transfer money: the total is the same in every snapshot, including past snapshots; a past snapshot
             that is read again shows the same balances
    unique   a unique index: an index row for each value, written in the same transaction. No two rows have the same
             value
    locks    to some lists, clients append in transactions that lock everything they read; to the others, in
             transactions that lock nothing; the history is checked for snapshot isolation
    journal  each append is noted in a row of its own, which is not read before the end; some of these rows are deleted
    signals  each append raises a signal in a row of its own, where it is never raised again. The signal's observer
             counts its runs in this row, and raises another signal, in one of two rows. The observer of that signal
             counts the values in all lists that belong to its row. Some transactions only raise signals (N5)
    failing  observers fail at times, and the changes soon join the failed list. Failed changes are replayed or, for one
             observer, dropped. Results may be missing only for a dropped change that has no newer change
    counting clients carry out operations on single cells, see `counting.py`
    followed a copy of some tables follows their changes, see `following.py`
    held     slow readers, which read row by row
    views    clients write the sources of views, see `viewed.py`
    waits    clients wait until their writes have been observed, and check that they have
    tokens   in every run: if a client asks again later for a transaction's outcome, the answer never changes

`World` is the schema of one process. A late schema has one more column and one more observer (N10).
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import trio

from perco.database.database import Database
from perco.database.inside import inside
from perco.errors import NotIdle
from perco.notify.failures import Listed
from perco.protocol.reads import Isolation
from perco.protocol.records import observed_column, observer_of, unpack_record
from perco.storage import FAILED_LIST, NOTIFY, TS_MAX, WRITE, Query
from perco.testing.counting import Counting
from perco.testing.following import Follower
from perco.testing.history import FAIL, OK, UNKNOWN, Ops
from perco.testing.world import ACCOUNTS, LONG, PADDING, World, total_of, twin
from perco.txn.running import Retrying
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction

if TYPE_CHECKING:
    from perco.testing.viewed import ViewClients

KINDS: Final = (
    *("bank", "unique", "moves", "long", "late", "vacuum", "journal", "held", "waits", "napping"),
    *("serializable", "locks"),
)
OFTEN: Final = {"serializable": 0.2, "locks": 0.2, "vacuum": 0.8}  # the share of seeds that have it; other kinds: 0.5
SIGNALS_OFTEN: Final = 0.22  # the share of seeds with signals
FAILING_OFTEN: Final = 0.3  # the share of seeds with observers that fail
FOLLOWED_OFTEN: Final = 0.2  # the share of seeds in which changes are followed
COUNTING_OFTEN: Final = 0.2  # the share of seeds with operations on single cells
BATCHED_OFTEN: Final = 0.15  # the share of seeds with an embedded store whose observers' runs share transactions
MIRRORED_OFTEN: Final = 0.15  # the share of seeds that have lists in two columns, and may prefetch
_QUIET_S: Final = 0.1  # for which a client leaves views alone
_VIEWED: Final = 0.8  # the share of transactions that concern views, in runs that have views
_FUNDS: Final = 100  # the balance of an account that was never written
_USERS: Final = [f"u{i}" for i in range(5)]
_NAMES: Final = [f"n{i}" for i in range(4)]
_PAST_MAX: Final = 16  # snapshots that are read again
_TOKENS_MAX: Final = 40  # transactions whose outcome is asked for again
_WAIT_S: Final = 0.5  # for observers, at most
_SINCE_MAX: Final = 16  # changes newer than a dropped one that are checked


T = TypeVar("T")


class Began(Protocol):
    """Notes each transaction that a client begins."""

    def note(self, txn: Transaction) -> None: ...
    def __call__(self, manager: AbstractAsyncContextManager[Transaction]) -> AbstractAsyncContextManager[Transaction]:
        """The same context manager, which also notes its transaction."""
        ...

    async def run(self, made: Retrying, function: Callable[[Transaction], Awaitable[T]]) -> T:
        """Run a function as `db.options(...).run` does, and note its transaction when it has a timestamp."""
        ...


class Clients:
    """The operations of the clients of one run; shared by all of its processes. `problem` reports a violation."""

    kinds: frozenset[str]
    answered: int
    replayed: int
    waits: int
    follower: Follower
    counting: Counting
    viewing: ViewClients | None

    def __init__(self, kinds: frozenset[str], problem: Callable[[str], None]) -> None:
        self.kinds, self._problem = kinds, problem
        self.problem = problem
        self.follower = Follower(kinds, _FUNDS, problem)
        self.counting = Counting(problem)
        self.viewing = None
        self.is_run: Callable[[int], bool] = lambda start_ts: False  # whether a run began at start_ts
        self._count = LONG if "long" in kinds else 0
        self._past: list[tuple[int, dict[str, int]]] = []
        self._written: list[tuple[int, set[str]]] = []  # (commit_ts, rows of lists)
        self._fates: dict[str, int | None] = {}  # outcomes by token; None: unknown so far
        self._entries: list[int] = []  # of the journal, not deleted yet
        self._deleted: dict[int, str] = {}  # entries that a client began to delete, and the outcome
        self._raised: dict[int, str] = {}  # signals that were raised without an append, and the outcome
        self._noted: list[tuple[int, int]] = []  # signals that were certainly raised: (commit_ts, number)
        self._dropped: set[tuple[str, int]] = set()  # changes (row, commit_ts) that a process began to drop
        self.waits = 0  # completed waits for observers
        self.replayed = 0  # replayed changes that had been given up
        self.answered = 0  # the newest commit timestamp that any client knows of

    async def act(self, db: Database, world: World, ops: Ops, rng: random.Random, began: Began) -> None:
        """Run one transaction, or read the past once. `began` notes the transaction before it does anything."""
        viewing, viewed = self.viewing, world.viewed
        if viewing is not None and viewed is not None and rng.random() < _VIEWED:
            if viewing.quiet:
                await trio.sleep(_QUIET_S)
            else:
                await viewing.act(db, viewed, rng, began)
            return
        if "followed" in self.kinds and rng.random() < 0.3:
            await self.follower.follow(db, world, rng)
            return
        if "counting" in self.kinds and rng.random() < 0.25:
            await self.counting.act(db, world, rng)
            return
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

    # ------------------------------------------------------------ outcomes of transactions

    def begun(self, answered: int, start_ts: int) -> None:
        """Check a transaction's start timestamp. `answered`: `self.answered` at the time of the request."""
        if start_ts <= answered:
            self._problem(f"O2: {start_ts} was requested after the reply to commit {answered}, and is not larger")

    def ended(self, txn: Transaction, status: str) -> None:
        """Note the outcome of a transaction, which may be asked for again."""
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
            self._problem(f"T4: the outcome of {token} was {told}, then {fate}")
        elif token in self._fates:
            self._fates[token] = fate

    # ------------------------------------------------------------ what has failed

    async def tend(self, db: Database, rng: random.Random) -> None:
        """Replay some of the failed changes, and drop some of those of the observer "picky"."""
        async with aclosing(inside(db).failed.listed(None, None)) as pages:
            found = [listed async for page in pages for listed in page]
        for listed in found:
            (table, row, ack), ts, _ = listed
            queries: list[Query] = [(FAILED_LIST, ack, ts, ts, 1), (NOTIFY, ack, ts, ts, 1)]
            queries += [(WRITE, ack, 0, TS_MAX, 1), (WRITE, observed_column(ack), 0, TS_MAX, 1)]
            [[failed, waits, acks, changes]] = await inside(db).driver.store.read([(table, row, queries)])
            signal = observed_column(ack) in inside(db).catalogue.signals(table)
            if failed and not changes and not signal:
                self._problem(f"G3: the change of {row!r} at {ts} has failed, and the cell is gone")
            if failed and waits and not signal:  # a signal's prewrite has no check: a late repeat raises it again
                self._problem(f"N6: the change of {row!r} at {ts} has failed, and waits as well")
            # Several runs for a signal may commit (N5), even one that began before the signal was on the failed list.
            if failed and acks and not signal and unpack_record(acks[0][1]).start_ts >= ts:
                self._problem(f"N6: the change of {row!r} at {ts} has failed, and is acknowledged as well")
            if rng.random() < 0.5:
                continue
            if observer_of(listed.ack.column) == inside(db).catalogue.observers["picky"].number and rng.random() < 0.6:
                self._dropped.add((listed.ack.row.decode(), listed.ts))
                await inside(db).failed.drop_one(listed)
                await self._verify_dropped(db, listed)
            else:
                self.replayed += await inside(db).failed.replay_one(listed)

    async def _verify_dropped(self, db: Database, listed: Listed) -> None:
        """N3: check that a drop acknowledges no newer changes. (Another process may have dropped a newer change.)"""
        (table, row, ack), ts, _ = listed
        queries: list[Query] = [(WRITE, ack, 0, TS_MAX, 1), (WRITE, observed_column(ack), ts + 1, TS_MAX, _SINCE_MAX)]
        [[acks, changes]] = await inside(db).driver.store.read([(table, row, queries)])
        seen = unpack_record(acks[0][1]).start_ts if acks else 0
        if self.is_run(seen):
            return
        dropped = max((at for of, at in self._dropped if of == row.decode() and at <= seen), default=0)
        for changed, _ in changes:
            if dropped < changed <= seen:
                self._problem(f"N3: a drop in {row!r} acknowledged {changed}, which had no run and no drop")

    async def _verify_picked(self, snap: Snapshot, world: World, rows: list[str]) -> None:
        for row in rows:
            found = await snap.row(world.values.table, row, [world.values])
            value, picked = found[world.values], await snap.get(world.picked, row)
            wanted = len(value) if value else None
            at = found.commit_ts(world.values)  # 0: it was deleted, and the delete marker has been collected
            dropped = {ts for of, ts in self._dropped if of == row}
            if picked != wanted and not (at in dropped if at else dropped):
                self._problem(f"N3, N6: {row} has {wanted} values, and picked is {picked}, with no drop")

    # ------------------------------------------------------------ lists

    async def _lists(self, db: Database, world: World, ops: Ops, rng: random.Random, began: Began) -> None:
        isolation: Isolation = "serializable" if "serializable" in self.kinds else "snapshot"

        async def attempt(txn: Transaction) -> tuple[Transaction, set[str]]:
            if rng.random() < 0.3:
                await self._read(txn, world, ops, rng)
                return txn, set()
            if "locks" in self.kinds:
                return txn, {await self._append_beside(txn, world, ops, rng)}
            return txn, await self._append(txn, world, ops, rng)

        txn, rows = await began.run(db.options(attempts=1, isolation=isolation), attempt)
        if "journal" in self.kinds:
            self._entries += [value for kind, _, value in ops.made if kind == "a"]
        self._noted = [*self._noted[-9:], *((txn.commit_ts, value) for kind, _, value in ops.made if kind == "a")]
        if rows:
            self._written = [*self._written[-3:], (txn.commit_ts, rows)]

    def one_of(self, key: str, found: dict[str, Any]) -> tuple[str, list[int]]:
        """The row in which a list is, and the list."""
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
        """Append to some lists. Returns the rows that were written."""
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
        """Check that a row's mirror, which may have been prefetched, was written together with the list that was
        read."""
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
            txn.set(world.mirror, row, (PADDING, [*seen, self._count]))
        if "journal" in self.kinds:
            txn.set(world.entry, self._count, key)
        if "signals" in self.kinds:
            txn.signal(world.noted, self._count)
        return row

    async def _append_beside(self, txn: Transaction, world: World, ops: Ops, rng: random.Random) -> str:
        """T14: append to a list, in a transaction that locks everything that it reads, or nothing.

        Without locks, a transaction reads only lists that are written under locks, and the list to which it appends. So
        no two rw edges are consecutive. Returns the row that was written.
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
        """N7: check that everything that was committed up to `ts` has been observed, with everything that follows from
        it."""
        try:
            await db.wait_for(ts, timeout=_WAIT_S)
        except NotIdle:
            return
        self.waits += 1
        async with db.snapshot() as snap:
            for row in sorted(rows):
                handled = max(await snap.get(world.handled, row) or (0,))
                length, twice = await snap.get(world.length, row), await snap.get(world.twice, row)
                # If there is a newer change, the wait does not cover what follows from that change.
                if handled < ts or (handled == ts and twice != (None if length is None else 2 * length)):
                    self._problem(f"N7: after wait_for({ts}), {row} is observed at {handled}: {length}, twice {twice}")

        if "signals" in self.kinds:
            await self._wait_seen(db, world, ts)

    # ------------------------------------------------------------ signals

    async def _wait_seen(self, db: Database, world: World, ts: int) -> None:
        noted = [number for commit_ts, number in self._noted if commit_ts <= ts]
        async with db.snapshot() as snap:
            seen = await snap.get_many(world.seen, noted)
        for number in noted:
            if not seen[number]:
                self._problem(f"N5, N7: after wait_for({ts}), no run for the signal of {number}")

    async def _raise(self, db: Database, world: World, rng: random.Random, began: Began) -> None:
        """Run a transaction that only raises signals."""
        self._count += 1
        number = self._count
        self._raised[number] = UNKNOWN
        async with began(db.transaction()) as txn:
            hub = rng.choice(("h0", "h1"))
            first = rng.random() < 0.5  # the cell of the first signal is the primary
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
                self._problem(f"N5: no run for the signal of {number}")
        for number in sorted(seen - raised - self._raised.keys()):
            self._problem(f"N5: a run for the signal of {number}, which was never raised")
        totals = await snap.get_many(world.total, ["h0", "h1"])
        for hub, total in totals.items():
            if (total or 0) != total_of(hub, lists.values()):
                self._problem(f"N5: {total} values were counted in {hub}; there are {total_of(hub, lists.values())}")

    # ------------------------------------------------------------ journal

    async def _forget(self, db: Database, world: World, rng: random.Random, began: Began) -> None:
        """Delete an entry that no client has read since it was written."""
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
        source, target = rng.sample(ACCOUNTS, 2)
        amount = rng.randint(1, 30)
        for account, change in ((source, -amount), (target, amount)):
            balance = await txn.get(world.balance, account)
            txn.set(world.balance, account, (_FUNDS if balance is None else balance) + change)

    async def _run_transfer(self, db: Database, world: World, rng: random.Random, began: Began) -> None:
        """Transfer, and retry after each conflict, as users do (T11)."""
        await began.run(db.options(attempts=5), lambda txn: self._transfer(txn, world, rng))

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
            found = await snap.get_many(world.balance, ACCOUNTS)
        balances = dict.fromkeys(ACCOUNTS, _FUNDS)
        balances.update((account, balance) for account, balance in found.items() if balance is not None)
        if sum(balances.values()) != _FUNDS * len(ACCOUNTS):
            self._problem(f"T1, T9: at {snap.start_ts} the total is {sum(balances.values())}: {balances}")
        return balances

    async def transfer(self, txn: Transaction, world: World, rng: random.Random) -> None:
        """Transfer between two accounts; the total stays the same."""
        await self._transfer(txn, world, rng)

    async def balances(self, snap: Snapshot, world: World) -> dict[str, int]:
        """The balances of all accounts at one moment; checks that their total is unchanged."""
        return await self._balances(snap, world, scan=False)

    async def _look_back(self, db: Database, world: World, ts: int, before: dict[str, int]) -> None:
        if ts > inside(db).oracle.last:
            return  # this process does not know yet that the timestamp was issued
        async with db.snapshot(ts=ts) as snap:
            now = await self._balances(snap, world, scan=False)
        if now != before:
            self._problem(f"T9, T15: balances at {ts}: first {before}, now {now}")

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
        """Check, once the run has come to rest, that derived data match the lists. Returns the lists."""
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
        if "counting" in self.kinds:
            await self.counting.verify(snap, world)
        if "signals" in self.kinds:
            await self._verify_signals(snap, world, lists)
        if world.counted is not None:
            await self._verify_copies(snap, world)
        return lists

    async def _verify_copies(self, snap: Snapshot, world: World) -> None:
        """N3, N10: check that the highest version has copied every entry, and that no version committed twice for a
        change."""
        assert world.copied is not None
        assert world.counted is not None
        entries = {str(row.key): row[world.entry] async for row in snap.scan(world.entry.table)}
        async for row in snap.scan(world.counted.table):
            runs = [tuple(run) for run in row[world.counted] or ()]
            if len(set(runs)) != len(runs):
                self._problem(f"N3: an observer committed twice for one change of {row.key} and version: {runs}")
            if runs != sorted(runs):
                self._problem(f"N10: runs are out of order, by version and then by change: {row.key}, {runs}")
            entry = entries.pop(row.key, None)
            copied: str | None = row[world.copied]
            if copied != (None if entry is None else world.copy_of(entry)):
                self._problem(f"N10: {row.key} is {entry}, but its copy {copied}; runs: {runs}")
        if entries:
            self._problem(f"N10: no run for {sorted(entries)}")
