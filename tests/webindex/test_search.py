"""The search index: newest versions only, all or nothing, and any query is a search."""

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from perco.webindex.batch import Document, digest
from perco.webindex.search import (
    VERSION_MAX,
    EmptyQueryError,
    ExportRow,
    SearchIndex,
    SearchIndexError,
    SearchOptions,
)


def url(name: str) -> str:
    return f"https://site.example/{name}"


def document(name: str, title: str = "", text: str = "", *anchors: str) -> Document:
    found = tuple((url(f"from-{number}"), anchor) for number, anchor in enumerate(anchors))
    return Document(url(name), title, text, found)


def row(name: str, version: int, title: str = "", text: str = "", *anchors: str) -> ExportRow:
    return ExportRow(url(name), version, document(name, title, text, *anchors))


def gone(name: str, version: int) -> ExportRow:
    return ExportRow(url(name), version, None)


def names(index: SearchIndex, query: str, limit: int = 10) -> list[str]:
    return [hit.url.rpartition("/")[2] for hit in index.search(query, limit)]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[SearchIndex]:
    with SearchIndex(tmp_path / "search.db") as opened:
        yield opened


# ------------------------------------------------------------------------------------------- versions


def test_only_a_newer_version_replaces_a_document(index: SearchIndex) -> None:
    assert index.export([row("a", 5, "five")]) == 1
    assert index.export([row("a", 5, "again"), row("a", 4, "four")]) == 0
    assert index.get(url("a")) == document("a", "five")
    assert index.export([row("a", 6, "six")]) == 1
    assert index.get(url("a")) == document("a", "six")
    assert index.version(url("a")) == 6


def test_an_old_export_cannot_bring_back_what_was_deleted(index: SearchIndex) -> None:
    index.export([row("a", 5, "word")])
    assert index.export([gone("a", 6)]) == 1
    assert index.export([row("a", 5, "word"), row("a", 6, "word")]) == 0
    assert index.get(url("a")) is None
    assert names(index, "word") == []
    assert (index.count(), index.version(url("a"))) == (0, 6)


def test_a_deletion_counts_also_for_what_was_never_there(index: SearchIndex) -> None:
    index.export([gone("a", 6), row("a", 5, "word")])
    assert index.count() == 0
    assert index.export([row("a", 7, "word")]) == 1
    assert names(index, "word") == ["a"]


def test_what_went_is_forgotten_when_no_older_export_can_come(index: SearchIndex) -> None:
    index.export([gone("a", 5), gone("b", 6), row("c", 4, "word")])
    assert index.forget(6) == 1
    assert (index.version(url("a")), index.version(url("b")), index.version(url("c"))) == (None, 6, 4)
    assert index.export([row("b", 5, "word")]) == 0
    assert names(index, "word") == ["c"]
    index.check()


def test_a_batch_may_hold_several_versions_of_one_document_in_any_order(index: SearchIndex) -> None:
    index.export([row("a", 2, "two"), row("a", 3, "three"), row("a", 1, "one"), gone("b", 2), row("b", 1, "one")])
    assert index.get(url("a")) == document("a", "three")
    assert names(index, "one") == names(index, "two") == []
    assert names(index, "three") == ["a"]


def test_an_unknown_url_has_neither_document_nor_version(index: SearchIndex) -> None:
    assert index.get(url("a")) is None
    assert index.version(url("a")) is None


def test_an_export_is_all_or_nothing(index: SearchIndex) -> None:
    index.export([row("a", 1, "old")])
    unstorable = row("b", 2, "\ud800")
    with pytest.raises(UnicodeEncodeError):
        index.export([row("a", 2, "new"), unstorable])
    assert index.get(url("a")) == document("a", "old")
    assert names(index, "new") == []
    assert index.export([row("a", 2, "new")]) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        row("a", -1),
        row("a", VERSION_MAX + 1),
        ExportRow(url("a"), 1, Document("", "", "")),
        ExportRow("", 1, None),
    ],
)
def test_a_row_that_cannot_be_right_is_refused(index: SearchIndex, wrong: ExportRow) -> None:
    with pytest.raises(ValueError, match=r"row|version"):
        index.export([row("c", 1), wrong])
    assert index.count() == 0


