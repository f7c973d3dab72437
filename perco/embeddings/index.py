"""Views that keep the vectors of texts up to date, chunk by chunk, and search them.

    texts.text --chunk--> chunks (text, hash of the chunk): headings, words, vector
    chunks     --vectors--> a SQLite table, which finds the nearest vectors

A chunk's key is its hash. So an edit above a chunk does not touch it, and one that moves to another text keeps
its vector, because `embed` is a cached function: it gets each text once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import trio

import perco
from perco.embeddings import hashed
from perco.embeddings.chunks import CHARS_MAX, Chunk, split
from perco.views import Put, VectorTable, Views

Embed: TypeAlias = Callable[[list[str]], Sequence[bytes | Sequence[float]]]
"""Returns a vector for each text: numbers, or 32-bit numbers as bytes; the same length for each."""


class Passage(NamedTuple):
    """A chunk that was found.

    Attributes:
        name: the key of its text.
        likeness: of its vector and that of the question: their cosine, from -1 to 1.
    """

    name: str
    headings: str
    words: str
    likeness: float


class EmbeddingIndex:
    """Texts, and a search for the passages that are nearest to a question.

        index = EmbeddingIndex("notes")
        async with perco.open(index.store, index.schema) as db, db.worker():
            await db.run(write)                    # txn.set(index.text, "plans.md", "...")
            await db.wait_idle()
            for passage in await index.search("when do we ship?"):
                ...

    Args:
        folder: gets the store, and the file with the vectors.
        embed: a model. By default, `perco.embeddings.embed`, which hashes words.
        batch, threads: how many chunks a call of `embed` gets at most, and how many calls run at a time.
        chars_max: the length of a chunk.
        version: raise it when `embed` or `chars_max` changes: all vectors are then computed again.

    Attributes:
        store: where to open the store.
        schema: open it with this.
        text: the column of the texts, by their names.
        views: for `views.check` and the like.
        embedded: how many chunks this process has had embedded.
    """

    store: Path
    schema: perco.Schema
    text: perco.Column[str, str]
    views: Views
    embedded: int

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        embed: Embed = hashed.embed,
        batch: int = 64,
        threads: int = 1,
        chars_max: int = CHARS_MAX,
        version: int = 1,
    ) -> None:
        self.store = Path(folder) / "store"
        self.embedded = 0
        texts: perco.Table[str] = perco.Table("texts", key=perco.TEXT)
        self.text = text = texts.column("text", perco.TEXT)
        chunks: perco.Table[Any] = perco.Table("chunks", key=perco.Tuple(perco.TEXT, perco.BYTES))
        headings = chunks.column("headings", perco.TEXT)
        words, vector = chunks.column("words", perco.TEXT), chunks.column("vector", perco.BYTES)
        self.views = v = Views(perco.Schema(texts, chunks))
        self.schema = v.schema
        self._embed, self._table = embed, chunks

        def vectors(some: list[str]) -> list[bytes]:
            found = list(embed(some))
            self.embedded += len(some)
            return [each if isinstance(each, bytes) else array("f", each).tobytes() for each in found]

        cached = v.cached(id="embed", gives=perco.BYTES, batch=batch, threads=threads, version=version)(vectors)

        @v.each(text, id="chunk", into=chunks, version=version)
        def chunk(row: perco.Row[str]) -> Iterable[Put[Any]]:
            for found in dict.fromkeys(split(row[text] or "", chars_max)):  # the same paragraph may come twice
                value = cached(_whole(found))
                yield Put(
                    chunks,
                    (row.key, _key(found)),
                    {headings: found.headings or None, words: found.words, vector: value},
                )

        self._found = VectorTable(Path(folder) / "vectors.db", vector="vector", key=["text", "hash"])
        v.sink(vector, words, headings, id="vectors", to=self._found, version=version)

    async def search(self, question: str, k: int = 5) -> list[Passage]:
        """The passages nearest to a question, the nearest first, as of the last deliveries. The store may be closed.

        Raises: StoreError if there is no index yet; UsageError if its vectors have another length than those of
        `embed`; what `embed` raises.
        """
        return await trio.to_thread.run_sync(self.search_blocking, question, k)

    def search_blocking(self, question: str, k: int = 5) -> list[Passage]:
        """`search` for blocking code. Raises: as `search`."""
        if not Path(self._found.path).exists():
            raise perco.StoreError(f"there are no vectors in {Path(self._found.path).parent}: index some texts first")
        [vector] = self._embed([question])
        return [
            Passage(hit.key[0], hit.values.get("headings", ""), hit.values.get("words", ""), hit.likeness)
            for hit in self._found.search(vector, k)
        ]

    def count(self) -> int:
        """The number of passages that a search may find; 0 if there is no index yet."""
        return self._found.count() if Path(self._found.path).exists() else 0

    def close(self) -> None:
        """Close the file with the vectors. The next search opens it again."""
        self._found.close()


def _key(chunk: Chunk) -> bytes:
    return blake2b(f"{chunk.headings}\n{chunk.words}".encode(), digest_size=16).digest()


def _whole(chunk: Chunk) -> str:
    return f"{chunk.headings}\n\n{chunk.words}" if chunk.headings else chunk.words
