"""The queue of calls from outside, and the tasks that make them, by themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.fronts import portal as module
from perco.fronts.portal import Call, Portal, Server


class Told(Call):
    def wake(self) -> None:
        pass


class Here(Portal):
    """Its callers are on the loop itself."""

    def __init__(self) -> None:
        super().__init__("here")
        self.came = trio.Event()

    async def wait_woken(self, server: Server) -> None:
        if not self.queue:
            self.came = trio.Event()
            await self.came.wait()

    def put(self, function: Callable[..., Awaitable[Any]], *args: Any, waits: bool = False) -> Told:
        call = Told(function, args, {}, waits)
        self.queue.append(call)
        self.came.set()
        return call


def closed() -> BaseException:
    return perco.errors.TransactionClosed("a test")


@asynccontextmanager
async def opened() -> AsyncIterator[Here]:
    portal = Here()
    portal.lead()
    await trio.testing.wait_all_tasks_blocked()
    try:
        yield portal
    finally:
        await portal.aclose(closed)


settled = trio.testing.wait_all_tasks_blocked


async def quick(value: int) -> int:
    return value


async def test_calls_that_need_not_wait_are_made_by_one_task() -> None:
    async with opened() as portal:
        calls = [portal.put(quick, i) for i in range(20)]
        await settled()
        assert [call.value for call in calls] == list(range(20))
        assert len(portal._servers) == 1


async def test_a_call_that_waits_holds_up_no_other() -> None:
    gate = trio.Event()
    async with opened() as portal:
        waiting = portal.put(gate.wait)
        others = [portal.put(quick, i) for i in range(3)]
        await settled()
        assert all(call.done for call in others)
        assert not waiting.done
        gate.set()
        await settled()
        assert waiting.done


async def test_those_that_are_known_to_wait_set_out_together() -> None:
    """In the same round of the loop: so that commits which come together share a write."""
    began: list[int] = []
    gate = trio.Event()

    class Rounds(trio.abc.Instrument):
        rounds = 0

        def before_io_wait(self, timeout: float) -> None:
            self.rounds += 1

    rounds = Rounds()

    async def commit() -> None:
        began.append(rounds.rounds)
        await gate.wait()

    async with opened() as portal:
        trio.lowlevel.add_instrument(rounds)
        calls = [portal.put(commit, waits=True) for _ in range(10)]
        await settled()
        trio.lowlevel.remove_instrument(rounds)
        assert len(began) == 10
        assert max(began) - min(began) <= 1
        gate.set()
        await settled()
        assert all(call.done for call in calls)


async def test_what_is_cancelled_in_the_queue_is_never_made() -> None:  # F3
    made: list[int] = []

    async def note(number: int) -> None:
        made.append(number)

    async with opened() as portal:
        calls = [portal.put(note, i) for i in range(3)]
        portal.cut(calls[1])
        assert calls[1].cut
        await settled()
        assert made == [0, 2]
        portal.cut(calls[0])  # it is done
        assert not calls[0].cut


async def test_what_was_never_put_there_can_be_cancelled() -> None:  # F3: the interrupt came before it was
    async with opened() as portal:
        call = Told(quick, (1,), {}, False)
        portal.cut(call)
        assert call.cut
        assert call.done


async def test_what_is_cancelled_when_a_server_has_been_given_it_is_never_made() -> None:  # F3, F1
    made: list[int] = []

    async def note(number: int) -> None:
        made.append(number)
        await trio.lowlevel.checkpoint()

    async with opened() as portal:
        for given_to in "a new server", "an idle one":
            call = Told(note, (1,), {}, True)
            call.server = portal._rouse(call)
            portal.cut(call)
            await settled()
            assert (call.cut, call.done) == (True, True), given_to
        assert made == []
        again = portal.put(note, 2)
        await settled()
        assert (again.done, made) == (True, [2])


async def test_a_call_that_is_cancelled_while_it_waits_ends_and_its_server_goes_on() -> None:
    async with opened() as portal:
        call = portal.put(trio.sleep_forever)
        await settled()
        servers = len(portal._servers)
        portal.cut(call)
        await settled()
        assert call.cut
        assert len(portal._servers) == servers
        after = [portal.put(trio.sleep_forever) for _ in range(2)]
        quickly = portal.put(quick, 1)
        await settled()
        assert quickly.value == 1
        assert not any(call.done for call in after)


async def test_a_call_that_ends_though_it_is_cancelled_is_answered_with_its_value() -> None:  # F1, T10
    gate = trio.Event()

    async def commit() -> str:
        with trio.CancelScope(shield=True):
            await gate.wait()
        return "committed"

    async with opened() as portal:
        call = portal.put(commit)
        await settled()
        portal.cut(call)
        await settled()
        assert not call.done
        gate.set()
        await settled()
        assert (call.value, call.cut) == ("committed", False)
        later = portal.put(trio.lowlevel.checkpoint)  # the scope is not its any more
        await settled()
        assert not later.cut


async def test_closing_answers_all_that_wait_in_the_queue_and_in_calls() -> None:  # F2
    async with opened() as portal:
        waiting = [portal.put(trio.sleep_forever) for _ in range(3)]
        await settled()
        queued = portal.put(quick, 1)
    assert all(call.cut for call in waiting)
    assert isinstance(queued.error, perco.errors.TransactionClosed)
    late = portal.put(quick, 1)
    portal.refuse()
    assert isinstance(late.error, perco.errors.TransactionClosed)
    assert not portal._servers


async def test_servers_beyond_the_bound_end_when_they_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_MAX", 2)
    gate = trio.Event()
    async with opened() as portal:
        calls = [portal.put(gate.wait) for _ in range(10)]
        await settled()
        assert len(portal._servers) == 11
        gate.set()
        await settled()
        assert all(call.done for call in calls)
        assert len(portal._servers) == 3


async def test_others_on_the_loop_have_their_turn_though_calls_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TAKEN_MAX", 8)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with opened() as portal, trio.open_nursery() as nursery:

        async def and_another(left: int) -> None:
            if left:
                portal.put(and_another, left - 1)
            else:
                nursery.cancel_scope.cancel()

        nursery.start_soon(other)
        portal.put(and_another, 100)
    assert turns > 5


async def test_what_a_call_raises_is_its_answer() -> None:
    mistake = SystemExit(3)

    async def fails() -> None:
        await trio.lowlevel.checkpoint()
        raise mistake

    async with opened() as portal:
        call = portal.put(fails)
        await settled()
        assert call.error is mistake
