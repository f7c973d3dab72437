"""Views that are swept: a row is retracted and another one given, while the process dies, or messages are lost.

In the end, the tables of the views are what the batch build makes of the sources (V7).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import trio

import perco
from perco import views
from perco.database.database import Database
from perco.errors import CommitUnknown
from perco.notify.options import WorkerOptions
from perco.testing.sweep import Scenario, observe
from perco.txn.transaction import Transaction


class Viewing(Scenario):
    """Pages with words and authors, and names of authors; `declare` adds the views."""

    changes: ClassVar[tuple[tuple[str, str, str | None], ...]]
    """The writes of the first process: (column, row, value); None: deleted."""

    def __init__(self) -> None:
        self.pages, self.people = perco.Table("pages", key=perco.TEXT), perco.Table("people", key=perco.TEXT)
        self.text, self.author = self.pages.column("text", perco.TEXT), self.pages.column("author", perco.TEXT)
        self.name_of = self.people.column("name", perco.TEXT)
        self.words = perco.Table("words", key=perco.Tuple(perco.TEXT, perco.TEXT), splits=[("m", "")])
        self.n = self.words.column("n", perco.INT64)
        self.totals = perco.Table("totals", key=perco.TEXT)
        self.total = self.totals.column("total", perco.INT64)
        self.lines = perco.Table("lines", key=perco.TEXT)
        self.line = self.lines.column("line", perco.TEXT)
        self.shelf = views.Views(perco.Schema(self.pages, self.people, self.words, self.totals, self.lines))
        self.declare()
        # A fingerprint of the functions would be computed anew whenever a process opens the store.
        self.shelf._codes.update(dict.fromkeys(self.shelf.declared, "0" * 32))
        self.schema = self.shelf.schema

    def declare(self) -> None:
        raise NotImplementedError

    async def write(self, db: Database, *changes: tuple[str, str, str | None]) -> None:
        columns = {"text": self.text, "author": self.author, "name": self.name_of}

        async def once(txn: Transaction) -> None:
            for column, row, value in changes:
                if value is None:
                    txn.delete(columns[column], row)
                else:
                    txn.set(columns[column], row, value)

        with contextlib.suppress(CommitUnknown):
            await db.run(once)

    async def prepare(self, db: Database) -> None:
        await self.write(db, ("text", "p", "a z"), ("author", "p", "ann"), ("name", "ann", "Ann"))
        async with db.worker(options=WorkerOptions(concurrency=2, scanners=1)):
            while any((await db.waiting()).values()):  # noqa: ASYNC110 - without a sweeper, the store does not become idle
                await trio.sleep(0.01)

    async def first(self, db: Database) -> None:
        await self.write(db, *self.changes)
        await observe(db)

    async def later(self, db: Database) -> None:
        await self.write(db, ("text", "q", "z"))
        await observe(db)

    async def verify(self, db: Database) -> None:
        assert await db.is_idle(), "N7"
        async with db.snapshot() as snap:
            checked = await views.check(self.shelf, snap)
            assert checked.equal, f"V7: {checked.differences}"
            assert len(await snap.scan(self.pages).all()) >= 1

    def index(self) -> None:
        @self.shelf.each(self.text, id="index", into=self.words)
        def index(page: perco.Row[str]) -> Iterator[views.Put[Any]]:
            for word in sorted(set((page[self.text] or "").split())):
                yield views.Put(self.words, (word, page.key), {self.n: 1})


class Grouped(Viewing):
    """A word of the page goes, and another one comes: two groups change (V1, V3, V4)."""

    name = "views, each and group"
    changes = (("text", "p", "b z"),)

    def declare(self) -> None:
        self.index()

        @self.shelf.group(self.n, id="totals", by=views.prefix(1), into=self.totals, keep=[views.sum(self.n)])
        def totals(word: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
            yield views.Put(self.totals, word, {self.total: rows.sum(self.n)})


class GroupedInPlace(Viewing):
    """The page goes: the view of the groups reads the words in place, and a run tells it itself (V12)."""

    name = "views, read in place"
    changes = (("text", "p", None), ("author", "p", "bob"))

    def declare(self) -> None:
        self.index()

        @self.shelf.group(self.n, id="totals", by=views.prefix(1), into=self.totals)
        def totals(word: str, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
            yield views.Put(self.totals, word, {self.total: len(list(rows))})


class JoinedViews(Viewing):
    """The left row and its match change in transactions of their own (V8)."""

    name = "views, join"
    changes = (("author", "p", "bob"),)

    def declare(self) -> None:
        @self.shelf.join(
            self.author, self.name_of, id="lines", on=lambda page: page[self.author], into=self.lines, how="left"
        )
        def lines(page: perco.Row[str], person: perco.Row[str] | None) -> Iterator[views.Put[Any]]:
            name = "nobody" if person is None else person[self.name_of]
            yield views.Put(self.lines, page.key, {self.line: f"{page[self.author]} is {name}"})

    async def first(self, db: Database) -> None:
        await self.write(db, ("name", "bob", "Bob"))
        await super().first(db)

    async def later(self, db: Database) -> None:
        await self.write(db, ("name", "bob", None))
        await super().later(db)


class CachedViews(Viewing):
    """A value of a slow function is stored before the row that has it (V9, V10)."""

    name = "views, cached"
    changes = (("text", "p", "b"),)

    def declare(self) -> None:
        @self.shelf.cached(id="shout", gives=perco.TEXT, threads=0)
        def shout(words: list[str]) -> list[str]:
            return [f"{word}!" for word in words]

        @self.shelf.each(self.text, id="lines", into=self.lines)
        def lines(page: perco.Row[str]) -> Iterator[views.Put[Any]]:
            if page[self.text]:
                yield views.Put(self.lines, page.key, {self.line: shout(page[self.text])})


class GroupedInOneStep(Grouped):
    name = "views, one step"
    one_step = True


VIEWS: list[type[Scenario]] = [Grouped, GroupedInPlace, JoinedViews, CachedViews, GroupedInOneStep]
