"""A store with a bit of everything in it, and a way to write raw cells into it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing
from trio.testing import wait_all_tasks_blocked

import perco
from perco.check.check import CheckOptions, CheckResult, check
from perco.check.repair import RepairResult, repair, repair_elsewhere
from perco.check.system import Groups, groups_of
from perco.clock.heartbeat import LEASE_ROW
from perco.clock.oracle import CLOCK_ROW, OracleOptions
from perco.database.database import Database
from perco.database.inside import close, inside, local_owner
from perco.protocol.mutations import Header, Intent, prewrite
from perco.protocol.records import PUT, Cellref, ack_of
from perco.schema.catalogue import SYSTEM_TABLE
from perco.serve.client import open_served
from perco.serve.server import Server
from perco.storage import APPLIED, Mutation, ScanQuery, ScanRequest, Write
from tests.component.serve.kit import WIRE
from tests.support.places import local_of

LONG = b"x" * 5000
# Small enough that rows are read in parts and pages end everywhere.
PARTS = CheckOptions(row_cells=2, data_cells=2, pause_s=0.0)


class Docs:
    """Three tablets; `contents` has a group of its own and an observer, `rank` has neither."""

    def __init__(self, *, observe: bool = True, backfill: bool = True, keep_s: float = 3600.0) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
        self.contents = self.docs.column("contents", perco.BYTES, group="raw")
        self.rank = self.docs.column("rank", perco.INT64)
        self.note = self.docs.column("note", perco.BYTES)
        self.words = perco.Table("words", key=perco.Tuple(perco.TEXT, perco.INT64))
        self.count = self.words.column("count", perco.INT64)
        self.schema = perco.Schema(self.docs, self.words, keep=perco.Keep(seconds=keep_s))
        self.fails = False
        if observe:
            self.schema.observe(self.contents, id="parse", backfill=backfill)(self.parse)

    async def parse(self, txn: perco.Transaction, change: perco.Change[str, bytes]) -> None:
        if self.fails:
            raise ValueError("asked to fail")
        txn.set(self.rank, change.key, len(change.value or b""))
        txn.set(self.count, (change.key, 1), 1)


class Store:
    """An open database and its raw cells."""

    where = "owner"  # or "client": who checks and repairs

    def __init__(self, db: perco.Database, docs: Docs) -> None:
        self.db, self.docs = db, docs

    def number(self, column: perco.Column[Any, Any]) -> int:
        return inside(self.db).known.bind(column).column

    @property
    def ack(self) -> int:
        [number] = inside(self.db).known.bind(self.docs.contents).observers
        return ack_of(self.number(self.docs.contents), number)

    async def plant(self, row: bytes, *writes: Write, table: str = "docs") -> None:
        [verdict] = await inside(self.db).driver.store.apply([Mutation(table, ((row, (), writes),))])
        assert verdict is APPLIED

    async def draw(self) -> int:
        return await inside(self.db).oracle.draw()

    async def lock(self, start_ts: int, primary: tuple[bytes, int], *cells: tuple[bytes, int]) -> None:
        """Prewrite cells of `docs` as a transaction would, and leave it at that."""
        header = Header(start_ts, Cellref("docs", *primary), 0, 0, "token")
        for row, column in cells:
            part = [Intent("docs", row, column, PUT, b"v")]
            [verdict] = await inside(self.db).driver.store.apply([prewrite(header, part, again=False)])
            assert verdict is APPLIED

    async def check(self, options: CheckOptions | None = None) -> CheckResult:
        db, chosen = self.db, options or CheckOptions(pause_s=0.0)
        if self.where == "client":
            async with self.client() as other:
                return await check(
                    local_of(other).store, ts=inside(db).oracle.last, options=chosen, groups=self._groups
                )
        return await check(
            inside(db).driver.store, ts=inside(db).oracle.last, alive=inside(db).fates.alive, options=chosen
        )

    async def repair(self, options: CheckOptions | None = None) -> RepairResult:
        db = self.db
        chosen = options or CheckOptions(pause_s=0.0)
        if self.where == "client":
            async with self.client() as other:
                return await repair_elsewhere(
                    inside(other).driver,
                    local_of(other).store,
                    ts=inside(db).oracle.last,
                    options=chosen,
                    groups=self._groups,
                )
        return await repair(inside(db).driver, local_of(db).store, ts=inside(db).oracle.last, options=chosen)

    async def _groups(self) -> list[Groups]:
        return groups_of(local_of(self.db).store)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Database]:
        """Another process, which asks the owner."""
        server = Server(self.db, WIRE)

        async def connect(number: int, port: int) -> trio.abc.Stream:
            ours, theirs = trio.testing.memory_stream_pair()
            nursery.start_soon(server.connection, theirs, None)
            return ours

        async with trio.open_nursery() as nursery, server.keeping():
            db = await open_served("the owner", connect, None, perco.Options(wire=WIRE), WIRE, b"")
            try:
                yield db
            finally:
                await close(db)

    async def cells(self) -> dict[tuple[str, str, bytes, int, int], bytes]:
        """Every cell of every group of every table, as it is stored, but for what an open store writes by itself: the
        notes of the clock, and, from a thread, a folder's heartbeat."""
        found = {}
        for tablet in local_of(self.db).store.tablets():
            for group in tablet.groups():
                page = tablet.scan(
                    ScanRequest(tablet.table, b"", None, (ScanQuery(group, None, n=1 << 30),), rows_max=1 << 30)
                )
                assert page.next is None
                for row, [cells] in page.rows:
                    if tablet.table != SYSTEM_TABLE or row not in (CLOCK_ROW, LEASE_ROW):
                        found |= {(tablet.table, group, row, column, ts): value for column, ts, value in cells}
        return found


@asynccontextmanager
async def opened(
    url: str | os.PathLike[str] = "memory:", docs: Docs | None = None, *, range_size: int = 100_000
) -> AsyncIterator[Store]:
    docs = docs or Docs()
    options = perco.Options(seed=7, oracle=OracleOptions(range_size=range_size))
    async with perco.open(url, docs.schema, options=options) as db:
        while not local_owner(db).sweeper.clean:  # so that it has nothing to do with what a test leaves behind
            await local_owner(db).idle.changed()
        yield Store(db, docs)


async def fill(store: Store) -> None:
    """Short and long values, overwrites, deletes, several tablets, acks, and changes that still wait."""
    db, docs = store.db, store.docs
    for round in range(3):
        async with db.transaction() as txn:
            for key in ("a", "b", "k", "z"):
                txn.set(docs.contents, key, LONG + bytes([round]))
                txn.set(docs.note, key, bytes([round]))
        await wait_all_tasks_blocked()  # phase two
        async with db.transaction() as txn:
            txn.set(docs.note, "b", LONG)
            txn.delete(docs.note, "z")
        await wait_all_tasks_blocked()
        async with db.worker(concurrency=4, scanners=1):
            await db.wait_idle()
    async with db.transaction() as txn:
        txn.delete(docs.contents, "k")
    async with db.worker(concurrency=4, scanners=1):
        await db.wait_idle()
    async with db.transaction() as txn:
        txn.set(docs.contents, "a", b"short and not parsed yet")
