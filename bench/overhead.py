"""The cost of transactions over the bare row store: the paper's figure 8, on LMDB.

The paper compared Percolator with bare Bigtable, batching off: reads reached 0.94 of its rate, writes 0.23.

Here a *write* is a single-cell read-modify-write transaction, durable, with some number in flight. It commits in one
step, like every transaction within one tablet; *two phases* is the same with the paper's protocol. It is compared with
bare LMDB in two ways, side by side. *Batching on*: waiting mutations commit together, and bare LMDB puts as many values
per durable write transaction as are in flight, the best that LMDB can do. *Batching off*, as in the paper: each
mutation is an LMDB write transaction of its own, and so is each of bare LMDB's puts.

A *read* is `await txn.get`. It is compared with the awaited read of the row store below it, and that read with bare
LMDB's `begin; get`.

The same write in memory, in child processes with and without `python -O`, shows the cost of assertions.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import trio
import trio.testing

import perco
from bench.harness import Cell, Report, Run, alternate
from perco.database.inside import inside
from perco.storage import WRITE

VALUE = b"x" * 100
SECONDS = 1.0
READS = 15_000
READ_ROUNDS = 4  # of reads, in each round of the writes
PAPER_WRITE, PAPER_READ = 0.23, 0.94
ASSERTED_S = 1.0  # with and without assertions, in each round
ASSERTED_WARM, ASSERTED_SLICE = 2000, 500

table = perco.Table("t")
value = table.column("value", perco.BYTES)
schema = perco.Schema(table)


def bare_puts(folder: Path, per_transaction: int) -> float:
    """Values per second that bare LMDB makes durable, `per_transaction` in each write transaction, at random keys."""
    path = folder / f"bare-{random.getrandbits(32):x}"
    env = lmdb.open(str(path), map_size=1 << 33)
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        with env.begin(write=True) as txn:
            for _ in range(per_transaction):
                txn.put(random.randbytes(16), VALUE)
        done += per_transaction
    seconds = time.perf_counter() - began
    env.close()
    return done / seconds


def bare_gets(env: lmdb.Environment, keys: list[bytes]) -> float:
    """`begin; get` per second."""
    began = time.perf_counter()
    for i in range(READS):
        with env.begin() as txn:
            txn.get(keys[i % len(keys)])
    return READS / (time.perf_counter() - began)


def rate(
    folder: Path, in_flight: int, cells: int = 1, options: perco.Options | None = None, cpu: list[float] | None = None
) -> float:
    """Transactions per second: each reads `cells` cells of random rows and writes them. `cpu` gets the microseconds of
    the loop's thread for each."""
    return trio.run(_rate, folder / f"perco-{random.getrandbits(32):x}", in_flight, cells, options, cpu)


async def _rate(
    path: Path, in_flight: int, cells: int, options: perco.Options | None, cpu: list[float] | None
) -> float:
    async def modify(txn: perco.Transaction, keys: list[bytes]) -> None:
        for key in keys:
            await txn.get(value, key)
            txn.set(value, key, VALUE)

    done = 0

    async def client() -> None:
        nonlocal done
        while time.perf_counter() - began < SECONDS:
            await db.run(modify, [random.randbytes(16) for _ in range(cells)])
            done += 1

    async with perco.open(path, schema, options=options) as db:
        await db.run(modify, [b"warm"])
        began, used = time.perf_counter(), time.thread_time()
        async with trio.open_nursery() as nursery:
            for _ in range(in_flight):
                nursery.start_soon(client)
        if cpu is not None:
            cpu.append(1e6 * (time.thread_time() - used) / done)
        return done / (time.perf_counter() - began)


async def _reads(path: Path, rounds: int) -> dict[str, Cell]:
    """Per second, in one store and on the same rows: txn.get, the row store's read, bare begin; get."""
    keys = [random.randbytes(16) for _ in range(10_000)]
    bare = lmdb.open(str(path.with_name("bare")), map_size=1 << 30)
    with bare.begin(write=True) as write:
        for key in keys:
            write.put(key, VALUE)
    found: dict[str, list[float]] = {"get": [], "raw": [], "bare": []}
    async with perco.open(path, schema) as db:
        async with db.transaction() as txn:
            for key in keys:
                txn.set(value, key, VALUE)
        column, store = inside(db).known.bind(value).column, inside(db).driver.store
        async with db.snapshot() as snap:
            for _ in range(rounds):
                began = time.perf_counter()
                for i in range(READS):
                    await snap.get(value, keys[i % len(keys)])
                found["get"].append(READS / (time.perf_counter() - began))
                began = time.perf_counter()
                for i in range(READS):
                    await store.read((("t", keys[i % len(keys)], ((WRITE, column, 0, snap.start_ts, 1),)),))
                found["raw"].append(READS / (time.perf_counter() - began))
                found["bare"].append(bare_gets(bare, keys))
    bare.close()
    return {name: Cell(tuple(values)) for name, values in found.items()}


