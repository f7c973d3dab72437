"""A tablet whose writer waits before each commit until the test lets it go on: so that a queue can be looked at."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from trio.testing import wait_all_tasks_blocked

from perco.storage import BatchOptions, LmdbEngine, LmdbOptions, LmdbTablet, LocalRowStore, Mutation, Verdict
from tests.component.storage.stores import UNSYNCED, open_lmdb


class GatedEngine(LmdbEngine):
    """Attributes: `gate`, open to begin with; `threads`, where commits ran; `batches`, what was in each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = threading.Event()
        self.gate.set()
        self.threads: list[int] = []
        self.batches: list[Sequence[Mutation]] = []

    def commit(self, mutations: Sequence[Mutation], floor: int) -> list[Verdict]:
        self.threads.append(threading.get_ident())
        self.batches.append(mutations)
        self.gate.wait()
        return super().commit(mutations, floor)


@asynccontextmanager
async def open_gated(
    path: Path, batch: BatchOptions | None = None, options: LmdbOptions = UNSYNCED
) -> AsyncIterator[tuple[LocalRowStore, LmdbTablet, GatedEngine]]:
    async with open_lmdb(path, options, batch, GatedEngine) as (store, tablet):
        engine = tablet.engine
        assert isinstance(engine, GatedEngine)
        try:
            yield store, tablet, engine
        finally:
            engine.gate.set()


async def hold_writer(store: LocalRowStore, engine: GatedEngine, nursery: Any, mutation: Mutation) -> None:
    """Closes the gate behind a batch of this one mutation: the writer has it and what comes now has to queue."""
    engine.gate.clear()
    nursery.start_soon(store.apply, [mutation])
    await wait_all_tasks_blocked()
