"""What happens to a system and its documents: a cold build, edits, restarts, another function, `kill -9`.

All is seen by a reader of the derived table, which looks every `POLL_S`: the benchmark reads the peers' SQLite files,
and perco's program, in which perco is embedded, reads its own table when it is told what to look for. An edit of a file
begins to count when the file is in its place; one of a row, when it is handed over, since storing it is the system's
work. After each step, the whole derived table is compared with the batch result.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from bench.deriving.child import POLL_S, Job
from bench.deriving.corpus import Compared, Corpus, compare, derive, key_of, replace_file, write_files
from bench.deriving.running import Cost, DiedError, LateError, Running
from bench.deriving.systems import Reader, System, disk_mib

PAUSE_S: Final = 0.3  # at most, before an edit: so that edits do not follow the beat of a system that polls
EDIT_S: Final = 60.0  # until an edit must be visible
AFTER_KILL_S, AFTER_KILL = 60.0, 10  # until it is right after a kill: so long, and so many times as long as its build
SETTLE_S: Final = 10.0  # for which a table may go on to differ, after its system says that it is up to date
SAMPLE: Final = 64  # documents that are looked at until all are right, if a system cannot say that it is up to date
VERSIONS: Final = 2


@dataclass(slots=True)
class Round:
    """One restart: `restart`: from the start until an edit that was made meanwhile is visible; `edits_ms` after it."""

    restart: Cost
    edits_ms: list[float]
    edit_cpu_ms: float

    @property
    def edit_ms(self) -> float:
        return median(self.edits_ms)


@dataclass(slots=True)
class Found:
    """The findings about a system with a number of documents. `unequal`: steps after which its table was not that of
    the batch computation, and how it differed; `failed`: the step that failed, and why: there are none after it."""

    build: Cost | None = None
    disk_mib: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    changed: Cost | None = None
    killed_build: Cost | None = None
    killed: int = 0
    compared: int = 0
    unequal: dict[str, str] = field(default_factory=dict)
    failed: str = ""


class Side:
    """A system with a number of documents, in a folder of its own."""

    def __init__(self, system: System, documents: int, folder: Path, limit_s: float) -> None:
        self.system, self.documents, self.limit_s = system, documents, limit_s
        self.folder = folder / f"{system.key}-{documents}"
        self.found = Found()
        self.version = 1
        self._rng = random.Random(documents)
        self._begin("built")

    def _begin(self, state: str) -> None:
        """Begin again: the documents, and a system that has seen none of them."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        self.corpus, self.version, self._state = Corpus(self.documents), 1, state
        if self.system.source == "files":
            write_files(self.corpus, self.folder / "files")

    @property
    def job(self) -> Job:
        return Job(self.folder / self._state, self.folder / "files", self.documents, self.version)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------ steps

    def step(self, what: str, run: Callable[[], None]) -> None:
        """Run a step, unless an earlier one has failed. A failure is a finding."""
        if self.found.failed:
            return
        try:
            run()
        except (LateError, DiedError) as error:
            self.found.failed = f"{what}: {error}"

    def build(self) -> None:
        with self._running() as running:
            self.found.build = self._until_ready(running)
            with self.system.reader(self.job) as reader:
                self._compare("cold build", reader)
        self.found.disk_mib = disk_mib(self.job.state)

    def round(self, edits: int, seconds: float, *, last: bool) -> None:
        """Restart with an edit that was made while the system was down, then edit."""
        number = self._rng.randrange(self.documents)
        text = self.corpus.edit(number)
        if self.system.source == "files":
            replace_file(self.job.files, key_of(number), text)
        with self._running() as running, self._reader(running) as reader:
            if self.system.source == "rows":
                running.order(key=key_of(number), text=text)
            self._until_visible(running, reader, number, self.limit_s)
            restart = running.cost()
            self._until_ready(running)
            cpu_s, began = running.cost().cpu_s, time.perf_counter()
            edits_ms: list[float] = []
            while len(edits_ms) < edits and time.perf_counter() - began < seconds:
                time.sleep(self._rng.uniform(0, PAUSE_S))
                edits_ms.append(1000 * self._edit(running, reader))
            spent_s = running.cost().cpu_s - cpu_s
            self.found.rounds.append(Round(restart, edits_ms, 1000 * spent_s / len(edits_ms)))
            if last:
                self._compare("edits and restarts", reader)

    def change(self) -> None:
        """Start it with another function."""
        self.version = VERSIONS
        with self._running() as running:
            cost = self._until_ready(running)
            with self.system.reader(self.job) as reader:
                self._compare("changed function", reader)
        self.found.changed = cost

    def kill_build(self) -> None:
        """`kill -9` in the middle of a cold build: about half of the time that the build took."""
        assert self.found.build is not None
        self._begin("killed")
        running = Running(self.system, self.job)
        try:
            time.sleep(self._rng.uniform(0.3, 0.7) * self.found.build.seconds)
        finally:
            running.kill()
        self.found.killed += 1
        with self._running() as running:
            self.found.killed_build = self._until_ready(running, self._after_kill_s())
            with self.system.reader(self.job) as reader:
                self._compare("killed in the build", reader)

    def kill_edits(self, times: int) -> None:
        """`kill -9` in the middle of edits: at any time until the edit would be visible."""
        took_s = median(round.edit_ms for round in self.found.rounds) / 1000
        for _ in range(times):
            number = self._rng.randrange(self.documents)
            old, text = self.corpus.text(number), self.corpus.edit(number)
            with self._running() as running, self._reader(running) as reader:
                self._until_ready(running, self._after_kill_s())
                kill_at = time.perf_counter() + self._rng.uniform(0, took_s)
                if self.system.source == "files":
                    replace_file(self.job.files, key_of(number), text)
                self._hand_over(running, number, text)
                time.sleep(max(0.0, kill_at - time.perf_counter()))
                running.kill()
            self.found.killed += 1
            with self._running() as running:
                self._until_ready(running, self._after_kill_s())
                with self.system.reader(self.job) as reader:
                    if self.system.source == "rows" and reader.text(key_of(number)) == old:
                        self.corpus.revisions[number] -= 1  # the edit was not stored; no answer had said that it was
                    self._compare("killed in an edit", reader)

    # ------------------------------------------------------------ parts of steps

    def _after_kill_s(self) -> float:
        assert self.found.build is not None
        return min(self.limit_s, AFTER_KILL_S + AFTER_KILL * self.found.build.seconds)

    @contextmanager
    def _running(self) -> Iterator[Running]:
        with Running(self.system, self.job) as running:
            yield running

    @contextmanager
    def _reader(self, running: Running) -> Iterator[Reader]:
        """A reader, as soon as there is something that can be read."""
        if self.system.source == "rows" or self.system.reads:
            running.heard("open", self.limit_s)
        with self.system.reader(self.job) as reader:
            yield reader

    def _until_ready(self, running: Running, limit_s: float | None = None) -> Cost:
        """Until it is up to date, as it says itself or, if it cannot tell, as the reader sees."""
        limit_s = limit_s or self.limit_s
        if self.system.announces:
            if not running.ready:
                running.heard("ready", limit_s)
        else:
            numbers = {0, self.documents - 1, *(self._rng.randrange(self.documents) for _ in range(SAMPLE))}
            with self.system.reader(self.job) as reader:
                for number in numbers:
                    self._until_visible(running, reader, number, limit_s)
        return running.cost()

    def _edit(self, running: Running, reader: Reader) -> float:
        """Seconds until it is visible."""
        number = self._rng.randrange(self.documents)
        text = self.corpus.edit(number)
        if self.system.source == "files":
            replace_file(self.job.files, key_of(number), text)
        began = time.perf_counter()
        self._hand_over(running, number, text)
        self._until_visible(running, reader, number, EDIT_S)
        return time.perf_counter() - began

    def _hand_over(self, running: Running, number: int, text: str) -> None:
        if self.system.source == "rows":
            running.order(key=key_of(number), text=text)
        elif self.system.told:
            running.order(look=True)

    def _until_visible(self, running: Running, reader: Reader, number: int, limit_s: float) -> None:
        """Raises: LateError, DiedError."""
        wanted, key = derive(self.corpus.text(number), self.version), key_of(number)
        if self.system.reads:
            running.order(key=key, wanted=wanted)
            running.heard("seen", limit_s)
            return
        deadline = time.perf_counter() + limit_s
        while reader.chunks(key) != wanted:
            if time.perf_counter() > deadline:
                raise LateError(f"a document's rows are not right within {limit_s:.0f} s")
            if not running.alive():
                raise DiedError(f"the program has ended: {running.last_error()}")
            time.sleep(POLL_S)

    def _compare(self, what: str, reader: Reader) -> None:
        """Compare the whole table, again for some seconds if it differs."""
        deadline = time.perf_counter() + SETTLE_S
        while not (compared := self._compared(reader)).equal and time.perf_counter() < deadline:
            time.sleep(0.5)
        self.found.compared += 1
        if not compared.equal:
            self.found.unequal.setdefault(what, str(compared))

    def _compared(self, reader: Reader) -> Compared:
        return compare(reader.all(), self.corpus.rows(self.version))
