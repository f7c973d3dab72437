"""Describes where a store is and what it holds, for commands that look at the store from outside."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from perco.errors import UsageError
from perco.schema.catalogue import Catalogue
from perco.serve.messages import (
    FileOf,
    FolderIs,
)
from perco.storage import PROTOCOL_GROUPS, owner as owner_of
from perco.tablets.backend import Backend
from perco.tablets.local import LocalStore


async def place_of(backend: Backend, catalogue: Catalogue, clients: int, workers: int) -> FolderIs:
    """Describe a store that this process owns. If the store is not in a folder, each of its tables is listed as one
    file, and the cells are counted now."""
    if backend.local is not None:
        return folder_of(backend.local, catalogue)._replace(clients=clients, workers=workers)
    where, mark = backend.where()
    files = []
    for table in backend.store.tables():
        own = catalogue.all_groups(table) if table in catalogue.tables else ()
        groups = [*PROTOCOL_GROUPS, *own]
        await backend.store.look([table], groups)
        entries = {group: backend.store.count(table, group) for group in groups}
        files.append(FileOf(table, b"", 0, entries, groups))
    return FolderIs(where, os.getpid(), Path(sys.argv[0]).name, mark, files, clients, workers)


def folder_of(local: LocalStore, catalogue: Catalogue) -> FolderIs:
    """Describe the folder of a store that this process has open, or that it reads beside the owner."""
    path = local.path
    if path is None:
        raise UsageError("this store is in memory: it has no folder")
    process, command = owner_of(path)
    files = []
    for tablet in local.store.tablets():
        groups = [*PROTOCOL_GROUPS, *(catalogue.all_groups(tablet.table) if tablet.table in catalogue.tables else ())]
        entries = {group: tablet.entries(group) for group in groups}
        files.append(FileOf(tablet.table, tablet.start, tablet.statistics().used_bytes, entries, tablet.groups()))
    where, mark = local.where()
    return FolderIs(where, process or 0, command, mark, files, id=local.id)
