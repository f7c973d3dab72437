"""A client of the brokerage in a process of its own.

    python -m bench.brokerage '{"side": "perco", "url": "...", ...}'

It opens the store, prints "ready", and then does what it reads, a word to a line: `load` fills the store, `run` runs
the mix and prints its figures as JSON, `check N` waits until all trades are settled and compares the books (N: orders
that all clients placed), `quit` ends. Observers, or workers that settle, run all the time.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

import perco
from bench.brokerage import market, sql
from bench.brokerage.market import Ask
from bench.harness import percentile
from perco.rpc.link import Link

PERCO, SQL = "perco", "sql"
_IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """The job of a client, from its command line.

    Attributes: `number` of the process; `window`: whether its calls wait for others to the same tablet while one is
    out; `prefetch`: whether reads return what will probably be read later.
    """

    side: str
    url: str
    number: int
    in_flight: int
    seconds: float
    window: bool = True
    prefetch: bool = True


@dataclass(slots=True)
class Figures:
    """The work of a client in `seconds`: `calls`: requests to a server, if it is a client of one; `orders`: that it
    has placed so far; `ms`: of each kind of transaction, half of the times and 99 % of them are below."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    transactions: int = 0
    settled: int = 0
    calls: int = 0
    orders: int = 0
    mean_ms: float = 0.0
    ms: dict[str, tuple[float, float]] = field(default_factory=dict)


class Mix:
    """Runs transactions in the mix, and times them."""

    def __init__(self, ask: Ask, job: Job, settled: Callable[[], int]) -> None:
        self._ask, self._job, self._settled = ask, job, settled
        self._times: dict[str, list[float]] = defaultdict(list)

    async def caller(self, number: int) -> None:
        rng = random.Random(f"{self._job.number} {number} {time.time_ns()}")
        kinds, weights = list(market.MIX), list(market.MIX.values())
        now = time.perf_counter()
        while now < self._until:
            [kind] = rng.choices(kinds, weights)
            began = now
            await self._ask(kind, rng)
            now = time.perf_counter()
            self._times[kind].append(now - began)

    def begin(self) -> None:
        self._times.clear()
        self._cpu, self._before = time.process_time(), self._settled()
        self._began = time.perf_counter()
        self._until = self._began + self._job.seconds

    def figures(self, orders: int) -> Figures:
        every = [each for times in self._times.values() for each in times]
        return Figures(
            time.perf_counter() - self._began,
            time.process_time() - self._cpu,
            len(every),
            self._settled() - self._before,
            orders=orders,
            mean_ms=1000 * sum(every) / len(every),
            ms={
                kind: (1000 * percentile(times, 0.5), 1000 * percentile(times, 0.99))
                for kind, times in self._times.items()
            },
        )


def _say(told: Any) -> None:
    print(json.dumps(told), flush=True)


# ------------------------------------------------------------------ perco


async def _of_perco(job: Job) -> None:
    counted = _calls()
    async with perco.open(job.url, market.SCHEMA, options=_options(job)) as db, db.worker(concurrency=32) as worker:
        ask, orders = market.asking(db)
        mix = Mix(ask, job, lambda: worker.statistics()["settle"].runs if "settle" in worker.statistics() else 0)
        _say("ready")
        while word := (await trio.to_thread.run_sync(sys.stdin.readline)).split():
            match word:
                case ["load"]:
                    await market.load(db)
                    _say("loaded")
                case ["run"]:
                    before = counted["calls"]
                    mix.begin()
                    async with trio.open_nursery() as nursery:
                        for number in range(job.in_flight):
                            nursery.start_soon(mix.caller, number)
                    figures = mix.figures(len(orders.placed))
                    figures.calls = counted["calls"] - before
                    _say(asdict(figures))
                case ["check", count]:
                    await db.wait_idle(timeout=_IDLE_S)
                    _say(await market.check(db, int(count)))
                case _:
                    assert word == ["quit"], word
                    return


def _options(job: Job) -> perco.Options:
    batch = perco.options.BatchOptions(window_s=0.02, adaptive=True) if job.window else perco.options.BatchOptions()
    prefetch = perco.options.PrefetchOptions(cache=job.prefetch, predict=job.prefetch)
    retry = perco.options.RetryOptions(attempts=1_000_000)
    if "://" not in job.url:
        return perco.Options(retry=retry, prefetch=prefetch)
    own = perco.options.PostgresqlOptions(own=None)
    return perco.Options(batch=batch, prefetch=prefetch, retry=retry, postgresql=own)


def _calls() -> Counter[str]:
    """How often this process asks a server of perco's, from now on."""
    counted: Counter[str] = Counter()
    call = Link.call

    def counting(self: Link, *args: Any, **how: Any) -> Any:
        counted["calls"] += 1
        return call(self, *args, **how)

    setattr(Link, "call", counting)  # noqa: B010
    return counted


# ------------------------------------------------------------------ SQL


async def _of_sql(job: Job) -> None:
    dsn: dict[str, str] = json.loads(job.url)
    async with sql.Client(dsn, connections=12, workers=4) as client:
        mix = Mix(client.ask, job, lambda: client.settled)
        _say("ready")
        while word := (await asyncio.to_thread(sys.stdin.readline)).split():
            match word:
                case ["run"]:
                    mix.begin()
                    await asyncio.gather(*(mix.caller(number) for number in range(job.in_flight)))
                    _say(asdict(mix.figures(len(client.orders.placed))))
                case ["quit"]:
                    return
                case _:
                    raise AssertionError(word)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    perco.tune_gc()
    if job.side == PERCO:
        trio.run(_of_perco, job)
    else:
        asyncio.run(_of_sql(job))