NAMES = st.sampled_from("abc")
WORDS = st.lists(st.sampled_from(["one", "two", "three", "Überall"]), max_size=3).map(" ".join)
ROWS = st.builds(row, NAMES, st.integers(0, 9), WORDS, WORDS, WORDS) | st.builds(gone, NAMES, st.integers(0, 9))


@settings(deadline=None)
@given(st.lists(st.lists(ROWS, max_size=4), max_size=6), st.randoms(use_true_random=False))
def test_what_is_in_the_index_is_the_newest_of_all_that_was_exported(batches: list[list[ExportRow]], order) -> None:  # type: ignore[no-untyped-def]
    """Rows of one version are equal in an exporter; here the first counts, so they are made so."""
    first: dict[tuple[str, int], ExportRow] = {}
    same = [[first.setdefault((each.key, each.version), each) for each in batch] for batch in batches]
    newest: dict[str, ExportRow] = {}
    for each in (each for batch in same for each in batch):
        newest[each.key] = max(newest.get(each.key, each), each, key=lambda known: known.version)
    replayed = [*same, *same]
    order.shuffle(replayed)
    expected = {known.key: known.document for known in newest.values() if known.document is not None}
    with SearchIndex(":memory:") as index:
        for batch in replayed:
            index.export(batch)
        index.check()
        assert {found.url: found for found in index.documents()} == expected
        assert index.count() == len(expected)
        assert index.digest() == digest(expected)
        for word in ("one", "two", "uberall"):
            holding = [found.url for found in expected.values() if word in str(found).lower().replace("ü", "u")]
            assert sorted(hit.url for hit in index.search(word)) == sorted(holding)


# ------------------------------------------------------------------------------------------- reading


def test_of_two_documents_with_the_same_words_the_one_of_higher_rank_comes_first(tmp_path: Path) -> None:
    ranked = [replace(document(name, "", "word"), rank=rank) for name, rank in (("a", 0.2), ("b", 30.0), ("c", -1.0))]
    with SearchIndex.in_memory(ranked) as index:
        assert names(index, "word") == ["b", "a", "c"]
    with SearchIndex.in_memory(ranked, SearchOptions(rank_weight=0.0)) as index:
        assert names(index, "word") == ["a", "b", "c"]


def test_a_hit_tells_duplicates_and_who_links_with_what_words(index: SearchIndex) -> None:
    whole = replace(document("a", "word", "", "said of it"), duplicates=(url("b"), url("c")), rank=2.5)
    index.export([ExportRow("any key", 1, whole)])
    [hit] = index.search("said")
    assert (hit.url, hit.duplicates, hit.anchors, hit.rank) == (whole.url, whole.duplicates, whole.anchors, 2.5)
    assert index.get(url("a")) == whole


def test_a_document_keeps_its_key_when_another_page_becomes_its_face(index: SearchIndex) -> None:
    index.export([ExportRow("key", 1, document("a", "word"))])
    index.export([ExportRow("key", 2, document("b", "word"))])
    assert names(index, "word") == ["b"]
    assert (index.get(url("a")), index.count()) == (None, 1)


def test_documents_come_in_the_order_of_their_urls_and_have_the_digest_of_the_batch(index: SearchIndex) -> None:
    made = [document(name, f"title of {name}", "text", "anchor", "") for name in map(str, range(1_200))]
    index.export([ExportRow(each.url, 1, each) for each in reversed(made)])
    assert [found.url for found in index.documents()] == sorted(each.url for each in made)
    assert sorted(index.documents(), key=lambda each: int(each.url.rpartition("/")[2])) == made
    assert index.digest() == digest(made)
    assert index.count() == len(made)


