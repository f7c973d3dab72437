"""A live instance of Bigtable in place of the emulator: PERCO_BIGTABLE=PROJECT/INSTANCE.

Each store of a test is a table of its own, which is dropped when the process ends; `drop_all` drops those of processes
that were killed. The default app profile must route to a single cluster and allow single-row transactions.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any, Final

from perco.bigtable import admin
from perco.bigtable.address import Place

PREFIX: Final = "perco-test-"  # of the names of all tables


def instance() -> str:
    """The instance that was named; "": none was."""
    return os.environ.get("PERCO_BIGTABLE", "")


def _message(name: str) -> Any:
    from google.cloud.bigtable_admin_v2.types import bigtable_table_admin

    return getattr(bigtable_table_admin, name).pb()


def _drop(link: Any, table: str) -> None:
    from google.protobuf.empty_pb2 import Empty

    link.admin(admin._TABLES + "DeleteTable", _message("DeleteTableRequest"), Empty, name=table)


def drop(url: str) -> None:
    """Drop the table of a store."""
    place = Place(url)
    with admin._linked(place) as link:
        _drop(link, place.table)


def drop_at_exit(url: str) -> None:
    """Drop the table of a store at the end of this process. A child of it, by a fork, does not."""
    process = os.getpid()
    atexit.register(lambda: drop(url) if os.getpid() == process else None)


def drop_all() -> list[str]:
    """Drop the tables of all tests of the instance; returns their names."""
    place = Place(f"bigtable://{instance()}")
    asked, told = _message("ListTablesRequest"), _message("ListTablesResponse")
    with admin._linked(place) as link:
        found = link.admin(admin._TABLES + "ListTables", asked, told, parent=place.instance)
        tables = [table.name for table in found.tables if table.name.rpartition("/")[2].startswith(PREFIX)]
        for table in tables:
            _drop(link, table)
    return tables


if __name__ == "__main__":
    if not instance():
        sys.exit("PERCO_BIGTABLE=PROJECT/INSTANCE names the instance")
    print(f"{len(drop_all())} tables of tests were dropped")
