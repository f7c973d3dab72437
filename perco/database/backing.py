"""`Database.backup`: has a process of its own take a backup, because it opens the files that this one may have open."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgpack
import trio

from perco.errors import StoreError, UsageError
from perco.rpc.crossing import unpack_error

_LINE_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Backup:
    """A backup that has been taken.

    Attributes:
        name: its name in the folder of backups.
        base: the name of the backup that it needs; None: it is full.
        ts: every transaction that committed at or before this timestamp is in the backup.
        time: when it was taken, in seconds since 1970.
        bytes: what it takes on disk.
        pages: how many pages the store uses.
        stored: how many of them are in this backup; the others are in those below it.
    """

    name: str
    base: str | None
    ts: int
    time: float
    bytes: int
    pages: int
    stored: int


async def backup(
    path: str,
    id: str,
    to: str | os.PathLike[str],
    progress: Callable[[int, int], None] | None,
    **options: Any,
) -> Backup:
    """See `Database.backup`. `path`, `id`: the store's folder and id."""
    if not id:
        raise UsageError(
            f"{path}: perco backs up stores in folders. Back up a database with its own means, or copy the store to a "
            "folder with `perco copy`"
        )
    if not isinstance(to, str | os.PathLike) or not isinstance(os.fspath(to), str):
        raise UsageError(f"a backup goes to a folder or a file, named by its path, not to {to!r}")
    asked = json.dumps({"store": path, "id": id, "to": os.fspath(to), **options})
    command = [sys.executable, "-m", "perco.backup", asked]
    last: dict[str, Any] = {}
    async with trio.open_nursery() as nursery:
        run = partial(trio.run_process, stdout=subprocess.PIPE, check=False)
        process: trio.Process = await nursery.start(run, command)
        assert process.stdout is not None
        rest = b""
        async for part in process.stdout:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                last = json.loads(line)
                if "done" in last and progress is not None:
                    progress(last["done"], last["total"])
            assert len(rest) < _LINE_MAX, "it writes short lines"
    if "failed" in last:
        raise unpack_error(msgpack.unpackb(base64.b64decode(last["failed"]), use_list=False))
    if "made" not in last:
        raise StoreError(f"the process that took the backup ended with exit code {process.returncode}; see stderr")
    return Backup(**last["made"])
