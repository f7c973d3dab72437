"""`python -m perco.backup JSON`: takes a backup for `Database.backup`, and tells about it in lines of JSON."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import msgpack
import trio

from perco.backup.taking import BackupOptions, Progress, take
from perco.errors import PercoError, UsageError
from perco.rpc.crossing import pack_error
from perco.storage.identity import identity_of


def _tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _progress(progress: Progress) -> None:
    _tell(done=progress.done, total=progress.total)


async def _main(store: str, id: str, to: str, **options: Any) -> None:
    try:
        try:
            here = identity_of(Path(store)).id
        except OSError:
            here = ""
        if here != id:
            raise UsageError(f"{store} is on another machine: a backup is taken there, with `perco backup`")
        made = await take(store, to, BackupOptions(**options), _progress)
    except PercoError as error:
        _tell(failed=base64.b64encode(msgpack.packb(pack_error(error))).decode())
        return
    pages, stored = (sum(getattr(each, what) for each in made.tablets) for what in ("pages", "stored"))
    told = {"name": made.name, "base": made.base or None, "ts": made.at, "time": made.time}
    _tell(made=told | {"bytes": made.size, "pages": pages, "stored": stored})


if __name__ == "__main__":
    asked: dict[str, Any] = json.loads(sys.argv[1])
    trio.run(lambda: _main(**asked))
