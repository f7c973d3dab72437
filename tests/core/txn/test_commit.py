"""The commit machine, told by hand what came of its steps."""

from __future__ import annotations

import pytest

from perco.errors import Corruption, StoreFull, TabletSplit, Unavailable
from perco.protocol.commit import (
    FLOOR_CHECK,
    LOCK_CHECK,
    MARKER_CHECK,
    SHARED_CHECK,
    TRACE_CHECK,
    WRITE_CHECK,
    Commit,
    State,
)
from perco.protocol.mutations import Header, Intent, prewrite
from perco.protocol.records import PUT, Cellref, unpack_lock
from perco.storage import APPLIED, LOCK, WRITE, Failed, Mutation, NoReply, Refused
from perco.txn.chain import Settling

START, COMMITTED_AT = 5, 9
A, B, C = (Cellref("t", row, 1 << 16) for row in (b"a", b"b", b"c"))
LOST = NoReply("lost")
REFUSED = Refused(0, LOCK_CHECK)
FULL = Failed(StoreFull("here", "full"))


def intent(cell: Cellref, value: bytes = b"v") -> Intent:
    return Intent(*cell, PUT, value)


def begin(*parts: list[Cellref]) -> Commit:
    wanted = parts or ([A], [B], [C])
    header = Header(START, wanted[0][0], 0, 0, "token")
    return Commit(header, [[intent(cell) for cell in part] for part in wanted])


def held() -> Commit:
    commit = begin()
    commit.prewrites()
    commit.prewrites_told([APPLIED] * 3)
    return commit


def sent(times: int = 0) -> Commit:
    """A commit whose primary's request got no reply."""
    commit = held()
    commit.drawn(COMMITTED_AT)
    commit.primary_commit()
    commit.primary_told(LOST)
    return commit


def rows_of(mutations: list[Mutation]) -> list[bytes]:
    return [row for mutation in mutations for row, _, _ in mutation.rows]


def puts(mutation: Mutation, group: str) -> list[tuple[bytes, int]]:
    """(row, timestamp) of what a mutation puts into a group."""
    return [(row, ts) for row, _, writes in mutation.rows for g, _, ts, value in writes if g == group and value]


def test_it_goes_from_prewrites_over_a_timestamp_to_the_primary() -> None:  # T1 T2 T3
    commit = begin()
    assert commit.state is State.PREWRITE
    assert rows_of(commit.prewrites()) == [b"a", b"b", b"c"]
    commit.prewrites_told([APPLIED] * 3)
    assert commit.state is State.DRAW
    commit.drawn(COMMITTED_AT)
    assert commit.state is State.COMMIT
    assert puts(commit.primary_commit(), WRITE) == [(b"a", COMMITTED_AT)]
    commit.primary_told(APPLIED)
    assert commit.state is State.COMMITTED
    assert [puts(mutation, WRITE) for mutation in commit.secondaries()] == [
        [(b"b", COMMITTED_AT)],
        [(b"c", COMMITTED_AT)],
    ]


def test_the_primary_is_the_first_cell_and_named_in_every_lock() -> None:  # T12
    commit = begin()
    for mutation in commit.prewrites():
        for _, _, writes in mutation.rows:
            [lock] = [unpack_lock(value) for group, _, _, value in writes if group == LOCK and value]
            assert lock.primary == A


def test_a_commit_whose_header_names_another_primary_cannot_be_made() -> None:  # T12
    with pytest.raises(AssertionError, match="T12"):
        Commit(Header(START, B, 0, 0, "token"), [[intent(A)], [intent(B)]])


def test_the_primary_stays_when_prewrites_are_sent_again() -> None:  # T12
    commit = begin()
    commit.prewrites()
    commit.prewrites_told([LOST, APPLIED, LOST])
    primaries = {
        unpack_lock(value).primary
        for mutation in commit.prewrites()
        for _, _, writes in mutation.rows
        for group, _, _, value in writes
        if group == LOCK and value
    }
    assert primaries == {A}


def test_no_timestamp_is_drawn_before_every_prewrite_is_held() -> None:  # T2
    for verdicts in ([APPLIED, APPLIED, LOST], [LOST, APPLIED, APPLIED], [APPLIED, REFUSED, APPLIED]):
        commit = begin()
        commit.prewrites()
        commit.prewrites_told(verdicts)
        assert commit.state is not State.DRAW
        with pytest.raises(AssertionError):
            commit.drawn(COMMITTED_AT)


def test_a_commit_timestamp_is_above_the_start() -> None:  # T2
    with pytest.raises(AssertionError):
        held().drawn(START)


