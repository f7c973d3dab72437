"""The arguments and results of views' functions: puts, and the members of a group. Plain values; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from perco.errors import UsageError
from perco.schema.schema import Column, Table
from perco.txn.row import Row
from perco.views import aggregates
from perco.views.aggregates import Ordered, Sum, Tally, few, order_codec, order_key, sortable, tallied

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Put(Generic[K]):
    """A row that a view's function gives: `views.Put(postings, (word, doc.key), {n: 2})`.

    Attributes:
        table: one of the tables that the view writes.
        key: the row's key.
        values: by column; a column that is missing here, or None, has no value.
    """

    table: Table[K]
    key: K
    values: Mapping[Column[K, Any], Any]


class Group(Generic[K]):
    """The members of a group, as its function reads them.

    `for row in rows` gives the members' rows in the order of their keys. If the view keeps aggregates (`keep=`), there
    are only these: the members are not read.
    """

    __slots__ = ("_ordered", "_rows", "_sums", "_tally")

    def __init__(
        self,
        rows: Sequence[Row[K]] | None,
        tally: Tally | None = None,
        sums: Sequence[Sum] = (),
        ordered: Mapping[Ordered, Sequence[tuple[K, Any]]] | None = None,
    ) -> None:
        self._rows, self._tally, self._sums, self._ordered = rows, tally, sums, ordered or {}

    def __iter__(self) -> Iterator[Row[K]]:
        if self._rows is None:
            raise UsageError("this view keeps aggregates, so the rows of the members are not read; leave out keep=")
        return iter(self._rows)

    def count(self) -> int:
        """The number of members; at least 1."""
        if self._rows is not None:
            return len(self._rows)
        assert self._tally is not None
        return self._tally.members

    def sum(self, column: Column[K, V]) -> V:
        """The exact sum of a column of INT64 or FLOAT64; of floats, rounded once. A member without a value
        counts as 0."""
        if self._rows is not None:
            wanted = aggregates.sum(column)
            (total,) = tallied([wanted], ([row[column]] for row in self._rows)).totals
            return total.value(column.codec)  # type: ignore[no-any-return]
        assert self._tally is not None
        for total, each in zip(self._tally.totals, self._sums, strict=True):
            if each.column is column:
                return total.value(column.codec)  # type: ignore[no-any-return]
        raise UsageError(f"this view does not keep the sum of {column!r}; add views.sum({column.name}) to keep=")

    def smallest(self, column: Column[K, V], n: int = 1) -> list[tuple[K, V]]:
        """(key, value) of the n members with the smallest values, the smallest first; equal values by key."""
        return self._in_order(column, n, last=False)

    def largest(self, column: Column[K, V], n: int = 1) -> list[tuple[K, V]]:
        """(key, value) of the n members with the largest values, the largest first; equal values by key, descending."""
        return self._in_order(column, n, last=True)

    def _in_order(self, column: Column[K, Any], n: int, *, last: bool) -> list[tuple[K, Any]]:
        word = "largest" if last else "smallest"
        few(word, n)
        sortable(word, column)
        if self._rows is not None:
            return in_order(self._rows, column, n, last=last)
        for each, found in self._ordered.items():
            if each.column is column and (each.last if last else each.first) >= n:
                return list(found[:n])
        raise UsageError(
            f"this view does not keep the {n} {word} of {column!r}; add views.{word}({column.name}, {n}) to keep="
        )


def in_order(rows: Sequence[Row[K]], column: Column[K, Any], n: int, *, last: bool) -> list[tuple[K, Any]]:
    """The first or the last n members in the order of a column's value."""
    table, codec = column.table, order_codec(column.codec)
    found = [
        (codec.encode(order_key(column.codec, row[column])), table.row(row.key), row.key, row[column])
        for row in rows
        if row[column] is not None
    ]
    found.sort(key=lambda each: each[:2], reverse=last)
    return [(key, value) for _, _, key, value in found[:n]]
