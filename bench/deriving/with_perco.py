"""perco: documents are rows of a table, or files of a folder; a view gives the chunks.

    python -m bench.deriving.with_perco rows|files STATE FILES DOCUMENTS VERSION

With rows, it first loads the documents, some hundred in a transaction, together with how many there are: killed, it
goes on from there. With files, it watches the folder. perco is embedded, so the reader of the chunks is a task of this
program, which looks as often as the readers of other systems do; orders and answers come through a pipe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import trio

import perco
from bench.deriving import child
from bench.deriving.child import POLL_S, Counted, Job
from bench.deriving.corpus import Chunk, Corpus
from perco import sources, views

AT_ONCE: Final = 500  # documents of a transaction


class Tables:
    """The documents, their chunks, and the view between them.

    All are rows of one table, so that a run, which reads a document and writes its chunks, commits in one step: a table
    of their own would be another tablet. The chunks' columns are a locality group of their own, so that a look through
    the folder's files does not read them.
    """

    def __init__(self, function: Counted) -> None:
        self.table = table = perco.Table("docs", key=perco.TEXT)
        self.text = text = table.column("text", perco.TEXT)
        self.words = words = table.column("words", perco.INT64, group="chunks")
        self.vector = vector = table.column("vector", perco.TEXT, group="chunks")
        loads = perco.Table("loads", key=perco.TEXT)
        self.loaded = loads.column("loaded", perco.INT64)
        self.views = views.Views(perco.Schema(table, loads))

        def derived(doc: perco.Row[str]) -> Iterator[views.Put[Any]]:
            for chunk in function(doc[text] or ""):
                yield views.Put(table, f"{doc.key}#{chunk.n}", {words: chunk.words, vector: chunk.vector})

        self.views.each(text, id="chunks", into=[words, vector], version=function.version)(derived)

    def chunk(self, row: perco.Row[str]) -> tuple[str, Chunk]:
        """The document and the chunk that a row stores."""
        doc, _, n = row.key.rpartition("#")
        return doc, Chunk(int(n), row[self.words] or 0, row[self.vector] or "")


async def run(job: Job, reads_files: bool) -> None:
    function = Counted(job.version)
    tables = Tables(function)
    source = sources.Folder(job.files, tables.text) if reads_files else None
    async with perco.open(job.state, tables.views.schema) as db, db.worker(), trio.open_nursery() as nursery:
        nursery.start_soon(_until_told, db, tables, function)
        child.say(open=True)
        if source is None:
            await _load(db, tables, job.documents)
            await _ready(db, function)
            return
        told = False

        async def tell(synced: Any) -> None:
            await _ready(db, function)

        def on_pass(synced: Any) -> None:
            nonlocal told
            if not told:
                told = True
                nursery.start_soon(tell, synced)

        await source.watch(db, told=on_pass)


async def _ready(db: perco.Database, function: Counted) -> None:
    await db.wait_idle()
    child.say(ready=True, calls=function.calls)


async def _until_told(db: perco.Database, tables: Tables, function: Counted) -> None:
    """Carry out orders: `edit` a document, `see` when its chunks are as they should be."""
    lines = child.orders()
    while (order := await trio.to_thread.run_sync(next, lines, None, abandon_on_cancel=True)) is not None:
        if "text" in order:
            await db.run(_edit, tables, order["key"], order["text"])
        if "wanted" in order:
            wanted = [Chunk(*chunk) for chunk in order["wanted"]]
            # it measures a reader that looks again and again
            while await _chunks(db, tables, order["key"]) != wanted:  # noqa: ASYNC110
                await trio.sleep(POLL_S)
            child.say(seen=order["key"], calls=function.calls)
    raise SystemExit


async def _chunks(db: perco.Database, tables: Tables, key: str) -> list[Chunk]:
    async with db.snapshot() as snap:
        rows = snap.scan(tables.table, prefix=f"{key}#", columns=[tables.words, tables.vector])
        return [tables.chunk(row)[1] async for row in rows]


async def _edit(txn: perco.Transaction, tables: Tables, key: str, text: str) -> None:
    txn.set(tables.text, key, text)


async def _load(db: perco.Database, tables: Tables, documents: int) -> None:
    async with db.snapshot() as snap:
        loaded = await snap.get(tables.loaded, "docs") or 0
    texts = Corpus(documents).texts(loaded)
    while some := list(islice(texts, AT_ONCE)):
        loaded += len(some)
        await db.run(_write, tables, some, loaded)


async def _write(txn: perco.Transaction, tables: Tables, some: list[tuple[str, str]], loaded: int) -> None:
    for key, text in some:
        txn.set(tables.text, key, text)
    txn.set(tables.loaded, "docs", loaded)


if __name__ == "__main__":
    mode = sys.argv.pop(1)
    try:
        trio.run(run, child.job(), mode == "files")
    except* SystemExit:
        os._exit(0)
