"""Three steps, each of which reads what the step before has written and writes a row: observers, and procrastinate.

procrastinate is a task queue in PostgreSQL. A step writes its row and defers the next step in one transaction, like the
run of an observer; a second transaction finishes the job. Its worker listens for new jobs, so it need not poll; the
steps' statements are prepared; connections stay open; finished jobs are deleted. At most one run of an observer commits
per change; a job that dies after its write runs again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

import perco
from bench.against.load import Load, Measured
from bench.against.postgres import Server
from bench.against.transfers import run_asyncio
from bench.observers import CHAIN, VALUE, chain, end_of, latencies, onward

WARM = 20  # chains, before any is measured
_LEFT_S = 60.0  # for steps that are under way to end

# ------------------------------------------------------------------ perco


def perco_latencies(folder: Path, seconds: float, per_second: float) -> list[float]:
    """Seconds from the first write's acknowledgement to the last step's commit."""
    name = f"chain-{random.getrandbits(32):x}"
    return trio.run(partial(latencies, folder / name, seconds, 1, per_second, WARM, apart=False))


def perco_drain(folder: Path, chains: int, concurrency: int) -> Load:
    """Run the observers for a backlog of first writes, until all have run. A `call` is a step."""
    return trio.run(drain, folder / f"drain-{random.getrandbits(32):x}", chains, concurrency)


async def drain(
    store: Path | str, chains: int, concurrency: int, others_cpu_s: Callable[[], float] = lambda: 0.0
) -> Load:
    """The same for a store in any place; `others_cpu_s`: CPU time so far of a server that does some of the work."""
    parts, rng = chain(apart=False), random.Random(1)
    load = Load()
    async with perco.open(store, parts.schema) as db:
        async with db.transaction() as txn:
            keys = [rng.randbytes(16) for _ in range(chains)]
            for key in keys:
                txn.set(parts.columns[0], key, VALUE)
        with Measured(load, others_cpu_s):
            began = time.perf_counter()
            async with db.worker(concurrency=concurrency) as worker:
                worker.on_run(lambda *_: load.times.append(time.perf_counter() - began))
                await db.wait_idle()
        async with db.snapshot() as snap:
            last = await snap.get_many(parts.columns[-1], [onward(end_of(key)) for key in keys])
    if any(value != VALUE for value in last.values()) or load.calls != CHAIN * chains:
        raise AssertionError("perco: a chain has not come to its end")
    return load


# ------------------------------------------------------------------ procrastinate


@dataclass(slots=True)
class _Steps:
    """State that the tasks share: their inputs, and their reports."""

    pool: Any = None
    ended: dict[str, float] = field(default_factory=dict)  # when the last step's transaction had committed, by its key
    steps: int = 0
    all: int = 0  # the steps that `done` waits for
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.all:
            self.done.set()


_STEP = (
    "INSERT INTO t{there} SELECT %s, value FROM t{here} WHERE key = %s "
    "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
)
_FIRST = "INSERT INTO t0 VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


def prepare(server: Server) -> None:
    """Make the tables of the steps, and procrastinate's own."""
    server.psql(*(f"CREATE TABLE t{i} (key bytea PRIMARY KEY, value bytea NOT NULL)" for i in range(CHAIN + 1)))
    run_asyncio(_schema(server))


async def _schema(server: Server) -> Load:
    async with _app(server, 4) as (app, _):
        await app.schema_manager.apply_schema_async()
    return Load()


@asynccontextmanager
async def _app(server: Server, connections: int) -> AsyncIterator[tuple[Any, _Steps]]:
    """A procrastinate app with the steps as its tasks, and what they share."""
    import procrastinate
    import psycopg_pool

    told = _Steps()
    app = procrastinate.App(
        connector=procrastinate.PsycopgConnector(conninfo=server.dsn, min_size=connections, max_size=connections)
    )
    for number in range(CHAIN):
        app.task(name=f"step{number}")(_task(app, told, number))
    app.task(name="nothing")(partial(_nothing, told))
    kept = {"autocommit": True, "prepare_threshold": 1}
    pool = psycopg_pool.AsyncConnectionPool(
        server.dsn, min_size=connections, max_size=connections, kwargs=kept, open=False
    )
    async with pool, app.open_async():
        await pool.wait()
        told.pool = pool
        yield app, told


