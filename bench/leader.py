"""The server that leads is killed, or stopped, while a direct client commits: how long no commit succeeds."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import trio

import perco
from bench.against.coordinator import Coordinator
from bench.against.embedded import KEYS, ZERO, schema, value
from bench.harness import Report, Run

AWAY_IN_FLIGHT, BEFORE_S, AWAY_S = 16, 1.0, 10.0
GAP_S = 5.0


@contextmanager
def coordinators(url: str, count: int) -> Iterator[list[Coordinator]]:
    """The first one leads, the others stand by."""
    with tempfile.TemporaryDirectory(prefix="perco-") as folder, ExitStack() as stack:
        all = []
        for number in range(count):
            all.append(Coordinator(url, Path(folder) / f"s{number}"))
            stack.callback(all[-1].end)
            all[-1].says("standing by" if number else "serving")
        yield all


def fail_over(run: Run, report: Report, url: Callable[[], str], options: perco.Options, lease_s: float) -> None:
    """Kill and stop the server that leads, and judge how long no commit succeeds.

    Args:
        url: makes a store, and returns its address.
        options: of the direct client that commits.
    """
    table = []
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        gaps = []
        for _ in range(run.rounds):
            at = url()
            with coordinators(at, 2) as [leader, _]:
                gaps.append(trio.run(_gap, at, options, partial(leader.send, number)))
        table.append([f"the server that leads is {name}", f"{median(gaps):.1f}", f"{max(gaps):.1f}"])
        report.figures[f"gap_{name}_s"] = max(gaps)
        report.bars.append((f"gap_{name}_s", max(gaps), "at most", GAP_S))
    run.table(
        f"the longest time without a commit, {AWAY_IN_FLIGHT} in flight; a lease lasts {lease_s:g} s",
        ("", "median s", "longest s"),
        table,
    )


async def _gap(url: str, options: perco.Options, harm: Callable[[], None]) -> float:
    """The longest time between two commits, around the moment when a leader is harmed."""
    async with perco.open(url, schema, options=options) as db:
        at = [trio.current_time()]

        async def caller(number: int) -> None:
            while True:
                await db.run(_write, KEYS[number])
                at.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            for number in range(AWAY_IN_FLIGHT):
                nursery.start_soon(caller, number)
            await trio.sleep(BEFORE_S)
            harm()
            harmed = trio.current_time()
            await trio.sleep(AWAY_S)
            nursery.cancel_scope.cancel()
        return max(after - before for before, after in pairwise([*at, harmed + AWAY_S]) if after >= harmed)


async def _write(txn: perco.Transaction, key: bytes) -> None:
    txn.set(value, key, ZERO)
