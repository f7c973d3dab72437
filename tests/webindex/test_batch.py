"""The batch build: the plain statement of what the index is."""

import random
from dataclasses import replace

from hypothesis import given, strategies as st

from perco.webindex.batch import Document, build, digest, digest_in_order
from perco.webindex.pages import Page, ParseLimits

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
        assert sources == sorted(set(sources))


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
