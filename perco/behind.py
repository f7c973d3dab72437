"""The store behind an open store of any front. For modules that take all of them."""

from __future__ import annotations

from typing import TypeAlias

import perco.aio
import perco.sync
from perco.aio import calling as aio_calling
from perco.database.database import Database
from perco.errors import UsageError
from perco.sync import calling as sync_calling

AnyDatabase: TypeAlias = Database | perco.aio.Database | perco.sync.Database


def behind_any(db: AnyDatabase) -> Database:
    """The store that a front calls. Raises: UsageError if it is no open store."""
    if isinstance(db, Database):
        return db
    if not isinstance(db, perco.aio.Database | perco.sync.Database):
        raise UsageError(f"give an open store, not {db!r}")
    found = aio_calling.behind(db) if isinstance(db, perco.aio.Database) else sync_calling.behind(db)
    assert isinstance(found, Database)
    return found
