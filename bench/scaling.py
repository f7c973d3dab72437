"""One tablet server and two: the cost of a transaction in each process, and a projection to a thousand servers.

A durable read-modify-write of a row - timestamp, read, prewrite, timestamp, commit - by a closed loop of callers in one
client process, against an owner with one tablet server, and with two, over the same four tablets. On a machine with as
many cores as there are processes the second server adds throughput; if all of them share two cores it cannot, so the
figure is transactions per second of processor time, of all processes together, compared with PostgreSQL's.

The model has three parameters: with n transactions in flight, one takes F + c k + a n. All n travel together, in frames
that take F; each of the k tablets that are written to (k: how many of the four tablets n random rows lie in) costs a
commit c; and each transaction costs the busiest process a. The model is fitted on one server to four loads, and
predicts two others that are held out; both errors are printed. Then each of the six is held out in turn, and predicted
from the other five. The plot from 1 to 1 000 servers assumes cores to spare, a disk and four tablets for each server,
enough clients, rows that are chosen uniformly, a network like this machine's sockets, and one owner, which spends on
each transaction the time that was measured here. The line bends where that owner has no time left.

The same for direct clients of Bigtable is in `scaling_direct.py`.

    python -m bench.scaling serve FOLDER SERVERS        an owner with SERVERS tablet servers
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import trio

import perco
from bench import scaling_direct
from bench.against import rows
from bench.against.embedded import ROWS, ZERO, one_more
from bench.against.load import Load, closed_loop
from bench.against.postgres import NoPostgresError, binaries, server as postgres
from bench.bigtable import EMULATOR
from bench.harness import Cell, Report, Run, interleaved, version_of
from perco.serve.client import remote_owner
from perco.serve.opening import open as opened, visiting
from perco.serve.placing import ProcessOptions

SECONDS = 1.5
SERVERS = (1, 2)
FITTED, HELD_OUT = (1, 4, 32, 256), (16, 128)
MANY = 256  # in flight
DRAWN = 1000
ERROR_MAX = 0.2

TABLETS = 4
table = perco.Table("t", key=perco.INT64, splits=[i * ROWS // TABLETS for i in range(1, TABLETS)])
value = table.column("value", perco.BYTES)
SCHEMA = perco.Schema(table)


@dataclass
class Found:
    """A round: the client's load, and the CPU time of the owner and of its servers."""

    load: Load
    owner_s: float
    servers_s: float

    @property
    def per_s(self) -> float:
        return self.load.per_s

    @property
    def cpu_s(self) -> float:
        return self.load.cpu_s + self.owner_s + self.servers_s

    def us(self, seconds: float) -> float:
        return 1e6 * seconds / self.load.calls


class Served:
    """An owner and its tablet servers."""

    def __init__(self, folder: Path, servers: int, process: subprocess.Popen[str]) -> None:
        self.folder, self.servers, self.process = folder, servers, process
        self.pids = trio.run(self._find)
        self.calls = 0

    async def _find(self) -> list[int]:
        async with visiting(self.folder) as db:
            return [server.process for server in await remote_owner(db).servers()]

    def run(self, in_flight: int) -> Found:
        """A round."""
        before = _cpu_s(self.process.pid), sum(map(_cpu_s, self.pids))
        load = trio.run(_load, self.folder, in_flight)
        self.calls += load.calls
        return Found(load, _cpu_s(self.process.pid) - before[0], sum(map(_cpu_s, self.pids)) - before[1])

    def check(self) -> None:
        """Raises: AssertionError, unless the rows count every call."""
        total = trio.run(_total, self.folder)
        assert total == self.calls, f"{self.calls} calls were answered, and the rows say {total}"


