"""The observers' side: a scratch store with a sample of the sources, whose views a worker keeps while changes arrive.

Arrivals are an open loop: they are Poisson, and do not wait for anything. Changes that are due at the same moment share
a transaction, as in any program that hands over what it has. A change's delay is the time from its intended arrival
until the views reflect it and all changes before it: that is what `db.wait_for` waits for (V14). It is computed from
the runs that committed, which a wrapper of the observers notes: a run that handles a change has this change's commit
timestamp, or an older one, as its root cause.

Only the observers of views run. Sinks, and observers that the program has written by hand, may reach outside.
"""

from __future__ import annotations

import copy
import random
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import trio

from perco.crossover.changing import SourceChange
from perco.database.database import Database
from perco.database.options import Options
from perco.errors import UsageError
from perco.notify.options import WorkerOptions
from perco.schema.schema import Change, Observer, Schema
from perco.serve.opening import open as open_store
from perco.txn.transaction import Transaction
from perco.views.batch import Results
from perco.views.cached import Cached
from perco.views.declaring import Views

LOADERS: Final = 4
AT_ONCE: Final = 64  # changes that one transaction makes at most
IDLE_WITHIN_S: Final = 300.0
_FLOOD: Final = 1e9  # changes a second: all at once
_KNOWN_AT_ONCE: Final = 500  # values in one transaction
_WORKER: Final = WorkerOptions(attempts=4)  # a function that fails is to fail soon


def percentile(values: Iterable[float], share: float) -> float:
    """By the nearest rank."""
    found = sorted(values)
    return found[min(int(share * len(found)), len(found) - 1)]


@dataclass(frozen=True, slots=True)
class Load:
    """Measurements of a load: a time in which changes arrived.

    Attributes:
        per_s: the intended rate.
        delays_s: of each change.
        seconds, cpu_s: from the first arrival until the views reflected all changes.
        late_s: the time from the last arrival until then.
    """

    per_s: float
    delays_s: tuple[float, ...]
    seconds: float
    cpu_s: float
    late_s: float

    def delay_s(self, share: float) -> float:
        """A percentile, by the nearest rank."""
        return percentile(self.delays_s, share)

    @property
    def done_per_s(self) -> float:
        return len(self.delays_s) / self.seconds

    @property
    def cores(self) -> float:
        return self.cpu_s / self.seconds

    @property
    def cpu_of_change(self) -> float:
        """Seconds."""
        return self.cpu_s / len(self.delays_s)


@dataclass(slots=True)
class Runs:
    """The runs of observers that have committed: (root cause, when)."""

    ended: list[tuple[int, float]] = field(default_factory=list)
    _causes: dict[tuple[str, Any], int] = field(default_factory=dict)

    def noting(self, observer: Observer) -> Observer:
        """The same observer, whose runs are noted."""
        function, id, causes = observer.function, observer.id, self._causes

        async def run(txn: Transaction, change: Change[Any, Any]) -> None:
            causes[id, change.key] = change.cause
            await function(txn, change)

        return replace(observer, function=run)

    def on_run(self, observer: str, key: Any, _: float) -> None:
        """For `WorkerHandle.on_run`."""
        self.ended.append((self._causes.pop((observer, key)), trio.current_time()))

    def take(self) -> list[tuple[int, float]]:
        """The runs so far, which are then forgotten."""
        found, self.ended = self.ended, []
        return found


def reflected(commits: Iterable[tuple[int, float]], runs: Iterable[tuple[int, float]]) -> list[float]:
    """When the views reflected each of these commits, and all before it. Pure.

    Args:
        commits: the commit timestamp of each, and when it was acknowledged.
        runs: the root cause of each run, and when its commit was acknowledged.
    """
    known = sorted(runs)
    roots = [root for root, _ in known]
    latest = list(accumulate((ended for _, ended in known), max))
    found = []
    for ts, acknowledged in commits:
        at = bisect_right(roots, ts)
        found.append(max(acknowledged, latest[at - 1]) if at else acknowledged)
    return found


def alone(views: Views, runs: Runs) -> Views:
    """The views without sinks, and with a schema that has no observers but theirs."""
    schema = Schema(*views.schema.tables.values(), keep=views.schema.keep)
    mine = {id for view in views.declared for id in views.observers(view)}
    schema.observers = {id: runs.noting(each) for id, each in views.schema.observers.items() if id in mine}
    found = copy.copy(views)
    found.schema, found.sinks = schema, {}
    return found


