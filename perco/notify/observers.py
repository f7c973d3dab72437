"""Observers, as users see them: `db.observers`, `db.pause`, `db.resume`.

N10 A pause creates a version of the catalogue that writers must know: a run that began before that version, and has not
    yet drawn its commit timestamp, does not commit, whichever process it runs in.
N12 So does a drop. A drop then settles what transactions under an earlier version have left, and removes the changes
    that wait for the observer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import trio

from perco.errors import UsageError
from perco.notify.breakers import note_trip, trips_in
from perco.notify.dropping import remove_changes
from perco.notify.outputs import forget_outputs, outputs_in
from perco.notify.worker import Worker
from perco.schema import catalogue as catalogues
from perco.schema.catalogue import Catalogue
from perco.schema.tombstones import Tombstone
from perco.txn.engine import Engine
from perco.txn.keeping import Keeper


@dataclass(frozen=True, slots=True)
class ObserverState:
    """A store's record of an observer.

    Attributes:
        id, table, column: its id, and the column that it observes.
        version: the highest that was declared.
        paused: whether the observer is paused; `ready`: whether its backfill is done.
        outputs: (table, column) of the cells that its runs have written, and of the signals that they have raised, as
            far as workers have noted them.
        tripped: the error of the last run, if the observer is tripped in some worker (N14); "": it is not.
        limits: the delays, the priority, and the limits that its declaration states, by name: "rate", "delay_s" ...
    """

    id: str
    table: str
    column: str
    version: int
    paused: bool
    ready: bool
    outputs: tuple[tuple[str, str], ...]
    tripped: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)


class ObserverStates:
    """Lists the observers of a store, pauses and resumes them. Loop thread only.

    `worker`: returns the worker that runs in this process, if any.
    """

    def __init__(self, engine: Engine, keeper: Keeper, worker: Callable[[], Worker | None]) -> None:
        self._engine, self._keeper, self._worker = engine, keeper, worker

    async def _newest(self) -> Catalogue:
        """The newest catalogue, under the names that this program declares (N18)."""
        return (await catalogues.load(self._engine.driver.store)).seen_by(self._engine.known.schema)

    async def states(self) -> list[ObserverState]:
        """All registered observers, by id."""
        self._engine.usable(writing=False)
        store = self._engine.driver.store
        catalogue = await self._newest()
        trips = await trips_in(store, self._engine.oracle.wall_ms())
        names: dict[int, list[tuple[str, str]]] = {}
        for output in await outputs_in(store):
            if catalogue.has(output.table, output.column) and not catalogue.is_gone(output.table, output.column):
                column = catalogue.column_name(output.table, output.column)
                names.setdefault(output.observer, []).append((catalogue.title(output.table), column))
        return [
            ObserverState(
                id,
                catalogue.title(entry.table),
                entry.column,
                entry.version,
                entry.paused,
                entry.ready,
                tuple(sorted(names.get(entry.number, ()))),
                trips[entry.number].error if entry.number in trips else "",
                {**entry.manner.stated(), **entry.limits.stated()},
            )
            for id, entry in sorted(catalogue.observers.items())
        ]

    async def set_paused(self, id: str, paused: bool) -> None:
        """See `Database.pause` and `Database.resume`."""
        self._engine.usable(writing=True)
        if not isinstance(id, str):
            raise UsageError(f"an observer is named by its id, a str, not {id!r}")
        await self.change(lambda catalogue: catalogue.with_paused(id, paused))

    async def change(self, step: Callable[[Catalogue], Catalogue]) -> None:
        """Make the next version of the catalogue, which says which observers run. The worker of this process adopts it
        at once.

        Raises: what `step` raises; StoreError; WriteUnknown.
        """
        newest = await self._newest()  # if no answer comes, the caller can give up here
        with trio.CancelScope(shield=True):  # once the store has the change, this process must adopt it
            await self._keeper.change(step, newest)
            if (worker := self._worker()) is not None:
                worker.renew()
        if (worker := self._worker()) is not None:
            await worker.committed()
        self._engine.driver.quiet()  # N7: waiting tasks look again

    async def drop(self, ids: Collection[str], running: Mapping[str, int]) -> dict[str, int]:
        """See `Database.drop_observer`. Returns how many changes were removed, by observer.

        Args:
            running: how many processes have each observer.
        """
        self._engine.usable(writing=True)
        newest = await self._newest()
        known = {*newest.observers, *(tombstone.id for tombstone in newest.dropped.values())}
        for id in ids:
            if id not in known:
                names = ", ".join(map(repr, newest.observers)) or "none"
                raise UsageError(f"there is no observer {id!r} in this store; there are: {names}")
            if id in newest.observers and newest.observers[id].building:
                raise UsageError(
                    f"a job is building what observer {id!r} derives: wait for its end or, if it was given up, resume "
                    "the observer, then drop it"
                )
            if id in newest.observers and running.get(id):
                count = "a process runs" if running[id] == 1 else f"{running[id]} processes run"
                raise UsageError(
                    f"{count} observer {id!r}: stop the worker, or deploy a program without this observer, then drop it"
                )
        with trio.CancelScope(shield=True):  # once the store has the change, this process must adopt it
            await self._keeper.change(lambda catalogue: _without(catalogue, ids), newest)
            if (worker := self._worker()) is not None:
                worker.renew()
        removed = {id: await self._clean(id) for id in ids}
        self._engine.driver.quiet()  # N7: waiting tasks look again
        return removed

    def _has(self, tombstone: Tombstone) -> bool:
        """Whether the column that a dropped observer observed is still there (N17)."""
        entry = self._engine.known.catalogue.tables.get(tombstone.table)
        return entry is not None and tombstone.column in entry.columns

    async def _clean(self, id: str) -> int:
        """Remove what waits for a dropped observer (N12). Returns how many changes this was."""
        removed = 0
        for number, tombstone in list(self._engine.known.catalogue.dropped.items()):
            if tombstone.id == id and self._has(tombstone):
                removed += await remove_changes(self._engine.driver, self._engine.known.catalogue, number)
                await forget_outputs(self._engine.driver.store, number)
                await note_trip(self._engine.driver.store, number, None)
                if not tombstone.clean:
                    await self._keeper.change(partial(_cleaned, number=number))
        return removed

    async def paused(self) -> set[str]:
        """Ids of the observers that are paused."""
        self._engine.usable(writing=False)
        return (await self._newest()).paused()

    async def unserved(self) -> set[str]:
        """Ids of the store's observers that this program's schema lacks (N10)."""
        self._engine.usable(writing=False)
        stored = await self._newest()
        return set(stored.observers) - set(self._engine.known.schema.observers)


def _without(catalogue: Catalogue, ids: Collection[str]) -> Catalogue:
    """The next version, without these observers; this one if it has none of them. It binds (N10)."""
    gone = {id: entry for id, entry in catalogue.observers.items() if id in ids}
    if not gone:
        return catalogue
    left = {id: entry for id, entry in catalogue.observers.items() if id not in gone}
    graves = {entry.number: Tombstone(id, entry.table, entry.column, False) for id, entry in gone.items()}
    version = catalogue.version + 1
    return replace(catalogue, version=version, observers=left, binds=version, dropped={**catalogue.dropped, **graves})


def _cleaned(catalogue: Catalogue, number: int) -> Catalogue:
    """The next version, in which nothing waits for a dropped observer any more."""
    grave = catalogue.dropped[number]
    if grave.clean:
        return catalogue
    dropped = {**catalogue.dropped, number: grave._replace(clean=True)}
    return replace(catalogue, version=catalogue.version + 1, dropped=dropped)
