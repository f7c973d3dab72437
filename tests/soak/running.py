"""Runs the processes of a soak, harms them, and judges what they did."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import trio

import perco
from bench.against.postgres import Server, server
from perco.bigtable import admin
from perco.testing.history import FAIL, OK, UNKNOWN, Ops, Transaction, load
from perco.testing.isolation import Report, check
from tests.soak.client import SCHEMA, copied, items, lists, marks, options, seen
from tests.support.bigtable import EMULATOR
from tests.support.coordinated import ENDED, KILLED, STOPPED, Coordinators, Workers

_WORKERS: Final = 2
_LAST: Final = 0  # the number of the reader at the end
_LEFT_S: Final = 120.0  # for the observers' work at the end
STORES: Final = ("bigtable", "postgresql")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Attributes:
    store: "bigtable" or "postgresql".
    transactions: how many have to commit.
    clients: processes, each with 16 transactions at a time.
    harm_s: seconds between two processes that are killed or stopped, on average.
    pause_s: the longest time for which a process stands still.
    lose: of the emulator: one call in so many is lost; 0: none.
    """

    store: str
    transactions: int
    clients: int = 3
    harm_s: float = 5.0
    pause_s: float = 30.0
    lose: int = 2000
    seed: int = 1


class Outcome(NamedTuple):
    """The result of a run. `harm`: how often each fault was injected; `gap_s`: the longest time without a commit;
    `wrong`: sentences about errors, none if all is well."""

    report: Report
    statuses: Counter[str]
    harm: Counter[str]
    seconds: float
    gap_s: float
    wrong: list[str]


class Database(NamedTuple):
    """A server for the run. `ended` stops it, and returns which faults it made."""

    url: str
    harm: dict[str, Callable[[], object]]
    ended: Callable[[], dict[str, int]]


