"""How many timestamps a served oracle hands out: the paper's gave two million a second, on one machine.

    requests       32 connections, each with one request out, for 1, 8 or 64 timestamps; the client has no event loop,
                   so that only the server is measured
    delivered      tasks of one client process, each of which waits for a timestamp of its own: perco's client sends
                   one call at a time, for as many timestamps as tasks wait (the paper's section 2.3)

Every timestamp must be larger than those that its connection had before, and none may come twice, even across a
`kill -9` of the server.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

import perco
from bench.against.blocking import BlockingClient
from bench.against.embedded import schema
from bench.against.served import Server, server
from bench.harness import Cell, Report, Run, interleaved
from perco.database.inside import inside
from perco.serve.messages import Method

CONNECTIONS = 32
BATCHES = (1, 8, 64)
TASKS = 512
SECONDS = 1.5
KEPT_MAX = 1 << 20  # timestamps that are searched for duplicates


@dataclass(slots=True)
class Asked:
    """The result of a round of requests."""

    seconds: float
    cpu_s: float
    requests: int = 0
    drawn: list[int] = field(default_factory=list)  # the first KEPT_MAX


class Asker:
    """One connection, with one request out."""

    def __init__(self, path: Path, each: int) -> None:
        self.client = BlockingClient(str(path / "socket"))
        self.each, self.last = each, 0

    def ask(self) -> None:
        self.client.say(int(Method.DRAW), (0, self.each))

    def answered(self) -> list[int]:
        """The timestamps of the answer. Raises: AssertionError unless they grow."""
        drawn: list[int] = list(self.client.heard()[0])
        for ts in drawn:
            assert ts > self.last, f"{ts} after {self.last}"
            self.last = ts
        assert len(drawn) == self.each
        return drawn


@contextmanager
def askers(path: Path, each: int) -> Iterator[dict[int, Asker]]:
    """Askers, by the file descriptors of their sockets."""
    made = [Asker(path, each) for _ in range(CONNECTIONS)]
    try:
        yield {asker.client.fileno(): asker for asker in made}
    finally:
        for asker in made:
            asker.client.close()


def requests(served: Server, each: int) -> Asked:
    """A closed loop of requests over all connections."""
    with askers(served.folder, each) as by_fd:
        ready = select.epoll()
        for fd, asker in by_fd.items():
            ready.register(fd, select.EPOLLIN)
            asker.ask()
        cpu, began = served.cpu_s(), time.perf_counter()
        found, until = Asked(0, 0), began + SECONDS
        while time.perf_counter() < until:
            for fd, _ in ready.poll():
                asker = by_fd[fd]
                drawn = asker.answered()
                asker.ask()
                found.requests += 1
                if len(found.drawn) < KEPT_MAX:
                    found.drawn += drawn
        found.seconds, found.cpu_s = time.perf_counter() - began, served.cpu_s() - cpu
        for asker in by_fd.values():
            asker.answered()
        ready.close()
    assert len(set(found.drawn)) == len(found.drawn), "a timestamp came twice"
    return found


async def _delivered(path: Path) -> float:
    """Timestamps per second of this process's CPU time, each to a task of its own."""
    count = 0

    async def task(oracle: object) -> None:
        nonlocal count
        last = 0
        while time.perf_counter() < until:
            ts = await inside(db).oracle.draw_commit()
            assert ts > last
            last = ts
            count += 1

    async with perco.open(path, schema) as db:
        until = time.perf_counter() + SECONDS
        used = time.process_time()
        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(task, inside(db).oracle)
        return count / (time.process_time() - used)


def delivered(served: Server) -> float:
    return trio.run(_delivered, served.folder)


def across_a_kill(folder: Path) -> tuple[int, int]:
    """(the largest timestamp that was drawn before, the smallest after)."""
    with server(folder, durable=True) as served:
        before = requests(served, 8).drawn
        served.send_signal(signal.SIGKILL)
        served.start()
        after = requests(served, 8).drawn
    assert max(before) < min(after), "timestamps went back across a kill -9"
    return max(before), min(after)


def main(run: Run) -> None:
    """Print the table and the RESULT line."""
    report = Report(run.name, "power")
    facts = run.machine("power (the bound of what was handed out is on disk before it is used)")
    with run.scratch() as folder:
        with server(folder, durable=True) as served:
            found = interleaved(run.rounds, {each: partial(requests, served, each) for each in BATCHES})
            each_s = Cell(tuple(interleaved(run.rounds, {"": partial(delivered, served)})[""]))
        rows = []
        for each, rounds in found.items():
            rate = Cell(tuple(asked.requests / asked.seconds for asked in rounds))
            cpu = Cell(tuple(1e6 * asked.cpu_s / asked.requests for asked in rounds))
            rows.append((each, rate, Cell(tuple(each * value for value in rate.rounds)), cpu))
            report.figures[f"requests_per_s_{each}"] = rate.median
            report.figures[f"timestamps_per_s_{each}"] = each * rate.median
        before, after = across_a_kill(folder)
    run.table(
        f"{CONNECTIONS} connections, one request out on each",
        ("timestamps a request", "requests a second (least - most)", "timestamps a second", "CPU us of the server"),
        rows,
    )
    report.figures["requests_per_s"] = report.figures["requests_per_s_1"]
    report.figures["delivered_per_s_per_client_core"] = each_s.median
    run.say(f"delivered to {TASKS} tasks one by one, per second of the client's processor: {each_s}")
    run.say(f"across a kill -9: the last before was {before}, the first after {after}\n")
    bars = (("requests_per_s", 40_000.0), ("timestamps_per_s_64", 2e6), ("delivered_per_s_per_client_core", 200_000.0))
    for name, bar in bars:
        report.bars.append((name, report.figures[name], "at least", bar))
    run.finish(report, facts)
