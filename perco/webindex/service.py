"""The web index as a running program: a crawler process, loaders, observers, and their progress.

The stages overlap: pages are loaded while the crawler is still making others, observers run while pages are still
being loaded, and the search index answers queries meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import trio

import perco
from perco.webindex.crawled import DOCS_URL, CrawlDecoder, CrawlError, Done, Noted, Skipped
from perco.webindex.exporter import Exporter
from perco.webindex.index import WebIndex
from perco.webindex.pages import Page, canonical_url
from perco.webindex.places import IN_FOLDER, keep, opened, rows_for, search_path
from perco.webindex.search import ExportRow, SearchIndex

_LOADERS = 48
_EXPORTED_AT_ONCE = 500
_PIPE_BYTES = 1 << 16
_COMPLAINTS_MAX = 4096


@dataclass(slots=True)
class Loaded:
    """The counts of a load so far."""

    crawled: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    skipped: int = 0
    notes: int = 0
    done: bool = False
    last_skip: str = ""


@dataclass(slots=True)
class Progress:
    """The state of all stages at one moment, for users and for the parent process."""

    load: dict[str, Any]
    stages: dict[str, dict[str, Any]]
    exported: int
    searchable: int
    idle: bool = False
    recovered: int = 0
    seconds: float = 0.0
    held: list[str] = field(default_factory=list)


async def reap(process: trio.Process) -> None:
    """If a child process still runs, kill it and close its pipes; completes even if cancelled."""
    if process.poll() is not None:
        return
    process.kill()
    with trio.CancelScope(shield=True):
        await process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                await pipe.aclose()


class Service:
    """An open web index whose observers run."""

    db: perco.Database
    index: WebIndex
    search: SearchIndex
    worker: perco.WorkerHandle
    loaded: Loaded

    def __init__(self, db: perco.Database, index: WebIndex, search: SearchIndex, worker: perco.WorkerHandle) -> None:
        self.db, self.index, self.search, self.worker = db, index, search, worker
        self.loaded = Loaded()
        self._began = trio.current_time()

    async def load(self, sources: Sequence[str]) -> Loaded:
        """Crawl and load. After a complete crawl without `sources`, remove pages of documentation that it did not find.

        Args:
            sources: arguments of `python -m perco.webindex.crawl`.

        Raises: CrawlError if the crawler did not finish.
        """
        loaded = self.loaded = Loaded()
        seen: set[str] = set()
        send, receive = trio.open_memory_channel[Page](_LOADERS)
        async with trio.open_nursery() as nursery:
            for _ in range(_LOADERS):
                nursery.start_soon(self._loader, receive.clone())
            receive.close()
            async with send:
                await self._crawl(sources, send, seen)
        if not sources and loaded.done:
            await self.remove_vanished(seen)
        return loaded

    async def remember_sources(self, sources: Sequence[str]) -> None:
        """Store the sources that `recrawl` will crawl."""
        async for attempt in self.db.attempts():
            async with attempt as txn:
                txn.set(self.index.sources, "last", list(sources))

    async def last_sources(self) -> list[str]:
        """The sources of the last load; empty: the standard library."""
        async with self.db.snapshot() as snap:
            return list(await snap.get(self.index.sources, "last") or ())

    async def _crawl(self, sources: Sequence[str], send: trio.MemorySendChannel[Page], seen: set[str]) -> None:
        command = [sys.executable, "-m", "perco.webindex.crawl", *sources]
        complaints = bytearray()
        async with trio.open_nursery() as nursery:
            # The crawler is in a session of its own: Ctrl-C reaches only this process, which then kills the crawler.
            process = await trio.lowlevel.open_process(command, stdin=-3, stdout=-1, stderr=-1, start_new_session=True)
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                nursery.start_soon(_collect, process.stderr, complaints)
                decoder = CrawlDecoder()
                while data := await process.stdout.receive_some(_PIPE_BYTES):
                    for record in decoder.feed(data):
                        await self._take(record, send, seen)
                await process.wait()
                if process.returncode:
                    raise CrawlError(complaints.decode(errors="replace").strip() or f"exit code {process.returncode}")
                decoder.finish()
            finally:
                await reap(process)

    async def _take(self, record: Any, send: trio.MemorySendChannel[Page], seen: set[str]) -> None:
        if isinstance(record, Page):
            self.loaded.crawled += 1
            url = canonical_url(record.url)
            if url is None:
                self.loaded.skipped += 1
                return
            seen.add(url)
            await send.send(record)
        elif isinstance(record, Skipped):
            self.loaded.skipped += 1
            self.loaded.last_skip = f"{record.name}: {record.why}"
        elif isinstance(record, Noted):
            self.loaded.notes += 1
        elif isinstance(record, Done):
            self.loaded.done = True

    async def _loader(self, pages: trio.MemoryReceiveChannel[Page]) -> None:
        async with pages:
            async for page in pages:
                if await self.db.run(self.index.load, page):
                    self.loaded.changed += 1
                else:
                    self.loaded.unchanged += 1

    async def remove_vanished(self, seen: set[str]) -> None:
        """Remove pages of the documentation that a complete crawl of the documentation has not seen."""
        async with self.db.snapshot() as snap:
            rows = snap.scan(self.index.pages, prefix=DOCS_URL, columns=[self.index.contents])
            gone = [row.key async for row in rows if row.key not in seen]
        for url in gone:
            await self.db.run(self.index.remove, url)
            self.loaded.removed += 1

    async def progress(self) -> Progress:
        """The state of all stages now."""
        waiting = await self.db.waiting()
        counters = self.db.statistics().counters
        stages = {}
        for id, runs in self.worker.statistics().items():
            stages[id] = {**asdict(runs), "waiting": waiting.get(id, 0)}
        return Progress(
            asdict(self.loaded),
            stages,
            self.index.exporter.rows,
            await trio.to_thread.run_sync(self._count),
            await self.db.is_idle(),
            counters.rolled_forward + counters.rolled_back,
            trio.current_time() - self._began,
            [f"{held.seconds:.2f} s at {held.where}" for held in self.db.statistics().loop.held],
        )

    def _count(self) -> int:
        return self.search.count()


async def _collect(stream: trio.abc.ReceiveStream, into: bytearray) -> None:
    """Read a process's standard error to its end, and keep only the last part."""
    while data := await stream.receive_some(_PIPE_BYTES):
        into += data
        del into[:-_COMPLAINTS_MAX]


