"""Pages that are made up: the same ones each time, and distributed as on the web."""

from __future__ import annotations

from collections import Counter

from perco.webindex.batch import build
from perco.webindex.pages import canonical_url, indexable, parse
from perco.webindex.synthetic import SyntheticWeb

WEB = SyntheticWeb(2_000, seed=3)
PAGES = list(WEB)


def test_a_seed_makes_the_same_pages_and_each_can_be_made_alone() -> None:
    again = SyntheticWeb(2_000, seed=3)
    assert all(again.page(number) == WEB.page(number) for number in (1_999, 0, 7))
    assert SyntheticWeb(2_000, seed=4).page(7) != WEB.page(7)
    assert len(PAGES) == len({page.url for page in PAGES}) == 2_000


def test_urls_are_canonical() -> None:
    assert all(canonical_url(page.url) == page.url for page in PAGES)


def test_links_are_few_on_most_pages_and_lead_to_some_very_often() -> None:
    parsed = [parse(page) for page in PAGES if indexable(page)]
    out = sorted(len(found.links) for found in parsed)
    assert 3 <= out[len(out) // 2] <= 7
    assert out[-1] >= 30
    targets = Counter(target for found in parsed for target, _ in found.links)
    assert targets.keys() <= {page.url for page in PAGES}
    often = [count for _, count in targets.most_common()]
    assert often[0] > 20 * often[len(often) // 2]


def test_three_pages_in_ten_are_copies_and_some_clusters_are_large() -> None:
    documents = build(PAGES, duplicates_max=2_000)
    copies = sum(len(document.duplicates) for document in documents.values())
    assert 0.2 <= copies / len(PAGES) <= 0.4
    sizes = sorted(len(document.duplicates) for document in documents.values())
    assert sizes[-1] >= 20
    assert sizes[len(sizes) // 2] == 0


def test_some_pages_show_others_and_some_are_broken() -> None:
    assert any(parse(page).embedded for page in PAGES)
    assert {page.status for page in PAGES} == {200, 301, 404}


def test_a_web_of_one_page_links_to_none() -> None:
    [page] = SyntheticWeb(1)
    assert parse(page).links == ()
