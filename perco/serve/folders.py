"""The folder of a store, for commands that read its files."""

from __future__ import annotations

from perco.errors import UsageError
from perco.schema.catalogue import Catalogue
from perco.serve.messages import (
    FileOf,
    FolderIs,
)
from perco.storage import PROTOCOL_GROUPS, owner as owner_of
from perco.storage.folder import unsynced
from perco.tablets.local import LocalStore


def folder_of(local: LocalStore, catalogue: Catalogue) -> FolderIs:
    """Describe the folder of a store that is open here, or is read while another process owns it."""
    path = local.path
    if path is None:
        raise UsageError("this store is in memory: it has no folder")
    process, command = owner_of(path)
    files = []
    for tablet in local.store.tablets():
        groups = [*PROTOCOL_GROUPS, *(catalogue.groups(tablet.table) if tablet.table in catalogue.tables else ())]
        entries = {group: tablet.entries(group) for group in groups}
        files.append(FileOf(tablet.table, tablet.start, tablet.statistics().used_bytes, entries, tablet.groups()))
    return FolderIs(str(path.absolute()), process or 0, command, unsynced(path), files)
