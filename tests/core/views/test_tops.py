"""The ends of an order, kept from change to change, are those of the order itself (V4)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from perco import views
from perco.views.aggregates import Ordered, Tally
from perco.views.tops import Delta, Entry, Kept, Top
from tests.core.views.test_aggregates import N, X


def entry(value: int, member: int) -> Entry:
    return Entry(b"%03d" % value, b"%02d" % member, b"%d" % value)


@given(st.randoms(use_true_random=False), st.integers(1, 3), st.booleans(), st.sampled_from([0.1, 0.5, 0.9]))
def test_an_end_of_an_order_follows_the_order(rng: random.Random, size: int, last: bool, leave: float) -> None:
    members: dict[int, Entry] = {}
    top = Top(size, last)
    for step in range(200):
        member = rng.randrange(40)
        if step > 60 and rng.random() < leave:
            members.pop(member, None)
        else:
            members[member] = entry(rng.randrange(10), member)
        top.change(b"%02d" % member, members.get(member))
        if top.is_short:
            top.fill(sorted(members.values(), reverse=last)[: top.room])
        assert top.best() == sorted(members.values(), reverse=last)[:size]
        assert len(top.entries) <= top.room


def test_it_is_filled_seldom() -> None:
    """A list is a few times as long as what is read of it, so most members that leave it are not missed."""
    rng = random.Random(1)
    members = {member: entry(rng.randrange(1000), member) for member in range(100)}
    top = Top(3, True)
    top.fill(sorted(members.values())[-top.room :])
    fills = 0
    for _ in range(1000):
        member = rng.randrange(100)
        members[member] = entry(rng.randrange(1000), member)
        top.change(b"%02d" % member, members[member])
        if top.is_short:
            top.fill(sorted(members.values())[-top.room :])
            fills += 1
        assert top.best() == sorted(members.values(), reverse=True)[:3]
    assert 0 < fills <= 20


def test_what_a_group_keeps_survives_storage() -> None:
    orders = [Ordered(N, first=1, last=2), Ordered(X, last=1)]
    kept = Kept.of(None, "n", [], orders)
    assert kept.pack() is None
    kept.tally.members = 2
    kept.tops["n", True].fill([entry(value, value) for value in range(8)])
    again = Kept.of(kept.pack(), "n", [], orders)
    assert again == kept
    assert again.tops["n", True].edge == (b"000", b"00")
    other = Kept.of(kept.pack(), "another shape", [], orders)
    assert (other.known, other.tally.members) == (False, 0)


@pytest.mark.parametrize(("there", "added", "listed"), [(3, 4, True), (999, 1, True), (999, 2, False)])
def test_deltas_list_changed_members_up_to_a_bound(there: int, added: int, listed: bool) -> None:
    first = Delta("n", Tally(1), {b"%04d" % number for number in range(there)})
    first.merge(Delta.unpack(Delta("n", Tally(2), {b"x%03d" % number for number in range(added)}).pack()))
    assert first.tally.members == 3
    assert (first.changed is not None) == listed
    first.merge(Delta("n", Tally(), {b"y"}))
    assert (first.changed is not None) == (listed and there + added < 1000)
    assert Delta.unpack(first.pack()) == first


def test_aggregates_of_one_column_are_one_order() -> None:
    assert views.largest(N, 3).last == 3
    assert views.smallest(N).first == 1
