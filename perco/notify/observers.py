"""Observers, as users see them: `db.observers`, `db.pause`, `db.resume`.

N10 A pause creates a version of the catalogue that writers must know: a run that began before that version, and has not
    yet drawn its commit timestamp, does not commit, whichever process it runs in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from perco.errors import UsageError
from perco.notify.outputs import outputs_in
from perco.notify.worker import Worker
from perco.schema import catalogue as catalogues
from perco.schema.catalogue import Catalogue
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
    """

    id: str
    table: str
    column: str
    version: int
    paused: bool
    ready: bool
    outputs: tuple[tuple[str, str], ...]


class ObserverStates:
    """Lists the observers of a store, pauses and resumes them. Loop thread only.

    `worker`: returns the worker that runs in this process, if any.
    """

    def __init__(self, engine: Engine, keeper: Keeper, worker: Callable[[], Worker | None]) -> None:
        self._engine, self._keeper, self._worker = engine, keeper, worker

    async def states(self) -> list[ObserverState]:
        """All registered observers, by id."""
        self._engine.usable(writing=False)
        store = self._engine.driver.store
        catalogue = await catalogues.load(store)
        names: dict[int, list[tuple[str, str]]] = {}
        for output in await outputs_in(store):
            if catalogue.has(output.table, output.column):
                column = catalogue.column_name(output.table, output.column)
                names.setdefault(output.observer, []).append((output.table, column))
        return [
            ObserverState(
                id,
                entry.table,
                entry.column,
                entry.version,
                entry.paused,
                entry.ready,
                tuple(sorted(names.get(entry.number, ()))),
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
        newest = await catalogues.load(self._engine.driver.store)  # if no answer comes, the caller can give up here
        with trio.CancelScope(shield=True):  # once the store has the change, this process must adopt it
            await self._keeper.change(step, newest)
            if (worker := self._worker()) is not None:
                worker.renew()
        if (worker := self._worker()) is not None:
            await worker.committed()
        self._engine.driver.quiet()  # N7: waiting tasks look again

    async def paused(self) -> set[str]:
        """Ids of the observers that are paused."""
        self._engine.usable(writing=False)
        return (await catalogues.load(self._engine.driver.store)).paused()

    async def unserved(self) -> set[str]:
        """Ids of the store's observers that this program's schema lacks (N10)."""
        self._engine.usable(writing=False)
        stored = await catalogues.load(self._engine.driver.store)
        return set(stored.observers) - set(self._engine.known.schema.observers)
