"""Where a database's rows are, for tests that look into it."""

from __future__ import annotations

from typing import Any

from perco.database.database import Database
from perco.database.inside import inside, local_owner
from perco.schema import catalogue as catalogues
from perco.serve.client import remote_owner
from perco.storage import LocalRowStore
from perco.testing.bare import BareStore


def local_of(db: Database) -> Any:
    """The `LocalStore` of an owner, the `RemoteLocal` of a client."""
    return inside(db).engine.place


def rows_of(db: Database) -> LocalRowStore:
    """The rows of an owner's store, also of a bare one."""
    place: Any = inside(db).engine.place
    return place.rows if isinstance(place, BareStore) else place.store  # type: ignore[no-any-return]


async def declare(db: Database) -> None:
    """Declare the schema again, as opening the store does."""
    parts = inside(db)
    if parts.owner.is_here:
        await local_owner(db).declare()
    else:
        declared = await catalogues.declare(parts.driver.store, parts.known.schema, lambda version: None)
        await remote_owner(db).keeper.adopt(declared)
