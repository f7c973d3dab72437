"""Keeps the writers of a store still for a moment, so that a reader takes one state of all tablets.

B1  While all writers are parked, each tablet is in the state after one of its batches. Together, these states are the
    one that a process which died at this moment would have left: recovery from it is that of a crash (T4, N1).
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from perco.errors import Unavailable, UsageError
from perco.tablets.local import LocalStore

PARKED_MAX_S: Final = 1.0
"""For how many seconds writers are parked, at most."""


@asynccontextmanager
async def parked(local: LocalStore | None) -> AsyncIterator[threading.Event]:
    """While the block lasts, no tablet is written to, but for at most `PARKED_MAX_S`; writes wait, and so do
    reads that a commit in flight concerns (C4); other reads go on.
    Yields an event that is set once the writers go on.

    Raises: UsageError if this process does not have the tablets in files; Unavailable if a disk does not answer.
    """
    if local is None:
        raise UsageError("the rows of this store are in a database: back up the database, or use `perco copy`")
    if local.path is None:
        raise UsageError("a memory: store has no files, so it cannot be backed up")
    parks = [getattr(tablet, "park", None) for tablet in local.store.tablets()]
    if not all(parks):
        raise UsageError(
            "tablet servers have the store's tablets open (perco serve --processes). To take a backup, serve the store "
            "without --processes, or stop it"
        )
    go_on = threading.Event()
    timer = threading.Timer(PARKED_MAX_S, go_on.set)
    timer.daemon = True
    try:
        with trio.move_on_after(PARKED_MAX_S) as scope:
            async with trio.open_nursery() as nursery:
                for park in parks:
                    assert park is not None
                    nursery.start_soon(park, go_on)
        if scope.cancelled_caught:
            raise Unavailable("holding the writers", remedy="A disk is slow to answer. Try again.")
        timer.start()
        yield go_on
    finally:
        go_on.set()
        timer.cancel()
