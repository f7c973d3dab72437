"""Begins transactions and snapshots: draws a timestamp, and sets up the read-ahead and the notes of reads."""

from __future__ import annotations

from perco.protocol.reads import Isolation, Reads
from perco.txn.engine import Engine
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction

BLOCK = "transaction"  # the name under which transactions opened as blocks are counted and read ahead


async def begin(engine: Engine, isolation: Isolation | None, function: str = BLOCK) -> Transaction:
    """Begin a transaction. `function`: its name; its past runs decide what is read ahead."""
    engine.usable(writing=True)
    serializable = engine.is_serializable(isolation)
    return begun(engine, engine.oracle.draw_nowait() or await engine.oracle.draw(), serializable, function)


def begin_nowait(engine: Engine, isolation: Isolation | None, function: str = BLOCK) -> Transaction | None:
    """Like `begin`, but None if it would have to wait."""
    engine.usable(writing=True)
    serializable = engine.is_serializable(isolation)
    start_ts = engine.oracle.draw_nowait()
    return begun(engine, start_ts, serializable, function) if start_ts else None


def begun(engine: Engine, start_ts: int, serializable: bool, function: str) -> Transaction:
    """A transaction at a timestamp that was drawn for it."""
    txn = Transaction(engine, start_ts)
    if engine.prefetch.on:
        txn._ahead = engine.prefetch.begin(function)
    if serializable:
        txn._reads = Reads(engine.limits.reads_max)
    return txn


async def begin_snapshot(engine: Engine) -> Snapshot:
    """A snapshot at a new timestamp, which it holds until its end (G1)."""
    snap = Snapshot(engine, await engine.oracle.draw())
    if engine.prefetch.on:
        snap._ahead = engine.prefetch.begin("snapshot")
    engine.oracle.holds.open.add(snap.start_ts)
    return snap