def test_no_secondary_before_the_primary() -> None:  # T3
    commit = held()
    commit.drawn(COMMITTED_AT)
    with pytest.raises(AssertionError, match="T3"):
        commit.secondaries()
    commit.primary_told(LOST)
    with pytest.raises(AssertionError, match="T3"):
        commit.secondaries()


def test_a_lost_reply_to_a_prewrite_is_asked_again_and_nothing_else_is() -> None:  # T4 T6
    commit = begin()
    commit.prewrites()
    commit.prewrites_told([APPLIED, LOST, APPLIED])
    assert commit.state is State.PREWRITE
    assert rows_of(commit.prewrites()) == [b"b"]


def test_what_may_have_been_locked_is_let_go_of_though_the_next_try_failed() -> None:  # T4 P3
    commit = begin()
    commit.prewrites()
    commit.prewrites_told([APPLIED, LOST, APPLIED])
    assert len(commit.prewrites()) == 1
    commit.prewrites_told([Failed(TabletSplit("t"))])
    assert commit.state is State.RELEASE
    assert rows_of(commit.releases()) == [b"a", b"b", b"c"]
    again = begin()
    again.prewrites()
    again.prewrites_told([APPLIED, Failed(TabletSplit("t")), APPLIED])
    assert rows_of(again.releases()) == [b"a", b"c"]


def test_groups_that_lie_in_two_tablets_by_now_are_settled_by_cell() -> None:  # P3
    commit = begin([A], [B, C])
    split = Failed(TabletSplit("t"))
    for verdict, by_cell in ((split, 2), (REFUSED, 2), (FULL, 0), (LOST, 0), (APPLIED, 0)):
        settling = Settling(
            commit._parts, lambda i: [prewrite(commit.header, [cell], again=False) for cell in commit._parts[i]]
        )  # type: ignore
        cells = settling.told([APPLIED, verdict])
        assert len(cells) == by_cell
        assert settling.left == (verdict in (FULL, LOST))
        assert not settling.told([split] * len(cells))
        assert settling.left == (verdict is not APPLIED)


def test_a_lost_reply_to_the_primary_is_not_an_abort() -> None:  # T4
    commit = sent()
    assert commit.state is State.ASK
    assert commit.maybe_sent


def test_a_refusal_of_the_primary_may_be_the_echo_of_its_success() -> None:  # T6
    commit = held()
    commit.drawn(COMMITTED_AT)
    commit.primary_told(REFUSED)
    assert commit.state is State.ASK
    commit.asked(COMMITTED_AT)
    assert commit.state is State.COMMITTED


def test_while_its_own_lock_stands_it_is_sent_again_with_the_same_timestamp() -> None:  # T4
    commit = sent()
    commit.asked(None)
    assert commit.state is State.COMMIT
    assert puts(commit.primary_commit(), WRITE) == [(b"a", COMMITTED_AT)]


def test_a_record_on_the_primary_settles_it() -> None:  # T1 T4
    commit = sent()
    commit.asked(COMMITTED_AT)
    assert commit.state is State.COMMITTED


def test_nobody_else_commits_it_at_another_timestamp() -> None:  # T1
    with pytest.raises(Corruption, match="T1"):
        sent().asked(COMMITTED_AT + 1)


def test_a_marker_on_the_primary_decides_and_the_rest_of_its_part_may_still_be_locked() -> None:  # T4 T5
    commit = sent()
    commit.asked(0)
    assert commit.state is State.RELEASE
    assert not commit.maybe_sent
    assert rows_of(commit.releases()) == [b"a", b"b", b"c"]
    assert rows_of(commit.releases_by_cell(0))[0] == b"a"


def test_letting_go_begins_with_the_primary() -> None:  # T5
    commit = held()
    commit.give_up()
    assert commit.primary_held
    first, *others = commit.releases()
    assert puts(first, "rollback") == []  # a marker's value is empty
    assert [(g, ts) for _, _, writes in first.rows for g, _, ts, v in writes if v is not None] == [("rollback", START)]
    assert not any(g == "rollback" for m in others for _, _, writes in m.rows for g, *_ in writes)
    commit.released()
    assert commit.state is State.ABORTED


def test_what_was_never_held_is_not_let_go() -> None:  # T5
    commit = begin()
    commit.prewrites()
    commit.prewrites_told([APPLIED, REFUSED, LOST])
    commit.give_up()
    assert rows_of(commit.releases()) == [b"a", b"c"]  # a lock that may have been made counts as held
    assert commit.holds_any


