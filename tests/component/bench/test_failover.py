"""The verdicts on an outage, on one that was made up."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.failover import AFTER_S, BEFORE_S, SERVERS, TABLETS, Found, Replies, _judged, _tell_options
from bench.harness import Pace, Report

RATE = 100.0


def judged(outage_s: float, surplus: float, tablets: int = TABLETS, pace: float = 1.0) -> Found:
    """Replies come at once; for some seconds those of some tablets do not, and then at `surplus` times the rate."""
    replies, count = Replies(), int(RATE * (BEFORE_S + AFTER_S))
    again = BEFORE_S + outage_s
    for i in range(count):
        at, tablet = i / RATE, i % TABLETS
        replies.arrived.append(at)
        away = tablet < tablets and at > BEFORE_S
        done = max(at, again + (at - BEFORE_S) / surplus) if away else at
        replies.answered.append((done + 0.001, (tablet, tablet)))
    paces = [(0.5 * i, pace) for i in range(int(2 * (BEFORE_S + AFTER_S)))]
    return _judged("made up", RATE, replies, 0.0, BEFORE_S, 0.5, paces)


def test_an_outage_that_nobody_notices() -> None:
    found = judged(0.0, 1000.0)
    assert found.gap < 0.3
    assert found.recovered <= 1.1
    assert found.drained < 0.5


def test_a_gap_is_as_long_as_it_was_and_its_backlog_takes_its_time() -> None:
    found = judged(3.0, 2.0)
    assert 3.0 <= found.gap < 3.3
    assert 3.2 <= found.recovered <= 5.0
    assert 5.0 <= found.drained <= 6.5  # 3 s of arrivals, at twice the rate, while more arrive


def test_one_tablet_of_many_is_enough() -> None:
    found = judged(4.0, 1000.0, tablets=1)
    assert 4.0 <= found.gap < 4.3
    assert found.recovered <= 1.1  # replies of the others are above 90 %


def test_who_never_comes_back() -> None:
    found = judged(10 * AFTER_S, 1000.0)
    assert found.gap == float("inf") or found.gap >= AFTER_S - 0.1
    assert found.recovered == found.drained == float("inf")


def test_a_bar_that_is_missed_on_slower_cores_is_void_and_no_other() -> None:
    assert not judged(10 * AFTER_S, 1000.0, pace=0.7).valid
    assert judged(10 * AFTER_S, 1000.0, pace=0.9).valid
    assert judged(0.0, 1000.0, pace=0.7).valid, "it kept all bars even so"


def test_the_pace_is_that_of_a_child_which_ends_with_it() -> None:
    with Pace() as pace:
        while len(found := pace.samples(0, math.inf)) < 2:
            os.sched_yield()
        assert all(took > 0 for _, took in found)
        assert found[0][0] < found[1][0] <= time.monotonic()
        assert pace.samples(found[1][0], math.inf)[0] == found[1]
    assert pace._child.returncode is not None


def test_the_options_that_the_client_runs_with_are_named_in_what_it_prints_and_in_the_docs() -> None:
    report, said = Report("failover", "power"), []
    run: Any = SimpleNamespace(say=said.append)
    _tell_options(run, report)
    told = "".join(said)
    assert f"perco serve STORE --processes {SERVERS}" in told
    page = (Path(__file__).parents[3] / "docs/benchmarks.md").read_text()
    for name, value in (("heartbeat_s", 0.5), ("silence_s", 3.0), ("patience_s", 60.0)):
        assert f"WireOptions({name}={value})" in told
        assert report.figures[f"option WireOptions.{name}"] == value
        assert f"{name}={value:g}" in page
    assert "RetryOptions(attempts=1000000)" in told
