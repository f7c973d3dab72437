"""Runs of observers that overlap, step by step: of two for one page, cluster or frame, the second sees the first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import perco
from perco.webindex.batch import content_hash
from perco.webindex.exporter import Exporter
from perco.webindex.index import Listing, Place, WebIndex
from perco.webindex.pages import Page
from perco.webindex.search import ExportRow

A, B, C = (f"https://site.invalid/{name}" for name in "abc")
SAME = content_hash("same", "words")
Run = Callable[[perco.Transaction], Awaitable[None]]


def page(url: str, body: str = "<title>same</title>words") -> Page:
    return Page(url, content_type="text/html", body=body.encode())


class Kept(Exporter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[ExportRow] = []

    async def put(self, row: ExportRow) -> None:
        self.got.append(row)


class Steps:
    """A store without a worker: observers run when the test says so."""

    def __init__(self, db: perco.Database, index: WebIndex, exporter: Kept) -> None:
        self.db, self.index, self.exporter = db, index, exporter

    async def load(self, *pages: Page) -> None:
        for each in pages:
            await self.db.run(self.index.load, each)

    def run(self, id: str, key: Any, value: Any = None) -> Run:
        """What a run of an observer does."""
        observer = self.index.schema.observers[id]

        async def run(txn: perco.Transaction) -> None:
            await observer.function(txn, perco.Change(key, value, 0, 1, 0))

        return run

    async def do(self, id: str, key: Any, value: Any = None) -> None:
        await self.db.run(self.run(id, key, value))

    async def get(self, column: perco.Column[Any, Any], key: Any) -> Any:
        async with self.db.snapshot() as snap:
            return await snap.get(column, key)


@pytest.fixture
async def steps() -> AsyncIterator[Steps]:
    exporter = Kept()
    index = WebIndex(exporter)
    async with perco.open("memory:", index.schema) as db:
        yield Steps(db, index, exporter)


async def overlapping(db: perco.Database, first: Run, second: Run) -> None:
    """Both begin, then both end."""
    async with db.transaction() as one, db.transaction() as other:
        await first(one)
        await second(other)
        await one.commit()


PAIRS = [("gather", "gather"), ("parse", "gather"), ("parse", "rank"), ("rank", "gather"), ("parse", "parse again")]


@pytest.mark.parametrize(("first", "second"), PAIRS + [(b, a) for a, b in PAIRS])
@pytest.mark.parametrize("known", [False, True])
async def test_of_two_runs_for_one_page_the_second_runs_again(
    steps: Steps, first: str, second: str, known: bool
) -> None:
    """Even if there is nothing new for either: the later run may have seen more."""
    await steps.load(page(A))
    if known:
        await steps.do("parse", A)
        await steps.do("gather", A)
    with pytest.raises(perco.WriteConflict):
        await overlapping(steps.db, steps.run(first, A, 1.0), steps.run(second, A, 1.0))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("there", [False, True])
async def test_of_two_elections_of_one_cluster_the_second_is_held_again(steps: Steps, there: bool, known: bool) -> None:
    await steps.load(page(A))
    if there:
        await steps.do("parse", A)
    if known:
        await steps.do("elect", SAME)
    with pytest.raises(perco.WriteConflict):
        await overlapping(steps.db, steps.run("elect", SAME), steps.run("elect", SAME))


async def test_a_page_and_what_it_shows_see_each_other(steps: Steps) -> None:
    """In either order of the two commits: else the page would say the old words for ever, and no run would tell it."""
    outer, inner = page(A, f"<iframe src={B}></iframe>"), page(B)
    await steps.load(outer, inner)
    with pytest.raises(perco.TransientError):
        await overlapping(steps.db, steps.run("parse", A), steps.run("parse", B))
    with pytest.raises(perco.TransientError):
        await overlapping(steps.db, steps.run("parse", B), steps.run("parse", A))


async def test_who_shows_a_page_is_parsed_again_when_that_says_something_else(steps: Steps) -> None:
    await steps.load(page(A, f"outer <iframe src={B}></iframe>"), page(B, "old"), page(C, f"<iframe src={B}></iframe>"))
    for url in (A, B, C):
        await steps.do("parse", url)
    assert await steps.get(steps.index.parsed, C) == ("", "old")
    async with steps.db.worker():
        await steps.load(page(B, "new"))
        await steps.db.wait_idle()
    assert await steps.get(steps.index.parsed, A) == ("", "outer new")
    assert await steps.get(steps.index.parsed, C) == ("", "new")


async def test_a_listing_whose_canonical_page_has_gone_is_not_exported_but_made_anew(steps: Steps) -> None:
    """The page may be back before its cluster is asked again: then nothing would have changed, and the documents
    exported in between would stay."""
    index = steps.index
    await steps.load(page(A), page(B))
    await steps.do("parse", A)
    await steps.do("parse", B)
    await steps.do("elect", SAME)
    listing = Listing(*await steps.get(index.listing, SAME))
    assert (listing.canonical, listing.duplicates) == (A, (B,))
    await steps.load(page(A, "other"))
    await steps.do("parse", A)  # and the cluster has not been asked yet
    await steps.do("export", SAME, listing)
    assert steps.exporter.got == []
    assert Listing(*await steps.get(index.listing, SAME)).canonical == B
    await steps.do("export", SAME, await steps.get(index.listing, SAME))
    [row] = steps.exporter.got
    assert row.document is not None
    assert (row.document.url, row.document.text, row.document.duplicates) == (B, "words", ())


async def test_a_cluster_without_pages_is_not_there(steps: Steps) -> None:
    index = steps.index
    await steps.load(page(A))
    await steps.do("parse", A)
    await steps.do("elect", SAME)
    assert await steps.get(index.canonical, SAME) == A
    assert Place(*await steps.get(index.place, A)) == Place(SAME, 1.0)
    await steps.db.run(index.remove, A)
    await steps.do("parse", A)
    await steps.do("elect", SAME)
    async with steps.db.snapshot() as snap:
        for table in (index.docs, index.dups, index.members, index.pages):
            assert await snap.scan(table).all() == [], table
