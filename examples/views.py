"""Derived tables that are declared once: an index of words, totals by word, and the pages of each author.

    python examples/views.py [FOLDER]

Kill it at any moment and start it again: it goes on with the next changes.

What to look at:

- The functions say what the tables are. They remember nothing, compare nothing and delete nothing; perco writes the
  difference from what the last run gave.
- `totals` keeps a sum and the three largest members, so a change costs the same for a word on ten pages and for one on
  a million.
- `by author` groups by a value. If a page gets another author, it leaves one group and enters another.
- The last lines compute all tables from scratch, and compare. `perco views check examples.views:shelf --store
  example-views` does the same at any time, and `perco views explain examples.views:shelf` says what a change costs.
"""

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio

import perco
from perco import views

WORDS = (
    "all",
    "and",
    "be",
    "by",
    "for",
    "from",
    "in",
    "it",
    "light",
    "night",
    "not",
    "of",
    "on",
    "sea",
    "the",
    "to",
    "was",
)
AUTHORS = ("ann", "bea", "cem", None)
CHANGES, WRITERS, PAGES = 400, 8, 60

pages = perco.Table("pages", key=perco.TEXT)
text = pages.column("text", perco.TEXT)
author = pages.column("author", perco.TEXT)

postings = perco.Table("postings", key=perco.Tuple(perco.TEXT, perco.TEXT))  # (word, page)
times = postings.column("times", perco.INT64)

words = perco.Table("words", key=perco.TEXT)
total = words.column("total", perco.INT64)
most = words.column("most", perco.JSON)  # [[page, times], ...]

authors = perco.Table("authors", key=perco.TEXT)
wrote = authors.column("wrote", perco.JSON)  # [page, ...]

changed = perco.Table("changed", key=perco.INT64)  # how far the program has come
last = changed.column("last", perco.INT64)

shelf = views.Views(perco.Schema(pages, postings, words, authors, changed))


@shelf.each(text, id="index", into=postings)
def index(page: perco.Row[str]) -> Iterator[views.Put[Any]]:
    for word, n in Counter((page[text] or "").split()).items():
        yield views.Put(postings, (word, page.key), {times: n})


@shelf.group(times, id="totals", by=views.prefix(1), into=words, keep=[views.sum(times), views.largest(times, 3)])
def totals(word: str, rows: views.Group[tuple[str, str]]) -> Iterator[views.Put[Any]]:
    top = [[page, n] for (_, page), n in rows.largest(times, 3)]
    yield views.Put(words, word, {total: rows.sum(times), most: top})


@shelf.group(author, id="by author", by=lambda page: page[author], into=authors)
def by_author(name: str, rows: views.Group[str]) -> Iterator[views.Put[Any]]:
    yield views.Put(authors, name, {wrote: [page.key for page in rows]})


async def change(txn: perco.Transaction, number: int) -> None:
    """Change or delete a page; the same one each time that it is called with this number."""
    rng = random.Random(number)
    key = f"page {rng.randrange(PAGES)}"
    txn.set(last, number % WRITERS, number)
    if rng.random() < 0.2:
        txn.delete(text, key)
        txn.delete(author, key)
        return
    txn.set(text, key, " ".join(rng.choices(WORDS, k=rng.randrange(1, 12))))
    name = rng.choice(AUTHORS)
    if name is None:
        txn.delete(author, key)
    else:
        txn.set(author, key, name)


async def main(folder: Path) -> None:
    async with perco.open(folder, shelf.schema) as db, db.worker():
        async with db.snapshot() as snap:
            done = [row.get(last, 0) async for row in snap.scan(changed)]
        numbers = iter(range(max(done, default=-1) + 1, max(done, default=-1) + 1 + CHANGES))

        async def writer() -> None:
            for number in numbers:  # all writers take from the same pile
                await db.run(change, number)

        async with trio.open_nursery() as nursery:
            for _ in range(WRITERS):
                nursery.start_soon(writer)
        await db.wait_idle()
        async with db.snapshot() as snap:
            found = await snap.scan(words).all()
            for row in sorted(found, key=lambda row: -row.get(total, 0))[:5]:
                print(f"{row.key:6} {row.get(total, 0):4}  mostly on {row[most]}")
            async for by in snap.scan(authors, columns=[wrote]):
                print(f"{by.key} wrote {len(by.get(wrote, []))} pages")
            checked = await views.check(shelf, snap)
        print(f"{sum(checked.rows.values())} rows, {checked.count} differ from what the definition makes of the pages")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("example-views"), metavar="FOLDER")
    try:
        trio.run(main, parser.parse_args().folder)
    except* KeyboardInterrupt:
        print("stopped; start it again to continue")
