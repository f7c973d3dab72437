"""A brokerage after TPC-E (the paper's section 3.3 and its figure 9): from an embedded store to Bigtable.

    python -m bench brokerage            trade orders, market feed, positions and look-ups in TPC-E's mix

Observers settle the trades (`market.py`). Every store is filled alike, and each process keeps `IN_FLIGHT` transactions
in flight. When all trades are settled, the books have to agree: shares, cash and fees of every account. A transaction
is one of a client's, or one settlement.

    embedded            the store is in the client's process
    served              one `perco serve` over a folder, and client processes
    PostgreSQL          client processes that read and write directly, timestamps from `perco serve --direct`
    Bigtable            the same over an emulator in memory
    Bigtable, its owner one process that owns a store on the emulator
    SQL                 the same by hand over asyncpg, on the same PostgreSQL server, written to win (`sql.py`)

CPU time is that of clients and servers together. The second table is about a network: client processes of `perco serve`
behind a proxy that delays every call, with the delay window and with prefetching, and without.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.against.coordinator import Coordinator
from bench.against.load import cpu_of
from bench.against.postgres import NoPostgresError, Server, server
from bench.bigtable import EMULATOR, Emulator, emulator
from bench.brokerage import sql
from bench.brokerage.client import PERCO, SQL, Figures, Job
from bench.delay import delayed
from bench.harness import Cell, Report, Run, interleaved, version_of

SECONDS = 3.0
IN_FLIGHT = 64
FEW = 8  # in flight behind a network: the time of a transaction is that of its calls
DELAYS_MS = (2, 10)  # a call and its answer
EMBEDDED, SERVED, POSTGRESQL, BIGTABLE, BY_HAND = "embedded", "served", "PostgreSQL", "Bigtable", "SQL"
BIGTABLE_OWNER = "Bigtable, its owner"


@dataclass(frozen=True, slots=True)
class Done:
    """The work of several clients at the same time; `cpu_s`: of all of them, and of the servers."""

    clients: list[Figures]
    cpu_s: float

    @property
    def transactions(self) -> int:
        return sum(each.transactions + each.settled for each in self.clients)

    @property
    def per_s(self) -> float:
        return sum((each.transactions + each.settled) / each.seconds for each in self.clients)

    @property
    def cpu_us(self) -> float:
        return 1e6 * self.cpu_s / self.transactions

    @property
    def calls(self) -> float:
        """How many calls the clients made, per transaction."""
        return sum(each.calls for each in self.clients) / self.transactions

    @property
    def mean_ms(self) -> float:
        return sum(each.mean_ms for each in self.clients) / len(self.clients)

    def ms(self, kind: str, which: int = 0) -> float:
        """Half of the times of this kind of transaction are below it; with `which` 1, 99 % of them are."""
        return median(each.ms[kind][which] for each in self.clients if kind in each.ms)


class Clients:
    """Client processes of one store, which wait until they are told to run. `others_cpu_s`: of the servers."""

    def __init__(self, jobs: list[Job], others_cpu_s: Callable[[], float]) -> None:
        self._others_cpu_s = others_cpu_s
        self._stack = ExitStack()
        self._processes = [self._stack.enter_context(_process(job)) for job in jobs]
        for process in self._processes:
            assert _heard(process) == "ready"

    def load(self) -> None:
        _tell(self._processes[0], "load")
        assert _heard(self._processes[0]) == "loaded"

    def run(self) -> Done:
        before = self._others_cpu_s()
        for process in self._processes:
            _tell(process, "run")
        figures = [Figures(**_heard(process)) for process in self._processes]
        return Done(figures, sum(each.cpu_s for each in figures) + self._others_cpu_s() - before)

    def check(self, orders: int) -> int:
        _tell(self._processes[0], f"check {orders}")
        return int(_heard(self._processes[0]))

    def end(self) -> None:
        self._stack.close()


@contextmanager
def _process(job: Job) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bench.brokerage", json.dumps(asdict(job))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    try:
        yield process
        _tell(process, "quit")
        process.wait(60)
    finally:
        process.kill()
        process.communicate()


def _tell(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    print(word, file=process.stdin, flush=True)


def _heard(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a client of the brokerage has died")
    return json.loads(line)


# ------------------------------------------------------------------ the places


class Place:
    """A store, and how many processes use it at a time. `orders`: placed by all clients so far."""

    def __init__(
        self, name: str, side: str, url: str, processes: tuple[int, ...], cpu_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.name, self.processes = name, processes
        self._side, self._url, self._cpu_s = side, url, cpu_s
        self.orders = 0

    def clients(self, count: int, url: str = "", in_flight: int = IN_FLIGHT, **how: bool) -> Clients:
        first = Job(self._side, url or self._url, 0, in_flight, SECONDS)
        jobs = [replace(first, number=number, **how) for number in range(count)]  # type: ignore[arg-type]
        return Clients(jobs, self._cpu_s)

    def fill(self) -> None:
        if self._side == PERCO:
            clients = self.clients(1)
            clients.load()
            clients.end()

    def run(self, count: int, url: str = "", in_flight: int = IN_FLIGHT, **how: bool) -> Done:
        clients = self.clients(count, url, in_flight, **how)
        done = clients.run()
        self.orders += sum(each.orders for each in done.clients)
        if self._side == PERCO:
            clients.check(self.orders)
        clients.end()
        if self._side == SQL:
            import asyncio

            asyncio.run(sql.check(json.loads(self._url), self.orders))
        return done


@contextmanager
def _folder(run: Run, folder: Path) -> Iterator[Place]:
    yield Place(EMBEDDED, PERCO, str(folder / "embedded"), (1,))


@contextmanager
def _served(run: Run, folder: Path) -> Iterator[Place]:
    path = folder / "served"
    path.mkdir()
    with _serving(str(path)) as cpu_s:
        yield Place(SERVED, PERCO, f"unix:{path}/socket", _counts(run), cpu_s)


@contextmanager
def _serving(*arguments: str) -> Iterator[Callable[[], float]]:
    command = [sys.executable, "-m", "perco", "serve", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving"), "it did not start"
        yield partial(cpu_of, process.pid)
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def _direct(run: Run, folder: Path, started: Server) -> Iterator[Place]:
    with _leading(started.url("brokerage"), folder / "leader") as cpu_s:
        url = started.url("brokerage")
        yield Place(POSTGRESQL, PERCO, url, _counts(run), lambda: started.cpu_s() + cpu_s())


@contextmanager
def _leading(url: str, socket: Path) -> Iterator[Callable[[], float]]:
    """A server that gives timestamps to direct clients."""
    leader = Coordinator(url, socket)
    try:
        leader.says("serving")
        yield leader.cpu_s
    finally:
        leader.end()


@contextmanager
def _by_hand(run: Run, folder: Path, started: Server) -> Iterator[Place]:
    sql.prepare(started)
    dsn = json.dumps({"host": str(started.socket), "user": "bench", "database": "postgres"})
    yield Place(BY_HAND, SQL, dsn, _counts(run), started.cpu_s)


@contextmanager
def _on_bigtable(run: Run, folder: Path, started: Emulator) -> Iterator[Place]:
    url = started.url()
    with _leading(url, folder / "bigtable") as cpu_s:
        yield Place(BIGTABLE, PERCO, url, _counts(run), lambda: started.cpu_s() + cpu_s())


@contextmanager
def _bigtable_owner(run: Run, folder: Path, started: Emulator) -> Iterator[Place]:
    yield Place(BIGTABLE_OWNER, PERCO, started.url(), (1,), started.cpu_s)


def _counts(run: Run) -> tuple[int, ...]:
    return (1, 2) if run.quick else (1, 2, 4)


# ------------------------------------------------------------------ all of it


def main(run: Run) -> None:
    report = Report("brokerage", "power")
    peers = {name: version_of(name) for name in ("psycopg", "asyncpg", "grpcio")}
    facts = run.machine("power (fsync before every answer; the Bigtable emulator has no disk)", peers)
    with run.scratch() as folder, ExitStack() as stack:
        ways: list[Callable[[Run, Path], AbstractContextManager[Place]]] = [_folder, _served]
        try:
            started = stack.enter_context(server(folder))
            facts["versions"]["PostgreSQL"] = started.version
            ways += [partial(_direct, started=started), partial(_by_hand, started=started)]
        except NoPostgresError as error:
            run.say(f"{error}\n")
        if EMULATOR.exists():
            emulated = stack.enter_context(emulator())
            ways += [partial(_on_bigtable, started=emulated), partial(_bigtable_owner, started=emulated)]
        else:
            run.say("Without Bigtable: make build/bigtable-emulator\n")
        places = [stack.enter_context(way(run, folder)) for way in ways]
        for place in places:
            place.fill()
        found = _throughput(run, report, places)
        calls = _network(run, report, folder, next(place for place in places if place.name == SERVED))
        for place in places:
            run.say(f"{place.name}: {place.orders} orders, each settled once; shares, cash and fees agree")
        run.say("")
    _draw(run, found, calls)
    run.finish(report, facts)


Found = dict[tuple[str, int], list[Done]]


def _throughput(run: Run, report: Report, places: list[Place]) -> Found:
    sides = {(place.name, count): partial(place.run, count) for place in places for count in place.processes}
    found = interleaved(run.rounds, sides)
    rows = []
    for (name, count), dones in found.items():
        rate, cpu = Cell(tuple(done.per_s for done in dones)), median(done.cpu_us for done in dones)
        shown = [f"{median(done.ms(kind) for done in dones):.1f}" for kind in ("trade order", "customer position")]
        late = f"{median(done.ms('trade order', 1) for done in dones):.0f}"
        rows.append([name, count, rate, f"{cpu:.0f}", *shown, late])
        key = f"{name.lower().replace(', its ', '_')}_{count}"
        report.figures |= {f"{key}_txn_per_s": rate.median, f"{key}_cpu_us_per_txn": cpu}
    run.table(
        f"transactions of a brokerage, {IN_FLIGHT} in flight in each process",
        ("", "processes", "a second (least - most)", "CPU us each", "order p50 ms", "position p50 ms", "order p99 ms"),
        rows,
    )
    if (BY_HAND, 1) in found:
        for name in (EMBEDDED, SERVED, POSTGRESQL):
            mine, theirs = found[name, 1], found[BY_HAND, 1]
            ratio = median(one.cpu_us / other.cpu_us for one, other in zip(mine, theirs, strict=True))
            report.ratio(f"cpu_{name.lower()}_vs_sql", ratio)
    return found


Ways = dict[tuple[int, bool, bool], Done]  # ms, window, prefetch


def _network(run: Run, report: Report, folder: Path, place: Place) -> Ways:
    found: Ways = {}
    rows = []
    for ms in DELAYS_MS:
        with delayed(folder, folder / "served", ms / 2000) as url:
            for window, prefetch in ((False, False), (True, False), (False, True), (True, True)):
                dones = [place.run(1, url, FEW, window=window, prefetch=prefetch) for _ in range(run.rounds)]
                found[ms, window, prefetch] = done = sorted(dones, key=lambda each: each.per_s)[run.rounds // 2]
                on = [("no", "yes")[each] for each in (window, prefetch)]
                times = [f"{done.ms(kind):.1f}" for kind in ("trade order", "security detail", "customer position")]
                rows.append([f"{ms} ms", *on, f"{done.per_s:.0f}", f"{done.calls:.2f}", f"{done.mean_ms:.1f}", *times])
                key = f"delay{ms}_window_{on[0]}_prefetch_{on[1]}"
                report.figures |= {
                    f"{key}_calls_per_txn": done.calls,
                    f"{key}_mean_ms": done.mean_ms,
                    f"{key}_txn_per_s": done.per_s,
                }
    run.table(
        f"one client process of `perco serve` behind a network, {FEW} in flight; the delay is of a call and its "
        "answer; times are medians in ms",
        *(
            ("delay", "window", "prefetch", "per s", "calls each", "mean ms", "order", "detail", "position"),
            rows,
        ),
    )
    return found


def _draw(run: Run, found: Found, calls: Ways) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for name in dict.fromkeys(name for name, _ in found):
        counts = [count for each, count in found if each == name]
        rates = [median(done.per_s for done in found[name, count]) for count in counts]
        left.plot(counts, rates, marker="o", label=name)
    left.set(xlabel="client processes", ylabel="transactions a second", title="A brokerage on each store, 2 cores")
    left.set_xticks(sorted({count for _, count in found}))
    left.set_ylim(bottom=0)
    left.legend()
    names = {(False, False): "neither", (True, False): "window", (False, True): "prefetch", (True, True): "both"}
    for at, ms in enumerate(DELAYS_MS):
        bars = [calls[ms, *how].mean_ms for how in names]
        places = [number + 0.4 * at for number in range(len(names))]
        right.bar(places, bars, width=0.38, label=f"{ms} ms a call")
        for x, how in zip(places, names, strict=True):
            right.text(x, 0, f"{calls[ms, *how].calls:.1f}\ncalls", ha="center", va="bottom", fontsize=7)
    right.set_xticks([number + 0.2 for number in range(len(names))], list(names.values()))
    right.set(ylabel="mean time of a transaction, ms", title="Behind a network: delay window and prefetching")
    right.set_ylim(top=1.25 * max(done.mean_ms for done in calls.values()))  # room for the legend
    right.legend(ncols=2)
    run.figure(figure, "brokerage")
