"""The objects that users hold: a snapshot to read, a transaction to read and write.

All reads of a transaction see the store as of its start_ts, with its own writes on top; reads of one transaction may
run concurrently. `set` and `delete` only note what to do: they never block, and limits are raised there, not at commit.
`None` means absent.

G1  A reader holds the watermark below its timestamp, from the moment that it was drawn to the reader's end.
T9  A multi-get answers as point reads would, or waits; it never returns a part.
T14 A cell that is read with `lock=True` is locked at commit, for as long as the commit takes, against all writers. A
    serializable transaction notes its reads, and repeats them at commit.
T12 The primary is an observer run's ack, else a cell in the tablet that holds most of the cells.
N5  Signals are never the primary. If nothing is written, a bare cell is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import trio

from perco.errors import (
    CatalogueChanged,
    Corruption,
    TooLarge,
    TransactionClosed,
    UsageError,
)
from perco.storage import LOCK, VALUE_BYTES_MAX, WRITE, ReadRequest
from perco.txn.catalogue import Bound
from perco.txn.codecs import decoded, encoded
from perco.txn.commit import Commit
from perco.txn.driver import ConflictAt, Driver, StaleAt, conflict, make_token
from perco.txn.mutations import Header, Intent
from perco.txn.own_rows import OwnRows
from perco.txn.prefetch import Ahead, Plan
from perco.txn.reads import Isolation, Reads
from perco.txn.records import BARE, DELETE, PUT, PUT_DATA, READ, SHORT_VALUE_BYTES, SIGNAL, Cellref, bare_column
from perco.txn.scan import Scan, range_of
from perco.txn.schema import Column, Signal, Table
from perco.txn.snapshot import InData, Missing, Seen, Value, look, plain

if TYPE_CHECKING:
    from perco.txn.client import Client

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

_ROWS_PER_READ = 256
_WHERE = tuple[str, bytes, int]


class Row(Generic[K]):
    """Some columns of one row at one moment: `row[column]` is the value, or None; `row.get(column, 0)`, or 0."""

    __slots__ = ("_cells", "key")

    def __init__(self, key: K, cells: dict[Column[K, Any], tuple[Any, int]]) -> None:
        self.key = key
        self._cells = cells

    def __getitem__(self, column: Column[K, V]) -> V | None:
        try:
            value: V | None = self._cells[column][0]
        except KeyError:
            if isinstance(column, str):
                raise UsageError(
                    f"a row is asked by column, as made by Table.column, not by the name {column!r}; "
                    "row.values() has what is there by name"
                ) from None
            raise UsageError(f"{column!r} was not asked for; name it in `columns`") from None
        return value

    @overload
    def get(self, column: Column[K, V]) -> V | None: ...
    @overload
    def get(self, column: Column[K, V], default: D) -> V | D: ...
    def get(self, column: Column[K, Any], default: Any = None) -> Any:
        """As `row[column]`, with `default` for what is absent.

        Raises: UsageError for a column that was not asked for.
        """
        value = self[column]
        return default if value is None else value

    def commit_ts(self, column: Column[K, Any]) -> int:
        """When the value was committed; 0 for a column that was never written, and for one's own writes."""
        self[column]
        return self._cells[column][1]

    def __contains__(self, column: object) -> bool:
        """Whether the row has a value there."""
        return column in self._cells and self._cells[column][0] is not None

    def values(self) -> dict[str, Any]:
        """Values by column name, absent ones left out."""
        return {column.name: cell[0] for column, cell in self._cells.items() if cell[0] is not None}

    def __repr__(self) -> str:
        return f"Row({self.key!r}, {self.values()!r})"


