"""The documents, the pure function, and what the batch computation gives. It needs only Python.

A document has one to three paragraphs. The function gives a row for each: its number, how many words it has, and a
hashed embedding. An edit writes a new document in the place of the old one, so rows come, change and go.
"""

from __future__ import annotations

import math
import os
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

WORDS: Final = [f"w{zlib.crc32(str(i).encode()) % 100_000}" for i in range(5000)]
SIZES: Final = (20, 40)  # of a paragraph, in words
DIMENSIONS: Final = 16
IN_FOLDER: Final = 1000  # files


class Chunk(NamedTuple):
    """A derived row of a document."""

    n: int
    words: int
    vector: str


def key_of(number: int) -> str:
    """The key of a document: the path of its file."""
    return f"{number // IN_FOLDER:04}/{number:07}.txt"


def text_of(number: int, revision: int = 0) -> str:
    """The document with this number; `revision`: how often it was edited."""
    rng = random.Random(number * 1000 + revision)
    return "\n\n".join(" ".join(rng.choices(WORDS, k=rng.randint(*SIZES))) for _ in range(rng.randint(1, 3)))


def derive(text: str, version: int) -> list[Chunk]:
    """The pure function. Another `version` gives other embeddings."""
    return [Chunk(n, *_embedded(paragraph, version)) for n, paragraph in enumerate(text.split("\n\n"))]


def _embedded(paragraph: str, version: int) -> tuple[int, str]:
    """How many words, and a unit vector: each word adds or takes one from the dimension that its hash names."""
    vector, words = [0] * DIMENSIONS, paragraph.split()
    for word in words:
        hashed = zlib.crc32(word.encode(), version)
        vector[hashed % DIMENSIONS] += 1 if hashed & 0x10000 else -1
    length = math.sqrt(sum(value * value for value in vector)) or 1.0
    return len(words), bytes(128 + round(127 * value / length) for value in vector).hex()


class Corpus:
    """The documents as they are now. `revisions`: of those that were edited."""

    def __init__(self, documents: int, revisions: Mapping[int, int] | None = None) -> None:
        self.documents = documents
        self.revisions = dict(revisions or {})

    def text(self, number: int) -> str:
        return text_of(number, self.revisions.get(number, 0))

    def edit(self, number: int) -> str:
        """Edit a document. Returns its text."""
        self.revisions[number] = self.revisions.get(number, 0) + 1
        return self.text(number)

    def texts(self, start: int = 0) -> Iterator[tuple[str, str]]:
        """(key, text) of the documents from this number on, by their keys."""
        for number in range(start, self.documents):
            yield key_of(number), self.text(number)

    def rows(self, version: int) -> Iterator[tuple[str, Chunk]]:
        """The result of the batch computation, by keys and numbers."""
        for key, text in self.texts():
            for chunk in derive(text, version):
                yield key, chunk


def write_files(corpus: Corpus, folder: Path) -> None:
    """Write the documents as files."""
    for number in range(0, corpus.documents, IN_FOLDER):
        (folder / key_of(number)).parent.mkdir(parents=True, exist_ok=True)
    for key, text in corpus.texts():
        (folder / key).write_text(text)


def replace_file(folder: Path, key: str, text: str) -> None:
    """Put a new file in the place of the old one, at once; the temporary one lies beside the folder."""
    temporary = folder.parent / "edited.txt"
    temporary.write_text(text)
    os.replace(temporary, folder / key)


class Compared(NamedTuple):
    """How a derived table differs from the batch result; `example`: the first difference, or ""."""

    rows: int
    missing: int
    stray: int
    stale: int
    example: str

    @property
    def equal(self) -> bool:
        return not (self.missing or self.stray or self.stale)

    def __str__(self) -> str:
        if self.equal:
            return "equal"
        return f"{self.missing} missing, {self.stray} stray, {self.stale} stale of {self.rows} rows: {self.example}"


def compare(found: Iterable[tuple[str, Chunk]], wanted: Iterable[tuple[str, Chunk]]) -> Compared:
    """Compare two tables that are sorted by keys and numbers, in one pass.

    A row is missing, stray (the batch result has none), or stale (it has another).
    """
    mine, theirs = iter(found), iter(wanted)
    have, want = next(mine, None), next(theirs, None)
    counts, rows, example = {"missing": 0, "stray": 0, "stale": 0}, 0, ""
    while have is not None or want is not None:
        have_at, want_at = (None if row is None else (row[0], row[1].n) for row in (have, want))
        what = ""
        if have_at is None or (want_at is not None and want_at < have_at):
            what = "missing"
        elif want_at is None or have_at < want_at:
            what = "stray"
        elif have != want:
            what = "stale"
        if what:
            counts[what] += 1
            example = example or f"{what}: {want if what == 'missing' else have}"
        if what != "stray":
            want, rows = next(theirs, None), rows + 1
        if what != "missing":
            have = next(mine, None)
    return Compared(rows, counts["missing"], counts["stray"], counts["stale"], example)
