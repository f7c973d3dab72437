"""Access to the parts of snapshots, transactions and `db.options(...)`, for higher packages; not for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from perco.errors import Corruption
from perco.protocol.records import Cellref
from perco.protocol.snapshot import Value
from perco.schema.schema import Column, Table
from perco.txn.driver import Driver
from perco.txn.engine import Engine
from perco.txn.retry import RetryOptions
from perco.txn.running import Retrying
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction

K = TypeVar("K")
L = TypeVar("L")
V = TypeVar("V")


def engine_of(snap: Snapshot) -> Engine:
    """The engine of the store that a snapshot reads."""
    return snap._engine


def driver_of(snap: Snapshot) -> Driver:
    """The driver with which a snapshot reads. Its reads fail once the snapshot's session has ended (R5)."""
    return snap._driver


async def still_kept(snap: Snapshot, table: str, failure: Corruption | None = None) -> None:
    """Check, after a read of many cells, that the snapshot's versions were still there (G5, T9).

    Args:
        failure: of the read; it is raised if they were.

    Raises: SnapshotTooOld, OwnerChanged.
    """
    await snap._still_kept(table, failure)


def is_open(snap: Snapshot) -> bool:
    """Whether a snapshot or transaction can still be used."""
    return snap._open


def starts(snap: Snapshot) -> bool:
    """Whether it is a transaction that has no timestamp yet, because its first read draws it (`starting.py`)."""
    return snap._starts


async def drawn(snap: Snapshot) -> None:
    """Draw the timestamp of a transaction that has none yet."""
    await snap._draw()


def fails(txn: Transaction, error: BaseException | None) -> None:
    """Note why a transaction will not commit, if its block has raised an error."""
    txn._fails(error)


def write_encoded(txn: Transaction, column: Column[Any, Any], row: bytes, data: bytes | None) -> None:
    """Write a cell whose key and value are in stored form; None deletes it. Raises: as `Transaction.set` does."""
    txn._note(txn._usable(column), row, data)


async def read_encoded(
    snap: Snapshot, table: Table[Any], rows: Sequence[bytes], columns: Sequence[Column[Any, Any]]
) -> list[list[bytes | None]]:
    """The cells of some rows, in stored form: for each row, in the order of the columns. None: there is none."""
    bounds = snap._of_table(table, columns)
    numbers = tuple([bound.column for bound in bounds])
    seen = await snap._see(table.name, [(row, numbers) for row in rows])
    found: list[list[bytes | None]] = []
    for row in rows:
        cells: list[bytes | None] = []
        for number in numbers:
            own = snap._writes.get((table.name, row, number))
            there = seen.get((row, number))
            cells.append(own[1] if own is not None else there.value if isinstance(there, Value) else None)
        found.append(cells)
    return found


async def get_with(
    snap: Snapshot, column: Column[K, V], keys: Sequence[K], other: Column[L, Any], key: L
) -> tuple[dict[K, V | None], Any]:
    """The values of a column at some keys, and of one other cell, which may be in another table: in one call, if the
    first read of a client's transaction draws its timestamp. The transaction has written none of these cells.

    Raises: as `Snapshot.get_many` does.
    """
    bound, also = snap._usable(column), snap._usable(other)
    rows = {each: column.table.row(each) for each in keys}
    wanted = [(row, (bound.column,)) for row in dict.fromkeys(rows.values())]
    seen, found = await snap._see_with(bound.table, wanted, Cellref(also.table, other.table.row(key), also.column))
    values = {each: snap._value(column, each, None, seen[row, bound.column])[0] for each, row in rows.items()}
    return values, snap._value(other, key, None, found)[0]


def lock(txn: Transaction, column: Column[Any, Any], key: Any) -> None:
    """Lock a cell as a read with `lock=True` does (T14), without reading it. Raises: as `Transaction.get` does."""
    txn._lock(txn._usable(column), column.table.row(key))


def without(txn: Transaction, column: Column[Any, Any], rows: Iterable[bytes], observer: int) -> list[bytes]:
    """Of these rows (in stored form), return those in which the transaction writes the column. An observer is not
    notified of these changes, because the transaction has done the observer's work itself (V12). Call it after the
    last write of the cells."""
    bound, writes = txn._usable(column), txn._writes
    quiet, found = bound.without(observer), []
    for row in rows:
        where = bound.table, row, bound.column
        write = writes.get(where)
        if write is not None:
            writes[where] = quiet if write[0] is bound else write[0].without(observer), write[1]
            found.append(row)
    return found


def size_of(txn: Transaction) -> tuple[int, int]:
    """The number of cells written and signals raised, and the size of the values in bytes."""
    return len(txn._writes) + (0 if txn._signals is None else len(txn._signals)), txn._bytes


def limits_of(made: Retrying) -> tuple[RetryOptions, bool]:
    """The limits that `db.options(...)` was made with, and whether its transactions are serializable."""
    return made._retry, made._serializable
