"""The cost of views: a change in a large group, and the web index on views beside the one with observers by hand.

The groups: a view keeps the count, the sum and the ten largest values of each group. One group has a million members
(--quick: 100 000), others have ten. Members of both kinds change in turn, one at a time: the time is that from the
commit of the change until the group's row is up to date. If a group's cost grew with its members, it would not be
incremental. A Spark job makes the groups beforehand, as one would with a million members; observers go on from there.

The web index: the same pages as in `bench webindex`, fifty at a time, until all of them are searchable, by
`perco/webindex/on_views.py` and by `perco/webindex/index.py` in turn. Both indexes must equal the batch build. CPU time
is that of the whole process, at the speed of a yardstick that is timed around each step.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import trio

import perco
from bench import webindex
from bench.harness import Cell, Report, Run
from bench.spark_load import session
from bench.webindex import STEP, Built, Step, yardstick
from perco import views
from perco.webindex import batch, on_views
from perco.webindex.exporter import Exporter
from perco.webindex.index import WebIndex
from perco.webindex.places import search_path
from perco.webindex.search import SearchIndex
from perco.webindex.synthetic import SyntheticWeb

MEMBERS, QUICK_MEMBERS = 1_000_000, 100_000
SMALL, SMALL_GROUPS = 10, 20
CHANGES = 60  # a round, of each kind
PAGES, QUICK_PAGES = 1_000, 500
SEED = 1
LARGE_MOST, BY_HAND_MOST = 1.5, 1.3

STAGES = {  # of the index on views, beside the observers that do the same by hand
    "parse": (("parse: contents",), ("parse", "parse again")),
    "gather, place": (("place",), ("gather", "rank")),
    "frames": (("show: shown", "show: again", "show: keys"), ("reprocess",)),
    "elect": (("elect",), ("elect",)),
    "export": (("export",), ("export",)),
}


class Groups:
    """Numbers in groups, and what a view keeps of each group."""

    def __init__(self) -> None:
        self.numbers = perco.Table("numbers", key=perco.Tuple(perco.TEXT, perco.INT64))
        self.n = n = self.numbers.column("n", perco.INT64)
        groups = perco.Table("groups", key=perco.TEXT)
        self.kept = kept = groups.column("kept", perco.JSON)
        self.views = views.Views(perco.Schema(self.numbers, groups))

        @self.views.group(
            n, id="keep", by=views.prefix(1), into=groups, keep=[views.count(), views.sum(n), views.largest(n, 10)]
        )
        def keep(group: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
            top = [value for _, value in rows.largest(n, 10)]
            yield views.Put(groups, group, {kept: [rows.count(), rows.sum(n), *top]})


GROUPS = Groups()
VIEWS = GROUPS.views


def main(run: Run) -> None:
    """Prints the tables and the RESULT line."""
    report = Report("views", "power")
    facts = run.machine("power (fsync before every answer)")
    members = QUICK_MEMBERS if run.quick else MEMBERS
    with run.scratch() as folder:
        _built(run, folder, members)
        trio.run(_groups, run, report, folder, members)
        _web(run, report, folder)
    run.finish(report, facts)


# ------------------------------------------------------------------ groups


def _built(run: Run, folder: Path, members: int) -> None:
    """Load the members in bulk; a Spark job makes the groups, and what the view has to remember of each member."""
    from perco.spark import build

    sizes = {"large": members, **{f"small {number}": SMALL for number in range(SMALL_GROUPS)}}
    rows = [((group, i), {GROUPS.n: i % 1000}) for group in sorted(sizes) for i in range(sizes[group])]

    async def load() -> None:
        async with perco.open(folder / "groups", perco.Schema(*GROUPS.views.schema.tables.values())) as db:
            await db.bulk_load({GROUPS.numbers: rows})

    began = time.perf_counter()
    trio.run(load)
    loaded = time.perf_counter()
    with session("local[2]") as spark:
        build("bench.views:VIEWS", spark, folder / "groups")
    run.say(
        f"{len(rows):,} members loaded in bulk in {loaded - began:.0f} s, and grouped by a Spark job in "
        f"{time.perf_counter() - loaded:.0f} s"
    )


async def _groups(run: Run, report: Report, folder: Path, members: int) -> None:
    made = GROUPS
    async with perco.open(folder / "groups", made.views.schema) as db, db.worker():
        await db.wait_idle()
        ms: dict[str, list[float]] = {"large": [], "small": []}
        for turn in range(run.rounds):
            took: dict[str, list[float]] = {"large": [], "small": []}
            for i in range(CHANGES):
                number = turn * CHANGES + i
                for kind, key in (
                    ("large", ("large", (number * 7919) % members)),
                    ("small", (f"small {number % SMALL_GROUPS}", number % SMALL)),
                ):
                    begin = time.perf_counter()
                    await db.run(_write, made.n, {key: 1000 + number})
                    await db.wait_idle()
                    took[kind].append(1000 * (time.perf_counter() - begin))
            for kind, values in took.items():
                ms[kind].append(statistics.median(values))
        async with db.snapshot() as snap:
            for group in ("large", "small 0"):
                there = [row[made.n] or 0 async for row in snap.scan(made.numbers, prefix=(group,), columns=[made.n])]
                kept = await snap.get(made.kept, group)
                assert kept == [len(there), sum(there), *sorted(there)[:-11:-1]], f"the group {group!r} is wrong"
    large, small = (Cell(tuple(ms[kind])) for kind in ("large", "small"))
    run.table(
        "one change of a member at a time, durable, until the group's row is up to date",
        ("members of the group", "p50 ms (least - most)"),
        [(f"{SMALL}", small), (f"{members:,}", large)],
    )
    ratio = large.of(small)
    report.ratio("large_group_vs_small", ratio)
    report.bars.append(("large_group_vs_small", ratio, "at most", LARGE_MOST))
    report.figures.update({"large_group_ms": large.median, "small_group_ms": small.median, "members": members})


async def _write(txn: perco.Transaction, column: perco.Column[Any, int], values: dict[Any, int]) -> None:
    for key, value in values.items():
        txn.set(column, key, value)


# ------------------------------------------------------------------ the web index


def _web(run: Run, report: Report, folder: Path) -> None:
    pages = QUICK_PAGES if run.quick else PAGES
    wanted = batch.digest(batch.build(SyntheticWeb(pages, SEED)))
    sides: list[tuple[str, Callable[[Path, int, Counter[str]], Built]]] = [("by hand", _by_hand), ("views", _by_views)]
    built: dict[str, list[Built]] = {name: [] for name, _ in sides}
    spent: dict[str, Counter[str]] = {name: Counter() for name, _ in sides}
    for turn in range(run.rounds):
        for name, make in sides if turn % 2 == 0 else reversed(sides):
            at = folder / f"{name}-{turn}"
            at.mkdir()
            built[name].append(make(at, pages, spent[name]))
            with SearchIndex(search_path(at)) as search:
                assert search.digest() == wanted, f"the index {name} is not that of the batch build"
    fastest = min(step.yard_s for each in built.values() for found in each for step in found.steps)
    cpu = {name: Cell(tuple(_cpu_ms(found, fastest) for found in each)) for name, each in built.items()}
    run.table(
        f"the web index of {pages:,} pages, durable, until searchable; equal to the batch build",
        ("", "CPU ms a page (least - most)", "runs a page", "conflicts"),
        [(name, cpu[name], _total(built[name], "commits", pages), _total(built[name], "conflicts", 1)) for name in cpu],
    )
    run.table(
        "its stages: committed runs a page, and ms a page from their beginning to their commit, many at a time",
        ("", "views: runs", "ms", "by hand: runs", "ms"),
        [
            (
                stage,
                *_stage(built["views"], spent["views"], mine, pages),
                *_stage(built["by hand"], spent["by hand"], theirs, pages),
            )
            for stage, (mine, theirs) in STAGES.items()
        ],
    )
    ratio = cpu["views"].of(cpu["by hand"])
    report.ratio("webindex_views_vs_by_hand", ratio)
    report.bars.append(("webindex_views_vs_by_hand", ratio, "at most", BY_HAND_MOST))
    report.figures.update(
        {"views_cpu_ms_per_page": cpu["views"].median, "by_hand_cpu_ms_per_page": cpu["by hand"].median}
    )


def _cpu_ms(built: Built, yard_s: float) -> float:
    return 1000 * sum(step.scaled(yard_s).cpu_s for step in built.steps) / built.pages


def _total(built: list[Built], counter: str, over: int) -> str:
    return f"{statistics.median(each.total(counter) for each in built) / over:.1f}"


def _stage(built: list[Built], spent: Counter[str], ids: tuple[str, ...], pages: int) -> tuple[str, str]:
    runs = statistics.median(sum(each.observers[id].commits for id in ids) for each in built) / pages
    return f"{runs:.2f}", f"{1000 * sum(spent[id] for id in ids) / len(built) / pages:.2f}"


def _by_hand(at: Path, pages: int, spent: Counter[str]) -> Built:
    def make(exporter: Exporter) -> WebIndex:
        return WebIndex(exporter)

    async def one() -> Built:
        ran = partial(_note, spent)
        return await webindex.build(at / "store", search_path(at), pages, make=make, seed=SEED, ran=ran)

    return trio.run(one)


def _by_views(at: Path, pages: int, spent: Counter[str]) -> Built:
    return trio.run(build_views, at / "store", search_path(at), pages, spent)


def _note(spent: Counter[str], id: str, key: object, seconds: float) -> None:
    spent[id] += seconds  # type: ignore[assignment]


async def build_views(store: Path | str, file: Path, pages: int, spent: Counter[str]) -> Built:
    """As `webindex.build`, with views."""
    built, web = Built(), iter(SyntheticWeb(pages, SEED))
    with SearchIndex(file) as search:
        index = on_views.web_views(search)
        async with perco.open(store, index.schema) as db, db.worker(concurrency=64, scanners=4) as worker:
            worker.on_run(partial(_note, spent))
            while some := list(islice(web, STEP)):
                yard_s = yardstick()
                began, cpu = time.perf_counter(), time.process_time()
                await webindex.load(db, on_views, some)
                await db.wait_idle()
                wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
                built.steps.append(Step(len(some), wall_s, cpu_s, (yard_s + yardstick()) / 2))
            built.observers = worker.statistics()
        built.documents = search.count()
    return built
