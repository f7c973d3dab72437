"""Where a database's rows are, for tests that look into it."""

from __future__ import annotations

from typing import Any

from perco.database.database import Database
from perco.database.inside import inside


def local_of(db: Database) -> Any:
    """The `LocalStore` of an owner, the `RemoteLocal` of a client."""
    return inside(db).engine.place
