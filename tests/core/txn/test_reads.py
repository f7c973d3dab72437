"""What a serializable transaction remembers of its reads, and what it makes of them when it looks again (T14)."""

from __future__ import annotations

import pytest

from perco.errors import TooLarge
from perco.protocol.commit import Commit, State
from perco.protocol.mutations import Header, Intent
from perco.protocol.reads import UNDECIDED, Range, Reads, version_at
from perco.protocol.records import PUT, Cellref
from perco.storage import APPLIED

A = Cellref("t", b"a", 1 << 16)
FATES = {3: 6, 4: 0, 8: 20}


@pytest.mark.parametrize(
    ("locks", "writes", "version"),
    [
        ([], [], 0),
        ([], [(7, b"")], 7),
        ([(5, b"")], [(2, b"")], 2),  # its own lock
        ([(2, b"")], [], UNDECIDED),
        ([(2, b"")], [(1, b"")], UNDECIDED),
        ([(3, b"")], [(2, b"")], 6),  # committed at 6: its record will stand there
        ([(4, b"")], [(2, b"")], 2),  # aborted
        ([(8, b"")], [(2, b"")], 2),  # committed above the timestamp at which it is read
    ],
)
def test_the_version_of_a_cell_at_a_timestamp(
    locks: list[tuple[int, bytes]], writes: list[tuple[int, bytes]], version: int
) -> None:  # T14
    assert version_at(10, 5, locks, writes, FATES.get) == version


def taken(rows: dict[bytes, int], *, reverse: bool = False) -> Range:
    one = Range("t", [1, 2], b"a", b"z", reverse=reverse)
    for row, ts in rows.items():
        one.took(row, [(1, ts), (2, 0)])
    return one


def test_a_range_covers_what_was_taken_and_no_more() -> None:  # T14
    one = Range("t", [1], b"a", b"z", reverse=False)
    assert one.first_page(9, 10) is None
    one.took(b"c", [(1, 5)])
    assert (one.low, one.high) == (b"a", b"c\x00")
    one.passed(b"m")
    assert (one.low, one.high) == (b"a", b"m")
    one.passed(None)
    assert (one.low, one.high) == (b"a", b"z")
    page = one.first_page(9, 10)
    assert page is not None
    assert (page.start, page.stop, page.reverse) == (b"a", b"z", False)
    assert {query.to_ts for query in page.queries} == {9}


@pytest.mark.parametrize("high", [b"z", None])
def test_backwards_it_covers_from_its_end(high: bytes | None) -> None:  # T14
    one = Range("t", [1], b"a", high, reverse=True)
    assert one.first_page(9, 10) is None
    one.took(b"c", [(1, 5)])
    assert (one.low, one.high) == (b"c", high)
    one.passed(None)
    page = one.first_page(9, 10)
    assert page is not None
    assert (page.start, page.stop, page.reverse) == (b"a", high, True)


def test_ranges_are_the_same_if_rows_and_versions_are() -> None:  # T14
    one = taken({b"b": 3, b"c": 4})
    assert one.same(taken({b"b": 3, b"bb": 0, b"c": 4})), "a row without a version is no row"
    for other in ({b"b": 3}, {b"b": 3, b"c": 5}, {b"b": 3, b"d": 4}, {b"bc": 3, b"c": 4}, {b"b": 3, b"bb": 1, b"c": 4}):
        assert not one.same(taken(other))


def test_every_cell_and_every_scan_counts_as_one() -> None:
    reads = Reads(3)
    for _ in range(5):
        reads.note("t", b"a", 1, 7)
    reads.note("t", b"a", 2, 7)
    reads.begin("t", [1], b"", None, reverse=False)
    with pytest.raises(TooLarge):
        reads.begin("t", [1], b"", None, reverse=False)


def serializable() -> Commit:
    commit = Commit(Header(5, A, 0, 0, "token"), [[Intent(*A, PUT, b"v")]], Reads(10))
    commit.prewrites()
    commit.prewrites_told([APPLIED])
    return commit


def test_a_commit_is_validated_between_the_draw_and_the_primary() -> None:  # T14
    commit = serializable()
    with pytest.raises(AssertionError):
        commit.validated()
    commit.drawn(9)
    assert commit.state is State.VALIDATE
    with pytest.raises(AssertionError):
        commit.primary_commit()
    commit.validated()
    assert commit.state is State.COMMIT


def test_a_commit_that_is_not_valid_lets_go() -> None:  # T7 T14
    commit = serializable()
    commit.drawn(9)
    commit.give_up()
    assert commit.state is State.RELEASE
    assert len(commit.releases()) == 1
