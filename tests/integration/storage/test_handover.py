"""Two threads and one interpreter: see perco/storage/handover.py."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import trio

from perco.storage import APPLIED, DATA, Mutation, handover
from perco.storage.handover import Handover, Written
from tests.component.storage.stores import TABLE, open_lmdb


def test_nobody_who_waits_nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_GIVE_WAY_S", 3600.0)
    monkeypatch.setattr(handover, "_WOKEN", 1e9)
    turns = Handover()
    for _ in range(100):
        turns.give_way()
    assert turns.given == 0


def test_the_loop_waits_for_whom_it_has_woken_until_he_has_handed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_GIVE_WAY_S", 3600.0)  # only `handed_in` ends it
    monkeypatch.setattr(handover, "_WOKEN", 0.0)
    turns = Handover()
    turns._least = 0.0  # nothing is quicker: every look finds somebody woken
    done: list[int] = []

    def writer() -> None:
        while not turns._wanted:
            pass
        done.append(1)
        turns.handed_in()

    for n in range(1, 6):
        thread = threading.Thread(target=writer)
        thread.start()
        turns.give_way()
        assert len(done) == n
        thread.join()
    assert turns.given == 5


def test_nobody_waits_for_ever_for_a_writer_that_has_nothing_to_hand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_WOKEN", 0.0)
    turns = Handover()
    turns._least = 0.0
    turns.give_way()
    assert turns.given == 1


def test_what_is_handed_in_when_nobody_waits_is_not_kept_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Handover()
    turns.handed_in()
    turns.handed_in()
    assert turns._lock.locked()


def test_two_writers_that_hand_in_at_once_harm_nobody() -> None:
    turns = Handover()
    turns._wanted = True
    turns.handed_in()
    turns._wanted = True  # the second had looked before the first let go
    turns.handed_in()
    assert not turns._lock.locked()


def test_written_is_told_once_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_HOLD_STILL_S", 3600.0)  # without having been told it would wait that long
    written = Written()
    written.tell()
    written.tell()
    written.wait()


async def test_a_loop_that_reads_and_reads_lets_the_writer_hand_in(tmp_path: Path) -> None:
    """Without it, a reading loop takes the GIL from under the writer's nose, dozens of times for one batch."""
    async with open_lmdb(tmp_path) as (store, tablet):
        tablet.engine.stay_slow()  # a native writer does not need the GIL
        batches = 0

        async def write() -> None:
            nonlocal batches
            for ts in range(1, 200):
                assert await store.apply([Mutation(TABLE, ((b"row", (), ((DATA, 0, ts, b""),)),))]) == [APPLIED]
                batches += 1
            scope.cancel()

        async with trio.open_nursery() as nursery:
            scope = nursery.cancel_scope
            nursery.start_soon(write)
            while True:
                await store.read([(TABLE, b"row", ((DATA, 0, 0, 1 << 50, 1),))])
                sum(range(2000))  # as long between two reads as a transaction takes
        assert batches == 199
        assert store.handover.given
        assert store.handover.under_way == 0
