"""The common part of the sinks in SQL tables: the names of their columns, and rows as tuples. No I/O."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from perco.errors import UsageError
from perco.schema.codecs import Codec
from perco.schema.schema import Column, Table
from perco.views.compiled import codecs_of, key_of, parts_of
from perco.views.sinking import Delivered

NATIVE: Final = frozenset({"text", "int64", "float64", "bytes", "bool"})
VERSION, GONE = "perco_version", "perco_gone"


class SqlTable:
    """A table with the rows of a perco table: a column for each part of the key, one for each column, their version,
    and whether they are gone. A view with the table's name leaves out rows that are gone."""

    name: str

    def __init__(self, name: str | None, key: str | Sequence[str] | None) -> None:
        self._name, self._key = name, key

    def bind(self, table: Table[Any], columns: Sequence[Column[Any, Any]]) -> None:
        """Called by `Views.sink`, with what the rows have. Raises: UsageError for names that do not fit."""
        self._of: Codec[Any] = table.key
        self._columns = list(columns)
        self.name = self._name or table.name
        parts, what = codecs_of(table.key), f"{type(self).__name__} {self.name!r}"
        names = [self._key] if isinstance(self._key, str) else list(self._key or ())
        if not names:
            names = ["key"] if len(parts) == 1 else [f"key{number + 1}" for number in range(len(parts))]
        if len(names) != len(parts):
            raise UsageError(f"{what}: the key of {table!r} has {len(parts)} parts; name each")
        self._keys = names
        taken = [*names, *(column.name for column in columns), VERSION, GONE]
        same = {one.lower() for one in taken if [each.lower() for each in taken].count(one.lower()) > 1}
        if same:
            raise UsageError(f"{what} would have two columns named {sorted(same)[0]!r}: name key=")

    def _parts(self) -> list[tuple[str, Codec[Any]]]:
        return list(zip(self._keys, codecs_of(self._of), strict=True))

    def _names(self) -> list[str]:
        return [column.name for column in self._columns]

    def _stored(self, row: Delivered) -> list[Any]:
        """A row as the table has it: the parts of its key, its values, its version, and whether it is gone."""
        values = row.values or {}
        parts = [
            _to_sql(codec, part) for (_, codec), part in zip(self._parts(), parts_of(self._of, row.key), strict=True)
        ]
        return [
            *parts,
            *(_to_sql(c.codec, values[c.name]) if c.name in values else None for c in self._columns),
            row.version,
            row.values is None,
        ]

    def _delivered(self, stored: Sequence[Any]) -> Delivered:
        """A row of the table: the parts of its key, its values, and its version."""
        count = len(self._keys)
        return Delivered(self._key_of(stored[:count]), self._values(stored[count:-1]), stored[-1])

    def _key_of(self, stored: Sequence[Any]) -> Any:
        parts = zip(self._parts(), stored, strict=True)
        return key_of(self._of, tuple(_from_sql(codec, part) for (_, codec), part in parts))

    def _values(self, stored: Sequence[Any]) -> dict[str, Any]:
        pairs = zip(self._columns, stored, strict=True)
        return {column.name: _from_sql(column.codec, value) for column, value in pairs if value is not None}


def quoted(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def _to_sql(codec: Codec[Any], value: Any) -> Any:
    if codec.name in NATIVE:
        return value
    return json.dumps(value, ensure_ascii=False) if codec.name == "json" else codec.encode(value)


def _from_sql(codec: Codec[Any], stored: Any) -> Any:
    if codec.name == "bool":
        return bool(stored)
    if codec.name in NATIVE:
        return stored
    return json.loads(stored) if codec.name == "json" else codec.decode(stored)