class Keeper:
    """An open scratch store, whose worker runs."""

    db: Database
    views: Views

    def __init__(self, db: Database, views: Views, runs: Runs, seed: int) -> None:
        self.db, self.views = db, views
        self._runs, self._random = runs, random.Random(seed)

    async def arrive(
        self, changes: Sequence[SourceChange], per_s: float | None = None, *, apart: int = LOADERS * AT_ONCE
    ) -> Load:
        """Make changes at random times; None: all at once. Returns when the views reflect them.

        Args:
            apart: of so many successive changes, no two have the same row. Only such changes may commit in any order.

        Raises: UsageError if a run fails for good.
        """
        at, due = 0.0, list[float]()
        for _ in changes:
            at += self._random.expovariate(_FLOOD if per_s is None else per_s)
            due.append(at)
        self._runs.take()
        cpu, began = time.process_time(), trio.current_time()
        commits = await self._feed(changes, [began + each for each in due], apart)
        failed = await self.db.wait_idle(timeout=IDLE_WITHIN_S)
        cpu = time.process_time() - cpu
        if failed:
            await self._tell_failed()
        shown = [at - began for at in reflected(commits, self._runs.take())]
        delays = tuple(at - each for at, each in zip(shown, due, strict=True))
        return Load(per_s or _FLOOD, delays, max(shown), cpu, max(shown) - due[-1])

    async def know(self, results: Results) -> None:
        """Store values of cached functions, which are then not called for them."""
        for cached, values in results.items():
            known = list(values.items())
            for at in range(0, len(known), _KNOWN_AT_ONCE):
                async with self.db.transaction() as txn:
                    for key, value in known[at : at + _KNOWN_AT_ONCE]:
                        txn.set(cached.results, key, value)

    async def known(self) -> dict[Cached[Any, Any], dict[bytes, Any]]:
        """The values of cached functions that the store has."""
        found: dict[Cached[Any, Any], dict[bytes, Any]] = {}
        async with self.db.snapshot() as snap:
            for cached in self.views.cached_functions.values():
                scan = snap.scan(cached.results.table, columns=[cached.results])
                found[cached] = {row.key: row[cached.results] async for row in scan}
        return found

    async def _feed(self, changes: Sequence[SourceChange], due: Sequence[float], apart: int) -> list[tuple[int, float]]:
        """Make each change when it is due, with those that are due by then."""
        commits: list[tuple[int, float]] = [(0, 0.0)] * len(changes)
        at_once = max(1, min(AT_ONCE, apart // LOADERS))
        taken, turn, begun, ended = 0, trio.Lock(), set[int](), trio.lowlevel.ParkingLot()

        async def feed() -> None:
            nonlocal taken
            while True:
                async with turn:
                    if taken == len(changes):
                        return
                    await trio.sleep_until(due[taken])
                    # A change whose transaction is held up, or tried again, must not overwrite a later one of its row.
                    while begun and taken + at_once > min(begun) + apart:
                        await ended.park()
                    now, begin = trio.current_time(), taken
                    taken += 1
                    while taken < len(changes) and taken < begin + at_once and due[taken] <= now:
                        taken += 1
                    end = taken
                    begun.add(begin)
                ts = await self.db.run(_make, changes[begin:end])
                commits[begin:end] = [(ts, trio.current_time())] * (end - begin)
                begun.remove(begin)
                ended.unpark_all()

        async with trio.open_nursery() as nursery:
            for _ in range(LOADERS):
                nursery.start_soon(feed)
        return commits

    async def _tell_failed(self) -> None:
        [first, *_] = await self.db.failed(limit=1)
        places = [line.strip() for line in first.traceback.splitlines() if line.lstrip().startswith("File ")]
        where = f" ({places[-1]})" if places else ""
        raise UsageError(f"observer {first.observer!r} fails on {first.table}[{first.key!r}]: {first.error}{where}")

    async def idle_cores(self, seconds: float) -> float:
        """How many cores the store and its worker use while nothing arrives."""
        cpu, began = time.process_time(), trio.current_time()
        await trio.sleep(seconds)
        return (time.process_time() - cpu) / (trio.current_time() - began)


async def _make(txn: Transaction, changes: Sequence[SourceChange]) -> int:
    for change in changes:
        for column, value in change.writes:
            if value is None:
                txn.delete(column, change.key)
            else:
                txn.set(column, change.key, value)
    return await txn.commit()


@asynccontextmanager
async def keeping(views: Views, folder: Path, seed: int) -> AsyncIterator[Keeper]:
    """A new store in a folder, with the durability that stores have by default."""
    runs = Runs()
    bare = alone(views, runs)
    async with (
        open_store(folder, bare.schema, options=Options(shared=False)) as db,
        db.worker(options=_WORKER) as worker,
    ):
        worker.on_run(runs.on_run)
        yield Keeper(db, bare, runs, seed)
