"""`perco demo --embeddings`: a folder of notes, indexed by meaning and kept up to date; nothing is staged.

`perco embeddings index` does the work in a child process, which is really killed half-way and started again. Then notes
are edited, renamed and deleted, and the demo shows what each of these costs, and whether the index is still right.
"""

from __future__ import annotations

import importlib
import inspect
import json
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import trio
from rich.console import Console
from rich.markup import escape

import perco
from perco.cli.screen import FINE, FOUND, called, counted
from perco.embeddings.index import EmbeddingIndex
from perco.sources import Folder
from perco.views import check

console: Console = Console(highlight=False)

_MODULES: Final = (
    "abc argparse array ast asyncio base64 bisect calendar cmd codecs collections collections.abc concurrent.futures "
    "configparser contextlib copy csv ctypes dataclasses datetime decimal difflib dis email.message enum fileinput "
    "fnmatch fractions ftplib functools gc getpass glob graphlib gzip hashlib heapq hmac html http.client http.server "
    "imaplib importlib inspect io ipaddress itertools json linecache locale logging logging.handlers lzma mailbox math "
    "mimetypes multiprocessing multiprocessing.pool numbers operator os os.path pathlib pdb pickle pkgutil platform "
    "plistlib poplib pprint profile queue random re reprlib sched secrets select selectors shelve shlex shutil signal "
    "smtplib socket socketserver sqlite3 ssl stat statistics string struct subprocess symtable sys tarfile tempfile "
    "textwrap threading time timeit tokenize trace traceback tracemalloc types typing unicodedata unittest "
    "unittest.mock urllib.parse urllib.request uuid warnings weakref xml.dom.minidom xml.etree.ElementTree zipfile zlib"
)
_QUESTIONS: Final = (
    "wait until all tasks in the queue are finished",
    "compress a file and read it again",
    "which numbers are in the middle of some data?",
)
_NEW: Final = "A teapot that is asked to brew coffee answers with status 418, and stays short and stout.\n"
_KILLED_AT: Final = 1  # chunks that can be found
_TEAPOT: Final = "short and stout teapot"


async def run(folder: Path) -> int:
    """Run the demo in a folder; returns the exit code."""
    notes, at = folder / "notes", folder / "notes-index"
    count = write_notes(notes)
    _say(f"1  {count} notes, made of your Python's documentation: {notes}/. A process begins to index them.")
    began = time.monotonic()
    await _killed(notes, at)
    index = EmbeddingIndex(at)
    before = await _stored(index)
    _say(f"\n2  It was killed after {time.monotonic() - began:.1f} s; {before:,} vectors are stored. It starts again.")
    told = await _again(notes, at)
    after = await _stored(index)
    console.print(f"   {told['embedded']:,} chunks are embedded now; {after:,} vectors are stored.")
    twice = before + told["embedded"] - after
    console.print(f"   {counted(twice, 'chunk')} had to be embedded twice: those in calls that the kill cut off.")
    _say("\n3  Ask it. (The vectors count hashed words here; a model of your own may know what words mean.)")
    for question in _QUESTIONS:
        await _ask(index, question)
    equal = await _edits(index, notes)
    _say("\nTry next:")
    for command in (
        f"{called()} embeddings search {at} read a file line by line",
        f"{called()} embeddings index YOUR-NOTES my-index/ --watch",
        f"{called()} status {index.store}",
        f"{called()} observers {index.store} --graph",
    ):
        console.print(f"  [bold]{escape(command)}[/bold]", soft_wrap=True)
    return FINE if equal else FOUND


def _say(text: str) -> None:
    console.print(text, style="bold" if text.lstrip()[:1].isdigit() else None, soft_wrap=True)


