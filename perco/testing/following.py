"""A follower of the changes in a simulated run: the workload "followed".

Its copy of the tables begins with a snapshot, and then follows their logs; several processes follow in turn, each from
where the last one stopped. For every transaction that it gets:

    the values before the transaction are those of the copy    (E1, E3: nothing is missing, twice, or out of order)
    after it, the conditions on every snapshot hold            (E2, E3: transactions are whole, in all tables together)

At the end, the copy is equal to the tables.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from perco.database.database import Database
from perco.errors import HistoryGone
from perco.history.changes import Changes
from perco.schema.schema import Table
from perco.testing.world import ACCOUNTS, World

_Cell = tuple[str, Any, str]


class Follower:
    """Shared by all processes of a run. `taken`: how many transactions it got; `problem` reports a violation."""

    taken: int

    def __init__(self, kinds: frozenset[str], funds: int, problem: Callable[[str], None]) -> None:
        self._kinds, self._funds, self._problem = kinds, funds, problem
        self._since: int | None = None  # None: begin with a snapshot
        self._cells: dict[_Cell, Any] = {}
        self._busy, self._turn = False, 0
        self.taken = 0

    async def follow(self, db: Database, world: World, rng: random.Random | None = None) -> None:
        """Take some transactions; without `rng`, all that there are. If another process is at it, that process may be
        dead, or slow: this one often takes over, and then the other takes nothing more."""
        if self._busy and rng is not None and rng.random() < 0.5:
            return
        self._turn += 1
        self._busy, turn = True, self._turn
        left = rng.choice((1, 3, 20, 1000)) if rng is not None else -1
        try:
            if self._since is None:
                cells, ts = await self._copied(db, world)
                if turn == self._turn:
                    self._cells, self._since = cells, ts
            stream = db.changes(*tables_of(world), since=self._since)
            if rng is not None and rng.random() < 0.5:
                stream._entries = 2  # so that a transaction takes several pages
            async for changes in stream:
                if turn != self._turn:
                    return
                self._take(changes, world)
                left -= 1
                if not left:
                    return
            if turn == self._turn:
                self._since = stream.frontier
        except HistoryGone:  # the vacuum was faster
            if turn == self._turn:
                self._since = None
        finally:
            self._busy = self._busy and turn != self._turn

    async def verify(self, db: Database, world: World) -> None:
        """Follow to the end, and compare the copy with the tables, once the run has come to rest."""
        await self.follow(db, world)
        cells, _ = await self._copied(db, world)
        if self._since is not None and cells != self._cells:
            self._problem(f"E3: at {self._since} the copy is {self._cells}, and the tables are {cells}")

    async def _copied(self, db: Database, world: World) -> tuple[dict[_Cell, Any], int]:
        """The tables as they are now, and the timestamp of that."""
        cells: dict[_Cell, Any] = {}
        async with db.snapshot() as snap:
            for table in tables_of(world):
                async for row in snap.scan(table):
                    cells.update({(table.name, row.key, c): _frozen(value) for c, value in row.values().items()})
        return cells, snap.start_ts

    def _take(self, changes: Changes, world: World) -> None:
        assert self._since is not None
        if changes.commit_ts <= self._since:
            self._problem(f"E3: the changes of {changes.commit_ts} came after those of {self._since}")
        for row in changes.rows:
            for column, before in row.before.items():
                cell = row.table, row.key, column
                if _frozen(before) != self._cells.get(cell):
                    what = f"{cell} was {self._cells.get(cell)} after {self._since}, and is {before} before it"
                    self._problem(f"E3: changes of {changes.commit_ts}: {what}")
                after = row.after[column]
                if after is None:
                    self._cells.pop(cell, None)
                else:
                    self._cells[cell] = _frozen(after)
        self._since = changes.commit_ts
        self.taken += 1
        self._must_hold(changes.commit_ts)

    def _must_hold(self, ts: int) -> None:
        """The conditions on the copy, as on every snapshot."""
        balances = [self._cells.get(("accounts", account, "balance"), self._funds) for account in ACCOUNTS]
        if sum(balances) != self._funds * len(ACCOUNTS):
            self._problem(f"E3: after the changes of {ts} the total is {sum(balances)}: {balances}")
        users = {(key, value) for (table, key, _), value in self._cells.items() if table == "users"}
        index = {(value, key) for (table, key, _), value in self._cells.items() if table == "names"}
        if users != index:
            self._problem(f"E3: after the changes of {ts} the users are {users} and the index says {index}")


def tables_of(world: World) -> list[Table[Any]]:
    """The tables that are followed."""
    return [world.values.table, world.balance.table, world.owner.table, world.name.table]


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
