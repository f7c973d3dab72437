"""How fast a chain of observers follows its writes, and how many runs it commits.

Three observers, each in a row of a table of its own: each reads the cell that was written and writes one cell of
another row, in the next table. So a run is a transaction over two tablets: two prewrites at once, the commit of the
ack, and behind it the commit of the cell that the next observer waits for.

Latency: ten first writes a second, at random times whether or not the chain keeps up; from the first write's
acknowledgement to the commit of the last observer. Saturation: more changes wait than the worker can take; commits
per second, where changes that collapsed into one run count once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio
import trio.testing

import perco
from bench.harness import Cell, Report, Run, percentile
from bench.overhead import bare_puts

VALUE = b"x" * 100
CHAIN = 3
PER_SECOND = 10.0
OPEN_LOOP_S, QUICK_OPEN_LOOP_S = 60.0, 36.0
WARM_S = 1.0
ROUND_S = 2.0
BACKLOG = 20_000  # changes that wait when a round begins
BACKLOG_MIN = 500  # fewer, and the round ends: the worker would run dry
ROWS = 1 << 17  # that the backlog is spread over: some are written twice before they are seen, and collapse
IN_FLIGHT = 256

Txn = perco.Transaction
Change = perco.Change[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Chain:
    """The tables' columns, first to last, and the schema with the observers on all but the last."""

    columns: tuple[perco.Column[bytes, bytes], ...]
    schema: perco.Schema

    @property
    def last(self) -> str:
        """The id of the last observer."""
        return f"o{CHAIN - 1}"


def chain() -> Chain:
    tables = [perco.Table(f"t{i}") for i in range(CHAIN + 1)]
    columns = tuple(table.column("value", perco.BYTES) for table in tables)
    schema = perco.Schema(*tables)
    for i in range(CHAIN):
        schema.observe(columns[i], id=f"o{i}")(_observer(columns[i], columns[i + 1]))
    return Chain(columns, schema)


def _observer(
    here: perco.Column[bytes, bytes], there: perco.Column[bytes, bytes]
) -> Callable[[Txn, Change], Any]:
    async def observe(txn: Txn, change: Change) -> None:
        value = await txn.get(here, change.key)
        assert value is not None
        txn.set(there, onward(change.key), value)

    return observe


def onward(key: bytes) -> bytes:
    """The row that the next observer finds: elsewhere in its table."""
    return key[1:] + key[:1]


def end_of(key: bytes) -> bytes:
    """The row of the last observed cell of a chain that began at `key`."""
    for _ in range(CHAIN - 1):
        key = onward(key)
    return key


# ------------------------------------------------------------------ latency


async def latencies(
    path: Path | str, seconds: float, seed: int, per_second: float = PER_SECOND, warm: int = 20
) -> list[float]:
    """Seconds from the first commit's acknowledgement to the last observer's commit, one for each first write."""
    parts, rng = chain(), random.Random(seed)
    acknowledged: dict[bytes, float] = {}
    ended: dict[bytes, float] = {}

    def on_run(id: str, key: bytes, _: float) -> None:
        if id == parts.last:
            ended[key] = trio.current_time()

    async def first(key: bytes) -> None:
        async with db.transaction() as txn:
            txn.set(parts.columns[0], key, VALUE)
        acknowledged[end_of(key)] = trio.current_time()

    async with perco.open(path, parts.schema) as db, db.worker() as worker:
        for _ in range(warm):
            await first(rng.randbytes(16))
        await db.wait_idle(timeout=60)
        acknowledged.clear()
        worker.on_run(on_run)
        async with trio.open_nursery() as nursery:
            at = trio.current_time()
            until = at + seconds
            while (at := at + rng.expovariate(per_second)) < until:
                await trio.sleep_until(at)
                nursery.start_soon(first, rng.randbytes(16))
        await db.wait_idle(timeout=60)
        await trio.testing.wait_all_tasks_blocked()
    return [ended[key] - began for key, began in acknowledged.items()]


# ------------------------------------------------------------------ saturation


@dataclass(frozen=True, slots=True)
class Rate:
    """Of one round: observer commits per second, and changes beyond one that they took with them."""

    commits_per_s: float
    collapsed: int


class Saturated:
    """A store whose observers always have more to do than they can."""

    def __init__(self, db: perco.Database, parts: Chain, seed: int, backlog: int, in_flight: int) -> None:
        self._db, self._parts, self._rng = db, parts, random.Random(seed)
        self._backlog, self._in_flight = backlog, in_flight

    async def fill(self) -> None:
        """Write until so many changes wait."""
        while (missing := self._backlog - self._db.pending()) > 0:
            async with self._db.transaction() as txn:
                for _ in range(min(missing, 500)):
                    txn.set(self._parts.columns[0], self._rng.randrange(ROWS).to_bytes(16, "little"), VALUE)

    async def round(self, warm_s: float, seconds: float, least: int) -> Rate:
        """Commits per second while at least so many changes waited."""
        await self.fill()
        async with self._db.worker(concurrency=self._in_flight) as worker:
            with trio.move_on_after(warm_s):
                while self._db.pending() > least:
                    await trio.sleep(0.01)
            before, began = _counts(worker), time.perf_counter()
            with trio.move_on_after(seconds):
                while self._db.pending() > least:
                    await trio.sleep(0.01)
            after, ended = _counts(worker), time.perf_counter()
        return Rate((after[0] - before[0]) / (ended - began), after[1] - before[1])


def _counts(worker: perco.WorkerHandle) -> tuple[int, int]:
    counts = worker.statistics().values()
    return sum(each.commits for each in counts), sum(each.collapsed for each in counts)


async def saturation(
    folder: Path | str,
    rounds: int,
    between: Callable[[], None],
    *,
    warm_s: float = WARM_S,
    seconds: float = ROUND_S,
    backlog: int = BACKLOG,
    least: int = BACKLOG_MIN,
    in_flight: int = IN_FLIGHT,
) -> list[Rate]:
    """Rounds on one store; `between` is called before each."""
    parts, found = chain(), []
    async with perco.open(folder, parts.schema) as db:
        saturated = Saturated(db, parts, 1, backlog, in_flight)
        for _ in range(rounds):
            between()
            found.append(await saturated.round(warm_s, seconds, least))
    return found


if __name__ == "__main__":
    import sys, tempfile
    with tempfile.TemporaryDirectory(dir="/work/main" if len(sys.argv) < 3 else sys.argv[2]) as d:
        if sys.argv[1] == "lat":
            l = trio.run(latencies, Path(d) / "x", 10, 1)
            print([round(percentile(l, p) * 1e3, 2) for p in (0.1, .5, .9, .99)], len(l))
        else:
            for n in (64, 256):
                print(n, trio.run(partial(saturation, Path(d) / f"y{n}", 3, lambda: None, in_flight=n)))
            print(bare_puts(Path(d), 128))
