"""CocoIndex over a folder: a processing component for each file, which declares rows of a table in SQLite.

    python -m bench.deriving.with_cocoindex live|catch-up STATE FILES 0 VERSION

Live, it watches the folder by the system's notifications. Otherwise each order makes it catch up, within one process.
Functions are memoized, and have a version. Usage tracking is off (COCOINDEX_DISABLE_USAGE_TRACKING).
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cocoindex as coco
from cocoindex._internal.update_stats import UpdateStatus
from cocoindex.connectors import localfs, sqlite

from bench.deriving import child
from bench.deriving.child import Counted, Job

DERIVED = coco.ContextKey("derived")
FILES = coco.ContextKey("files")


@dataclass(frozen=True)
class Row:
    doc: str
    n: int
    words: int
    vector: str


def app_of(job: Job, function: Counted, live: bool) -> Any:
    def settings(builder: Any) -> Iterator[None]:
        builder.settings.db_path = job.state / "cocoindex"
        derived = sqlite.connect(job.derived, load_vec=False)
        with derived.readonly() as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
        builder.provide(DERIVED, derived)
        builder.provide(FILES, job.files)
        yield
        derived.close()

    coco.lifespan(settings)

    async def document(file: Any, table: Any) -> None:
        key = file.file_path.path.as_posix()
        for chunk in function(await file.read_text()):
            table.declare_row(row=Row(key, chunk.n, chunk.words, chunk.vector))

    component = coco.fn(memo=True, version=job.version)(document)

    async def main() -> None:
        schema = await sqlite.TableSchema.from_class(Row, primary_key=["doc", "n"])
        table = await sqlite.mount_table_target(DERIVED, child.TABLE, schema)
        items = localfs.walk_dir(FILES, live=live, recursive=True).items()
        await coco.mount_each(component, items, table)

    return coco.App("derive", coco.fn(main))


async def run(job: Job, live: bool) -> None:
    function = Counted(job.version)
    app = app_of(job, function, live)
    if not live:
        await app.update()
        child.say(ready=True, calls=function.calls)
        lines = child.orders()
        while (order := await asyncio.to_thread(next, lines, None)) is not None:
            await app.update()
            child.say(done=order, calls=function.calls)
        return
    update = app.update(live=True)
    told = False
    async for snapshot in update.watch():
        if snapshot.status is UpdateStatus.READY and not told:
            child.say(ready=True, calls=function.calls)
            told = True
            threading.Thread(target=_until_told, daemon=True).start()


def _until_told() -> None:
    for _ in child.orders():
        pass
    import os

    os._exit(0)


if __name__ == "__main__":
    mode = sys.argv.pop(1)
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    asyncio.run(run(child.job(), mode == "live"))
