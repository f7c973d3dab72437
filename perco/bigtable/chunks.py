"""Assembles rows from the chunks in which Bigtable sends them. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from perco.errors import Corruption


class ReadCell(NamedTuple):
    """A cell as Bigtable stores it: family, qualifier, timestamp in microseconds, value."""

    family: str
    name: bytes
    micros: int
    value: bytes


class ReadRow(NamedTuple):
    """A row, with the cells that a filter has let through, in Bigtable's order. A cell may occur twice."""

    key: bytes
    cells: list[ReadCell]


class Chunks:
    """Assembles the chunks of one answer.

    Attributes: `passed`, the key of the last row that the server has read, whether the server sent the row or left it
    out; b"": none.
    """

    passed: bytes

    def __init__(self) -> None:
        self.passed = b""
        self._key = b""
        self._family, self._name, self._micros = "", b"", 0
        self._cells: list[ReadCell] = []
        self._parts: list[bytes] = []  # the parts of a value that comes in several chunks

    def take(self, response: Any) -> list[ReadRow]:
        """Add a message; returns the rows that it completes. Raises: Corruption."""
        rows = []
        for chunk in response.chunks:
            if chunk.reset_row:
                self._forget()
                continue
            if chunk.row_key:
                if self._key and self._key != chunk.row_key:
                    raise Corruption(f"row {self._key[:80]!r}", "Bigtable has sent only a part of it")
                self._key = chunk.row_key
            if chunk.HasField("family_name"):
                self._family = chunk.family_name.value
            if chunk.HasField("qualifier"):
                self._name = chunk.qualifier.value
            if not self._parts:
                self._micros = chunk.timestamp_micros
            self._parts.append(chunk.value)
            if not chunk.value_size:  # otherwise, more of this value follows
                value = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts = []
                self._cells.append(ReadCell(self._family, self._name, self._micros, value))
            if chunk.commit_row:
                if not self._key or self._parts:
                    raise Corruption("a row", "Bigtable has sent only a part of it")
                rows.append(ReadRow(self._key, self._cells))
                self.passed = self._key
                self._forget()
        if response.last_scanned_row_key:
            self.passed = response.last_scanned_row_key
        return rows

    def _forget(self) -> None:
        self._key, self._family, self._name, self._micros = b"", "", b"", 0
        self._cells, self._parts = [], []
