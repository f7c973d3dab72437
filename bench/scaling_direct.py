"""Direct clients of Bigtable, and one server that gives them timestamps: the cost of a transaction in each, and a
projection to a thousand clients.

A read-modify-write of a row, by a closed loop of callers in each of one to three client processes, over the emulator. A
transaction takes two timestamps. A client asks for those of all its callers at once, and asks again when the answer is
there: so many in flight share a request. The model:

    the server      `request` for each request for timestamps, `stamp` for each timestamp, `session` for each client and
                    second (heartbeats, tickets)
    a client        `each` for a transaction, `asking` for each request for timestamps

The costs are fitted to some loads, and predict the others, which are held out. The projection keeps `MANY` transactions
in flight in each client, with batches as measured, or larger ones if a timestamp may take `WAIT_S`. Bigtable's nodes
are counted by Google's published figures for one, `READS` and `WRITES` of rows a second; a conditional write counts as
one of each.

    python -m bench.scaling_direct URL      a client process
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import trio

import perco
from bench.against.coordinator import Coordinator
from bench.against.embedded import KEYS, ZERO, Perco, one_more, schema, value
from bench.against.load import closed_loop
from bench.bigtable import Emulator, emulator
from bench.harness import Report, Run, interleaved
from perco.bigtable.calls import Calls, Scan
from perco.rpc.link import Link
from perco.serve.messages import Method

SECONDS = 2.0
IDLE_S = 8.0
MANY = 64  # in flight in each client, in the projection
FITTED = ((1, 1), (1, 8), (1, MANY), (2, 2), (3, 1), (3, MANY))  # client processes, in flight in each
HELD_OUT = ((1, 32), (2, 16), (3, 4))
ERROR_MAX = 0.2
DRAWN = 1000
READS, WRITES = 17_000, 14_000  # rows a second of one node with SSD
WAIT_S = 0.1
STAMPS = 2  # of a transaction

Load = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Figures:
    """The work of one client process: `draws`: requests for timestamps; `reads`, `writes`: calls to Bigtable."""

    seconds: float
    transactions: int
    cpu_s: float
    draws: int
    reads: int
    writes: int


@dataclass(frozen=True, slots=True)
class Found:
    """A round: of each client process; and the server's CPU time."""

    clients: list[Figures]
    server_s: float

    @property
    def transactions(self) -> int:
        return sum(each.transactions for each in self.clients)

    @property
    def seconds(self) -> float:
        return max(each.seconds for each in self.clients)

    @property
    def per_s(self) -> float:
        return sum(each.transactions / each.seconds for each in self.clients)

    @property
    def draws(self) -> float:
        """Requests for timestamps, for each transaction."""
        return sum(each.draws for each in self.clients) / self.transactions

    @property
    def client_us(self) -> float:
        return 1e6 * sum(each.cpu_s for each in self.clients) / self.transactions

    @property
    def server_us(self) -> float:
        return 1e6 * self.server_s / self.transactions

    def calls(self, kind: str) -> float:
        return sum(getattr(each, kind) for each in self.clients) / self.transactions  # type: ignore[no-any-return]


# ------------------------------------------------------------------ a client process


def main_of_client(url: str) -> None:
    """Does as many transactions at a time as each line of its standard input says, and prints its figures."""
    perco.tune_gc()
    trio.run(_client, url)


