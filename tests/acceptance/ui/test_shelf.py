"""The store that the page holds open: for readers together, for an action alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

import perco
from perco.cli.ui.shelf import Shelf
from perco.errors import StoreError, Unavailable, UsageError
from tests.acceptance.ui import app


@asynccontextmanager
async def held(path: Path) -> AsyncIterator[Shelf]:
    async with trio.open_nursery() as nursery:
        shelf = Shelf(str(path))
        nursery.start_soon(shelf.run)
        yield shelf
        nursery.cancel_scope.cancel()


async def test_readers_share_a_store_and_an_action_ends_those_that_do_not_end(tmp_path: Path) -> None:
    async with perco.open(tmp_path / "s", app.schema) as db:
        await app.load(db)
    ended: list[str] = []

    async def read_for_long(shelf: Shelf, reads: trio.Event) -> None:
        try:
            async with shelf.reading():
                reads.set()
                await trio.sleep_forever()
        except Unavailable as error:
            ended.append(str(error))

    async with held(tmp_path / "s") as shelf, trio.open_nursery() as nursery:
        reads = trio.Event()
        nursery.start_soon(read_for_long, shelf, reads)
        await reads.wait()
        async with shelf.reading() as one, shelf.reading() as other:
            assert one is other
        async with shelf.writing() as db:
            await db.pause("index")
        assert len(ended) == 1
        async with shelf.reading() as again:
            assert again is not one
            assert await again.paused() == {"index"}


async def test_a_reader_that_is_cancelled_holds_nothing(tmp_path: Path) -> None:
    async with perco.open(tmp_path / "s", app.schema) as db:
        await app.load(db)
    async with held(tmp_path / "s") as shelf:
        for _ in range(20):
            with trio.move_on_after(0.001):
                async with shelf.reading():
                    await trio.sleep_forever()
        with trio.fail_after(30):
            async with shelf.writing() as db:
                assert not await db.paused()


async def test_a_store_that_cannot_be_opened_is_told_to_each(tmp_path: Path) -> None:
    async with held(tmp_path / "nothing") as shelf:
        for _ in range(2):
            with pytest.raises((UsageError, StoreError)):
                async with shelf.reading():
                    pass
        async with perco.open(tmp_path / "nothing", app.schema) as db:
            await app.load(db)
        async with shelf.reading() as db:
            assert len(await db.observers()) == 3
