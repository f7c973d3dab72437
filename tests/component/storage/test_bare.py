"""Floors and counts over a store that has neither (`storage/bare.py`), in virtual time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import pytest
import trio
import trio.testing
from trio.testing import MockClock as Clock

from perco.storage import APPLIED, LocalRowStore as Rows, MemoryTablet, Mutation, NoReply, Refused, Verdict
from perco.storage.bare import Bare
from perco.testing.bare import SingleRows
from tests.component.storage.stores import TABLE, put, value_of

LATE_S = 5.0


class Slow(SingleRows):
    """A call takes a second, or as long as `opened` is not set."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows, lambda: 1.0)
        self.opened: trio.Event | None = None

    async def _under_way(self) -> None:
        await super()._under_way()
        if self.opened is not None:
            await self.opened.wait()


@pytest.fixture
def rows() -> Rows:
    store = Rows()
    store.add_table(TABLE, [MemoryTablet(TABLE, b"")])
    return store


def bare(rows: Rows, below: SingleRows | None = None) -> Bare:
    return Bare(below or SingleRows(rows), rows.tables, LATE_S)


def of(ts: int | None, row: bytes = b"a", group: str = "data") -> Mutation:
    return Mutation(TABLE, ((row, (), ((group, 1, 7, b"x"),)),), ts)


async def seconds(act: Callable[[], object]) -> float:
    began = trio.current_time()
    await act()  # type: ignore[misc]
    return trio.current_time() - began


# ------------------------------------------------------------------ T13


async def test_what_is_below_the_floor_is_not_sent(autojump_clock: Clock, rows: Rows) -> None:  # T13
    below = SingleRows(rows)
    store = bare(rows, below)
    await store.raise_floor(10, wait=False)
    assert await store.apply([of(9, b"a"), of(10, b"b"), of(None, b"c")]) == [Refused(0, -1), APPLIED, APPLIED]
    assert below.calls == 2
    assert [await value_of(rows, row) for row in (b"a", b"b", b"c")] == [None, b"x", b"x"]
    await store.raise_floor(8, wait=False)
    assert await store.apply([of(9)]) == [Refused(0, -1)], "a floor never falls"
    assert below.calls == 2


async def test_a_new_process_waits_for_what_a_former_owner_may_have_sent(
    autojump_clock: Clock, rows: Rows
) -> None:  # T13
    store = bare(rows)
    await trio.sleep(1)
    assert await seconds(lambda: store.raise_floor(10, wait=True)) == LATE_S - 1
    assert await seconds(lambda: store.raise_floor(11, wait=True)) == 0


async def test_a_raise_that_does_not_wait_counts_at_once(autojump_clock: Clock, rows: Rows) -> None:  # T13
    store = bare(rows)
    assert await seconds(lambda: store.raise_floor(10, wait=False)) == 0
    assert await store.apply([of(9)]) == [Refused(0, -1)]


async def test_what_was_answered_is_waited_for_as_well(autojump_clock: Clock, rows: Rows) -> None:  # T13
    """A copy of it may still be under way."""
    store = bare(rows)
    await trio.sleep(LATE_S)
    assert await store.apply([of(9)]) == [APPLIED]
    await trio.sleep(2)
    assert await store.apply([of(30)]) == [APPLIED]
    assert await seconds(lambda: store.raise_floor(9, wait=True)) == 0, "it is not below"
    assert await seconds(lambda: store.raise_floor(20, wait=True)) == LATE_S - 2, "not for the later one"
    assert await seconds(lambda: store.raise_floor(31, wait=True)) == 2


async def test_a_call_in_flight_is_waited_for_and_then_for_its_copies(autojump_clock: Clock, rows: Rows) -> None:  # T13
    below = Slow(rows)
    store = bare(rows, below)
    await trio.sleep(LATE_S)
    below.opened = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.apply, [of(9)])
        await trio.testing.wait_all_tasks_blocked()
        raised = trio.Event()

        async def rise() -> None:
            await store.raise_floor(10, wait=True)
            raised.set()

        nursery.start_soon(rise)
        await trio.sleep(100)
        assert not raised.is_set()
        below.opened.set()
        assert await seconds(raised.wait) == LATE_S


async def test_a_call_that_fails_or_is_cancelled_is_waited_for(autojump_clock: Clock, rows: Rows) -> None:  # T13, T4
    class Failing(SingleRows):
        async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
            await trio.sleep(1)
            raise OSError("no route")

    store = bare(rows, Failing(rows))
    await trio.sleep(LATE_S)
    with pytest.raises(OSError, match="no route"):
        await store.apply([of(9)])
    assert await seconds(lambda: store.raise_floor(10, wait=True)) == LATE_S
    with trio.move_on_after(0.5):
        await store.apply([of(11)])
    assert await seconds(lambda: store.raise_floor(12, wait=True)) == LATE_S


