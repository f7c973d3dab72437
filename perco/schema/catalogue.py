"""The catalogue: the tables, columns and observers of a store, as durable, versioned data of the store itself.

Every client uses it. So a program that loads data without declaring the observers still notifies them: a column's
observers come from the catalogue, not from the program.

N10  Each version of the catalogue is a cell of the system table, with the version's number as its timestamp; the newest
     version counts. The program's schema is compared with it: a codec, key or group that differs is an error. New
     declarations go into the next version, by check-then-write, so that two programs cannot both add the same version.
     An observer's version never goes back. A process that registers an observer, or a higher version of it, then puts
     notify cells for the data that is already there (`notify/backfill.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgpack

from perco.errors import (
    Corruption,
    SchemaMismatch,
    StoreError,
    TabletSplit,
    Unavailable,
    UsageError,
    WriteUnknown,
)
from perco.protocol.records import ack_of, column_of, signal_of
from perco.protocol.retention import Keep
from perco.schema.codecs import codec_named
from perco.schema.lost import unknown_if_lost
from perco.schema.manner import Manner
from perco.schema.marker import MARKER_TS, refusal, unpack_marker
from perco.schema.schema import Column, Observer, Schema, Signal, Table
from perco.schema.tombstones import Tombstone, pack_tombstones, unpack_tombstones
from perco.storage import ABSENT, APPLIED, DATA, GROUPS_MAX, LOG, TS_MAX, Failed, Mutation, NoReply, RowStore, Verdict

SYSTEM_TABLE: Final = "_perco"
CATALOGUE_ROW: Final = b"catalogue"
_COLUMNS_MAX: Final = 1 << 15
_OBSERVERS_MAX: Final = (1 << 16) - 1  # the number of an observer has 16 bits of a cell's column
_TRIES: Final = 16
SIGNAL_CODEC: Final = "signal"  # takes the place of a column's codec (N5)


@dataclass(frozen=True, slots=True)
class ColumnEntry:
    """A column, as the catalogue records it."""

    number: int
    codec: str
    group: str  # the data group of its long values

    @property
    def is_signal(self) -> bool:
        """Whether this is a signal, which can only be raised (N5)."""
        return self.codec == SIGNAL_CODEC


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A table, as the catalogue records it.

    `splits`: the first rows of all its tablets but the first. `keep`: how long its old versions are kept; None: the
    store's default. `added`: the numbers of the tablets that splits have made, by their first rows; the tablets with
    which the table was made are numbered in order (P4). `changes`: whether its tablets keep a log (E1).
    """

    key: str
    splits: tuple[bytes, ...]
    columns: dict[str, ColumnEntry]
    keep: Keep | None = None
    added: dict[bytes, int] = field(default_factory=dict)
    changes: bool = False

    def tablets(self) -> list[tuple[int, bytes, bytes | None]]:
        """(number, first row, first row of the next tablet or None) for each tablet, in the order of the rows."""
        starts = [b"", *self.splits]
        stops: list[bytes | None] = [*self.splits, None]
        made = iter(range(len(starts)))
        return [
            (self.added[start] if start in self.added else next(made), start, stop)
            for start, stop in zip(starts, stops, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class ObserverEntry:
    """An observer, as the catalogue records it.

    Attributes:
        since: the version of the catalogue that registered this version of the observer.
        ready: True if its backfill is complete (N10), or none is needed.
        whole: True if it covers all data: there was none when it was registered, or its backfill covers the data.
        version: the highest version that was declared. Runs of a lower version no longer count (N3).
        at: a timestamp drawn after the registration was announced; transactions that began after it know of the
            registration. The backfill puts its notify cells at this timestamp. 0: not drawn yet, or not needed.
        manner: when the observer runs, as last declared for this version.
        told: True if a change may leave it without a notification, because its work was done with the change (V12).
        paused: True if it does not run until it is resumed; `building`: the id of a job that makes all that it
            derives from the data that is there, so it needs no backfill (`building.py`). It is paused meanwhile.
        built: the timestamp up to which that job has seen all changes, and the one at which it has published its rows.
        code: the fingerprint of the code that this version was registered with; "": unknown.
    """

    number: int
    table: str
    column: str
    since: int
    ready: bool
    version: int = 1
    at: int = 0
    whole: bool = False
    manner: Manner = Manner()
    paused: bool = False
    told: bool = False
    building: str = ""
    built: tuple[int, int] = (0, 0)
    code: str = ""

    def pack(self) -> list[Any]:
        """The first five fields, and the other fields that differ from their defaults."""
        more: dict[str, Any] = {}
        if self.version != 1:
            more["version"] = self.version
        if self.at:
            more["at"] = self.at
        if self.whole:
            more["whole"] = True
        if self.paused:
            more["paused"] = True
        if self.told:
            more["told"] = True
        if self.building:
            more["building"] = self.building
        if self.built != (0, 0):
            more["built"] = list(self.built)
        if self.code:
            more["code"] = self.code
        if self.manner != Manner():
            more["manner"] = [self.manner.delay_s, self.manner.max_delay_s, self.manner.priority]
        return [self.number, self.table, self.column, self.since, self.ready, more]

    @classmethod
    def unpack(
        cls, number: int, table: str, column: str, since: int, ready: bool, more: dict[str, Any] | None = None
    ) -> ObserverEntry:
        found = dict(more or {})
        if "manner" in found:
            delay_s, max_delay_s, priority = found["manner"]
            found["manner"] = Manner(delay_s=delay_s, max_delay_s=max_delay_s, priority=priority)
        if "built" in found:
            found["built"] = tuple(found["built"])
        return cls(number, table, column, since, ready, **found)

    def declared(self, observer: Observer, since: int) -> ObserverEntry:
        """The entry after another declaration; this entry if nothing changes.

        N10: the version never goes back. A process that declares a lower version leaves the observer's changes alone
        (`worker.py`).
        """
        at = (observer.column.table.name, observer.column.name)
        if (self.table, self.column) != at:
            raise SchemaMismatch(
                f"observer {observer.id!r} is registered for {self.table}.{self.column}, but the schema has it on "
                f"{at[0]}.{at[1]}. Give the new observer an id of its own."
            )
        if observer.version < self.version:
            return self
        if observer.version == self.version:
            return replace(self, manner=observer.manner, told=observer.told)
        # If the backfill of an earlier version is not complete, this version needs it, too.
        again = (observer.backfill and not isinstance(observer.column, Signal)) or not self.ready
        return replace(
            self,
            since=since,
            ready=not again,
            version=observer.version,
            at=0,
            whole=self.whole or again,
            manner=observer.manner,
            code=_code_of(observer),
            told=observer.told,
            built=(0, 0) if again else self.built,
        )


@dataclass(frozen=True, slots=True)
class Catalogue:
    """One version of the catalogue; an immutable value.

    `keep`: how long old versions are kept in tables without a `keep` of their own. `binds`: the newest version, up to
    this one, that writers and workers must know. It is announced, and transactions that began under an older version
    run again. `dropped`: the observers that were dropped, by number (N12).
    """

    version: int = 0
    tables: dict[str, TableEntry] = field(default_factory=dict)
    observers: dict[str, ObserverEntry] = field(default_factory=dict)
    keep: Keep = Keep()
    binds: int = 0
    dropped: dict[int, Tombstone] = field(default_factory=dict)

    def groups(self, table: str) -> list[str]:
        """The data groups that a table needs in addition to those that every table has."""
        return sorted({column.group for column in self.tables[table].columns.values()} - {DATA})

    def all_groups(self, table: str) -> list[str]:
        """`groups`, and the log if the table has one (E1)."""
        return [*self.groups(table), *([LOG] if self.tables[table].changes else [])]

    def keep_of(self, table: str) -> Keep:
        """How long old versions of a table are kept."""
        return self.tables[table].keep or self.keep

    def has(self, table: str, column: int) -> bool:
        """Whether the catalogue has a column, given the number by which the store's cells name it. An ack counts as the
        column that it acknowledges. A signal's bare column, for the primaries of transactions that raise signals and
        write nothing, counts as the signal."""
        entry = self.tables.get(table)
        return entry is not None and any(c.number == signal_of(column) >> 16 for c in entry.columns.values())

    def signals(self, table: str) -> frozenset[int]:
        """The signals of a table, by the numbers that the store's cells use for columns."""
        entry = self.tables.get(table)
        columns = entry.columns.values() if entry is not None else ()
        return frozenset(column_of(column.number) for column in columns if column.is_signal)

    def column_name(self, table: str, column: int) -> str:
        """The readable name of a column in the store; for acks and notify cells, column@observer."""
        entry = self.tables.get(table)
        number, observer = signal_of(column) >> 16, column & 0xFFFF
        name = next((name for name, c in entry.columns.items() if c.number == number), None) if entry else None
        if not observer:
            return name or f"#{number}"
        by = next((id for id, o in self.observers.items() if o.number == observer), f"#{observer}")
        return f"{name or f'#{number}'}@{by}"

    def declare(self, schema: Schema) -> Catalogue:
        """This catalogue with the schema's additions; the catalogue itself if there are none.

        Raises: SchemaMismatch if the two contradict each other.
        """
        tables = dict(self.tables)
        for table in schema.tables.values():
            tables[table.name] = _merge_table(tables.get(table.name), table)
            # A table that no folder can hold must not be recorded: the store could no longer be opened.
            if len({column.group for column in tables[table.name].columns.values()} - {DATA}) > GROUPS_MAX:
                raise SchemaMismatch(f"table {table.name!r} can have at most {GROUPS_MAX} locality groups of its own")
        observers = self._merge_observers(schema)
        keep = schema.keep or self.keep
        if (tables, observers, keep) == (self.tables, self.observers, self.keep):
            return self
        version = self.version + 1
        known = {id: replace(entry, manner=Manner()) for id, entry in self.observers.items()}
        alike = {id: replace(entry, manner=Manner()) for id, entry in observers.items()}
        binds = self.binds if (tables, alike) == (self.tables, known) else version
        return Catalogue(version, tables, observers, keep, binds, self.dropped)

    def _merge_observers(self, schema: Schema) -> dict[str, ObserverEntry]:
        observers = dict(self.observers)
        taken = {*(entry.number for entry in observers.values()), *self.dropped}
        for observer in schema.observers.values():
            entry = observers.get(observer.id)
            if entry is not None:
                observers[observer.id] = entry.declared(observer, self.version + 1)
                continue
            number = max(taken, default=0) + 1
            if number > _OBSERVERS_MAX:
                raise SchemaMismatch(f"no more than {_OBSERVERS_MAX} observers can be registered")
            taken.add(number)
            table, column = observer.column.table.name, observer.column.name
            there = table in self.tables and column in self.tables[table].columns
            nothing = not there or isinstance(observer.column, Signal)  # N5: a signal never has data
            observers[observer.id] = ObserverEntry(
                number,
                table,
                column,
                self.version + 1,
                nothing or not observer.backfill,
                observer.version,
                whole=nothing or observer.backfill,
                manner=observer.manner,
                code=_code_of(observer),
                told=observer.told,
            )
        return observers

    def began_at(self, id: str, version: int, at: int) -> Catalogue:
        """The next version, in which the observer's backfill puts its notify cells at the timestamp `at` (N10)."""
        entry = self.observers.get(id)
        if entry is None or entry.at or entry.version != version:
            return self  # another process has done this, has registered a higher version, or has dropped it (N12)
        return self._with(id, replace(entry, at=at))

    def made_ready(self, id: str, at: int) -> Catalogue:
        """The next version, in which the observer's backfill at the timestamp `at` is complete (N10)."""
        entry = self.observers.get(id)
        if entry is None or entry.ready or entry.at != at:
            return self
        return self._with(id, replace(entry, ready=True))

    def paused(self) -> set[str]:
        """Ids of the observers that are paused."""
        return {id for id, entry in self.observers.items() if entry.paused}

    def with_paused(self, id: str, paused: bool) -> Catalogue:
        """The next version, in which an observer is paused, or resumed.

        This version binds: a run that began before it, and has not drawn its commit timestamp, does not commit (N10).
        """
        if id not in self.observers:
            known = ", ".join(map(repr, self.observers)) or "none"
            raise UsageError(f"there is no observer {id!r} in this store; there are: {known}")
        if self.observers[id].paused == paused:
            return self
        entry = self.observers[id]
        if entry.building and entry.built[1] and not paused:
            raise UsageError(
                f"observer {id!r} belongs to views that are being built, and some of their rows are published: call "
                "perco.spark.build again, which completes them"
            )
        entry = replace(entry, paused=paused, building=entry.building if paused else "")
        return replace(self._with(id, entry), binds=self.version + 1)

    def _with(self, id: str, entry: ObserverEntry) -> Catalogue:
        return replace(self, version=self.version + 1, observers={**self.observers, id: entry})

    def with_split(self, table: str, row: bytes) -> Catalogue:
        """The next version, in which a tablet begins at a row; this one if a tablet begins there already (P4)."""
        return self.with_splits({table: [row]})

    def with_splits(self, rows: Mapping[str, Sequence[bytes]]) -> Catalogue:
        """The next version, in which tablets begin at these rows of tables; this one if all of them do already (P4)."""
        tables = dict(self.tables)
        for table, starts in rows.items():
            entry = tables[table]
            new = [row for row in starts if row not in entry.splits]
            number = max(number for number, _, _ in entry.tablets()) + 1
            added = {**entry.added, **{row: number + i for i, row in enumerate(new)}}
            if new:
                tables[table] = replace(entry, splits=tuple(sorted([*entry.splits, *new])), added=added)
        return self if tables == self.tables else replace(self, version=self.version + 1, tables=tables)

    def observed_tables(self) -> list[str]:
        """The tables that have observers, sorted."""
        return sorted({entry.table for entry in self.observers.values()})

    def unready(self) -> list[str]:
        """Ids of observers whose backfill is not complete (N10), but for those that are being built."""
        return [id for id, entry in self.observers.items() if not entry.ready and not entry.building]

    def pack(self) -> bytes:
        tables = {
            name: [
                t.key,
                list(t.splits),
                {n: [c.number, c.codec, c.group] for n, c in t.columns.items()},
                _pack_keep(t.keep) if t.keep else None,
                *([list(t.added.items())] if t.added or t.changes else []),
                *([True] if t.changes else []),
            ]
            for name, t in self.tables.items()
        }
        observers = {id: entry.pack() for id, entry in self.observers.items()}
        more = pack_tombstones(self.dropped)
        return msgpack.packb([self.version, tables, observers, _pack_keep(self.keep), self.binds, *more])  # type: ignore[no-any-return]

    @classmethod
    def unpack(cls, data: bytes) -> Catalogue:
        try:
            version, tables, observers, *more = msgpack.unpackb(data)  # old formats: `more` is empty, or lacks `binds`
            return cls(
                version,
                {
                    name: TableEntry(
                        key,
                        tuple(splits),
                        {n: ColumnEntry(*c) for n, c in columns.items()},
                        _unpack_keep(rest[0]) if rest and rest[0] else None,
                        dict(rest[1]) if len(rest) > 1 else {},
                        len(rest) > 2,
                    )
                    for name, (key, splits, columns, *rest) in tables.items()
                },
                {id: ObserverEntry.unpack(*entry) for id, entry in observers.items()},
                _unpack_keep(more[0]) if more else Keep(),
                more[1] if len(more) > 1 else version,
                unpack_tombstones(more[2:]),
            )
        except (ValueError, TypeError, AttributeError, UsageError, msgpack.UnpackException) as error:
            raise Corruption("catalogue", f"cannot be decoded: {error}") from error


def _pack_keep(keep: Keep) -> list[float]:
    return [float(keep.seconds), keep.versions]


def _unpack_keep(packed: list[Any]) -> Keep:
    seconds, versions = packed
    return Keep(seconds=seconds, versions=versions)


def _code_of(observer: Observer) -> str:
    return "" if observer.code is None else observer.code.fingerprint()


def _entry_of(column: Column[Any, Any] | Signal[Any], number: int) -> ColumnEntry:
    if isinstance(column, Signal):
        return ColumnEntry(number, SIGNAL_CODEC, DATA)
    return ColumnEntry(number, column.codec.name, DATA if column.group is None else f"{DATA}:{column.group}")


def _told(entry: ColumnEntry) -> str:
    return "a signal" if entry.is_signal else f"{entry.codec} in group {entry.group!r}"


def _merge_table(entry: TableEntry | None, table: Table[Any]) -> TableEntry:
    if entry is None:
        entry = TableEntry(table.key.name, table.splits, {}, changes=table.changes)
    elif entry.key != table.key.name:
        raise SchemaMismatch(
            f"table {table.name!r} has keys of {entry.key} in the store and of {table.key.name} in the schema. "
            "Declare it as it was made, or use another name."
        )
    elif table.changes and not entry.changes:
        raise SchemaMismatch(f"table {table.name!r} was made without changes=True, and cannot get a log later")
    columns = dict(entry.columns)
    declared_ones: list[Column[Any, Any] | Signal[Any]] = [*table.columns.values(), *table.signals.values()]
    for column in [*declared_ones, *table.hidden.values()]:
        known = columns.get(column.name)
        number = max((c.number for c in columns.values()), default=0) + 1
        declared = _entry_of(column, known.number if known is not None else number)
        if known is None:
            if number >= _COLUMNS_MAX:
                raise SchemaMismatch(f"table {table.name!r} cannot have more than {_COLUMNS_MAX - 1} columns")
            columns[column.name] = declared
        elif known != declared:
            raise SchemaMismatch(
                f"column {column!r} is {_told(known)} in the store, and {_told(declared)} in the schema. "
                "Declare it as it was made, or use another name."
            )
    return replace(entry, columns=columns, keep=table.keep or entry.keep)


async def load(store: RowStore) -> Catalogue:
    """The newest version in the store; version 0 if there is none yet. Raises: StoreError if a marker of `perco copy`
    keeps programs out (M2)."""
    version, packed = await _newest(store)
    if not version:
        return Catalogue()
    catalogue = Catalogue.unpack(packed)
    if catalogue.version != version:
        raise Corruption("catalogue", f"version {catalogue.version} is in the cell of version {version}")
    return catalogue


async def newest_version(store: RowStore) -> int:
    """The newest version's number; 0: there is none."""
    return (await _newest(store))[0]


async def _newest(store: RowStore) -> tuple[int, bytes]:
    [[cells]] = await store.read([(SYSTEM_TABLE, CATALOGUE_ROW, [(DATA, 0, 1, TS_MAX, 1)])])
    if not cells:
        return 0, b""
    if cells[0][0] == MARKER_TS:
        kind, other, _ = unpack_marker(cells[0][1])
        raise StoreError(f"this store {refusal(kind, other)}")
    return cells[0]


async def declare(store: RowStore, schema: Schema, found: Callable[[int], None] = lambda version: None) -> Catalogue:
    """Add the schema to the store's catalogue, and return the catalogue. `found`: called with each version found.

    Raises: SchemaMismatch, Unavailable; UsageError for a table with changes=True, if the store keeps no logs.
    """
    schema.must_suit(logs=store.logs)

    def bring_up(catalogue: Catalogue) -> Catalogue:
        found(catalogue.version)
        return catalogue.declare(schema)

    return await change(store, bring_up)


async def change(store: RowStore, step: Callable[[Catalogue], Catalogue], newest: Catalogue | None = None) -> Catalogue:
    """Replace the newest version with the next one; if another process is faster, try again from its version (N10).

    Args:
        newest: the newest version, if the caller has just loaded it.

    Raises: WriteUnknown, if a reply was lost and the store could not be reached afterwards (T4).
    """
    with unknown_if_lost("a change of the catalogue") as lost:
        for _ in range(_TRIES):
            before, newest = newest or await load(store), None  # T4: this also shows whether a lost write has arrived
            after = step(before)
            if after is before:
                return before
            assert after.version == before.version + 1
            put = (DATA, 0, after.version, after.pack())
            row = (CATALOGUE_ROW, ((ABSENT, DATA, 0, after.version, TS_MAX),), (put,))
            [verdict] = await store.apply([Mutation(SYSTEM_TABLE, (row,))])
            if verdict is APPLIED:
                return after
            if isinstance(verdict, Failed):
                raise verdict.error
            if isinstance(verdict, NoReply):
                lost.reason = verdict.reason
        raise Unavailable("other processes kept changing the catalogue, so this change could not be written")


class Bound:
    """A column or signal with its numbers in one store: what a transaction needs of it, looked up once."""

    declared: Column[Any, Any] | Signal[Any]
    table: str
    column: int
    group: str
    observers: tuple[int, ...]
    acks: tuple[int, ...]

    __slots__ = ("acks", "column", "declared", "group", "observers", "table")

    def __init__(self, declared: Column[Any, Any] | Signal[Any], catalogue: Catalogue) -> None:
        table = catalogue.tables[declared.table.name]
        entry = table.columns[declared.name]
        self.declared = declared
        self.table = declared.table.name
        self.column = column_of(entry.number)
        self.group = entry.group
        self.observers = observers_of(catalogue, declared.table.name, declared.name)
        self.acks = tuple(ack_of(self.column, number) for number in self.observers)

    def without(self, observer: int) -> Bound:
        """The same, but for one observer that is not notified (V12)."""
        made = Bound.__new__(Bound)
        made.declared, made.table, made.column, made.group = self.declared, self.table, self.column, self.group
        made.observers = tuple([number for number in self.observers if number != observer])
        made.acks = tuple([ack_of(made.column, number) for number in made.observers])
        return made


def observers_of(catalogue: Catalogue, table: str, column: str) -> tuple[int, ...]:
    """Numbers of all observers of a column, in order (N1, N11)."""
    found: Iterable[int] = (o.number for o in catalogue.observers.values() if (o.table, o.column) == (table, column))
    return tuple(sorted(found))


def schema_of(catalogue: Catalogue) -> Schema:
    """A schema for reading a store, made from its catalogue; columns with unknown codecs are read as bytes."""
    tables: list[Table[Any]] = []
    for name, entry in catalogue.tables.items():
        table: Table[Any] = Table(name, key=codec_named(entry.key), changes=entry.changes)
        for column, known in entry.columns.items():
            if known.is_signal:
                table.signal(column)
                continue
            if column.startswith("_"):
                table.hide(column, codec_named(known.codec))
                continue
            group = known.group.partition(":")[2] or None
            table.column(column, codec_named(known.codec), group=group)
        tables.append(table)
    return Schema(*tables)


def registered(schema: Schema, catalogue: Catalogue) -> dict[int, Observer]:
    """The schema's observers, by their numbers in the store."""
    entries = catalogue.observers
    return {entries[id].number: observer for id, observer in schema.observers.items() if id in entries}


def raise_for(verdict: Verdict, what: str) -> None:
    """Check that the verdict of a write that may be repeated is `APPLIED`.

    Raises: WriteUnknown, if the reply was lost (T4); Unavailable, if a tablet was split (P1); otherwise the error with
    which the write failed, or Corruption if it was refused.
    """
    if isinstance(verdict, Failed):
        if isinstance(verdict.error, TabletSplit):
            raise Unavailable(f"{what}: a tablet of {verdict.error.table} was just split") from verdict.error
        raise verdict.error
    if isinstance(verdict, NoReply):
        raise WriteUnknown(what, verdict.reason)
    raise Corruption(what, f"could not be written: {verdict}")
