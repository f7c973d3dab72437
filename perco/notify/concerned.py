"""Decides which observers must have run for a view to be up to date. Pure.

V14 The observers *concerned* with some views are those that keep the views; those that may write a column, or raise a
    signal, that an observer concerned observes; and all observers of which the program does not know what they write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from perco.errors import UsageError
from perco.protocol.records import column_of, observer_of
from perco.schema.catalogue import Catalogue
from perco.schema.schema import Observer, Schema
from perco.storage import TS_MAX
from perco.txn.reader import WHERE


@dataclass(frozen=True, slots=True)
class Concerned:
    """The observers for which a caller waits.

    Attributes:
        without: the numbers of the store's other observers, and of those that have been dropped (N12).
        tables: the tables that the observers concerned observe, sorted.
        ids: ids of the observers concerned.
        every: whether these are all observers of the store.
    """

    without: frozenset[int]
    tables: tuple[str, ...]
    ids: frozenset[str]
    every: bool

    def __contains__(self, number: int) -> bool:
        return number not in self.without


def all_but(catalogue: Catalogue, without: Iterable[int] = ()) -> Concerned:
    """All observers of the store, but for those with these numbers."""
    left_out = frozenset(without).union(catalogue.dropped)
    entries = {id: entry for id, entry in catalogue.observers.items() if entry.number not in left_out}
    tables = tuple(sorted({entry.table for entry in entries.values()}))
    return Concerned(left_out, tables, frozenset(entries), len(entries) == len(catalogue.observers))


def concerned_with(catalogue: Catalogue, schema: Schema, views: Collection[str]) -> Concerned:
    """The observers concerned with these views (V14).

    Raises: UsageError for a view that the program does not declare, or that the store does not have.
    """
    declared = {id: schema.observers[id] for id in catalogue.observers if id in schema.observers}
    for view in views:
        _must_be_known(view, declared, schema)
    # An observer's writes are known if the store has the version that the program declares.
    known: Mapping[str, frozenset[tuple[str, str]]] = {
        id: observer.writes
        for id, observer in declared.items()
        if observer.writes is not None and catalogue.observers[id].version == observer.version
    }
    wanted = {id for id in catalogue.observers if id not in known or declared[id].view in views}
    left = set(known) - wanted
    while True:
        observed = {(entry.table, entry.column) for id, entry in catalogue.observers.items() if id in wanted}
        more = {id for id in left if not observed.isdisjoint(known[id])}
        if not more:
            break
        wanted |= more
        left -= more
    return all_but(catalogue, [catalogue.observers[id].number for id in left])


def _must_be_known(view: str, registered: Mapping[str, Observer], schema: Schema) -> None:
    if any(observer.view == view for observer in registered.values()):
        return
    declared = dict.fromkeys(observer.view for observer in schema.observers.values() if observer.view)
    if view in declared:
        raise UsageError(
            f"this store does not have view {view!r}: it has been dropped. Open the store again to build it"
        )
    names = ", ".join(map(repr, declared)) or "none"
    raise UsageError(f"this program's schema has no view or sink {view!r}; it has: {names}")


def must_be_declared(observer: Observer, catalogue: Catalogue, written: Iterable[WHERE]) -> None:
    """Check that a run of an observer with `writes=` has written nothing else (V14). Raises: UsageError."""
    assert observer.writes is not None
    columns = {table: entry.columns for table, entry in catalogue.tables.items()}
    allowed = {
        (table, column_of(columns[table][name].number))
        for table, name in observer.writes
        if name in columns.get(table, ())
    }
    for table, _, column in written:
        if not observer_of(column) and (table, column) not in allowed:
            raise UsageError(
                f"observer {observer.id!r} wrote {table}.{catalogue.column_name(table, column)}, which its writes= "
                "does not name: add the column there, or leave out writes="
            )


class Watch:
    """Notes, while a caller looks for waiting changes, the oldest cause that a run in flight carries (N7).

    Attributes:
        oldest: that cause; TS_MAX: there was no such run.
    """

    concerned: Concerned
    oldest: int

    __slots__ = ("_watches", "concerned", "oldest")

    def __init__(self, concerned: Concerned, watches: set[Watch]) -> None:
        self.concerned, self.oldest, self._watches = concerned, TS_MAX, watches
        watches.add(self)

    def saw(self, root: int) -> None:
        """Note a run with this root cause."""
        self.oldest = min(self.oldest, root)

    def end(self) -> None:
        self._watches.discard(self)


@dataclass(frozen=True, slots=True)
class Freshness:
    """How far a view is up to date.

    Attributes:
        ts: the view reflects every change that was committed at or before this timestamp; 0: it is not known to reflect
            any, because it is still being built.
        waiting: how many changes wait for the observers concerned with the view.
        failed: how many changes for these observers are on the failed list; the view does not reflect them.
        lag_s: how long ago the oldest change was committed that the view does not reflect, in seconds, exact to about a
            second; 0.0 if there is none.
    """

    ts: int
    waiting: int
    failed: int
    lag_s: float
