"""Events or threads: one served store, called by tasks on an event loop, or by a thread per request.

The paper's clients had a thread per request, for the sake of plain code. Here the same work - one durable
read-modify-write of a row: timestamp, read, commit - is done four ways, each by its own client process, against one
`perco serve`, with 1 to 2 048 requests in flight. Each way is judged at the number in flight that suits it best:

    tasks                 the event loop, one connection, frames that carry all waiting calls
    tasks, no batching    the same, every call in a frame of its own: what the loop alone gives
    threads               a thread and a connection per request, no loop: the paper's way, and the baseline
    threads, batching     `perco.sync`: a thread per request, one connection: what batching alone gives

For all four, the server commits together whatever has arrived on any connection. PostgreSQL does the same work in four
round trips, and in one statement; these parts are skipped if it is not installed. An operation that tasks ship to the
store's owner (`db.add`: one trip) is compared with that one statement.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.against import rows
from bench.against.load import Load, medians, rates
from bench.against.postgres import NoPostgresError, binaries, server as postgres
from bench.against.served import SHIPPED, SIDES, TASKS, TASKS_ALONE, THREADS, THREADS_BATCHING, Server, server
from bench.harness import Cell, Report, Run, interleaved, version_of

SECONDS = 1.5  # of a round
IN_FLIGHT = (1, 8, 32, 128, 512, 2048)
QUICK = {TASKS: (1, 128, 512), TASKS_ALONE: (128,), THREADS: (1, 8, 32, 128), THREADS_BATCHING: (128,)}
QUICK[SHIPPED] = (1, 128, 512)
NOT_DURABLE = (1, 32, 512)
TRIPS = {4: "asyncpg, 4 trips", 1: "asyncpg, 1 trip"}
CONNECTIONS, QUICK_CONNECTIONS = (16, 32, 64), (32,)
WAITING = 512

Found = dict[tuple[str, int], list[Load]]


def main(run: Run) -> None:
    """Print the tables and the RESULT line."""
    report = Report(run.name, "power")
    facts = run.machine("power (fsync before every answer)", {"asyncpg": version_of("asyncpg")})
    with run.scratch() as folder, ExitStack() as stack:
        served = stack.enter_context(server(folder, durable=True))
        sides: dict[tuple[str, int], Callable[[], Load]] = {
            (side, n): partial(served.load, side, n, SECONDS)
            for side in (*SIDES, SHIPPED)
            for n in (QUICK[side] if run.quick else IN_FLIGHT)
        }
        pgbench = _postgres(run, stack, folder, sides, facts)
        found = interleaved(run.rounds, sides)
        floors = [(n, pgbench(n)) for n in (QUICK_CONNECTIONS if run.quick else CONNECTIONS)] if pgbench else []
        served.check()
        _tell(run, report, found)
        _judge(run, report, found, max((rate for _, rate in floors), default=0.0))
        _memory(run, report, served)
        if not run.quick:
            with server(folder, durable=False) as other:
                _not_durable(run, report, other)
                other.check()
    if not run.quick:
        _draw(run, found)
    run.finish(report, facts)


def _postgres(
    run: Run, stack: ExitStack, folder: Path, sides: dict[tuple[str, int], Callable[[], Load]], facts: dict[str, Any]
) -> Callable[[int], float] | None:
    """Add PostgreSQL's sides, if it is installed. Returns pgbench's rate as a function of the connections."""
    try:
        if find_spec("asyncpg") is None:
            raise NoPostgresError("install asyncpg: pip install '.[bench]'")
        binaries()
        started = stack.enter_context(postgres(folder))
    except NoPostgresError as error:
        run.say(f"PostgreSQL is left out: {error}\n")
        return None
    facts["versions"]["PostgreSQL"] = started.version
    rows.prepare(started)
    for trips, name in TRIPS.items():
        for n in QUICK_CONNECTIONS if run.quick else CONNECTIONS:
            sides[name, n] = partial(rows.load, started, n, SECONDS, trips=trips)
    return lambda n: rows.pgbench_rate(started, folder, n, 2 * SECONDS)


def best(found: Found, side: str) -> tuple[int, Cell]:
    """(requests in flight, rates) where a side is at its best."""
    cells = [(n, rates(loads)) for (name, n), loads in found.items() if name == side]
    return max(cells, key=lambda cell: cell[1].median)


def _tell(run: Run, report: Report, found: Found, title: str = "durable", key: str = "") -> None:
    lines = []
    for (name, n), loads in found.items():
        p50, p99, cpu = medians(loads)
        lines.append((name, n, rates(loads), f"{p50:.1f}", f"{p99:.1f}", f"{cpu:.0f}"))
        label = f"{key}{name.replace(', ', '_').replace(' ', '_')}_{n}"
        report.figures[f"{label}_per_s"] = rates(loads).median
        report.figures[f"{label}_p50_ms"], report.figures[f"{label}_p99_ms"] = p50, p99
        report.figures[f"{label}_cpu_us"] = cpu
    run.table(
        f"one read-modify-write of a row, {title}; CPU of client and server",
        ("", "in flight", "per second (least - most)", "p50 ms", "p99 ms", "CPU us each"),
        lines,
    )


def _judge(run: Run, report: Report, found: Found, pgbench: float) -> None:
    at = {side: best(found, side) for side in SIDES}
    tasks, alone, threads, batching = (at[side][1] for side in SIDES)
    first, theirs = rates(found[TASKS, 1]), rates(found[THREADS, 1])
    kept = report.floor("threads at 1 in flight are as fast as tasks at 1", theirs.of(first), 1.0)
    report.ratio("async_vs_threads_best", tasks.of(threads), valid=kept, at_least=5.0)
    report.ratio("async_vs_threads_batching_best", tasks.of(batching))
    report.ratio("batching_alone", batching.of(threads), valid=kept)
    report.ratio("event_loop_alone", alone.of(threads), valid=kept)
    at[SHIPPED] = best(found, SHIPPED)
    for key, side, most in (("cpu_us_both", TASKS, 55), ("cpu_us_both_shipped", SHIPPED, 35)):
        report.figure(key, medians(found[side, at[side][0]])[2], at_most=most)
    if pgbench:
        (_, four), (_, one) = best(found, TRIPS[4]), best(found, TRIPS[1])
        kept = report.floor("asyncpg, 4 round trips, reaches 0.5 of pgbench", four.median / pgbench, 0.5)
        report.figures["pgbench_4_trips_per_s"] = pgbench
        report.ratio("vs_postgres_4_trips", tasks.of(four), valid=kept, at_least=2.5)
        report.ratio("vs_postgres_1_trip", tasks.of(one), valid=kept, at_least=0.7)
        report.ratio("vs_postgres_1_trip_shipped", at[SHIPPED][1].of(one), valid=kept, at_least=1.3)
    each = ", ".join(f"{side} {cell.median:.0f}/s with {n}" for side, (n, cell) in at.items())
    run.say(f"each at its best: {each}")
    run.say(
        f"of the {tasks.of(threads):.1f} times between threads and tasks, the event loop alone gives "
        f"{alone.of(threads):.2f}, batching alone {batching.of(threads):.2f}\n"
    )


def _memory(run: Run, report: Report, served: Server) -> None:
    sides: dict[str, Callable[[], float]] = {
        side: partial(served.memory, side, WAITING) for side in (TASKS, THREADS, THREADS_BATCHING)
    }
    cells = {side: Cell(tuple(values)) for side, values in interleaved(3, sides).items()}
    run.table(
        f"a request that waits in the middle of its transaction, {WAITING} of them",
        ("", "KiB in its client (least - most)"),
        [(side, Cell(tuple(value / 1024 for value in cell.rounds))) for side, cell in cells.items()],
    )
    report.ratio("memory_vs_threads_512", cells[TASKS].of(cells[THREADS]))
    report.bars.append(("memory_vs_threads_512", cells[TASKS].of(cells[THREADS]), "at most", 0.2))
    for side, cell in cells.items():
        report.figures[f"{side.replace(', ', '_')}_bytes_waiting"] = cell.median


def _not_durable(run: Run, report: Report, served: Server) -> None:
    found = interleaved(
        run.rounds, {(side, n): partial(served.load, side, n, SECONDS) for side in SIDES for n in NOT_DURABLE}
    )
    _tell(run, report, found, "not durable (an answer survives the death of the process only)", "not_durable_")
    threads, tasks = best(found, THREADS)[1], best(found, TASKS)[1]
    report.ratio("not_durable_async_vs_threads_best", tasks.of(threads))


def _draw(run: Run, found: Found) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rate, late) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    looks = {TASKS: ("#2563eb", "-"), TASKS_ALONE: ("#2563eb", ":"), THREADS: ("#b45309", "-")}
    looks[THREADS_BATCHING] = ("#b45309", ":")
    for side in SIDES:
        counts = [n for name, n in found if name == side]
        colour, style = looks[side]
        cells = [rates(found[side, n]) for n in counts]
        rate.plot(counts, [cell.median for cell in cells], style, color=colour, marker="o", ms=4, label=side)
        rate.fill_between(
            counts, *zip(*((min(c.rounds), max(c.rounds)) for c in cells), strict=True), color=colour, alpha=0.1
        )
        late.plot(
            [cell.median for cell in cells],
            [medians(found[side, n])[0] for n in counts],
            style,
            color=colour,
            marker="o",
            ms=4,
        )
    for trips, name in TRIPS.items():
        if any(side == name for side, _ in found):
            n, cell = best(found, name)
            rate.axhline(cell.median, color="#9ca3af", lw=1, ls="-" if trips == 1 else "--")
            rate.annotate(
                f"PostgreSQL, {name.split(', ')[1]}, {n} connections", (1, cell.median), fontsize=8, va="bottom"
            )
            late.plot([cell.median], [medians(found[name, n])[0]], "s", color="#9ca3af")
    rate.set_xscale("log", base=2)
    rate.set_xticks(IN_FLIGHT, [str(n) for n in IN_FLIGHT])
    rate.set_xlabel("requests in flight")
    rate.set_ylabel("per second, durable")
    rate.set_ylim(0, 1.3 * rate.get_ylim()[1])
    rate.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    rate.set_title("Events or threads: one durable read-modify-write", loc="left", fontsize=10)
    late.set_yscale("log")
    late.set_xlabel("per second, durable")
    late.set_ylabel("p50, ms")
    late.set_title("... and how long each takes (PostgreSQL: squares)", loc="left", fontsize=10)
    for axis in (rate, late):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    run.figure(figure, "engine")
    pyplot.close(figure)