class Snapshot:
    """The store as of one timestamp.

    Attributes: `start_ts`, the timestamp; `wall`, for a snapshot `at=` a time: the wall time (seconds) of the note
    that it stands on, else None.
    """

    __slots__ = (
        "_ahead",
        "_bounds",
        "_client",
        "_driver",
        "_known",
        "_open",
        "_own_rows",
        "_reads",
        "_writes",
        "start_ts",
        "wall",
    )

    def __init__(self, client: Client, start_ts: int) -> None:
        self.wall: float | None = None
        self._open = True
        self._known: tuple[_WHERE, Value | Missing] | None = None  # what an observer's run read before its function
        self._reads: Reads | None = None  # of a serializable transaction (T14)
        self._ahead: Ahead | None = None  # what it keeps, and what is read ahead for it
        self._client = client
        self._driver: Driver = client.driver
        self._bounds = client.bounds
        self.start_ts = start_ts
        self._writes: dict[_WHERE, tuple[Bound, bytes | None]] = {}  # nothing is removed from it
        self._own_rows: OwnRows | None = None  # of these, once a scan wants them

    def end(self) -> None:
        """Nothing is read any more; the versions that it needed may go (G1)."""
        if self._open:
            self._open = False
            self._let_go()
            if self._ahead is not None:
                self._ahead.end()

    def _let_go(self) -> None:
        self._client.oracle.holds.open.discard(self.start_ts)

    def __del__(self) -> None:
        if self._open:  # dropped without an end: it shall not hold old versions for ever
            self._let_go()
            if self._ahead is not None:
                self._ahead.drop()

    # ------------------------------------------------------------ reading

    async def get(self, column: Column[K, V], key: K, *, lock: bool = False) -> V | None:
        """The value of a cell, or None.

        Args:
            lock: commit only if nobody has written the cell by then, and let nobody write it who does not see what this
                transaction writes (T14). Costs as much as a write. Of no effect if the transaction writes nothing.

        Raises: TransactionClosed, TooLarge, Corruption; TypeError or ValueError for a key of the wrong kind.
        """
        if not self._open:
            raise self._closed()
        bound = self._bounds.get(column) or self._client.bind(column)
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
        """The values of many cells of a column, by key, in the order asked; None where absent. `lock`: see `get`."""
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
        columns = list(_table(table).columns.values()) if columns is None else columns
        bounds = self._of_table(table, columns)
        row = table.row(key)
        if lock:
            for bound in bounds:
                self._lock(bound, row)
        seen = await self._see(table.name, [(row, tuple(bound.column for bound in bounds))])
        return self._assemble(key, row, columns, bounds, seen)

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
        """Rows in key order that have a value in any of the columns: `async for row in txn.scan(...)`.

        Args:
            start, stop: keys; from start on, up to but without stop.
            prefix: keys that begin so: a str or bytes, or for tuple keys a tuple of the first parts.
            columns: which to read; all declared ones by default.
            limit: at most so many rows.
            reverse: against the key order.

        It may be left at any point: between two rows nothing is held.

        Raises: UsageError for `lock`: there are no locks of ranges.
        """
        if lock:
            raise UsageError(
                "a scan takes no read locks: rows that are not there yet could not be locked. "
                "Lock single cells with get, get_many or row."
            )
        low, high = range_of(_table(table), start, stop, prefix)
        return self._scan_between(table, low, high, columns=columns, limit=limit, reverse=reverse)

    def _scan_between(
        self,
        table: Table[K],
        low: bytes,
        high: bytes | None,
        *,
        columns: Sequence[Column[K, Any]] | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Scan[K]:
        """As `scan`, of the rows from `low` up to but without `high` (None: to the end), which are bytes as stored: any
        will do, whether they are a key's or not."""
        columns = list(_table(table).columns.values()) if columns is None else columns
        bounds = self._of_table(table, columns)
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise UsageError(f"limit is {limit!r}; it is a number of rows, an int, and cannot be negative")
        return Scan(self, table, columns, bounds, low, high, limit, reverse)

    # ------------------------------------------------------------ inside

    def _closed(self) -> TransactionClosed:
        kind = "transaction" if isinstance(self, Transaction) else "snapshot"
        return TransactionClosed(f"this {kind} has ended; use it inside its block or function only")

    def _lock(self, bound: Bound, row: bytes) -> None:
        raise UsageError("a snapshot commits nothing, so it has no use for lock=True; read in a transaction")

    def _usable(self, column: Column[Any, Any]) -> Bound:
        if not self._open:
            raise self._closed()
        return self._bounds.get(column) or self._client.bind(column)

    def _of_table(self, table: Table[K], columns: Sequence[Column[K, Any]]) -> list[Bound]:
        if not columns:
            raise UsageError(f"table {_table(table).name!r}: no columns to read")
        bounds = [self._usable(column) for column in columns]
        for column in columns:
            if column.table is not table:
                raise UsageError(f"{column!r} is not a column of table {_table(table).name!r}")
        return bounds

    async def _see(
        self, table: str, wanted: Sequence[tuple[bytes, tuple[int, ...]]]
    ) -> dict[tuple[bytes, int], Value | Missing]:
        """Many cells of a table at start_ts."""
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
            seen: dict[tuple[bytes, int], Seen] = {}
            try:
                for (row, columns), cells in zip(chunk, found, strict=True):
                    for i, column in enumerate(columns):
                        seen[row, column] = look(cells[2 * i], cells[2 * i + 1])
            except Corruption as error:
                raise self._driver.at(Cellref(table, row, column), error) from error
            out.update(await self._finish(table, seen))
        if self._reads is not None:
            for (row, column), found_there in out.items():
                self._reads.note(table, row, column, found_there.commit_ts)
        return out

    async def _get_ahead(self, ahead: Ahead, table: str, row: bytes, column: int) -> Value | Missing:
        """One cell, if the transaction has it; else as `_see_ahead`."""
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
        """The same, of what the transaction has; what it has not is read, with what is likely to be read later."""
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
            for plan, cells in await driver.read_plans(table, plans, ts):
                for column, raw in ahead.took(table, plan, cells):
                    try:
                        seen[plan.row, column] = ahead.look(table, column, raw)
                    except Corruption as error:
                        raise driver.at(Cellref(table, plan.row, column), error) from error
        if seen:
            for (row, column), value in (await self._finish(table, seen)).items():
                ahead.keep(table, row, column, value)
                out[row, column] = value
        elif ahead.rests():
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        return out

    async def _finish(
        self, table: str, seen: dict[tuple[bytes, int], Seen]
    ) -> dict[tuple[bytes, int], Value | Missing]:
        """Long values in one read; then whatever a lock is in the way of, one by one (T9)."""
        out: dict[tuple[bytes, int], Value | Missing] = {}
        long = [(where, s) for where, s in seen.items() if isinstance(s, InData)]
        if long:
            requests: list[ReadRequest] = [
                (table, row, ((s.group, column, s.start_ts, s.start_ts, 1),)) for (row, column), s in long
            ]
            with suppress(Corruption):  # there is no such group: told below, with its cell
                for (where, found), [cells] in zip(long, await self._driver.reads.read(requests), strict=True):
                    if cells:
                        out[where] = Value(found.commit_ts, cells[0][1])
        for (row, column), s in seen.items():
            if (row, column) not in out:
                out[row, column] = await self._driver.finish(table, row, column, self.start_ts, s)
        return out

    async def _still_kept(self, table: str, failure: Corruption | None) -> None:
        """After reads: what they read is there for as long as this lives; in the past see `PastSnapshot`."""
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
        seen: dict[tuple[bytes, int], Value | Missing],
    ) -> Row[K]:
        never = Missing()
        cells: dict[Column[K, Any], tuple[Any, int]] = {}
        for column, bound in zip(columns, bounds, strict=True):
            own = self._writes.get((bound.table, row, bound.column)) if self._writes else None
            cells[column] = self._value(column, key, own, seen.get((row, bound.column), never))
        return Row(key, cells)


