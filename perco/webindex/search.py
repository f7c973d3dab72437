"""A search index in one SQLite file: the documents that people search.

An exporter writes to the file; it may die and start again at any point. So each row records the version of its
document, and only a newer version replaces it: exporting the same rows twice, or old rows after new ones, changes
nothing. A deletion is a version too. It stays as an empty row until no older export can arrive any more.

Documents are stored as they were given, next to a full-text index (FTS5) that holds no copy of them.
"""

import contextlib
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from types import TracebackType
from typing import Literal, Self

import msgpack

from perco.webindex.batch import Document, digest_in_order

FORMAT = 2
"""The version of the file's layout; the file has it in its `user_version`."""

VERSION_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options for writing the file, and for ranking the hits of a search."""

    synchronous: Literal["FULL", "NORMAL", "OFF"] = "FULL"
    """FULL: an export that has returned survives a power failure. NORMAL: a power failure may undo it, as a whole."""
    busy_seconds: float = 10.0
    """How long to wait for another process that writes to the file."""
    rank_weight: float = 0.2
    """How much more the words of a page count each time that (1 + its rank) doubles; 0: rank does not count."""
    anchor_words_chars_max: int = 20_000
    """How many characters of the distinct texts of the links to a document are searched. All texts are stored."""


DEFAULT_OPTIONS = SearchOptions()

TITLE_WEIGHT, ANCHORS_WEIGHT, TEXT_WEIGHT = 10.0, 4.0, 1.0
"""How much a word counts in the title, in the links to a document, and in its text."""

QUERY_CHARS_MAX = 1_000
QUERY_WORDS_MAX = 32
SNIPPET_WORDS = 16
HITS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class ExportRow:
    """The state of a document from this version on. If `document` is None, the document is gone.

    If a duplicate becomes canonical, the document gets another URL, but its key does not change.
    """

    key: str
    version: int
    document: Document | None


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that has all the words of a query; a higher score is better. `Document` explains the other fields."""

    url: str
    title: str
    snippet: str
    score: float
    rank: float
    duplicates: tuple[str, ...]
    anchors: tuple[tuple[str, str], ...]


class SearchIndexError(Exception):
    """The file is not a search index that this version can use."""


class EmptyQueryError(ValueError):
    """There is no word in the query."""


# A document that is gone keeps its row, with only its key and a version. The view and the full text leave it out.
_LAYOUT = """
CREATE TABLE pages (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    version INTEGER NOT NULL,
    url TEXT,
    title TEXT,
    anchors TEXT,
    body TEXT,
    rank REAL,
    popularity REAL,
    lists BLOB
);
CREATE INDEX pages_by_url ON pages (url);
CREATE INDEX pages_gone ON pages (version) WHERE title IS NULL;
CREATE VIEW documents AS SELECT * FROM pages WHERE title IS NOT NULL;
CREATE VIRTUAL TABLE words USING fts5(
    title, anchors, body,
    content = 'documents', content_rowid = 'id', tokenize = 'porter unicode61 remove_diacritics 2'
);
"""
_REPLACE = """
INSERT INTO pages (key, version, url, title, anchors, body, rank, popularity, lists) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET version = excluded.version, url = excluded.url, title = excluded.title,
    anchors = excluded.anchors, body = excluded.body, rank = excluded.rank, popularity = excluded.popularity,
    lists = excluded.lists
RETURNING id
"""
_FIND = """
SELECT words.rowid, documents.url, documents.title, documents.rank, documents.lists,
    bm25(words, ?, ?, ?) * (1 + ? * documents.popularity) AS score
FROM words JOIN documents ON documents.id = words.rowid
WHERE words MATCH ? ORDER BY score, documents.url LIMIT ?
"""
_SNIPPET = "SELECT snippet(words, 2, ?, ?, '…', ?) FROM words WHERE words MATCH ? AND rowid = ?"
_DOCUMENTS_PER_READ = 500

