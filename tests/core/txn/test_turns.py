"""Lines: who goes next, and that somebody always does."""

from __future__ import annotations

import random

import pytest

from perco.txn.turns import _CELLS_MAX, Lines, Ticket, Where


def cell(name: str) -> Where:
    return ("t", name.encode(), 1)


def in_line(lines: Lines, names: str) -> Ticket:
    ticket = lines.ticket()
    lines.met(ticket, [cell(name) for name in names])
    lines.join(ticket)
    return ticket


def test_one_at_a_time_in_the_order_in_which_they_met() -> None:  # W2
    lines = Lines()
    first, second, third = (in_line(lines, "a") for _ in range(3))
    assert [ticket.has_turn for ticket in (first, second, third)] == [True, False, False]
    assert lines.leave(first) == [second]
    assert second.has_turn
    assert lines.leave(third) == []
    assert lines.leave(second) == []
    assert len(lines) == 0
    assert lines.counters.turns == 2


def test_who_wants_other_cells_does_not_wait() -> None:
    lines = Lines()
    assert in_line(lines, "a").has_turn
    assert in_line(lines, "b").has_turn
    assert in_line(lines, "cd").has_turn


def test_it_goes_when_it_is_the_first_in_all_its_lines() -> None:
    lines = Lines()
    a, b, both = in_line(lines, "a"), in_line(lines, "b"), in_line(lines, "ab")
    assert lines.leave(a) == []
    assert lines.leave(b) == [both]
    after = in_line(lines, "b")
    assert lines.leave(both) == [after]


def test_an_older_one_that_comes_back_stands_before_the_younger_but_not_before_who_has_the_turn() -> None:  # W2
    lines = Lines()
    old = in_line(lines, "a")
    has, young = in_line(lines, "ab"), in_line(lines, "a")
    assert lines.leave(old) == [has]
    lines.met(old, [cell("c")])
    assert not lines.join(old)
    assert lines.leave(has) == [old]
    assert lines.leave(old) == [young]


def test_an_older_one_takes_the_head_from_a_younger_that_waits_elsewhere() -> None:  # W2: else they wait for each other
    lines = Lines()
    old = lines.ticket()
    running = in_line(lines, "a")
    young = in_line(lines, "ab")  # the first at b, the second at a
    lines.met(old, [cell("a"), cell("b")])
    assert not lines.join(old)
    assert lines.leave(running) == [old]
    assert lines.leave(old) == [young]


def test_to_leave_twice_is_to_leave_once() -> None:  # W3
    lines = Lines()
    first, second = in_line(lines, "a"), in_line(lines, "a")
    assert lines.leave(first) == [second]
    assert lines.leave(first) == []
    assert second.has_turn
    assert lines.leave(lines.ticket()) == []


def test_a_cell_that_is_met_twice_is_one_line() -> None:
    lines = Lines()
    ticket = in_line(lines, "aa")
    assert len(lines) == 1
    lines.leave(ticket)
    assert len(lines) == 0


def test_one_stands_in_so_many_lines_at_most_the_newest() -> None:
    lines = Lines()
    ticket = lines.ticket()
    cells = [cell(f"{i:03}") for i in range(_CELLS_MAX + 10)]
    lines.met(ticket, cells)
    lines.met(ticket, cells[10:11])  # again: it is the newest now
    lines.met(ticket, [cell("new")])
    assert len(ticket.cells) == _CELLS_MAX
    assert list(ticket.cells)[-2:] == [cells[10], cell("new")]
    assert cells[11] not in ticket.cells


@pytest.mark.parametrize("seed", range(30))
def test_whatever_they_do_somebody_goes_and_nobody_is_passed_by_a_younger(seed: int) -> None:  # W2
    rng = random.Random(seed)
    lines = Lines()
    out = [lines.ticket() for _ in range(8)]
    standing: list[Ticket] = []
    for _ in range(400):
        if out and rng.random() < 0.5:
            ticket = out.pop(rng.randrange(len(out)))
            lines.met(ticket, [cell(rng.choice("abcde")) for _ in range(rng.randint(1, 2))])
            if rng.random() < 0.2:
                ticket.cells.pop(next(iter(ticket.cells)))
            running = [other for other in standing if other.has_turn]
            before = [o for o in standing if o.cells.keys() & ticket.cells.keys()]
            alone = not [o for o in before if o in running or o.number < ticket.number]
            assert lines.join(ticket) == alone
            standing.append(ticket)
        elif standing:
            ticket = standing.pop(rng.randrange(len(standing)))
            had = {other.number for other in standing if other.has_turn}
            called = lines.leave(ticket)
            assert {other.number for other in standing if other.has_turn} == had | {other.number for other in called}
            out.append(ticket)
        going = [ticket for ticket in standing if ticket.has_turn]
        assert going or not standing, "nobody would ever be called"
        assert sum(len(ticket.cells) for ticket in going) == len({c for ticket in going for c in ticket.cells})
        for ticket in standing:
            rivals = [o for o in standing if o is not ticket and o.cells.keys() & ticket.cells.keys()]
            assert ticket.has_turn or any(o.has_turn or o.number < ticket.number for o in rivals)
    for ticket in list(standing):
        lines.leave(ticket)
    assert len(lines) == 0
