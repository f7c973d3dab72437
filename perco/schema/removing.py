"""Drops columns and tables from the catalogue. Pure: what a change of the catalogue does, in three steps.

N17 First the column leaves the catalogue, in a version that writers must know (N10); its number is never given again.
    Then a timestamp is drawn and recorded: every transaction that has written the column began before it. Once the
    watermark is higher than that timestamp, the vacuum settles all locks below the watermark (G2), then it removes the
    column's cells, and this is recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from perco.errors import UsageError
from perco.protocol.retention import Keep
from perco.schema.catalogue import Catalogue
from perco.schema.converting import mark_of
from perco.schema.entries import Gone, TableEntry


def without_columns(catalogue: Catalogue, table: str, columns: Collection[str]) -> Catalogue:
    """The next version, without these columns or signals of a table; this version if they have been dropped already.

    Raises: UsageError for a table or a column that the store does not have, or that observers need.
    """
    table, entry = _there(catalogue, table)
    dropped = {gone.name for gone in entry.gone.values()}
    for name in columns:
        if name.startswith("_") or (name not in entry.columns and name not in dropped):
            known = ", ".join(repr(each) for each in entry.columns if not each.startswith("_")) or "none"
            raise UsageError(f"there is no column {name!r} in table {catalogue.title(table)!r}; there are: {known}")
    gone = [name for name in columns if name in entry.columns]
    _must_be_unused(catalogue, table, gone)
    marks = {mark_of(entry.columns[name].first_name(name)) for name in gone} & set(entry.columns)  # N19
    return _next(catalogue, table, _without(entry, [*gone, *marks])) if gone else catalogue


def without_table(catalogue: Catalogue, table: str) -> Catalogue:
    """The next version, without a table; this version if it has been dropped already.

    Raises: UsageError for a table that the store does not have, or that observers need.
    """
    live = {name for name, entry in catalogue.tables.items() if not entry.dropped}
    if table in catalogue.tables.keys() - live and table not in map(catalogue.title, live):
        return catalogue
    table, entry = _there(catalogue, table)
    _must_be_unused(catalogue, table, list(entry.columns))
    after = replace(_without(entry, list(entry.columns)), dropped=True, keep=Keep(seconds=0))
    return _next(catalogue, table, after)


def undated(catalogue: Catalogue) -> list[tuple[str, int]]:
    """The columns that were dropped, and for which no timestamp has been recorded: (table, number)."""
    return [(t, number) for t, e in catalogue.tables.items() for number, gone in e.gone.items() if not gone.at]


def dated(catalogue: Catalogue, columns: Iterable[tuple[str, int]], at: int) -> Catalogue:
    """The next version, with the timestamp that was drawn after these columns had been dropped."""
    return _noted(catalogue, {where: catalogue.tables[where[0]].gone[where[1]]._replace(at=at) for where in columns})


def cleaned(catalogue: Catalogue, table: str, numbers: Iterable[int]) -> Catalogue:
    """The next version, in which these dropped columns have no cells any more."""
    gone = catalogue.tables[table].gone
    return _noted(catalogue, {(table, number): gone[number]._replace(clean=True) for number in numbers})


def _noted(catalogue: Catalogue, columns: Mapping[tuple[str, int], Gone]) -> Catalogue:
    tables = dict(catalogue.tables)
    for (table, number), gone in columns.items():
        tables[table] = replace(tables[table], gone={**tables[table].gone, number: gone})
    if tables == catalogue.tables:
        return catalogue
    return replace(catalogue, version=catalogue.version + 1, tables=tables)


def _there(catalogue: Catalogue, name: str) -> tuple[str, TableEntry]:
    """The table that has one of its names, as the catalogue has it. Raises: UsageError."""
    tables = {table: entry for table, entry in catalogue.tables.items() if not entry.dropped}
    named = [table for table, entry in tables.items() if name in entry.names]
    if found := ([name] if name in tables else named[:1]):
        return found[0], tables[found[0]]
    known = ", ".join(repr(catalogue.title(each)) for each in tables) or "none"
    raise UsageError(f"there is no table {name!r} in this store; there are: {known}")


def _without(entry: TableEntry, columns: Collection[str]) -> TableEntry:
    gone = {
        each.number: Gone(name, each.first_name(name), each.codec, each.group)
        for name, each in entry.columns.items()
        if name in columns
    }
    left = {name: column for name, column in entry.columns.items() if name not in columns}
    return replace(entry, columns=left, gone={**entry.gone, **gone})


def _next(catalogue: Catalogue, table: str, entry: TableEntry) -> Catalogue:
    version = catalogue.version + 1
    return replace(catalogue, version=version, binds=version, tables={**catalogue.tables, table: entry})


def _must_be_unused(catalogue: Catalogue, table: str, columns: Collection[str]) -> None:
    """Raises: UsageError if an observer observes one of these columns, or says that it writes it."""
    entry, title = catalogue.tables[table], catalogue.title(table)
    numbers = {(table, entry.columns[name].number): name for name in columns}
    for id, each in catalogue.observers.items():
        if each.table == table and each.column in columns:
            raise UsageError(
                f"observer {id!r} observes {title}.{each.column}: drop it first (perco observers STORE --drop ID; a "
                "view's observers, with perco views drop)"
            )
        if written := [numbers[where] for where in each.writes if where in numbers]:
            raise UsageError(
                f"observer {id!r} writes {title}.{written[0]}: drop it first (perco observers STORE --drop ID; a "
                "view's observers, with perco views drop), or deploy a higher version of it that does not"
            )
    left = [each.id for each in catalogue.dropped.values() if not each.clean and each.table == table]
    if left:
        raise UsageError(f"the drop of observer {left[0]!r} was interrupted: repeat it first")
