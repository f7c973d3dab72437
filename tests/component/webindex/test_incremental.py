"""The incremental index equals the batch index, whatever happened on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings, strategies as st

import perco
from perco.webindex.batch import build, digest
from perco.webindex.exporter import Exporter
from perco.webindex.index import WebIndex
from perco.webindex.pages import Page
from perco.webindex.search import Document, ExportRow, SearchIndex, SearchIndexError

URLS = [f"https://site.invalid/{name}" for name in "abcdefgh"]

texts = st.text("lock primary snapshot <&>", max_size=20)
links = st.lists(st.tuples(st.sampled_from([*URLS, "mailto:x@y", "#top", "https://other.invalid/"]), texts), max_size=5)


def html(title: str, text: str, out: Sequence[tuple[str, str]]) -> bytes:
    anchors = "".join(f'<a href="{target}">{anchor}</a>' for target, anchor in out)
    return f"<html><title>{title}</title><p>{text}</p>{anchors}</html>".encode()


@st.composite
def a_page(draw: st.DrawFn) -> Page:
    url = draw(st.sampled_from(URLS))
    kind = draw(st.sampled_from(["page", "page", "page", "redirect", "error", "binary"]))
    if kind == "redirect":
        return Page(url, status=301, location=draw(st.sampled_from(URLS)))
    if kind == "error":
        return Page(url, status=500, content_type="text/html", body=html("error", "no", []))
    if kind == "binary":
        return Page(url, content_type="image/png", body=b"\x89PNG")
    return Page(url, content_type="text/html", body=html(draw(texts), draw(texts), draw(links)))


# A change is a page (added or replaced) or the URL of one that is deleted; a round is what happens at once.
rounds = st.lists(st.lists(a_page() | st.sampled_from(URLS), min_size=1, max_size=8), min_size=1, max_size=4)


async def play(path: Path, plan: list[list[Page | str]], anchors_max: int) -> None:
    exporter = Exporter()
    index = WebIndex(exporter, anchors_max=anchors_max)
    current: dict[str, Page] = {}
    with SearchIndex(path) as search:
        exporter.connect(search)
        async with perco.open("memory:", index.schema, options=perco.Options(seed=1)) as db:
            async with db.worker(concurrency=8, scanners=2):
                for changes in plan:
                    last: dict[str, Page | str] = {c if isinstance(c, str) else c.url: c for c in changes}
                    async with trio.open_nursery() as nursery:  # of one URL the last change counts
                        for url, change in last.items():
                            if isinstance(change, str):
                                current.pop(url, None)
                                nursery.start_soon(db.run, index.remove, url)
                            else:
                                current[url] = change
                                nursery.start_soon(db.run, index.load, change)
                await db.wait_idle()
            async with db.snapshot() as snap:
                documents = await index.documents(snap)
        wanted = build(current.values(), anchors_max=anchors_max)
        assert documents == wanted
        assert search.digest() == digest(wanted)
        search.check()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds, st.sampled_from([1, 3, 200]))
def test_after_any_adds_changes_and_deletes_it_equals_the_batch_index(
    tmp_path_factory: pytest.TempPathFactory, plan: list[list[Page | str]], anchors_max: int
) -> None:
    trio.run(play, tmp_path_factory.mktemp("index") / "search.sqlite", plan, anchors_max)


async def test_an_export_repeated_after_a_crash_leaves_neither_a_duplicate_nor_a_stale_row(tmp_path: Path) -> None:
    document = Document(URLS[0], "title", "text", ())
    with SearchIndex(tmp_path / "search.sqlite") as search:
        exporter = Exporter()
        exporter.connect(search)
        await exporter.put(ExportRow(URLS[0], 7, document))
        await exporter.put(ExportRow(URLS[0], 7, document))  # killed between SQLite's commit and the ack: again
        await exporter.put(ExportRow(URLS[0], 5, None))  # an older one that comes late
        assert search.count() == 1
        assert search.get(URLS[0]) == document


async def test_many_exports_share_a_transaction(tmp_path: Path) -> None:
    with SearchIndex(tmp_path / "search.sqlite") as search:
        exporter = Exporter()
        exporter.connect(search)
        async with trio.open_nursery() as nursery:
            for n in range(300):
                nursery.start_soon(exporter.put, ExportRow(f"https://site.invalid/{n}", 1, None))
        assert exporter.rows == 300
        assert exporter.transactions < 20


async def test_a_failed_export_reaches_everybody_who_waited_for_it_and_can_be_put_again(tmp_path: Path) -> None:
    class Broken(SearchIndex):
        fails = 1

        def export(self, rows: Sequence[ExportRow]) -> int:
            if self.fails:
                self.fails -= 1
                raise SearchIndexError("disk full")
            return super().export(rows)

    with Broken(tmp_path / "search.sqlite") as search:
        exporter = Exporter()
        exporter.connect(search)
        with pytest.raises(SearchIndexError):
            await exporter.put(ExportRow(URLS[0], 1, None))
        await exporter.put(ExportRow(URLS[0], 1, None))
        assert search.fails == 0
        assert search.version(URLS[0]) == 1


async def test_unchanged_pages_run_no_observer(tmp_path: Path) -> None:
    exporter = Exporter()
    index = WebIndex(exporter)
    page = Page(URLS[0], content_type="text/html", body=html("a", "b", []))
    with SearchIndex(tmp_path / "search.sqlite") as search:
        exporter.connect(search)
        async with perco.open("memory:", index.schema) as db, db.worker() as worker:
            assert await db.run(index.load, page)
            await db.wait_idle()
            before = worker.statistics()
            assert not await db.run(index.load, page)
            await db.wait_idle()
            assert worker.statistics() == before
