"""In which order the changes of a load commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import trio
import trio.testing

import perco
from perco.crossover.changing import Changes, SourceChange
from perco.crossover.keeping import LOADERS, Keeper, Runs
from perco.crossover.rows import SourceRow, Values
from perco.views.declaring import Views

table = perco.Table("rows", key=perco.INT64)
column = table.column("value", perco.INT64)
ROWS = [SourceRow(table, n, {column: n}) for n in range(150)]


class Slow:
    """Stands in for a database. Whenever all tasks wait, the newest transaction commits: the first one commits last."""

    def __init__(self) -> None:
        self.rows = {table.row(row.key): row.values for row in ROWS}
        self.sizes: list[int] = []
        self._waits: list[trio.Event] = []

    async def run(self, _: object, changes: Sequence[SourceChange]) -> int:
        self._waits.append(waits := trio.Event())
        self.sizes.append(len(changes))
        await waits.wait()
        for change in changes:
            self.rows[table.row(change.key)] = change.after
        return len(self.sizes)

    async def wait_idle(self, timeout: float) -> int:
        return 0

    async def commit(self) -> None:
        while True:
            await trio.testing.wait_all_tasks_blocked()
            if self._waits:
                self._waits.pop(-1).set()


async def rows_after(count: int, apart: int | None = None) -> tuple[Slow, dict[bytes, Values]]:
    changes, db = Changes(ROWS), Slow()
    drawn = changes.draw(count)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(db.commit)
        keeper = Keeper(cast(Any, db), cast(Views, None), Runs(), 0)
        await keeper.arrive(drawn, apart=changes.apart if apart is None else apart)
        nursery.cancel_scope.cancel()
    db.rows = {row: values for row, values in db.rows.items() if values}
    return db, changes.rows[table]


async def test_changes_of_a_row_commit_in_order() -> None:
    db, expected = await rows_after(2000)
    assert db.rows == expected
    assert max(db.sizes) == len(ROWS) // 8 // LOADERS


async def test_without_a_bound_they_would_not() -> None:
    db, expected = await rows_after(2000, apart=2000)
    assert db.rows != expected
