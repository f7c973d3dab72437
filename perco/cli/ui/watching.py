"""Samples of a store at work: how far observers lag behind, and what tablets have to do."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import trio

from perco.cli.ui.bounds import bounded
from perco.cli.ui.shelf import Shelf
from perco.errors import PercoError
from perco.notify.lagging import Lag
from perco.serve.client import RemoteOwner, remote_owner
from perco.serve.messages import TabletsOf
from perco.serve.opening import visiting
from perco.serve.uses import ProcessUse

log: logging.Logger = logging.getLogger("perco.store")

EVERY_S: Final = 2.0
_ANSWER_S: Final = 4.0  # an owner that takes longer does not answer
KEPT: Final = 900  # samples: half an hour
_HEAT_EVERY: Final = 5  # samples of a column of the heat map
_PROCESSES_MOST: Final = 4096  # processes whose counts are remembered
_BANDS_MAX: Final = 512  # of the heat map: if there are more tablets, neighbours are drawn as one


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a store at a moment, as the page saw it.

    Attributes:
        number: counted from 1.
        at: the wall time, in seconds.
        owner: the process that owns the store; 0: none that answers.
        problem: why nothing could be seen; "": it could.
        lag: by observer.
        runs: runs of each observer that committed, and runs that failed, since the samples began; in all processes.
        running: runs of each observer in flight.
        commits, conflicts: of transactions, likewise.
    """

    number: int
    at: float
    owner: int
    problem: str
    lag: Mapping[str, Lag]
    runs: Mapping[str, tuple[int, int]]
    running: Mapping[str, int]
    commits: int
    conflicts: int

    def plain(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "at": self.at,
            "owner": self.owner,
            "problem": self.problem,
            "lag": {id: {**asdict(lag), **self._run(id)} for id, lag in self.lag.items()},
            "commits": self.commits,
            "conflicts": self.conflicts,
        }

    def _run(self, id: str) -> dict[str, int]:
        runs, failures = self.runs.get(id, (0, 0))
        return {"runs": runs, "failures": failures, "running": self.running.get(id, 0)}


class _Totals:
    """Adds up what processes count. A process that was seen before has done what its counters rose by since."""

    def __init__(self) -> None:
        self.runs: dict[str, tuple[int, int]] = {}
        self.commits = self.conflicts = 0
        self._seen: dict[str, ProcessUse] = {}  # by id
        self._first = True

    def add(self, uses: Sequence[ProcessUse]) -> None:
        """Add the work of processes since the last call. Work before the first call is left out: it may be old."""
        for use in uses:
            before = use if self._first else self._seen.get(use.id)
            was = {run.id: run for run in before.observers} if before is not None else {}
            for now in use.observers:
                id, then = now.id, was.get(now.id)
                commits, failures = self.runs.get(id, (0, 0))
                commits += _rise(then.commits if then is not None else 0, now.commits)
                failures += _rise(then.failures if then is not None else 0, now.failures)
                self.runs[id] = commits, failures
            self.commits += _rise(before.commits if before is not None else 0, use.commits)
            self.conflicts += _rise(before.conflicts if before is not None else 0, use.conflicts)
        for use in uses:
            self._seen.pop(use.id, None)
            self._seen[use.id] = use
        while len(self._seen) > _PROCESSES_MOST:
            del self._seen[next(iter(self._seen))]
        self._first = False


def _rise(before: int, now: int) -> int:
    return now - before if now >= before else now  # else the count has begun again


@dataclass(frozen=True, slots=True)
class TabletSeen:
    """A tablet at a moment: who has it open, and its counts since then."""

    table: str
    start: bytes
    number: int
    server: int
    since: tuple[int, int]  # the process, and how often a process has opened the tablet: the counts begin with these
    mutations: int
    batches: int
    queued: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Heat:
    """A column of the heat map: mutations a second of each tablet, by (table, first row), up to a moment."""

    at: float
    rates: Mapping[tuple[str, bytes], float]