def test_a_refused_prewrite_waits_until_what_is_in_the_way_is_settled() -> None:  # T7
    commit = begin()
    commit.prewrites()
    commit.prewrites_told([APPLIED, REFUSED, APPLIED])
    assert commit.state is State.BLOCKED
    commit.retry()
    assert rows_of(commit.prewrites()) == [b"b"]
    commit.prewrites_told([APPLIED])
    assert commit.state is State.DRAW


def test_a_prewrite_refused_by_its_own_lock_is_held_after_all() -> None:  # T6
    """The reply to the first copy was lost below, and the second copy's refusal was told."""
    commit = begin()
    first = commit.prewrites()[1]
    commit.prewrites_told([APPLIED, REFUSED, APPLIED])
    commit.echoed(1)
    commit.retry()
    [again] = commit.prewrites()
    assert len(again.rows[0][1]) > len(first.rows[0][1])  # it makes room for its own lock
    commit.give_up()
    assert rows_of(commit.releases()) == [b"a", b"b", b"c"]


def test_it_knows_which_check_of_which_cell_refused() -> None:  # T7 T13
    cells = [A._replace(column=column << 16) for column in (1, 2)]
    commit = begin([*cells, B], [C])
    commit.prewrites()
    commit.prewrites_told([LOST, APPLIED])
    for row, check, cell, what in [
        (0, 0, cells[0], WRITE_CHECK),
        (0, 1, cells[0], MARKER_CHECK),
        (0, 2, cells[0], LOCK_CHECK),
        (0, 3, cells[0], SHARED_CHECK),
        (0, 4, cells[0], TRACE_CHECK),
        (0, 5, cells[1], WRITE_CHECK),
        (0, 7, cells[1], LOCK_CHECK),
        (0, 9, cells[1], TRACE_CHECK),
        (1, 1, B, MARKER_CHECK),
        (0, -1, cells[0], FLOOR_CHECK),
    ]:
        found, why = commit.refused_cell(0, Refused(row, check))
        assert (Cellref(found.table, found.row, found.column), why) == (cell, what)
    commit.prewrites()  # the second time two checks look for locks: below ours, and above
    for row, check, cell, what in [
        (0, 2, cells[0], LOCK_CHECK),
        (0, 3, cells[0], LOCK_CHECK),
        (0, 4, cells[0], SHARED_CHECK),
        (0, 5, cells[0], TRACE_CHECK),
        (0, 6, cells[1], WRITE_CHECK),
        (0, 9, cells[1], LOCK_CHECK),
        (1, 3, B, LOCK_CHECK),
    ]:
        found, why = commit.refused_cell(0, Refused(row, check))
        assert (Cellref(found.table, found.row, found.column), why) == (cell, what)


def test_a_store_that_cannot_write_aborts_it() -> None:  # S4
    commit = begin()
    commit.prewrites()
    commit.prewrites_told([APPLIED, FULL, LOST])
    assert commit.state is State.RELEASE
    assert isinstance(commit.failure, StoreFull)
    assert rows_of(commit.releases()) == [b"a", b"c"]


def test_a_store_that_never_answers_is_given_up_before_the_commit() -> None:  # T4
    commit = begin()
    for _ in range(1000):
        if commit.state is not State.PREWRITE:
            break
        commit.prewrites_told([LOST] * len(commit.prewrites()))
    assert commit.state is State.RELEASE
    assert isinstance(commit.failure, Unavailable)


def test_a_request_that_was_taken_for_lost_may_have_arrived() -> None:  # T4
    """Sent, no reply; then the store is full. The release of the primary is refused: it had committed."""
    commit = sent()
    commit.asked(None)
    commit.primary_told(FULL)
    assert commit.state is State.RELEASE
    commit.committed_after_all(COMMITTED_AT)
    assert commit.state is State.COMMITTED
    assert len(commit.secondaries()) == 2


@pytest.mark.parametrize("state", ["ask", "committed", "aborted"])
def test_it_cannot_be_given_up_once_the_commit_was_sent(state: str) -> None:  # T10
    commit = sent()
    if state == "committed":
        commit.asked(COMMITTED_AT)
    elif state == "aborted":
        commit.asked(0)
        commit.released()
    with pytest.raises(AssertionError):
        commit.give_up()


def test_one_part_is_one_mutation() -> None:  # S1 T3
    """Where the store has groups, primary and secondaries of one tablet commit together."""
    commit = begin([A, B, C])
    [mutation] = commit.prewrites()
    assert [row for row, _, _ in mutation.rows] == [b"a", b"b", b"c"]
    commit.prewrites_told([APPLIED])
    commit.drawn(COMMITTED_AT)
    assert [row for row, _ in puts(commit.primary_commit(), WRITE)] == [b"a", b"b", b"c"]
    commit.primary_told(APPLIED)
    assert commit.secondaries() == []
