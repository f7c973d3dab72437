"""The processes of a simulation: a killed process is unwound, whatever it waits for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from perco.storage import APPLIED
from perco.storage.call import Call
from perco.testing.processes import Process, Processes
from perco.txn.background import Background


def _never(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


async def _wait_for_an_answer() -> None:
    """Waits as for the verdict of a mutation that was sent (T10)."""
    with trio.CancelScope(shield=True):
        await trio.lowlevel.wait_task_rescheduled(_never)


async def _buried(process: Process, main: Callable[[], Awaitable[None]]) -> None:
    """Kill a process that runs `main`, and unwind it."""
    kernel = Processes()

    async def world() -> None:
        kernel.start(process, main)
        await trio.sleep(1.0)
        kernel.kill(process)
        await kernel.bury()

    await kernel.run(world)


@pytest.mark.parametrize("background", [False, True])
async def test_the_dead_are_unwound_although_they_wait_for_an_answer(
    background: bool, autojump_clock: trio.testing.MockClock
) -> None:
    process = Process("p")
    ended = []

    async def main() -> None:
        try:
            if background:
                Background().spawn(_wait_for_an_answer)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever if background else _wait_for_an_answer)
        finally:
            ended.append(process)

    await _buried(process, main)
    assert ended == [process]


async def test_an_answer_that_comes_while_the_dead_are_unwound_wakes_no_task(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """At its end, a task may answer another task of its process, which has been woken already."""
    process = Process("p")
    calls: list[Call] = []
    ended = []

    async def waits() -> None:
        call = Call(trio.lowlevel.current_task(), 1)
        call.taken = True  # it was sent: the task waits for the verdict, whatever its scope says
        calls.append(call)
        await trio.lowlevel.wait_task_rescheduled(call.abort)

    async def answers_at_its_end() -> None:
        try:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.wait_task_rescheduled(_never)
        finally:
            calls[0].arrived(0, APPLIED, lambda mutations, call: None)
            ended.append(process)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits)
            nursery.start_soon(answers_at_its_end)

    await _buried(process, main)
    assert ended == [process]
