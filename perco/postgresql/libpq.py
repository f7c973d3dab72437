"""psycopg's wrapper of libpq. It is imported only when a store on PostgreSQL is opened: the rest of perco does not need
it."""

from __future__ import annotations

import importlib
from typing import Any, Final

from perco.errors import UsageError

INSTALL: Final = "a store on PostgreSQL needs psycopg: pip install 'perco[postgresql]'"


def libpq() -> Any:
    """The module `psycopg.pq`. Raises: UsageError, if it is not installed."""
    try:
        return importlib.import_module("psycopg.pq")
    except ImportError as error:
        raise UsageError(f"{INSTALL} ({error})") from error


def error_of_libpq() -> Any:
    """The base class of psycopg's errors."""
    return importlib.import_module("psycopg").Error
