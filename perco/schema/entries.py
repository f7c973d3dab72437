"""The catalogue's records of a table, a column and an observer. Pure.

N17 The number of a dropped column is never given again. The entry of a dropped table stays, without columns.
N18 A renamed column or observer keeps its number, and all names that it has had. In memory, an entry is found under the
    name by which the program declares it (`Catalogue.seen_by`); on disk, under its newest name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from perco.errors import SchemaMismatch
from perco.protocol.retention import Keep
from perco.schema.manner import Limits, Manner
from perco.schema.schema import Column, Observer, Signal, Table
from perco.storage import DATA

SIGNAL_CODEC: Final = "signal"  # takes the place of a column's codec (N5)
_COLUMNS_MAX: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class ColumnEntry:
    """A column, as the catalogue records it."""

    number: int
    codec: str
    group: str  # the data group of its long values
    names: tuple[str, ...] = ()  # if it was renamed (N18): all its names, the oldest first and the newest last

    def pack(self) -> list[Any]:
        return [self.number, self.codec, self.group, *([list(self.names)] if self.names else [])]

    @classmethod
    def unpack(cls, number: int, codec: str, group: str, names: Iterable[str] = ()) -> ColumnEntry:
        return cls(number, codec, group, tuple(names))

    def first_name(self, name: str) -> str:
        """The oldest name of a column that has this name here."""
        return self.names[0] if self.names else name

    @property
    def is_signal(self) -> bool:
        """Whether this is a signal, which can only be raised (N5)."""
        return self.codec == SIGNAL_CODEC


class Gone(NamedTuple):
    """A column that was dropped (N17).

    Attributes:
        name, first_name: its name then, and its oldest one; `codec` and `group`, as in `ColumnEntry`.
        at: a timestamp drawn after the drop was announced, so every transaction that has written the column began
            before it; 0: not drawn yet.
        clean: whether its cells have been removed.
    """

    name: str
    first_name: str
    codec: str
    group: str
    at: int = 0
    clean: bool = False


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A table, as the catalogue records it.

    `splits`: the first rows of all its tablets but the first. `keep`: how long its old versions are kept; None: the
    store's default. `added`: the numbers of the tablets that splits have made, by their first rows; the tablets with
    which the table was made are numbered in order (P4). `changes`: whether its tablets keep a log (E1). `gone`: the
    columns that were dropped, by number. `dropped`: whether the table itself was (N17); it has no columns then.
    `names`: if the table was renamed (N18), all its names; the catalogue has it under the oldest one.
    """

    key: str
    splits: tuple[bytes, ...]
    columns: dict[str, ColumnEntry]
    keep: Keep | None = None
    added: dict[bytes, int] = field(default_factory=dict)
    changes: bool = False
    gone: dict[int, Gone] = field(default_factory=dict)
    dropped: bool = False
    names: tuple[str, ...] = ()

    def named(self, names: Iterable[str]) -> str | None:
        """The column that has, or has had, the first of these names for which there is one (N18)."""
        for name in names:
            for key, entry in self.columns.items():
                if name == key or name in entry.names:
                    return key
        return None

    def groups(self) -> set[str]:
        """The data groups of its columns, and of those that were dropped: its tablets keep them."""
        return {each.group for each in self.columns.values()} | {each.group for each in self.gone.values()}

    def is_empty(self) -> bool:
        """Whether the table was dropped, and has no cells any more."""
        return self.dropped and all(gone.clean for gone in self.gone.values())

    def next_number(self) -> int:
        """The number of the next column."""
        return max([*(column.number for column in self.columns.values()), *self.gone], default=0) + 1

    def pack(self) -> list[Any]:
        """Later formats only add parts at the end, and only those that are needed."""
        more: dict[str, Any] = {}
        if self.gone:
            more["gone"] = [[number, *gone] for number, gone in self.gone.items()]
        if self.dropped:
            more["dropped"] = True
        if self.names:
            more["names"] = list(self.names)
        return [
            self.key,
            list(self.splits),
            {newest_name(name, entry.names): entry.pack() for name, entry in self.columns.items()},
            pack_keep(self.keep) if self.keep else None,
            *([list(self.added.items())] if self.added or self.changes or more else []),
            *([self.changes] if self.changes or more else []),
            *([more] if more else []),
        ]

    @classmethod
    def unpack(cls, key: str, splits: Iterable[bytes], columns: dict[str, list[Any]], *rest: Any) -> TableEntry:
        """Raises: TypeError, ValueError."""
        absent: tuple[Any, ...] = (None, (), False, {})
        keep, added, changes, more = [*rest, *absent[len(rest) :]]
        return cls(
            key,
            tuple(splits),
            {name: ColumnEntry.unpack(*entry) for name, entry in columns.items()},
            unpack_keep(keep) if keep else None,
            dict(added),
            bool(changes),
            {number: Gone(*gone) for number, *gone in more.get("gone", ())},
            more.get("dropped", False),
            tuple(more.get("names", ())),
        )

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
        manner, limits: when the observer runs, and within which limits, as last declared for this version. A worker
            goes by what its own program declares.
        told: True if a change may leave it without a notification, because its work was done with the change (V12).
        paused: True if it does not run until it is resumed; `building`: the id of a job that makes all that it
            derives from the data that is there, so it needs no backfill (`building.py`). It is paused meanwhile.
        built: the timestamp up to which that job has seen all changes, and the one at which it has published its rows.
        code: the fingerprint of the code that this version was registered with; "": unknown.
        names: if it was renamed (N18), all its ids, the oldest first and the newest last.
        writes: (table, number) of the columns and signals that its runs may write, if its declaration says so.
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
    limits: Limits = Limits()
    paused: bool = False
    told: bool = False
    building: str = ""
    built: tuple[int, int] = (0, 0)
    code: str = ""
    names: tuple[str, ...] = ()
    writes: tuple[tuple[str, int], ...] = ()

    def pack(self, column: str) -> list[Any]:
        """The first five fields, and the other fields that differ from their defaults. `column`: its newest name."""
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
        if limits := self.limits.stated():
            more["limits"] = limits
        if self.manner != Manner():
            more["manner"] = [self.manner.delay_s, self.manner.max_delay_s, self.manner.priority]
        if self.names:
            more["names"] = list(self.names)
        if self.writes:
            more["writes"] = list(self.writes)
        return [self.number, self.table, column, self.since, self.ready, more]

    @classmethod
    def unpack(
        cls, number: int, table: str, column: str, since: int, ready: bool, more: dict[str, Any] | None = None
    ) -> ObserverEntry:
        found = dict(more or {})
        if "manner" in found:
            delay_s, max_delay_s, priority = found["manner"]
            found["manner"] = Manner(delay_s=delay_s, max_delay_s=max_delay_s, priority=priority)
        if "limits" in found:
            found["limits"] = Limits.of(found["limits"])
        if "built" in found:
            found["built"] = tuple(found["built"])
        if "names" in found:
            found["names"] = tuple(found["names"])
        if "writes" in found:
            found["writes"] = tuple((table, number) for table, number in found["writes"])
        return cls(number, table, column, since, ready, **found)

    def without_manner(self) -> ObserverEntry:
        """The entry without what writers and other workers need not know."""
        return replace(self, manner=Manner(), limits=Limits(), writes=())

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
            return replace(self, manner=observer.manner, limits=observer.limits, told=observer.told)
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
            limits=observer.limits,
            code=code_of(observer),
            told=observer.told,
            built=(0, 0) if again else self.built,
        )


