"""The effect on clients when a served store's processes die: the paper's figure 10, with more ways to die.

A bank over `perco serve --processes 6`, durable. Transfers arrive at fixed times, whether or not earlier ones have been
answered (an open loop: a stall does not reduce the load). Their rate is 60 % of what a closed loop of 128 callers
reached just before. Four events happen in turn, each some seconds into such a load, after a closed loop of its own:

    two of six tablet servers are killed (kill -9),
    the owner is killed (it has timestamps, sessions, the map of tablets; its tablet servers end with it),
    a tablet server is stopped for 20 s and continued (kill -STOP, -CONT),
    the supervisor is killed: all processes end, nothing holds the folder, and `perco serve` is started again.

The bars limit the longest time in which a tablet gave no reply, and the times until replies are back at 90 % of the
arrivals, until the backlog is as small as before, and until the tablets are spread evenly again. Every transfer writes
a row of its own: at the end each acknowledged one is there, once, and the total is unchanged; `check` finds nothing.

If the cores lose a third of their speed half way, a load of 60 % becomes one of 90 %, and no backlog drains. So a child
process that has nothing to do with the store measures the speed of the cores throughout (`Pace`). If they were slower
than in the closed loop, missed bars on the backlog are void, and the event is tried again, at most three times in all.
The closed loops are compared too, to show that no event leaves a slower store behind.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import trio

import perco
from bench.harness import Pace, Report, Run
from perco.check.check import check
from perco.database.inside import inside
from perco.serve.client import remote_owner
from perco.serve.opening import visiting

SERVERS = 6
TABLETS = 12
ACCOUNTS = 2000  # of a tablet: enough that a few thousand waiting callers do not all conflict
OPENING = 100
LOAD = 0.6
IN_FLIGHT = 128
SATURATION_S = 5.0
BEFORE_S, AFTER_S = 8.0, 35.0
STOPPED_S = 20.0
BIN_S = 0.1
USUAL_S = 0.05
PACE = 0.85  # of that in the closed loop: with slower cores, the rate that was chosen there is too high
TRIES = 3
BARS = {"gap": 3.0, "recovered": 5.0, "drained": 15.0, "even": 30.0}
HANGS_ON_PACE = ("recovered", "drained")  # bars that slower cores can miss
KEPT = 0.75  # of the first closed loop's rate, corrected by the pace of the cores: no event slows the store

bank = perco.Table("bank", key=perco.TEXT, splits=[f"{i:02d}" for i in range(1, TABLETS)])
balance = bank.column("balance", perco.INT64)
made = bank.column("made", perco.INT64)  # how often the transfer with that number was made
SCHEMA = perco.Schema(bank)
OPTIONS = perco.Options(
    wire=perco.options.WireOptions(heartbeat_s=0.5, silence_s=3.0, patience_s=60.0),
    retry=perco.options.RetryOptions(attempts=1_000_000),
)


def _account(tablet: int, number: int) -> str:
    return f"{tablet:02d}/a{number:03d}"


async def _opened(txn: perco.Transaction, tablet: int) -> None:
    for number in range(ACCOUNTS):
        txn.set(balance, _account(tablet, number), OPENING)


async def _transfer(txn: perco.Transaction, id: int, one: tuple[int, int], other: tuple[int, int]) -> None:
    row = f"{one[0]:02d}/t{id:08d}"
    [done, source, target] = (
        await txn.get(made, row),
        await txn.get(balance, _account(*one)),
        await txn.get(balance, _account(*other)),
    )
    assert source is not None
    assert target is not None
    txn.set(made, row, (done or 0) + 1)
    txn.set(balance, _account(*one), source - 1)
    txn.set(balance, _account(*other), target + 1)


@dataclass
class Replies:
    """The transfers: when each arrived, when it was answered, and which tablets it wrote to."""

    arrived: list[float] = field(default_factory=list)
    answered: list[tuple[float, tuple[int, int]]] = field(default_factory=list)
    acknowledged: dict[int, int] = field(default_factory=dict)  # number -> first tablet
    unknown: int = 0
    failed: list[str] = field(default_factory=list)


class Client:
    """Makes transfers."""

    def __init__(self, db: perco.Database, seed: int) -> None:
        self._db, self._rng = db, random.Random(seed)
        self._next = 0
        self.all = Replies()

    async def transfer(self, replies: Replies) -> None:
        rng = self._rng
        self._next += 1
        id, first = self._next, rng.randrange(TABLETS)
        second = first if rng.random() < 0.5 else rng.randrange(TABLETS)
        one = rng.randrange(ACCOUNTS)
        other = (one + rng.randrange(1, ACCOUNTS)) % ACCOUNTS
        try:
            await self._db.run(_transfer, id, (first, one), (second, other))
        except perco.CommitUnknown as error:
            replies.unknown += 1
            if not await self._db.outcome(error.token):
                return
        except perco.PercoError as error:
            replies.failed.append(f"{type(error).__name__}: {error}")
            return
        self.all.acknowledged[id] = first
        replies.answered.append((trio.current_time(), (first, second)))

    async def closed(self, seconds: float) -> float:
        """Transfers a second, of a closed loop."""
        replies = Replies()
        began = trio.current_time()

        async def caller() -> None:
            while trio.current_time() < began + seconds:
                await self.transfer(replies)

        async with trio.open_nursery() as nursery:
            for _ in range(IN_FLIGHT):
                nursery.start_soon(caller)
        return len(replies.answered) / (trio.current_time() - began)

    async def open(self, rate: float, seconds: float) -> Replies:
        """Transfers at fixed times, `rate` a second."""
        replies = Replies()
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for i in range(int(rate * seconds)):
                due = began + i / rate
                if (wait := due - trio.current_time()) > 0:
                    await trio.sleep(wait)
                replies.arrived.append(due)
                nursery.start_soon(self.transfer, replies)
        return replies


class Served:
    """`perco serve`, with all its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.owner = 0
        self._started = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "perco", "serve", str(self.folder), "--processes", str(SERVERS)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("serving"):
                owner = int(line.rpartition("(process ")[2].split(",")[0])
                self._token.run_sync_soon(self._ready, owner)

    def _ready(self, owner: int) -> None:
        self.owner = owner
        self._started.set()

    async def ready(self) -> None:
        await self._started.wait()
        self._started = trio.Event()


