"""The batch build: the plain statement of what the index is."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from perco.webindex.batch import (
    DEFAULT_RANK,
    Document,
    build,
    digest,
    digest_in_order,
    seat,
    usable_rank,
)
from perco.webindex.pages import KEY_PART_BYTES_MAX, Page, ParseLimits, key_part

SITE = "https://site.example/"


def page(name: str, body: str = "", **fields: object) -> Page:
    plain = Page(SITE + name, 200, "text/html", "utf-8", body.encode())
    return replace(plain, **fields)  # type: ignore[arg-type]


def moved(name: str, location: str) -> Page:
    return page(name, status=301, location=location)


def test_a_document_has_the_words_of_its_page_and_of_the_links_to_it() -> None:
    documents = build(
        [
            page("b", "<title>B</title><p>see <a href=a>the first</a>"),
            page("a", "<title>A</title><p>words"),
            page("c", "<a href=a>again</a> <a href=nowhere>lost</a>"),
        ]
    )
    assert list(documents) == [SITE + "a", SITE + "b", SITE + "c"]
    assert documents[SITE + "a"] == Document(
        SITE + "a", "A", "words", ((SITE + "b", "the first"), (SITE + "c", "again"))
    )
    assert documents[SITE + "b"] == Document(SITE + "b", "B", "see the first")


def test_of_one_url_the_last_page_counts_in_whatever_spelling() -> None:
    old = page("a", "<a href=b>old</a>")
    new = replace(page("x", "<p>new"), url="HTTPS://site.example:443/./a#top")
    documents = build([old, page("b"), new])
    assert documents[SITE + "a"].text == "new"
    assert documents[SITE + "b"].anchors == ()


def test_a_page_without_a_canonical_url_counts_for_nothing() -> None:
    lost = replace(page("a", f"<a href={SITE}b>x</a>"), url="mailto:a@site.example")
    assert build([lost, page("b")]) == {SITE + "b": Document(SITE + "b", "", "")}


def test_a_redirect_is_no_document_but_leads_to_one() -> None:
    documents = build([moved("old", "new"), page("new"), page("c", "<a href=old>by the old name</a>")])
    assert list(documents) == [SITE + "c", SITE + "new"]
    assert documents[SITE + "new"].anchors == ((SITE + "old", ""),)


def test_redirects_in_a_circle_lead_nowhere() -> None:
    assert build([moved("a", "b"), moved("b", "c"), moved("c", "a"), moved("self", "self")]) == {}


def test_an_error_takes_a_document_away_and_its_links_with_it() -> None:
    pages = [page("a", "<a href=b>x</a>"), page("b")]
    gone = page("a", "<a href=b>x</a>", status=410)
    assert build([*pages, gone]) == {SITE + "b": Document(SITE + "b", "", "")}


def test_the_limits_are_those_of_the_pages() -> None:
    documents = build(
        [page("a", "abcdef"), page("b" * 100, "x")], limits=ParseLimits(text_chars_max=3, url_bytes_max=50)
    )
    assert documents == {SITE + "a": Document(SITE + "a", "", "abc")}


def test_of_many_links_to_a_page_the_first_are_kept() -> None:
    sources = [page(f"from-{number}", "<a href=to>x</a>") for number in range(9)]
    documents = build([*reversed(sources), page("to")], anchors_max=2)
    assert documents[SITE + "to"].anchors == ((SITE + "from-0", "x"), (SITE + "from-1", "x"))


PAGES = st.lists(
    st.builds(
        lambda name, links, words: page(name, words + "".join(f"<a href={link}>{link}</a>" for link in links)),
        st.sampled_from("abcd"),
        st.lists(st.sampled_from("abcd"), max_size=3),
        st.sampled_from(["one", "two"]),
    )
    | st.builds(moved, st.sampled_from("abcd"), st.sampled_from("abcd")),
    max_size=8,
)


@given(PAGES, st.randoms(use_true_random=False))
def test_only_the_current_pages_count_and_not_their_order(pages: list[Page], shuffler: random.Random) -> None:
    current = list({each.url: each for each in pages}.values())
    shuffler.shuffle(current)
    assert build(current) == build(pages)
    assert digest(build(current)) == digest(build(pages))


@given(PAGES)
def test_anchors_are_in_the_order_of_their_sources(pages: list[Page]) -> None:
    for document in build(pages).values():
        sources = [source for source, _ in document.anchors]
        if not document.duplicates:
            assert sources == sorted(set(sources))


def copies(**ranks: float) -> tuple[list[Page], dict[str, float]]:
    """Pages that say the same, and their ranks."""
    return [page(name, "<title>Same</title>words") for name in ranks], {SITE + n: rank for n, rank in ranks.items()}


@given(st.permutations(["a", "b", "c", "d"]))
def test_the_canonical_has_the_highest_rank_then_the_smallest_url_whatever_comes_first(order: list[str]) -> None:
    pages, ranks = copies(a=0.5, b=2.0, c=2.0, d=-1.0)
    pages.sort(key=lambda each: order.index(each.url[-1]))
    [document] = build(pages, ranks).values()
    assert (document.url, document.rank) == (SITE + "b", 2.0)
    assert document.duplicates == (SITE + "c", SITE + "a", SITE + "d")


def test_links_to_any_duplicate_are_the_canonical_pages() -> None:
    pages, ranks = copies(a=1.0, b=2.0)
    links = [
        page("x", "<a href=a>to a</a>"),
        page("y", "<a href=b>to b</a>"),
        page("z", "<a href=a>a</a><a href=b>b</a>"),
    ]
    documents = build([*pages, *links], ranks)
    assert SITE + "a" not in documents
    to_b, to_a = ((SITE + "y", "to b"), (SITE + "z", "b")), ((SITE + "x", "to a"), (SITE + "z", "a"))
    assert documents[SITE + "b"].anchors == to_b + to_a
    assert build([*pages, *links], {SITE + "a": 3.0})[SITE + "a"].anchors == to_a + to_b


def test_of_many_duplicates_the_first_are_kept_and_the_links_to_them() -> None:
    pages, ranks = copies(a=1.0, b=2.0, c=3.0)
    documents = build([*pages, page("x", "<a href=a>a</a><a href=b>b</a>")], ranks, duplicates_max=1)
    assert documents[SITE + "c"].duplicates == (SITE + "b",)
    assert documents[SITE + "c"].anchors == ((SITE + "x", "b"),)


@pytest.mark.parametrize("rank", [float("nan"), float("inf"), None])
def test_what_is_no_rank_counts_as_the_default(rank: float | None) -> None:
    assert usable_rank(rank) == DEFAULT_RANK


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_seats_are_in_the_order_of_ranks_then_of_urls(one: float, other: float) -> None:
    first, second = seat(one, SITE + "a"), seat(other, SITE + "b")
    assert (first < second) is (one >= other)
    assert all(-(2**63) <= number < 2**63 for number, _ in (first, second))


def test_a_long_url_has_a_short_place_in_keys_and_keeps_apart() -> None:
    one, other = (SITE + "x" * 300 + end for end in "ab")
    assert len(key_part(one)) == len(key_part(other)) == KEY_PART_BYTES_MAX
    assert key_part(one) != key_part(other)
    assert key_part(SITE) == SITE


def test_a_page_says_what_the_pages_in_its_frames_say_but_not_what_is_in_their_frames() -> None:
    inner = page("inner", "inner <iframe src=outer></iframe>")
    outer = page("outer", "outer <iframe src=inner></iframe><object data=gone></object>")
    documents = build([inner, outer])
    assert documents[SITE + "outer"].text == "outer inner"
    assert documents[SITE + "inner"].text == "inner outer"


@given(PAGES, PAGES)
def test_digests_are_equal_for_equal_indexes_only(one: list[Page], other: list[Page]) -> None:
    first, second = build(one), build(other)
    assert (digest(first) == digest(second)) is (first == second)


def test_a_digest_is_of_the_documents_and_not_of_their_container() -> None:
    documents = build([page("b"), page("a", "<a href=b>x</a>")])
    assert digest(documents) == digest(reversed(documents.values())) == digest_in_order(documents.values())


def test_a_digest_is_the_same_on_every_machine_and_in_every_version() -> None:
    document = Document(SITE, "title", "text", ((SITE + "a", "anchor"),))
    assert digest([]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digest([document]) == "414fc97b273281761da794e0dfc6e3335e7116ddfa906fd0d76c97a2c2516752"
