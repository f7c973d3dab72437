"""The delaying proxy of `bench window`: it delays, and does nothing else."""

from __future__ import annotations

from contextlib import closing

import trio
import trio.testing

from bench.delay import Alarm, between

DELAY_S = 0.02


async def test_each_direction_is_delayed_and_nothing_is_limited(autojump_clock: trio.testing.MockClock) -> None:
    client, near = trio.testing.memory_stream_pair()
    far, server = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(between, near, far, DELAY_S)
        began = trio.current_time()
        for i in range(1000):
            await client.send_all(bytes([i % 256]) * 1000)
        assert trio.current_time() == began
        got = b""
        while len(got) < 1_000_000:
            got += await server.receive_some(1 << 20)
        assert abs(trio.current_time() - began - DELAY_S) < 1e-9  # all of it: the delay is no limit of the rate
        assert got == b"".join(bytes([i % 256]) * 1000 for i in range(1000))
        await trio.sleep(0.005)
        await server.send_all(b"answer")
        assert await client.receive_some(100) == b"answer"
        assert abs(trio.current_time() - began - 2 * DELAY_S - 0.005) < 1e-9
        await client.aclose()
        assert await server.receive_some(100) == b""
        assert trio.current_time() - began >= 3 * DELAY_S


async def test_an_alarm_never_rings_early_and_waits_for_no_time_that_has_passed() -> None:
    with closing(Alarm()) as alarm:
        for delay_s in (0.0003, 0.0, -1.0, 0.0025):
            due = trio.current_time() + delay_s
            await alarm.sleep_until(due)
            assert trio.current_time() >= due
