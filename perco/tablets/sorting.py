"""Makes the file of a tablet from rows in order, without a transaction for each: for a bulk load (P7).

A sorted file is written about ten times faster than the same rows in transactions: each page is written once, and full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perco.errors import TooLarge, UsageError
from perco.protocol.records import PUT, PUT_DATA, SHORT_VALUE_BYTES, ack_of, column_of, pack_cause, pack_record
from perco.schema.catalogue import Catalogue, observers_of
from perco.storage import LOG, NOTIFY, PROTOCOL_GROUPS, ROW_BYTES_MAX, VALUE_BYTES_MAX, WRITE, LmdbEngine, LmdbOptions
from perco.storage.keys import cell_key, escape, log_key

_FLUSHED_BYTES: Final = 8 << 20  # written in one transaction
_CELL_BYTES: Final = 64  # of a cell, besides its value
_MAP_BYTES: Final = 1 << 40  # of addresses, not of memory or of the disk


@dataclass(frozen=True, slots=True)
class Layout:
    """A table's properties that a program needs to make files for it. A plain value.

    Attributes:
        groups: the locality groups of the table's tablets.
        columns: by name, the number of the column in the store, its data group, and the numbers of the observers to
            notify.
    """

    table: str
    groups: tuple[str, ...]
    columns: Mapping[str, tuple[int, str, tuple[int, ...]]]

    @classmethod
    def of(cls, catalogue: Catalogue, table: str, *, silent: frozenset[str] = frozenset()) -> Layout:
        """The layout of a table. `silent`: ids of observers that are not notified."""
        entry = catalogue.tables[table]
        not_told = {catalogue.observers[id].number for id in silent}
        columns = {}
        for name, column in entry.columns.items():
            if not column.is_signal:
                told = tuple(number for number in observers_of(catalogue, table, name) if number not in not_told)
                columns[name] = (column_of(column.number), column.group, told)
        return cls(table, (*PROTOCOL_GROUPS, *catalogue.all_groups(table)), columns)


class SortedFile:
    """The file of a tablet that is being made. All its rows are committed at one timestamp.

    Attributes: `rows` and `cells`, how many were put; `first` and `last`, the first and the last row, as stored.
    """

    rows: int
    cells: int
    first: bytes
    last: bytes

    def __init__(self, path: Path, layout: Layout, ts: int) -> None:
        """Args: `path`: a folder, which is made; `ts`: the timestamp, of which the one before it is the start_ts."""
        self._layout, self._ts = layout, ts
        path.mkdir()  # not the load's folder: if that has gone, the load has ended
        options = LmdbOptions(sync=False, map_bytes=_MAP_BYTES, map_bytes_max=_MAP_BYTES)
        self._engine = LmdbEngine(path, layout.groups, options, readonly=False, lock=True)
        self._waiting: dict[str, list[tuple[bytes, bytes]]] = {group: [] for group in layout.groups}
        self._waiting_bytes = 0
        self._cause = pack_cause(ts, 0)
        # By column: what follows the row in the key of its record; its data group; for its notify cells, the same.
        self._of = {
            name: (
                cell_key(b"", number, ts),
                group,
                cell_key(b"", number, ts - 1),
                sorted(cell_key(b"", ack_of(number, observer), ts) for observer in told),
            )
            for name, (number, group, told) in layout.columns.items()
        }
        self._logs = LOG in layout.groups  # E1
        self._order = {name: number for name, (number, _, _) in layout.columns.items()}
        self._short = pack_record(PUT, ts - 1, b"")
        self.rows = self.cells = 0
        self.first = self.last = b""

    def put(self, row: bytes, values: Sequence[tuple[str, bytes]]) -> None:
        """Put a row: pairs of a column's name and a value, as stored. Rows come in ascending order, each once.

        Raises: UsageError, TooLarge; StoreFull.
        """
        if not row:
            raise UsageError("a bulk load takes no row whose key is empty: write that row in a transaction afterwards")
        if row <= self.last:
            raise UsageError(
                f"rows of a bulk load come in order, each once: {row!r:.100} came after {self.last!r:.100}"
            )
        if len(row) > ROW_BYTES_MAX:
            raise TooLarge("a row's key", len(row), ROW_BYTES_MAX, "Use shorter keys.", "bytes")
        if not values:
            return
        prefix = escape(row)
        records, waiting = self._waiting[WRITE], self._waiting
        names = values if len(values) == 1 else sorted(values, key=lambda each: self._order[each[0]])
        size = 0
        for name, value in names:
            record, group, data, told = self._of[name]
            size += len(value)
            if self._logs:
                waiting[LOG].append((log_key(prefix, self._order[name], self._ts), b""))
            if len(value) <= SHORT_VALUE_BYTES:
                records.append((prefix + record, self._short + value))
            elif len(value) > VALUE_BYTES_MAX:
                raise TooLarge(f"a value of column {name!r}", len(value), VALUE_BYTES_MAX, "Divide it.", "bytes")
            else:
                records.append((prefix + record, pack_record(PUT_DATA, self._ts - 1, group.encode())))
                waiting[group].append((prefix + data, value))
            if told:
                waiting[NOTIFY] += [(prefix + each, self._cause) for each in told]
        self.first = self.first or row
        self.last = row
        self.rows += 1
        self.cells += len(values)
        self._waiting_bytes += size + _CELL_BYTES * len(values)
        if self._waiting_bytes >= _FLUSHED_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._engine.append({group: cells for group, cells in self._waiting.items() if cells})
        self._waiting = {group: [] for group in self._layout.groups}
        self._waiting_bytes = 0

    def finish(self) -> None:
        """Write the rest, and sync the file (S2). Raises: StoreFull."""
        self._flush()
        self._engine.sync()
        self._engine.fill_up()
        self._engine.close()

    def abandon(self) -> None:
        """Close the file, which is incomplete."""
        self._engine.close()
