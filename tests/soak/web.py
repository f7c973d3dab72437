"""`python -m tests.soak.web bigtable`: the index of `perco demo` over a database, while processes are killed.

Two servers give timestamps, three worker processes run observers, and one process loads the documentation of this
Python; all of them are direct clients. During the load, the leading server and two of the workers are killed. The index
must equal a batch build from the same pages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import trio

from perco.webindex.batch import build, digest
from perco.webindex.index import WebIndex
from perco.webindex.places import ROWS_FILE, looking, search_path
from perco.webindex.search import SearchIndex
from tests.soak.running import STORES, Plan, database
from tests.support.coordinated import KILLED, Coordinators

_PAGES: Final = 6600  # about as many as the documentation has
_WORKERS: Final = 3


def _web(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "perco", "web", *map(str, arguments)]


class Load:
    """`perco web load`, with the loaders' and observers' progress."""

    def __init__(self, index: Path, url: str, limit: int) -> None:
        command = _web("load", index, "--rows", url, "--limit", limit, "--json")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.progress: dict[str, Any] = {}

    def until(self, pages: float) -> None:
        """Read its progress until so many pages are loaded, or it ends. Raises: RuntimeError, if it fails."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.progress = json.loads(line)
            if self.progress["load"]["changed"] >= pages:
                return
        if self.process.wait():
            raise RuntimeError(f"perco web load ends with exit code {self.process.returncode}")


def run(store: str, folder: Path, limit: int, lose: int, say: Callable[[str], object]) -> bool:
    """Whether the index equals a batch build. Raises: RuntimeError, if a process fails that was not killed."""
    index = folder / "index"
    with ExitStack() as stack:
        served = stack.enter_context(database(Plan(store=store, transactions=0, lose=lose)))
        servers = Coordinators(served.url, folder)
        stack.callback(servers.end)
        began = time.monotonic()
        load = Load(index, served.url, limit)
        stack.enter_context(load.process)
        stack.callback(load.process.kill)
        while not (index / ROWS_FILE).exists():
            if load.process.poll():
                raise RuntimeError(f"perco web load ends with exit code {load.process.returncode}")
            time.sleep(0.1)
        workers = [subprocess.Popen(_web("run", index, "--json"), stdout=subprocess.DEVNULL) for _ in range(_WORKERS)]
        for each in workers:
            stack.callback(each.wait)
            stack.callback(each.kill)

        harms: list[tuple[float, str, Callable[[], object]]] = [
            (0.2, "the server that leads is killed", lambda: servers.follow(KILLED)),
            (0.4, "a worker is killed", workers[0].kill),
            (0.6, "another worker is killed", workers[1].kill),
        ]
        for part, what, harm in harms:
            load.until(part * limit)
            if load.process.poll() is not None:
                raise RuntimeError("the load ended before it could be disturbed")
            say(f"   {time.monotonic() - began:5.1f} s, {load.progress['load']['changed']} pages loaded: {what}")
            harm()
        load.until(float("inf"))
        say(
            f"   {time.monotonic() - began:5.1f} s: all is loaded and observed; "
            f"{load.progress['recovered']} locks of others were settled by the loading process alone"
        )
        if workers[2].poll() is not None:
            raise RuntimeError(f"a worker ends by itself, with exit code {workers[2].returncode}")
        ranked = subprocess.run(_web("rank", index), capture_output=True, text=True, check=True)
        say(f"   {ranked.stdout.splitlines()[-1]}")
        loaded = load.progress["load"]["changed"] + load.progress["load"]["unchanged"]
        equal = trio.run(_compare, index, loaded, say)
        for what, count in served.ended().items():
            say(f"   {count} {what}")
        return equal


async def _compare(folder: Path, loaded: int, say: Callable[[str], object]) -> bool:
    index = WebIndex()
    async with looking(folder, index.schema) as db, db.snapshot() as snap:
        pages, ranks = await index.all_pages(snap)
    documents = build(pages, ranks)
    wanted = digest(documents)
    with SearchIndex(search_path(folder)) as search:
        found = search.digest()
        search.check()
    say(f"   {len(pages)} pages, {len(documents)} documents: sha256 {found[:16]}..., of a batch build {wanted[:16]}...")
    if len(pages) != loaded:
        say(f"   {loaded} pages were acknowledged")
    return found == wanted and len(pages) == loaded


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.web", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("store", choices=STORES)
    parser.add_argument("--limit", type=int, default=_PAGES, help="at most this many pages")
    parser.add_argument("--lose", type=int, default=2000, help="the emulator loses one call in so many; 0: none")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="perco-soak-") as folder:
        equal = run(given.store, Path(folder), given.limit, given.lose, lambda line: print(line, flush=True))
    print("equal" if equal else "NOT equal")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
