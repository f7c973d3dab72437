"""Begins transactions and snapshots: draws a timestamp, and sets up the read-ahead and the notes of reads."""

from __future__ import annotations

from perco.protocol.reads import Isolation, Reads
from perco.txn.engine import Engine
from perco.txn.snapshot import Snapshot
from perco.txn.starting import Starting
from perco.txn.transaction import Transaction

_HASTY_MAX = 256  # names that are remembered

BLOCK = "transaction"  # the function's name for transactions opened as blocks: in counters, and for reading ahead


async def begin(
    engine: Engine,
    isolation: Isolation | None,
    function: str = BLOCK,
    *,
    traced: bool = True,
    first: bool = False,
) -> Transaction:
    """Begin a transaction.

    Args:
        function: the function's name; its past runs decide what is read ahead.
        traced: False: it gets a span later, or none.
        first: it is the first of several attempts, and gives way (W5).
    """
    engine.usable(writing=True)
    serializable = engine.is_serializable(isolation)
    start_ts = engine.oracle.draw_nowait() or await engine.oracle.draw()
    return begun(engine, start_ts, serializable, function, traced=traced, first=first)


def begin_nowait(engine: Engine, isolation: Isolation | None, function: str = BLOCK) -> Transaction | None:
    """Like `begin`, but returns None if it would have to wait."""
    engine.usable(writing=True)
    serializable = engine.is_serializable(isolation)
    start_ts = engine.oracle.draw_nowait()
    return begun(engine, start_ts, serializable, function) if start_ts else None


async def begin_run(engine: Engine, isolation: Isolation | None, observer: str, *, first: bool) -> Transaction:
    """Begin the transaction of an observer's run; the read of the claim may draw the timestamp."""
    engine.usable(writing=True)
    serializable = engine.is_serializable(isolation)
    late = starting(engine, serializable, observer, watched=False, traced=False, first=first)
    return late or await begin(engine, isolation, observer, traced=False, first=first)


def starting(
    engine: Engine, serializable: bool, function: str, *, watched: bool = True, traced: bool = True, first: bool
) -> Transaction | None:
    """A transaction for a function that may run again, whose first read draws the timestamp (`starting.py`); None: it
    has to be drawn before. `watched`: the function may be hasty."""
    start = engine.driver.start
    if start is None or function in engine.hasty:
        return None
    return _begun(Starting(engine, start, watched=watched), serializable, function, traced=traced, first=first)


def is_hasty(engine: Engine, function: str) -> None:
    """Note that a function is hasty: its timestamps are to be drawn first."""
    if len(engine.hasty) >= _HASTY_MAX:
        engine.hasty.clear()
    engine.hasty.add(function)


def begun(
    engine: Engine, start_ts: int, serializable: bool, function: str, *, traced: bool = True, first: bool = False
) -> Transaction:
    """A transaction at a timestamp that was drawn for it."""
    return _begun(Transaction(engine, start_ts), serializable, function, traced=traced, first=first)


def _begun(txn: Transaction, serializable: bool, function: str, *, traced: bool, first: bool) -> Transaction:
    engine, txn._first = txn._engine, first
    if traced and engine.spans is not None:
        txn._span = engine.spans.begun(txn, function)
    if engine.prefetch.on:
        txn._ahead = engine.prefetch.begin(function)
    if serializable:
        txn._reads = Reads(engine.limits.reads_max)
    return txn


async def begin_snapshot(engine: Engine) -> Snapshot:
    """A snapshot at a new timestamp. Until its end, it keeps the watermark from passing that timestamp (G1)."""
    snap = Snapshot(engine, await engine.oracle.draw())
    if engine.prefetch.on:
        snap._ahead = engine.prefetch.begin("snapshot")
    engine.oracle.holds.open.add(snap.start_ts)
    return snap
