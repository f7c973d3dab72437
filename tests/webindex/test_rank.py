"""PageRank: the ranks of small webs, and that only ranks that have moved are written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

import perco
from perco.webindex.exporter import Exporter
from perco.webindex.index import WebIndex
from perco.webindex.pages import Page
from perco.webindex.rank import Ranked, _write, pagerank, rank_all
from perco.webindex.search import SearchIndex

LINKS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=40, unique=True)


@given(LINKS)
def test_ranks_are_the_solution_of_the_equation(links: list[tuple[int, int]]) -> None:
    """Against the plain definition: a surfer follows a link with probability 0.85, else opens any page."""
    sources, targets = [a for a, _ in links], [b for _, b in links]
    walk = np.full((8, 8), 1 / 8)  # to, from
    for page in set(sources):
        out = [b for a, b in links if a == page]
        walk[:, page] = 0
        for target in out:
            walk[target, page] += 1 / len(out)
    expected = np.linalg.solve(np.eye(8) - 0.85 * walk, np.full(8, 0.15 / 8)) * 8
    found = pagerank(8, sources, targets)
    assert found == pytest.approx(expected, abs=1e-7)
    assert found.mean() == pytest.approx(1.0)


def test_a_web_without_pages_has_no_ranks_and_one_without_links_has_equal_ones() -> None:
    assert list(pagerank(0, [], [])) == []
    assert list(pagerank(3, [], [])) == pytest.approx([1.0, 1.0, 1.0])


def html(url: str, title: str, *targets: str) -> Page:
    links = "".join(f"<a href={target}>to {target}</a>" for target in targets)
    return Page(f"https://site.invalid/{url}", content_type="text/html", body=f"<title>{title}</title>{links}".encode())


async def ranks_of(db: perco.Database, index: WebIndex) -> dict[str, float | None]:
    async with db.snapshot() as snap:
        return {row.key[-1]: row[index.rank] async for row in snap.scan(index.pages, columns=[index.rank])}


async def test_a_ranking_elects_the_canonical_page_and_what_has_not_moved_is_not_written() -> None:
    """a and b say the same; b is linked to by more."""
    index = WebIndex(Exporter())
    with SearchIndex(":memory:") as search:
        index.exporter.connect(search)
        async with perco.open("memory:", index.schema) as db, db.worker() as worker:
            pages = [html("a", "same"), html("b", "same"), html("c", "c", "b"), html("d", "d", "a", "b")]
            for page in pages:
                await db.run(index.load, page)
            await db.wait_idle()
            assert set((await ranks_of(db, index)).values()) == {1.0}  # as the loader writes it
            assert [each.url[-1] for each in search.documents()] == ["a", "c", "d"]  # of equal ranks, the smallest URL

            assert await rank_all(db, index) == Ranked(pages=4, links=3, changed=3)  # one of them is average
            await db.wait_idle()
            ranks = await ranks_of(db, index)
            [document] = [each for each in search.documents() if each.title == "same"]
            assert (document.url[-1], document.rank) == ("b", ranks["b"])
            assert [duplicate[-1] for duplicate in document.duplicates] == ["a"]
            texts = [(source[-1], text) for source, text in document.anchors]
            assert texts == [("c", "to b"), ("d", "to b"), ("d", "to a")]

            runs = worker.statistics()
            assert (await rank_all(db, index)).changed == 0
            await db.run(index.load, html("e", "e"))  # moves the others a little
            await db.wait_idle()
            assert (await rank_all(db, index, moved_min=0.5)).changed == 0
            await db.wait_idle()
            assert worker.statistics()["rank"].commits - runs["rank"].commits == 1  # e's own, as it was loaded
            assert (await rank_all(db, index)).changed > 0
            await db.wait_idle()
            assert worker.statistics()["rank"].commits - runs["rank"].commits > 1


async def test_a_page_that_goes_while_ranks_are_computed_has_none() -> None:
    index = WebIndex()
    async with perco.open("memory:", index.schema) as db:
        await db.run(index.load, html("a", "a"))
        assert await db.run(_write, index, {"https://site.invalid/a": 2.0, "https://site.invalid/gone": 3.0}) == 1
        assert await ranks_of(db, index) == {"a": 2.0}
