"""`perco demo`: shows in a minute what perco is for, on your Python's documentation; nothing is staged.

`perco web load` does the work in a child process. The parent watches the child, really kills it half-way, and starts it
again. Then the demo shows whether the store is in order, which pages are canonical once they are ranked by their links,
what follows from one edit, and whether the index equals a batch build from the same pages.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trio
from rich.padding import Padding
from rich.text import Text
from rich.tree import Tree

import perco
from perco.cli.screen import called, counted
from perco.webindex.batch import build, digest
from perco.webindex.crawled import DOCS_URL
from perco.webindex.index import Listing, WebIndex
from perco.webindex.pages import Page, unpack
from perco.webindex.places import search_path
from perco.webindex.screen import Stages, console, linked_by, one_line, others
from perco.webindex.search import Hit, SearchIndex
from perco.webindex.service import Service, reap, serve

_MARK = "perco-demo"  # a file in every folder that a demo made; stores are replaced only in such a folder
_STORES = (
    "store",
    "spark",
    "embedded",
    "notes",
    "notes-index",
)  # what demos make in the folder; everything else in it is the user's
_QUERY = "asyncio future callback"
_AGO_S = (60, 30, 10, 5, 2)  # how far to look back: the first of these for which the store is old enough
_EDITED = DOCS_URL + "asyncio.Future"


async def run(folder: Path, limit: int | None) -> int:
    """Run the demo; returns the exit code."""
    store = fresh(folder)
    say(f"1  A crawler turns your Python's documentation into pages; observers build a search index of them: {folder}/")
    began = time.monotonic()
    await _first_life(store, limit, began)
    say("\n2  The loading process was killed with SIGKILL. Is the store intact?")
    if not await _checked(store):
        return 1
    say("\n3  The same command runs again. It settles the locks, runs the observers that were due, and loads the rest.")
    load_s = await _second_life(store, limit)
    if not await _checked(store):
        return 1
    async with serve(store) as service:
        await _rank(service)
        edited, edit_s = await _edit(service)
    equal = await _compare(store, load_s, edit_s)
    await _past(store)
    say("\nTry next:")
    for command in (
        f"{called()} web search {store} context manager exit",
        f"{called()} status {store}",
        f"{called()} observers {store} --graph",
        f"{called()} trace {store} pages {edited}",
        f"{called()} web load {folder}/mine --mine trio",
    ):
        console.print(f"  [bold]{command}[/bold]")
    return 0 if equal else 1


def say(text: str) -> None:
    console.print(text, style="bold" if text.lstrip()[:1].isdigit() else None)


def fresh(folder: Path) -> Path:
    """Prepare the folder; returns the path of the store to be made. If an earlier demo made the folder, the stores of
    that demo are removed, and nothing else. Otherwise, a folder with files in it is refused."""
    mark = folder / _MARK
    if folder.exists() and not folder.is_dir():
        raise perco.UsageError(f"{folder} is a file; name a folder with --dir")
    if folder.exists() and any(folder.iterdir()) and not mark.exists():
        raise perco.UsageError(f"{folder} holds files that no demo made; name a new or an empty folder with --dir")
    try:
        for name in _STORES:
            if (folder / name).exists():
                shutil.rmtree(folder / name)
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(f"`perco demo` uses this folder; each run first removes these from it: {', '.join(_STORES)}\n")
    except OSError as error:
        raise perco.UsageError(f"{folder} cannot be made: {error.strerror}; name another folder with --dir") from None
    return folder / "store"


# ---------------------------------------------------------------- the child


class Child:
    """`perco web load STORE --json`, and the last progress that it reported."""

    command: list[str]
    told: trio.Event

    def __init__(self, store: Path, limit: int | None) -> None:
        self.command = [sys.executable, "-m", "perco", "web", "load", str(store), "--json"]
        self.command += ["--limit", str(limit)] if limit is not None else []
        self.progress: dict[str, Any] | None = None
        self.told = trio.Event()
        self._complaints = b""

    async def run(self, task_status: trio.TaskStatus[trio.Process]) -> None:
        """Run the command until it ends, for whatever reason."""
        process = await trio.lowlevel.open_process(self.command, stdin=-3, stdout=-1, stderr=-1, start_new_session=True)
        task_status.started(process)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, process)
                nursery.start_soon(self._complain, process)
                await process.wait()
        finally:
            await reap(process)
        self._tell()
        if process.returncode and process.returncode > 0:
            raise perco.StoreError(f"perco web load failed: {self._complaints.decode(errors='replace').strip()}")

    async def _listen(self, process: trio.Process) -> None:
        assert process.stdout is not None
        rest = b""
        async for data in process.stdout:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self.progress = json.loads(line)
            if lines:
                self._tell()

    async def _complain(self, process: trio.Process) -> None:
        assert process.stderr is not None
        async for data in process.stderr:
            self._complaints = (self._complaints + data)[-2000:]

    def _tell(self) -> None:
        self.told.set()
        self.told = trio.Event()


async def _first_life(store: Path, limit: int | None, began: float) -> None:
    """Search while the child loads, then kill the child."""
    child = Child(store, limit)
    goal = 2500 if limit is None else limit // 2
    with Stages() as stages:
        async with trio.open_nursery() as nursery:
            process = await nursery.start(child.run)
            searched = False
            while process.returncode is None:
                await child.told.wait()
                progress = child.progress
                if progress is None:
                    continue
                stages.show(progress)
                if not searched and progress["searchable"] >= min(300, goal // 4):
                    searched = True
                    _search_now(store, progress, began)
                if searched and progress["load"]["crawled"] >= goal:
                    process.kill()
                    break
    if child.progress is not None:
        console.print(f"   killed at: {one_line(child.progress)}")


def _search_now(store: Path, progress: dict[str, Any], began: float) -> None:
    asked = time.perf_counter()
    with SearchIndex(search_path(store)) as index:
        hits = index.search(_QUERY, 3)
    took_ms = (time.perf_counter() - asked) * 1000
    console.print(
        f"   {time.monotonic() - began:.1f} s after the start, with {progress['searchable']} of "
        f'{progress["load"]["crawled"]} crawled pages searchable: "{_QUERY}" answered in {took_ms:.1f} ms'
    )
    _show(hits)


def _show(hits: list[Hit]) -> None:
    for hit in hits[:3]:
        console.print(f"     {hit.title}  {hit.url}", style="dim", markup=False)
    if not hits:
        console.print("     (nothing yet)", style="dim")


async def _second_life(store: Path, limit: int | None) -> float:
    """Load until all pages are searchable; returns how many seconds that took."""
    child = Child(store, limit)
    with Stages() as stages:
        async with trio.open_nursery() as nursery:
            process = await nursery.start(child.run)
            while process.returncode is None:
                await child.told.wait()
                if child.progress is not None:
                    stages.show(child.progress)
    progress = child.progress
    assert progress is not None
    load = progress["load"]
    console.print(
        f"   {load['unchanged']} pages were already in the store, {load['changed']} were new; "
        f"{progress['searchable']} documents are searchable"
    )
    return float(progress["seconds"])


# ---------------------------------------------------------------- proofs


async def _checked(store: Path) -> bool:
    ran = await trio.run_process(
        [sys.executable, "-m", "perco", "check", str(store), "--json"], capture_stdout=True, check=False
    )
    if not ran.stdout:
        return False  # perco check has printed the reason
    found: dict[str, Any] = json.loads(ran.stdout)
    told = f"{counted(found['errors'], 'error')}, {counted(found['warnings'], 'warning')}"
    word = "clean" if found["clean"] else f"[red]{told}[/red]"
    console.print(
        f"   perco check: {word} ({counted(found['cells'], 'cell')} in {counted(found['rows'], 'row')}, "
        f"{counted(found['locks'], 'lock')} left behind, {counted(found['notifications'], 'change')} waiting)"
    )
    return bool(found["clean"])


async def _rank(service: Service) -> None:
    """Rank the pages, and show which pages are canonical as a result."""
    say("\n4  Pages with the same content are one document. Its canonical page is the one with the highest PageRank.")
    from perco.webindex.rank import rank_all  # numpy is slow to import

    db, index = service.db, service.index
    async with db.snapshot() as snap:
        before = {row.key: row[index.canonical] async for row in snap.scan(index.dups, columns=[index.canonical])}
    began = time.perf_counter()
    ranked = await rank_all(db, index)
    await db.wait_idle()
    took_s = time.perf_counter() - began
    moved, copies, example = 0, 0, None
    async with db.snapshot() as snap:
        async for row in snap.scan(index.dups, columns=[index.canonical, index.listing]):
            listing = Listing(*row[index.listing] or ())
            copies += len(listing.duplicates)
            if listing.canonical != before.get(row.key):
                moved += 1
                if example is None or len(listing.anchors) > len(example[1].anchors):
                    example = before.get(row.key), listing
    console.print(
        f"   {ranked.pages} pages, {copies} of them duplicates, {ranked.links} links; in {took_s:.1f} s, "
        f"{ranked.changed} ranks were written, and {moved} documents got another canonical page"
    )
    if example is not None:
        was, listing = example
        console.print(
            f"     for example: {_short(was)} was canonical, now {_short(listing.canonical)} is",
            style="dim",
            markup=False,
        )
        _show_listing(listing)


def _short(url: str | None) -> str:
    return (url or "no page").removeprefix(DOCS_URL)


def _show_listing(listing: Listing) -> None:
    duplicates = others([_short(url) for url in listing.duplicates]) or "none"
    links = linked_by([(_short(source), text) for source, text in listing.anchors]) or "no page"
    console.print(f"     rank {listing.rank:.3g}; duplicates: {duplicates}", style="dim", markup=False)
    console.print(f"     linked to by {links}", style="dim", markup=False)


async def _edit(service: Service) -> tuple[str, float]:
    """Change one page; show which observers ran and why, and when a search finds the change. Returns (URL, seconds)."""
    db, index, word = service.db, service.index, "zq" + secrets.token_hex(4)
    url, content = await _canonical_with_duplicates(service)
    say(
        f'\n5  One page is edited: "{word}" is added to {_short(url)}'
        + (", a canonical page with duplicates." if content else ".")
    )
    runs: list[tuple[str, Any, float]] = []
    service.worker.on_run(lambda id, key, seconds: runs.append((id, key, seconds)))
    async with db.snapshot() as snap:
        packed = await snap.get(index.contents, url)
    assert packed is not None
    page: Page = unpack(packed)
    edited = replace(page, body=page.body.replace(b"</body>", f"<p>{word}</p></body>".encode(), 1))
    if edited == page:
        edited = replace(page, body=page.body + f"<p>{word}</p>".encode())
    began = time.perf_counter()
    await db.run(index.load, edited)
    await db.wait_idle()
    hits = service.search.search(word)
    edit_s = time.perf_counter() - began
    # The newest tree comes first. If another transaction wrote the page's rank, that one has a tree of its own.
    caused = next(tree for tree in await db.trace(index.pages, url) if _wrote(tree, url))
    async with db.snapshot() as snap:
        await _show_tree(index, snap, caused, runs)
        after = None if content is None else await snap.get(index.listing, content)
    assert [hit.url for hit in hits] == [url], "the edit must be found, there and nowhere else"
    console.print(f"   durable, observed and searchable after {edit_s * 1000:.0f} ms")
    if after is not None:
        listing = Listing(*after)
        assert listing.canonical != url, "the page has left its duplicates"
        console.print(f"   the document with the old content has a new canonical page, {_short(listing.canonical)}:")
        _show_listing(listing)
    return url, edit_s


async def _canonical_with_duplicates(service: Service) -> tuple[str, bytes | None]:
    """A canonical page with duplicates, and the hash of its cluster; if no page has duplicates, any page, and None."""
    index = service.index
    async with service.db.snapshot() as snap:
        document = await index.document(snap, _EDITED)
        if document is None or not document.duplicates:
            found = (await index.documents(snap)).values()
            document = max(found, key=lambda document: (bool(document.duplicates), len(document.anchors)))
        place = await snap.get(index.place, document.url)
    return document.url, place[0] if document.duplicates and place is not None else None


def _wrote(tree: perco.Traced, url: str) -> bool:
    return ("pages", url, "contents") in tree.writes


async def _show_tree(
    index: WebIndex, snap: perco.Snapshot, edit: perco.Traced, runs: list[tuple[str, Any, float]]
) -> None:
    """Print the tree of `perco trace`: every run below its cause, as the acknowledgements record it. The times of the
    runs were measured in this process, which ran the observers."""
    took = {(id, key): seconds for id, key, seconds in runs}

    async def add(below: Tree, run: perco.Traced) -> None:
        assert run.on is not None
        table, key, column = run.on
        of = f" {_short(key)}" if isinstance(key, str) else f" {key.hex()[:8]}"
        if isinstance(key, bytes) and (canonical := await snap.get(index.canonical, key)) is not None:
            of = f", of {_short(canonical)}"
        seconds = took.get((run.observer or "", key))
        ms = "" if seconds is None else f"   {seconds * 1000:.1f} ms"
        node = below.add(Text(f"{run.observer:<8}{table}.{column}{of}{ms}", style="dim"))
        for each in run.runs:
            await add(node, each)

    tree = Tree(f"pages.contents {_short(next(key for _, key, name in edit.writes if name == 'contents'))}")
    tree.guide_style = "dim"
    for run in edit.runs:
        await add(tree, run)
    console.print(Padding(tree, (0, 0, 0, 5)))


async def _compare(store: Path, load_s: float, edit_s: float) -> bool:
    """Compare the index with a batch build from the same pages; returns whether they are equal."""
    say("\n6  Is the index right? For comparison, a plain batch function builds one from the same pages and ranks.")
    index = WebIndex()
    async with perco.open(store, index.schema, readonly=True) as db, db.snapshot() as snap:
        pages, ranks = await index.all_pages(snap)
    began = time.perf_counter()
    documents = build(pages, ranks)
    with SearchIndex.in_memory(documents):
        batch_s = time.perf_counter() - began
    wanted = digest(documents)
    with SearchIndex(search_path(store)) as search:
        found = search.digest()
    if found != wanted:
        console.print(
            f"   [red]NOT equal to the batch build: sha256 {found[:16]}..., batch build {wanted[:16]}...[/red]"
        )
        return False
    console.print(
        f"   equal to the batch build: {len(pages)} pages, {len(documents)} documents, sha256 {wanted[:16]}... for both"
    )
    batch_page_s, load_page_s = batch_s / len(pages), load_s / len(pages)
    console.print(
        f"   To be fair: the batch build took only {batch_s * 1000:.0f} ms. For a single edit, perco is faster from "
        f"about {max(edit_s / batch_page_s, 1):.0f} pages on; the batch build is faster if more than about "
        f"{min(100 * batch_page_s / load_page_s, 100):.0f} % of the pages change between two builds."
    )
    return True


async def _past(store: Path) -> None:
    """Search the store's history: the same query as before, but as of a past moment."""
    index = WebIndex()
    async with perco.open(store, index.schema, readonly=True) as db:
        now = datetime.now(UTC)
        for ago_s in _AGO_S:
            try:
                async with db.snapshot(at=now - timedelta(seconds=ago_s)) as snap:
                    documents = await index.documents(snap)
            except perco.errors.SnapshotTooOld:
                continue
            with SearchIndex.in_memory(documents) as past:
                hits = past.search(_QUERY, 3)
            say(f'\n7  The results for "{_QUERY}" as of {_moment(ago_s)} ago, among {len(documents)} documents:')
            if ago_s != _AGO_S[0]:
                console.print(f"   (this store's history does not go back {_moment(_AGO_S[0])} yet)", style="dim")
            _show(hits)
            return
    say(f"\n7  There is no past to search yet: this store's history does not go back {_moment(_AGO_S[-1])}.")


def _moment(ago_s: int) -> str:
    return "a minute" if ago_s == 60 else f"{ago_s} seconds"
