"""A tablet whose writer waits before each commit until the test lets it go on: so that a queue can be looked at."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio

from perco.storage import BatchOptions, LmdbEngine, LmdbOptions, LmdbTablet, LocalRowStore, Mutation, Verdict
from tests.component.storage.stores import UNSYNCED, open_lmdb


class GatedEngine(LmdbEngine):
    """Attributes: `threads`, where commits ran; `batches`, what was in each; `made`, how many have ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stay_slow()  # the extension would not come by here
        self._gate = threading.Event()
        self._gate.set()
        self._moved = threading.Condition()
        self.made = 0
        self.threads: list[int] = []
        self.batches: list[Sequence[Mutation]] = []

    def commit(self, mutations: Sequence[Mutation], *args: Any) -> list[Verdict]:
        with self._moved:
            self.threads.append(threading.get_ident())
            self.batches.append(mutations)
            self._moved.notify_all()
        self._gate.wait()
        verdicts = super().commit(mutations, *args)
        with self._moved:
            self.made += 1
            self._moved.notify_all()
        return verdicts

    async def wait_for(self, begun: int = 0, made: int = 0) -> None:
        """Until so many commits have begun, or have been made."""

        def wait() -> None:
            with self._moved:
                self._moved.wait_for(lambda: len(self.batches) >= begun and self.made >= made)

        await trio.to_thread.run_sync(wait)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A commit that begins in here waits until the end of it."""
        self._gate.clear()
        try:
            yield
        finally:
            self._gate.set()


@asynccontextmanager
async def open_gated(
    path: Path, batch: BatchOptions | None = None, options: LmdbOptions = UNSYNCED
) -> AsyncIterator[tuple[LocalRowStore, LmdbTablet, GatedEngine]]:
    async with open_lmdb(path, options, batch, GatedEngine) as (store, tablet):
        engine = tablet.engine
        assert isinstance(engine, GatedEngine)
        yield store, tablet, engine


@asynccontextmanager
async def held_writer(store: LocalRowStore, engine: GatedEngine, mutation: Mutation) -> AsyncIterator[trio.Nursery]:
    """While this is open the writer stands before the commit of this one mutation, and later ones have to queue."""
    async with trio.open_nursery() as nursery:
        with engine.held():
            nursery.start_soon(store.apply, [mutation])
            await engine.wait_for(begun=len(engine.batches) + 1)
            yield nursery
