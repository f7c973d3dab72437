"""Cached functions run in threads: they do not hold up the store's loop, and several may run at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
import perco.aio
import perco.sync
from perco import views

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs

WAIT_S = 60.0  # for what a failure would keep from coming


class Sizes:
    """Documents, and the sizes of their texts; the function for these waits for other threads. `calls` counts."""

    def __init__(self, *, threads: int, meet: int) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT)
        self.body = self.docs.column("body", perco.TEXT)
        self.sizes = perco.Table("sizes", key=perco.TEXT)
        self.size = self.sizes.column("size", perco.INT64)
        self.views = views.Views(perco.Schema(self.docs, self.sizes))
        self.barrier = threading.Barrier(meet)
        self.calls: list[list[str]] = []

        @self.views.cached(id="measure", gives=perco.INT64, batch=1, threads=threads)
        def measure(texts: list[str]) -> list[int]:
            self.calls.append(texts)
            self.barrier.wait(WAIT_S)
            return [len(text) for text in texts]

        @self.views.each(self.body, id="size", into=self.sizes)
        def size(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
            yield views.Put(self.sizes, doc.key, {self.size: measure(doc[self.body] or "")})

    def meet(self) -> None:
        """Take part in the meeting for which a call waits."""
        self.barrier.wait(WAIT_S)


async def test_two_calls_run_at_a_time_and_the_loop_goes_on(tmp_path: Path) -> None:
    made = Sizes(threads=2, meet=3)  # two calls, and this test: it would fail if one call waited for the other
    async with perco.open(tmp_path / "s", made.views.schema) as db, db.worker():
        async with db.transaction() as txn:
            txn.set(made.body, "a", "one")
            txn.set(made.body, "b", "three")
        with trio.fail_after(WAIT_S):
            await trio.to_thread.run_sync(made.meet)
            await db.wait_idle()
        async with db.snapshot() as snap:
            assert {row.key: row[made.size] async for row in snap.scan(made.sizes)} == {"a": 3, "b": 5}
    assert sorted(made.calls) == [["one"], ["three"]]
    made.barrier = threading.Barrier(1)
    async with perco.open(tmp_path / "s", made.views.schema) as db, db.worker():  # the values are in the store
        async with db.transaction() as txn:
            txn.set(made.body, "c", "three")
        await db.wait_idle(timeout=WAIT_S)
        async with db.snapshot() as snap:
            assert await snap.get(made.size, "c") == 5
    assert len(made.calls) == 2


def test_blocking_code_has_cached_functions(tmp_path: Path) -> None:
    made = Sizes(threads=1, meet=2)
    with perco.sync.open(tmp_path / "s", made.views.schema) as db, db.worker():
        with db.transaction() as txn:
            txn.set(made.body, "a", "one")
        made.meet()
        db.wait_idle(timeout=WAIT_S)
        with db.snapshot() as snap:
            assert snap.get(made.size, "a") == 3
            assert views.check_blocking(made.views, snap).equal


def test_asyncio_has_cached_functions(tmp_path: Path) -> None:
    made = Sizes(threads=1, meet=2)

    async def main() -> None:
        async with perco.aio.open(tmp_path / "s", made.views.schema) as db, db.worker():
            async with db.transaction() as txn:
                txn.set(made.body, "a", "one")
            await asyncio.to_thread(made.meet)
            await db.wait_idle(timeout=WAIT_S)
            async with db.snapshot() as snap:
                assert await snap.get(made.size, "a") == 3

    asyncio.run(main())
