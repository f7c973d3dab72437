"""The object through which programs read and write: it reads like a snapshot, with its own writes on top.

`set` and `delete` only note what to write, and never block. The limits are checked there, not at commit.

T14 A cell that is read with `lock=True` is locked against all writers while the transaction commits. A serializable
    transaction notes its reads, and repeats them at commit.
T12 The primary is the first acknowledgement, if the transaction is an observer's run that has one; otherwise it is a
    cell in the tablet in which the transaction writes the most cells.
N5  A signal is never the primary. If the transaction writes no cell, its primary is *bare*: a cell of its own, in
    a column that the catalogue does not list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import trio

from perco.errors import CatalogueChanged, CommitUnknown, TooLarge
from perco.protocol.commit import Commit
from perco.protocol.mutations import Cause, Header, Intent, write_of
from perco.protocol.reads import Isolation
from perco.protocol.records import (
    BARE,
    READ,
    SIGNAL,
    Cellref,
    bare_column,
)
from perco.schema.catalogue import Bound
from perco.schema.codecs import encoded
from perco.schema.schema import Column, Signal
from perco.storage import VALUE_BYTES_MAX, RowStore
from perco.txn.driver import ConflictAt, StaleAt, conflict
from perco.txn.engine import Engine
from perco.txn.lane import commit_in_lane, has_lane
from perco.txn.reader import WHERE
from perco.txn.resolver import make_token
from perco.txn.snapshot import Snapshot
from perco.txn.spans import Span
from perco.txn.turns import Lines

K = TypeVar("K")
V = TypeVar("V")

# The most cells of a row in one mutation, if the store cannot apply a mutation to several rows (no `groups`): such a
# store checks the cells in one call of limited size.
_CELLS_MAX: Final = 64


class Transaction(Snapshot):
    """Reads and writes that become visible together, or not at all.

    Attributes: `commit_ts`, 0 before the commit (and after it, if nothing was written); `outcome`: "open", "committed",
    "aborted" or "unknown" (T10).

    Serializable transactions that commit, and snapshots, behave as if they had run one after the other, in the order of
    their commit_ts; a transaction that wrote nothing counts as a snapshot. Transactions that are not serializable may
    still suffer, and cause, write skew.
    """

    commit_ts: int
    outcome: str

    __slots__ = (
        *(
            "_acks",
            "_bytes",
            "_causes",
            "_depth",
            "_first",
            "_locked",
            "_path",
            "_primary",
            "_root",
            "_signals",
            "_span",
            "_start",
            "_turn",
            "_watched",
        ),
        *("_version", "commit_ts", "outcome"),
    )

    _kind = "transaction"

    def __init__(self, engine: Engine, start_ts: int) -> None:
        super().__init__(engine, start_ts)
        if start_ts:
            engine.oracle.holds.open.add(start_ts)
        self.commit_ts = 0
        self.outcome = "open"
        self._primary: Cellref | None = None
        self._version = 0  # the catalogue's version at the start of the run, or at the first write (N10)
        self._bytes = 0
        self._locked: dict[WHERE, None] | None = None  # cells that were read under a lock (T14)
        self._acks: list[Intent] | None = None  # of an observer's run: the first is the primary (N2, N20)
        self._causes: dict[WHERE, Cause] | None = None  # of the cells, if several runs share the transaction (N20)
        self._signals: dict[WHERE, Intent] | None = None  # signals raised, and those that a run has seen (N5)
        self._first = False  # whether it is the first of several attempts, and has to give way (W5)
        self._root = self._depth = 0
        self._path = b""
        self._span: Span | None = None

    @property
    def isolation(self) -> Isolation:
        """The isolation level: "snapshot" or "serializable"."""
        return "snapshot" if self._reads is None else "serializable"

    @property
    def token(self) -> str:
        """The token for `db.outcome`, in any process; "" for a transaction that never began to commit."""
        return "" if self._primary is None else make_token(self.start_ts, self._primary)

    def set(self, column: Column[K, V], key: K, value: V) -> None:
        """Write a cell. Never blocks.

        Raises: TooLarge over a limit; TypeError or ValueError for a value that the codec cannot encode.
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
        """Raise a signal: once this transaction has committed, the signal's observers run for that key, at least once
        (N5). Never blocks, and never conflicts: many transactions may raise a signal at once, and one run may handle
        them all.

        Raises: UsageError for anything but a signal; TooLarge over a limit; TypeError or ValueError for a key of the
        wrong type; TransactionClosed.
        """
        if not self._open:
            raise self._closed()
        bound = self._engine.known.bind_signal(signal)
        row = signal.table.row(key)
        signals = self._signals
        if signals is None:
            signals = self._signals = {}
        if not self._version:
            self._version = self._engine.known.catalogue.binds
        where = (bound.table, row, bound.column)
        if self._causes is not None:
            self._caused(self._causes, where)
        cells_max = self._engine.limits.cells_max
        cells = len(signals) + len(self._writes)
        if cells >= cells_max and where not in signals:
            raise TooLarge(
                "cells of one transaction", cells + 1, cells_max, "Raise the signals in several transactions."
            )
        signals[where] = Intent(*where, SIGNAL, b"", bound.observers)

    def _note(self, bound: Bound, row: bytes, data: bytes | None) -> None:
        writes = self._writes
        if not self._version:
            self._version = self._engine.known.catalogue.binds
        where = (bound.table, row, bound.column)
        if self._causes is not None:
            self._caused(self._causes, where)
        limits = self._engine.limits
        old = writes.get(where)
        if old is None and len(writes) >= limits.cells_max:
            raise TooLarge("cells of one transaction", len(writes) + 1, limits.cells_max, "Write it in parts.")
        size = self._bytes
        if data is not None:
            size += len(data)
        if old is not None and old[1] is not None:
            size -= len(old[1])
        if size > limits.bytes_max:
            raise TooLarge("bytes written by one transaction", size, limits.bytes_max, "Write it in parts.")
        self._bytes = size
        writes[where] = (bound, data)

    def _caused(self, causes: dict[WHERE, Cause], where: WHERE) -> None:
        """Note that the run which uses the transaction now causes a change (N20)."""
        cause, before = Cause(self._root, self._depth, self._path), causes.get(where)
        causes[where] = cause if before is None else cause.with_another(before)

    def _lock(self, bound: Bound, row: bytes) -> None:
        locked = self._locked
        if locked is None:
            locked = self._locked = {}
        cells_max = self._engine.limits.cells_max
        if len(locked) >= cells_max:
            raise TooLarge("cells locked by one transaction", len(locked) + 1, cells_max, "Lock less at a time.")
        locked[bound.table, row, bound.column] = None

    # ------------------------------------------------------------ commit

    def discard(self) -> None:
        """End without a commit. Nothing was sent, so there is nothing to undo."""
        if self._open:
            self.end()
            self.outcome = "aborted"
        if self._span is not None:
            self._span.end(self)

    def _fails(self, error: BaseException | None) -> None:
        """Note on its span why it will not commit."""
        if self._span is not None and error is not None:
            self._span.failed(error)

    async def commit(self) -> int:
        """Commit; returns commit_ts, or 0 if nothing was written and no observed signal was raised: in that case all
        reads are as of start_ts, and the read locks have nothing to protect.

        Raises: WriteConflict, ReadConflict, RolledBack or CatalogueChanged (after each of these, run the transaction
        again); StoreFull; CommitUnknown.
        """
        if not self._open:
            raise self._closed()
        if self._span is not None and not self._span.commits:
            return await self._span.commit(self)
        engine = self._engine
        intents, signals = self._intents()
        if self._first and engine.lines.favoured:
            self._give_way(engine.lines, intents)
        observed = False
        for intent in intents:
            if intent.observers:
                observed = True
                break
        if self._acks is not None:
            observed = True
            intents[:0] = self._acks
        if self._signals is not None and not intents:
            intents = await self._bare_primary(signals)
        if not intents:
            self.end()
            self.outcome = "committed"
            return 0
        parts = [intents] if len(intents) == 1 else self._parts(intents)
        if self._locked is not None:
            parts = self._with_more(parts, self._read_only(self._locked))
        if signals:
            observed = True
            parts = self._with_more(parts, signals)
        first = parts[0][0]
        primary, driver = Cellref(first.table, first.row, first.column), self._driver
        one_step = self._reads is None and driver.one_step
        lane = one_step and len(parts) == 1 and self._locked is None and self._signals is None and has_lane(driver)
        header = Header(self.start_ts, primary, self._root, self._depth, engine.lease_token, self._path)
        version = self._version or engine.known.catalogue.binds
        self._primary, self.outcome = primary, "unknown"
        self._open = False  # from here on, the driver decides when the transaction is done (G1)
        if self._ahead is not None:
            self._ahead.end()
        try:
            commit_ts = 0
            if lane and driver.lane is not None:
                commit_ts = await driver.lane(header, parts, version, observed=observed)
            elif lane:
                commit_ts = await commit_in_lane(driver, header, parts, version, observed=observed)
            if not commit_ts:
                commit = Commit(header, parts, self._reads, one_step=one_step)
                commit_ts = await driver.commit(commit, observed=observed, version=version)
        except ConflictAt as found:
            self.outcome = "aborted"
            raise conflict(found, engine.known.name_of) from None
        except StaleAt as found:
            self.outcome = "aborted"
            raise engine.read_conflict(found) from None
        except CatalogueChanged:
            self.outcome = "aborted"
            await engine.renew()
            raise
        except BaseException as error:
            self.outcome = "unknown" if isinstance(error, CommitUnknown) else "aborted"
            raise
        self.commit_ts = commit_ts
        self.outcome = "committed"
        return commit_ts

    def _intents(self) -> tuple[list[Intent], list[Intent]]:
        """Of its writes, and of its signals that have observers, or that it handles."""
        intents = [
            write_of(*where, data, bound.group, bound.observers) for where, (bound, data) in self._writes.items()
        ]
        signals: list[Intent] = []
        if self._signals is not None:
            signals = [intent for intent in self._signals.values() if intent.observers or intent.covers]
        if self._causes is not None:
            return _with_causes(intents, self._causes), _with_causes(signals, self._causes)
        return intents, signals

    def _give_way(self, lines: Lines, intents: Sequence[Intent]) -> None:
        """W5. Raises: WriteConflict if another attempt is favoured at one of the cells."""
        for intent in intents:
            ticket = lines.favoured.get(where := intent[:3])
            if ticket is not None and ticket.task is not trio.lowlevel.current_task():
                lines.counters.gave_way += 1
                raise conflict(ConflictAt(Cellref(*where), 0, self.start_ts), self._engine.known.name_of)

    def _parts(self, intents: list[Intent]) -> list[list[Intent]]:
        """The cells by tablet (or by row, if the store cannot change several rows in one mutation), the primary's part
        first (T12)."""
        place = _placing(self._driver.store)
        parts: dict[object, list[Intent]] = {}
        for intent in intents:
            where = place(intent.table, intent.row)
            part = parts.get(where)
            if part is None:
                parts[where] = [intent]
            else:
                part.append(intent)
        if len(parts) == 1:
            return [intents]
        ordered = list(parts.values())
        if self._acks is None and len(ordered) > 1:
            ordered.sort(key=len, reverse=True)
        return ordered

    async def _bare_primary(self, signals: list[Intent]) -> list[Intent]:
        """The primary of a transaction that only raises signals (N5); an empty list if no observer is to be notified.

        Raises: CatalogueChanged if observers of the signals may have been registered meanwhile (N10): without a commit,
        the transaction would not find out.
        """
        if signals:
            return [Intent(signals[0].table, signals[0].row, bare_column(signals[0].column), BARE)]
        version = self._driver.oracle.catalogue_version
        if version > self._version:
            self.discard()
            await self._engine.renew()
            raise CatalogueChanged(self.start_ts, version)
        return []

    def _read_only(self, locked: Iterable[WHERE]) -> Iterator[Intent]:
        """Intents for cells that were read under a lock and are not written; a write locks its cell anyway (T14)."""
        for table, row, column in locked:
            if (table, row, column) not in self._writes:
                yield Intent(table, row, column, READ)

    def _with_more(self, parts: list[list[Intent]], more: Iterable[Intent]) -> list[list[Intent]]:
        """Add further intents to the parts, after the writes: the primary must be a write (T12)."""
        place = _placing(self._driver.store)
        by_place: dict[object, list[Intent]] = {}
        for part in parts:
            for intent in part:
                by_place.setdefault(place(intent.table, intent.row), part)
        for intent in more:
            by_place.setdefault(place(intent.table, intent.row), []).append(intent)
        return list(by_place.values())


def _with_causes(intents: list[Intent], causes: Mapping[WHERE, Cause]) -> list[Intent]:
    """Intents with the causes of the runs that made them; a signal that is handled (N5) already has its own."""
    return [intent if intent.covers else Intent(*intent[:-1], causes[intent[:3]]) for intent in intents]


def _placing(store: RowStore) -> Callable[[str, bytes], object]:
    """A function that takes the table and row of a transaction's next cell, and returns the part for that cell."""
    if store.groups:
        return store.locate
    counts: Counter[tuple[str, bytes]] = Counter()

    def place(table: str, row: bytes) -> object:
        counts[table, row] += 1
        return table, row, (counts[table, row] - 1) // _CELLS_MAX

    return place
