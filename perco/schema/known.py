"""The schema and the catalogue of an opened store, and the numbers of its columns.

N10 The catalogue never goes back: a version that is older than the known one is not adopted.
"""

from __future__ import annotations

import struct
from typing import Any

from perco.errors import SchemaMismatch, UsageError
from perco.protocol.records import Cellref
from perco.schema.catalogue import Bound, Catalogue
from perco.schema.codecs import codec_named
from perco.schema.entries import must_agree
from perco.schema.schema import Column, Schema, Signal, Table


class Known:
    """The schema and the catalogue of one opened store. Loop thread only, except `must_be_column` and `must_be_signal`.

    Attributes:
        schema: as the program declared it, or made from the store's catalogue if the program has none (`borrowed`).
        bounds, signals: columns and signals looked up so far. Transactions refer to these dictionaries, so they are
            cleared, never replaced.
    """

    schema: Schema
    borrowed: bool
    catalogue: Catalogue

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.borrowed = False  # if True, columns are the same if their declarations are equal
        self.catalogue = Catalogue()
        self.bounds: dict[Column[Any, Any], Bound] = {}
        self.signals: dict[Signal[Any], Bound] = {}
        self._numbers: dict[tuple[str, str], int] = {}  # of the columns, as they were when the store was opened

    def borrow(self, schema: Schema) -> None:
        """Use a schema that was made from the store's catalogue."""
        self.schema, self.borrowed = schema, True

    def adopt(self, catalogue: Catalogue) -> bool:
        """Adopt a catalogue if it is newer than the known one; returns whether it is."""
        if catalogue.version <= self.catalogue.version:
            return False
        self.catalogue = catalogue
        self.forget()
        for table in self.schema.tables.values():
            if (entry := catalogue.tables.get(table.name)) is not None:
                columns: list[Column[Any, Any] | Signal[Any]] = [*table.columns.values(), *table.signals.values()]
                for column in columns:
                    if column.name in entry.columns:
                        self._numbers.setdefault((table.name, column.first_name), entry.columns[column.name].number)
        return True

    def forget(self) -> None:
        """Look up columns and signals again from now on, because the catalogue has changed."""
        self.bounds.clear()
        self.signals.clear()

    # ------------------------------------------------------------ columns

    def bind(self, column: Column[Any, Any]) -> Bound:
        """A column's numbers in this store, which are looked up once.

        Raises: UsageError for anything but a column; SchemaMismatch for a column that was not in the schema with which
        the store was opened.
        """
        self.must_be_column(column)
        bound = self.bounds[column] = Bound(column, self.catalogue)
        return bound

    def bind_signal(self, signal: Signal[Any]) -> Bound:
        """A signal's numbers. Raises: UsageError for anything but a signal; SchemaMismatch as `bind` does."""
        bound = self.signals.get(signal) if isinstance(signal, Signal) else None
        if bound is None:
            self.must_be_signal(signal)
            bound = self.signals[signal] = Bound(signal, self.catalogue)
        return bound

    def must_be_column(self, column: object) -> None:
        """Raises what `bind` raises; changes nothing. Any thread."""
        if isinstance(column, Signal):
            raise UsageError(f"{column!r} is a signal: it has no value; raise it with txn.signal({column.name}, key)")
        if not isinstance(column, Column):
            raise UsageError(f"expected a column, as made by Table.column, not {column!r}")
        self._must_be_declared(column)

    def must_be_signal(self, signal: object) -> None:
        """Raises what `bind_signal` raises; changes nothing. Any thread."""
        if not isinstance(signal, Signal):
            hint = "; a column is written with txn.set" if isinstance(signal, Column) else ""
            raise UsageError(f"expected a signal, as made by Table.signal, not {signal!r}{hint}")
        self._must_be_declared(signal)

    def _must_be_declared(self, column: Column[Any, Any] | Signal[Any]) -> None:
        known = self.schema.tables.get(column.table.name)
        if known is not column.table and not (self.borrowed and known is not None and _declares(known, column)):
            raise SchemaMismatch(f"{column!r} is not in the schema that this store was opened with")
        self._must_be_the_same(column)

    def _must_be_the_same(self, column: Column[Any, Any] | Signal[Any]) -> None:
        """Check that the store has this column, and no other one under its name: since the program opened the store,
        another program may have dropped the column, and made another one (N17). Raises: SchemaMismatch."""
        entry = self.catalogue.tables[column.table.name]
        stored = entry.columns.get(column.name)
        seen = self._numbers.get((column.table.name, column.first_name))
        gone = entry.gone.get(seen) if seen is not None else None
        if gone is None and stored is None:
            gone = next((each for each in entry.gone.values() if each.first_name == column.first_name), None)
        if gone is not None:
            again = "; another column has its name now" if stored is not None else ""
            raise SchemaMismatch(f"{column!r} has been dropped, and this program still declares it{again}")
        if stored is None:
            raise SchemaMismatch(f"{column!r} was declared after the store was opened; open it with the whole schema")
        if not self.borrowed:  # such a schema reads columns as bytes if their codec is unknown
            must_agree(entry, column, stored)

    # ------------------------------------------------------------ names for error messages

    def name_of(self, cell: Cellref) -> tuple[str, Any, str]:
        """(table, key, column) of a cell."""
        name = self.catalogue.column_name(cell.table, cell.column)
        return self.catalogue.title(cell.table), self.key_of(cell.table, cell.row), name

    def key_of(self, table: str, row: bytes | None) -> Any:
        """A row's key; the row itself if it is not a key (the end of a range need not be), or its table is unknown."""
        known, entry = self.schema.tables.get(table), self.catalogue.tables.get(table)
        if row is None or (known is None and entry is None):
            return row
        try:
            return (codec_named(entry.key) if known is None else known.key).decode(row)  # type: ignore[union-attr]
        except (ValueError, struct.error):
            return row


def _declares(table: Table[Any], column: Column[Any, Any] | Signal[Any]) -> bool:
    """Whether a table has a column with the same declaration."""
    if table.key.name != column.table.key.name:
        return False
    if isinstance(column, Signal):
        return column.name in table.signals
    known = table.columns.get(column.name) or table.hidden.get(column.name)
    return known is not None and (known.codec.name, known.group) == (column.codec.name, column.group)
