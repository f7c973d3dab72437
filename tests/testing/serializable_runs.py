"""Clients read lists in every way and append to them, from one seed: the history is serializable, or not (T14).

In mode "mixed" some transactions append to the first lists, read the others, and lock nothing. The rest append to the
others, and lock all that they read. Snapshots read only the others. So no transaction has both an incoming and an
outgoing anti-dependency, and the history must be serializable. Traces ensure that.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Literal

import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.storage import Mutation
from perco.testing import Report, Transaction, check
from perco.testing.faults import Fault, FaultyRowStore, kind_of, use
from perco.testing.history import FAIL, OK, UNKNOWN, Ops, record
from perco.testing.machine import CrashedError, Machine
from perco.testing.simulation import seeded
from perco.txn.fates import Fates

Mode = Literal["snapshot", "serializable", "locks", "mixed"]

KEYS = [f"k{i}" for i in range(7)]
lists = perco.Table("lists", key=perco.TEXT, splits=["k2", "k5"])
values: perco.Column[str, Any] = lists.column("values", perco.MSGPACK)
FAULTS = (Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.DELAY, Fault.REPEAT, Fault.ECHO, Fault.FAIL)
CLIENTS, TRANSACTIONS, LIVES = 5, 16, 3
FIRST = 3  # how many lists are written without locks in mode "mixed"


class Hasty(Fates):
    """Now and then takes a live transaction for dead: safe, only slow (L2)."""

    __slots__ = ("_rate", "_rng")

    exact = False

    def __init__(self, rng: random.Random, rate: float) -> None:
        super().__init__()
        self._rng, self._rate = rng, rate

    def alive(self, start_ts: int) -> bool:
        return super().alive(start_ts) and self._rng.random() >= self._rate


class Run:
    """One run. Its counters are complete when it has ended."""

    def __init__(self, seed: int, mode: Mode, *, faults: bool) -> None:
        self.mode: Mode = mode
        self.rng = rng = random.Random(f"serializable {seed} {mode}")
        self.machine = Machine(perco.Schema(lists), groups=rng.random() < 0.7)
        self.rate = rng.choice((0.02, 0.1)) if faults else 0.0
        self.hasty = rng.choice((0.0, 0.1)) if faults else 0.0
        self.slow = rng.choice((0.0, 0.3))
        self.options = perco.Options(seed=1, commit=perco.options.CommitOptions(one_step=rng.random() < 0.5))
        self.lives = LIVES if faults else 1
        self.died: Counter[str] = Counter()  # dead processes, by what they were about to send, or had just sent
        self.fired: Counter[Fault] = Counter()
        self.refused: Counter[str] = Counter()  # transactions by the error that ended them
        self.ways: Counter[str] = Counter()
        self.count = 0

    async def run(self) -> list[Transaction]:
        with record() as self.recorder:
            late: list[Mutation] = []
            for life in range(self.lives):
                late += await self.work(dies=life < self.lives - 1)
                self.rng.shuffle(late)
                while late and self.rng.random() < 0.7:
                    await self.machine.store.apply([late.pop()])
            for mutation in late:
                await self.machine.store.apply([mutation])
            await self.machine.swept()
            async with self.machine.opened() as db:
                await trio.sleep(1.0)
                ops, begin = Ops(), trio.current_time()
                async with db.snapshot() as snap:
                    for key, seen in (await snap.get_many(values, KEYS)).items():
                        ops.read(key, seen or [])
                await trio.sleep(1.0)
                self.recorder.add("end", begin, trio.current_time(), OK, ops.made)
        assert not self.machine.locks()
        return self.recorder.transactions

    async def work(self, *, dies: bool) -> list[Mutation]:
        """Run a process to its end or its death; returns the mutations that it sent and that have not arrived."""
        dies_at, made = self.rng.randint(3, 60), self.rng.random() < 0.5
        async with self.machine.opened(self.options, sweeper=True) as db:
            store = use(db, FaultyRowStore(inside(db).driver.store, self.plan, looking=self.wait))

            def die(mutation: Mutation) -> None:
                if dies and store.dead is None and len(store.log) >= dies_at:
                    store.dead = CrashedError()
                    self.died[kind_of(mutation)] += 1
                    nursery.cancel_scope.cancel()  # a dead process waits for nothing

            async def before(mutation: Mutation) -> None:
                await self.wait()
                if not made:
                    die(mutation)

            async def after(mutation: Mutation) -> None:
                if made:
                    die(mutation)

            store.before, store.after = before, after
            inside(db).engine.fates = inside(db).driver.fates = Hasty(random.Random(self.rng.random()), self.hasty)
            async with trio.open_nursery() as nursery:
                for i in range(CLIENTS):
                    nursery.start_soon(self.client, db, store, f"c{i}", random.Random(self.rng.random()))
        self.fired += store.fired
        return store.late

    def plan(self, mutation: Mutation, number: int) -> Fault | None:
        return self.rng.choice(FAULTS) if self.rng.random() < self.rate else None

    async def wait(self) -> None:
        if self.rng.random() < self.slow:
            await trio.sleep(self.rng.choice((0.0, 0.001, 0.01)))

    async def client(self, db: perco.Database, store: FaultyRowStore, name: str, rng: random.Random) -> None:
        for _ in range(TRANSACTIONS):
            if store.dead is None:
                await self.transaction(db, store, name, rng)
                await trio.sleep(rng.choice((0.0, 0.001)))

    async def transaction(self, db: perco.Database, store: FaultyRowStore, name: str, rng: random.Random) -> None:
        """One attempt, recorded. Its outcome is unknown if the process died before it could report it."""
        ops, begin = Ops(), trio.current_time()
        outcome, token = "", ""
        try:
            if rng.random() < 0.2:
                async with db.snapshot() as snap:
                    await self.read(snap, ops, rng, KEYS[FIRST:] if self.mode == "mixed" else KEYS)
                outcome = "committed"
            else:
                reads, lock, writes = KEYS, self.mode == "locks", KEYS
                if self.mode == "mixed":
                    lock = rng.random() < 0.5
                    reads, writes = (KEYS, KEYS[FIRST:]) if lock else (KEYS[FIRST:], KEYS[:FIRST])
                txn = None
                try:
                    async with db.transaction(isolation="serializable" if self.mode == "serializable" else None) as txn:
                        await self.read(txn, ops, rng, reads, lock=lock)
                        if rng.random() < 0.9 or self.mode == "mixed":
                            await self.append(txn, ops, rng, writes)
                finally:
                    if txn is not None:
                        outcome, token = txn.outcome, txn.token
        except (perco.TransientError, perco.StoreError, perco.CommitUnknown, CrashedError) as error:
            self.refused[type(error).__name__] += 1
        except perco.PercoError:  # background tasks of a dead process fail too
            if store.dead is None:
                raise
        finally:
            status = {"committed": OK, "unknown": UNKNOWN}.get(outcome, FAIL)
            if store.dead is not None and status == FAIL and token:
                status = UNKNOWN
            self.recorder.add(name, begin, trio.current_time(), status, ops.made)

    async def read(
        self, snap: perco.Snapshot, ops: Ops, rng: random.Random, among: list[str], *, lock: bool = False
    ) -> None:
        way = rng.choice(["get", "get_many", "row"] if lock else ["get", "get_many", "row", "scan", "reverse", "limit"])
        self.ways[way] += 1
        keys = rng.sample(among, rng.randint(1, 3))
        match way:
            case "get":
                for key in keys:
                    ops.read(key, await snap.get(values, key, lock=lock) or [])
            case "get_many":
                for key, seen in (await snap.get_many(values, keys, lock=lock)).items():
                    ops.read(key, seen or [])
            case "row":
                for key in keys:
                    ops.read(key, (await snap.row(lists, key, lock=lock))[values] or [])
            case _:
                await self.scan(snap, ops, rng, way, among)

    async def scan(self, snap: perco.Snapshot, ops: Ops, rng: random.Random, way: str, among: list[str]) -> None:
        """Records the part of a range that was scanned as read; absent rows are empty lists."""
        low, high = sorted(rng.sample(range(KEYS.index(among[0]), len(KEYS) + 1), 2))
        reverse = way != "scan" and rng.random() < 0.7
        limit = rng.randint(1, 2) if way == "limit" else None
        inside = KEYS[low:high]
        stop = KEYS[high] if high < len(KEYS) else None
        found = {}
        async for row in snap.scan(lists, start=KEYS[low], stop=stop, reverse=reverse, limit=limit):
            found[row.key] = row[values]
        if limit is not None and len(found) == limit:  # the scan stopped there
            last = list(found)[-1]
            inside = [key for key in inside if (key >= last if reverse else key <= last)]
        for key in inside:
            ops.read(key, found.get(key) or [])

    async def append(self, txn: perco.Transaction, ops: Ops, rng: random.Random, among: list[str]) -> None:
        """Appends to one list, which is read only for that; this read is not recorded."""
        key = rng.choice(among)
        seen = await txn.get(values, key) or []
        self.count += 1
        ops.append(key, self.count)
        txn.set(values, key, [*seen, self.count])
        if rng.random() < 0.5:
            await trio.sleep(rng.choice((0.0, 0.002)))


def run(seed: int, mode: Mode, *, faults: bool = False) -> tuple[Report, Run]:
    """The same seed gives the same run."""
    with seeded(seed):
        one = Run(seed, mode, faults=faults)
        history = trio.run(one.run, clock=trio.testing.MockClock(autojump_threshold=0))
    return check(history, serializable=True), one


def seeds_to_anomaly(mode: Mode, seeds: range, *, faults: bool = False) -> int | None:
    """How many seeds it takes until a run goes wrong, by an anomaly or an assertion of perco; None: no run does."""
    for number, seed in enumerate(seeds, 1):
        try:
            if run(seed, mode, faults=faults)[0].ok:
                continue
        except AssertionError:
            pass
        return number
    return None
