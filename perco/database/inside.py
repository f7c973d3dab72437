"""Access to the parts of a database, for commands, Spark, the server and tests; not for programs."""

from __future__ import annotations

from typing import cast

import trio

from perco.database.database import Database
from perco.database.local import LocalOwner
from perco.database.parts import Parts


def inside(db: Database) -> Parts:
    """The parts of a database."""
    return db._parts


def local_owner(db: Database) -> LocalOwner:
    """The owner's side of a database whose store this process has open: as its owner, or beside it to read."""
    owner = db._parts.owner
    assert owner.is_here, "a client has no tablets of its own"
    return cast(LocalOwner, owner)


async def close(db: Database) -> None:
    """Stop background tasks, write queued mutations, release the store.

    A task of its own does this. A first KeyboardInterrupt is raised when that task has ended, a second one at once.
    """
    ended = trio.Event()
    failed: list[BaseException] = []
    trio.lowlevel.spawn_system_task(_close, db, ended, failed, name="perco-close")
    with trio.CancelScope(shield=True):
        try:
            await ended.wait()
        except KeyboardInterrupt:
            await ended.wait()
            raise
    if failed:
        raise failed[0]


async def _close(db: Database, ended: trio.Event, failed: list[BaseException]) -> None:
    try:
        await db._parts.owner.aclose()
    except Exception as error:
        failed.append(error)
    finally:
        ended.set()