async def _client(url: str) -> None:
    counted = _counting()
    options = perco.Options(
        bigtable=perco.options.BigtableOptions(own=False), retry=perco.options.RetryOptions(attempts=1_000_000)
    )
    async with perco.open(url, schema, options=options) as db:
        store = Perco(db)
        print("ready", flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            counted.clear()

            async def call(rng: random.Random) -> None:
                await store.modify(rng.choice(KEYS), one_more)

            load = await closed_loop(call, int(line), SECONDS)
            found = Figures(load.seconds, load.calls, load.cpu_s, counted["draws"], counted["reads"], counted["writes"])
            print(json.dumps(asdict(found)), flush=True)


def _counting() -> Counter[str]:
    """How often this process asks the server for timestamps, and Bigtable, from now on."""
    counted: Counter[str] = Counter()
    call, ask = Link.call, Calls.ask

    def counting(self: Link, method: Any, *args: Any, **how: Any) -> Any:
        counted["draws"] += method == Method.DRAW
        return call(self, method, *args, **how)

    async def asking(self: Calls, requests: Sequence[Any], deadline: float) -> Any:
        for each in requests:
            counted["reads" if isinstance(each, Scan) else "writes"] += 1
        return await ask(self, requests, deadline)

    setattr(Link, "call", counting)  # noqa: B010
    setattr(Calls, "ask", asking)  # noqa: B010
    return counted


# ------------------------------------------------------------------ rounds


class Store:
    """A store on the emulator, the server that gives its timestamps, and client processes that wait to be told."""

    def __init__(self, started: Emulator, folder: Path, stack: ExitStack) -> None:
        self._url = started.url()
        self._server = Coordinator(self._url, folder / "leader")
        stack.callback(self._server.end)
        self._server.says("serving")
        trio.run(_fill, self._url)
        self._alone_us = self._idle_us()
        self._clients = [stack.enter_context(_process(self._url)) for _ in range(max(n for n, _ in FITTED + HELD_OUT))]
        self.transactions = 0

    def run(self, clients: int, in_flight: int) -> Found:
        before = self._server.cpu_s()
        for each in self._clients[:clients]:
            assert each.stdin is not None
            print(in_flight, file=each.stdin, flush=True)
        found = [Figures(**json.loads(_line(each))) for each in self._clients[:clients]]
        done = Found(found, self._server.cpu_s() - before)
        self.transactions += done.transactions
        return done

    def session_us(self) -> float:
        """The cost of each client in a second, while no client does anything: beyond that of the server alone."""
        return max(self._idle_us() - self._alone_us, 0.0) / len(self._clients)

    def _idle_us(self) -> float:
        """CPU time of the server in a second without transactions."""
        before = self._server.cpu_s()
        time.sleep(IDLE_S)
        return 1e6 * (self._server.cpu_s() - before) / IDLE_S

    def check(self) -> None:
        """Raises: AssertionError, unless the rows count every transaction."""
        total = trio.run(_total, self._url)
        assert total == self.transactions, f"{self.transactions} transactions were made, and the rows say {total}"


@contextmanager
def _process(url: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bench.scaling_direct", url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert _line(process) == "ready\n"
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a client process has died")
    return line


async def _fill(url: str) -> None:
    async with perco.open(url, schema) as db, db.transaction() as txn:
        for key in KEYS:
            txn.set(value, key, ZERO)


async def _total(url: str) -> int:
    async with perco.open(url, schema) as db:
        return await Perco(db).total()


# ------------------------------------------------------------------ the model


@dataclass(frozen=True, slots=True)
class Model:
    """CPU times in microseconds; `reads` and `writes`: calls of one transaction to Bigtable; `draws`: its requests for
    timestamps, with `MANY` in flight."""

    request: float
    stamp: float
    session: float
    each: float
    asking: float
    reads: float
    writes: float
    draws: float

    def server_us(self, draws: float) -> float:
        """Of one transaction, with so many requests for timestamps."""
        return STAMPS * self.stamp + draws * self.request

    def client_us(self, draws: float) -> float:
        return self.each + draws * self.asking

    def of_client(self) -> float:
        """Transactions a second that a client with a core of its own has time for."""
        return 1e6 / self.client_us(self.draws)

    def of_server(self, clients: int, *, batching: bool = True) -> float:
        """Transactions a second of all clients that the server has time for: with batches as measured, or with larger
        ones if a timestamp may take `WAIT_S`. A client has one request out at a time: the longer it takes, the more
        timestamps the next one is for."""
        left = 1 - 1e-6 * clients * self.session
        if not batching:
            return max(left / (1e-6 * self.server_us(STAMPS)), 0.0)
        slow = (left - 1e-6 * clients * self.request / WAIT_S) / (1e-6 * STAMPS * self.stamp) if self.stamp else 0.0
        return max(left / (1e-6 * self.server_us(self.draws)), slow, 0.0)

    def all_clients(self, clients: int, *, batching: bool = True) -> float:
        return min(clients * self.of_client(), self.of_server(clients, batching=batching))

    def nodes(self, per_s: float) -> int:
        """Of Bigtable, for so many transactions a second."""
        return math.ceil(per_s * ((self.reads + self.writes) / READS + self.writes / WRITES))


def fitted(found: dict[Load, list[Found]], session_us: float, wanted: Sequence[Load] = FITTED) -> Model:
    """Fit the model: least squares of relative errors, no cost below 0."""
    rounds = [one for load in wanted for one in found[load]]
    stamp, request = _least([(STAMPS, one.draws, one.server_us - _sessions(one, session_us)) for one in rounds])
    each, asking = _least([(1.0, one.draws, one.client_us) for one in rounds])
    many = [one for load in wanted if load[1] == MANY for one in found[load]]
    reads, writes = (median(one.calls(kind) for one in many) for kind in ("reads", "writes"))
    return Model(request, stamp, session_us, each, asking, reads, writes, median(one.draws for one in many))


def _sessions(one: Found, session_us: float) -> float:
    """The share of one transaction in the cost of the sessions."""
    return session_us * len(one.clients) * one.seconds / one.transactions


def _least(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """x and y, not below 0, with x a + y b = c for all points (a, b, c) as nearly as possible."""
    import numpy

    rows = numpy.array(points)
    scaled = rows[:, :2] / rows[:, 2:]
    ones = numpy.ones(len(points))
    (x, y), *_ = numpy.linalg.lstsq(scaled, ones, rcond=None)
    if x >= 0 and y >= 0:
        return float(x), float(y)
    column = 1 if x < 0 else 0
    [only], *_ = numpy.linalg.lstsq(scaled[:, [column]], ones, rcond=None)
    return (0.0, float(only)) if column else (float(only), 0.0)


# ------------------------------------------------------------------


def measure(run: Run, report: Report) -> Model:
    """Measure, fit, predict; print the tables, and note the figures."""
    with run.scratch() as folder, ExitStack() as stack:
        store = Store(stack.enter_context(emulator()), folder, stack)
        found = interleaved(run.rounds, {load: partial(store.run, *load) for load in sorted(FITTED + HELD_OUT)})
        session_us = store.session_us()
        store.check()
    model = fitted(found, session_us)
    _tell(run, report, found, model)
    _project(run, report, model)
    return model


def _tell(run: Run, report: Report, found: dict[Load, list[Found]], model: Model) -> None:
    lines = []
    worst: dict[bool, float] = {True: 0.0, False: 0.0}
    for load, rounds in found.items():
        draws = median(one.draws for one in rounds)
        shown: list[object] = [*load, f"{median(one.per_s for one in rounds):.0f}", f"{draws:.2f}"]
        for kind, predicted in (
            ("server_us", model.server_us(draws) + median(_sessions(one, model.session) for one in rounds)),
            ("client_us", model.client_us(draws)),
        ):
            measured = median(getattr(one, kind) for one in rounds)
            error = predicted / measured - 1
            shown += [f"{measured:.0f}", f"{predicted:.0f}", f"{100 * error:+.0f} %"]
            report.figures[f"direct_{kind}_{load[0]}x{load[1]}"] = measured
            report.figures[f"direct_{kind}_error_{load[0]}x{load[1]}"] = error
            worst[load in HELD_OUT] = max(worst[load in HELD_OUT], abs(error))
        lines.append([*shown, "held out" if load in HELD_OUT else "fitted"])
    run.table(
        "direct clients on the Bigtable emulator; CPU us of a transaction, measured and by the model: "
        f"the server {model.stamp:.1f} a timestamp, {model.request:.0f} a request, {model.session:.0f} a client and "
        f"second; a client {model.each:.0f} a transaction, {model.asking:.0f} a request",
        ("clients", "in flight", "per s", "requests", "server", "model", "error", "client", "model", "error", ""),
        lines,
    )
    report.figures["direct_model_error"] = worst[True]
    report.figures["direct_model_error_fitted"] = worst[False]
    report.bars.append(("error of the model of direct clients", worst[True], "at most", ERROR_MAX))


def _project(run: Run, report: Report, model: Model) -> None:
    lines = []
    for clients in (1, 10, 100, DRAWN):
        rate, alone = (model.all_clients(clients, batching=batching) for batching in (True, False))
        wanted = clients * model.of_client()
        limit = "clients" if rate >= wanted else "the server"
        lines.append([clients, f"{wanted:.0f}", f"{rate:.0f}", limit, f"{alone:.0f}", model.nodes(rate)])
        report.figures[f"direct_{clients}_clients_per_s"] = rate
        report.figures[f"direct_{clients}_clients_one_request_each_per_s"] = alone
        report.figures[f"direct_{clients}_clients_nodes"] = model.nodes(rate)
    run.table(
        f"projected: a core for each client and for the server; timestamps take up to {1000 * WAIT_S:g} ms; a node "
        f"of Bigtable makes {READS} reads and {WRITES} writes a second, a transaction {model.reads:.2f} reads and "
        f"{model.writes:.2f} conditional writes",
        ("clients", "clients could", "a second", "limited by", "without batches", "nodes"),
        lines,
    )


def draw(model: Model, axis: Any) -> None:
    """Draw the projection."""
    counts = [round(10 ** (i / 12)) for i in range(37)]
    axis.plot(counts, [model.all_clients(n) for n in counts], color="#2563eb", label="timestamps in batches")
    axis.plot(
        counts,
        [model.all_clients(n, batching=False) for n in counts],
        color="#b45309",
        ls="--",
        label="a request for each timestamp",
    )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("direct clients on Bigtable, a core for each")
    axis.set_ylabel("transactions a second")


if __name__ == "__main__":
    main_of_client(sys.argv[1])