async def _edits(index: EmbeddingIndex, notes: Path) -> bool:
    """Edit, rename and delete notes. Returns whether the index is what the notes say."""
    source = Folder(notes, index.text, match="*.md")
    async with perco.open(index.store, index.schema) as db, db.worker():

        async def follow(what: str) -> None:
            began, before = time.monotonic(), index.embedded
            await source.sync(db)
            await db.wait_idle()
            took = 1000 * (time.monotonic() - began)
            console.print(f"   {what}: {counted(index.embedded - before, 'chunk')} embedded, {took:.0f} ms")

        _say("\n4  Edit, rename and delete. perco embeds only new chunks.")
        await follow("nothing has changed")
        edited = notes / "http.client.md"
        edited.write_text(_NEW + "\n" + edited.read_text())
        await follow("a paragraph at the beginning of http.client.md")
        await _ask(index, _TEAPOT, 1)
        edited.rename(notes / "renamed.md")
        await follow("http.client.md is renamed to renamed.md")
        await _ask(index, _TEAPOT, 1)
        (notes / "renamed.md").unlink()
        await follow("renamed.md is deleted")
        await _ask(index, _TEAPOT, 1)
        console.print("     The note is gone: this is the nearest of the others.")
        _say("\n5  Is the index what the notes say?")
        began = time.monotonic()
        async with db.snapshot() as snap:
            checked = await check(index.views, snap)
        for id, rows in checked.rows.items():
            console.print(f"   {id:<8} {rows:>6,} rows  {checked.digests[id]}")
        verdict = "equal" if checked.equal else f"{counted(checked.count, 'row')} differ"
        console.print(
            f"   all computed again from the notes and compared in {time.monotonic() - began:.1f} s: {verdict}"
        )
    return checked.equal


async def _ask(index: EmbeddingIndex, question: str, k: int = 2) -> None:
    began = time.monotonic()
    found = await index.search(question, k)
    took = 1000 * (time.monotonic() - began)
    console.print(f"   [bold]{escape(question)}[/bold]  ({took:.0f} ms)")
    for each in found:
        words = " ".join(each.words.split())
        console.print(
            f"     {each.likeness:.2f}  {each.name}: {words[:200]}", markup=False, no_wrap=True, overflow="ellipsis"
        )


async def _stored(index: EmbeddingIndex) -> int:
    """How many vectors the store has."""
    results = index.views.cached_functions["embed"].results
    async with perco.open(index.store, index.schema, readonly=True) as db, db.snapshot() as snap:
        return len(await snap.scan(results.table, columns=[results]).all())


# ------------------------------------------------------------------ the child


def _command(notes: Path, at: Path) -> list[str]:
    return [sys.executable, "-m", "perco", "embeddings", "index", str(notes), str(at), "--json"]


async def _killed(notes: Path, at: Path) -> None:
    """Start to index, and kill the process when some of the notes can be found."""
    process = await trio.lowlevel.open_process(_command(notes, at), stdin=-3, stdout=-3, start_new_session=True)
    try:
        found = EmbeddingIndex(at)
        while process.poll() is None and found.count() < _KILLED_AT:  # noqa: ASYNC110  # the child is another process
            await trio.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    found.close()


async def _again(notes: Path, at: Path) -> dict[str, Any]:
    done = await trio.run_process(_command(notes, at), capture_stdout=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


# ------------------------------------------------------------------ the notes


def write_notes(folder: Path) -> int:
    """Write a file for each of some modules of this Python. Returns how many."""
    folder.mkdir(parents=True)
    count = 0
    for name in _MODULES.split():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that a module will lose
            text = "\n\n".join(_sections(name))
        if text:
            (folder / f"{name}.md").write_text(text + "\n")
            count += 1
    return count


def _sections(name: str) -> Iterator[str]:
    try:
        module = importlib.import_module(name)
    except ImportError:  # a Python may have been built without it
        return
    yield f"# {name}\n\n{inspect.getdoc(module) or ''}"
    for title, found in sorted(vars(module).items()):
        own = getattr(found, "__module__", None) in (name, f"_{name}")
        if own and not title.startswith("_") and (inspect.isclass(found) or inspect.isroutine(found)):
            text = inspect.getdoc(found)
            if text:
                yield f"## {title}\n\n{text}"
            for method, of in sorted(vars(found).items()) if inspect.isclass(found) else ():
                about = inspect.getdoc(of) if inspect.isroutine(of) and not method.startswith("_") else None
                if about:
                    yield f"### {title}.{method}\n\n{about}"
