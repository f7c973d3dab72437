"""Observers, as users see them: what there is, what it writes; paused and resumed.

N10 Who is paused is written in the catalogue, as a version that binds: a run that was begun before it and has not drawn
    its commit timestamp by then does not commit, wherever it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

from perco.errors import UsageError
from perco.naming import told_as
from perco.notify.failures import Failures
from perco.notify.outputs import outputs_in
from perco.txn import catalogue as catalogues


@dataclass(frozen=True, slots=True)
class ObserverState:
    """A store's record of an observer.

    Attributes:
        id, table, column: its id, and the column that it observes.
        version: the highest that was declared.
        paused: whether it is; `ready`: whether its backfill is done.
        outputs: (table, column) of the cells that its runs have been seen to write, or raise.
    """

    id: str
    table: str
    column: str
    version: int
    paused: bool
    ready: bool
    outputs: tuple[tuple[str, str], ...]


@told_as("Database")
class Observers(Failures):
    """A client that knows its store's observers."""

    async def observers(self) -> list[ObserverState]:
        """All registered observers, by id."""
        self.usable(writing=False)
        catalogue = await catalogues.load(self.driver.store)
        names: dict[int, list[tuple[str, str]]] = {}
        for output in await outputs_in(self.driver.store):
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

    async def pause(self, id: str) -> None:
        """Let an observer run no more, until it is resumed: in the store, so across restarts and for all programs.

        Changes go on to wait for it. When this returns, no run of it that was under way will commit any more; what it
        was for waits.

        Raises: UsageError for an observer that the store does not have; ReadOnly.
        """
        await self._set_paused(id, True)

    async def resume(self, id: str) -> None:
        """Let a paused observer run again.

        Raises: as `pause`.
        """
        await self._set_paused(id, False)

    async def _set_paused(self, id: str, paused: bool) -> None:
        self.usable(writing=True)
        if not isinstance(id, str):
            raise UsageError(f"an observer is named by its id, a str, not {id!r}")
        newest = await catalogues.load(self.driver.store)  # if nobody answers, the caller can give up here
        with trio.CancelScope(shield=True):  # what the store says by then, this process goes by
            await self._adopt(await catalogues.change(self.driver.store, lambda c: c.with_paused(id, paused), newest))
            self.forget_bounds()
            await self.oracle.announce(self.catalogue.binds)
            if self._worker is not None:
                self._worker.renew()
        if self._worker is not None:
            await self._worker.committed()
        self.driver.quiet()  # N7: whoever waits shall look who runs it

    async def paused(self) -> set[str]:
        """Ids of the observers that are paused."""
        self.usable(writing=False)
        return (await catalogues.load(self.driver.store)).paused()
