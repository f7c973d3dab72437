"""Random histories: in the default mode they show write skew, in the other modes none. Each mutant dies (T14)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.testing.mutants_serializable import LOCKS, SERIALIZABLE
from tests.testing.serializable_runs import FAULTS, Mode, run, seeds_to_anomaly

ALLOWED = {"write skew", "G2 (anti-dependency cycle)"}


@pytest.mark.parametrize("faults", [False, True])
def test_the_default_mode_shows_write_skew_and_nothing_else(faults: bool) -> None:  # T14
    found: Counter[str] = Counter()
    for seed in range(12):
        report, _ = run(seed, "snapshot", faults=faults)
        found.update(anomaly.name for anomaly in report.anomalies)
    assert set(found) == ALLOWED
    assert found["write skew"] >= 12


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("mode", ["serializable", "locks", "mixed"])
def test_the_other_modes_show_none(mode: Mode, faults: bool) -> None:  # T14
    fired: Counter[object] = Counter()
    refused: Counter[str] = Counter()
    ways: Counter[str] = Counter()
    died: Counter[str] = Counter()
    for seed in range(60):
        report, one = run(seed, mode, faults=faults)
        assert report.ok, (seed, report.anomalies)
        fired += one.fired
        refused += one.refused
        ways += one.ways
        died += one.died
    assert set(fired) == (set(FAULTS) if faults else set())
    assert set(died) >= ({"prewrite", "commit"} if faults else set())
    assert refused["ReadConflict" if mode == "serializable" else "WriteConflict"] > 100
    assert min(ways[way] for way in ("get", "get_many", "row", "scan", "reverse", "limit")) > 50


def test_the_same_seed_is_the_same_run() -> None:
    first, again = (run(3, "serializable", faults=True)[1].recorder.transactions for _ in range(2))
    assert [one.line() for one in first] == [one.line() for one in again]


@pytest.mark.parametrize("name", SERIALIZABLE)
def test_a_mutant_of_the_serializable_mode_dies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:  # T14
    SERIALIZABLE[name](monkeypatch)
    assert seeds_to_anomaly("serializable", range(200)) is not None


@pytest.mark.parametrize("name", LOCKS)
def test_a_mutant_of_read_locks_dies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:  # T14
    LOCKS[name](monkeypatch)
    assert seeds_to_anomaly("mixed", range(200)) is not None
