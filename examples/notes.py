"""A semantic index over a folder of notes, kept up to date file by file: paragraphs, vectors, and a SQLite table.

    python examples/notes.py [FOLDER] [--notes DIR] [--ask QUESTION] [--watch]

Without --notes, it indexes this project's documentation. With --watch, it goes on, and follows what you edit, rename
and delete. Kill it at any moment and start it again: it reads and embeds only what is new.

What to look at:

- `Folder` keeps the table `files` equal to the folder. A pass over a folder that has not changed reads no file.
- `split` says which paragraphs a file has. If you edit one paragraph, perco writes this one, and no other.
- `embed` is a cached function: it gets up to 64 paragraphs a call, in a thread, and its results are stored. A paragraph
  that has moved to another file is not embedded again. Put a model, or a service that costs money, in its place.
- `sink` keeps a table in a SQLite file, for programs that know nothing of perco.
- The last line compares the paragraphs, and the SQLite table, with what the files say.
"""

import argparse
import hashlib
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import trio

import perco
from perco import sources, views

DIMENSIONS, HITS = 512, 3
DOCS = Path(__file__).resolve().parent.parent / "docs"

files = perco.Table("files", key=perco.TEXT)
text = files.column("text", perco.TEXT)

paragraphs = perco.Table("paragraphs", key=perco.Tuple(perco.TEXT, perco.INT64))  # (file, number)
words = paragraphs.column("words", perco.TEXT)
vector = paragraphs.column("vector", perco.BYTES)

notes = views.Views(perco.Schema(files, paragraphs))
calls = [0, 0]  # of `embed`, and how many paragraphs they had


@notes.cached(id="embed", gives=perco.BYTES, batch=64, threads=1)
def embed(some: Sequence[str]) -> list[bytes]:
    calls[0], calls[1] = calls[0] + 1, calls[1] + len(some)
    return [array("f", embedded(each)).tobytes() for each in some]


@notes.each(text, id="split", into=paragraphs)
def split(file: perco.Row[str]) -> Iterator[views.Put[Any]]:
    blocks = [block.strip() for block in (file[text] or "").split("\n\n")]
    for number, block in enumerate(block for block in blocks if len(block) > 40):
        yield views.Put(paragraphs, (file.key, number), {words: block, vector: embed(block)})


def embedded(words: str) -> list[float]:
    """A stand-in for a model: the beginning of each longer word counts at a place that its hash says."""
    found = [0.0] * DIMENSIONS
    for stem in {word[:6] for word in re.findall(r"\w{4,}", words.lower())}:
        place = int.from_bytes(hashlib.blake2b(stem.encode(), digest_size=4).digest(), "big")
        found[place % DIMENSIONS] += 1.0 if place & 1 << 31 else -1.0
    length = math.sqrt(sum(each * each for each in found)) or 1.0
    return [each / length for each in found]


async def nearest(db: perco.Database, question: str) -> list[tuple[float, tuple[str, int], str]]:
    """The paragraphs most like a question: (likeness, key, text). A vector index would do the same for millions."""
    wanted, hits = embedded(question), []
    async with db.snapshot() as snap:
        async for row in snap.scan(paragraphs):
            there = array("f", row.get(vector, b""))
            hits.append((sum(map(float.__mul__, wanted, there)), row.key, row.get(words, "")))
    return sorted(hits, reverse=True)[:HITS]


def told(synced: sources.Synced) -> None:
    if synced.anything or synced.skipped:
        print(f"{synced.added} files new, {synced.changed} changed, {synced.removed} gone; {synced.same} the same")
    for each in synced.skipped:
        print(f"  left out {each.key}: {each.reason}")


async def main(folder: Path, at: Path, question: str, watch: bool) -> None:
    notes.sink(words, id="export", to=views.SqliteTable(folder.with_suffix(".db"), key=("file", "number")))
    source = sources.Folder(at, text, match=["*.md", "*.txt"])
    async with perco.open(folder, notes.schema) as db, db.worker():
        told(await source.sync(db))
        await db.wait_idle()
        print(f"{calls[1]} paragraphs embedded in {calls[0]} calls")
        for likeness, (file, number), block in await nearest(db, question):
            print(f"{likeness:.2f}  {file}, paragraph {number}: {' '.join(block.split())[:90]}")
        async with db.snapshot() as snap:
            checked = await views.check(notes, snap)
        print(f"{sum(checked.rows.values())} rows, {checked.count} differ from what the definition makes of the files")
        if watch:
            await source.watch(db, told=told)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("example-notes"), metavar="FOLDER")
    parser.add_argument("--notes", type=Path, default=DOCS, metavar="DIR", help="the folder that is indexed")
    parser.add_argument("--ask", default="how does a vacuum remove old versions?", metavar="QUESTION")
    parser.add_argument("--watch", action="store_true", help="go on, and follow the folder")
    given = parser.parse_args()
    try:
        trio.run(main, given.folder, given.notes, given.ask, given.watch)
    except* KeyboardInterrupt:
        print("stopped; start it again to continue")