def pack_keep(keep: Keep) -> list[float]:
    return [float(keep.seconds), keep.versions]


def unpack_keep(packed: list[Any]) -> Keep:
    seconds, versions = packed
    return Keep(seconds=seconds, versions=versions)


def code_of(observer: Observer) -> str:
    return "" if observer.code is None else observer.code.fingerprint()


def _entry_of(column: Column[Any, Any] | Signal[Any], number: int) -> ColumnEntry:
    if isinstance(column, Signal):
        return ColumnEntry(number, SIGNAL_CODEC, DATA)
    return ColumnEntry(number, column.codec.name, DATA if column.group is None else f"{DATA}:{column.group}")


def _told(entry: ColumnEntry) -> str:
    return "a signal" if entry.is_signal else f"{entry.codec} in group {entry.group!r}"


def newest_name(name: str, names: tuple[str, ...]) -> str:
    """The newest name of what this program calls `name`, and that has had these names (N18)."""
    return names[-1] if names else name


def renamed(name: str, names: tuple[str, ...], to: str) -> tuple[str, ...]:
    """All names, after a rename: the oldest one stays the first, and the newest one is the last."""
    first, *others = names or (name,)
    return (first, *(each for each in others if each not in (first, to)), to)


def merge_table(entry: TableEntry | None, table: Table[Any]) -> TableEntry:
    """A table's entry, with what a program declares. Raises: SchemaMismatch."""
    again = entry is not None and entry.dropped
    if entry is None:
        names = (*table.was, table.title) if table.was else ()
        entry = TableEntry(table.key.name, table.splits, {}, changes=table.changes, names=names)
    elif entry.dropped:
        entry = _made_again(entry, table)
    elif entry.key != table.key.name:
        raise SchemaMismatch(_other_key(entry, table))
    if table.changes and not entry.changes:
        later = "; it was dropped: once the vacuum has removed its rows, it can" if again else ""
        raise SchemaMismatch(f"table {table.title!r} was made without changes=True, and cannot get a log later{later}")
    declared_ones: list[Column[Any, Any] | Signal[Any]] = [*table.columns.values(), *table.signals.values()]
    for column in [*declared_ones, *table.hidden.values()]:
        entry = _merge_column(entry, column)
    return replace(entry, keep=table.keep or entry.keep, names=_titled(entry.names, table))


