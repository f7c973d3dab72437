"""One look at what still waits for observers: notify cells, pending signals, and locks of observed cells (N7)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import trio

import perco
from perco.cli.screen import counted
from perco.database.inside import inside
from perco.errors import StoreError
from perco.notify.lagging import Tally
from perco.protocol.records import Cellref, column_of, observer_of, unpack_cause
from perco.schema import catalogue as catalogues
from perco.schema.catalogue import Catalogue
from perco.serve.client import is_client, remote_owner
from perco.serve.opening import visiting
from perco.storage import FAILED_LIST, LOCK, NOTIFY, PENDING, TRACE, WRITE

_ASKED_S: Final = 3.0  # how long to wait for an answer from the owner, whose loop may be held


@dataclass(frozen=True, slots=True)
class Look:
    """The changes that wait for each observer, by id, and locks that will notify an observer.

    `marks`: the numbers of write records, traces and failed changes of each tablet. A notification begins only with a
    write record, with the trace of a transaction that only raises signals (N5), or with the replay of a failed change
    (N6); each of these three alters one of the numbers of some tablet. So if two looks find nothing that waits, and
    their marks are equal, nothing waited in between.
    """

    version: int
    marks: tuple[int, ...]
    waiting: dict[str, int] = field(default_factory=dict)
    locks: int = 0
    paused: frozenset[str] = frozenset()  # observers that are paused
    untold: tuple[str, ...] = ()  # observers that have not been notified of all older data yet (N10)
    damaged: tuple[str, ...] = ()  # locks of observed cells, and notify cells, that cannot be read
    failing: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # by id: how many of the waiting changes have failed, and the most attempts of one of them (N6)
    causes: dict[str, int] = field(default_factory=dict)  # by id: the oldest root cause of the waiting changes (N9)

    @property
    def changes(self) -> int:
        return sum(self.waiting.values())

    @property
    def asleep(self) -> set[str]:
        """The observers that changes wait for, if all of them are paused and nothing else is under way."""
        waited_for = {id for id, count in self.waiting.items() if count}
        others = self.locks or self.damaged or self.untold
        return waited_for if waited_for <= self.paused and not others else set()

    @property
    def empty(self) -> bool:
        return not self.changes and not self.locks and not self.damaged and not self.untold


async def look(db: perco.Database, until_ts: int | None = None) -> Look:
    """Look at every observed table; with `until_ts`, count only changes that were caused at or before it."""
    catalogue = await catalogues.load(inside(db).driver.store)
    if catalogue.version != inside(db).catalogue.version:
        await inside(db).place.adapt(catalogue)
        inside(db).known.catalogue = catalogue
    observed = {entry.table for entry in catalogue.observers.values()} & set(inside(db).place.store.tables())
    tablets = [tablet for tablet in inside(db).place.store.tablets_here() if tablet.table in catalogue.tables]
    marks = tuple(tablet.entries(group) for tablet in tablets for group in (WRITE, TRACE, FAILED_LIST))
    tally, locks, waiting = Tally(), 0, inside(db).waiting
    damaged: dict[str, None] = {}
    for table in sorted(observed):
        entries = [entry for entry in catalogue.observers.values() if entry.table == table]
        columns = {column_of(catalogue.tables[table].columns[entry.column].number) for entry in entries}
        for group in (LOCK, PENDING):  # read before the notify cells, because locks and signals become notify cells
            async for row, (column, ts, value) in waiting.cells_of(table, group):
                if column not in columns:
                    continue
                try:
                    lock = inside(db).driver.lock_at(Cellref(table, row, column), ts, value)
                except perco.errors.Corruption as error:
                    damaged[error.where] = None
                    continue
                locks += bool(lock.observers) and (until_ts is None or (lock.root or ts) <= until_ts)
        async for row, (column, _, value) in waiting.cells_of(table, NOTIFY):
            try:
                root, _, _, attempts = unpack_cause(value)
            except perco.errors.Corruption as error:
                damaged[inside(db).driver.at(Cellref(table, row, column), error).where] = None
                continue
            if until_ts is None or root <= until_ts:
                tally.add(observer_of(column), root, attempts)
    names = {entry.number: id for id, entry in catalogue.observers.items()}
    names |= {number: f"#{number}" for number in tally.waiting if number not in names}
    return Look(
        catalogue.version,
        marks,
        {id: tally.waiting[number] for number, id in names.items()},
        locks,
        frozenset(catalogue.paused()),
        tuple(catalogue.unready()),
        tuple(damaged),
        {names[number]: (count, tally.attempts[number]) for number, count in tally.failing.items()},
        {names[number]: root for number, root in tally.causes.items()},
    )


def retried(found: Look) -> str:
    """Describe the failed changes that are being retried; "" if there are none."""
    return ", ".join(
        f"{counted(changes, 'change')} for {id} ({counted(attempts, 'attempt')} so far)"
        for id, (changes, attempts) in sorted(found.failing.items())
    )


async def connected(store: str, db: perco.Database) -> tuple[int, int] | None:
    """How many other clients a store's owner has, and how many processes run observers; None if no owner answers."""
    if not inside(db).place.owner_alive:
        return None
    with trio.move_on_after(_ASKED_S), suppress(StoreError):
        async with visiting(store) as asking:
            folder = await remote_owner(asking).folder()
        others = folder.clients - is_client(db)
        return others, folder.workers
    return None


def observed_by(catalogue: Catalogue, table: str, column: str) -> list[str]:
    """Ids of a column's observers."""
    return [id for id, entry in catalogue.observers.items() if (entry.table, entry.column) == (table, column)]


def some(places: Sequence[str]) -> str:
    """The first of these places, and how many more there are."""
    return f"{places[0]} and {len(places) - 1} more" if len(places) > 1 else places[0]