def _task(app: Any, told: _Steps, number: int) -> Callable[[str], Any]:
    statement = _STEP.format(here=number, there=number + 1)

    async def step(key: str) -> None:
        row = bytes.fromhex(key)
        there = onward(row)
        async with told.pool.connection() as connection:
            if number == CHAIN - 1:
                await connection.execute(statement, (there, row))
                told.ended[key] = time.perf_counter()
            else:
                async with connection.transaction():
                    await connection.execute(statement, (there, row))
                    following = app.configure_task(f"step{number + 1}", connection=connection)
                    await following.defer_async(key=there.hex())
        told.step()

    return step


async def _nothing(told: _Steps, number: int) -> None:
    told.step()


async def _first(app: Any, told: _Steps, key: bytes) -> None:
    """The first write, and the first step deferred, in one transaction."""
    async with told.pool.connection() as connection, connection.transaction():
        await connection.execute(_FIRST, (key, VALUE))
        await app.configure_task("step0", connection=connection).defer_async(key=key.hex())


@asynccontextmanager
async def _worker(app: Any, concurrency: int) -> AsyncIterator[None]:
    worker = asyncio.create_task(
        app.run_worker_async(concurrency=concurrency, install_signal_handlers=False, delete_jobs="always")
    )
    try:
        yield
    finally:
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await worker


def procrastinate_latencies(server: Server, seconds: float, per_second: float) -> list[float]:
    """Like `perco_latencies`."""
    return run_asyncio(_procrastinate_latencies(server, seconds, per_second)).times


async def _procrastinate_latencies(server: Server, seconds: float, per_second: float) -> Load:
    rng = random.Random(1)
    acknowledged: dict[str, float] = {}

    async def first(key: bytes) -> None:
        await _first(app, told, key)
        acknowledged[end_of(key).hex()] = time.perf_counter()

    async with _app(server, 10) as (app, told), _worker(app, 10):
        told.all = CHAIN * WARM
        for _ in range(WARM):
            await first(rng.randbytes(16))
        await asyncio.wait_for(told.done.wait(), _LEFT_S)
        acknowledged.clear()
        told.done.clear()
        tasks = []
        at = time.perf_counter()
        until = at + seconds
        while (at := at + rng.expovariate(per_second)) < until:
            await asyncio.sleep(at - time.perf_counter())
            tasks.append(asyncio.create_task(first(rng.randbytes(16))))
        told.all += CHAIN * len(tasks)
        await asyncio.gather(*tasks)
        if told.steps < told.all:
            await asyncio.wait_for(told.done.wait(), _LEFT_S)
    return Load(seconds, times=[told.ended[key] - began for key, began in acknowledged.items()])


def procrastinate_drain(server: Server, chains: int, concurrency: int, *, empty: bool = False) -> Load:
    """Like `perco_drain`. `empty`: the same number of jobs that do nothing."""
    return run_asyncio(_procrastinate_drain(server, chains, concurrency, empty))


async def _procrastinate_drain(server: Server, chains: int, concurrency: int, empty: bool) -> Load:
    rng = random.Random()
    load = Load()
    async with _app(server, concurrency) as (app, told):
        keys = [rng.randbytes(16) for _ in range(chains)]
        async with told.pool.connection() as connection, connection.cursor() as cursor:
            await cursor.executemany(_FIRST, [(key, VALUE) for key in keys])
        if empty:
            await app.configure_task("nothing").batch_defer_async(*({"number": i} for i in range(CHAIN * chains)))
        else:
            await app.configure_task("step0").batch_defer_async(*({"key": key.hex()} for key in keys))
        told.all = CHAIN * chains
        with Measured(load, server.cpu_s):
            began = time.perf_counter()
            async with _worker(app, concurrency):
                await told.done.wait()
        load.times = [time.perf_counter() - began] * told.steps
    return load
