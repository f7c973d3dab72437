"""The catalogue: the tables, columns and observers of a store, as durable, versioned data of the store itself.

Every client uses it. So a program that loads data without declaring the observers still notifies them: a column's
observers come from the catalogue, not from the program.

N18  A program may declare a column or an observer under an earlier name, for example while a newer program is deployed.
     In that program's memory, the catalogue has that name; on disk, it has the newest name. Cells have numbers.
N10  Each version of the catalogue is a cell of the system table, with the version's number as its timestamp; the newest
     version counts. The program's schema is compared with it: a codec, key or group that differs is an error. New
     declarations go into the next version, by check-then-write, so that two programs cannot both add the same version.
     An observer's version never goes back. A process that registers an observer, or a higher version of it, then puts
     notify cells for the data that is already there (`notify/backfill.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from perco.schema.entries import (
    ObserverEntry,
    TableEntry,
    code_of,
    merge_table,
    newest_name,
    pack_keep,
    renamed,
    unpack_keep,
)
from perco.schema.lost import unknown_if_lost
from perco.schema.marker import MARKER_TS, refusal, unpack_marker
from perco.schema.schema import Column, Observer, Schema, Signal, Table
from perco.schema.tombstones import Tombstone, pack_tombstones, unpack_tombstones
from perco.storage import ABSENT, APPLIED, DATA, GROUPS_MAX, LOG, TS_MAX, Failed, Mutation, NoReply, RowStore, Verdict

SYSTEM_TABLE: Final = "_perco"
CATALOGUE_ROW: Final = b"catalogue"
_OBSERVERS_MAX: Final = (1 << 16) - 1  # the number of an observer has 16 bits of a cell's column
_TRIES: Final = 16


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
        return sorted(self.tables[table].groups() - {DATA})

    def all_groups(self, table: str) -> list[str]:
        """`groups`, and the log if the table has one (E1)."""
        return [*self.groups(table), *([LOG] if self.tables[table].changes else [])]

    def keep_of(self, table: str) -> Keep:
        """How long old versions of a table are kept."""
        return self.tables[table].keep or self.keep

    def has(self, table: str, column: int) -> bool:
        """Whether the catalogue has a column, given the number by which the store's cells name it. An ack counts as the
        column that it acknowledges. A signal's bare column, for the primaries of transactions that raise signals and
        write nothing, counts as the signal. A dropped column counts, too (N17)."""
        entry = self.tables.get(table)
        number = signal_of(column) >> 16
        return entry is not None and (number in entry.gone or any(c.number == number for c in entry.columns.values()))

    def is_gone(self, table: str, column: int) -> bool:
        """Whether a column, given as for `has`, was dropped (N17)."""
        return signal_of(column) >> 16 in self.tables[table].gone

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
        if name is None and entry is not None and number in entry.gone:
            name = f"{entry.gone[number].name} (dropped)"
        if not observer:
            return name or f"#{number}"
        by = next((id for id, o in self.observers.items() if o.number == observer), f"#{observer}")
        return f"{name or f'#{number}'}@{by}"

    def seen_by(self, schema: Schema) -> Catalogue:
        """The same version, under the names that a program declares (N18); this object if there is no difference.

        If the program renames a column or an observer back to an earlier name, it sees the newest one, until it has
        declared that.
        """
        tables = dict(self.tables)
        for table in schema.tables.values():
            name = table.name
            if (entry := tables.get(name)) is not None:
                mine = _names_here({key: column.names for key, column in entry.columns.items()}, _declared(table))
                if mine:
                    columns = {mine.get(key, key): column for key, column in entry.columns.items()}
                    tables[name] = replace(entry, columns=columns)
        ids = _names_here(
            {id: entry.names for id, entry in self.observers.items()},
            {id: observer.was for id, observer in schema.observers.items()},
        )
        if tables == self.tables and not ids:
            return self
        seen = replace(self, observers={ids.get(id, id): entry for id, entry in self.observers.items()})
        return seen.with_tables(tables)

    def with_tables(self, tables: dict[str, TableEntry]) -> Catalogue:
        """The same version, with these tables, whose columns may have other names now."""
        names = {
            (table, before): after
            for table, entry in self.tables.items()
            for before, after in _renames(entry, tables[table]).items()
        }
        if not names:
            return replace(self, tables=tables)
        observers = {
            id: replace(entry, column=names.get((entry.table, entry.column), entry.column))
            for id, entry in self.observers.items()
        }
        dropped = {
            number: grave._replace(column=names.get((grave.table, grave.column), grave.column))
            for number, grave in self.dropped.items()
        }
        return replace(self, tables=tables, observers=observers, dropped=dropped)

    def declare(self, schema: Schema) -> Catalogue:
        """This catalogue with the schema's additions, under the names that it declares. If there are none, the
        catalogue itself, provided that it has these names already (`seen_by`).

        Raises: SchemaMismatch if the two contradict each other.
        """
        seen = self.seen_by(schema)
        tables = dict(seen.tables)
        for table in schema.tables.values():
            self._must_have_this_name(table)
            tables[table.name] = merge_table(tables.get(table.name), table)
            # A table that no folder can hold must not be recorded: the store could no longer be opened.
            if len(tables[table.name].groups() - {DATA}) > GROUPS_MAX:
                raise SchemaMismatch(f"table {table.name!r} can have at most {GROUPS_MAX} locality groups of its own")
        after = seen.with_tables(tables)._with_observers(schema, seen)
        after = replace(after, keep=schema.keep or self.keep)
        if (after.tables, after.observers, after.keep) == (seen.tables, seen.observers, seen.keep):
            return seen
        known = {id: entry.without_manner() for id, entry in seen.observers.items()}
        alike = {id: entry.without_manner() for id, entry in after.observers.items()}
        binds = self.binds if (tables, alike) == (seen.tables, known) else self.version + 1
        return replace(after, version=self.version + 1, binds=binds)

    def _must_have_this_name(self, table: Table[Any]) -> None:
        """Raises: SchemaMismatch if the store has this table under an older name (N18)."""
        mine = self.tables.get(table.name)
        for name, entry in self.tables.items():
            if name == table.name or entry.dropped or not {table.title, *table.was} & {name, *entry.names}:
                continue
            if mine is not None and not mine.dropped:
                raise SchemaMismatch(
                    f"table {table.title!r} is declared with was={list(table.was)!r}, but the store has tables "
                    f"{table.name!r} and {name!r}. If {name!r} was made by mistake, drop it (perco drop STORE {name}); "
                    "if it has rows, declare both, under other names, and copy them."
                )
            names = [each for each in dict.fromkeys((name, *entry.names)) if each != table.title]
            how = f"with was={names!r}" if names else "without was="
            raise SchemaMismatch(
                f"table {table.title!r} was made as {name!r} in this store: declare it {how}. (A new table "
                "needs another name.)"
            )

    def title(self, table: str) -> str:
        """The newest name of a table (N18)."""
        entry = self.tables.get(table)
        return entry.names[-1] if entry is not None and entry.names else table

    def shared_id(self, id: str) -> str:
        """An observer's oldest id, by which processes speak of it to each other: each may declare another one (N18)."""
        entry = self.observers.get(id)
        return entry.names[0] if entry is not None and entry.names else id

    def own_id(self, shared: str) -> str:
        """The id that an observer has here, given its oldest one."""
        return next((id for id, entry in self.observers.items() if entry.names[:1] == (shared,)), shared)

    def _with_observers(self, schema: Schema, before: Catalogue) -> Catalogue:
        """The same, with the observers of a schema. `before`: the catalogue without the schema's tables and columns."""
        observers = dict(self.observers)
        taken = {*(entry.number for entry in observers.values()), *self.dropped}
        for observer in schema.observers.values():
            observers = renamed_observer(observers, observer, schema)
            entry = observers.get(observer.id)
            writes = self._numbers_of(observer.writes)
            if entry is not None:
                declared = entry.declared(observer, self.version + 1)
                if observer.version == entry.version:  # programs with other declarations may run side by side
                    declared = replace(declared, writes=tuple(sorted({*entry.writes, *writes})))
                elif observer.version > entry.version:
                    declared = replace(declared, writes=writes)
                observers[observer.id] = declared
                continue
            number = max(taken, default=0) + 1
            if number > _OBSERVERS_MAX:
                raise SchemaMismatch(f"no more than {_OBSERVERS_MAX} observers can be registered")
            taken.add(number)
            table, column = observer.column.table.name, observer.column.name
            earlier = before.tables[table].columns.values() if table in before.tables else ()
            there = self.tables[table].columns[column].number in {each.number for each in earlier}
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
                limits=observer.limits,
                code=code_of(observer),
                told=observer.told,
                names=(*observer.was, observer.id) if observer.was else (),
                writes=writes,
            )
        return replace(self, observers=observers)

    def _numbers_of(self, writes: Collection[tuple[str, str]] | None) -> tuple[tuple[str, int], ...]:
        """The columns and signals that an observer's declaration says that it writes, by their numbers."""
        return tuple(
            sorted(
                (table, self.tables[table].columns[name].number)
                for table, name in writes or ()
                if table in self.tables and name in self.tables[table].columns
            )
        )

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
        tables = {name: entry.pack() for name, entry in self.tables.items()}
        observers = {
            newest_name(id, entry.names): entry.pack(self._newest(entry.table, entry.column))
            for id, entry in self.observers.items()
        }
        dropped = {n: each._replace(column=self._newest(each.table, each.column)) for n, each in self.dropped.items()}
        more = pack_tombstones(dropped)
        return msgpack.packb([self.version, tables, observers, pack_keep(self.keep), self.binds, *more])  # type: ignore[no-any-return]

    def _newest(self, table: str, column: str) -> str:
        """The newest name of a column, which may have been dropped since."""
        entry = self.tables[table].columns.get(column)
        return column if entry is None else newest_name(column, entry.names)

    @classmethod
    def unpack(cls, data: bytes) -> Catalogue:
        try:
            version, tables, observers, *more = msgpack.unpackb(data)  # old formats: `more` is empty, or lacks `binds`
            return cls(
                version,
                {name: TableEntry.unpack(*entry) for name, entry in tables.items()},
                {id: ObserverEntry.unpack(*entry) for id, entry in observers.items()},
                unpack_keep(more[0]) if more else Keep(),
                more[1] if len(more) > 1 else version,
                unpack_tombstones(more[2:]),
            )
        except (ValueError, TypeError, AttributeError, UsageError, msgpack.UnpackException) as error:
            raise Corruption("catalogue", f"cannot be decoded: {error}") from error


