"""Transactions of a client that draw their timestamp in the call of their first read, which saves a round trip.

G1  The owner holds the timestamp from the draw on. The client notes it when the answer arrives, in the same step of the
    loop, even if the reader has been cancelled meanwhile: so the timestamp is always let go of.
O2  The timestamp is drawn after the transaction has begun, so the transaction sees all that was committed by then.
T11 A function that wants `start_ts` before it has read anything runs again, with a timestamp that was drawn first.
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
from perco.storage import LOCK, WRITE, Cell, ReadRequest, RowCells
from perco.txn.engine import Engine
from perco.txn.prefetch import Plan
from perco.txn.transaction import Transaction

K = TypeVar("K")
V = TypeVar("V")

_ROWS_MAX = 256  # in the call that draws
_TAKEN: Any = object()  # in place of an event for which no task waits


class NotStarted(TransientError):
    """The transaction's timestamp was asked for before it was drawn. `db.run` runs the function again."""

    def __init__(self) -> None:
        super().__init__("the transaction has read nothing yet, so it has no timestamp yet")

    def __str__(self) -> str:
        return f"{self.args[0]}. Read something first."


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

    def __init__(self, engine: Engine, start: Start) -> None:
        super().__init__(engine, 0)
        del self.start_ts
        self._start: Start | None = start
        # None: no task draws the timestamp now; an event, if other tasks wait for the one that does.
        self._turn: trio.Event | None = None

    def __getattr__(self, name: str) -> NoReturn:
        if name == "start_ts":
            self._start = None  # from now on, it does nothing: the function runs again, whatever it makes of this error
            raise NotStarted
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _drawn(self, ts: int) -> bool:
        """Take the timestamp. Returns False, and lets go of it, if the transaction has ended, has got another one, or
        will do nothing more, because its function was hasty."""
        holds = self._engine.oracle.holds.open
        holds.add(ts)
        if not self._open or not self._starts or self._start is None:
            holds.discard(ts)
            _end_turn(self)
            return False
        self.start_ts, self._driver = ts, self._engine.driver
        self.__class__ = Transaction  # type: ignore[assignment]
        _end_turn(self)
        return True

    def _let_go(self) -> None:
        """Do nothing: there is no timestamp to let go of."""

    async def _draw(self) -> None:
        """Draw the timestamp, without a read. Raises: as `Oracle.draw`; TransactionClosed."""
        while self._starts:
            if not self._open:
                raise self._closed()
            if self._start is None:
                raise NotStarted
            if self._turn is not None:
                if self._turn is _TAKEN:
                    self._turn = trio.Event()
                await self._turn.wait()
                continue
            self._turn = _TAKEN
            try:
                self._drawn(await self._engine.oracle.draw())
            finally:
                _end_turn(self)

    async def _draw_and_read(self, requests: Sequence[ReadRequest]) -> list[RowCells] | None:
        """Draw the timestamp and read. Returns what was found of the first rows; None if the owner cannot read all
        that was asked for, or the timestamp was not wanted any more."""
        assert self._start is not None
        self._turn = _TAKEN
        try:
            return await self._start(requests, self._drawn)
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
        start = self._start
        if start is not None and self._turn is None and self._ahead is None:
            self._turn = _TAKEN
            try:
                queries = ((LOCK, number, 0, 0, 1), (WRITE, number, 0, 0, 1))
                found = await start(((table, row, queries),), self._drawn)
            except (TooLarge, Corruption):
                _end_turn(self)
                found = None
            except BaseException:
                _end_turn(self)
                raise
            if found:
                [[locks, writes]] = found
                here = _looked(self, table, row, number, locks, writes)
                if type(here) is not Value and type(here) is not Missing:
                    here = await self._driver.finish(table, row, number, self.start_ts, here)
                if self._reads is not None:
                    self._reads.note(table, row, number, here.commit_ts)
                return None if type(here) is Missing else decoded(column.codec, here.value, column, key)  # type: ignore[union-attr]
            await self._draw()
        seen = (await self._see(table, ((row, (number,)),)))[row, number]
        return None if type(seen) is Missing else decoded(column.codec, seen.value, column, key)  # type: ignore[union-attr]

    async def _see(
        self, table: str, wanted: Sequence[tuple[bytes, tuple[int, ...]]]
    ) -> dict[tuple[bytes, int], Value | Missing]:
        if not self._open:
            raise self._closed()
        start = self._start
        if start is None or self._turn is not None or not 0 < len(wanted) <= _ROWS_MAX:
            await self._draw()
            return await Transaction._see(self, table, wanted)
        ahead = self._ahead
        plans: list[Plan] = []
        if ahead is None:
            plans = [Plan(row, columns, ("",) * len(columns), len(columns)) for row, columns in wanted]
        else:
            ahead.begin_read()
            plans = [ahead.plan(table, row, columns) for row, columns in wanted]
        found = await self._draw_and_read([(table, plan.row, plan.queries(0)) for plan in plans])
        await self._draw()
        out: dict[tuple[bytes, int], Value | Missing] = {}
        if found:
            out = await self._finish(table, _seen(self, table, plans, found))
            for (row, column), value in out.items():
                if ahead is not None:
                    ahead.keep(table, row, column, value)
                if self._reads is not None:
                    self._reads.note(table, row, column, value.commit_ts)
        if found is None or len(found) < len(wanted):
            out.update(await Transaction._see(self, table, wanted[len(found or ()) :]))
        return out

    async def commit(self) -> int:
        """See `Transaction.commit`."""
        if self._open and (self._writes or self._signals is not None or self._start is None):
            await self._draw()
        return await Transaction.commit(self)


def was_hasty(txn: Transaction) -> bool:
    """Whether a transaction's function wanted the timestamp before it was drawn, and has to run again."""
    return type(txn) is Starting and txn._start is None


# What runs after the timestamp was drawn is no method: the class has changed by then.


def _end_turn(txn: Any) -> None:
    turn, txn._turn = txn._turn, None
    if turn is not None and turn is not _TAKEN:
        turn.set()


def _looked(
    txn: Transaction, table: str, row: bytes, column: int, locks: Sequence[Cell], writes: Sequence[Cell]
) -> Seen:
    try:
        return look(locks, writes)
    except Corruption as error:
        raise txn._driver.at(Cellref(table, row, column), error) from error


def _seen(
    txn: Transaction, table: str, plans: Sequence[Plan], found: Sequence[RowCells]
) -> dict[tuple[bytes, int], Seen]:
    """The cells that the first read has found. Raises: Corruption."""
    ahead = txn._ahead
    seen: dict[tuple[bytes, int], Seen] = {}
    for plan, cells in zip(plans, found, strict=False):
        row = plan.row
        if ahead is None:
            for i, column in enumerate(plan.columns):
                seen[row, column] = _looked(txn, table, row, column, cells[2 * i], cells[2 * i + 1])
            continue
        for column, raw in ahead.took(table, plan, cells):
            try:
                seen[row, column] = ahead.look(table, column, raw)
            except Corruption as error:
                raise txn._driver.at(Cellref(table, row, column), error) from error
    return seen
