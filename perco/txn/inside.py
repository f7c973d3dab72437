"""The parts of snapshots, transactions and `db.options(...)`, for the packages above; not for programs."""

from __future__ import annotations

from typing import Any, Final

from perco.schema.schema import Column
from perco.txn.engine import Engine
from perco.txn.retry import RetryOptions
from perco.txn.running import Retrying
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction


def engine_of(snap: Snapshot) -> Engine:
    """The engine of the store that it reads."""
    return snap._engine


def is_open(snap: Snapshot) -> bool:
    """Whether it can still be used."""
    return snap._open


scan_between: Final = Snapshot._scan_between
"""Like `Snapshot.scan`, but of the rows between two bounds in stored form."""


def write_encoded(txn: Transaction, column: Column[Any, Any], row: bytes, data: bytes | None) -> None:
    """Write a cell whose key and value are in stored form; None deletes it. Raises: as `Transaction.set` does."""
    txn._note(txn._usable(column), row, data)


def size_of(txn: Transaction) -> tuple[int, int]:
    """The number of cells written and signals raised, and the bytes of the values."""
    return len(txn._writes) + (0 if txn._signals is None else len(txn._signals)), txn._bytes


def limits_of(made: Retrying) -> tuple[RetryOptions, bool]:
    """The limits that `db.options(...)` was made with, and whether its transactions are serializable."""
    return made._retry, made._serializable