def test_the_digest_tells_documents_apart_that_search_does_not(index: SearchIndex) -> None:
    index.export([row("a", 1, "title", "text", "x", "x")])
    before = index.digest()
    index.export([row("a", 2, "title", "text", "x")])
    assert index.digest() != before


def test_what_was_exported_is_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "search.db"
    with SearchIndex(path) as index:
        index.export([row("a", 1, "word"), gone("b", 1)])
        before = index.digest()
    with SearchIndex(path, SearchOptions(synchronous="OFF")) as index:
        assert index.digest() == before
        assert names(index, "word") == ["a"]
        assert index.version(url("b")) == 1


def test_a_snapshot_is_searched_in_memory() -> None:
    documents = {name: document(name, name) for name in ("one", "two")}
    with SearchIndex.in_memory({each.url: each for each in documents.values()}) as index:
        assert names(index, "two") == ["two"]
        assert index.digest() == digest(documents)


# ------------------------------------------------------------------------------------------- searching


def test_a_title_counts_more_than_a_link_and_a_link_more_than_the_text(index: SearchIndex) -> None:
    index.export(
        [
            row("text", 1, "other", "word and more"),
            row("link", 1, "other", "nothing and more", "word"),
            row("title", 1, "word", "nothing and more"),
            *(row(str(number), 1, "x", "y") for number in range(9)),
        ]
    )
    assert names(index, "word") == ["title", "link", "text"]
    scores = [hit.score for hit in index.search("word")]
    assert scores == sorted(scores, reverse=True)
    assert min(scores) > 0


def test_all_words_must_be_there_in_whatever_form(index: SearchIndex) -> None:
    index.export([row("a", 1, "Grüße", "two indexes"), row("b", 1, "one", "index")])
    assert names(index, "gruße INDEX") == ["a"]
    assert names(index, "indexing") == ["b", "a"]
    assert names(index, "one two") == []


def test_what_is_joined_must_be_found_in_that_order(index: SearchIndex) -> None:
    index.export(
        [row("a", 1, "", "asyncio.Future and get_event_loop"), row("b", 1, "", "future asyncio event get loop")]
    )
    assert names(index, "asyncio.Future") == ["a"]
    assert names(index, "get_event_loop") == ["a"]
    assert sorted(names(index, "future asyncio")) == ["a", "b"]


def test_equal_hits_come_in_the_order_of_their_urls_and_no_more_than_asked_for(index: SearchIndex) -> None:
    index.export([row(name, 1, "word") for name in "dbca"])
    assert names(index, "word") == ["a", "b", "c", "d"]
    assert names(index, "word", limit=2) == ["a", "b"]
    assert names(index, "word", limit=0) == names(index, "word", limit=-1) == []


def test_a_snippet_shows_the_words_where_they_are(index: SearchIndex) -> None:
    index.export([row("a", 1, "title", "before " * 50 + "the word" + " after" * 50)])
    (hit,) = index.search("word", marks=("<", ">"))
    assert "before the <word> after" in hit.snippet
    assert len(hit.snippet) < 200
    assert (hit.url, hit.title) == (url("a"), "title")


@pytest.mark.parametrize(
    "query",
    ['"word', "word AND", "NOT word", "word*", "title:word", "(word", "^word", "wo\0rd word", "-word", "{word}"],
)
def test_operators_are_words(index: SearchIndex, query: str) -> None:
    index.export([row("a", 1, "title word and not wo rd")])
    assert names(index, query) == ["a"]


@pytest.mark.parametrize("query", ["", "  ", "*", '"', "- ( ) :", "\0", "\ud800"])
def test_a_query_without_a_word_says_so(index: SearchIndex, query: str) -> None:
    with pytest.raises(EmptyQueryError, match="at least one word"):
        index.search(query)