@asynccontextmanager
async def serve(
    store: Path,
    *,
    rows: str = "",
    take_over: bool = False,
    concurrency: int = 64,
    options: perco.Options | None = None,
    on_export: Callable[[int], None] | None = None,
    on_fill: Callable[[int], None] = lambda documents: None,
) -> AsyncIterator[Service]:
    """Open a web index and run its observers while the block lasts.

    Args:
        store: the folder with the search index; it also holds the rows, or records where they are.
        rows: the address for the rows of a new web index; perco records it in the folder.
        take_over: whether this folder's search index takes the place of another folder's, which the rows name.
        on_fill: called with the number of documents so far, while a new search index is filled from the rows.

    Raises: what `perco.open` raises; UsageError if the rows are not at the address `rows`, or if their documents go to
    the search index in another folder.
    """
    exporter = Exporter(on_export)
    index = WebIndex(exporter)
    place = rows_for(store, rows)
    async with opened(place, index.schema, options) as db:
        if place.home != IN_FOLDER:
            place = await keep(db, index, store, place, take_over=take_over)
        with SearchIndex(search_path(store)) as writing, SearchIndex(search_path(store)) as reading:
            # Other processes may export too, so use the watermark: no transaction in flight anywhere is below it (G1).
            exporter.connect(writing, db.watermark)
            if not writing.is_full(place.home):
                await fill(db, index, writing, place.home, on_fill)
            async with db.worker(concurrency=concurrency, scanners=4) as worker:
                yield Service(db, index, reading, worker)


async def fill(
    db: perco.Database,
    index: WebIndex,
    search: SearchIndex,
    home: int,
    on_fill: Callable[[int], None] = lambda documents: None,
) -> None:
    """Export all documents into a new search index, because the rows may have been there before the index. If the index
    already has a newer version of a document, it keeps that version. The snapshot holds back the watermark, so the
    index does not forget deletions that are newer than the snapshot (`SearchIndex.forget`)."""
    await trio.to_thread.run_sync(search.begin, home, home == IN_FOLDER)
    filled, undecided = 0, []
    async with db.snapshot() as snap:
        rows: list[ExportRow] = []
        async for content, document in index.listed(snap):
            if document is None:
                undecided.append(content)
                continue
            rows.append(ExportRow(content.hex(), snap.start_ts, document))
            if len(rows) >= _EXPORTED_AT_ONCE:
                filled += len(rows)
                await trio.to_thread.run_sync(search.export, rows)
                on_fill(filled)
                rows = []
        await trio.to_thread.run_sync(search.export, rows)
    for content in undecided:  # the next election may find no change, and so export nothing
        await db.run(index.elect_and_export, content)
    await trio.to_thread.run_sync(search.mark_full, home)
