"""Transactions of a client that draw their timestamp in the call of their first read, which saves a round trip.

G1  The owner holds the timestamp from the draw on. The client notes it when the answer arrives, in the same step of the
    loop, even if the reader has been cancelled meanwhile: so the timestamp is always let go of.
O2  The timestamp is drawn after the transaction has begun, so the transaction sees all that was committed by then.
T7  The transaction conflicts with all that is committed after its function has looked at anything: the function has not
    waited before the call that draws, so it has not looked at anything yet. (A function of perco.sync runs in a thread,
    where this cannot be noticed: its transaction begins with its first read.)
T11 A function is *hasty* if it waits for anything else, or asks for `start_ts`, before its first read. It runs again,
    with a timestamp that was drawn first; and from then on, its timestamps are drawn first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import trio

from perco.errors import Corruption, TooLarge, TransientError
from perco.protocol.records import Cellref
from perco.protocol.snapshot import Missing, Seen, Value, look
from perco.schema.codecs import decoded
from perco.schema.schema import Column
from perco.storage import LOCK, WRITE, ReadRequest, RowCells
from perco.txn.engine import Engine
from perco.txn.prefetch import Plan
from perco.txn.transaction import Transaction

K = TypeVar("K")
V = TypeVar("V")

_ROWS_MAX = 256  # in the call that draws
_TAKEN: Any = object()  # in place of an event for which no task waits


class NotStarted(TransientError):
    """The function was hasty. `db.run` runs it again."""

    def __init__(self) -> None:
        super().__init__("the transaction has no timestamp yet, and cannot draw one after a wait")

    def __str__(self) -> str:
        return f"{self.args[0]}. `db.run` runs the function again."


class Start(Protocol):
    def __call__(
        self, requests: Sequence[ReadRequest], started: Callable[[int], bool]
    ) -> Awaitable[list[RowCells] | None]:
        """Draw a start timestamp, and read at it; in the requests, 0 stands for it. `started` gets the timestamp as
        soon as it is known, and returns whether the caller still wants it. Returns what was found: for all requests or,
        if that is too much for a message, for the first ones; None: the caller did not want it."""
        ...


class Starting(Transaction):
    """A transaction without a timestamp. It becomes a `Transaction` when it gets one."""

    __slots__ = ()

    _starts = True

    def __init__(self, engine: Engine, start: Start, *, watched: bool) -> None:
        """`watched`: it is for a function that may be hasty."""
        super().__init__(engine, 0)
        del self.start_ts
        self._start: Start | None = start
        # None: no task draws the timestamp now; an event, if other tasks wait for the one that does.
        self._turn: trio.Event | None = None
        self._watched = watched
        if watched:
            trio.lowlevel.current_task().custom_sleep_data = self  # trio removes this once the task has waited

    def __getattr__(self, name: str) -> NoReturn:
        if name == "start_ts":
            self._hasty()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _hasty(self) -> NoReturn:
        """From now on, the transaction does nothing: its function runs again, whatever it makes of this error."""
        self._start = None
        raise NotStarted

    def _must_be_first(self) -> Start:
        """Raise NotStarted if the function was hasty."""
        waited = self._watched and trio.lowlevel.current_task().custom_sleep_data is not self
        if self._start is None or waited:
            self._hasty()
        return self._start

    def _drawn(self, ts: int) -> bool:
        """Take the timestamp. Returns False, and lets go of it, if the transaction has ended, or will do nothing more,
        because its function was hasty; or if it has another one, because its first read was cancelled."""
        holds = self._engine.oracle.holds.open
        holds.add(ts)
        if not self._open or not self._starts or self._start is None:
            holds.discard(ts)
            _end_turn(self)
            return False
        self.start_ts: int = ts
        self._driver = self._engine.driver
        self.__class__ = Transaction  # type: ignore[assignment]
        _end_turn(self)
        return True

    def _let_go(self) -> None:
        """Do nothing: there is no timestamp to let go of."""

    async def _draw(self) -> None:
        """Draw the timestamp, without a read. Raises: as `Oracle.draw`; TransactionClosed; NotStarted."""
        while self._starts:
            if not self._open:
                raise self._closed()
            if self._turn is not None:
                if self._turn is _TAKEN:
                    self._turn = trio.Event()
                await self._turn.wait()
                continue
            self._must_be_first()
            self._turn = _TAKEN
            try:
                self._drawn(await self._engine.oracle.draw())
            finally:
                _end_turn(self)

    async def _draw_and_read(self, requests: Sequence[ReadRequest]) -> list[RowCells] | None:
        """Draw the timestamp and read. Returns what was found of the first rows; None if the owner cannot read all
        that was asked for, or the timestamp was not wanted any more. Raises: NotStarted."""
        start = self._must_be_first()
        self._turn = _TAKEN
        try:
            return await start(requests, self._drawn)
        except (TooLarge, Corruption):  # the reads that follow say more about it, or read less
            _end_turn(self)
            return None
        except BaseException:
            _end_turn(self)
            raise

    async def get(self, column: Column[K, V], key: K, *, lock: bool = False) -> V | None:
        """See `Snapshot.get`."""
        bound = self._usable(column)
        row = column.table.row(key)
        if lock:
            self._lock(bound, row)
        table, number = bound.table, bound.column
        if self._writes:
            own = self._writes.get((table, row, number))
            if own is not None:
                return None if own[1] is None else column.codec.decode(own[1])
        seen: Seen
        if self._turn is None and self._ahead is None:
            queries = ((LOCK, number, 0, 0, 1), (WRITE, number, 0, 0, 1))
            found = await self._draw_and_read(((table, row, queries),))
            if found:
                [[locks, writes]] = found
                try:
                    seen = look(locks, writes)
                except Corruption as error:
                    raise self._driver.at(Cellref(table, row, number), error) from error
                if type(seen) is not Value and type(seen) is not Missing:
                    seen = await self._driver.finish(table, row, number, self.start_ts, seen)
                if self._reads is not None:
                    self._reads.note(table, row, number, seen.commit_ts)
                return None if type(seen) is Missing else decoded(column.codec, seen.value, column, key)  # type: ignore[union-attr]
            await self._draw()
        seen = (await self._see(table, ((row, (number,)),)))[row, number]
        return None if type(seen) is Missing else decoded(column.codec, seen.value, column, key)  # type: ignore[union-attr]

    async def _see(
        self, table: str, wanted: Sequence[tuple[bytes, tuple[int, ...]]]
    ) -> dict[tuple[bytes, int], Value | Missing]:
        return (await self._see_first(table, wanted, None))[0]

    async def _see_with(
        self, table: str, wanted: Sequence[tuple[bytes, tuple[int, ...]]], other: Cellref
    ) -> tuple[dict[tuple[bytes, int], Value | Missing], Value | Missing]:
        out, seen = await self._see_first(table, wanted, other)
        if seen is None:
            at = other.row, other.column
            return out, (await Transaction._see(self, other.table, ((other.row, (other.column,)),)))[at]
        found = await self._driver.finish(*other, self.start_ts, seen)
        if self._reads is not None:
            self._reads.note(*other, found.commit_ts)
        return out, found

    async def _see_first(
        self, table: str, wanted: Sequence[tuple[bytes, tuple[int, ...]]], other: Cellref | None
    ) -> tuple[dict[tuple[bytes, int], Value | Missing], Seen | None]:
        """See `_see`. `other`: a cell to read in the same call, if it is made and has room."""
        if not self._open:
            raise self._closed()
        if self._turn is not None or not 0 < len(wanted) <= _ROWS_MAX:
            await self._draw()
            return await Transaction._see(self, table, wanted), None
        ahead = self._ahead
        if ahead is None:
            plans = [Plan(row, columns, ("",) * len(columns), len(columns)) for row, columns in wanted]
        else:
            ahead.begin_read()
            plans = [ahead.plan(table, row, columns) for row, columns in wanted]
        requests: list[ReadRequest] = [(table, plan.row, plan.queries(0)) for plan in plans]
        if other is not None:
            queries = ((LOCK, other.column, 0, 0, 1), (WRITE, other.column, 0, 0, 1))
            requests.append((other.table, other.row, queries))
        found = await self._draw_and_read(requests)
        await self._draw()
        if not found:
            return await Transaction._see(self, table, wanted), None
        also: Seen | None = None
        if other is not None and len(found) == len(requests):
            *found, (locks, writes) = found
            try:
                also = look(locks, writes)
            except Corruption as error:
                raise self._driver.at(other, error) from error
        count = len(found)  # of the first rows, if all do not fit into a message
        if ahead is None:
            seen = self._looked(table, wanted[:count], found)
        else:
            seen = self._took(ahead, table, zip(plans[:count], found, strict=True))
        out = await self._finish(table, seen)
        for (row, column), value in out.items():
            if ahead is not None:
                ahead.keep(table, row, column, value)
            if self._reads is not None:
                self._reads.note(table, row, column, value.commit_ts)
        if count < len(wanted):
            out.update(await Transaction._see(self, table, wanted[count:]))
        return out, also

    async def commit(self) -> int:
        """See `Transaction.commit`."""
        if self._open:
            if not self._writes and self._signals is None and self._start is not None:
                self._watched = False  # it has done nothing that could conflict, whatever its function has looked at
            await self._draw()
        return await Transaction.commit(self)


def was_hasty(txn: Transaction) -> bool:
    """Whether a transaction's function was hasty, and has to run again."""
    return type(txn) is Starting and txn._start is None


def _end_turn(txn: Any) -> None:
    """Let the tasks go on that wait for the timestamp. (This is no method: the class may have changed by then.)"""
    turn, txn._turn = txn._turn, None
    if turn is not None and turn is not _TAKEN:
        turn.set()
