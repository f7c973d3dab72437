"""The changes of one table in parts, for programs that divide them among tasks (`perco/spark/following.py`).

    reached:  the frontier, or an earlier transaction at which to cut: the end of a batch
    Slice:    the changes of a range of rows with commit_ts in (since, upto], whole rows

E5  Once a reader has reached a frontier R (E2), the changes with commit_ts in (S, E] are the same whenever and wherever
    they are read, for all S <= E <= R: no further entry appears, and the values are kept for as long as E4 does not
    fail. A slice settles no locks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from perco.errors import SessionEnded, TabletSplit, Unavailable, UsageError
from perco.history.changes import ChangeStream
from perco.protocol.changes import Entry, Merge, Source, Taken
from perco.schema.schema import Column, Table
from perco.storage import WRITE, ReadRequest
from perco.txn.engine import Engine

_BYTES_PER_READ: Final = 4 << 20
_TRIES_MAX: Final = 16  # after splits, or after the ends of sessions

Row = tuple[int, int, bytes]  # the number of a transaction in a page, the number of its table, the row


class Reached(NamedTuple):
    """How far a table's changes may be read.

    Attributes:
        ts: a frontier, or the commit_ts of a transaction below one.
        rows: how many rows changed above the start and up to `ts`; a row counts once for each transaction.
    """

    ts: int
    rows: int


class _Counted(ChangeStream):
    """Reads entries without values."""

    _entries = 8192
    _versions = 0

    async def news(self) -> bool:
        return await self._any_news()

    async def reached(self, rows_max: int | None, upto: int | None) -> Reached:
        await self._begin()
        since = self._frontier
        merge = await self._step()
        if upto is not None:
            merge.frontier = min(merge.frontier, upto)
        rows, end = 0, since
        while not merge.over:
            for source in merge.hungry():
                await self._fill(merge, source)
            while (found := merge.take()) is not None:
                here = len({entry.row for _, entry in found.entries})
                if rows_max is not None and rows and rows + here > rows_max:
                    await self._must_be_kept()
                    return Reached(end, rows)
                rows, end = rows + here, found.commit_ts
        await self._must_be_kept()
        return Reached(max(since, merge.frontier), rows)


async def has_news(engine: Engine, table: Table[Any], since: int) -> bool:
    """Whether the table's log has an entry above a timestamp. Cheap: it draws no frontier."""
    try:
        return await _Counted(engine, [table], since, False).news()
    except (SessionEnded, TabletSplit):
        return True


async def reached(
    engine: Engine, table: Table[Any], since: int, rows_max: int | None = None, upto: int | None = None
) -> Reached:
    """How far the changes after a timestamp may be read now: whole transactions with at most `rows_max` rows in total,
    but at least one transaction, if there is any.

    Args: `upto`: not further than this timestamp.

    Raises: HistoryGone (E4); UsageError for a table without a log, or a timestamp in the future; Unavailable.
    """
    for _ in range(_TRIES_MAX):
        try:
            return await _Counted(engine, [table], since, False).reached(rows_max, upto)
        except (SessionEnded, TabletSplit):
            continue
    raise Unavailable(f"the log of table {table.name!r} cannot be read now")


class Slice(ChangeStream):
    """The changes of the rows in [`low`, `high`) of a table, with commit_ts in (`since`, `upto`].

    Each `RowChange` has all of the columns asked for that have a value, not only those that the transaction wrote. Rows
    in which it wrote none of them are left out.
    """

    def __init__(
        self,
        engine: Engine,
        table: Table[Any],
        columns: Sequence[Column[Any, Any]],
        since: int,
        upto: int,
        low: bytes = b"",
        high: bytes | None = None,
    ) -> None:
        """`upto`: at or below a frontier that was reached (E5). Raises: as `Database.changes`."""
        super().__init__(engine, [table], since, False)
        self._upto, self._low, self._high = upto, low, high
        self._names = {column.name for column in columns}

    async def _begin(self) -> None:
        await super()._begin()
        oracle = self._engine.oracle
        if self._upto > oracle.last and self._upto > await oracle.newest():
            raise UsageError(f"there are no changes up to {self._upto}: timestamps so far are 1 to {oracle.last}")

    async def _step(self) -> Merge:
        """Where to read the logs: the tablets of the range, as they are now."""
        table = self._tables[0]
        starts = self._engine.driver.reads.bounds(table.name)
        sources = []
        for start, stop in zip(starts, [*starts[1:], None], strict=True):
            low = max(start, self._low)
            high = min((each for each in (stop, self._high) if each is not None), default=None)
            if high is None or low < high:
                sources.append(Source(0, low, high))
        return Merge(sources, self._frontier, self._upto)

    def _columns(self, table: Table[Any]) -> dict[int, Column[Any, Any]]:
        columns = super()._columns(table)
        return {number: column for number, column in columns.items() if column.name in self._names}

    async def _completed(self, taken: list[Taken]) -> list[Taken]:
        """The transactions with entries for all of the columns: an unwritten one has the same value before and after.
        Its record is read without looking at locks, because none below the frontier is left (E5)."""
        numbers = self._columns(self._tables[0])
        entries: dict[Row, dict[int, Entry]] = {}
        for n, each in enumerate(taken):
            for table, entry in each.entries:
                if entry.column in numbers:
                    entries.setdefault((n, table, entry.row), {})[entry.column] = entry
        unwritten = [(row, missing) for row, found in entries.items() if (missing := [*(numbers.keys() - found)])]
        for (row, columns), records in zip(unwritten, await self._records(taken, unwritten), strict=True):
            for column, record in zip(columns, records, strict=True):
                if record:
                    entries[row][column] = Entry(taken[row[0]].commit_ts, row[2], column, record, record)
        out = [Taken(each.commit_ts, []) for each in taken]
        for (n, table, _), found in entries.items():
            out[n].entries.extend((table, entry) for entry in found.values())
        for each in out:
            each.entries.sort()
        return out

    async def _records(self, taken: list[Taken], wanted: list[tuple[Row, list[int]]]) -> list[list[bytes]]:
        """The newest records of cells as of the commits of their transactions; b"": none."""
        table = self._tables[0].name
        requests: list[ReadRequest] = [
            (table, row, tuple((WRITE, column, 0, taken[n].commit_ts, 1) for column in columns))
            for (n, _, row), columns in wanted
        ]
        found: list[list[bytes]] = []
        while len(found) < len(requests):
            for answers in await self._engine.driver.reads.read_first(requests[len(found) :], _BYTES_PER_READ):
                found.append([cells[0][1] if cells else b"" for cells in answers])
        return found
