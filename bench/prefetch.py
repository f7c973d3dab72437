"""How many row reads prefetching saves, and the cache alone (section 2.5 of the paper: together a factor of 10).

One client process against one `perco serve`, durable; all waiting messages share a frame in every run, and the code is
the same. The figure is the number of rows that the client asks the server for, to read some of their cells; scans are
counted separately, because nothing is read ahead for them. Three ways, one after the other:

    neither             every read of a cell is a read of its row
    cache               a transaction keeps the cells that it has read
    prefetch + cache    ... and a read also fetches the cells that past transactions read of the row later

over three kinds of documents (the first two after 64 of them, the web index from its first page on):

    the paper's document    50 reads over 6 rows of four tables, the same every time, and a write of each row
    of several kinds        the same rows, but which columns are read depends on the document: one in five is of another
                            kind, and the others skip each column, except the first, one time in ten
    the web index           everything that `perco.webindex` does to load and process a page, observers included

The web index was written to read whole rows at once, so there is less to save. `wasted`: the share of all cells sent
that were read ahead and not used by the end of the transaction. RESULT has it for each kind of document, and the
largest as `wasted`.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import trio

import perco
from bench import webindex
from bench.against.served import Server
from bench.harness import Cell, Report, Run, interleaved, percentile
from perco.database.inside import inside

SHAPE = {"pages": (1, 15), "sites": (1, 11), "clusters": (2, 6), "links": (2, 6)}  # rows, columns of a document
OPERATIONS = sum(rows * columns for rows, columns in SHAPE.values())
WARM, DOCUMENTS = 64, 400
IN_FLIGHT = 16
COUNTERS = ("reads", "sent", "predicted", "used", "wasted", "kept")
PAGES, QUICK_PAGES = 1_500, 500
SEED = 1

NEITHER, CACHE, BOTH = "neither", "cache", "prefetch + cache"
MODES = {
    NEITHER: perco.options.PrefetchOptions(cache=False, predict=False),
    CACHE: perco.options.PrefetchOptions(cache=True, predict=False),
    BOTH: perco.options.PrefetchOptions(cache=True, predict=True),
}

TABLES = {name: perco.Table(name, key=perco.Tuple(perco.INT64, perco.INT64)) for name in SHAPE}  # (document, row)
FIELDS = {
    name: [TABLES[name].column(f"f{i}", perco.INT64) for i in range(columns)] for name, (_, columns) in SHAPE.items()
}
SCHEMA = perco.Schema(*TABLES.values())

Read = tuple[str, int, int]  # table, row, column


@dataclass(slots=True)
class Found:
    """The cost of one way."""

    documents: int = 0
    rows: int = 0  # that were read
    pages: int = 0  # of scans
    seconds: float = 0.0
    times: list[float] = field(default_factory=list)  # of a document, or of a run of an observer
    counters: perco.PrefetchCounters = field(default_factory=perco.PrefetchCounters)
    by_function: dict[str, perco.PrefetchCounters] = field(default_factory=dict)

    @property
    def per_document(self) -> float:
        return self.rows / self.documents

    @property
    def wasted(self) -> float:
        """The share of the cells sent that were read ahead and not used."""
        return self.counters.wasted / self.counters.sent if self.counters.sent else 0.0

    @property
    def p50_ms(self) -> float:
        return 1000 * percentile(self.times, 0.5)

    @contextmanager
    def counting(self, db: perco.Database) -> Iterator[None]:
        """Count what the client asks the server for while the block runs; earlier counts are dropped."""
        self.rows = self.pages = 0
        self.seconds, self.counters = 0.0, perco.PrefetchCounters()
        before = inside(db).engine.prefetch.statistics()
        store: Any = inside(db).driver.store
        read, scan = store.read, store.scan

        async def counted(requests: Sequence[Any]) -> Any:
            self.rows += len(requests)
            return await read(requests)

        async def counted_scan(request: Any) -> Any:
            self.pages += 1
            return await scan(request)

        store.read, store.scan = counted, counted_scan
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - began
            del store.read, store.scan
            self.by_function = dict(inside(db).engine.prefetch.statistics())
            for name, each in self.by_function.items():
                self.by_function[name] = told = replace(each)
                if name in before:
                    for counter in COUNTERS:
                        setattr(told, counter, getattr(each, counter) - getattr(before[name], counter))
                self.counters.add(told)


def reads_of(number: int, *, kinds: bool) -> list[Read]:
    """The cells that a document reads, in order."""
    cells = [
        (name, row, column)
        for name, (rows, columns) in SHAPE.items()
        for row in range(rows)
        for column in range(columns)
    ]
    if not kinds:
        return cells
    rng = random.Random(number)
    if rng.random() < 0.2:
        return [cell for cell in reversed(cells) if cell[2] < 4]
    return [cell for cell in cells if cell[2] == 0 or rng.random() < 0.9]


async def process(txn: perco.Transaction, number: int, reads: Sequence[Read]) -> None:
    """Process a document: read it cell by cell, as code made of small functions does."""
    totals: Counter[tuple[str, int]] = Counter()
    for name, row, column in reads:
        totals[name, row] += await txn.get(FIELDS[name][column], (number, row)) or 0
    for (name, row), total in totals.items():
        txn.set(FIELDS[name][-1], (number, row), total % 1000)


async def process_kinds(txn: perco.Transaction, number: int, reads: Sequence[Read]) -> None:
    """The same under another name, because reads are remembered by function."""
    await process(txn, number, reads)


async def documents(
    url: Path, prefetch: perco.options.PrefetchOptions, *, kinds: bool, count: int = DOCUMENTS
) -> Found:
    """Process `count` documents, each once, several at a time."""
    found = Found(count)
    function = process_kinds if kinds else process

    async def client(db: perco.Database, left: Iterator[int]) -> None:
        for number in left:
            reads = reads_of(number, kinds=kinds)
            began = time.perf_counter()
            await db.run(function, number, reads)
            found.times.append(time.perf_counter() - began)

    async with perco.open(url, SCHEMA, options=perco.Options(prefetch=prefetch)) as db:
        for some in (range(count, count + WARM), range(count)):
            found.times.clear()
            with found.counting(db):
                left = iter(some)
                async with trio.open_nursery() as nursery:
                    for _ in range(IN_FLIGHT):
                        nursery.start_soon(client, db, left)
    return found


async def fill(url: Path, count: int = DOCUMENTS) -> None:
    """Write all cells of all documents."""
    async with perco.open(url, SCHEMA) as db:
        for number in range(count + WARM):
            async with db.transaction() as txn:
                for name, (rows, _) in SHAPE.items():
                    for row in range(rows):
                        for i, column in enumerate(FIELDS[name]):
                            txn.set(column, (number, row), i)


async def web(url: Path, file: Path, prefetch: perco.options.PrefetchOptions, pages: int) -> Found:
    """Build the web index, from its first page on, until all pages are searchable."""
    found = Found(pages)
    await webindex.build(
        url,
        file,
        pages,
        options=perco.Options(prefetch=prefetch),
        around=found.counting,
        ran=lambda id, key, seconds: found.times.append(seconds),
    )
    return found


def main(run: Run) -> None:
    """Print the tables and the RESULT line."""
    report = Report("prefetch", "power")
    facts = run.machine("power (fsync before every answer)")
    pages = QUICK_PAGES if run.quick else PAGES
    with run.scratch() as folder:
        kinds: dict[str, dict[str, list[Found]]] = {}
        with served(folder / "documents") as path:
            trio.run(fill, path)
            for name, several in (("the paper's document", False), ("of several kinds", True)):
                sides = {mode: partial(_run, partial(documents, path, MODES[mode], kinds=several)) for mode in MODES}
                kinds[name] = interleaved(run.rounds, sides)
        kinds["the web index"] = interleaved(
            run.rounds, {mode: partial(_one_web, folder, MODES[mode], pages) for mode in MODES}
        )
    _tell_all(run, report, kinds)
    _tell_observers(run, kinds["the web index"][BOTH][-1])
    run.finish(report, facts)


def _run(what: Callable[[], Any]) -> Found:
    found: Found = trio.run(what)
    return found


def _one_web(folder: Path, prefetch: perco.options.PrefetchOptions, pages: int) -> Found:
    name = f"web-{random.getrandbits(32):x}"
    with served(folder / name) as path:
        return _run(partial(web, path, folder / f"{name}.sqlite", prefetch, pages))


@contextmanager
def served(path: Path) -> Iterator[Path]:
    """A new store, in a process of its own."""
    server = Server(path, "power")
    try:
        yield path
    finally:
        server.send_signal(15)


def _tell_all(run: Run, report: Report, kinds: dict[str, dict[str, list[Found]]]) -> None:
    for name, found in kinds.items():
        _tell(run, report, name, found)
    report.ratio("wasted", max(_wasted(found) for found in kinds.values()))


def _wasted(found: dict[str, list[Found]]) -> float:
    """The share of the cells sent with prefetching that were read ahead and not used."""
    return median(each.wasted for each in found[BOTH])


def _tell(run: Run, report: Report, name: str, found: dict[str, list[Found]]) -> None:
    rows = []
    for mode, rounds in found.items():
        per_document = Cell(tuple(each.per_document for each in rounds))
        sent = median(each.counters.sent / each.documents for each in rounds)
        rows.append(
            (
                mode,
                per_document,
                f"{median(each.pages / each.documents for each in rounds):.2f}",
                f"{sent:.1f}" if sent else "-",
                f"{100 * median(each.wasted for each in rounds):.1f}" if sent else "-",
                f"{median(each.p50_ms for each in rounds):.2f}",
                f"{median(each.documents / each.seconds for each in rounds):.0f}",
            )
        )
    run.table(
        f"{name}, a document" + (": p50 is that of a run of an observer" if name == "the web index" else ""),
        ("", "row reads (least - most)", "scans", "cells sent", "wasted %", "p50 ms", "documents/s"),
        rows,
    )
    key = {"the paper's document": "paper_document", "of several kinds": "several_kinds"}.get(name, "webindex")
    reads = [Cell(tuple(each.per_document for each in found[mode])) for mode in (NEITHER, CACHE, BOTH)]
    bar = {"paper_document": 8.0, "webindex": 3.0}.get(key)
    report.ratio(f"fewer_row_reads_{key}", reads[0].of(reads[2]), at_least=bar)
    report.ratio(f"fewer_row_reads_{key}_cache_alone", reads[0].of(reads[1]))
    wasted = _wasted(found)
    report.ratio(f"wasted_{key}", wasted)
    report.bars.append((f"wasted, of the cells sent: {name}", wasted, "at most", 0.2))
    slower = Cell(tuple(each.p50_ms for each in found[BOTH])).of(Cell(tuple(each.p50_ms for each in found[NEITHER])))
    report.ratio(f"p50_vs_neither_{key}", slower)
    report.bars.append((f"p50 over that without: {name}", slower, "at most", 1.0))
    for mode, each_round in found.items():
        report.figures[f"row_reads_{key}_{mode}"] = median(each.per_document for each in each_round)
        report.figures[f"p50_ms_{key}_{mode}"] = median(each.p50_ms for each in each_round)


def _tell_observers(run: Run, found: Found) -> None:
    rows = [
        (
            id,
            *(f"{getattr(told, name) / found.documents:.2f}" for name in COUNTERS),
        )
        for id, told in sorted(found.by_function.items(), key=lambda each: -each[1].reads)
    ]
    run.table(
        "the web index with prefetch + cache, of a page",
        ("by observer and function", "row reads", "cells sent", "predicted", "used", "wasted", "kept"),
        rows,
    )
