"""perco's rows on PostgreSQL, against the same work in SQL and in a task queue on the same server.

    one call        a durable read-modify-write of one row: perco's transactions, whose reads and commits leave in
                    batches, by the store's owner and by a client that writes directly, against asyncpg in four round
                    trips (BEGIN, SELECT FOR UPDATE, UPDATE, COMMIT), and in one statement
    the leader      is killed, or stopped, while a direct client commits: how long no commit succeeds
    three steps     each reads what the step before has written: observers, against procrastinate

asyncpg gets as many connections as suit it in four round trips: with one for each caller it is slower. pgbench, in C,
with the same four statements is its floor. CPU time is that of the client and the server together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import trio

import perco
from bench import leader
from bench.against import pipeline, rows
from bench.against.embedded import KEYS, ZERO, Perco, one_more, schema, value
from bench.against.load import Load, closed_loop, rates, row_of
from bench.against.postgres import NoPostgresError, Server, server
from bench.harness import Cell, Report, Run, interleaved, version_of

SECONDS = 2.0  # of a round
IN_FLIGHT = 128
CONNECTIONS = 16  # of asyncpg: the best of 4 to 128
PERCO_CHAINS, PERCO_IN_FLIGHT = 1000, 256
PROCRASTINATE_CHAINS, PROCRASTINATE_IN_FLIGHT = 60, 10  # more in flight make it slower

DIRECT = "perco, a direct client"
FOUR, ONE = "asyncpg, 4 round trips", "asyncpg, one statement"


def main(run: Run) -> None:
    report = Report("postgresql", "power")
    peers = {name: version_of(name) for name in ("psycopg", "asyncpg", "procrastinate")}
    facts = run.machine("power (PostgreSQL syncs before every answer)", peers)
    with run.scratch() as folder:
        try:
            with server(folder) as started:
                facts["versions"]["PostgreSQL"] = started.version
                rows.prepare(started)
                _one_call(run, report, folder, started)
                pipeline.prepare(started)
                _three_steps(run, report, started)
                leader.fail_over(
                    run,
                    report,
                    lambda: started.url(f"away_{random.getrandbits(32):x}"),
                    perco.Options(postgresql=perco.options.PostgresqlOptions(own=False)),
                    perco.options.PostgresqlOptions().lease_s,
                )
        except NoPostgresError as error:
            run.say(f"{error}\n")
    run.finish(report, facts)


# ------------------------------------------------------------------ one call


def _one_call(run: Run, report: Report, folder: Path, started: Server) -> None:
    for in_flight in (IN_FLIGHT,) if run.quick else (1, 16, IN_FLIGHT, 1024):
        connections = min(in_flight, CONNECTIONS)
        sides: dict[str, Callable[[], Load]] = {
            "perco": partial(trio.run, _load, started, in_flight),
            DIRECT: partial(_load_direct, started, in_flight),
            FOUR: partial(rows.load, started, connections, SECONDS, trips=4, callers=in_flight),
            ONE: partial(rows.load, started, connections, SECONDS, trips=1, callers=in_flight),
        }
        found = interleaved(run.rounds, sides)
        mine = rates(found["perco"])
        table = []
        for name, loads in found.items():
            table.append(row_of(name, loads, "" if name == "perco" else f"{mine.of(rates(loads)):.2f}"))
            key = {"perco": "perco", DIRECT: "direct", FOUR: "sql_4_trips", ONE: "sql_one_statement"}[name]
            report.figures[f"{key}_{in_flight}_calls_per_s"] = rates(loads).median
            report.figures[f"{key}_{in_flight}_cpu_us"] = median(load.cpu_us for load in loads)
        pgbench = rows.pgbench_rate(started, folder, connections, SECONDS)
        table.append(["pgbench, 4 round trips", Cell((pgbench,)), "", "", "", f"{mine.median / pgbench:.2f}"])
        run.table(
            f"one durable read-modify-write of one of {len(KEYS)} rows, {in_flight} in flight"
            f" (asyncpg: over {connections} connections)",
            ("", "calls a second (least - most)", "p50 ms", "p99 ms", "CPU us a call", "perco is"),
            table,
        )
        kept = report.floor(
            f"asyncpg, {in_flight} in flight, reaches 0.5 of pgbench", rates(found[FOUR]).median / pgbench, 0.5
        )
        report.ratio(
            f"vs_sql_4_trips_{in_flight}",
            mine.of(rates(found[FOUR])),
            valid=kept,
            at_least=1.0 if in_flight == IN_FLIGHT else None,
        )
        report.ratio(f"vs_sql_one_statement_{in_flight}", mine.of(rates(found[ONE])), valid=kept)


def _load_direct(started: Server, in_flight: int) -> Load:
    """The CPU time of the server that gives timestamps counts."""
    url = started.url("direct")
    with leader.coordinators(url, 1) as [coordinator]:
        return trio.run(_load, started, in_flight, url, lambda: started.cpu_s() + coordinator.cpu_s())


async def _load(
    started: Server, in_flight: int, url: str = "", others_cpu_s: Callable[[], float] | None = None
) -> Load:
    async with perco.open(url or started.url("calls"), schema) as db:
        async with db.transaction() as txn:
            if await txn.get(value, KEYS[0]) is None:
                for key in KEYS:
                    txn.set(value, key, ZERO)
        store = Perco(db)
        before = await store.total()

        async def call(rng: random.Random) -> None:
            await store.modify(rng.choice(KEYS), one_more)

        found = await closed_loop(call, in_flight, SECONDS, others_cpu_s or started.cpu_s)
        counted = await store.total() - before
    if counted != found.calls:
        raise AssertionError(f"perco: {found.calls} calls were answered, and the rows say {counted}")
    return found


# ------------------------------------------------------------------ three steps


def _three_steps(run: Run, report: Report, started: Server) -> None:
    theirs = partial(pipeline.procrastinate_drain, started, PROCRASTINATE_CHAINS, PROCRASTINATE_IN_FLIGHT)
    found = interleaved(
        run.rounds, {"perco, three observers": partial(_drain, started), "procrastinate, three tasks": theirs}
    )
    found["procrastinate, empty jobs"] = [theirs(empty=True)]
    run.table(
        "three steps: how fast what waits is worked off",
        ("", "steps a second (least - most)", "CPU us a step"),
        [[name, rates(loads), f"{median(load.cpu_us for load in loads):.0f}"] for name, loads in found.items()],
    )
    mine, other, empty = (rates(loads) for loads in found.values())
    report.figures["steps_perco_per_s"], report.figures["steps_procrastinate_per_s"] = mine.median, other.median
    kept = report.floor("procrastinate's steps reach 0.3 of its empty jobs", other.median / empty.median, 0.3)
    report.ratio("steps_vs_procrastinate", mine.of(other), valid=kept, at_least=10.0)


def _drain(started: Server) -> Load:
    url = started.url(f"drain_{random.getrandbits(32):x}")
    return trio.run(pipeline.drain, url, PERCO_CHAINS, PERCO_IN_FLIGHT, started.cpu_s)
