"""`perco compact`: return the unused space in a store's files to the file system."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn

import perco
from perco.cli.reading import table_named
from perco.cli.screen import FINE, show_json, size
from perco.cli.values import shown
from perco.database.inside import inside, local_owner
from perco.schema.catalogue import schema_of

_KEY_WIDTH = 24
_LOOK_S = 0.1


async def compact(store: str, table: str | None, *, json: bool) -> int:
    """Compact in the process that has the store open, or in this process if no other has."""
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(inside(db).catalogue)
        names = list(inside(db).catalogue.tables) if table is None else [table_named(db, table).name]
    done: list[perco.Compacted] = []
    async with perco.open(store, schema) as db:
        for name in names:
            async with _progress(db):
                compacted = await db.compact(name)
            done += compacted
            if not json:
                for each in compacted:
                    print(_told(_key(db, each), each))
        keys = [_key(db, each) for each in done]
    given = sum(each.before - each.after for each in done)
    if json:
        told = [
            {"table": each.table, "from": key, "before": each.before, "after": each.after}
            | {"seconds": each.seconds, "paused_s": each.paused_s}
            for key, each in zip(keys, done, strict=True)
        ]
        show_json({"tablets": told, "given_back": given})
    else:
        print(f"{size(max(given, 0))} given back")
    return FINE


def _key(db: perco.Database, done: perco.Compacted) -> object:
    """The first key of a tablet, whose table may have been dropped; None: it has the table's first rows."""
    return inside(db).known.key_of(done.table, done.row) if done.row else None


def _told(key: object, done: perco.Compacted) -> str:
    begins = "" if key is None else f" from {shown(key, _KEY_WIDTH)} on"
    waited = f"in {done.seconds:.1f} s; writes waited for {1000 * done.paused_s:.0f} ms"
    return f"{done.table}{begins}: {size(done.before)} to {size(done.after)} {waited}"


@asynccontextmanager
async def _progress(db: perco.Database) -> AsyncIterator[None]:
    """A progress bar on a terminal, if this process compacts."""
    if inside(db).place.path is None or not sys.stderr.isatty():
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total} cells"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compacting", total=None)

        async def watch() -> None:
            while True:
                if (copied := local_owner(db).compacting.progress()) is not None:
                    table, cells, total = copied
                    bar.update(task, description=f"compacting {table}", completed=cells, total=total)
                await trio.sleep(_LOOK_S)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            yield
            nursery.cancel_scope.cancel()