class Watch:
    """Takes samples, again and again. Keeps those of the last half hour. Loop thread only.

    Attributes:
        samples: the newest last.
        tablets: as of the newest sample of a store that a process has open.
        heat: columns of the heat map, the newest last.
        uses: the work of each process, as of the newest sample.
        begun: when it began; tells its samples from those of another one.
    """

    samples: deque[Sample]
    tablets: Sequence[TabletSeen]
    heat: deque[Heat]
    uses: Sequence[ProcessUse]
    begun: float

    def __init__(self, shelf: Shelf, every_s: float = EVERY_S) -> None:
        self._shelf, self._every_s = shelf, every_s
        self.samples: deque[Sample] = deque(maxlen=KEPT)
        self.tablets: Sequence[TabletSeen] = ()
        self.uses: Sequence[ProcessUse] = ()
        self._totals = _Totals()
        self.heat: deque[Heat] = deque(maxlen=KEPT // _HEAT_EVERY)
        self.begun = time.time()
        self._count = 0
        self._heated: tuple[float, Mapping[tuple[str, bytes], TabletSeen]] | None = None

    async def run(self) -> None:
        """Take samples until this is cancelled: from the process that has the store open or, if none has, from the
        store itself."""
        while True:
            try:
                async with visiting(self._shelf.store) as client:
                    owner = remote_owner(client)
                    process = 0
                    while True:
                        async with bounded(_ANSWER_S):
                            process = process or (await owner.folder()).process
                            self.uses = await owner.uses()
                            self._totals.add(self.uses)
                            await self._sample(owner.lag, process)
                            await self._see_tablets(owner)
                        await trio.sleep(self._every_s)
            except PercoError as error:
                log.debug("no process tells about the store: %s", error)
            self.tablets, self.uses, self._heated = (), (), None
            await self._sample(self._lag_without_owner, 0)
            await trio.sleep(self._every_s)

    async def _lag_without_owner(self) -> Mapping[str, Lag]:
        async with self._shelf.reading() as db:
            return await db.lag()

    async def _sample(self, ask: Callable[[], Awaitable[Mapping[str, Lag]]], process: int) -> None:
        problem, lag = "", {}
        try:
            lag = dict(await ask())
        except PercoError as error:
            if process:
                raise  # it may have ended, and another one may have the store
            problem = str(error)
        self._count += 1
        running: Counter[str] = Counter()
        for use in self.uses:
            running.update({run.id: run.running for run in use.observers})
        totals = self._totals
        seen = dict(totals.runs), running, totals.commits, totals.conflicts
        self.samples.append(Sample(self._count, time.time(), process, problem, lag, *seen))

    async def _see_tablets(self, owner: RemoteOwner) -> None:
        self.tablets = _flat(await owner.servers())
        if self._heated is not None and self._count % _HEAT_EVERY:
            return
        now, seen = time.time(), {(each.table, each.start): each for each in self.tablets}
        if self._heated is not None:
            before_at, before = self._heated
            self.heat.append(Heat(now, _rates(before, seen, now - before_at)))
        self._heated = now, seen

    def heat_map(self) -> tuple[Sequence[float], Sequence[Band]]:
        """When each column ends, and the bands, of the tablets that there are now. A tablet that is newer than a column
        had its rows in another one then: in the last whose first row is not above."""
        columns = list(self.heat)
        starts = [_starts(column) for column in columns]
        bands = []
        grouped = _banded(self.tablets)
        for at, (first, count) in enumerate(grouped):
            after = grouped[at + 1][0] if at + 1 < len(grouped) else None
            stop = after.start if after is not None and after.table == first.table else None
            rates = [_rate(column, here, first, stop) for column, here in zip(columns, starts, strict=True)]
            bands.append(Band(first, count, rates))
        return [column.at for column in columns], bands


class Band(NamedTuple):
    """Neighbouring tablets of a table, as one line of the heat map.

    Attributes:
        first: the first tablet; `tablets`: how many.
        rates: their mutations a second, in each column.
    """

    first: TabletSeen
    tablets: int
    rates: Sequence[float]


def _flat(servers: Sequence[TabletsOf]) -> list[TabletSeen]:
    found = [
        TabletSeen(
            *(each.table, each.start, each.number, server.number, (server.process, each.epoch)),
            *(each.mutations, each.batches, each.queued, each.used_bytes),
        )
        for server in servers
        for each in server.tablets
    ]
    return sorted(found, key=lambda each: (each.table, each.start))


def _rates(
    before: Mapping[tuple[str, bytes], TabletSeen], now: Mapping[tuple[str, bytes], TabletSeen], seconds: float
) -> dict[tuple[str, bytes], float]:
    rates = {}
    for where, tablet in now.items():
        was = before.get(where)
        counted = tablet.mutations - (was.mutations if was is not None and was.since == tablet.since else 0)
        rates[where] = max(counted, 0) / max(seconds, 1e-3)
    return rates


def _banded(tablets: Sequence[TabletSeen]) -> list[tuple[TabletSeen, int]]:
    size = -(-len(tablets) // _BANDS_MAX) or 1
    bands: list[tuple[TabletSeen, int]] = []
    for tablet in tablets:
        if bands and bands[-1][0].table == tablet.table and bands[-1][1] < size:
            bands[-1] = bands[-1][0], bands[-1][1] + 1
        else:
            bands.append((tablet, 1))
    return bands


def _starts(column: Heat) -> dict[str, list[bytes]]:
    """First rows of tablets, by table, in order."""
    found: dict[str, list[bytes]] = {}
    for table, start in sorted(column.rates):
        found.setdefault(table, []).append(start)
    return found


def _rate(column: Heat, starts: Mapping[str, Sequence[bytes]], first: TabletSeen, stop: bytes | None) -> float:
    here = starts.get(first.table, ())
    begin = max(bisect_right(here, first.start) - 1, 0)
    end = len(here) if stop is None else max(bisect_left(here, stop), begin + 1)
    return sum(column.rates[first.table, start] for start in here[begin:end])