def _titled(names: tuple[str, ...], table: Table[Any]) -> tuple[str, ...]:
    """All names of a table after a program has declared it (N18). An older program, which declares an earlier name,
    renames nothing; it would have to name the newest one in was=."""
    newest = names[-1] if names else table.name
    if table.title == newest or (table.title in (table.name, *names) and newest not in table.was):
        return names
    return renamed(table.name, names, table.title)


def _made_again(entry: TableEntry, table: Table[Any]) -> TableEntry:
    """The entry of a table that is declared again after a drop (N17). Raises: SchemaMismatch."""
    clean = all(gone.clean for gone in entry.gone.values())
    if entry.key != table.key.name and not clean:
        raise SchemaMismatch(
            f"table {table.title!r} was dropped, and had keys of {entry.key}: the store still has rows of it. Once the "
            f"vacuum has removed them (perco vacuum), a table with keys of {table.key.name} can have its name."
        )
    names = (*table.was, table.title) if table.was else ()
    changes = entry.changes or (clean and table.changes)  # no record is without an entry in the log (E1)
    return replace(entry, key=table.key.name, keep=None, dropped=False, names=names, changes=changes)


def _merge_column(entry: TableEntry, column: Column[Any, Any] | Signal[Any]) -> TableEntry:
    """Raises: SchemaMismatch."""
    columns, name = entry.columns, column.name
    both = [was for was in column.was if was in columns and was != name] if name in columns else []
    if both:
        raise SchemaMismatch(
            f"column {column!r} is declared with was={both[0]!r}, but the store has both columns. If {name!r} was made "
            "by mistake, drop it (perco drop); if it has values, declare both and copy them."
        )
    before = name if name in columns else entry.named([name, *column.was])
    if before is None:
        number = entry.next_number()
        if number >= _COLUMNS_MAX:
            raise SchemaMismatch(f"table {column.table.name!r} cannot have more than {_COLUMNS_MAX - 1} columns")
        new = replace(_entry_of(column, number), names=(*column.was, name) if column.was else ())
        return replace(entry, columns={**columns, name: new})
    known = columns[before]
    must_agree(entry, column, replace(known, names=known.names or (before,)))
    if before != name:
        if before in column.table.columns or before in column.table.signals:
            raise SchemaMismatch(
                f"column {column.table.name}.{before} was once named {name!r}, and programs may still use that name "
                "for it: declare the new column under another name"
            )
        known = replace(known, names=renamed(before, known.names, name))  # N18
        columns = {name if key == before else key: known if key == before else each for key, each in columns.items()}
    return replace(entry, columns=columns)


def must_agree(entry: TableEntry, column: Column[Any, Any] | Signal[Any], stored: ColumnEntry) -> None:
    """Check that a column is what its declaration says (N10, N18). Raises: SchemaMismatch."""
    first = stored.names[0] if stored.names else column.name
    if first != column.first_name:
        names = [each for each in stored.names if each != column.name]
        how = f"with was={names!r}" if names else "without was="
        raise SchemaMismatch(f"column {column!r} was made as {first!r} in this store: declare it {how}")
    declared = _entry_of(column, stored.number)
    if replace(stored, names=()) != declared:
        raise SchemaMismatch(
            f"column {column!r} is {_told(stored)} in the store, and {_told(declared)} in the schema. "
            "Declare it as it was made, or use another name."
        )
    if entry.key != column.table.key.name:
        raise SchemaMismatch(_other_key(entry, column.table))


def _other_key(entry: TableEntry, table: Table[Any]) -> str:
    return (
        f"table {table.title!r} has keys of {entry.key} in the store and of {table.key.name} in the schema. "
        "Declare it as it was made, or use another name."
    )
