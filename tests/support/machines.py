"""perco.testing's machine, over the deployment of the test, and with a look into its rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import trio
import trio.testing

from perco.database.database import Database
from perco.database.inside import inside, local_owner
from perco.database.options import Options
from perco.schema.schema import Schema
from perco.storage import RowStore
from perco.tablets.backend import Backend
from perco.testing.machine import CrashedError as CrashedError, Machine as _Machine
from tests.support import everywhere
from tests.support.faults import FaultyRowStore, use
from tests.support.rows import Rows


class Machine(_Machine):
    """`opened` is a client of an owner that begins and ends with it, where the test runs over clients."""

    def __init__(self, schema: Schema, *, groups: bool = True, one_step: bool = True) -> None:
        super().__init__(
            schema,
            groups=groups,
            one_step=one_step,
            bare_s=0.0 if everywhere.over in (everywhere.BARE, everywhere.POSTGRESQL) else None,
        )
        self._place = everywhere.place() if everywhere.over in everywhere.CLIENTS else None
        if self._place is not None:
            self._local = self._place.local
        if everywhere.over == everywhere.POSTGRESQL:
            self._local = everywhere.place().local
            self._local.store.groups = groups

    def _backend(self, below: RowStore | None) -> Backend:
        return everywhere.bare(self._local, below) if self._bare_s is not None else self._local

    @property
    def rows(self) -> Rows:
        return Rows(self.store)

    @asynccontextmanager
    async def opened(
        self,
        options: Options | None = None,
        *,
        sweeper: bool = False,
        schema: Schema | None = None,
        prepare: Callable[[Database], None] | None = None,
    ) -> AsyncIterator[Database]:
        if self._place is None:
            more = {} if prepare is None else {"prepare": prepare}
            async with super().opened(options, sweeper=sweeper, schema=schema, **more) as db:
                yield db
            return
        options = options or Options()
        if not self._one_step:
            options = replace(options, commit=replace(options.commit, one_step=False))
        async with (
            self._place.opened(options, sweeping=sweeper) as door,
            door.client(schema or self.schema, options, mortal=True) as db,
        ):
            if prepare is not None:
                prepare(db)
            yield db
            assert not inside(db).driver.damaged, inside(db).driver.damaged

    @asynccontextmanager
    async def crashing(
        self, number: int, *, made: bool, options: Options | None = None
    ) -> AsyncIterator[tuple[Database, FaultyRowStore]]:
        """As there; a commit in one step that a client asks for is a mutation, too."""
        async with super().crashing(number, made=made, options=options) as (db, store):
            yield db, use(db, store)

    async def swept(self) -> int:
        """As there: the owner sweeps."""
        if self._place is None:
            return await super().swept()
        async with self._place.opened(Options(), sweeping=True) as door:
            owner = door.owner
            while not local_owner(owner).sweeper.clean:
                await trio.testing.wait_all_tasks_blocked()
            assert not inside(owner).driver.damaged, inside(owner).driver.damaged
            return local_owner(owner).sweeper.settled