class Transaction(Snapshot):
    """Reads and writes that become visible together, or not at all.

    Attributes: `commit_ts`, 0 until committed (and for one that wrote nothing); `outcome`: "open", "committed",
    "aborted" or "unknown" (T10).

    Serializable ones that commit are, among themselves and with snapshots, as if one had run after the other, in the
    order of their commit_ts; one that wrote nothing is such a snapshot. Those that are not may still suffer, and cause,
    write skew.
    """

    __slots__ = (
        *("_ack", "_bytes", "_depth", "_locked", "_path", "_primary", "_root", "_signals", "_version"),
        *("commit_ts", "outcome"),
    )

    def __init__(self, client: Client, start_ts: int) -> None:
        super().__init__(client, start_ts)
        client.oracle.holds.open.add(start_ts)
        self.commit_ts = 0
        self.outcome = "open"
        self._primary: Cellref | None = None
        self._version = 0  # of the catalogue that the run, or the first write, was noted under (N10)
        self._bytes = 0
        self._locked: dict[_WHERE, None] | None = None  # read under a lock (T14)
        self._ack: Intent | None = None  # an observer run's primary (N2)
        self._signals: dict[_WHERE, Intent] | None = None  # raised, and what a run for signals has seen (N5)
        self._root = self._depth = 0
        self._path = b""

    @property
    def isolation(self) -> Isolation:
        """Its isolation: "snapshot" or "serializable"."""
        return "snapshot" if self._reads is None else "serializable"

    @property
    def token(self) -> str:
        """What `db.outcome` takes, from any process; "" for a transaction that never began to commit."""
        return "" if self._primary is None else make_token(self.start_ts, self._primary)

    def set(self, column: Column[K, V], key: K, value: V) -> None:
        """Write a cell. Never blocks.

        Raises: TooLarge over a limit; TypeError or ValueError for what the codec cannot take.
        """
        if value is None:
            raise TypeError(f"None means absent; to remove a value use delete({column!r}, key)")
        bound = self._usable(column)
        data = encoded(column.codec, value, column, "value of ")
        if len(data) > VALUE_BYTES_MAX:
            remedy = "Keep it elsewhere, or in pieces."
            raise TooLarge(f"value of {column!r}", len(data), VALUE_BYTES_MAX, remedy, "bytes")
        self._note(bound, column.table.row(key), data)

    def delete(self, column: Column[K, Any], key: K) -> None:
        """Remove a cell's value; observers of the column run. Never blocks."""
        self._note(self._usable(column), column.table.row(key), None)

    def signal(self, signal: Signal[K], key: K) -> None:
        """Raise a signal: once this has committed, its observers run for that key, at least once (N5). Never blocks,
        and never conflicts: many may raise the same signal at the same time, and may be seen by one run.

        Raises: UsageError for what is no signal; TooLarge over a limit; TypeError or ValueError for a key of the wrong
        kind; TransactionClosed.
        """
        if not self._open:
            raise self._closed()
        bound = self._client.bind_signal(signal)
        row = signal.table.row(key)
        signals = self._signals
        if signals is None:
            signals = self._signals = {}
        if not self._version:
            self._version = self._client.catalogue.binds
        where = (bound.table, row, bound.column)
        cells_max = self._client.config.transaction.cells_max
        cells = len(signals) + len(self._writes)
        if cells >= cells_max and where not in signals:
            raise TooLarge("cells of one transaction", cells + 1, cells_max, "Signal in parts.")
        signals[where] = Intent(*where, SIGNAL, b"", bound.observers)

    def _note(self, bound: Bound, row: bytes, data: bytes | None) -> None:
        writes = self._writes
        if not self._version:
            self._version = self._client.catalogue.binds
        where = (bound.table, row, bound.column)
        options = self._client.config.transaction
        if len(writes) >= options.cells_max and where not in writes:
            raise TooLarge("cells of one transaction", len(writes) + 1, options.cells_max, "Write it in parts.")
        old = writes.get(where)
        size = self._bytes + (len(data) if data else 0) - (len(old[1]) if old and old[1] else 0)
        if size > options.bytes_max:
            raise TooLarge("bytes written by one transaction", size, options.bytes_max, "Write it in parts.")
        self._bytes = size
        writes[where] = (bound, data)

    def _lock(self, bound: Bound, row: bytes) -> None:
        locked = self._locked
        if locked is None:
            locked = self._locked = {}
        cells_max = self._client.config.transaction.cells_max
        if len(locked) >= cells_max:
            raise TooLarge("cells locked by one transaction", len(locked) + 1, cells_max, "Lock less at a time.")
        locked[bound.table, row, bound.column] = None

    # ------------------------------------------------------------ commit

    def discard(self) -> None:
        """End without a commit. Nothing was sent, so there is nothing to undo."""
        if self._open:
            self.end()
            self.outcome = "aborted"

    async def commit(self) -> int:
        """Commit; returns commit_ts, or 0 if nothing was written, nor any signal raised that anybody observes: then all
        that was read is of one moment, start_ts, and read locks have nothing to protect.

        Raises: WriteConflict, ReadConflict, RolledBack, CatalogueChanged (run it again), StoreFull, CommitUnknown.
        """
        if not self._open:
            raise self._closed()
        client = self._client
        intents = [_intent(where, write) for where, write in self._writes.items()]
        if self._ack is not None:
            intents.insert(0, self._ack)
        signals: list[Intent] = []
        if self._signals is not None:
            signals = [intent for intent in self._signals.values() if intent.observers or intent.covers]
            if not intents:
                intents = await self._bare_primary(signals)
        if not intents:
            self.end()
            self.outcome = "committed"
            return 0
        parts = self._parts(intents)
        if self._locked is not None:
            parts = self._with_more(parts, self._read_only(self._locked))
        if signals:
            parts = self._with_more(parts, signals)
        first = parts[0][0]
        primary = Cellref(first.table, first.row, first.column)
        driver = self._driver
        one_step = self._reads is None and driver.options.one_step and driver.fates.alone
        header = Header(self.start_ts, primary, self._root, self._depth, client.lease_token, self._path)
        self._primary = primary
        self.outcome = "unknown"
        observed = self._ack is not None or bool(signals)
        for intent in intents:
            if intent.observers:
                observed = True
                break
        commit = Commit(header, parts, self._reads, one_step=one_step)
        self._open = False  # from here on the driver says when it is done (G1)
        if self._ahead is not None:
            self._ahead.end()
        try:
            self.commit_ts = await driver.commit(
                commit, observed=observed, version=self._version or client.catalogue.binds
            )
        except ConflictAt as found:
            self.outcome = "aborted"
            raise conflict(found, client.name_of) from None
        except StaleAt as found:
            self.outcome = "aborted"
            raise client.read_conflict(found) from None
        except CatalogueChanged:
            self.outcome = "aborted"
            await client.reload()
            raise
        except BaseException as error:
            self.outcome = "unknown" if client.is_unknown(error) else "aborted"
            raise
        self.outcome = "committed"
        return self.commit_ts

    def _parts(self, intents: list[Intent]) -> list[list[Intent]]:
        """The cells by tablet (or by row, where the store has no groups), the primary's part first (T12)."""
        if len(intents) == 1:
            return [intents]
        store = self._driver.store
        parts: dict[object, list[Intent]] = {}
        for intent in intents:
            where = store.locate(intent.table, intent.row) if store.groups else (intent.table, intent.row)
            part = parts.get(where)
            if part is None:
                parts[where] = [intent]
            else:
                part.append(intent)
        if len(parts) == 1:
            return [intents]
        ordered = list(parts.values())
        if self._ack is None and len(ordered) > 1:
            ordered.sort(key=len, reverse=True)
        return ordered

    async def _bare_primary(self, signals: list[Intent]) -> list[Intent]:
        """What signals alone commit by (N5); nothing if nobody is to be told of any.

        Raises: CatalogueChanged if somebody may have begun to observe them meanwhile (N10): what commits nowhere would
        not find out.
        """
        if signals:
            return [Intent(signals[0].table, signals[0].row, bare_column(signals[0].column), BARE)]
        version = self._driver.oracle.catalogue_version
        if version > self._version:
            self.discard()
            await self._client.reload()
            raise CatalogueChanged(self.start_ts, version)
        return []

    def _read_only(self, locked: Iterable[_WHERE]) -> Iterator[Intent]:
        """What was read under a lock and is not written: its write would be its lock (T14)."""
        for table, row, column in locked:
            if (table, row, column) not in self._writes:
                yield Intent(table, row, column, READ)

    def _with_more(self, parts: list[list[Intent]], more: Iterable[Intent]) -> list[list[Intent]]:
        """The same with intents behind the writes: the primary is one of these (T12)."""
        store = self._driver.store

        def place(table: str, row: bytes) -> object:
            return store.locate(table, row) if store.groups else (table, row)

        by_place = {place(part[0].table, part[0].row): part for part in parts}
        for intent in more:
            by_place.setdefault(place(intent.table, intent.row), []).append(intent)
        return list(by_place.values())


def _intent(where: _WHERE, write: tuple[Bound, bytes | None]) -> Intent:
    table, row, column = where
    bound, data = write
    if data is None:
        return Intent(table, row, column, DELETE, b"", bound.observers)
    if len(data) <= SHORT_VALUE_BYTES:
        return Intent(table, row, column, PUT, data, bound.observers)
    return Intent(table, row, column, PUT_DATA, bound.group.encode(), bound.observers, (), data)


def _table(table: Table[K]) -> Table[K]:
    """Raises: UsageError for what is none, a table's name among others."""
    if not isinstance(table, Table):
        raise UsageError(f"expected a perco.Table, not {table!r}; db.schema.tables has them by name")
    return table
