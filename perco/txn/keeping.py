"""Keeps a process's copy of the catalogue up to date.

N10 A change of the catalogue is written first, then adopted here, then announced with every timestamp.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from perco.schema import catalogue as catalogues
from perco.schema.catalogue import Catalogue
from perco.txn.engine import Engine


class Keeper:
    """Loop thread only.

    Attributes:
        on_renewed: called when a newer catalogue has been loaded or made.
    """

    def __init__(self, engine: Engine, adapt: Callable[[Catalogue], Awaitable[None]], *, is_told: bool) -> None:
        """
        Args:
            adapt: makes, or opens, the tables and groups that a catalogue names.
            is_told: True if this process makes every change of the catalogue, or is notified of it.
        """
        self._engine, self._adapt, self._is_told = engine, adapt, is_told
        self.on_renewed: Callable[[], None] = lambda: None
        engine.renew = self.renew

    async def renew(self) -> None:
        """Load and adopt the newest catalogue, because another process has changed it."""
        await self.adopt(await catalogues.load(self._engine.driver.store))
        self.on_renewed()

    async def catch_up(self) -> None:
        """Bring the catalogue up to date before a caller looks up observers in it."""
        if not self._is_told:
            await self.renew()

    async def change(self, step: Callable[[Catalogue], Catalogue], newest: Catalogue | None = None) -> None:
        """Replace the newest catalogue with the next one, and announce it."""
        schema = self._engine.known.schema  # N18: `step` sees this program's names
        await self.adopt(await catalogues.change(self._engine.driver.store, step, newest, schema))
        await self.announce()
        self.on_renewed()

    async def announce(self) -> None:
        """Forget the columns that were looked up, and announce the version, with every timestamp from now on (N10)."""
        self._engine.known.forget()
        await self._engine.oracle.announce(self._engine.known.catalogue.binds)

    async def adopt(self, catalogue: Catalogue) -> None:
        """Adopt a catalogue if it is newer than the known one."""
        catalogue = catalogue.seen_by(self._engine.known.schema)
        await self._adapt(catalogue)
        if self._engine.known.adopt(catalogue):
            self._engine.driver.quiet()  # waiting tasks look again: observers may have been backfilled
