"""The cost of a page in the web index: pages per second and CPU per page, while the index grows.

The web is synthetic, made from a seed, with links and copies like the real one (`perco/webindex/synthetic.py`). A step
loads 50 pages, made beforehand, with 48 loaders, and lasts until all 50 are searchable; all observers and the export
into SQLite run. CPU time is that of the whole process, with all its threads. Each size is a web of its own, so that its
last page is linked to and copied as much as its first. A shared machine is slower at times, in CPU time too. So a fixed
piece of work is timed before and after each step, and the step is reported at the fastest speed that was measured.

An index whose cost grows with its size would not be incremental: the bar is that the cost of a page stays flat.

Last, what one more clustering key costs: the same pages, with a second table of clusters, by title.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

import msgpack
import trio

import perco
from bench.harness import Cell, Report, Run
from perco.webindex.exporter import Exporter
from perco.webindex.index import WebIndex
from perco.webindex.pages import Page
from perco.webindex.places import search_path
from perco.webindex.rank import rank_all
from perco.webindex.search import SearchIndex
from perco.webindex.synthetic import SyntheticWeb

SIZES, QUICK_SIZES = (1_000, 10_000, 100_000), (1_000, 3_000)
STEP = 50  # pages loaded at once: few, so that a small web does not collapse a larger share than a large one
DRAWN_STEPS = 10  # drawn as one point
KEY_PAGES, QUICK_KEY_PAGES = 1_000, 300
LOADERS = 48
SEED = 1
YARD_S = 0.005  # CPU time of the yardstick: builds that run one after the other are compared at this speed
PAGES_PER_S_LEAST = 300.0  # with the largest web
FLAT_MOST = 1.3  # the largest web's CPU per page over the smallest's


class TwoKeys(WebIndex):
    """The index with one more clustering key: the title. The figures of `docs/web-index.md`, line by line."""

    def __init__(self, exporter: Exporter | None = None) -> None:
        super().__init__(exporter)
        self.titled = perco.Table("titled", key=perco.Tuple(perco.BYTES, perco.TEXT))  # (hash of the title, URL)
        self.titled_url = self.titled.column("url", perco.TEXT)
        self.titles = perco.Table("titles", key=perco.BYTES)
        self.first = self.titles.column("first", perco.TEXT)
        self.titles_changed = self.titles.signal("changed")
        self.schema = perco.Schema(*self.schema.tables.values(), self.titled, self.titles)
        self._observe()
        self.schema.observe(self.titles_changed, id="elect by title")(self.on_title)

    async def on_page(self, txn: perco.Transaction, change: perco.Change[str, Any]) -> None:
        url = change.key
        before = await txn.get(self.parsed, url)
        await super().on_page(txn, change)
        after = await txn.get(self.parsed, url)
        old, new = (None if said is None else hashlib.sha256(said[0].encode()).digest() for said in (before, after))
        if old != new:
            if old is not None:
                txn.delete(self.titled_url, (old, url))
                txn.signal(self.titles_changed, old)
            if new is not None:
                txn.set(self.titled_url, (new, url), url)
                txn.signal(self.titles_changed, new)

    async def on_title(self, txn: perco.Transaction, change: perco.Change[bytes, Any]) -> None:
        rows = await txn.scan(self.titled, prefix=(change.key,), columns=[self.titled_url], limit=1).all()
        if rows:
            txn.set(self.first, change.key, rows[0].key[1])
        else:
            txn.delete(self.first, change.key)


class Loads(Protocol):
    """An object that stores pages: a web index, or the module `on_views`."""

    @property
    def load(self) -> Callable[[perco.Transaction, Page], Awaitable[bool]]: ...


@dataclass(slots=True)
class Step:
    """Some more pages, and what they cost."""

    pages: int
    wall_s: float
    cpu_s: float
    yard_s: float = 0.0
    """CPU time of the yardstick, before and after: the mean."""

    def scaled(self, yard_s: float) -> Step:
        """The step as on a machine on which the yardstick takes `yard_s`."""
        return Step(self.pages, self.wall_s, self.cpu_s * yard_s / self.yard_s, yard_s)


def yardstick() -> float:
    """CPU seconds of a fixed piece of work: small objects, bytes, dicts, as in the index."""
    began = time.process_time()
    cells: dict[bytes, tuple[int, bytes]] = {}
    for i in range(4_000):
        key = b"row %d" % (i * 7919 % 4_001)
        cells[key] = i, msgpack.packb((i, key, "word"))
    assert sum(len(msgpack.unpackb(cells[key][1])) for key in sorted(cells)) == 3 * len(cells)
    return time.process_time() - began


def _sum(steps: Sequence[Step]) -> Step:
    pages, wall_s, cpu_s, yard_s = (
        sum(getattr(step, name) for step in steps) for name in ("pages", "wall_s", "cpu_s", "yard_s")
    )
    return Step(int(pages), wall_s, cpu_s, yard_s / len(steps))


@dataclass(slots=True)
class Built:
    """The cost of building one web."""

    steps: list[Step] = field(default_factory=list)
    observers: dict[str, perco.ObserverCounters] = field(default_factory=dict)
    documents: int = 0
    rank_cpu_s: float = 0.0
    ranked: int = 0

    @property
    def pages(self) -> int:
        return sum(step.pages for step in self.steps)

    @property
    def cpu_ms(self) -> float:
        """CPU time of a page."""
        return 1000 * sum(step.cpu_s for step in self.steps) / self.pages

    @property
    def pages_per_s(self) -> float:
        return self.pages / sum(step.wall_s for step in self.steps)

    def last(self, pages: int) -> Step:
        """The last `pages` pages, in whole steps."""
        some: list[Step] = []
        for step in reversed(self.steps):
            if sum(each.pages for each in some) >= pages:
                break
            some.append(step)
        return _sum(some)

    def total(self, counter: str) -> int:
        return sum(getattr(counters, counter) for counters in self.observers.values())


async def build(
    store: Path | str,
    file: Path,
    pages: int,
    *,
    make: Callable[[Exporter], WebIndex] = WebIndex,
    step: int = STEP,
    seed: int = SEED,
    rank: bool = False,
    told: Callable[[Built], None] = lambda _: None,
    options: perco.Options | None = None,
    around: Callable[[perco.Database], AbstractContextManager[object]] = nullcontext,
    ran: Callable[[str, Any, float], None] = lambda id, key, seconds: None,
) -> Built:
    """Build the index of a web of `pages` pages. `file`: the search index; `told`: called after each step; `around`: a
    context manager around the whole build; `ran`: called after each run of an observer."""
    exporter, built = Exporter(), Built()
    index = make(exporter)
    web = iter(SyntheticWeb(pages, seed))
    with ExitStack() as within:
        search = within.enter_context(SearchIndex(file))
        exporter.connect(search)
        async with (
            perco.open(store, index.schema, options=options) as db,
            db.worker(concurrency=64, scanners=4) as worker,
        ):
            worker.on_run(ran)
            within.enter_context(around(db))
            while some := list(islice(web, step)):
                yard_s = yardstick()
                began, cpu = time.perf_counter(), time.process_time()
                await load(db, index, some)
                await db.wait_idle()
                wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
                built.steps.append(Step(len(some), wall_s, cpu_s, (yard_s + yardstick()) / 2))
                told(built)
            built.observers = worker.statistics()
            if rank:
                cpu = time.process_time()
                built.ranked = (await rank_all(db, index)).changed
                await db.wait_idle()
                built.rank_cpu_s = time.process_time() - cpu
        built.documents = search.count()
    return built


async def load(db: perco.Database, index: Loads, pages: Sequence[Page]) -> None:
    """Load all pages, many at a time."""
    left: Iterator[Page] = iter(pages)

    async def loader() -> None:
        for page in left:
            await db.run(index.load, page)

    async with trio.open_nursery() as nursery:
        for _ in range(LOADERS):
            nursery.start_soon(loader)


# ------------------------------------------------------------------ the benchmark


def main(run: Run) -> None:
    """Prints the tables and the RESULT line, and draws the figure."""
    report = Report("webindex", "power")
    facts = run.machine("power (fsync before every answer)")
    sizes = QUICK_SIZES if run.quick else SIZES
    with run.scratch() as folder:
        webs = [_web(run, folder, pages) for pages in sizes]
        fastest = min(step.yard_s for web in webs for step in web.steps)
        for web in webs:
            web.steps = [step.scaled(fastest) for step in web.steps]
        keys = _keys(run, folder)
    _tell(run, report, webs)
    _tell_keys(run, report, keys)
    _draw(run, webs)
    run.finish(report, facts)


def _web(run: Run, folder: Path, pages: int) -> Built:
    def told(built: Built) -> None:
        if built.pages % max(pages // 10, 1000) == 0:
            last = built.last(1000)
            run.say(
                f"{built.pages:>7,} of {pages:,} pages: {last.pages / last.wall_s:.0f} pages/s, "
                f"{1000 * last.cpu_s / last.pages:.2f} ms CPU a page"
            )

    async def one() -> Built:
        store = folder / f"web-{pages}"
        return await build(store, search_path(folder / f"search-{pages}"), pages, rank=True, told=told)

    (folder / f"search-{pages}").mkdir()
    return trio.run(one)


def _keys(run: Run, folder: Path) -> dict[str, Cell]:
    """CPU per page without and with one more clustering key, in turn."""
    pages, found = QUICK_KEY_PAGES if run.quick else KEY_PAGES, {"one key": [], "two keys": []}  # type: ignore[var-annotated]
    for i in range(run.rounds):
        sides: list[tuple[str, Callable[[Exporter], WebIndex]]] = [("one key", WebIndex), ("two keys", TwoKeys)]
        for name, make in sides if i % 2 == 0 else reversed(sides):
            at = folder / f"{name}-{i}"

            async def one(at: Path = at, make: Callable[[Exporter], WebIndex] = make) -> Built:
                return await build(at, at.with_suffix(".sqlite"), pages, make=make)

            built = trio.run(one)
            found[name].append(_sum([each.scaled(YARD_S) for each in built.steps]).cpu_s * 1000 / built.pages)
    return {name: Cell(tuple(values)) for name, values in found.items()}


def _tell(run: Run, report: Report, webs: Sequence[Built]) -> None:
    run.table(
        "durable, all observers, until searchable",
        ("pages", "documents", "pages/s", "CPU ms a page", "runs a page", "collapsed", "conflicts", "ranked: CPU ms"),
        [
            (
                f"{web.pages:,}",
                f"{web.documents:,}",
                f"{web.pages_per_s:.0f}",
                f"{web.cpu_ms:.2f}",
                f"{web.total('commits') / web.pages:.1f}",
                f"{web.total('collapsed'):,}",
                f"{web.total('conflicts'):,}",
                f"{1000 * web.rank_cpu_s / web.pages:.2f}",
            )
            for web in webs
        ],
    )
    for web in webs:
        report.figures[f"pages_per_s_{web.pages}"] = web.pages_per_s
        report.figures[f"cpu_ms_per_page_{web.pages}"] = web.cpu_ms
        report.figures[f"conflicts_{web.pages}"] = web.total("conflicts")
        report.figures[f"collapsed_{web.pages}"] = web.total("collapsed")
        report.figures[f"rank_cpu_ms_per_page_{web.pages}"] = 1000 * web.rank_cpu_s / web.pages
    largest = webs[-1]
    run.table(
        f"observers at {largest.pages:,} pages, of a page",
        ("", "runs committed", "collapsed", "conflicts"),
        [
            (id, *(f"{getattr(counters, name) / largest.pages:.2f}" for name in ("commits", "collapsed", "conflicts")))
            for id, counters in largest.observers.items()
        ],
    )
    report.figure("pages_per_s_largest", largest.pages_per_s, at_least=PAGES_PER_S_LEAST)
    flat = largest.cpu_ms / webs[0].cpu_ms
    report.ratios["cpu_per_page_largest_vs_smallest"] = round(flat, 3)
    report.bars.append(("CPU of a page, the largest web's over the smallest's", flat, "at most", FLAT_MOST))


def _tell_keys(run: Run, report: Report, keys: dict[str, Cell]) -> None:
    run.table("one more clustering key, CPU ms a page", ("", "median (least - most)"), list(keys.items()))
    report.ratios["two_keys_vs_one"] = round(keys["two keys"].of(keys["one key"]), 3)
    report.figures["one_more_key_cpu_ms"] = keys["two keys"].median - keys["one key"].median


def _draw(run: Run, webs: Sequence[Built]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.6))
    for web, color in zip(webs, ("#94a3b8", "#2563eb", "#dc2626"), strict=False):
        steps = [_sum(web.steps[i : i + DRAWN_STEPS]) for i in range(0, len(web.steps), DRAWN_STEPS)]
        at = list(accumulate(step.pages for step in steps))
        costs = [1000 * step.cpu_s / step.pages for step in steps]
        axis.plot(at, costs, ".-" if len(at) < 20 else "-", color=color, linewidth=1.2, label=f"a web of {web.pages:,}")
        axis.plot([web.pages], [web.cpu_ms], "D", color=color, label=f"all of it: {web.cpu_ms:.2f}")
    axis.set_xscale("log")
    axis.set_xticks([n * 10**e for e in (2, 3, 4) for n in (1, 2, 5)] + [100_000])
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.xaxis.set_minor_formatter("")
    axis.set_xlim(webs[0].steps[0].pages * DRAWN_STEPS / 1.3, webs[-1].pages * 1.3)
    axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    axis.set_xlabel("pages in the index")
    axis.set_ylabel("CPU ms a page")
    axis.set_title("What five hundred pages more cost, durable, until searchable", loc="left")
    axis.legend(frameon=False, fontsize=8, ncols=len(webs), loc="lower left")
    axis.spines[["top", "right"]].set_visible(False)
    run.figure(figure, "webindex")
    pyplot.close(figure)