@given(st.text(st.characters() | st.sampled_from('"*:^-+(){}\0 \ud800aword')))
def test_any_query_is_a_search_or_has_no_word(query: str) -> None:
    with SearchIndex.in_memory([document("a", "word", "a")]) as index:
        try:
            assert len(index.search(query)) <= 1
        except EmptyQueryError:
            assert not any(map(str.isalnum, query))


def test_a_query_of_any_length_is_cut(index: SearchIndex) -> None:
    index.export([row("a", 1, "word")])
    assert names(index, "word " * 100_000) == ["a"]
    assert names(index, "w" * 1_000_000) == []


def test_only_so_much_of_the_links_is_searched_but_all_is_kept(tmp_path: Path) -> None:
    options = SearchOptions(anchor_words_chars_max=9)
    with SearchIndex(tmp_path / "search.db", options) as index:
        index.export([row("a", 1, "", "", "one", "one", "three", "seven")])
        assert names(index, "three") == ["a"]
        assert names(index, "seven") == []
        assert index.get(url("a")) == document("a", "", "", "one", "one", "three", "seven")


# ------------------------------------------------------------------------------------------- the full text


def test_the_full_text_fits_the_documents_after_updates_and_deletions(index: SearchIndex) -> None:
    for version in range(1, 5):
        index.export(
            [
                row(str(number), version, f"version{version}", "text " * number, "anchor")
                if number % version
                else gone(str(number), version)
                for number in range(50)
            ]
        )
        index.check()
    assert len(names(index, "version4", limit=100)) == index.count() == 37
    assert names(index, "version3") == []


def test_a_full_text_that_does_not_fit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "search.db"
    with SearchIndex(path) as index:
        index.export([row("a", 1, "word")])
    raw = sqlite3.connect(path)
    raw.execute("UPDATE pages SET title = 'another'")
    raw.commit()
    raw.close()
    with SearchIndex(path) as index, pytest.raises(SearchIndexError, match="damaged"):
        index.check()


# ------------------------------------------------------------------------------------------- files


def test_a_file_of_another_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "search.db"
    SearchIndex(path).close()
    raw = sqlite3.connect(path)
    raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(SearchIndexError, match=r"format 99.*another folder"):
        SearchIndex(path)


def test_a_database_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    raw = sqlite3.connect(path)
    raw.execute("CREATE TABLE other (x)")
    raw.close()
    before = path.read_bytes()
    with pytest.raises(SearchIndexError, match="not a search index"):
        SearchIndex(path)
    assert path.read_bytes() == before


def test_what_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear reader, " * 100)
    with pytest.raises(SearchIndexError, match=r"letter\.txt cannot be used"):
        SearchIndex(path)
    with pytest.raises(SearchIndexError, match="cannot be used"):
        SearchIndex(tmp_path)
    assert path.read_text() == "Dear reader, " * 100


def test_an_export_into_a_file_that_another_process_holds_says_so(tmp_path: Path) -> None:
    path = tmp_path / "search.db"
    with SearchIndex(path, SearchOptions(busy_seconds=0)) as index:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SearchIndexError, match="locked"):
            index.export([row("a", 1)])
        other.execute("ROLLBACK")
        other.close()
        assert index.export([row("a", 1)]) == 1


def test_a_closed_index_says_so(index: SearchIndex) -> None:
    index.close()
    with pytest.raises(SearchIndexError, match="closed"):
        index.search("word")


@pytest.mark.parametrize("level", ["FULL", "NORMAL", "OFF"])
def test_the_file_is_written_as_safely_as_was_asked_for(tmp_path: Path, level: str) -> None:
    with SearchIndex(tmp_path / "search.db", SearchOptions(synchronous=level)) as index:  # type: ignore[arg-type]
        (found,) = index._db.execute("PRAGMA synchronous").fetchone()
        (journal,) = index._db.execute("PRAGMA journal_mode").fetchone()
    assert found == {"OFF": 0, "NORMAL": 1, "FULL": 2}[level]
    assert journal == "wal"