@contextmanager
def database(plan: Plan) -> Iterator[Database]:
    """Start the store's server. Processes that are started within the block get its `BIGTABLE_EMULATOR_HOST`."""
    if plan.store == "postgresql":
        # PostgreSQL's user has to reach its data, and may not be able to reach the folder of the run.
        with tempfile.TemporaryDirectory(prefix="perco-pg-") as data, server(Path(data)) as running:
            yield Database(
                f"postgresql://bench@/postgres?host={running.socket}&prefix=soak",
                {"connections ended": lambda: _disconnect(running)},
                dict,
            )
        return
    process = subprocess.Popen(
        [EMULATOR, "-lose", str(plan.lose), "-seed", str(plan.seed)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        address = process.stdout.readline().strip()
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("BIGTABLE_EMULATOR_HOST", address)
        url = "bigtable://soak/soak?prefix=soak"
        assert admin.init(url)
        yield Database(url, {}, lambda: json.loads(process.communicate("")[0]) if plan.lose else {})


def _disconnect(running: Server) -> None:
    running.psql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'perco'")


class Clients:
    """The client processes. A new one replaces one that was killed; no two have the same number."""

    def __init__(self, plan: Plan, url: str, folder: Path) -> None:
        self._plan, self._url, self._folder = plan, url, folder
        self._started = _LAST
        self._read: dict[Path, int] = {}  # bytes of a journal in which commits were counted
        self.committed = 0
        self._all = [self._start() for _ in range(plan.clients)]

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        journal = self._folder / f"{self._started}.jsonl"
        self._read[journal] = 0
        command = [sys.executable, "-m", "tests.soak.client", self._url, journal, str(self._started)]
        return subprocess.Popen([*map(str, command), str(self._plan.seed)])

    def count(self) -> int:
        """The commits so far. Raises: RuntimeError, if a client has ended with an error."""
        for each in self._all:
            if each.poll() is not None:
                raise RuntimeError(f"a client has ended with exit code {each.returncode}")
        for journal, read in self._read.items():
            if journal.exists():
                with journal.open("rb") as file:
                    file.seek(read)
                    new = file.read()
                whole = new.rfind(b"\n") + 1
                self.committed += new.count(b'"status":"ok"', 0, whole)
                self._read[journal] = read + whole
        return self.committed

    def kill(self, which: int) -> None:
        self._all[which].kill()
        self._all[which].wait()
        self._all[which] = self._start()

    def send(self, which: int, number: signal.Signals) -> None:
        self._all[which].send_signal(number)

    def end(self) -> None:
        """Let them end. One that has just been started may die of the signal. Raises: RuntimeError."""
        for each in self._all:
            each.send_signal(signal.SIGTERM)
        for each in self._all:
            if each.wait(120) not in (0, -signal.SIGTERM):
                raise RuntimeError(f"a client has ended with exit code {each.returncode}")

    def close(self) -> None:
        for each in self._all:
            each.kill()
            each.wait()

    def history(self) -> list[Transaction]:
        """The transactions of all clients. One of a killed client counts as it was noted last."""
        made: dict[int, Transaction] = {}
        for journal in self._read:
            lines = journal.read_text(encoding="utf-8").split("\n")
            for one in load(lines[:-1]):  # the last is empty, or half a line
                made[one.id] = one
        return list(made.values())


class Soak:
    """One run. Args: `say` is called with each line about its progress."""

    def __init__(self, plan: Plan, folder: Path, say: Callable[[str], object]) -> None:
        self._plan, self._folder, self._say = plan, folder, say
        self._random = random.Random(plan.seed)
        self._harm: Counter[str] = Counter()
        self._slow_leaders = 0

    def run(self) -> Outcome:
        """Raises: RuntimeError, if a process ends that should not."""
        with ExitStack() as stack:
            store = stack.enter_context(database(self._plan))
            servers = Coordinators(store.url, self._folder)
            stack.callback(servers.end)
            workers = Workers(store.url, "tests.soak.client:SCHEMA", _WORKERS)
            stack.callback(workers.end)
            clients = Clients(self._plan, store.url, self._folder)
            stack.callback(clients.close)
            began = time.monotonic()
            try:
                for name, way in self._harms(clients, self._ways(servers, workers, clients, store.harm)):
                    self._slow_leaders += servers.check()
                    workers.check()
                    self._say(f"{clients.committed:9,} committed; {name}")
                    way()
                    self._harm[name] += 1
                clients.end()
            finally:
                history = clients.history()
                self._write(history)
            seconds = time.monotonic() - began
            self._say("reading what is there ...")
            last, wrong = trio.run(_read, store.url, history)
            history.append(last)
            self._harm.update(store.ended())
            if self._slow_leaders:
                self._harm["leader deposed by itself"] = self._slow_leaders
        self._write(history)
        self._say("judging ...")
        report = check(history)
        wrong += [f"{anomaly.name}: {anomaly.text}" for anomaly in report.anomalies]
        statuses = Counter(one.status for one in history)
        return Outcome(report, statuses, self._harm, seconds, _gap(history), wrong)

    def _harms(
        self, clients: Clients, ways: dict[str, Callable[[], object]]
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        """All faults in random order, again and again, with pauses between them, until enough transactions have
        committed and each fault has occurred."""
        names: list[str] = []
        while clients.count() < self._plan.transactions or len(self._harm) < len(ways):
            if not names:
                names = self._random.sample(list(ways), len(ways))
            name = names.pop()
            time.sleep(self._random.uniform(0.5, 1.5) * self._plan.harm_s)
            clients.count()
            yield name, ways[name]

    def _ways(
        self, servers: Coordinators, workers: Workers, clients: Clients, more: dict[str, Callable[[], object]]
    ) -> dict[str, Callable[[], object]]:
        def client() -> int:
            return self._random.randrange(self._plan.clients)

        def worker() -> int:
            return self._random.randrange(_WORKERS)

        return {
            "client killed": lambda: clients.kill(client()),
            "client stopped": lambda: self._stop(clients.send, client()),
            "worker killed": lambda: workers.replace(worker()),
            "worker stopped": lambda: self._stop(workers.send, worker()),
            "leader killed": lambda: servers.follow(KILLED),
            "leader stopped": lambda: servers.follow(STOPPED),
            "leader ended": lambda: servers.follow(ENDED),
            "leader stopped shortly": lambda: self._stop(lambda _, number: servers.leader.send(number), 0, longest=1.0),
            "leader killed while a client stood still": lambda: self._stop(
                clients.send, client(), meanwhile=lambda: servers.follow(KILLED)
            ),
            "standby killed": servers.replace_standby,
            **more,
        }

    def _stop(
        self,
        send: Callable[[int, signal.Signals], object],
        which: int,
        *,
        longest: float | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        send(which, STOPPED)
        meanwhile()
        time.sleep(self._random.uniform(0.1, 1.0) * (longest or self._plan.pause_s))
        send(which, signal.SIGCONT)

    def _write(self, history: Iterable[Transaction]) -> None:
        with (self._folder / "history.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(one.line() + "\n" for one in history)


async def _read(url: str, history: Sequence[Transaction]) -> tuple[Transaction, list[str]]:
    """Wait for the observers, and read all lists of the history as a last transaction. Returns also what is wrong in
    the store: a copy that is not equal, a mark that is missing, or one of a transaction that did not commit."""
    wrong = []
    async with perco.open(url, SCHEMA, options=options(call_s=20.0)) as db:
        with trio.move_on_after(_LEFT_S) as waiting:
            await db.wait_idle()
        if waiting.cancelled_caught:
            wrong.append(f"after {_LEFT_S:g} s there are still changes that no observer has seen")
        ops, begin = Ops(), time.monotonic()
        keys = {str(key) for one in history for _, key, _ in one.ops}
        async with db.snapshot() as snap:
            keys |= {row.key async for row in snap.scan(lists)}
            found = await snap.get_many(items, keys)
            copies = await snap.get_many(copied, keys)
            there = {row.key: row[seen] async for row in snap.scan(marks)}
        for key in sorted(keys):
            ops.read(key, found.get(key) or [])
            if copies.get(key) != found.get(key):
                wrong.append(f"list {key} is not what its observer made of it")
        return Transaction(_LAST, "last", begin, time.monotonic(), OK, tuple(ops.made)), [
            *wrong,
            *_of_marks(history, there),
        ]


def _of_marks(history: Iterable[Transaction], there: dict[int, int | None]) -> Iterator[str]:
    """Sentences about marks that are missing, that no observer saw, or whose transaction did not commit."""
    for one in history:
        appends = any(kind == "a" for kind, _, _ in one.ops)
        if one.status == OK and appends and there.get(one.id) != one.id:
            yield f"the mark of transaction {one.id} is missing, or no observer saw it"
        elif one.status == FAIL and one.id in there:
            yield f"transaction {one.id} did not commit, and its mark is there"


def _gap(history: Iterable[Transaction]) -> float:
    ends = sorted(one.end for one in history if one.status == OK and one.id != _LAST)
    return max((after - before for before, after in pairwise(ends)), default=0.0)


def told(outcome: Outcome) -> str:
    """The outcome in words."""
    statuses, harm = outcome.statuses, outcome.harm
    edges = ", ".join(f"{count:,} {kind}" for kind, count in sorted(outcome.report.edges.items()))
    lines = [
        f"{statuses[OK]:,} transactions committed in {outcome.seconds:.0f} s, {statuses[OK] / outcome.seconds:.0f} a "
        f"second; {statuses[FAIL]:,} did not, {statuses[UNKNOWN]:,} are of unknown outcome",
        "harm: " + ", ".join(f"{count} {name}" for name, count in sorted(harm.items())),
        f"longest time without a commit: {outcome.gap_s:.1f} s",
        f"dependencies: {edges}; {outcome.report.unread} appends that no transaction read",
        f"snapshot isolation, and observers that have seen all: {'NO' if outcome.wrong else 'yes'}",
        *outcome.wrong,
    ]
    return "\n".join(lines)
