# Written by tools/fronts.py: change the class that it is written from, and run that again.
"""Reads of a snapshot, for asyncio."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from perco.aio.calling import Calling
from perco.aio.scanning import Scan
from perco.schema.schema import Column, Table
from perco.txn.row import Row

K = TypeVar("K")
V = TypeVar("V")


class Reading(Calling):
    """Reads of a snapshot, for asyncio tasks."""

    def get(self, column: Column[K, V], key: K, *, lock: bool = False) -> Coroutine[Any, Any, V | None]:
        """The value of a cell, or None.

        Args:
            lock: take a read lock (T14): the transaction commits only if no other transaction has written the cell by
                then; after that, only transactions that see this one's writes can write the cell. Costs as much as a
                write. No effect if the transaction writes nothing and raises no signal.

        Raises: TransactionClosed, TooLarge, Corruption; TypeError or ValueError for a key of the wrong type.
        """
        return self._ask("get", (column, key), {"lock": lock})

    def get_many(
        self, column: Column[K, V], keys: Iterable[K], *, lock: bool = False
    ) -> Coroutine[Any, Any, dict[K, V | None]]:
        """The values of many cells of a column, by key, in the order of `keys`; None if absent. `lock`: see `get`."""
        return self._ask("get_many", (column, keys), {"lock": lock})

    def row(
        self, table: Table[K], key: K, columns: Sequence[Column[K, Any]] | None = None, *, lock: bool = False
    ) -> Coroutine[Any, Any, Row[K]]:
        """Several columns of one row (all declared ones by default); absent values are None. `lock`: see `get`."""
        return self._ask("row", (table, key, columns), {"lock": lock})

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
        """The rows that have a value in any of the columns, in key order: `async for row in txn.scan(...)`.

        Args:
            start, stop: keys; start is included, stop is not.
            prefix: only keys that begin with it: a str or bytes, or for tuple keys a tuple of the first parts.
            columns: the columns to read; all declared ones by default.
            limit: the largest number of rows.
            reverse: True: in descending key order.

        The loop may be left at any point: nothing is held between two rows.

        Raises: UsageError for `lock`: there are no range locks.
        """
        return Scan(
            self._now(
                "scan",
                (table,),
                {
                    "start": start,
                    "stop": stop,
                    "prefix": prefix,
                    "columns": columns,
                    "limit": limit,
                    "reverse": reverse,
                    "lock": lock,
                },
            ),
            lambda scan: self._ask_for(scan.fetch),
        )
