"""Where a database's rows are, for tests that look into it."""

from __future__ import annotations

from typing import Any

from perco.database.database import Database
from perco.database.inside import inside
from perco.storage import LocalRowStore
from perco.testing.bare import BareStore


def local_of(db: Database) -> Any:
    """The `LocalStore` of an owner, the `RemoteLocal` of a client."""
    return inside(db).engine.place


def rows_of(db: Database) -> LocalRowStore:
    """The rows of an owner's store, also of a bare one."""
    place: Any = inside(db).engine.place
    return place.rows if isinstance(place, BareStore) else place.store  # type: ignore[no-any-return]
