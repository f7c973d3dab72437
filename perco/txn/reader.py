"""How a snapshot reads: from its own writes, from its cache, or from the store; and how it gets past locks.

G1  From the draw of its timestamp to its end, a reader keeps the watermark from passing that timestamp.
T9  A multi-get answers as point reads would, or waits; it never returns a partial result.
C4  A one-step commit leaves no locks. So readers first check the cells whose one-step commit is in progress; the list
    of these cells is kept in memory (`entered.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import trio

from perco.errors import Corruption, TransactionClosed, UsageError
from perco.protocol.reads import Reads
from perco.protocol.records import Cellref
from perco.protocol.snapshot import NEVER, InData, Missing, Seen, Value, look
from perco.schema.catalogue import Bound
from perco.schema.codecs import decoded
from perco.schema.schema import Column, Table, must_be_table
from perco.storage import LOCK, WRITE, ReadRequest, RowCells
from perco.txn.driver import Driver
from perco.txn.engine import Engine
from perco.txn.own_rows import OwnRows
from perco.txn.prefetch import Ahead, Plan
from perco.txn.row import Row

K = TypeVar("K")
V = TypeVar("V")

_ROWS_PER_READ = 256
WHERE = tuple[str, bytes, int]  # table, row, column
Cells: TypeAlias = dict[int, Value | Missing]  # of a row, by column


class Reader:
    """Reads at one timestamp: the base class of snapshots."""

    __slots__ = (
        *("_ahead", "_bounds", "_driver", "_engine", "_known", "_open", "_own_rows", "_reads", "_writes"),
        *("start_ts", "wall"),
    )

    _starts = False  # whether it has no timestamp yet, because its first read draws it (`starting.py`)

    _kind = "snapshot"

    def __init__(self, engine: Engine, start_ts: int) -> None:
        self.wall: float | None = None
        self._open = True
        self._known: tuple[WHERE, Value | Missing] | None = None  # read before a run's function began
        self._reads: Reads | None = None  # of a serializable transaction (T14)
        self._ahead: Ahead | None = None  # its cache, with what was read ahead for it
        self._engine = engine
        self._driver: Driver = engine.driver
        self._bounds = engine.known.bounds
        self.start_ts = start_ts
        self._writes: dict[WHERE, tuple[Bound, bytes | None]] = {}  # no entry is ever removed
        self._own_rows: OwnRows | None = None  # the rows of `_writes`, once a scan needs them

    async def _draw(self) -> None:
        """Draw the timestamp now, if there is none yet."""

    async def _draw_and_read(self, requests: Sequence[ReadRequest]) -> list[RowCells] | None:
        """If there is no timestamp yet, draw it, and read at it."""
        raise AssertionError("it has a timestamp")

    def end(self) -> None:
        """End the reader: it can read no more, and the versions that only it needed may be removed (G1)."""
        if self._open:
            self._open = False
            self._let_go()
            if self._ahead is not None:
                self._ahead.end()

    def _let_go(self) -> None:
        self._engine.oracle.holds.open.discard(self.start_ts)

    def __del__(self) -> None:
        if self._open:  # dropped without a call of `end`: it must not hold old versions forever
            self._let_go()
            if self._ahead is not None:
                self._ahead.drop()

    def _closed(self) -> TransactionClosed:
        return TransactionClosed(f"this {self._kind} has ended; use it only inside its block or function")

    def _usable(self, column: Column[Any, Any]) -> Bound:
        if not self._open:
            raise self._closed()
        return self._bounds.get(column) or self._engine.known.bind(column)

    def _of_table(self, table: Table[K], columns: Sequence[Column[K, Any]]) -> list[Bound]:
        if not columns:
            raise UsageError(f"table {must_be_table(table).name!r}: no columns to read")
        bounds = [self._usable(column) for column in columns]
        for column in columns:
            if column.table is not table:
                raise UsageError(f"{column!r} is not a column of table {must_be_table(table).name!r}")
        return bounds

    async def _see(
        self, table: str, wanted: Sequence[tuple[bytes, tuple[int, ...]]]
    ) -> dict[tuple[bytes, int], Value | Missing]:
        """Read many cells of a table at start_ts."""
        ts = self.start_ts
        out: dict[tuple[bytes, int], Value | Missing] = {}
        for at in range(0, len(wanted), _ROWS_PER_READ):
            chunk = wanted[at : at + _ROWS_PER_READ]
            if self._ahead is not None:
                out.update(await self._see_ahead(self._ahead, table, chunk))
                continue
            requests: list[ReadRequest] = [
                (table, row, [q for c in columns for q in ((LOCK, c, 0, ts, 1), (WRITE, c, 0, ts, 1))])
                for row, columns in chunk
            ]
            if self._driver.entered.cells:  # C4
                await self._driver.past_cells(((table, row, c) for row, columns in chunk for c in columns), ts)
            found = await self._driver.reads.read(requests)
            out.update(await self._finish(table, self._looked(table, chunk, found)))
        if self._reads is not None:
            for (row, column), found_there in out.items():
                self._reads.note(table, row, column, found_there.commit_ts)
        return out

    async def _see_with(
        self, table: str, wanted: Sequence[tuple[bytes, tuple[int, ...]]], other: Cellref
    ) -> tuple[dict[tuple[bytes, int], Value | Missing], Value | Missing]:
        """Like `_see`; and read a cell that may be in another table."""
        out = await self._see(table, wanted)
        return out, (await self._see(other.table, ((other.row, (other.column,)),)))[other.row, other.column]

    async def _get_ahead(self, ahead: Ahead, table: str, row: bytes, column: int) -> Value | Missing:
        """Read one cell: from the cache if it is there, otherwise like `_see_ahead`."""
        try:
            found = ahead.find(table, row, column)
        except Corruption as error:
            raise self._driver.at(Cellref(table, row, column), error) from error
        if type(found) is InData:
            found = (await self._finish(table, {(row, column): found}))[row, column]
            ahead.keep(table, row, column, found)
        elif found is None:
            found = (await self._see_ahead(ahead, table, ((row, (column,)),)))[row, column]
        elif ahead.rests():
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        return found  # type: ignore[return-value]

    async def _see_ahead(
        self, ahead: Ahead, table: str, wanted: Sequence[tuple[bytes, tuple[int, ...]]]
    ) -> dict[tuple[bytes, int], Value | Missing]:
        """Like `_see`, but from the cache. Cells that are not in the cache are read, together with cells that are
        likely to be read later."""
        driver, ts = self._driver, self.start_ts
        out: dict[tuple[bytes, int], Value | Missing] = {}
        seen: dict[tuple[bytes, int], Seen] = {}
        plans: list[Plan] = []
        ahead.begin_read()
        for row, columns in wanted:
            unknown = []
            for column in columns:
                try:
                    found = ahead.find(table, row, column)
                except Corruption as error:
                    raise driver.at(Cellref(table, row, column), error) from error
                if found is None:
                    unknown.append(column)
                elif type(found) is InData:
                    seen[row, column] = found
                else:
                    out[row, column] = found  # type: ignore[assignment]
            if unknown:
                plans.append(ahead.plan(table, row, unknown))
        if plans:
            if driver.entered.cells:  # C4
                plans = [driver.not_entered(table, plan, ts) for plan in plans]
                asked = [(table, plan.row, column) for plan in plans for column in plan.columns[: plan.asked]]
                await driver.past_cells(asked, ts)
            seen.update(self._took(ahead, table, await driver.read_plans(table, plans, ts)))
        if seen:
            for (row, column), value in (await self._finish(table, seen)).items():
                ahead.keep(table, row, column, value)
                out[row, column] = value
        elif ahead.rests():
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        return out

    def _looked(
        self, table: str, wanted: Sequence[tuple[bytes, tuple[int, ...]]], found: Sequence[RowCells]
    ) -> dict[tuple[bytes, int], Seen]:
        """The wanted cells, each found as its lock and its record. Raises: Corruption."""
        seen: dict[tuple[bytes, int], Seen] = {}
        try:
            for (row, columns), cells in zip(wanted, found, strict=True):
                for i, column in enumerate(columns):
                    seen[row, column] = look(cells[2 * i], cells[2 * i + 1])
        except Corruption as error:
            raise self._driver.at(Cellref(table, row, column), error) from error
        return seen

    def _took(self, ahead: Ahead, table: str, found: Iterable[tuple[Plan, RowCells]]) -> dict[tuple[bytes, int], Seen]:
        """The cells that were asked for; `ahead` keeps those that were read ahead. Raises: Corruption."""
        seen: dict[tuple[bytes, int], Seen] = {}
        for plan, cells in found:
            for column, raw in ahead.took(table, plan, cells):
                try:
                    seen[plan.row, column] = ahead.look(table, column, raw)
                except Corruption as error:
                    raise self._driver.at(Cellref(table, plan.row, column), error) from error
        return seen

    async def _finish(
        self, table: str, seen: dict[tuple[bytes, int], Seen]
    ) -> dict[tuple[bytes, int], Value | Missing]:
        """Read all long values in one read; then, one by one, the cells that have a lock in the way (T9)."""
        for each in seen.values():
            if type(each) is not Value and type(each) is not Missing:
                break
        else:
            return seen  # type: ignore[return-value]
        out: dict[tuple[bytes, int], Value | Missing] = {}
        long = [(where, s) for where, s in seen.items() if isinstance(s, InData)]
        if long:
            requests: list[ReadRequest] = [
                (table, row, ((s.group, column, s.start_ts, s.start_ts, 1),)) for (row, column), s in long
            ]
            with suppress(Corruption):  # if there is no such group, the error is raised below, with the cell
                for (where, found), [cells] in zip(long, await self._driver.reads.read(requests), strict=True):
                    if cells:
                        out[where] = Value(found.commit_ts, cells[0][1])
        for (row, column), s in seen.items():
            if (row, column) not in out:
                out[row, column] = await self._driver.finish(table, row, column, self.start_ts, s)
        return out

    async def _still_kept(self, table: str, failure: Corruption | None) -> None:
        """Raise the failure of a read, if any. No more is checked here, because this reader holds its versions; compare
        `PastSnapshot`."""
        if failure is not None:
            raise failure

    def _value(
        self, column: Column[K, V], key: K, own: tuple[Bound, bytes | None] | None, seen: Value | Missing
    ) -> tuple[V | None, int]:
        if own is not None:
            return (None if own[1] is None else column.codec.decode(own[1])), 0
        if isinstance(seen, Missing):
            return None, seen.commit_ts
        return decoded(column.codec, seen.value, column, key), seen.commit_ts

    def _assemble(
        self,
        key: K,
        row: bytes,
        columns: Sequence[Column[K, Any]],
        bounds: Sequence[Bound],
        seen: Cells,
    ) -> Row[K]:
        cells: dict[Column[K, Any], tuple[Any, int]] = {}
        writes = self._writes
        for column, bound in zip(columns, bounds, strict=True):
            own = writes.get((bound.table, row, bound.column)) if writes else None
            cells[column] = self._value(column, key, own, seen.get(bound.column, NEVER))
        return Row(key, cells)