async def test_what_names_no_timestamp_is_not_waited_for(autojump_clock: Clock, rows: Rows) -> None:  # T13
    store = bare(rows)
    await trio.sleep(LATE_S)
    assert await store.apply([of(None)]) == [APPLIED]
    assert await seconds(lambda: store.raise_floor(10, wait=True)) == 0


async def test_what_is_remembered_of_calls_is_bounded_by_time(autojump_clock: Clock, rows: Rows) -> None:
    store = bare(rows)
    for _ in range(100):
        await store.apply([of(9)])
        await trio.sleep(1)
    assert len(store._sent) <= LATE_S + 1
    assert not store._calls


# ------------------------------------------------------------------ N7


async def test_cells_are_counted_by_a_look_until_something_is_sent(autojump_clock: Clock, rows: Rows) -> None:  # N7
    store = bare(rows)
    assert not store.knows(TABLE, "lock")
    await store.apply([of(None, row, "lock") for row in (b"a", b"b")])
    await store.look([TABLE], ["lock", "notify"])
    assert [(store.knows(TABLE, group), store.count(TABLE, group)) for group in ("lock", "notify")] == [
        (True, 2),
        (True, 0),
    ]
    assert not store.knows(TABLE, "write")
    await store.apply([put(b"z")])
    assert store.knows(TABLE, "lock"), "nothing has written there"
    await store.apply([of(None, b"c", "lock")])
    assert not store.knows(TABLE, "lock")
    assert store.count(TABLE, "lock") == 2, "as far as is known"


async def test_a_look_that_is_known_is_not_repeated(autojump_clock: Clock, rows: Rows) -> None:  # N7
    below = SingleRows(rows)
    store = bare(rows, below)
    await store.look([TABLE], ["lock"])
    calls = below.calls
    await store.look([TABLE], ["lock"])
    assert below.calls == calls


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_look_beside_a_mutation_does_not_count(autojump_clock: Clock, rows: Rows, when: str) -> None:  # N7
    """It may have taken effect where the look had passed."""
    below = Slow(rows)
    store = bare(rows, below)
    async with trio.open_nursery() as nursery:
        if when == "before":
            nursery.start_soon(store.apply, [of(None, b"a", "lock")])
            await trio.testing.wait_all_tasks_blocked()
            await store.look([TABLE], ["lock"])
            await trio.sleep(2)
        else:
            nursery.start_soon(store.look, [TABLE], ["lock"])
            await trio.testing.wait_all_tasks_blocked()
            await store.apply([of(None, b"a", "lock")])
            await trio.sleep(2)
        assert not store.knows(TABLE, "lock")
    await store.look([TABLE], ["lock"])
    assert store.knows(TABLE, "lock")
    assert store.count(TABLE, "lock") == 1


async def test_while_a_mutation_is_in_flight_nothing_is_known(autojump_clock: Clock, rows: Rows) -> None:  # N7
    below = Slow(rows)
    store = bare(rows, below)
    await store.look([TABLE], ["lock"])
    assert store.knows(TABLE, "lock")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.apply, [of(None, b"a", "lock")])
        await trio.testing.wait_all_tasks_blocked()
        assert not store.knows(TABLE, "lock")


class Deaf(SingleRows):
    """Loses the replies."""

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        await super().apply(mutations)
        return [NoReply("lost")] * len(mutations)


@pytest.mark.parametrize("how", ["no reply", "an error", "cancelled"])
async def test_what_was_not_answered_may_still_change_it(autojump_clock: Clock, rows: Rows, how: str) -> None:  # N7
    """So a look counts only after the mutation cannot arrive any more."""

    class Failing(SingleRows):
        async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
            if how == "cancelled":
                await trio.sleep(100)
            raise OSError("no route")

    store = bare(rows, Deaf(rows) if how == "no reply" else Failing(rows))
    with trio.move_on_after(1), contextlib.suppress(OSError):
        await store.apply([of(None, b"a", "notify")])
    began = trio.current_time()
    while not store.knows(TABLE, "notify"):
        await store.look([TABLE], ["lock", "notify"])
        assert store.knows(TABLE, "lock")
        await trio.sleep(0.1)
    assert trio.current_time() - began >= LATE_S


async def test_tasks_share_a_look(autojump_clock: Clock, rows: Rows) -> None:  # N7
    below = Slow(rows)
    store = bare(rows, below)
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(store.look, [TABLE], ["notify"])
    assert below.calls == 1
    await store.look([TABLE], ["notify"], again=True)
    assert below.calls == 2


async def test_a_large_table_is_counted_page_by_page(autojump_clock: Clock, rows: Rows) -> None:  # N7
    for number in range(1_000):
        await rows.apply([of(None, b"%04d" % number, "notify")])
    store = bare(rows)
    await store.look([TABLE], ["notify"])
    assert store.count(TABLE, "notify") == 1_000


async def test_a_mutation_of_several_rows_is_a_bug(autojump_clock: Clock, rows: Rows) -> None:  # S1
    store = bare(rows)
    two = Mutation(TABLE, ((b"a", (), ()), (b"b", (), ())))
    with pytest.raises(AssertionError, match="S1"):
        await store.apply([two])
