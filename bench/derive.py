"""One pure function of many documents, kept up to date: perco, CocoIndex, Pathway and DBOS, each written to win.

The function splits a document into paragraphs, and gives a row with a hashed embedding for each. A derived table holds
the rows of all documents. Two kinds of source are compared, like with like:

    files   the documents are files of a folder, which perco, CocoIndex (live, or catching up when told) and Pathway
            follow
    rows    the documents are stored by the system: perco's rows, which clients write, and DBOS, which writes
            document and rows in one transaction of a workflow

Each system runs as a process of its own; the derived tables of the peers are SQLite files. Everything is durable: every
commit is synced. `deriving/scenario.py` says what happens to each, and how it is measured. Restarts with their edits
take turns, for several rounds. A result that is not that of the batch computation is a finding, and is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from bench.deriving import systems
from bench.deriving.child import POLL_S
from bench.deriving.running import Cost
from bench.deriving.scenario import Side
from bench.deriving.systems import LeftOutError, System
from bench.harness import Cell, Report, Run, percentile

QUICK_SIZES: Final = (1_000, 10_000)
SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
QUICK_LIMIT_S, LIMIT_S = 120.0, 900.0  # of a step; a system that needs longer has no further steps, nor larger sizes
EDITS, QUICK_EDITS = 20, 8  # of a round
EDITS_S: Final = 10.0  # of a round, at most
KILLS, QUICK_KILLS = 20, 3  # in an edit, with the fewest documents
SAME_MOST, AHEAD_LEAST = 1.1, 1.0

RIVALS: Final = {  # which of perco's sources is compared with whom
    "cocoindex": (systems.PERCO_FILES, systems.COCOINDEX),
    "pathway": (systems.PERCO_FILES, systems.PATHWAY),
    "dbos": (systems.PERCO_ROWS, systems.DBOS),
}
LARGEST_FILES: Final = 100_000  # documents of a folder
FILES_BUILD_S: Final = 200.0  # a build of so many files may take so long: it is made again in several steps
NO_KILLS: Final = 1_000_000  # documents: no build of so many is killed


@dataclass(slots=True)
class Measured:
    """The sides, by (system, documents); `again`: those of perco with the fewest documents, measured in turns with the
    one that has the most."""

    sides: dict[tuple[str, int], Side] = field(default_factory=dict)
    again: dict[str, Side] = field(default_factory=dict)

    def largest(self, key: str) -> Side | None:
        """The side of a system with the most documents that were edited."""
        sides = [side for (name, _), side in self.sides.items() if name == key and side.found.rounds]
        return max(sides, key=lambda side: side.documents, default=None)

    def common(self, mine: System, theirs: System) -> tuple[Side, Side] | None:
        """Both systems with the most documents that both had."""
        sizes = [size for key, size in self.sides if key == mine.key and (theirs.key, size) in self.sides]
        for size in sorted(sizes, reverse=True):
            pair = self.sides[mine.key, size], self.sides[theirs.key, size]
            if 0 < len(pair[0].found.rounds) == len(pair[1].found.rounds):
                return pair
        return None


def main(run: Run) -> None:
    report = Report("derive", "power")
    present, versions = _present(run)
    facts = run.machine("power (every commit is synced)", versions)
    run.say(
        f"A reader looks every {1000 * POLL_S:g} ms, so each time may be too long by that, and by the time of one look."
    )
    with run.scratch() as folder:
        measured = _all(run, folder, present)
    _tables(run, measured)
    _judge(run, report, measured)
    _draw(run, measured)
    run.finish(report, facts)


def _present(run: Run) -> tuple[list[System], dict[str, str]]:
    """The systems that can be installed, and their versions."""
    present, versions, left_out = [], {}, set()
    for system in systems.SYSTEMS:
        try:
            if system.peer and system.peer not in versions and system.peer not in left_out:
                versions[system.peer] = systems.version_of_peer(system.peer)
        except LeftOutError as error:
            left_out.add(system.peer)
            run.say(f"{system.peer} is left out: {error}\n")
        if system.peer not in left_out:
            present.append(system)
    return present, versions


# ------------------------------------------------------------------ measuring


def _all(run: Run, folder: Path, present: Sequence[System]) -> Measured:
    sizes = QUICK_SIZES if run.quick else SIZES
    kills = QUICK_KILLS if run.quick else KILLS
    measured = Measured()
    for documents in sizes:
        here = [
            Side(system, documents, folder, _limit_s(run)) for system in present if _fits(system, documents, measured)
        ]
        for side in here:
            side.step("cold build", side.build)
            _tell(run, side)
        last = [side for side in here if not side.system.peer and documents == _largest(side.system, sizes)]
        again = [Side(side.system, sizes[0], folder / "again", _limit_s(run)) for side in last]
        for side in again:
            side.step("cold build", side.build)
        _rounds(run, [*here, *again])
        for side in here:
            if not side.system.told:  # else it is the same program as live
                side.step("changed function", side.change)
            if documents < NO_KILLS and not side.system.told:
                side.step("kill -9 in the build", side.kill_build)
            if documents == sizes[0] and not side.system.told:
                side.step("kill -9 in an edit", partial(side.kill_edits, kills))
            _tell(run, side, done=True)
            side.remove()
        measured.sides.update({(side.system.key, documents): side for side in here})
        measured.again.update({side.system.key: side for side in again})
    return measured


def _limit_s(run: Run) -> float:
    return QUICK_LIMIT_S if run.quick else LIMIT_S


def _largest(system: System, sizes: Sequence[int]) -> int:
    return max(size for size in sizes if system.source == "rows" or size <= LARGEST_FILES)


def _fits(system: System, documents: int, measured: Measured) -> bool:
    """Whether a system has done all that it should with fewer documents, and may do it with so many in time."""
    if system.source == "files" and documents > LARGEST_FILES:
        return False
    fewer = [side for (key, size), side in measured.sides.items() if key == system.key and size < documents]
    if not fewer:
        return True
    before = fewer[-1]
    build = before.found.build
    if before.found.failed or build is None:
        return False
    most_s = min(before.limit_s, FILES_BUILD_S) if system.source == "files" else before.limit_s
    return build.seconds * documents / before.documents < most_s


def _rounds(run: Run, sides: Sequence[Side]) -> None:
    edits = QUICK_EDITS if run.quick else EDITS
    for turn in range(run.rounds):
        for side in sides if turn % 2 == 0 else reversed(sides):
            last = turn == run.rounds - 1
            side.step("edits and restarts", partial(side.round, edits, EDITS_S, last=last))


def _tell(run: Run, side: Side, *, done: bool = False) -> None:
    found = side.found
    what = "done" if done else "built"
    how = found.failed or "; ".join(f"after {step}: {how}" for step, how in found.unequal.items())
    if how or not done:
        took = "" if done or found.build is None else f" in {found.build.seconds:.1f} s"
        run.say(f"{side.documents:>9,} documents, {side.system.name}: {what}{took}{', but ' * bool(how)}{how}")


# ------------------------------------------------------------------ what comes out


def _tables(run: Run, measured: Measured) -> None:
    run.say("")
    sides = sorted(measured.sides.values(), key=lambda side: (side.documents, side.system.source))
    run.table(
        "an edit, after a restart, until a reader sees it; a restart, until an edit that was made meanwhile is seen",
        ("", "documents", "edit, p50 ms (least - most)", "p90 ms", "CPU, ms", "restart, s", "CPU, s"),
        [_edit_row(side) for side in sides if side.found.rounds],
    )
    run.table(
        "a cold build; another function, which changes all rows; a build after kill -9 in its middle",
        ("", "documents", "build, s", "CPU s", "MiB", "disk, MiB", "changed, s", "calls", "after the kill, s", "calls"),
        [_build_row(side) for side in sides if side.found.build is not None],
    )
    run.table(
        "is the derived table that of the batch computation? After every build, restart, change and kill -9",
        ("", "documents", "compared", "killed", "equal"),
        [
            (side.system.name, f"{side.documents:,}", side.found.compared, side.found.killed, _verdict(side))
            for side in sides
        ],
    )


def _verdict(side: Side) -> str:
    if side.found.unequal:
        return "NOT after " + ", ".join(side.found.unequal)
    return "always" + (f", but {side.found.failed}" if side.found.failed else "")


def _edit_row(side: Side) -> list[object]:
    rounds = side.found.rounds
    every = [ms for each in rounds for ms in each.edits_ms]
    return [
        side.system.name,
        f"{side.documents:,}",
        _edit_ms(side),
        f"{percentile(every, 0.9):.1f}",
        f"{median(each.edit_cpu_ms for each in rounds):.1f}",
        f"{_restart_s(side).median:.2f}",
        f"{median(each.restart.cpu_s for each in rounds):.1f}",
    ]


def _build_row(side: Side) -> list[object]:
    found = side.found
    build = found.build
    assert build is not None
    return [
        side.system.name,
        f"{side.documents:,}",
        f"{build.seconds:.1f}",
        f"{build.cpu_s:.1f}",
        f"{build.peak_mib:.0f}",
        f"{found.disk_mib:.0f}",
        *_of(found.changed),
        *_of(found.killed_build),
    ]


def _of(cost: Cost | None) -> tuple[str, str]:
    if cost is None:
        return "", ""
    return f"{cost.seconds:.1f}", "" if cost.calls is None else f"{cost.calls:,}"


def _edit_ms(side: Side) -> Cell:
    return Cell(tuple(each.edit_ms for each in side.found.rounds))


def _restart_s(side: Side) -> Cell:
    return Cell(tuple(each.restart.seconds for each in side.found.rounds))


def _judge(run: Run, report: Report, measured: Measured) -> None:
    for (key, documents), side in measured.sides.items():
        found, of = side.found, f"{key}_{documents}"
        report.figures[f"{of}_unequal"] = len(found.unequal)
        if found.build is not None:
            report.figures |= {f"{of}_build_s": found.build.seconds, f"{of}_build_cpu_s": found.build.cpu_s}
            report.figures |= {f"{of}_peak_mib": found.build.peak_mib, f"{of}_disk_mib": found.disk_mib}
        if found.changed is not None:
            report.figures[f"{of}_changed_s"] = found.changed.seconds
        if found.rounds:
            report.figures |= {f"{of}_edit_ms": _edit_ms(side).median, f"{of}_restart_s": _restart_s(side).median}
            report.figures[f"{of}_edit_cpu_ms"] = median(each.edit_cpu_ms for each in found.rounds)
    for key, small in measured.again.items():
        large = measured.largest(key)
        if large is None or len(large.found.rounds) != len(small.found.rounds):
            continue
        name = "" if key == systems.PERCO_ROWS.key else "_files"
        edit, restart = _edit_ms(large).of(_edit_ms(small)), _restart_s(large).of(_restart_s(small))
        report.ratio(f"edit{name}_large_vs_small", edit)
        report.ratio(f"restart{name}_large_vs_small", restart)
        report.bars.append((f"edit{name}_large_vs_small", edit, "at most", SAME_MOST))
        if not name:  # a folder has to be looked through after a restart
            report.bars.append((f"restart{name}_large_vs_small", restart, "at most", SAME_MOST))
    for name, (mine, theirs) in RIVALS.items():
        pair = measured.common(mine, theirs)
        if pair is None:
            continue
        ours, other = (_edit_ms(side) for side in pair)
        report.ratio(f"edit_vs_{name}", other.of(ours), at_least=AHEAD_LEAST)
        run.say(f"edit_vs_{name}: {theirs.name} over {mine.name}, {pair[0].documents:,} documents")
    mine_unequal = sum(len(side.found.unequal) for (key, _), side in measured.sides.items() if key.startswith("perco"))
    report.bars.append(("steps after which perco's table is not the batch result", mine_unequal, "at most", 0))


def _draw(run: Run, measured: Measured) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharex=True)
    for system in systems.SYSTEMS:
        sides = [side for (key, _), side in measured.sides.items() if key == system.key and side.found.rounds]
        if not sides:
            continue
        style = {"marker": "o", "linestyle": "-" if system.source == "files" else "--", "label": system.name}
        sizes = [side.documents for side in sides]
        axes[0].plot(sizes, [_edit_ms(side).median for side in sides], **style)
        axes[1].plot(sizes, [_restart_s(side).median for side in sides], **style)
    axes[0].set_ylabel("an edit until it is seen, ms")
    axes[1].set_ylabel("a restart until it is seen, s")
    for each in axes:
        each.set(xscale="log", yscale="log", xlabel="documents")
        each.grid(True, which="both", alpha=0.3)
    axes[0].legend(fontsize=8)
    run.figure(figure, "derive")
    pyplot.close(figure)