def in_memory(seconds: float) -> float:
    """Transactions per second of CPU time, one after the other, on a memory store: the cost without the disk.

    It is the best of many slices of that time, because other processes disturb the caches by more than the difference
    that is measured.
    """
    return trio.run(_in_memory, seconds)


async def _in_memory(seconds: float) -> float:
    async def modify(txn: perco.Transaction, key: bytes) -> None:
        await txn.get(value, key)
        txn.set(value, key, VALUE)

    async with perco.open("memory:", schema) as db:
        for _ in range(ASSERTED_WARM):
            await db.run(modify, random.randbytes(2))
        best, ends = 0.0, time.process_time() + seconds
        while True:
            began = time.process_time()
            for _ in range(ASSERTED_SLICE):
                await db.run(modify, random.randbytes(2))
            now = time.process_time()
            best = max(best, ASSERTED_SLICE / (now - began))
            if now > ends:
                return best


def in_a_child(*flags: str) -> float:
    """The same in a process of its own, with these flags of Python."""
    program = f"from bench import overhead; import perco; perco.tune_gc(); print(overhead.in_memory({ASSERTED_S}))"
    return float(child(flags, program))


def child(flags: Sequence[str], program: str) -> str:
    """Run a program in a process of its own; returns its output. Assertions are on unless the flags turn them off."""
    command = [sys.executable, *flags, "-c", program]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONOPTIMIZE"}
    root = Path(__file__).parent.parent
    return subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout


async def _bytes_in_flight(path: Path, in_flight: int) -> float:
    """Python memory per transaction that waits for its commit, tasks included."""

    async def one() -> None:
        await db.run(modify, random.randbytes(16))

    async def modify(txn: perco.Transaction, key: bytes) -> None:
        await txn.get(value, key)
        txn.set(value, key, VALUE)
        await gate.wait()

    async with perco.open(path, schema) as db:
        gate = trio.Event()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        async with trio.open_nursery() as nursery:
            for _ in range(in_flight):
                nursery.start_soon(one)
            await trio.testing.wait_all_tasks_blocked()
            used = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            gate.set()
        return used / in_flight


def main(run: Run) -> None:
    report = Report("overhead", "power")
    facts = run.machine("power (fsync before every answer)")
    off = perco.Options(batch=perco.options.BatchOptions(mutations_max=1))
    two = perco.Options(commit=perco.options.CommitOptions(one_step=False))
    off_two = replace(off, commit=two.commit)
    with run.scratch() as folder:
        sides: dict[str, Callable[[], float]] = {}
        cpu: list[float] = []
        for n in (1, 128) if run.quick else (1, 128, 1024):
            sides[f"bare {n}"] = partial(bare_puts, folder, n)
            sides[f"perco {n}"] = partial(rate, folder, n, cpu=cpu if n == 128 else None)
            sides[f"perco {n}, two phases"] = partial(rate, folder, n, 1, two)
        sides["perco 128, batching off"] = partial(rate, folder, 128, 1, off)
        sides["perco 128, two phases, batching off"] = partial(rate, folder, 128, 1, off_two)
        if not run.quick:
            sides["perco 1, batching off"] = partial(rate, folder, 1, 1, off)
            sides["perco 128, 2 rows"] = partial(rate, folder, 128, 2)
            sides["perco 128, 10 rows"] = partial(rate, folder, 128, 10)
        cells = alternate(4 if run.quick else 2 * run.rounds + 3, sides)
        reads = trio.run(_reads, folder / "reads", READ_ROUNDS * run.rounds)
        report.figures["bytes_per_inflight"] = trio.run(_bytes_in_flight, folder / "memory", 2000)
    asserted = alternate(run.rounds, {"with": in_a_child, "without": partial(in_a_child, "-O")})
    _tell(run, report, cells, reads)
    loop_us = statistics.median(cpu)
    run.say(f"CPU time of the loop's thread for a transaction, 128 in flight: {loop_us:.1f} us\n")
    report.figure("loop_cpu_us_128", loop_us, at_most=15)
    _tell_asserted(run, report, asserted)
    if not run.quick:
        _draw(run, report)
    run.finish(report, facts)


