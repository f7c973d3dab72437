"""It dies at a step of a backup: `python -m tests.integration.backup.dying STEP take|restore|prune SOURCE TARGET`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import trio

from perco.backup import keeping, places, restoring, taking
from perco.backup.places import FileMaking, Folder, FolderMaking
from perco.backup.restoring import RestoreOptions, TabletWriting
from perco.backup.taking import BackupOptions
from perco.storage import folder as store_folders

STEPS: list[tuple[Any, str]] = [
    (places, "sync_folder"),
    (places.Writer, "write"),
    (places.Writer, "sync"),
    (FolderMaking, "finish"),
    (FileMaking, "finish"),
    (Folder, "remove"),
    (restoring, "sync_folder"),
    (restoring, "make_store"),
    (TabletWriting, "finish"),
    (os, "rename"),
    (os, "link"),
    (os, "fsync"),
    (store_folders, "put_identity"),
]


passed = 0


def dying_at(step: int) -> None:
    """End this process at a step: before it if the number is even, else after it; at -1: at none."""

    def wrap(owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def dying(*args: Any, **kwargs: Any) -> Any:
            global passed
            for when in ("before", "after"):
                if passed == step:
                    os._exit(9)
                passed += 1
                if when == "before":
                    made = function(*args, **kwargs)
            return made

        setattr(owner, name, dying)

    for owner, name in STEPS:
        wrap(owner, name)


async def main(what: str, source: str, target: str) -> None:
    if what == "take":
        await taking.take(source, target, BackupOptions(full=True))
    elif what == "restore":
        await restoring.restore(source, target, RestoreOptions())
    else:
        keeping.prune(Folder(places.absolute(source)), int(target))


if __name__ == "__main__":
    dying_at(int(sys.argv[1]))
    trio.run(main, *sys.argv[2:])
    print(passed)
