"""The object through which programs read: the store as of one timestamp.

Reads of one snapshot may run concurrently. `None` means absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import trio

from perco.errors import Corruption, UsageError
from perco.protocol.records import Cellref
from perco.protocol.snapshot import Missing, Seen, Value, look, plain
from perco.schema.catalogue import Bound
from perco.schema.codecs import decoded
from perco.schema.schema import Column, Table, must_be_table
from perco.storage import LOCK, WRITE
from perco.txn.reader import Reader
from perco.txn.row import Row
from perco.txn.scan import Scan, range_of

K = TypeVar("K")
V = TypeVar("V")


class Snapshot(Reader):
    """The store as of one timestamp.

    Attributes: `start_ts`, the timestamp; `wall`: for a snapshot taken with `at=`, the wall time, in seconds, of the
    note of the clock from which the timestamp comes; else None.
    """

    __slots__ = ()

    async def get(self, column: Column[K, V], key: K, *, lock: bool = False) -> V | None:
        """The value of a cell, or None.

        Args:
            lock: take a read lock (T14): the transaction commits only if no other transaction has written the cell by
                then; after that, only transactions that see this one's writes can write the cell. Costs as much as a
                write. No effect if the transaction writes nothing and raises no signal.

        Raises: TransactionClosed, TooLarge, Corruption; TypeError or ValueError for a key of the wrong type.
        """
        if not self._open:
            raise self._closed()
        bound = self._bounds.get(column) or self._engine.known.bind(column)
        row = column.table.row(key)
        if lock:
            self._lock(bound, row)
        if self._writes:
            own = self._writes.get((bound.table, row, bound.column))
            if own is not None:
                return None if own[1] is None else column.codec.decode(own[1])
        ts, number = self.start_ts, bound.column
        seen: Seen
        if self._known is not None and self._known[0] == (bound.table, row, number):
            seen = self._known[1]
            await trio.lowlevel.checkpoint_if_cancelled()
        elif self._ahead is not None:
            seen = await self._get_ahead(self._ahead, bound.table, row, number)
        else:
            driver = self._driver
            if driver.entered.cells:
                entry = driver.entered.cells.get((bound.table, row, number))
                if entry is not None and entry.commit_ts <= ts:
                    await driver.past(entry)  # C4
            [[locks, writes]] = await driver.reads.read(
                ((bound.table, row, ((LOCK, number, 0, ts, 1), (WRITE, number, 0, ts, 1))),)
            )
            value = plain(locks, writes)
            if value is not None:
                if self._reads is not None:
                    self._reads.note(bound.table, row, number, writes[0][0])
                return decoded(column.codec, value, column, key)
            try:
                seen = look(locks, writes)
            except Corruption as error:
                raise driver.at(Cellref(bound.table, row, number), error) from error
            if type(seen) is not Value and type(seen) is not Missing:
                seen = await driver.finish(bound.table, row, number, ts, seen)
        if self._reads is not None:
            self._reads.note(bound.table, row, number, seen.commit_ts)
        if type(seen) is Missing:
            return None
        return decoded(column.codec, seen.value, column, key)  # type: ignore[union-attr]

    async def get_many(self, column: Column[K, V], keys: Iterable[K], *, lock: bool = False) -> dict[K, V | None]:
        """The values of many cells of a column, by key, in the order of `keys`; None if absent. `lock`: see `get`."""
        bound = self._usable(column)
        if isinstance(keys, str | bytes):
            raise UsageError(f"get_many takes a list of keys, such as [{keys!r}], not {keys!r}")
        wanted = {key: column.table.row(key) for key in keys}
        if lock:
            for row in wanted.values():
                self._lock(bound, row)
        seen = await self._see(bound.table, [(row, (bound.column,)) for row in wanted.values()])
        out: dict[K, V | None] = {}
        for key, row in wanted.items():
            own = self._writes.get((bound.table, row, bound.column))
            out[key] = self._value(column, key, own, seen[row, bound.column])[0]
        return out

    async def row(
        self, table: Table[K], key: K, columns: Sequence[Column[K, Any]] | None = None, *, lock: bool = False
    ) -> Row[K]:
        """Several columns of one row (all declared ones by default); absent values are None. `lock`: see `get`."""
        columns = list(must_be_table(table).columns.values()) if columns is None else columns
        bounds = self._of_table(table, columns)
        row = table.row(key)
        if lock:
            for bound in bounds:
                self._lock(bound, row)
        seen = await self._see(table.name, [(row, tuple(bound.column for bound in bounds))])
        return self._assemble(key, row, columns, bounds, {column: found for (_, column), found in seen.items()})

    def scan(
        self,
        table: Table[K],
        *,
        start: K | None = None,
        stop: K | None = None,
        prefix: K | tuple[Any, ...] | None = None,
        columns: Sequence[Column[K, Any]] | None = None,
        limit: int | None = None,
        reverse: bool = False,
        lock: bool = False,
    ) -> Scan[K]:
        """The rows that have a value in any of the columns, in key order: `async for row in txn.scan(...)`.

        Args:
            start, stop: keys; start is included, stop is not.
            prefix: only keys that begin with it: a str or bytes, or for tuple keys a tuple of the first parts.
            columns: the columns to read; all declared ones by default.
            limit: the largest number of rows.
            reverse: True: in descending key order.

        The loop may be left at any point: nothing is held between two rows.

        Raises: UsageError for `lock`: there are no range locks.
        """
        if lock:
            raise UsageError(
                "a scan takes no read locks: rows that are not there yet could not be locked. "
                "Lock single cells with get, get_many or row."
            )
        low, high = range_of(must_be_table(table), start, stop, prefix)
        return scan_between(self, table, low, high, columns=columns, limit=limit, reverse=reverse)

    def _lock(self, bound: Bound, row: bytes) -> None:
        raise UsageError("a snapshot commits nothing, so it has no use for lock=True; read in a transaction")


def scan_between(
    snap: Snapshot,
    table: Table[K],
    low: bytes,
    high: bytes | None,
    *,
    columns: Sequence[Column[K, Any]] | None = None,
    limit: int | None = None,
    reverse: bool = False,
) -> Scan[K]:
    """Like `Snapshot.scan`, but for the rows in [`low`, `high`) (None: to the end). The bounds are rows in stored form,
    and need not be the encoding of a key."""
    columns = list(must_be_table(table).columns.values()) if columns is None else columns
    bounds = snap._of_table(table, columns)
    if limit is not None and (not isinstance(limit, int) or limit < 0):
        raise UsageError(f"limit is {limit!r}; it is a number of rows, an int, and cannot be negative")
    return Scan(snap, table, columns, bounds, low, high, limit, reverse)
