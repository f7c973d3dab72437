"""Worker processes are woken one by one, and nothing waits for one that does not answer (N8)."""

from __future__ import annotations

import math
import random

import pytest

from perco.serve.wakes import ANSWER_S, TURN_S, Wakes


class Process:
    def __init__(self, name: str) -> None:
        self.name = name
        self.runs: frozenset[str] = frozenset()
        self.full, self.asked_at = False, math.inf

    def __repr__(self) -> str:
        return self.name


def made(*names: str, runs: str = "ab") -> tuple[Wakes[Process], list[Process]]:
    wakes: Wakes[Process] = Wakes()
    processes = [Process(name) for name in names]
    for process in processes:
        assert wakes.works(process, runs, 1.0) == []
    return wakes, processes


def test_one_is_woken_at_a_time_and_they_take_turns() -> None:
    wakes, (a, b, c) = made("a", "b", "c")
    first = wakes.notified(1.0)
    assert wakes.notified(1.0 + TURN_S / 2) == first, "changes that come together are found by one process"
    woken = [wakes.notified(1.0 + n * TURN_S)[0] for n in range(1, 7)]
    assert woken[:3] == woken[3:]
    assert set(woken) == {a, b, c}


def test_one_that_is_full_wakes_the_next_and_gets_no_turn() -> None:
    wakes, (a, b) = made("a", "b")
    [first] = wakes.notified(1.0)
    other = b if first is a else a
    assert wakes.looked(first, 1.0, full=True) == [other]
    assert wakes.notified(2.0) == wakes.notified(3.0) == [other]
    assert wakes.looked(first, 4.0, full=False) == []
    assert {wakes.notified(5.0 + n)[0] for n in range(2)} == {a, b}


def test_what_comes_when_all_are_full_wakes_the_first_that_has_room() -> None:
    wakes, (a, b) = made("a", "b")
    assert wakes.looked(a, 1.0, full=True) == [b]
    assert wakes.looked(b, 1.0, full=True) == []
    assert wakes.notified(1.0) == []
    assert wakes.looked(b, 2.0, full=False) == [b]
    assert wakes.looked(b, 3.0, full=False) == [], "once"


def test_who_made_a_change_looks_itself_if_it_has_room() -> None:
    wakes, (a, b) = made("a", "b")
    assert wakes.notified(1.0, by=a) == []
    assert a.asked_at == 1.0
    wakes.looked(a, 1.0, full=True)
    assert wakes.notified(1.0, by=a) == [b]
    stranger = Process("loader")
    assert wakes.notified(1.0, by=stranger) == [b]


def test_one_of_each_group_is_woken() -> None:
    wakes, (a,) = made("a")
    other, third = Process("other"), Process("third")
    for process in (other, third):
        wakes.works(process, "b", 1.0)
    woken = wakes.notified(1.0)
    assert a in woken
    assert len(woken) == 2
    assert set(wakes.notified(1.0, by=a)) < {other, third}


def test_another_is_woken_instead_of_one_that_does_not_answer() -> None:
    wakes, processes = made("a", "b", "c")
    assert wakes.deadline == math.inf
    [first] = wakes.notified(1.0)
    assert wakes.deadline == 1.0 + ANSWER_S
    assert wakes.overdue(1.0 + ANSWER_S / 2) == []
    [second] = wakes.overdue(1.0 + ANSWER_S)
    wakes.heard(second)
    assert second is not first
    assert wakes.deadline == math.inf
    assert wakes.overdue(99.0) == []
    assert len(processes) == 3


def test_if_one_alone_does_not_answer_it_is_woken_as_soon_as_it_does() -> None:
    wakes, (a,) = made("a")
    assert wakes.notified(1.0) == [a]
    assert wakes.overdue(2.0) == []
    assert wakes.looked(a, 3.0, full=False) == [a]


def test_when_a_process_ends_another_looks_at_what_it_left() -> None:
    wakes, (a, b) = made("a", "b")
    assert wakes.works(a, "", 1.0) == [b]
    assert wakes.works(b, "", 1.0) == []
    assert wakes.notified(1.0) == []
    assert wakes.works(a, "b", 1.0) == []
    assert wakes.notified(1.0) == [a]
    assert wakes.works(a, "ab", 1.0) == [], "it looks itself when it may run others"


@pytest.mark.parametrize("seed", range(100))
def test_no_change_is_forgotten(seed: int) -> None:
    """After any steps: a process that has room and answers is told of changes since it last looked."""
    rng = random.Random(seed)
    wakes, processes = made("a", "b", "c")
    waits = False  # a change has come that nobody has looked for since
    told: set[Process] = set()
    now = 1.0
    for _ in range(200):
        now += rng.random() * 2 * TURN_S
        process = rng.choice(processes)
        match rng.randrange(4):
            case 0:
                waits, told = True, set(wakes.notified(now))
            case 1 if process in told:
                waits = False
                told = set(wakes.looked(process, now, full=False))
            case 2:
                told |= set(wakes.looked(process, now, full=rng.random() < 0.5))
            case _:
                told |= set(wakes.overdue(now))
        assert not waits or told or all(process.full for process in processes)
    for process in processes:
        told |= set(wakes.looked(process, now, full=False))
    assert told or not waits
