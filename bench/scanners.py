"""Why scanners teleport: the paper's buses, in virtual time; and worker processes, in real time.

In virtual time, perco's own scanners and worker run over a memory store, behind simulated tablet servers. Each server
holds one tablet and answers one request (a page of a scan, a row read, a mutation) at a time; further requests wait in
its queue. So a scanner that is alone in its tablet is limited by its observers, and a clump of scanners by the tablet's
server, as the paper says. Each scanner makes one run at a time, like a thread in the paper.

A scanner without teleport skips a row on which another one runs observers, and goes on to the next row. It may come to
rows that another has finished since its page of the scan was read: these are claimed twice, and found clean.

In real time, four worker processes are clients of a durable `perco serve` process (`bench/worker_processes.py`). There
the server has the row locks, and refuses a claim if other processes have all of its rows. The bar is on the share of
claims that are refused.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import trio
import trio.testing

import perco
from bench import hot, worker_processes
from bench.harness import Cell, Report, Run, interleaved
from bench.hot import HOT_RANGES, KEYS, ONE_SLOW_IN, RUN_S, SLOW_RUN_S, TABLETS
from bench.worker_processes import Drained
from perco.database.inside import close, inside, local_owner
from perco.database.making import make
from perco.notify.rowlocks import Dirty
from perco.notify.scanner import Scanner
from perco.notify.walk import Place
from perco.notify.worker import Worker
from perco.storage import BatchOptions, LmdbOptions, LocalRowStore, Mutation, RowCells, ScanPage, ScanRequest
from perco.storage.cells import ReadRequest, Verdict
from perco.tablets.local import LocalStore

ROWS = 1500
REQUEST_S = 0.001  # that a tablet's server takes for a request
WINDOW_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One configuration to compare.

    Attributes:
        hot: dirty rows lie in three hot ranges, else anywhere.
        together: scanners begin at the same place, else at random ones.
    """

    scanners: int
    hot: bool
    together: bool
    teleport: bool
    row_locks: bool = True
    rows: int = ROWS
    request_s: float = REQUEST_S


@dataclass(slots=True)
class Drain:
    """The events from the first dirty row to the last.

    `twice`: claims of rows that had been claimed before; `runs`: of the observer; `gap`: the longest stretch of dirty
    rows that no scanner visited within a second, as a share of all rows, mean over the drain; `claims`: (when, scanner,
    key).
    """

    seconds: float = 0.0
    twice: int = 0
    runs: int = 0
    teleports: int = 0
    gap: float = 0.0
    claims: list[tuple[float, int, int]] = field(default_factory=list)


# ------------------------------------------------------------------ tablet servers


