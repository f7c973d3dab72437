"""Sets up the transaction of an observer's run: what it acknowledges, what caused it, and what was read to start it.

N2  The acknowledgement removes the notify cells that the run has seen.
N3  The acknowledgement is the primary.
N5  A signal has no acknowledgement: the run's commit removes its notify cells.
N20 Several runs on rows may share a transaction. It then has an acknowledgement for each, of which the first is the
    primary, or the intent of each signal; and each cell carries the cause of the run that wrote it.
N10 The run commits only under the version of the catalogue with which it began.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from perco.protocol.mutations import Intent
from perco.protocol.snapshot import Missing, Value
from perco.storage import Query, RowCells
from perco.txn.driver import Driver
from perco.txn.prefetch import Ahead
from perco.txn.reader import WHERE
from perco.txn.spans import Span
from perco.txn.transaction import Transaction


def under(txn: Transaction, version: int) -> None:
    """Let the run commit only under this version of the catalogue (N10)."""
    txn._version = version


def caused(txn: Transaction, root: int, depth: int, path: bytes) -> None:
    """Note the cause of the run, for the changes that it makes."""
    txn._root, txn._depth, txn._path = root, depth, path


def carried(txn: Transaction) -> bytes:
    """The path that the changes of the transaction will carry (N9)."""
    return txn._path


def carry(txn: Transaction, path: bytes) -> None:
    """Let the changes of the transaction carry another path."""
    txn._path = path


def handled(txn: Transaction) -> None:
    """End the transaction of a run that has nothing to commit."""
    if txn._span is not None:
        txn._span.end(txn, "handled")
    txn.discard()


def traced(txn: Transaction, span: Span) -> None:
    """Give the transaction of a run its span."""
    txn._span = span


def ended(txn: Transaction) -> None:
    """End the transaction of a run, however the run has ended: it no longer holds back the watermark (G1). Called in a
    `finally`, so that an error of the run is the one that is being raised."""
    span = txn._span
    if span is not None and (error := sys.exc_info()[1]) is not None:
        span.failed(error.__cause__ or error)  # an observer's own error comes within one of perco's
    txn.discard()
    if span is not None:
        span.leave()


def share(txn: Transaction) -> None:
    """Let several runs share the transaction, which has written nothing yet (N20)."""
    txn._causes = {}


def has_written(txn: Transaction, cell: WHERE) -> bool:
    """Whether the transaction writes a cell."""
    return cell in txn._writes


def acknowledge(txn: Transaction, ack: Intent) -> None:
    """Have the transaction acknowledge a change; its first acknowledgement is the primary (N3)."""
    if txn._acks is None:
        txn._acks = [ack]
    else:
        assert txn._causes is not None, "N20: only a transaction that runs share acknowledges several rows"
        txn._acks.append(ack)


def observed(txn: Transaction, cell: WHERE, seen: Value | Missing) -> None:
    """Note the value of the observed cell. The worker read it when it decided to run the function; the function does
    not read the cell again (T14)."""
    txn._known = (cell, seen)
    if txn._reads is not None:
        txn._reads.note(*cell, seen.commit_ts)


def handle(txn: Transaction, signal: Intent) -> None:
    """Note a signal that the run handles. The signal's intent removes the notify cells that the run has seen (N5)."""
    if txn._signals is None:
        txn._signals = {}
    txn._signals[signal.table, signal.row, signal.column] = signal


def starts(txn: Transaction) -> bool:
    """Whether the transaction has no timestamp yet: `draw_and_read` draws it."""
    return txn._starts


async def draw_and_read(txn: Transaction, table: str, row: bytes, queries: Sequence[Query]) -> RowCells | None:
    """Draw the transaction's timestamp, and read cells of a row at it; in the queries, 0 stands for it. Returns None if
    they are to be read again, in another way."""
    found = await txn._draw_and_read([(table, row, queries)])
    await txn._draw()  # unless that has drawn it
    return found[0] if found else None


def ahead_of(txn: Transaction) -> Ahead | None:
    """The transaction's cache, which also plans the read-ahead."""
    return txn._ahead


def driver_of(txn: Transaction) -> Driver:
    """The driver of the session in which the transaction began. Its reads fail once that session has ended (R5)."""
    return txn._driver


def written(txn: Transaction) -> Iterable[WHERE]:
    """The cells that the transaction writes, and the signals that it raises or handles."""
    return txn._writes if txn._signals is None else (*txn._writes, *txn._signals)


def bytes_of(txn: Transaction) -> int:
    """How many bytes the values have that the transaction writes."""
    return txn._bytes


def only_handles(txn: Transaction) -> bool:
    """Whether the transaction only handles signals: its runs write, raise and lock nothing, and need no commit (N5)."""
    if txn._signals is None or txn._acks is not None or txn._writes or txn._locked is not None:
        return False
    return all(signal.covers for signal in txn._signals.values())