def _tell(run: Run, report: Report, cells: dict[str, Cell], reads: dict[str, Cell]) -> None:
    rows: list[tuple[Any, ...]] = []
    for name, cell in cells.items():
        if name.startswith("bare"):
            rows.append((f"bare LMDB, {name[5:]} puts per write transaction", cell, ""))
        else:
            in_flight = name.split()[1].rstrip(",")
            base = "1" if name.endswith(", batching off") else in_flight  # puts per write transaction
            of = f"{cell.of(cells[f'bare {base}']):.2f} of {base}"
            rows.append((f"{name} in flight" if "," not in name else name, cell, of))
    run.table(
        "durable writes: single-cell read-modify-write, per second",
        ("", "median (least - most)", "of bare LMDB, puts"),
        rows,
    )
    raw, bare, get = reads["raw"], reads["bare"], reads["get"]
    run.table(
        "reads of one cell, per second",
        ("", "median (least - most)", ""),
        [
            ("bare LMDB, begin; get", reads["bare"], ""),
            ("await store.read(...)", reads["raw"], f"{raw.of(bare):.2f} of bare"),
            ("await txn.get(...)", reads["get"], f"{get.of(raw):.2f} of the row store"),
        ],
    )
    kept = report.floor("bare LMDB at 128 puts is 10x its rate at 1", cells["bare 128"].of(cells["bare 1"]), 10)
    report.ratio(
        "write_vs_bare_lmdb_128",
        cells["perco 128"].of(cells["bare 128"]),
        valid=kept,
        at_least=0.60,
    )
    report.ratio(
        "two_phases_vs_bare_lmdb_128", cells["perco 128, two phases"].of(cells["bare 128"]), valid=kept, at_least=0.30
    )
    report.ratio("write_vs_bare_lmdb_1", cells["perco 1"].of(cells["bare 1"]), at_least=0.75)
    # Comparable with the paper's 0.23: nothing is batched on either side.
    one = cells["bare 1"]
    report.ratio("write_batching_off_vs_bare_lmdb_1", cells["perco 128, batching off"].of(one))
    report.ratio("two_phases_batching_off_vs_bare_lmdb_1", cells["perco 128, two phases, batching off"].of(one))
    report.ratio("one_step_vs_two_phases_1", cells["perco 1"].of(cells["perco 1, two phases"]), at_least=2.0)
    report.ratio("one_step_vs_two_phases_128", cells["perco 128"].of(cells["perco 128, two phases"]))
    report.ratio("read_vs_raw", get.of(raw), at_least=0.70)
    report.ratio("raw_read_vs_bare", raw.of(bare), at_least=0.15)
    report.ratio("read_vs_bare", get.of(bare), at_least=0.25)
    for name, cell in cells.items():
        side, _, rest = name.partition(" ")
        key = "txn_per_s_" if side == "perco" else "bare_puts_per_s_"
        report.figures[key + rest.replace(", ", "_").replace(" ", "_")] = cell.median
    for name, cell in reads.items():
        report.figures[f"{name}_reads_per_s"] = cell.median
    run.say(f"memory per transaction in flight: {report.figures['bytes_per_inflight'] / 1024:.1f} KiB\n")


def _tell_asserted(run: Run, report: Report, cells: dict[str, Cell]) -> None:
    on, off = cells["with"], cells["without"]
    run.table(
        "assertions: single-cell read-modify-write in memory, per second of the processor's time",
        ("", "median (least - most)", ""),
        [("python -O", off, ""), ("python", on, f"{on.of(off):.3f} of -O")],
    )
    report.ratio("with_assertions_vs_O", on.of(off), at_least=0.95)
    report.figures["txn_per_cpu_s_with_assertions"] = on.median
    report.figures["txn_per_cpu_s_without_assertions"] = off.median


def _draw(run: Run, report: Report) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def height(name: str) -> float:
        found = report.ratios[name]
        return found if isinstance(found, float) else 0.0  # void

    figure, axis = pyplot.subplots(figsize=(8.4, 3.8))
    one_step, two_phases, paper = "#2563eb", "#93b4f5", "#b0b7c3"
    bars = [  # where, how high, colour
        (0.0, PAPER_READ, paper),
        (0.8, height("read_vs_raw"), one_step),
        (2.4, PAPER_WRITE, paper),
        (3.2, height("two_phases_batching_off_vs_bare_lmdb_1"), two_phases),
        (4.0, height("write_batching_off_vs_bare_lmdb_1"), one_step),
        (5.6, height("two_phases_vs_bare_lmdb_128"), two_phases),
        (6.4, height("write_vs_bare_lmdb_128"), one_step),
    ]
    labels = {
        paper: "paper: Percolator of bare Bigtable, batching off",
        two_phases: "perco: writes in the paper's two phases",
        one_step: "perco: reads, and writes in one step",
    }
    for colour, label in labels.items():
        chosen = [(at, value) for at, value, of in bars if of == colour]
        drawn = axis.bar([at for at, _ in chosen], [value for _, value in chosen], 0.72, label=label, color=colour)
        axis.bar_label(drawn, [f"{value:.2f}" if value else "void" for _, value in chosen], padding=2)
    axis.set_xticks(
        [0.4, 3.2, 6.0],
        [
            "read of a cell\n(paper: of Bigtable,\nperco: of the row store)",
            "write, batching off\n(perco: of LMDB with one put\nper write transaction)",
            "write, batching on\n(of LMDB with 128 puts\nper write transaction)",
        ],
    )
    axis.set_ylim(0, 1.12 * max(1.0, *(value for _, value, _ in bars)))  # with room for the highest bar's figure
    axis.set_ylabel("relative rate")
    title = "What transactions cost (the paper's figure 8); perco's writes are durable, 128 in flight"
    axis.set_title(title, loc="left", fontsize=11)
    axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    run.figure(figure, "overhead")
    pyplot.close(figure)
