"""The incremental index equals the batch index, whatever happened on the way, down to the rows of the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings, strategies as st

import perco
from perco.webindex.batch import DEFAULT_RANK, build, digest
from perco.webindex.exporter import Exporter
from perco.webindex.index import WebIndex
from perco.webindex.pages import Page
from perco.webindex.search import Document, ExportRow, SearchIndex, SearchIndexError

URLS = [f"https://site.invalid/{name}" for name in "abcdefg"]
URLS.append("https://site.invalid/" + "h" * 300)  # two of these would not fit into a row key

texts = st.text("lock primary snapshot <&>", max_size=20)
links = st.lists(st.tuples(st.sampled_from([*URLS, "mailto:x@y", "#top", "https://other.invalid/"]), texts), max_size=5)
frames = st.lists(st.sampled_from([*URLS, "https://other.invalid/frame"]), max_size=2)


def html(title: str, text: str, out: Sequence[tuple[str, str]], inside: Sequence[str] = ()) -> bytes:
    anchors = "".join(f'<a href="{target}">{anchor}</a>' for target, anchor in out)
    shown = "".join(f'<iframe src="{url}"></iframe>' for url in inside)
    return f"<html><title>{title}</title><p>{text}</p>{anchors}{shown}</html>".encode()


@st.composite
def a_page(draw: st.DrawFn) -> Page:
    url = draw(st.sampled_from(URLS))
    kind = draw(st.sampled_from(["page", "copy", "copy", "framed", "redirect", "error", "binary"]))
    if kind == "redirect":
        return Page(url, status=301, location=draw(st.sampled_from(URLS)))
    if kind == "error":
        return Page(url, status=500, content_type="text/html", body=html("error", "no", []))
    if kind == "binary":
        return Page(url, content_type="image/png", body=b"\x89PNG")
    if kind == "copy":  # says what others say, and links elsewhere
        body = html(draw(st.sampled_from(["one", "two"])), "", [(target, "") for target, _ in draw(links)])
        return Page(url, content_type="text/html", body=body)
    if kind == "framed":
        body = html("framed", draw(st.sampled_from(["", "one"])), draw(links), draw(frames))
        return Page(url, content_type="text/html", body=body)
    return Page(url, content_type="text/html", body=html(draw(texts), draw(texts), draw(links)))


@dataclass(frozen=True)
class Ranked:
    """Somebody writes the rank of a page."""

    url: str
    rank: float


ranks = st.builds(Ranked, st.sampled_from(URLS), st.sampled_from([0.0, 0.5, 1.0, 2.0, 1e-9, float("inf")]))
# A change is a page (added or replaced), the URL of one that is deleted, or a rank; a round is what happens at once.
rounds = st.lists(st.lists(a_page() | st.sampled_from(URLS) | ranks, min_size=1, max_size=8), min_size=1, max_size=4)
Change = Page | str | Ranked


async def rank(txn: perco.Transaction, index: WebIndex, change: Ranked) -> None:
    if await txn.get(index.contents, change.url) is not None:
        txn.set(index.rank, change.url, change.rank)


class Model:
    """The pages and ranks that count."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.ranks: dict[str, float] = {}

    def apply(self, change: Change) -> None:
        if isinstance(change, str):
            self.pages.pop(change, None)
            self.ranks.pop(change, None)
        elif isinstance(change, Page):
            self.pages[change.url] = change
            self.ranks.setdefault(change.url, DEFAULT_RANK)
        elif change.url in self.pages:
            self.ranks[change.url] = change.rank


async def rows_of(db: perco.Database, index: WebIndex) -> dict[str, list[tuple[Any, dict[str, Any]]]]:
    """All that can be read of a store."""
    found = {}
    async with db.snapshot() as snap:
        for table in (index.pages, index.docs, index.links, index.uses, index.members, index.dups):
            found[table.name] = [(row.key, row.values()) async for row in snap.scan(table)]
    return found


async def play(
    path: Path, plan: Sequence[Sequence[Change]], *, side_by_side: bool, **limits: int
) -> tuple[Model, dict[str, list[tuple[Any, dict[str, Any]]]]]:
    """Make the changes, those of a round at once; then hold the index against the batch index, and give its rows."""
    exporter = Exporter()
    index, model = WebIndex(exporter, **limits), Model()
    with SearchIndex(path) as search:
        exporter.connect(search)
        async with perco.open("memory:", index.schema, options=perco.Options(seed=1)) as db:
            async with db.worker(concurrency=8, scanners=2):
                for changes in plan:
                    async with trio.open_nursery() as nursery:
                        # Changes to one page keep their order.
                        by_url: dict[str, list[Change]] = {}
                        for change in changes:
                            model.apply(change)
                            by_url.setdefault(change if isinstance(change, str) else change.url, []).append(change)
                        for ordered in by_url.values():
                            nursery.start_soon(_apply, db, index, ordered)
                    if not side_by_side:
                        await db.wait_idle()
                await db.wait_idle()
            async with db.snapshot() as snap:
                documents = await index.documents(snap)
            rows = await rows_of(db, index)
        wanted = build(
            model.pages.values(),
            model.ranks,
            anchors_max=index.anchors_max,
            duplicates_max=index.duplicates_max,
        )
        assert documents == wanted
        assert search.digest() == digest(wanted)
        search.check()
    return model, rows


async def _apply(db: perco.Database, index: WebIndex, changes: Sequence[Change]) -> None:
    for change in changes:
        if isinstance(change, str):
            await db.run(index.remove, change)
        elif isinstance(change, Page):
            await db.run(index.load, change)
        else:
            await db.run(rank, index, change)


def afresh(model: Model) -> list[list[Change]]:
    """The same pages, in a store that never saw anything else."""
    return [list(model.pages.values()), [Ranked(url, value) for url, value in model.ranks.items()]]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds, st.booleans(), st.sampled_from([1, 3, 200]), st.sampled_from([1, 2, 50]), st.sampled_from([1, 1000]))
def test_after_any_changes_it_equals_the_batch_index_and_a_store_that_never_saw_anything_else(
    tmp_path_factory: pytest.TempPathFactory,
    plan: list[list[Change]],
    side_by_side: bool,
    anchors_max: int,
    duplicates_max: int,
    stale_at_once: int,
) -> None:
    limits = {"anchors_max": anchors_max, "duplicates_max": duplicates_max, "stale_at_once": stale_at_once}

    async def both() -> None:
        folder = tmp_path_factory.mktemp("index")
        model, rows = await play(folder / "search.sqlite", plan, side_by_side=side_by_side, **limits)
        again, fresh = await play(folder / "fresh.sqlite", afresh(model), side_by_side=False, **limits)
        assert (again.pages, again.ranks) == (model.pages, model.ranks)
        assert rows == fresh

    trio.run(both)


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


async def test_what_went_is_forgotten_now_and_then(tmp_path: Path) -> None:
    with SearchIndex(tmp_path / "search.sqlite") as search:
        exporter = Exporter()
        away = True

        async def oldest() -> int:
            if away:
                raise perco.Unavailable("the owner is away")
            return 5

        exporter.connect(search, oldest)
        await exporter.put(ExportRow("gone", 4, None))
        assert (search.version("gone"), exporter.forgotten) == (4, 0)
        away = False
        for number in range(64):
            await exporter.put(ExportRow(f"another {number}", 4, Document(URLS[0], "", "", (), (), 1.0)))
        await exporter.put(ExportRow("may come back", 5, None))
        assert (search.version("gone"), search.version("may come back")) == (None, 5)
        assert exporter.forgotten == 1


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