class TabletServers:
    """A row store whose tablets answer one request at a time each, once `request_s` has been set."""

    groups = True

    def __init__(self, inner: LocalRowStore) -> None:
        self._inner = inner
        self.request_s = 0.0
        self._free: dict[int, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def _served(self, where: Iterator[tuple[str, bytes]]) -> None:
        """Wait in the queues of the tablets that hold these rows."""
        now = until = trio.current_time()
        if not self.request_s:
            return
        for table, row in where:
            tablet = self._inner.locate(table, row)
            done = self._free[tablet] = max(self._free.get(tablet, 0.0), now) + self.request_s
            until = max(until, done)
        await trio.sleep_until(until)

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        await self._served((table, row) for table, row, _ in requests)
        return await self._inner.read(requests)

    async def scan(self, request: ScanRequest) -> ScanPage:
        await self._served(iter([(request.table, request.start)]))  # scanners ask for parts of one tablet
        return await self._inner.scan(request)

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        await self._served((mutation.table, mutation.rows[0][0]) for mutation in mutations)
        return await self._inner.apply(mutations)


# ------------------------------------------------------------------ buses


class Bus(Scanner):
    """perco's scanner, which can begin where all others begin (`together`), and notes its claims."""

    together = False
    note: Callable[[int, bytes], None]

    async def _ahead(self) -> list[Place]:
        if self.together:
            self.together = False
            return self._places()
        return await super()._ahead()

    def _begin(self, nursery: trio.Nursery, table: str, dirty: Dirty) -> None:
        self.note(self.number, dirty.row)
        super()._begin(nursery, table, dirty)


async def drain(scene: Scene, seed: int) -> Drain:
    """Make the scene's rows dirty, and run scanners until all are clean."""
    rng = random.Random(seed)
    docs = hot.table()
    body, parsed = docs.column("body", perco.BYTES), docs.column("parsed", perco.BYTES)
    schema = perco.Schema(docs)
    keys = hot.dirty(scene.rows, rng, hot=scene.hot)
    slow = hot.slow(keys, rng)
    out = Drain()
    ended: dict[int, float] = {}
    clean = trio.Event()

    @schema.observe(body, id="parse")
    async def parse(txn: perco.Transaction, change: perco.Change[bytes, bytes]) -> None:
        out.runs += 1
        await trio.sleep(SLOW_RUN_S if hot.number(change.key) in slow else RUN_S)
        txn.set(parsed, change.key, change.value or b"")

    def on_run(_: str, key: bytes, __: float) -> None:
        ended[hot.number(key)] = trio.current_time() - began
        if len(ended) == len(keys):
            clean.set()

    local = LocalStore(
        "memory:", durable=False, readonly=False, accept_loss=False, lmdb=LmdbOptions(), batch=BatchOptions()
    )
    servers = TabletServers(local.store)
    local.store = servers  # type: ignore[assignment]
    db = make(local, schema, perco.Options(seed=seed))

    def bus(worker: Worker, number: int, slots: int, tables: Callable[[], list[str]]) -> Bus:
        made = Bus(worker, number, 1, tables)
        made.together = scene.together
        made.note = lambda scanner, row: out.claims.append((trio.current_time() - began, scanner, hot.number(row)))
        return made

    inside(db).workers.scanner = bus
    await inside(db).oracle.start()
    await local_owner(db).declare()
    try:
        for at in range(0, len(keys), 500):
            async with db.transaction() as txn:
                for key in keys[at : at + 500]:
                    txn.set(body, hot.key(key), b"x")
        await trio.testing.wait_all_tasks_blocked()
        options = perco.WorkerOptions(
            concurrency=scene.scanners, scanners=scene.scanners, teleport=scene.teleport, row_locks=scene.row_locks
        )
        servers.request_s = scene.request_s
        began = trio.current_time()
        async with db.worker(options=options) as worker:
            worker.on_run(on_run)
            await clean.wait()
            out.seconds = trio.current_time() - began
            out.teleports = sum(counters.teleports for counters in worker.scanner_statistics())
    finally:
        await close(db)
    out.twice = len(out.claims) - len(keys)
    out.gap = mean_gap(keys, out.claims, ended)
    return out


def mean_gap(keys: Sequence[int], claims: Sequence[tuple[float, int, int]], ended: dict[int, float]) -> float:
    """See `Drain`."""
    windows: dict[int, set[int]] = {}
    for when, _, key in claims:
        windows.setdefault(int(when / WINDOW_S), set()).add(key)
    gaps = []
    for window in range(int(max(ended.values()) / WINDOW_S) + 1):
        visited = windows.get(window, set())
        waiting = [key in visited for key in keys if ended[key] >= window * WINDOW_S]
        stretches = [len(list(group)) for came, group in itertools.groupby(waiting) if not came]
        gaps.append(max(stretches, default=0) / len(keys))
    return sum(gaps) / len(gaps)


@contextmanager
def _scheduled(seed: int) -> Iterator[None]:
    """trio runs tasks in random order; here the order comes from a seed, so that figures can be reproduced."""
    run: Any = trio._core._run
    before = run._ALLOW_DETERMINISTIC_SCHEDULING
    run._ALLOW_DETERMINISTIC_SCHEDULING = True
    run._r.seed(seed)
    try:
        yield
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING = before


def ride(scene: Scene, seed: int) -> Drain:
    """`drain` in virtual time."""
    with _scheduled(seed):
        return trio.run(partial(drain, scene, seed), clock=trio.testing.MockClock(autojump_threshold=0))


# ------------------------------------------------------------------ the benchmark

JUDGED = Scene(scanners=64, hot=True, together=True, teleport=True)
FACTOR_LEAST = 2.0


def scenes() -> list[Scene]:
    """Every pair without and with teleport."""
    return [
        Scene(scanners=n, hot=hot, together=together, teleport=teleport)
        for n, hot, together, teleport in itertools.product((1, 8, 64), (False, True), (True, False), (False, True))
        if n > 1 or (not together and teleport)  # one alone meets no other
    ]


def lockless() -> list[Scene]:
    """Without row locks no scanner notices another. If they began together, they would stay together: left out."""
    return [
        Scene(scanners=n, hot=hot, together=False, teleport=False, row_locks=False)
        for n, hot in itertools.product((8, 64), (False, True))
    ]


def main(run: Run) -> None:
    report = Report("scanners", "in virtual time none: memory; of processes power")
    facts = run.machine(report.durability)
    seeds = range(1, run.rounds + 1)
    wanted = [replace(JUDGED, teleport=False), JUDGED] if run.quick else scenes()
    found = {scene: [ride(scene, seed) for seed in seeds] for scene in wanted}
    if not run.quick:
        found |= {scene: [ride(scene, 1)] for scene in lockless()}
    run.say(
        f"{ROWS} dirty rows in {TABLETS} tablets; a tablet server takes {1000 * REQUEST_S:g} ms a request,"
        f" an observer {1000 * RUN_S:g} ms, one in {ONE_SLOW_IN} {1000 * SLOW_RUN_S:g} ms."
    )
    run.say("gap: the largest stretch of dirty rows that no scanner came to for a second, mean over the drain.\n")
    run.table(
        "drained in, seconds of virtual time",
        ("dirty rows", "begin", "scanners", "", "median (least - most)", "twice", "gap", "teleports"),
        [_line(scene, drains) for scene, drains in found.items()],
    )
    without, teleporting = found[replace(JUDGED, teleport=False)], found[JUDGED]
    factors = [slow.seconds / fast.seconds for slow, fast in zip(without, teleporting, strict=True)]
    report.ratio("drain_without_vs_with_teleport", Cell(tuple(factors)).median, at_least=FACTOR_LEAST)
    for scene, drains in found.items():
        name = _name(scene)
        report.figures[f"drain_s_{name}"] = _median(drains, "seconds")
        report.figures[f"claimed_twice_{name}"] = _median(drains, "twice")
        report.figures[f"gap_{name}"] = _median(drains, "gap")
        report.figures[f"teleports_{name}"] = _median(drains, "teleports")
    _draw(run, _in_processes(run, report))
    run.finish(report, facts)


def _in_processes(run: Run, report: Report) -> Sequence[Drained]:
    """Drain without teleport and with it, in turn. Returns the first drain of each."""
    seeds = {teleport: itertools.count(1) for teleport in (False, True)}  # the same rows for both
    with run.scratch() as folder, worker_processes.processes(folder) as processes:
        found = interleaved(
            run.rounds,
            {
                teleport: partial(_drain_once, processes, teleport=teleport, seeds=seeds[teleport])
                for teleport in (False, True)
            },
        )
    run.say(
        f"{worker_processes.WORKERS} worker processes of {worker_processes.CONCURRENCY} runs in flight, which begin"
        f" {worker_processes.APART_S:g} s apart; {worker_processes.ROWS} dirty rows in three hot ranges; durable.\n"
    )
    run.table(
        "drained by worker processes, seconds",
        ("", "median (least - most)", "calls refused", "met", "teleports", "twice"),
        [
            (
                "teleport" if teleport else "no teleport",
                Cell(tuple(drained.seconds for drained in all)),
                f"{_median(all, 'refused_share'):.1%} of {_median(all, 'asked'):.0f}  (at most "
                f"{max(one.refused_share for one in all):.1%})",
                *(f"{_median(all, what):.0f}" for what in ("met", "teleports", "twice")),
            )
            for teleport, all in found.items()
        ],
    )
    names = {"drain_s": "seconds", "refused_share": "refused_share", "met": "met", "teleports": "teleports"}
    for teleport, all in found.items():
        for name, what in {**names, "claimed_twice": "twice"}.items():
            report.figures[f"{name}_processes{'' if teleport else '_off'}"] = _median(all, what)
    share = _median(found[True], "refused_share")
    report.bars.append(("refused_share_processes", share, "at most", worker_processes.REFUSED_MOST))
    return [found[teleport][0] for teleport in (False, True)]


def _drain_once(processes: worker_processes.Processes, *, teleport: bool, seeds: Iterator[int]) -> Drained:
    return processes.drain(worker_processes.ROWS, teleport=teleport, seed=next(seeds))


def _median(drains: Sequence[Drain] | Sequence[Drained], what: str) -> float:
    return Cell(tuple(getattr(drain, what) for drain in drains)).median


def _how(scene: Scene) -> str:
    if not scene.row_locks:
        return "no row locks"
    return "teleport" if scene.teleport else "no teleport"


def _name(scene: Scene) -> str:
    where = "hot" if scene.hot else "uniform"
    begin = "together" if scene.together else "random"
    return f"{where}_{begin}_{scene.scanners}_{_how(scene).replace(' ', '_')}"


def _line(scene: Scene, drains: Sequence[Drain]) -> tuple[object, ...]:
    return (
        "three hot ranges" if scene.hot else "anywhere",
        "together" if scene.together else "at random",
        scene.scanners,
        _how(scene),
        Cell(tuple(drain.seconds for drain in drains)),
        f"{_median(drains, 'twice'):.0f}",
        f"{_median(drains, 'gap'):.1%}",
        f"{_median(drains, 'teleports'):.0f}",
    )


# ------------------------------------------------------------------ the picture


def _draw(run: Run, drained: Sequence[Drained]) -> None:
    """Where each scanner was: they clump, unless they teleport. Below, the same for worker processes.

    Args:
        drained: by worker processes, without teleport and with it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 10), sharex="row", sharey="row")
    figure.subplots_adjust(top=0.9, wspace=0.08, hspace=0.5)
    colours = pyplot.get_cmap("tab10")
    for axis, teleport in zip(axes[0], (False, True), strict=True):
        scene = Scene(scanners=8, hot=False, together=False, teleport=teleport)
        found = ride(scene, 1)
        for scanner in range(scene.scanners):
            for times, places in stretches(found.claims, scanner):
                axis.plot(times, places, color=colours(scanner), linewidth=1.6, solid_capstyle="round")
        _label(axis, found.seconds, teleport, [tablet / TABLETS for tablet in range(TABLETS + 1)])
        axis.set_xlabel("seconds of virtual time")
    for axis, each, teleport in zip(axes[1], drained, (False, True), strict=True):
        order = {key: at for at, key in enumerate(sorted({key for _, _, key in each.claims}))}
        axis.scatter(
            [when for when, _, _ in each.claims],
            [order[key] for _, _, key in each.claims],
            color=[colours(process) for _, process, _ in each.claims],
            s=4,
            linewidth=0,
        )
        _label(axis, each.seconds, teleport, [at * each.rows / HOT_RANGES for at in range(HOT_RANGES + 1)])
        axis.set_xlabel("seconds")
    for row, title in zip(axes, _TITLES, strict=True):
        row[0].text(0, 1.15, title, transform=row[0].transAxes, fontsize=12)
        row[0].set_xlim(left=0)
    axes[0][0].set_ylabel(f"position in the key space\n({TABLETS} tablets)")
    axes[0][0].set_ylim(0, 1)
    axes[0][0].set_yticks([0, 1], ["first key", "last key"])
    axes[1][0].set_ylabel("dirty rows in order of their keys\n(three hot ranges)")
    axes[1][0].set_ylim(0, drained[0].rows)
    begun = drained[1].begun
    axes[1][1].legend(
        [Line2D([], [], marker="o", linestyle="", markersize=5, color=colours(i)) for i in range(len(begun))],
        [f"process {i + 1}, began at {when:.1f} s" for i, when in enumerate(begun)],
        loc="upper center",
        bbox_to_anchor=(-0.04, -0.12),
        ncols=4,
        frameon=False,
    )
    run.figure(figure, "scanners")
    pyplot.close(figure)


_TITLES = (
    "The paper's buses: eight scanners, from random places, until no row is dirty",
    f"{worker_processes.WORKERS} worker processes on a durable server: each row when it was claimed",
)


def _label(axis: Any, ended: float, teleport: bool, borders: Sequence[float]) -> None:
    """Draw the title, the end of the drain, and the borders of tablets or ranges."""
    for border in borders:
        axis.axhline(border, color="#e5e7eb", linewidth=0.6, zorder=0)
    axis.axvline(ended, color="#475569", linewidth=1, linestyle="--")
    axis.annotate(
        f"all clean: {ended:.1f} s",
        (ended, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        color="#475569",
    )
    axis.set_title("with teleport" if teleport else "without teleport", loc="left", pad=18, fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)


def stretches(claims: Sequence[tuple[float, int, int]], scanner: int) -> Iterator[tuple[list[float], list[float]]]:
    """A scanner's times and positions (0 to 1), divided where it jumped."""
    times: list[float] = []
    places: list[float] = []
    for when, who, key in claims:
        if who != scanner:
            continue
        place = key / KEYS
        if places and not 0 <= place - places[-1] < 1 / TABLETS:
            yield times, places
            times, places = [], []
        times.append(when)
        places.append(place)
    yield times, places
