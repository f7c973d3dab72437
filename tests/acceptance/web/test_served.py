"""The web index over a served store: owner, loader, workers and searcher are killed again and again, at random.

A worker that opens a store without an owner owns it: so after a while it may be a worker that all the others talk to.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgpack
import pytest

from perco.webindex.batch import build, digest
from perco.webindex.pages import Page, pack
from perco.webindex.places import search_path
from perco.webindex.search import SearchIndex
from tests.acceptance.web.site import Site
from tests.acceptance.web.test_killed import checked
from tests.support import bigtable

KILLS_EACH = 4
ROLES = ("owner", "worker", "worker", "loader", "searcher")
SEED = 2011


class Cast:
    """The processes, and what they say."""

    def __init__(self, folder: Path) -> None:
        self.store, self.changes = folder / "store", folder / "changes"
        self.playing: list[subprocess.Popen[bytes]] = []
        self._part_of: dict[int, int] = {}  # by number, of the processes that play now
        self._started = 0
        self.said: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self._read, self._write = os.pipe()
        self._lines: list[str] = []
        self._rest = b""
        self._complaints = (folder / "complaints").open("w+")

    def start(self, part: int) -> None:
        """Start a process for the part, in place of an earlier one that has ended."""
        self._started += 1
        self._part_of = {number: of for number, of in self._part_of.items() if of != part} | {self._started: part}
        more = (str(self.changes),) if ROLES[part] == "loader" else ()
        given = (ROLES[part], str(self.store), str(self._write), str(self._started), *more)
        command = [sys.executable, "-m", "tests.acceptance.web.served", *given]
        self.playing[part : part + 1] = [subprocess.Popen(command, pass_fds=(self._write,), stderr=self._complaints)]

    def hear(self) -> tuple[int | None, str]:
        """The next line, and the part whose process wrote it: None for a process that has been replaced since."""
        while not self._lines:
            if any(process.poll() for process in self.playing):
                self._complaints.seek(0)
                raise AssertionError(f"somebody has died of himself: {self._complaints.read()}")
            if select.select([self._read], [], [], 0.5)[0]:
                *lines, self._rest = (self._rest + os.read(self._read, 1 << 16)).split(b"\n")
                self._lines = [line.decode() for line in reversed(lines)]
        number, line = self._lines.pop().split(" ", 1)
        self.said[line] += 1
        return self._part_of.get(int(number)), line

    def until(self, part: int, what: str) -> None:
        """Wait until the process that plays the part now says `what`; the pipe may still hold lines of earlier ones."""
        while self.hear() != (part, f"{ROLES[part]} {what}"):
            pass

    def kill(self, part: int) -> None:
        process = self.playing[part]
        if process.poll() is None:
            self.killed[ROLES[part]] += 1
        process.kill()
        process.wait()

    def end(self) -> None:
        for process in self.playing:
            process.send_signal(signal.SIGKILL)
            process.wait()
        self._complaints.close()
        os.close(self._read)
        os.close(self._write)


@pytest.mark.parametrize("kind", ["folder", "bigtable"])
def test_whoever_is_killed_it_ends_equal_to_a_batch_build(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = bigtable.fresh() if kind == "bigtable" else ""
    monkeypatch.setenv("PERCO_TEST_URL", address)
    kills_each = KILLS_EACH if kind == "folder" else 2
    rng, site, cast = random.Random(SEED), Site(SEED), Cast(tmp_path)
    pending: list[bytes | str | tuple[str, float]] = []

    def more() -> None:
        """Pages that a killed loader may not have loaded go again, before new ones: loading is idempotent."""
        fresh = [pack(change) if isinstance(change, Page) else change for change in site.change(6)]
        pending[:] = [*pending, *fresh][-60:]
        cast.changes.write_bytes(msgpack.packb(pending))

    try:
        more()
        cast.start(0)
        cast.until(0, "ready")
        for part in range(1, len(ROLES)):
            cast.start(part)
        while min(cast.killed[role] for role in ROLES) < kills_each:
            least = min(cast.killed[role] for role in ROLES)
            part = rng.choice([part for part, role in enumerate(ROLES) if cast.killed[role] == least])
            left = rng.randrange(1, 60)
            while left:
                if cast.hear() == (part, "loader done"):
                    break
                left -= 1
            if ROLES[part] == "loader" and cast.playing[part].poll() is not None:
                more()
                cast.start(part)
                cast.until(part, "loaded")
            cast.kill(part)
            more()
            cast.start(part)
            if ROLES[part] in ("owner", "worker"):
                cast.until(part, "ready")
        cast.kill(3)
        cast.killed["loader"] -= 1
        everything = [pack(page) for page in site.pages.values()]
        gone = [url for n in range(site.size) if (url := f"https://site.invalid/page-{n}") not in site.pages]
        cast.changes.write_bytes(msgpack.packb([*everything, *gone, *site.ranks.items()]))
        cast.start(3)
        cast.until(3, "done")
        assert all(cast.said[f"worker {id}"] for id in ("parse", "gather", "elect", "export"))
        assert cast.said["searcher searched"] > 10
    finally:
        cast.end()
    checked(address or cast.store)
    documents = build(site.pages.values(), site.ranks)
    assert any(document.duplicates for document in documents.values())
    with SearchIndex(search_path(cast.store)) as search:
        assert search.digest() == digest(documents)
        search.check()
