"""The scanners' benchmark of worker processes: their notes and counts are right, and are put together correctly."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

import perco
from bench import hot, worker_processes
from bench.harness import Report
from bench.scanners import _in_processes
from bench.worker_processes import SCHEMA, SUMS, Drained, Notes, body, gathered


def test_hot_rows_lie_in_three_ranges_and_others_anywhere() -> None:
    rows = hot.dirty(300, random.Random(1))
    size = hot.KEYS * hot.HOT_SHARE
    gaps = [after - before for before, after in itertools.pairwise(rows)]
    assert len(set(rows)) == 300
    assert rows == sorted(rows)
    assert sum(gap > size for gap in gaps) == hot.HOT_RANGES - 1
    assert rows[-1] < hot.KEYS
    uniform = hot.dirty(300, random.Random(1), hot=False)
    assert len({row * hot.TABLETS // hot.KEYS for row in uniform}) == hot.TABLETS
    assert len(hot.slow(rows, random.Random(1))) == 300 // hot.ONE_SLOW_IN


def test_numbers_are_keys_in_the_same_order() -> None:
    numbers = [0, 1, 255, 256, hot.KEYS - 1]
    keys = [hot.key(number) for number in numbers]
    assert keys == sorted(keys)
    assert [hot.number(key) for key in keys] == numbers


async def test_a_worker_notes_every_row_that_it_hands_over(autojump_clock: trio.testing.MockClock) -> None:
    rows = hot.dirty(60, random.Random(2))
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            for row in rows:
                txn.set(body, hot.key(row), 5)
        async with db.worker(options=perco.WorkerOptions(concurrency=8)) as handle:
            notes = Notes(handle)
            await db.wait_idle()
            told = notes.told()
    assert sorted({row for _, row in told["claims"]}) == rows
    assert told["runs"] == len(rows)
    counters = handle.scanner_statistics()
    assert len(told["claims"]) == sum(each.claims for each in counters)
    assert told["tours"] == sum(each.tours for each in counters) > 0


def test_what_processes_told_is_put_together_from_the_moment_when_the_first_began() -> None:
    one: dict[str, Any] = {**dict.fromkeys(SUMS, 1), "runs": 2, "claims": [(10.5, 7), (12.0, 9)]}
    two: dict[str, Any] = {**dict.fromkeys(SUMS, 2), "runs": 1, "claims": [(11.0, 8), (11.5, 9)]}
    found = gathered([one, two], [10.0, 10.25], 13.0, 3)
    assert found.seconds == 3.0
    assert found.begun == [0.0, 0.25]
    assert found.claims == [(0.5, 0, 7), (1.0, 1, 8), (1.5, 1, 9), (2.0, 0, 9)]
    assert (found.runs, found.asked, found.refused, found.teleports, found.met, found.tours) == (3,) * 6
    assert found.twice == 1, "row 9"
    assert found.refused_share == 1.0


@pytest.mark.parametrize("refused", [1, 3])
def test_the_share_that_was_refused_is_judged_where_they_teleport(
    refused: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    drained: list[tuple[bool, int]] = []

    class Made:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def drain(self, rows: int, *, teleport: bool, seed: int) -> Drained:
            drained.append((teleport, seed))
            claims = [(0.1 * i, 0, i) for i in range(17)]
            return Drained(1.0, 17, 17, 5 * teleport, 6, 20, refused if teleport else 10, 1, [0.0], claims)

    monkeypatch.setattr(worker_processes, "processes", lambda folder: Made())
    run: Any = SimpleNamespace(rounds=3, scratch=lambda: _In(tmp_path), say=lambda text: None, table=lambda *told: None)
    report = Report("scanners", "")
    _in_processes(run, report)
    assert sorted(drained) == [(teleport, seed) for teleport in (False, True) for seed in (1, 2, 3)]
    assert report.figures["refused_share_processes"] == refused / 20
    assert report.figures["refused_share_processes_off"] == 0.5
    assert report.figures["teleports_processes"] == 5
    assert report.figures["teleports_processes_off"] == 0
    assert report.figures["met_processes"] == 6
    assert report.figures["drain_s_processes"] == report.figures["drain_s_processes_off"] == 1.0
    [(_, value, how, bar)] = report.bars
    assert (how, value <= bar) == ("at most", refused == 1)


class _In:
    """A folder, while a block lasts."""

    def __init__(self, path: Any) -> None:
        self._path = path

    def __enter__(self) -> Any:
        return self._path

    def __exit__(self, *_: object) -> None:
        pass