@dataclass(frozen=True)
class Found:
    """The effect on clients, in seconds after the event; inf: not within the measured time. `paces`: the machine's pace
    over time, as a share of that in the closed loop before."""

    name: str
    rate: float
    replies: Replies
    began: float
    event: float
    gap: float
    recovered: float
    drained: float
    even: float
    pace: float
    paces: list[tuple[float, float]]
    work_s: float = 1.0  # CPU time of the child's work, in the closed loop
    tries: int = 1

    @property
    def valid(self) -> bool:
        """Whether the bars on the backlog say something about the store: they are kept, or the cores were no slower."""
        return self.pace >= PACE or all(getattr(self, what) <= BARS[what] for what in HANGS_ON_PACE)


async def _even(folder: Path) -> None:
    """Wait until the tablets are spread evenly over the servers."""
    while True:
        with trio.move_on_after(2.0):
            try:
                async with visiting(folder) as db:
                    while True:
                        counts = [len(server.tablets) for server in await remote_owner(db).servers()]
                        if len(counts) == SERVERS and max(counts) - min(counts) <= 1 and sum(counts) == TABLETS:
                            return
                        await trio.sleep(0.05)
            except (perco.PercoError, OSError):
                pass
        await trio.sleep(0.05)


async def _scenario(
    name: str, client: Client, served: Served, pace: Pace, act: Callable[[Served], Awaitable[None]]
) -> Found:
    await _even(served.folder)
    calibrating = time.monotonic()
    rate = LOAD * await client.closed(SATURATION_S)
    calibrated = time.monotonic()
    since = calibrated - trio.current_time()
    began = trio.current_time()
    happened = even = float("inf")
    replies = Replies()

    async def load(after_s: float) -> None:
        nonlocal replies
        replies = await client.open(rate, BEFORE_S + after_s)

    async def event() -> None:
        nonlocal happened, even
        await trio.sleep(BEFORE_S)
        happened = trio.current_time()
        await act(served)
        with trio.move_on_after(AFTER_S):
            await _even(served.folder)
            even = trio.current_time() - happened

    async with trio.open_nursery() as nursery:
        nursery.start_soon(load, AFTER_S)
        nursery.start_soon(event)
    samples = pace.samples(began + since, began + since + BEFORE_S + AFTER_S)
    usual_s = statistics.mean(took for _, took in pace.samples(calibrating, calibrated))
    paces = [(at - since, usual_s / took) for at, took in samples]
    return replace(_judged(name, rate, replies, began, happened, even, paces), work_s=usual_s)


