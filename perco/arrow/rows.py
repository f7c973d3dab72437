"""Collects rows, and makes record batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from perco.arrow.fields import Field, schema_of

_ROWS: Final = 4096
_BYTES: Final = 4 << 20


class RowBatch:
    """Rows that are not in a batch yet.

    Attributes: `schema`: of the batches; `rows`: how many rows have been collected.
    """

    schema: pa.Schema
    rows: int

    def __init__(self, fields: Sequence[Field]) -> None:
        self.schema, self._fields = schema_of(fields), fields
        self._clear()

    def add(self, row: Any) -> None:
        """Add a `perco.Row`. Raises: as `convert`."""
        self.rows += 1
        for field, values in zip(self._fields, self._values, strict=True):
            if field.column is not None:
                value = row[field.column]
            else:
                value = row.key if field.part is None else row.key[field.part]
            if value is not None and field.make is not None:
                value = self.convert(field, value, row.key)
            if isinstance(value, str | bytes):
                self._bytes += len(value)
            values.append(value)

    def convert(self, field: Field, value: Any, key: Any) -> Any:
        """What Arrow takes for a value."""
        assert field.make is not None
        return field.make(value)

    @property
    def full(self) -> bool:
        return self.rows >= _ROWS or self._bytes >= _BYTES

    def taken(self) -> pa.RecordBatch:
        """A batch of the collected rows."""
        arrays = [pa.array(values, field.type) for values, field in zip(self._values, self._fields, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        self._clear()
        return batch

    def _clear(self) -> None:
        self._values: list[list[Any]] = [[] for _ in self._fields]
        self.rows = self._bytes = 0
