"""Hints of several processes about one row, in any order of their messages (N7)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from perco.bigtable import hints
from perco.bigtable.address import Place
from perco.bigtable.chunks import ReadCell
from perco.bigtable.hints import Hint, Hints, wants_hint
from perco.bigtable.keys import row_key
from perco.bigtable.options import BigtableOptions
from perco.storage import ABSENT, LOCK, NOTIFY, PENDING, PRESENT, TS_MAX, Mutation

_OPTIONS = BigtableOptions(call_s=2.0, late_s=1.0)
_LIFE = _OPTIONS.call_s + _OPTIONS.late_s
_KEY = row_key("t", b"r")


class World:
    """One row, its hints, and messages on their way to either. Time passes between the steps."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now, self.clock = random.Random(seed), 0.0, 0
        self.cells: dict[tuple[str, int], None] = {}
        self.hints: dict[Hint, bytes] = {}
        self.flying: list[tuple[float, Any]] = []  # until when, and what happens on arrival
        self.tasks: list[Iterator[None]] = []
        self.done = {"put": 0, "commit": 0, "removed": 0, "replaced": 0, "refused": 0}

    def next_ts(self) -> int:
        self.clock += 1
        return self.clock

    def send(self, act: Any) -> None:
        self.flying.append((self.now + _LIFE, act))

    def apply(self, mutation: Mutation) -> bool:
        _, checks, writes = mutation.rows[0]
        for kind, group, _, low, high in checks:
            if any(g == group and low <= ts <= high for g, ts in self.cells) != (kind == PRESENT):
                self.done["refused"] += 1
                return False
        for group, _, ts, value in writes:
            if value is None:
                self.cells.pop((group, ts), None)
            else:
                self.cells[group, ts] = None
        return True

    def _call(self, request: Any) -> None:
        for mutation in request.mutations:
            if mutation.set_cell.family_name:
                cell = mutation.set_cell
                self.hints[cell.column_qualifier, cell.timestamp_micros // 1000] = cell.value
            else:
                name, within = mutation.delete_from_column.column_qualifier, mutation.delete_from_column.time_range
                for stamp in range(within.start_timestamp_micros // 1000, within.end_timestamp_micros // 1000):
                    if self.hints.pop((name, stamp), None) is not None:
                        self.done["removed"] += 1

    # ------------------------------------------------------------ what processes do, step by step

    def writer(self, process: Hints, lock_first: bool) -> Iterator[None]:
        """Puts a notify cell: by itself, or in place of a lock. The answer may be lost."""
        ts = self.next_ts()
        if lock_first:
            if not self.apply(Mutation("t", [(b"r", [(ABSENT, LOCK, 1, 0, TS_MAX)], [(LOCK, 1, ts, b"")])])):
                return
            checks: list[Any] = [(PRESENT, LOCK, 1, ts, ts)]
            writes: list[Any] = [(LOCK, 1, ts, None), (NOTIFY, 1, self.next_ts(), b"")]
        else:
            checks, writes = [], [(self.rng.choice((NOTIFY, PENDING)), 1, ts, b"")]
        mutation = Mutation("t", [(b"r", checks, writes)])
        began = self.now
        yield
        assert wants_hint(mutation)
        stamp, call = process.begin(mutation)
        self._call(call)
        yield
        if self.now > began + _OPTIONS.call_s:
            process.end(stamp, answered=True)  # too late to send it
            return
        arrived = []

        def arrive() -> None:
            arrived.append(self.apply(mutation))
            self.done["commit" if lock_first else "put"] += arrived[0]

        self.flying.append((began + _LIFE, arrive))
        while not arrived and self.now < began + _OPTIONS.call_s:
            yield
        process.end(stamp, answered=bool(arrived) and self.rng.random() < 0.7)

    def mover(self) -> Iterator[None]:
        """Replaces a pending cell by a notify cell, as the commit of a signal does."""
        waiting = [ts for group, ts in self.cells if group == PENDING]
        if not waiting:
            return
        ts = self.rng.choice(waiting)
        mutation = Mutation(
            "t", [(b"r", [(PRESENT, PENDING, 1, ts, ts)], [(PENDING, 1, ts, None), (NOTIFY, 1, self.next_ts(), b"")])]
        )
        assert not wants_hint(mutation)
        self.send(lambda: self.apply(mutation))
        yield

    def remover(self) -> Iterator[None]:
        """Removes everything that waits now, and perhaps the locks."""
        whole = self.rng.random() < 0.5
        for group, ts in list(self.cells):
            if group != LOCK or whole:
                self.apply(Mutation("t", [(b"r", [], [(group, 1, ts, None)])]))
        yield

    def scanner(self, process: Hints) -> Iterator[None]:
        cells = [ReadCell("p", name, 1000 * stamp, value) for (name, stamp), value in sorted(self.hints.items())]
        if not cells:
            return
        removable = {_KEY: process.removable(cells)}
        yield
        marked = {_KEY} if self.cells else set()
        yield
        needless = process.needless(removable, marked)
        if not needless:
            return
        if marked:
            self._call(process.replacement(_KEY))
            self.done["replaced"] += 1
            yield
        removal = process.removal(_KEY, needless[_KEY])
        self.send(lambda: self._call(removal))

    # ------------------------------------------------------------ a run

    def run(self, steps: int) -> None:
        rng = self.rng
        processes = [Hints(Place("bigtable://p/i"), _OPTIONS) for _ in range(3)]
        for _ in range(steps):
            self.now += rng.choice((0.0, 0.01, 0.1, 0.5))
            while due := [each for each in self.flying if each[0] <= self.now]:
                self.flying.remove(due[0])  # it is lost
            if self.flying and rng.random() < 0.4:
                self.flying.pop(rng.randrange(len(self.flying)))[1]()
            elif self.tasks and rng.random() < 0.7:
                task = rng.choice(self.tasks)
                if next(task, task) is task:
                    self.tasks.remove(task)
            elif len(self.tasks) < 8:
                process = rng.choice(processes)
                kinds = [
                    *(self.writer(process, True), self.writer(process, False), self.mover(), self.remover()),
                    *(self.scanner(process), self.scanner(process)),
                ]
                self.tasks.append(rng.choice(kinds))
            if any(group != LOCK for group, _ in self.cells):
                assert self.hints, "N7: a row that has such a cell has a hint"


def runs(monkeypatch: pytest.MonkeyPatch, seeds: range) -> dict[str, int]:
    total: dict[str, int] = {}
    for seed in seeds:
        world = World(seed)
        monkeypatch.setattr(trio, "current_time", lambda world=world: world.now)
        world.run(300)
        for what, count in world.done.items():
            total[what] = total.get(what, 0) + count
    return total


def test_a_row_that_has_something_always_has_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:  # N7
    monkeypatch.setattr(hints, "_MANY", 2)
    total = runs(monkeypatch, range(300))
    assert all(count > 100 for count in total.values()), total


@pytest.mark.parametrize(
    ("what", "broken"),
    [
        ("replacement", lambda self, key: self._writing(b"elsewhere", 1, b"")),
        ("_has_ended", lambda self, hint, now: True),
        ("_has_ended", lambda self, hint, now: hint[0] != self._name or hint[1] not in self._flying),
        ("removable", lambda self, cells: [(each.name, each.micros // 1000) for each in cells]),
    ],
    ids=["no new hint", "nothing flies", "others have ended", "all replace locks"],
)
def test_without_each_rule_one_is_missing(monkeypatch: pytest.MonkeyPatch, what: str, broken: Any) -> None:  # N7
    monkeypatch.setattr(hints, "_MANY", 2)
    monkeypatch.setattr(Hints, what, broken)
    if what == "replacement":
        monkeypatch.setattr(World, "_call", _here_only(World._call))
    with pytest.raises(AssertionError, match="has a hint"):
        runs(monkeypatch, range(300))


def _here_only(plain: Any) -> Any:
    def call(self: World, request: Any) -> None:
        if request.row_key != b"elsewhere":
            plain(self, request)

    return call
