"""Access to the parts of snapshots, transactions and `db.options(...)`, for higher packages; not for programs."""

from __future__ import annotations

from typing import Any

from perco.schema.schema import Column
from perco.txn.engine import Engine
from perco.txn.retry import RetryOptions
from perco.txn.running import Retrying
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction


def engine_of(snap: Snapshot) -> Engine:
    """The engine of the store that a snapshot reads."""
    return snap._engine


def is_open(snap: Snapshot) -> bool:
    """Whether a snapshot or transaction can still be used."""
    return snap._open


def write_encoded(txn: Transaction, column: Column[Any, Any], row: bytes, data: bytes | None) -> None:
    """Write a cell whose key and value are in stored form; None deletes it. Raises: as `Transaction.set` does."""
    txn._note(txn._usable(column), row, data)


def size_of(txn: Transaction) -> tuple[int, int]:
    """The number of cells written and signals raised, and the size of the values in bytes."""
    return len(txn._writes) + (0 if txn._signals is None else len(txn._signals)), txn._bytes


def limits_of(made: Retrying) -> tuple[RetryOptions, bool]:
    """The limits that `db.options(...)` was made with, and whether its transactions are serializable."""
    return made._retry, made._serializable
