"""A new search index is filled from rows that are older, while observers run."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

import perco
from perco.webindex.batch import build, digest
from perco.webindex.exporter import Exporter
from perco.webindex.index import WebIndex
from perco.webindex.pages import Page
from perco.webindex.places import IN_FOLDER
from perco.webindex.search import Document, ExportRow, SearchIndex, SearchOptions
from perco.webindex.service import fill
from tests.acceptance.web.site import Site

URL = "https://site.invalid/a"
HOME = 7


def page(title: str) -> Page:
    return Page(URL, content_type="text/html", body=f"<title>{title}</title>".encode())


async def equal(db: perco.Database, index: WebIndex, search: SearchIndex) -> bool:
    async with db.snapshot() as snap:
        pages, ranks = await index.all_pages(snap)
    search.check()
    return search.digest() == digest(build(pages, ranks))


async def test_a_document_whose_page_is_back_before_the_next_election_is_exported() -> None:
    """When the search index is filled, the canonical page has left, and no other was elected. Then it is back, and the
    election changes nothing."""
    index = WebIndex(Exporter())
    with SearchIndex(":memory:") as former, SearchIndex(":memory:") as search:
        index.exporter.connect(former)
        async with perco.open("memory:", index.schema) as db:

            async def load(title: str) -> None:
                await db.run(index.load, page(title))
                async with db.transaction() as txn:
                    await index.on_page(txn, perco.Change(URL, None, 0, 1, 0))

            async with db.worker():
                await db.run(index.load, page("one"))
                await db.wait_idle()
            await load("other")
            index.exporter.connect(search)
            await fill(db, index, search, HOME)
            assert search.is_full(HOME)
            await load("one")
            async with db.worker():
                await db.wait_idle()
            assert await equal(db, index, search)
            assert search.count() == 1


@pytest.mark.parametrize("seed", range(4))
async def test_filled_while_pages_change_it_equals_a_batch_build(
    seed: int, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """One process exports, and another one fills the index."""
    site, index = Site(seed), WebIndex(Exporter())
    path, quick = tmp_path / "search.sqlite", SearchOptions(synchronous="OFF")
    with (
        SearchIndex(":memory:") as former,
        SearchIndex(path, quick) as search,
        SearchIndex(path, quick) as other,
    ):
        index.exporter.connect(former)
        async with perco.open("memory:", index.schema, options=perco.Options(seed=seed)) as db:

            async def change(times: int) -> None:
                for each in site.change(times):
                    if isinstance(each, Page):
                        await db.run(index.load, each)
                    elif isinstance(each, str):
                        await db.run(index.remove, each)

            async with db.worker(concurrency=8, scanners=2), trio.open_nursery() as nursery:
                await change(60)
                index.exporter.connect(search)
                nursery.start_soon(fill, db, index, other, HOME)
                await change(60)
            async with db.worker():
                await db.wait_idle()
            assert search.is_full(HOME)
            assert await equal(db, index, search)
            assert search.count() > 2


def exported(search: SearchIndex, title: str) -> None:
    search.export([ExportRow(title, 5, Document(f"https://site.invalid/{title}", title, "text"))])


def test_a_search_index_of_other_rows_begins_empty(tmp_path: Path) -> None:
    path = tmp_path / "search.sqlite"
    with SearchIndex(path) as search:
        exported(search, "former")
        search.begin(HOME, keep=False)
        assert search.count() == 0
        assert search.search("former") == []
        exported(search, "later")
        with SearchIndex(path) as other:
            other.begin(HOME, keep=False)  # a second process that fills it, too
            assert other.count() == 1
            other.mark_full(HOME + 1)
            assert not other.is_full(HOME + 1)
            other.mark_full(HOME)
        assert search.is_full(HOME)
        assert [hit.url for hit in search.search("later")] == ["https://site.invalid/later"]
        search.check()


def test_that_of_a_folder_with_its_rows_keeps_what_it_has(tmp_path: Path) -> None:
    with SearchIndex(tmp_path / "search.sqlite") as search:
        exported(search, "former")
        assert not search.is_full(IN_FOLDER)
        search.begin(IN_FOLDER, keep=True)
        assert search.count() == 1
        search.mark_full(IN_FOLDER)
        assert search.is_full(IN_FOLDER)
