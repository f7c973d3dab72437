"""The same work on what could be used instead: SQLite, ZODB, PostgreSQL, procrastinate.

Everything is durable: an answer comes after its fsync. The code for each peer (`bench/against/`) is written to make
that peer win. Each peer does all of the work (no update is lost, no money appears), and has a floor: a share of what it
does without our harness around it. If it misses its floor, the ratio is void.

    one call            one durable read-modify-write of a row, 128 in flight: embedded against embedded
    transfers           two rows, popular ones more often: an embedded store against a server, for orientation
    three steps         each reads what the step before has written: observers against procrastinate on PostgreSQL

Parts that need a PostgreSQL server, or a package that is not installed, say so and are left out.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from bench.against import embedded, pipeline, transfers
from bench.against.load import Load, rates, row_of
from bench.against.postgres import NoPostgresError, Server, binaries, server
from bench.harness import Cell, Report, Run, interleaved, percentile, version_of

SECONDS = 1.0  # of a round
QUICK_SECONDS = 0.7  # of a round that is for orientation
PER_SECOND = 20.0  # first writes, where latency is measured
OPEN_LOOP_S, QUICK_OPEN_LOOP_S = 20.0, 2.5
PERCO_CHAINS, PERCO_IN_FLIGHT = 3000, 256
PROCRASTINATE_CHAINS, PROCRASTINATE_IN_FLIGHT = 60, 10  # more in flight make it slower
ONE_WRITER, BATCHING = "SQLite, one writer", "SQLite, batching writer"
SERVED = ("asyncpg", "procrastinate", "psycopg")


def main(run: Run) -> None:
    report = Report("peers", "power")
    peers = {"SQLite": sqlite3.sqlite_version, **{name: version_of(name) for name in ("ZODB", *SERVED)}}
    facts = run.machine("power (fsync before every answer)", peers)
    with run.scratch() as folder:
        _one_call(run, report, folder)
        missing = [name for name in SERVED if find_spec(name) is None]
        try:
            if missing:
                raise NoPostgresError(f"for the rest install {' and '.join(missing)}: pip install '.[bench]'")
            binaries()
            with server(folder) as started:
                facts["versions"]["PostgreSQL"] = started.version
                _served(run, report, folder, started)
        except NoPostgresError as error:
            run.say(f"Transfers and three steps are left out: {error}\n")
    if not run.quick:
        _draw(run, report)
    run.finish(report, facts)


def _note(report: Report, key: str, loads: Sequence[Load], what: str = "calls") -> None:
    report.figures[f"{key}_{what}_per_s"] = rates(loads).median
    report.figures[f"{key}_cpu_us"] = median(load.cpu_us for load in loads)


def _key(name: str) -> str:
    return name.lower().replace(",", "").replace(" ", "_")


# ------------------------------------------------------------------ one call


def _one_call(run: Run, report: Report, folder: Path) -> None:
    names = [name for name in embedded.STORES if name != "ZODB" or embedded.has_zodb()]
    if len(names) < len(embedded.STORES):
        run.say("ZODB is left out; to compare with it: pip install '.[bench]'\n")
    for in_flight in (128,) if run.quick else (1, 128, 1024):
        sides = {name: partial(embedded.load, name, folder, in_flight, SECONDS) for name in names}
        plain = {name: partial(_plain, name, folder) for name in ("SQLite", *names[3:])} if in_flight == 128 else {}
        found = interleaved(run.rounds, {**sides, **{f"{name}, plain loop": side for name, side in plain.items()}})
        _tell_one_call(run, report, in_flight, found)


def _plain(name: str, folder: Path) -> Load:
    rate = embedded.plain_loop(name, folder, SECONDS / 2)
    return Load(SECONDS, times=[1 / rate] * round(rate * SECONDS))


def _tell_one_call(run: Run, report: Report, in_flight: int, found: dict[str, list[Load]]) -> None:
    mine = rates(found["perco"])
    rows = []
    for name, loads in found.items():
        ratio = f"{mine.of(rates(loads)):.2f}" if name in embedded.STORES and name != "perco" else ""
        rows.append(row_of(name, loads, ratio))
        _note(report, f"{_key(name)}_{in_flight}", loads)
    run.table(
        f"one call, one durable read-modify-write, {in_flight} in flight",
        ("", "calls a second (least - most)", "p50 ms", "p99 ms", "CPU us a call", "perco is"),
        rows,
    )
    if in_flight != 128:
        return
    one, batching = rates(found[ONE_WRITER]), rates(found[BATCHING])
    kept = report.floor(
        "SQLite, one writer, reaches 0.6 of a plain loop", one.of(rates(found["SQLite, plain loop"])), 0.6
    )
    report.ratio("vs_sqlite_one_writer_128", mine.of(one), valid=kept, at_least=2.0)
    if "ZODB" in found:
        zodb = rates(found["ZODB"])
        kept = report.floor("ZODB reaches 0.6 of a plain loop", zodb.of(rates(found["ZODB, plain loop"])), 0.6)
        report.ratio("vs_zodb_128", mine.of(zodb), valid=kept, at_least=2.0)
    kept = report.floor("SQLite, batching writer, is 4x its one writer", batching.of(one), 4)
    times = mine.of(batching)
    report.ratio("vs_sqlite_batching_128", times, valid=kept, at_least=1.0)
    winner = "perco" if times > 1 else "SQLite behind a batching writer"
    run.say(
        f"{winner} is the faster of the two, {1 / times:.1f} times. It runs calls one after the other,\n"
        "each a function that cannot await; perco's transactions await what they like, and notify observers.\n"
        if times < 1
        else f"{winner} is the faster of the two, {times:.1f} times.\n"
    )


# ------------------------------------------------------------------ with PostgreSQL


def _served(run: Run, report: Report, folder: Path, started: Server) -> None:
    transfers.prepare(started)
    seconds = QUICK_SECONDS if run.quick else SECONDS
    sides: dict[str, Callable[[], Load]] = {
        "perco, embedded": partial(transfers.perco_load, folder, seconds),
        "asyncpg, 4 trips": partial(transfers.postgres_load, started, seconds, function=False),
        "asyncpg, a function": partial(transfers.postgres_load, started, seconds, function=True),
    }
    found = interleaved(run.rounds, sides)
    _tell_transfers(run, report, found, transfers.pgbench_rate(started, folder, 2 * SECONDS))
    pipeline.prepare(started)
    _three_steps(run, report, folder, started)


def _tell_transfers(run: Run, report: Report, found: dict[str, list[Load]], pgbench: float) -> None:
    mine, trips, function = (rates(loads) for loads in found.values())
    keys = ("transfers_perco", "transfers_postgres_4_trips", "transfers_postgres_function")
    rows = []
    for key, (name, loads) in zip(keys, found.items(), strict=True):
        retries = median(load.retries_per_call for load in loads)
        rows.append(row_of(name, loads, f"{retries:.2f}"))
        _note(report, key, loads, "transfers")
        report.figures[f"{key}_retries"] = retries
    rows.append(["pgbench, 4 trips", Cell((pgbench,)), "", "", "", ""])
    report.figures["transfers_pgbench_per_s"] = pgbench
    run.table(
        f"transfers between 2 of {transfers.ACCOUNTS} rows, Zipf {transfers.SKEW:g}, {transfers.IN_FLIGHT} in flight: "
        "perco, and for orientation PostgreSQL at repeatable read",
        ("", "per second (least - most)", "p50 ms", "p99 ms", "CPU us each", "retries each"),
        rows,
    )
    kept = report.floor("asyncpg, 4 round trips, reaches 0.5 of pgbench", trips.median / pgbench, 0.5)
    report.ratio("embedded_vs_postgres_4_trips_transfers", mine.of(trips), valid=kept)
    report.ratio("embedded_vs_postgres_function_transfers", mine.of(function), valid=kept)


def _three_steps(run: Run, report: Report, folder: Path, started: Server) -> None:
    seconds = QUICK_OPEN_LOOP_S if run.quick else OPEN_LOOP_S
    late: dict[str, list[float]] = {
        "perco": pipeline.perco_latencies(folder, seconds, PER_SECOND),
        "procrastinate": pipeline.procrastinate_latencies(started, seconds, PER_SECOND),
    }
    theirs = partial(pipeline.procrastinate_drain, started, PROCRASTINATE_CHAINS, PROCRASTINATE_IN_FLIGHT)
    sides: dict[str, Callable[[], Load]] = {
        "perco": partial(pipeline.perco_drain, folder, PERCO_CHAINS, PERCO_IN_FLIGHT),
        "procrastinate": theirs,
    }
    found = interleaved(run.rounds, sides)
    found["procrastinate, empty jobs"] = [theirs(empty=True)]
    labels = {"perco": "perco, three observers", "procrastinate": "procrastinate, three tasks"}
    rows: list[list[object]] = []
    for name, loads in found.items():
        times = [1000 * value for value in late.get(name, ())]
        shares = [f"{percentile(times, share):.1f}" if times else "" for share in (0.5, 0.99)]
        rows.append([labels.get(name, name), *shares, rates(loads), f"{median(load.cpu_us for load in loads):.0f}"])
        _note(report, f"steps_{_key(name)}", loads, "steps")
        if times:
            report.figures[f"steps_{name}_p50_ms"] = percentile(times, 0.5)
            report.figures[f"steps_{name}_p99_ms"] = percentile(times, 0.99)
    run.table(
        f"three steps: latency at {PER_SECOND:g} first writes a second, and how fast what waits is worked off",
        ("", "p50 ms", "p99 ms", "steps a second (least - most)", "CPU us a step"),
        rows,
    )
    mine, other, empty = (rates(loads) for loads in found.values())
    kept = report.floor("procrastinate's steps reach 0.3 of its empty jobs", other.median / empty.median, 0.3)
    report.ratio("steps_vs_procrastinate", mine.of(other), valid=kept)
    p50 = percentile(late["procrastinate"], 0.5) / percentile(late["perco"], 0.5)
    report.ratio("latency_procrastinate_vs_perco", p50, valid=kept)


# ------------------------------------------------------------------ the figure


def _draw(run: Run, report: Report) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = report.figures
    parts: list[tuple[str, list[tuple[str, str]]]] = [
        (
            "one durable read-modify-write,\n128 in flight",
            [
                ("perco", "perco_128_calls_per_s"),
                ("SQLite,\none writer", "sqlite_one_writer_128_calls_per_s"),
                ("SQLite,\nbatching", "sqlite_batching_writer_128_calls_per_s"),
                ("ZODB", "zodb_128_calls_per_s"),
            ],
        ),
        (
            "2-row transfers, Zipf 0.9,\n64 in flight",
            [
                ("perco", "transfers_perco_transfers_per_s"),
                ("PostgreSQL,\n4 trips", "transfers_postgres_4_trips_transfers_per_s"),
                ("PostgreSQL,\nfunction", "transfers_postgres_function_transfers_per_s"),
            ],
        ),
        (
            "steps of a three-step pipeline",
            [("perco", "steps_perco_steps_per_s"), ("procrastinate", "steps_procrastinate_steps_per_s")],
        ),
    ]
    known = [(title, [(label, figures[key]) for label, key in bars if key in figures]) for title, bars in parts]
    known = [(title, bars) for title, bars in known if bars]
    figure, axes = pyplot.subplots(
        1, len(known), figsize=(4.2 * len(known), 3.8), width_ratios=[len(bars) for _, bars in known], squeeze=False
    )
    for axis, (title, bars) in zip(axes[0], known, strict=True):
        colours = ["#2563eb" if label == "perco" else "#b0b7c3" for label, _ in bars]
        drawn = axis.bar([label for label, _ in bars], [height for _, height in bars], 0.62, color=colours)
        axis.bar_label(drawn, labels=[f"{height:,.0f}".replace(",", " ") for _, height in bars], padding=2, fontsize=9)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_ylim(0, 1.12 * max(height for _, height in bars))
        axis.tick_params(axis="x", labelsize=8.5, length=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("per second, durable")
    figure.tight_layout()
    run.figure(figure, "peers")
    pyplot.close(figure)