_Words = tuple[str, str, str]


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Raise errors of SQLite as SearchIndexError, with `what` to say what they mean for the caller."""
    try:
        yield
    except sqlite3.Error as error:
        raise SearchIndexError(f"{what}: {error}") from error


class SearchIndex:
    """The index in the file at `path`, which is made if it does not exist. Use it from one thread at a time."""

    def __init__(self, path: str | PathLike[str], options: SearchOptions = DEFAULT_OPTIONS) -> None:
        self._options = options
        with _told(f"{fspath(path)} cannot be used as a search index"):
            self._db = sqlite3.connect(
                fspath(path), timeout=options.busy_seconds, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    @classmethod
    def in_memory(
        cls,
        documents: Mapping[str, Document] | Iterable[Document],
        options: SearchOptions = DEFAULT_OPTIONS,
    ) -> Self:
        """An index of these documents that exists as long as the object; used to search a past state."""
        index = cls(":memory:", options)
        plain = documents.values() if isinstance(documents, Mapping) else documents
        index.export([ExportRow(document.url, 0, document) for document in plain])
        return index

    def _prepare(self) -> None:
        new = self._is_new()
        # Only after the check, because this statement would change a file that is not a search index.
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {self._options.synchronous}")
        if new:
            with self._transaction("IMMEDIATE"):
                if self._is_new():
                    for statement in _LAYOUT.split(";\n"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {FORMAT}")

    def _is_new(self) -> bool:
        (found,) = self._db.execute("PRAGMA user_version").fetchone()
        if found == FORMAT:
            return False
        if found != 0:
            raise SearchIndexError(
                f"the search index has format {found}, and this version of perco knows only {FORMAT}: "
                "make a new index, in another folder, with perco web load"
            )
        if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise SearchIndexError("the file is an SQLite database, but not a search index")
        return True

    @contextlib.contextmanager
    def _transaction(self, kind: Literal["IMMEDIATE", "DEFERRED"]) -> Iterator[None]:
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # On some errors SQLite has already rolled back.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------- writing

    def _home(self) -> int:
        """The number (`places.Rows.home`) that identifies the rows whose documents are here; negative while some
        documents are missing; 0 before `begin`."""
        return int(self._db.execute("PRAGMA application_id").fetchone()[0])

    def is_full(self, home: int) -> bool:
        """Whether all documents of the rows with this number (`places.Rows.home`) have been exported to this file."""
        with _told("the search index cannot be read"):
            return self._home() == home

    def begin(self, home: int, keep: bool) -> None:
        """Prepare the file for all documents of the rows with this number, unless another process has done so. The
        documents in the file, which are of other rows, are removed, unless `keep` is set."""
        with _told("the search index cannot be written"), self._transaction("IMMEDIATE"):
            if abs(self._home()) != home:
                if not keep:
                    self._db.execute("INSERT INTO words (words) VALUES ('delete-all')")
                    self._db.execute("DELETE FROM pages")
                self._db.execute(f"PRAGMA application_id = {-home}")

    def mark_full(self, home: int) -> None:
        """Record that all documents of these rows are here."""
        with _told("the search index cannot be written"), self._transaction("IMMEDIATE"):
            if self._home() == -home:
                self._db.execute(f"PRAGMA application_id = {home}")

    def export(self, rows: Sequence[ExportRow]) -> int:
        """Store, in one transaction, the rows that are newer than those in the file; returns how many these are."""
        for row in rows:
            _check(row)
        with _told("the export failed"), self._transaction("IMMEDIATE"):
            return sum(self._take(row) for row in rows)

    def _take(self, row: ExportRow) -> bool:
        found = self._db.execute(
            "SELECT id, version, title, anchors, body FROM pages WHERE key = ?", (row.key,)
        ).fetchone()
        if found is not None and found[1] >= row.version:
            return False
        old = None if found is None or found[2] is None else _Old(found[0], (found[2], found[3], found[4]))
        document = row.document
        if document is None:
            self._db.execute(_REPLACE, (row.key, row.version, *(None,) * 7)).fetchall()
            self._index(old, None, None)
            return True
        new = (document.title, self._anchor_words(document), document.text)
        lists = msgpack.packb((document.anchors, document.duplicates))
        values = (row.key, row.version, document.url, *new, document.rank, _popularity(document.rank), lists)
        ((number,),) = self._db.execute(_REPLACE, values).fetchall()
        self._index(old, number, new)
        return True

    def forget(self, before: int) -> int:
        """Remove the rows of documents that were deleted before this version; returns how many. Call it only when no
        export below this version can arrive any more: such an export would bring a deleted document back."""
        with _told("the export failed"), self._transaction("IMMEDIATE"):
            return self._db.execute("DELETE FROM pages WHERE title IS NULL AND version < ?", (before,)).rowcount

    def _index(self, old: "_Old | None", number: int | None, new: _Words | None) -> None:
        """Replace the old words in the full text with the new ones. The full text keeps no copy, so it needs both."""
        if old is not None and old.words == new:
            return
        if old is not None:
            self._db.execute(
                "INSERT INTO words (words, rowid, title, anchors, body) VALUES ('delete', ?, ?, ?, ?)",
                (old.number, *old.words),
            )
        if new is not None:
            self._db.execute("INSERT INTO words (rowid, title, anchors, body) VALUES (?, ?, ?, ?)", (number, *new))

    def _anchor_words(self, document: Document) -> str:
        """The distinct texts of the links: a text counts once, however many links have it."""
        distinct = dict.fromkeys(text for _, text in document.anchors if text)
        return "\n".join(distinct)[: self._options.anchor_words_chars_max]

    # ----------------------------------------------------------------------------------------- reading

    def search(self, query: str, limit: int = 10, marks: tuple[str, str] = ("[", "]")) -> list[Hit]:
        """The documents that have all the words of the query, the best first: words and rank both count.

        A query consists of words only: operators and quotes have no meaning. Words joined by punctuation, such as
        asyncio.Future, must occur next to each other, in that order. EmptyQueryError if there is no word in the query.
        In a snippet, the words that were found are enclosed in `marks`.
        """
        phrases = self._phrases(query)
        weights = (TITLE_WEIGHT, ANCHORS_WEIGHT, TEXT_WEIGHT, self._options.rank_weight)
        wanted = max(0, min(limit, HITS_MAX))
        # One transaction, so that the snippets match the hits, even if another process writes meanwhile.
        with _told("the search failed"), self._transaction("DEFERRED"):
            found = self._db.execute(_FIND, (*weights, phrases, wanted)).fetchall()
            hits = []
            for number, url, title, rank, lists, score in found:
                anchors, duplicates = _unpacked(lists)
                snippet = self._snippet(number, phrases, marks)
                hits.append(Hit(url, title, snippet, -score, rank, duplicates, anchors))
            return hits

    def _phrases(self, query: str) -> str:
        """The query in the language of FTS5: every word quoted, so that none is mistaken for syntax."""
        # Lone surrogates have no UTF-8 form, and a NUL would end the query.
        cut = query[:QUERY_CHARS_MAX]
        clean = cut.encode("utf-8", "replace").decode().replace("\0", " ").replace('"', " ")
        words = [word for word in clean.split() if any(map(str.isalnum, word))]
        if not words:
            raise EmptyQueryError("type at least one word to search for")
        return " ".join(f'"{word}"' for word in words[:QUERY_WORDS_MAX])

    def _snippet(self, number: int, phrases: str, marks: tuple[str, str]) -> str:
        row = self._db.execute(_SNIPPET, (*marks, SNIPPET_WORDS, phrases, number)).fetchone()
        return str(row[0])

    def get(self, url: str) -> Document | None:
        """The document whose canonical page has this URL."""
        row = self._db.execute(f"SELECT {_WHOLE} FROM documents WHERE url = ?", (url,)).fetchone()
        return None if row is None else _document(row)

    def version(self, key: str) -> int | None:
        """The version last stored for a key, even if it is a deletion; None if the key is unknown."""
        row = self._db.execute("SELECT version FROM pages WHERE key = ?", (key,)).fetchone()
        return None if row is None else int(row[0])

    def count(self) -> int:
        """The number of documents, without deleted ones."""
        return int(self._db.execute("SELECT count(*) FROM documents").fetchone()[0])

    def documents(self) -> Iterator[Document]:
        """All documents in the order of their URLs. They are read in pieces: an export between two of them is seen."""
        after = ("", "")
        while True:
            rows = self._db.execute(
                f"SELECT {_WHOLE}, key FROM documents WHERE (url, key) > (?, ?) ORDER BY url, key LIMIT ?",
                (*after, _DOCUMENTS_PER_READ),
            ).fetchall()
            yield from map(_document, rows)
            if len(rows) < _DOCUMENTS_PER_READ:
                return
            after = rows[-1][0], rows[-1][-1]

    def digest(self) -> str:
        """Equal to `batch.digest` of the same documents."""
        with _told("the search index could not be read"), self._transaction("DEFERRED"):
            return digest_in_order(self.documents())

    def check(self) -> None:
        """Read the whole file; SearchIndexError if its parts do not fit together."""
        with _told("the search index is damaged"):
            (found,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
            self._db.execute("INSERT INTO words (words, rank) VALUES ('integrity-check', 1)")
        if found != "ok":
            raise SearchIndexError(f"the search index is damaged: {found}")


@dataclass(frozen=True, slots=True)
class _Old:
    number: int
    words: _Words


def _check(row: ExportRow) -> None:
    if not row.key:
        raise ValueError("a row needs a key")
    if not 0 <= row.version <= VERSION_MAX:
        raise ValueError(f"{row.key}: version {row.version} is not in 0 .. {VERSION_MAX}")
    if row.document is not None and not row.document.url:
        raise ValueError(f"the row of {row.key} holds a document without a URL")


def _popularity(rank: float) -> float:
    """The popularity of a page: it grows by 1 each time that one plus the rank doubles."""
    return math.log2(1 + max(rank, 0.0))


_WHOLE = "url, title, body, rank, lists"


def _document(row: tuple[str, str, str, float, bytes]) -> Document:
    url, title, text, rank, lists = row[:5]
    anchors, duplicates = _unpacked(lists)
    return Document(url, title, text, anchors, duplicates, rank)


def _unpacked(lists: bytes) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    anchors, duplicates = msgpack.unpackb(lists, use_list=False)
    return anchors, duplicates