def _judged(
    name: str,
    rate: float,
    replies: Replies,
    began: float,
    event: float,
    even: float,
    paces: list[tuple[float, float]],
) -> Found:
    end = began + BEFORE_S + AFTER_S
    last = [event] * TABLETS  # the part of a gap before the event does not count
    gap = 0.0
    for at, tablets in sorted(replies.answered):
        for tablet in tablets:
            if event < at <= end:
                gap = max(gap, at - last[tablet])
                last[tablet] = at
    gap = max(gap, *(end - at for at in last))
    times = sorted(at for at, _ in replies.answered)
    recovered = float("inf")
    at = event
    while at + 1 < end:
        if sum(at <= time < at + 1 for time in times) >= 0.9 * rate:
            recovered = at + 1 - event  # the end of the first second with 90 % of the replies
            break
        at += BIN_S
    waiting = _waiting(replies, began, end)
    before = [count for time, count in waiting if time < event]
    usual = max(2 * max(before), USUAL_S * rate)
    drained = float("inf")
    for i, (at, _) in enumerate(waiting):
        if at > event + BIN_S and all(count <= usual for _, count in waiting[i : i + round(1 / BIN_S)]):
            drained = at - event  # the beginning of the first second in which the backlog is as small as usual
            break
    pace = statistics.mean(pace for at, pace in paces if event <= at < event + BARS["drained"])
    return Found(name, rate, replies, began, event, gap, recovered, drained, even, pace, paces)


def _waiting(replies: Replies, began: float, end: float) -> list[tuple[float, int]]:
    """How many transfers had arrived and were unanswered, over time."""
    arrived, answered = sorted(replies.arrived), sorted(at for at, _ in replies.answered)
    out, i, j = [], 0, 0
    time = began
    while time < end:
        while i < len(arrived) and arrived[i] <= time:
            i += 1
        while j < len(answered) and answered[j] <= time:
            j += 1
        out.append((time, i - j))
        time += BIN_S
    return out


async def _kill_two(served: Served) -> None:
    async with visiting(served.folder) as db:
        servers = await remote_owner(db).servers()
    for server in servers[:2]:
        os.kill(server.process, signal.SIGKILL)


async def _kill_owner(served: Served) -> None:
    os.kill(served.owner, signal.SIGKILL)
    await served.ready()


async def _stop_one(served: Served) -> None:
    async with visiting(served.folder) as db:
        victim = (await remote_owner(db).servers())[0].process
    os.kill(victim, signal.SIGSTOP)

    def go_on() -> None:
        with contextlib.suppress(ProcessLookupError):  # the owner took it for dead and killed it
            os.kill(victim, signal.SIGCONT)

    threading.Timer(STOPPED_S, go_on).start()


async def _kill_supervisor(served: Served) -> None:
    served.process.kill()
    await trio.to_thread.run_sync(served.process.wait)
    served.start()  # it would be refused the folder if anything still held it
    await served.ready()


SCENARIOS: dict[str, Callable[[Served], Awaitable[None]]] = {
    "2 of 6 tablet servers killed": _kill_two,
    "the owner killed": _kill_owner,
    "a tablet server stopped for 20 s": _stop_one,
    "the supervisor killed, served again": _kill_supervisor,
}


async def _all(run: Run, folder: Path) -> tuple[list[Found], dict[str, Any]]:
    served = Served(folder)
    found: list[Found] = []
    try:
        await served.ready()
        async with perco.open(folder, SCHEMA, options=OPTIONS) as db:
            for tablet in range(TABLETS):
                await db.run(_opened, tablet)
            client = Client(db, 1)
            await client.closed(1.0)
            with Pace() as pace:
                for name, act in SCENARIOS.items():
                    for tries in range(1, TRIES + 1):
                        one = replace(await _scenario(name, client, served, pace, act), tries=tries)
                        run.say(
                            f"{name}: {one.rate:.0f} transfers a second; longest gap of a tablet {one.gap:.2f} s, "
                            f"drained after {one.drained:.1f} s, cores at {one.pace:.0%} of their pace"
                            + ("" if one.valid else ": void")
                        )
                        if one.valid:
                            break
                    found.append(one)
    finally:
        served.process.terminate()
        await trio.to_thread.run_sync(served.process.wait)
    async with perco.open(folder, SCHEMA, options=OPTIONS) as db:
        async with db.snapshot() as snap:
            rows = await snap.scan(bank).all()
        times = {int(row.key.partition("/t")[2]): row[made] or 0 for row in rows if "/t" in row.key}
        total = sum(row[balance] or 0 for row in rows if "/a" in row.key)
        findings = (await check(inside(db).driver.store, ts=await inside(db).oracle.draw())).findings
    acknowledged = client.all.acknowledged
    return found, {
        "acknowledged": len(acknowledged),
        "lost": sum(not times.get(id) for id in acknowledged),
        "duplicated": sum(count > 1 for count in times.values()),
        "total": total - TABLETS * ACCOUNTS * OPENING,
        "findings": len(findings),
    }


