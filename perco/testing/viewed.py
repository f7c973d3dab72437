"""Views in a simulated run: the workload "views".

The program declares a small random graph of views (`graphs.py`), and clients write its sources. When the run has come
to rest, the tables of the views are what the batch build makes of the sources (V1 to V10, V12, V13, V7).

Each transaction also writes a new row of the table "marks". One view copies it, another one counts the copies. So what
a client that waits must find is known at every moment:

    after a wait for views, they have counted every mark that was committed before      (V14)
    if no mark is newer than the timestamp that a wait was for, the tables of all       (V7, V14)
    views are what the batch build makes of the sources of the same snapshot

If the program grows (`growth.py`), some of the views get a new version, and one may be dropped while programs with
the former version still run (V15).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from random import Random
from typing import Any, Final

import trio

from perco import views
from perco.database.database import Database
from perco.database.inside import inside
from perco.errors import NotFresh, NotIdle, UsageError
from perco.schema.codecs import INT64, Tuple
from perco.schema.schema import Column, Schema, Table
from perco.testing.graphs import Graph, State
from perco.txn.row import Row
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction

_MOST: Final = 3  # views of a graph, apart from components and cogroups
_DROPS: Final = 0.5  # the share of runs in which a program that has grown has one view fewer
_HUBS: Final = 3  # groups of marks
_WAIT_S: Final = 1.5  # for views, at most
_QUIET_S: Final = 0.8  # for which no client writes sources
_DROP: Final = "the view to drop"


class Viewed:
    """The views of one process. `version`: of the graph."""

    graph: Graph
    version: int
    dropped: str
    mark: Column[int, int]
    copy: Column[tuple[int, int], int]
    count: Column[int, int]

    def __init__(self, seed: int, schema: Schema, version: int) -> None:
        self.version = version
        whole = Graph(seed, most=_MOST)
        rng = Random(f"{seed} {_DROP}")
        self.dropped = rng.choice(sorted(whole.derived)) if version > 1 and rng.random() < _DROPS else ""
        self.graph = Graph(seed, schema=schema, most=_MOST, version=version, without={self.dropped}, split=True)
        marks = Table("marks", key=INT64, splits=[40])
        copies, counts = Table("copies", key=Tuple(INT64, INT64)), Table("counts", key=INT64)
        self.mark, self.copy, self.count = (
            marks.column("mark", INT64),
            copies.column("copy", INT64),
            counts.column("count", INT64),
        )
        shelf = self.graph.views
        for table in (marks, copies, counts):
            shelf.take_up("marks", table)

        @shelf.each(self.mark, id="copies", into=copies)
        def copied(row: Row[Any]) -> Iterator[views.Put[Any]]:
            yield views.Put(copies, (row.key % _HUBS, row.key), {self.copy: row[self.mark]})

        @shelf.group(
            self.copy, id="counts", by=views.prefix(1), into=counts, keep=[views.sum(self.copy)], version=version
        )
        def counted(hub: int, rows: views.Group[Any]) -> Iterator[views.Put[Any]]:
            yield views.Put(counts, hub, {self.count: rows.sum(self.copy)})

        self.graph.fingerprint()
        if self.dropped:  # to drop a view takes the tables that perco keeps for it, in whichever version
            for graph in (whole, Graph(seed, most=_MOST, version=version)):
                for table in graph.views.schema.tables.values():
                    schema.tables.setdefault(table.name, table)

    @property
    def tables(self) -> list[Table[Any]]:
        """Those that may be split."""
        return [*(shape.table for shape in self.graph.sources), *self.graph.derived.values()]

    async def differences(self, snap: Snapshot) -> list[str]:
        """As `Graph.differences`, with the marks."""
        numbers = [row.key async for row in snap.scan(self.mark.table)]
        out = await self.graph.differences(snap)
        counts = {row.key: row[self.count] async for row in snap.scan(self.count.table)}
        right = {hub: n for hub in range(_HUBS) if (n := sum(number % _HUBS == hub for number in numbers))}
        return out if counts == right else [*out, f"V4, V7: {right} marks were counted as {counts}"]


class ViewClients:
    """The errands of a run's clients that concern its views; shared by all processes. `problem` reports a violation.

    Attributes:
        compared, waited: how often all views were compared with the batch build while clients went on, and how many
            waits for a view were completed.
        dropped: how many drops of a view were completed.
    """

    compared: int
    waited: int
    dropped: int

    def __init__(self, seed: int, problem: Callable[[str], None]) -> None:
        self._seed, self._problem = seed, problem
        self._newest = 1  # the highest version that any process has begun with
        self._marks = 0
        self._marked: list[tuple[int, int]] = []  # (commit_ts, number) of marks whose commits were answered
        self._quiet_until = 0.0
        self.compared = self.waited = self.dropped = 0

    @property
    def quiet(self) -> bool:
        """Whether a client compares all views, so that the others leave them alone."""
        return trio.current_time() < self._quiet_until

    def declare(self, schema: Schema, grown: int) -> Viewed:
        """The views of a process that begins, with its version of the program's growth."""
        version = max(1, grown)
        self._newest = max(self._newest, version)
        return Viewed(self._seed, schema, version)

    async def act(
        self,
        db: Database,
        viewed: Viewed,
        rng: Random,
        began: Callable[[AbstractAsyncContextManager[Transaction]], AbstractAsyncContextManager[Transaction]],
    ) -> None:
        """Write some sources in one transaction, or wait for views, or drop one."""
        chance = rng.random()
        if chance < 0.12 and self._marked:
            await self._wait(db, viewed, rng.choice(self._marked[-10:])[0])
        elif chance < 0.18:
            await self._compare(db, viewed)
        elif chance < 0.3 and viewed.dropped:
            await self._drop(db, viewed)
        else:
            await self._write(db, viewed, rng, began)

    async def _write(self, db: Database, viewed: Viewed, rng: Random, began: Any) -> None:
        self._marks += 1
        number = self._marks
        async with began(db.transaction()) as txn:
            for column, key, value in viewed.graph.changes(rng, State()):
                if value is None:
                    txn.delete(column, key)
                else:
                    txn.set(column, key, value)
                if rng.random() < 0.1:
                    await trio.sleep(rng.choice((0.0, 0.003)))
            txn.set(viewed.mark, number, 1)
        self._marked.append((txn.commit_ts, number))

    async def _wait(self, db: Database, viewed: Viewed, ts: int) -> None:
        """V14: every mark up to a timestamp has been counted."""
        try:
            await db.wait_for(ts, views="counts", timeout=_WAIT_S)
        except (NotIdle, NotFresh, UsageError):  # the last: no process runs an observer, for the moment
            return
        self.waited += 1
        async with db.snapshot() as snap:
            counts = await snap.get_many(viewed.count, range(_HUBS))
        for hub in range(_HUBS):
            marks = sum(number % _HUBS == hub for commit_ts, number in self._marked if commit_ts <= ts)
            if (counts[hub] or 0) < marks:
                self._problem(f"V14: after wait_for({ts}), {counts[hub]} of at least {marks} are counted in {hub}")

    async def _compare(self, db: Database, viewed: Viewed) -> None:
        """V7, V14: wait until all views are fresh, while no client writes; compare them with the batch build."""
        if (
            viewed.version < self._newest or viewed.dropped
        ):  # others may give the rows of a view that is not dropped yet
            return
        self._quiet_until = trio.current_time() + _QUIET_S
        ts = await inside(db).oracle.newest()
        try:
            await db.wait_for(ts, views=list(viewed.graph.views.declared), timeout=_QUIET_S)
        except (NotIdle, NotFresh, UsageError):
            return
        async with db.snapshot() as snap:
            newer = [row.key async for row in snap.scan(viewed.mark.table) if row.commit_ts(viewed.mark) > ts]
            if newer or viewed.version < self._newest:
                return  # a commit that was under way, or a newer program
            found = await viewed.differences(snap)
        self.compared += 1
        for text in found:
            self._problem(f"V14: after wait_for({ts}), at {snap.start_ts}: {text}")

    async def _drop(self, db: Database, viewed: Viewed) -> None:
        try:
            done = await views.drop(viewed.graph.views, db, viewed.dropped)
            self.dropped += bool(done.observers)
        except UsageError as error:  # an older program runs it, or none has ever declared it
            if not any(
                text in str(error) for text in ("runs observer", "processes run observer", "does not have view")
            ):
                raise

    async def end(self, db: Database, viewed: Viewed) -> None:
        """Complete what a program that has grown has begun, before the run comes to rest."""
        if viewed.dropped:
            await self._drop(db, viewed)

    async def verify(self, db: Database, snap: Snapshot, viewed: Viewed) -> None:
        """Check, once the run has come to rest, all tables of the views."""
        for text in await viewed.differences(snap):
            self._problem(text)
        marks = {row.key async for row in snap.scan(viewed.mark.table)}
        for _, number in self._marked:
            if number not in marks:
                self._problem(f"T1: mark {number} is lost")
        if viewed.dropped:
            mine = (f"{viewed.dropped}:", f"{viewed.dropped}.")
            for state in await db.observers():
                if state.id == viewed.dropped or state.id.startswith(mine):
                    self._problem(f"V15: view {viewed.dropped} was dropped, and observer {state.id} is there")
