"""The cost of a call through each front: `perco` on trio, `perco.aio` on asyncio, `perco.sync` from threads.

A read is one `snap.get` of a short value. A transaction is `db.run` of a function that reads one cell and writes it;
each caller has a cell of its own. Callers are tasks, or threads, as many as are in flight. The fronts run in turn, in
this process, each over a folder of its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

import perco
import perco.aio
import perco.sync
from bench.harness import Cell, Report, Run, alternate

docs = perco.Table("docs", key=perco.INT64)
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)
FRONTS = ("perco", "perco.aio", "perco.sync")


async def bump(txn: Any, key: int) -> None:
    txn.set(n, key, (await txn.get(n, key) or 0) + 1)


def bump_blocking(txn: perco.sync.Transaction, key: int) -> None:
    txn.set(n, key, (txn.get(n, key) or 0) + 1)


# ------------------------------------------------------------------ the same work, three ways


async def reading(db: Any, number: int, count: int) -> None:
    async with db.snapshot() as snap:
        for _ in range(count):
            await snap.get(n, number)


async def writing(db: Any, number: int, count: int) -> None:
    for _ in range(count):
        await db.run(bump, number)


def reading_blocking(db: perco.sync.Database, number: int, count: int) -> None:
    with db.snapshot() as snap:
        for _ in range(count):
            snap.get(n, number)


def writing_blocking(db: perco.sync.Database, number: int, count: int) -> None:
    for _ in range(count):
        db.run(bump_blocking, number)


Work = Callable[[Any, int, int], Awaitable[None]]


def on_trio(url: str, work: Work, callers: int, count: int) -> float:
    async def main() -> float:
        async with perco.open(url, SCHEMA) as db:
            await work(db, 0, 50)
            began = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for number in range(callers):
                    nursery.start_soon(work, db, number, count)
            return time.perf_counter() - began

    return trio.run(main)


def on_asyncio(url: str, work: Work, callers: int, count: int) -> float:
    async def main() -> float:
        async with perco.aio.open(url, SCHEMA) as db:
            await work(db, 0, 50)
            began = time.perf_counter()
            await asyncio.gather(*(work(db, number, count) for number in range(callers)))
            return time.perf_counter() - began

    return asyncio.run(main())


def in_threads(url: str, work: Callable[[Any, int, int], None], callers: int, count: int) -> float:
    with perco.sync.open(url, SCHEMA) as db:
        work(db, 0, 50)
        threads = [threading.Thread(target=work, args=(db, number, count)) for number in range(callers)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began


def measured(run: Run, kind: str, callers: int, total: int) -> dict[str, Cell]:
    """Microseconds a call, or a transaction, for each front."""
    count = max(total // callers, 1)

    def over(front: str, folder: Path) -> float:
        url = str(folder / "store")
        if front == "perco":
            seconds = on_trio(url, reading if kind == "read" else writing, callers, count)
        elif front == "perco.aio":
            seconds = on_asyncio(url, reading if kind == "read" else writing, callers, count)
        else:
            seconds = in_threads(url, reading_blocking if kind == "read" else writing_blocking, callers, count)
        return seconds / (count * callers) * 1e6

    def side(front: str) -> Callable[[], float]:
        def once() -> float:
            with run.scratch() as folder:
                return over(front, folder)

        return once

    return alternate(run.rounds, {front: side(front) for front in FRONTS})


def main(run: Run) -> None:
    """Print the tables and the RESULT line."""
    facts = run.machine("power")
    report = Report(run.name, "power")
    rows = []
    cells = [("read", 1, 1500), ("read", 64, 8000), ("transaction", 1, 300), ("transaction", 64, 4000)]
    for kind, callers, total in cells if run.quick else [*cells, ("read", 512, 16000), ("transaction", 512, 8000)]:
        found = measured(run, kind, callers, total)
        rows.append((f"{kind}, {callers} in flight", *(str(found[front]) for front in FRONTS)))
        for front in FRONTS:
            report.figures[f"{front.replace('.', '_')}_{kind}_{callers}_us"] = found[front].median
    run.table("microseconds a call, over all callers (least - most)", ("", *FRONTS), rows)
    run.finish(report, facts)