def _tell_options(run: Run, report: Report) -> None:
    """Print the client's options that differ from the defaults; the server has the defaults of `perco serve`."""
    told = []
    for of, ours, default in (
        ("WireOptions", OPTIONS.wire, perco.options.WireOptions()),
        ("RetryOptions", OPTIONS.retry, perco.options.RetryOptions()),
    ):
        for each in fields(ours):
            here, usual = getattr(ours, each.name), getattr(default, each.name)
            if here != usual:
                told.append(f"{of}({each.name}={here}), by default {usual}")
                report.figures[f"option {of}.{each.name}"] = here
    run.say(f"served by: perco serve STORE --processes {SERVERS}, with its defaults")
    run.say(f"the client's options: {'; '.join(told)}; all others by default\n")


def main(run: Run) -> None:
    """Print the tables and the RESULT line."""
    report = Report(run.name, "power")
    facts = run.machine("power (fsync before every answer)")
    _tell_options(run, report)
    with run.scratch() as scratch:
        found, after = trio.run(_all, run, scratch / "store")
    run.say("")
    run.table(
        f"{SERVERS} tablet servers, {TABLETS} tablets, seconds after the event",
        (
            "",
            "longest gap of a tablet",
            "90 % again",
            "backlog drained",
            "spread evenly",
            "transfers a second",
            "pace of the cores",
            "unknown, asked for",
            "failed",
        ),
        [
            (
                *(one.name, f"{one.gap:.2f}", f"{one.recovered:.1f}", f"{one.drained:.1f}", f"{one.even:.1f}"),
                *(f"{one.rate:.0f}", f"{one.pace:.0%}"),
                *(one.replies.unknown, len(one.replies.failed)),
            )
            for one in found
        ],
    )
    for text in sorted({text for one in found for text in one.replies.failed})[:5]:
        run.say(f"failed: {text}")
    run.say(
        f"{after['acknowledged']} acknowledged: {after['lost']} lost, {after['duplicated']} made twice; the total is "
        f"off by {after['total']}; check finds {after['findings']}\n"
    )
    for one in found:
        if not one.valid:
            report.floor(f"pace of the cores, {one.name}", one.pace, PACE)
        for what, bar in BARS.items():
            value = getattr(one, what)
            report.figures[f"{what}_s: {one.name}"] = value
            if one.valid or what not in HANGS_ON_PACE:
                report.bars.append((f"{what}, {one.name}", value, "at most", bar))
        kept = one.rate / found[0].rate * one.work_s / found[0].work_s
        report.figures[f"tries: {one.name}"] = one.tries
        report.bars.append((f"rate as before, {one.name}", kept, "at least", KEPT))
    report.figures["worst_gap_s"] = max(one.gap for one in found)
    report.figures["recovery_s"] = max(one.recovered for one in found)
    for what in ("lost", "duplicated", "total", "findings"):
        report.figures[what] = after[what]
        report.bars.append((what, abs(after[what]), "at most", 0))
    _draw(run, found)
    run.finish(report, facts)


def _draw(run: Run, found: Sequence[Found]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (4 * len(found), 6)
    heights = {"height_ratios": (3, 3, 1)}
    figure, axes = pyplot.subplots(
        3, len(found), figsize=size, sharex=True, sharey="row", squeeze=False, gridspec_kw=heights
    )
    for one, (rate, late, pace) in zip(found, axes.T, strict=True):
        end = one.began + BEFORE_S + AFTER_S
        count = int((end - one.began) / 0.5)
        bins = [0] * count
        for at, _ in one.replies.answered:
            slot = int((at - one.began) / 0.5)
            if slot < count:
                bins[slot] += 1
        times = [one.began - one.event + 0.5 * i for i in range(count)]
        rate.step(times, [2 * n for n in bins], where="post", color="#2563eb", lw=1.2)
        rate.axhline(one.rate, color="#9ca3af", lw=0.8, ls="--")
        waiting = _waiting(one.replies, one.began, end)
        late.plot([at - one.event for at, _ in waiting], [n for _, n in waiting], color="#b45309", lw=1.2)
        pace.plot([at - one.event for at, _ in one.paces], [share for _, share in one.paces], color="#6b7280", lw=0.8)
        for axis in (rate, late, pace):
            axis.axvline(0, color="#dc2626", lw=0.8)
            axis.spines[["top", "right"]].set_visible(False)
        rate.set_title(one.name, loc="left", fontsize=9)
        pace.set_xlabel("seconds after the event")
    axes[0][0].set_ylabel("replies a second\n(dashed: arrivals)")
    axes[1][0].set_ylabel("waiting")
    axes[2][0].set_ylabel("pace of\nthe cores")
    axes[2][0].set_ylim(bottom=0)  # after all have been drawn, because they share it
    run.figure(figure, "failover")
    pyplot.close(figure)
