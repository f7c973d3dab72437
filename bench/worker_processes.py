"""Scanners of several worker processes on one served store, in real time.

A durable `perco serve` process, and worker processes as its clients. Rows are made dirty in hot ranges; then the
workers begin, one after the other. Each notes which row its scanners handed over to its observer, and when.

A claim is *refused* if other processes have all the rows that it asks for: wasted work.

One process serves all tablets, so scanners that are spread over tablets cost it no less than scanners that clump. The
time of a drain is therefore reported, but has no bar.

    python -m bench.worker_processes FOLDER NUMBER      a worker process
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

import perco
from bench import hot
from perco.notify.rowlocks import Dirty
from perco.notify.workers import WorkerHandle

WORKERS = 4
ROWS = 1500
SCANNERS, CONCURRENCY = 4, 16  # of each process
APART_S = 0.1  # between the starts of two worker processes
IDLE_S = 30.0  # by then every row is clean, or the benchmark fails
REFUSED_MOST = 0.1
SUMS = ("teleports", "met", "asked", "refused", "tours")  # counters of scanners that are summed up

_BATCH = 500  # rows that are made dirty in a transaction

docs = hot.table()
body, parsed = docs.column("body", perco.INT64), docs.column("parsed", perco.INT64)
SCHEMA = perco.Schema(docs)


@SCHEMA.observe(body, id="parse")
async def parse(txn: perco.Transaction, change: perco.Change[bytes, int]) -> None:
    """Takes as many milliseconds as its row says."""
    assert change.value is not None
    await trio.sleep(change.value / 1000)
    txn.set(parsed, change.key, change.value)


@dataclass(slots=True)
class Drained:
    """The work of the processes, from the start of the first one until no row was dirty.

    `claims`: (when, process, row) of each row that was handed over; `begun`: when each process began; both in seconds.
    """

    seconds: float = 0.0
    rows: int = 0
    runs: int = 0
    teleports: int = 0
    met: int = 0
    asked: int = 0
    refused: int = 0
    tours: int = 0
    begun: list[float] = field(default_factory=list)
    claims: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def refused_share(self) -> float:
        """The share of the calls for rows that were refused."""
        return self.refused / max(self.asked, 1)

    @property
    def twice(self) -> int:
        """Claims of rows that had been claimed before."""
        return len(self.claims) - self.rows


# ------------------------------------------------------------------ a worker process


class Notes:
    """Which rows the scanners of a worker hand over, and when, by `time.monotonic`."""

    def __init__(self, handle: WorkerHandle) -> None:
        self._handle = handle
        self.claims: list[tuple[float, int]] = []
        for scanner in handle.scanners:  # none of them has run yet
            scanner._begin = partial(self._begin, scanner._begin)  # type: ignore[method-assign]

    def _begin(self, begin: Any, nursery: trio.Nursery, table: str, dirty: Dirty) -> None:
        self.claims.append((time.monotonic(), hot.number(dirty.row)))
        begin(nursery, table, dirty)

    def told(self) -> dict[str, Any]:
        counters = self._handle.scanner_statistics()
        sums = {name: sum(getattr(each, name) for each in counters) for name in SUMS}
        return {**sums, "runs": self._handle.statistics()["parse"].runs, "claims": self.claims}


async def work(folder: Path, number: int) -> None:
    """Standard input says when to begin, by `time.monotonic`, and whether to teleport, then when to stop; any number of
    times. Prints when the store is open, when the worker has begun, and what it did."""

    async def told() -> str:
        return await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)

    async with perco.open(folder, SCHEMA, options=perco.Options(seed=number)) as db:
        _say({"open": number})
        while line := await told():
            order = json.loads(line)
            await trio.sleep(max(0.0, order["at"] - time.monotonic()))
            options = perco.WorkerOptions(concurrency=CONCURRENCY, scanners=SCANNERS, teleport=order["teleport"])
            async with db.worker(options=options) as handle:
                notes = Notes(handle)
                _say({"begun": time.monotonic()})
                await told()
            _say(notes.told())


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


# ------------------------------------------------------------------ all of them


class Processes:
    """A server and worker processes, for any number of drains."""

    def __init__(self, folder: Path, workers: list[subprocess.Popen[str]]) -> None:
        self._folder, self._workers = folder, workers

    def drain(self, rows: int, *, teleport: bool, seed: int) -> Drained:
        """Make rows dirty, begin the workers, and wait until all is clean. Raises: NotIdle after `IDLE_S`."""
        return trio.run(partial(self._drain, rows, teleport, random.Random(seed)))

    async def _drain(self, rows: int, teleport: bool, rng: random.Random) -> Drained:
        async with perco.open(self._folder, SCHEMA) as db:
            keys = hot.dirty(rows, rng)
            slow = hot.slow(keys, rng)
            for at in range(0, rows, _BATCH):
                async with db.transaction() as txn:
                    for number in keys[at : at + _BATCH]:
                        takes_s = hot.SLOW_RUN_S if number in slow else hot.RUN_S
                        txn.set(body, hot.key(number), int(1000 * takes_s))
            began = time.monotonic() + APART_S
            for i, worker in enumerate(self._workers):
                _tell(worker, {"at": began + i * APART_S, "teleport": teleport})
            begun = [(await _heard(worker))["begun"] for worker in self._workers]
            await db.wait_idle(timeout=IDLE_S)
            ended = time.monotonic()
        for worker in self._workers:
            _tell(worker, {})
        return gathered([await _heard(worker) for worker in self._workers], begun, ended, rows)


def gathered(told: list[dict[str, Any]], begun: list[float], ended: float, rows: int) -> Drained:
    """The reports of all processes, added up."""
    first = min(begun)
    out = Drained(seconds=ended - first, rows=rows, begun=[when - first for when in begun])
    for process, each in enumerate(told):
        for name in ("runs", *SUMS):
            setattr(out, name, getattr(out, name) + each[name])
        out.claims += [(when - first, process, row) for when, row in each["claims"]]
    out.claims.sort()
    return out


@contextmanager
def processes(folder: Path, workers: int = WORKERS) -> Iterator[Processes]:
    """A server of a new store in a folder, and its worker processes; they end with the block."""
    path = folder / "store"
    path.mkdir()  # else the server first prints that the store is new
    with ExitStack() as stack:
        server = stack.enter_context(_process("-m", "perco", "serve", str(path)))
        assert server.stdout is not None
        assert server.stdout.readline().startswith("serving"), "it did not start"
        module = "bench.worker_processes"
        started = [stack.enter_context(_process("-m", module, str(path), str(i))) for i in range(workers)]
        for worker in started:
            assert worker.stdout is not None
            assert json.loads(worker.stdout.readline()), "it has the store open"
        yield Processes(path, started)


@contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def _tell(worker: subprocess.Popen[str], order: dict[str, Any]) -> None:
    assert worker.stdin is not None
    print(json.dumps(order), file=worker.stdin)


async def _heard(worker: subprocess.Popen[str]) -> Any:
    """The next message of a worker; the loop goes on meanwhile."""
    assert worker.stdout is not None
    return json.loads(await trio.to_thread.run_sync(worker.stdout.readline))


if __name__ == "__main__":
    trio.run(work, Path(sys.argv[1]), int(sys.argv[2]))
