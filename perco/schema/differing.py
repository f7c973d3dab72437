"""The differences between a program's schema and a store's catalogue, before the program opens the store.

N10 When a program opens a store, its new tables, columns and observers are added, and nothing is taken away. A
    declaration that contradicts the catalogue is an error.
N18 Columns and observers that it has renamed get their new names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from perco.errors import SchemaMismatch
from perco.protocol.retention import Keep
from perco.schema.catalogue import Catalogue, renamed_observer
from perco.schema.codes import changed
from perco.schema.entries import ObserverEntry, TableEntry
from perco.schema.schema import Observer, Schema, Signal

# The kinds of differences. Opening the store adds or changes something, leaves it though the program and the store
# differ, or is refused because of it.
ADDS, CHANGES, LEAVES, REFUSES = "adds", "changes", "leaves", "refuses"


class Difference(NamedTuple):
    """`kind`: ADDS, CHANGES, LEAVES or REFUSES. `what`: a table, column or observer. `effect`: of opening the store."""

    kind: str
    what: str
    effect: str


def differences(catalogue: Catalogue, schema: Schema) -> list[Difference]:
    """All differences between a catalogue and a schema."""
    catalogue = catalogue.seen_by(schema)
    return [
        *_of_tables(catalogue, schema),
        *_of_observers(catalogue, schema),
        *_of_retention(catalogue, schema),
        *(
            Difference(LEAVES, of, f"its code has changed, but not its version {version}: earlier results stay")
            for of, version in changed(catalogue, schema).items()
        ),
    ]


def _of_tables(catalogue: Catalogue, schema: Schema) -> Iterator[Difference]:
    declared_ones = {table.name for table in schema.tables.values()}
    for name in catalogue.tables:
        if name not in declared_ones and not catalogue.tables[name].dropped:
            yield Difference(LEAVES, f"table {catalogue.title(name)}", "this program does not declare it")
    for name, table in schema.tables.items():
        what = f"table {name}"
        try:
            declared = catalogue.declare(Schema(table))
        except SchemaMismatch as error:
            yield Difference(REFUSES, what, str(error))
            continue
        before, after = catalogue.tables.get(table.name), declared.tables[table.name]
        if before is None or before.dropped:
            logs = ", with a log of changes" if after.changes else ""
            yield Difference(ADDS, what, f"keys of {after.key}{logs}")
        elif (title := declared.title(table.name)) != catalogue.title(table.name):
            yield Difference(CHANGES, f"table {catalogue.title(table.name)}", f"is renamed to {title}")
        numbers = {} if before is None else {entry.number: column for column, entry in before.columns.items()}
        for column, entry in after.columns.items():
            if entry.number in numbers:
                if numbers[entry.number] != column:
                    yield Difference(CHANGES, f"column {name}.{numbers[entry.number]}", f"is renamed to {column}")
            elif not column.startswith("_"):
                gone = {} if before is None else before.gone
                again = any(each.first_name == entry.first_name(column) for each in gone.values())
                kind = "a signal" if entry.is_signal else entry.codec
                empty = "; new and empty: one of this name was dropped" if again else ""
                yield Difference(ADDS, f"column {name}.{column}", f"{kind}{empty}")
        for column in after.columns:
            if column not in table.columns and column not in table.signals and not column.startswith("_"):
                yield Difference(LEAVES, f"column {name}.{column}", "this program does not declare it")
        if before is not None and not before.dropped and before.keep != after.keep:
            was = _kept(before.keep) if before.keep is not None else "as the store's default"
            yield Difference(CHANGES, what, f"keeps old versions {_kept(after.keep)}; so far {was}")


def _of_observers(catalogue: Catalogue, schema: Schema) -> Iterator[Difference]:
    entries = catalogue.with_tables(_with_columns(catalogue, schema)).observers
    for id, observer in schema.observers.items():
        what = f"observer {id}"
        try:
            before, entries = entries, renamed_observer(entries, observer, schema)
        except SchemaMismatch as error:
            yield Difference(REFUSES, what, str(error))
            continue
        entry = entries.get(id)
        table, column = observer.column.table.name, observer.column.name
        if entry is None:
            yield Difference(ADDS, what, f"on {observer.column!r}; {_for_what_is_there(catalogue, observer)}")
            continue
        if id not in before:
            [old] = set(before) - set(entries)
            yield Difference(CHANGES, f"observer {old}", f"is renamed to {id}")
        if (entry.table, entry.column) != (table, column):
            has = f"{catalogue.title(entry.table)}.{entry.column}"
            text = f"the store has it on {has}, this program on {observer.column!r}"
            if has != repr(observer.column):  # else its table is refused, which has been told
                yield Difference(REFUSES, what, f"{text}: give the new observer an id of its own")
        else:
            yield from _of_observer(catalogue, what, observer, entry)
    for id, entry in entries.items():
        if id not in schema.observers:
            on = f"{catalogue.title(entry.table)}.{entry.column}"
            text = f"on {on}: this program lacks it, and its changes wait for one that has it"
            yield Difference(LEAVES, f"observer {id}", text)


def _with_columns(catalogue: Catalogue, schema: Schema) -> dict[str, TableEntry]:
    """The tables, with the columns of a schema, as far as it does not contradict them."""
    tables = dict(catalogue.tables)
    for table in schema.tables.values():
        with suppress(SchemaMismatch):
            if table.name in tables:
                tables[table.name] = catalogue.declare(Schema(table)).tables[table.name]
    return tables


def _of_observer(catalogue: Catalogue, what: str, observer: Observer, entry: ObserverEntry) -> Iterator[Difference]:
    if observer.version < entry.version:
        text = f"is version {entry.version} in the store, and {observer.version} here: this program does not run it"
        yield Difference(LEAVES, what, text)
        return
    if observer.version > entry.version:
        versions = f"version {entry.version} becomes {observer.version}"
        yield Difference(CHANGES, what, f"{versions}; {_for_what_is_there(catalogue, observer)}")
    if observer.manner != entry.manner:
        yield Difference(CHANGES, what, f"{_manner_of(entry)} becomes {_manner_of(observer)}")
    if observer.limits != entry.limits:
        yield Difference(CHANGES, what, f"{_limits_of(entry)} becomes {_limits_of(observer)}")
    if entry.paused:
        yield Difference(LEAVES, what, "is paused: it does not run until it is resumed")


def _for_what_is_there(catalogue: Catalogue, observer: Observer) -> str:
    table = catalogue.tables.get(observer.column.table.name)
    if isinstance(observer.column, Signal) or table is None or observer.column.name not in table.columns:
        return "runs for changes from then on"
    return "runs for all existing data" if observer.backfill else "does not run for existing data (backfill=False)"


def _manner_of(observer: Observer | ObserverEntry) -> str:
    manner = observer.manner
    delay = f"a delay of {manner.delay_s:g} s (at most {manner.max_delay_s:g} s)" if manner.delay_s else "no delay"
    return f"{delay} and priority {manner.priority}"


def _limits_of(observer: Observer | ObserverEntry) -> str:
    return ", ".join(f"{name}={value}" for name, value in observer.limits.stated().items()) or "no limits"


def _of_retention(catalogue: Catalogue, schema: Schema) -> Iterator[Difference]:
    if schema.keep is not None and catalogue.version and schema.keep != catalogue.keep:
        text = f"old versions are kept {_kept(schema.keep)} by default; so far {_kept(catalogue.keep)}"
        yield Difference(CHANGES, "the store", text)


def _kept(keep: Keep | None) -> str:
    if keep is None:
        return "as the store's default"
    return f"for {keep.seconds:g} s, and the newest {keep.versions}"