def _declared(table: Table[Any]) -> dict[str, tuple[str, ...]]:
    """The columns and signals that a program declares, each with its earlier names."""
    columns: list[Column[Any, Any] | Signal[Any]] = [*table.columns.values(), *table.signals.values()]
    return {column.name: column.was for column in columns}


def _names_here(stored: Mapping[str, tuple[str, ...]], declared: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """For each stored name that a program does not declare, the earlier name that it declares, if there is one (N18).
    If `body` was once `contents`, and the program declares `contents`, this is {"body": "contents"}; but if it declares
    `contents` with was="body", it renames the column back, and this is empty.

    Args:
        stored: all names that each has had.
        declared: the earlier names that the program states.
    """
    found = {}
    for key, names in stored.items():
        if names and key not in declared:
            mine = [name for name in reversed(names) if name in declared and key not in declared[name]]
            if mine:
                found[key] = mine[0]
    return found


def _renames(before: TableEntry, after: TableEntry) -> dict[str, str]:
    """The columns whose names differ: their names before and after."""
    numbers = {column.number: name for name, column in after.columns.items()}
    names = {name: numbers.get(column.number, name) for name, column in before.columns.items()}
    return {name: now for name, now in names.items() if now != name}


def renamed_observer(
    observers: dict[str, ObserverEntry], observer: Observer, schema: Schema
) -> dict[str, ObserverEntry]:
    """The observers, after a declared rename of this one (N18). Raises: SchemaMismatch."""
    id = observer.id
    if id in observers:
        known = {each: key for key, entry in observers.items() if key != id for each in (key, *entry.names)}
        if both := [known[was] for was in observer.was if was in known]:
            raise SchemaMismatch(
                f"observer {id!r} is declared with was={list(observer.was)!r}, but the store also has observer "
                f"{both[0]!r}. Drop the one that is not used: perco observers STORE --drop ID"
            )
        return observers
    names = {id, *observer.was}
    before = next((key for key, entry in observers.items() if names & {key, *entry.names}), None)
    if before is None:
        return observers
    if before in schema.observers:
        raise SchemaMismatch(
            f"observer {before!r} once had the id {id!r}, and programs may still use that id for it: give the new "
            "observer another one"
        )
    entry = replace(observers[before], names=renamed(before, observers[before].names, id))
    return {id if key == before else key: entry if key == before else each for key, each in observers.items()}


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

    return await change(store, bring_up, schema=schema)


async def change(
    store: RowStore,
    step: Callable[[Catalogue], Catalogue],
    newest: Catalogue | None = None,
    schema: Schema | None = None,
) -> Catalogue:
    """Replace the newest version with the next one; if another process is faster, try again from its version (N10).

    Args:
        newest: the newest version, if the caller has just loaded it.
        schema: of a program under whose names `step` sees the catalogue, and it is returned (N18).

    Raises: WriteUnknown, if a reply was lost and the store could not be reached afterwards (T4).
    """
    with unknown_if_lost("a change of the catalogue") as lost:
        for _ in range(_TRIES):
            before, newest = newest or await load(store), None  # T4: this also shows whether a lost write has arrived
            if schema is not None:
                before = before.seen_by(schema)
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
        if entry.dropped:
            continue
        title, *was = reversed(entry.names or (name,))
        table: Table[Any] = Table(title, key=codec_named(entry.key), changes=entry.changes, was=was[::-1])
        for column, known in entry.columns.items():
            if known.is_signal:
                table.signal(column, was=known.names[:-1])
                continue
            if column.startswith("_"):
                table.hide(column, codec_named(known.codec))
                continue
            group = known.group.partition(":")[2] or None
            table.column(column, codec_named(known.codec), group=group, was=known.names[:-1])
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