@contextmanager
def served(folder: Path, servers: int) -> Iterator[Served]:
    """A served store with all rows in it."""
    path = folder / f"servers-{servers}"
    command = [sys.executable, "-m", "bench.scaling", "serve", str(path), str(servers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready"), "it did not start"
        trio.run(_fill, path)
        yield Served(path, servers, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def _serve(folder: str, servers: int) -> None:
    opening = opened(folder, perco.Schema())
    opening.processes = ProcessOptions(servers=servers)
    async with opening:
        assert opening.tablet_servers is not None
        await opening.tablet_servers.ready.wait()
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            print("ready", flush=True)
            async for _ in signals:
                return


async def _fill(path: Path) -> None:
    async with perco.open(path, SCHEMA) as db:
        for start in range(0, ROWS, 1000):
            async with db.transaction() as txn:
                for key in range(start, start + 1000):
                    txn.set(value, key, ZERO)


async def _total(path: Path) -> int:
    async with perco.open(path, SCHEMA) as db, db.snapshot() as snap:
        return sum([int.from_bytes((row[value] or b"")[:8], "big") async for row in snap.scan(table)])


async def _load(path: Path, in_flight: int) -> Load:
    async def modify(txn: perco.Transaction, key: int) -> None:
        old = await txn.get(value, key)
        assert old is not None
        txn.set(value, key, one_more(old))

    options = perco.Options(retry=perco.options.RetryOptions(attempts=1_000_000))
    async with perco.open(path, SCHEMA, options=options) as db:
        return await closed_loop(lambda rng: db.run(modify, rng.randrange(ROWS)), in_flight, SECONDS)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------ the model


def busy(in_flight: float) -> float:
    """The mean number of tablets in which `in_flight` random rows lie."""
    return TABLETS * (1 - math.pow(1 - 1 / TABLETS, in_flight))


@dataclass(frozen=True)
class Model:
    """Times in seconds. `cycle`: a round trip of all that is in flight; `commit`: for each tablet that is written to;
    `each`: what each transaction costs the busiest process."""

    cycle: float
    commit: float
    each: float

    def per_s(self, in_flight: float) -> float:
        return in_flight / (self.cycle + self.commit * busy(in_flight) + self.each * in_flight)


def fitted(points: dict[int, float]) -> Model:
    """Fit the model to rates by number in flight: least squares of the relative errors of the times. A parameter that
    comes out below 0 is set to 0, because no time is negative, and the others are fitted again."""
    import numpy

    matrix = numpy.array([[1.0, busy(n), n] for n in points])
    seconds = numpy.array([n / rate for n, rate in points.items()])
    times, used = [0.0, 0.0, 0.0], [0, 1, 2]
    while used:
        found, *_ = numpy.linalg.lstsq(matrix[:, used] / seconds[:, None], numpy.ones(len(points)), rcond=None)
        if min(found) >= 0:
            for column, time in zip(used, found, strict=True):
                times[column] = float(time)
            break
        del used[int(numpy.argmin(found))]
    return Model(*times)


def predicted(model: Model, owner_s: float, server_s: float, servers: int) -> float:
    """Transactions a second with `servers` servers, `MANY` in flight for each, and a core for each process."""
    each = max(owner_s * servers, server_s)
    return servers * Model(model.cycle, model.commit, each).per_s(MANY)


# ------------------------------------------------------------------


def main(run: Run) -> None:
    """Print the tables and the RESULT line."""
    report = Report(run.name, "power")
    facts = run.machine("power (fsync before every answer)", {"asyncpg": version_of("asyncpg")})
    with run.scratch() as folder, ExitStack() as stack:
        stores = {n: stack.enter_context(served(folder, n)) for n in SERVERS}
        sides = {(1, n): partial(stores[1].run, n) for n in sorted(FITTED + HELD_OUT)}
        sides[2, MANY] = partial(stores[2].run, MANY)
        found = interleaved(run.rounds, sides)
        for store in stores.values():
            store.check()
        peers = _postgres(run, stack, folder, facts)
    _tell(run, report, found, peers)
    model, owner_s, server_s = _fit(run, report, found)
    direct = None
    if EMULATOR.exists():
        direct = scaling_direct.measure(run, report)
    else:
        run.say("Without direct clients on Bigtable: make build/bigtable-emulator\n")
    _draw(run, found, model, owner_s, server_s, direct)
    run.finish(report, facts)


def _postgres(run: Run, stack: ExitStack, folder: Path, facts: dict[str, object]) -> dict[str, list[Load]]:
    try:
        if find_spec("asyncpg") is None:
            raise NoPostgresError("install asyncpg: pip install '.[bench]'")
        binaries()
        started = stack.enter_context(postgres(folder))
    except NoPostgresError as error:
        run.say(f"PostgreSQL is left out: {error}\n")
        return {}
    facts["versions"]["PostgreSQL"] = started.version  # type: ignore[index]
    rows.prepare(started)
    return interleaved(
        run.rounds,
        {
            "PostgreSQL, 4 round trips": partial(rows.load, started, 32, SECONDS, trips=4),
            "PostgreSQL, one statement": partial(rows.load, started, 32, SECONDS, trips=1),
        },
    )


def _tell(run: Run, report: Report, found: dict[tuple[int, int], list[Found]], peers: dict[str, list[Load]]) -> None:
    lines: list[tuple[object, ...]] = []
    per_cpu_s: dict[tuple[int, int], Cell] = {}
    for (servers, n), rounds in found.items():
        rate = Cell(tuple(one.per_s for one in rounds))
        cell = per_cpu_s[servers, n] = Cell(tuple(one.load.calls / one.cpu_s for one in rounds))
        client = median(one.us(one.load.cpu_s) for one in rounds)
        owner, own = (median(one.us(s) for one, s in zip(rounds, of, strict=True)) for of in _elsewhere(rounds))
        lines.append((servers, n, rate, f"{client:.0f}", f"{owner:.0f}", f"{own:.0f}", cell))
        report.figures[f"servers{servers}_in_flight{n}_per_s"] = rate.median
        report.figures[f"servers{servers}_in_flight{n}_per_cpu_s"] = cell.median
    for name, loads in peers.items():
        rate = Cell(tuple(load.per_s for load in loads))
        cell = Cell(tuple(load.calls / load.cpu_s for load in loads))
        lines.append((name, 32, rate, "", "", "", cell))
        report.figures[f"{name} per_s"], report.figures[f"{name} per_cpu_s"] = rate.median, cell.median
        report.ratio(f"per_cpu_s_vs {name}", per_cpu_s[1, MANY].of(cell))
    run.table(
        "one read-modify-write of a row, durable; CPU us of a transaction in each kind of process",
        ("tablet servers", "in flight", "per second (least - most)", "client", "owner", "servers", "per CPU second"),
        lines,
    )
    one, two = (Cell(tuple(each.per_s for each in found[n, MANY])) for n in SERVERS)
    report.ratio("two_servers_vs_one", two.of(one))
    report.ratio("two_servers_vs_one_per_cpu_s", per_cpu_s[2, MANY].of(per_cpu_s[1, MANY]))


def _elsewhere(rounds: list[Found]) -> tuple[list[float], list[float]]:
    """CPU seconds of the owner and of the servers, round by round."""
    return [one.owner_s for one in rounds], [one.servers_s for one in rounds]


def _fit(run: Run, report: Report, found: dict[tuple[int, int], list[Found]]) -> tuple[Model, float, float]:
    rates = {n: median(one.per_s for one in found[1, n]) for n in FITTED + HELD_OUT}
    model = fitted({n: rates[n] for n in FITTED})
    lines = []
    errors: dict[str, list[float]] = {"fitted": [], "held out": []}
    for n in sorted(rates):
        error = model.per_s(n) / rates[n] - 1
        kind = "held out" if n in HELD_OUT else "fitted"
        errors[kind].append(abs(error))
        others = fitted({other: rate for other, rate in rates.items() if other != n})
        without = others.per_s(n) / rates[n] - 1
        lines.append(
            (n, f"{rates[n]:.0f}", f"{model.per_s(n):.0f}", f"{100 * error:+.0f} %", kind, f"{100 * without:+.0f} %")
        )
        report.figures[f"model_error_{n}"] = error
        report.figures[f"model_error_{n}_from_the_others"] = without
        if n in HELD_OUT:
            report.bars.append((f"error of the model at {n} in flight", abs(error), "at most", ERROR_MAX))
    report.figures["model_error"] = max(errors["held out"])
    report.figures["model_error_fitted"] = max(errors["fitted"])
    run.table(
        f"the model on one server: {1e6 * model.cycle:.0f} us a round, {1e6 * model.commit:.0f} us a tablet's commit, "
        f"{1e6 * model.each:.0f} us each; largest error {100 * max(errors['fitted']):.0f} % where it was fitted, "
        f"{100 * max(errors['held out']):.0f} % where it was held out",
        ("in flight", "measured", "model", "error", "", "error, fitted to the other five"),
        lines,
    )
    many = found[1, MANY]
    owner_s = median(one.owner_s / one.load.calls for one in many)
    server_s = median(one.servers_s / one.load.calls for one in many)
    for n in (1, 2, 10, 100, DRAWN):
        report.figures[f"model_{n}_servers_per_s"] = predicted(model, owner_s, server_s, n)
    run.say(
        f"with a core for each process: {predicted(model, owner_s, server_s, 1):.0f} a second with one server, "
        f"{predicted(model, owner_s, server_s, 10):.0f} with ten; the owner ends it at {1 / owner_s:.0f}\n"
    )
    return model, owner_s, server_s


def _draw(
    run: Run,
    found: dict[tuple[int, int], list[Found]],
    model: Model,
    owner_s: float,
    server_s: float,
    direct: scaling_direct.Model | None,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (loads, servers, clients) = pyplot.subplots(1, 3, figsize=(15, 4))
    if direct is None:
        clients.remove()
    else:
        scaling_direct.draw(direct, clients)
    steps = [2 ** (i / 4) for i in range(37)]
    loads.plot(steps, [model.per_s(n) for n in steps], color="#9ca3af", lw=1, label="model")
    for kind, counts, fill in (("the model is fitted to these", FITTED, "#2563eb"), ("held out", HELD_OUT, "white")):
        rates = [median(one.per_s for one in found[1, n]) for n in counts]
        loads.plot(counts, rates, "o", color="#2563eb", mfc=fill, label=f"measured: {kind}")
    loads.set_xscale("log", base=2)
    loads.set_xlabel("in flight, one tablet server")
    loads.set_ylabel("transactions a second, durable")
    drawn = [round(10 ** (i / 12)) for i in range(37)]
    servers.plot(drawn, [predicted(model, owner_s, server_s, n) for n in drawn], color="#9ca3af", lw=1, label="model")
    servers.axhline(1 / owner_s, color="#b45309", lw=0.8, ls="--", label="all that one owner can")
    servers.plot(
        SERVERS,
        [median(one.per_s for one in found[n, MANY]) for n in SERVERS],
        "o",
        color="#2563eb",
        label=f"measured, all processes on {os.cpu_count()} cores",
    )
    servers.set_xscale("log")
    servers.set_yscale("log")
    servers.set_xlabel(f"tablet servers, a core for each process, {MANY} in flight for each")
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    run.figure(figure, "scaling")
    pyplot.close(figure)


if __name__ == "__main__":
    random.seed(0)
    assert sys.argv[1] == "serve"
    trio.run(_serve, sys.argv[2], int(sys.argv[3]))
