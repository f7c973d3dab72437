"""Some columns of one row, as a read found them."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

from perco.errors import UsageError
from perco.schema.schema import Column

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


class Row(Generic[K]):
    """Some columns of one row at one moment: `row[column]` is a value or None, `row.get(column, 0)` a value or 0."""

    key: K

    __slots__ = ("_cells", "key")

    def __init__(self, key: K, cells: dict[Column[K, Any], tuple[Any, int]]) -> None:
        self.key = key
        self._cells = cells

    def __getitem__(self, column: Column[K, V]) -> V | None:
        try:
            value: V | None = self._cells[column][0]
        except KeyError:
            if isinstance(column, str):
                raise UsageError(
                    f"read a row by column, as made by Table.column, not by the name {column!r}; "
                    "row.values() has the values by name"
                ) from None
            raise UsageError(
                f"{column!r} was not asked for; name it among the columns to read: in `columns=[...]`, or in a view's "
                "decorator"
            ) from None
        return value

    @overload
    def get(self, column: Column[K, V]) -> V | None: ...
    @overload
    def get(self, column: Column[K, V], default: D) -> V | D: ...
    def get(self, column: Column[K, Any], default: Any = None) -> Any:
        """Like `row[column]`, but with `default` for an absent value.

        Raises: UsageError for a column that was not asked for.
        """
        value = self[column]
        return default if value is None else value

    def commit_ts(self, column: Column[K, Any]) -> int:
        """The value's commit timestamp; 0 for a column that was never written, and for the transaction's own writes."""
        self[column]
        return self._cells[column][1]

    def __contains__(self, column: object) -> bool:
        """Whether the row has a value in that column."""
        return column in self._cells and self._cells[column][0] is not None

    def values(self) -> dict[str, Any]:
        """The values that are present, by column name."""
        return {column.name: cell[0] for column, cell in self._cells.items() if cell[0] is not None}

    def __repr__(self) -> str:
        return f"Row({self.key!r}, {self.values()!r})"


def has_values(row: Row[Any]) -> bool:
    """Whether a row has any value."""
    for value, _ in row._cells.values():  # noqa: SIM110  # `any` takes longer than the look
        if value is not None:
            return True
    return False
