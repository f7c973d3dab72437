"""The scanners' benchmark, on a few rows: its counts are right; none of its figures is judged here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
import trio.testing

from bench import scanners
from bench.scanners import TABLETS, Scene, TabletServers
from perco.storage import NOTIFY, LocalRowStore, MemoryTablet, Mutation

FEW = Scene(scanners=4, hot=True, together=True, teleport=True, rows=60)


@pytest.mark.parametrize(
    "scene",
    [
        FEW,
        replace(FEW, teleport=False),
        replace(FEW, hot=False, together=False),
        replace(FEW, teleport=False, row_locks=False),
        replace(FEW, scanners=1),
        replace(FEW, request_s=0.0),
    ],
    ids=["teleport", "no teleport", "uniform", "no row locks", "alone", "servers that need no time"],
)
def test_every_row_is_run_and_then_none_is_dirty(scene: Scene) -> None:
    found = scanners.ride(scene, 1)
    assert len({key for _, _, key in found.claims}) == scene.rows
    assert found.twice == len(found.claims) - scene.rows >= 0
    assert found.runs >= scene.rows
    assert found.runs == scene.rows or not scene.row_locks
    assert found.seconds > 0
    assert 0 <= found.gap <= 1
    assert {scanner for _, scanner, _ in found.claims} <= set(range(scene.scanners))
    assert not found.teleports or scene.teleport


def test_a_seed_gives_the_same_again() -> None:
    assert scanners.ride(FEW, 7) == scanners.ride(FEW, 7)
    assert scanners.ride(FEW, 7) != scanners.ride(FEW, 8)


def test_they_begin_together_or_not() -> None:
    for scene in (FEW, replace(FEW, hot=False)):
        first = sorted(key for when, _, key in scanners.ride(scene, 1).claims)[: scene.scanners]
        began = {}
        for _, scanner, key in scanners.ride(scene, 1).claims:
            began.setdefault(scanner, key)
        assert sorted(began.values()) == first


def test_the_scenes_come_in_pairs() -> None:
    scenes = scanners.scenes()
    assert len(scenes) == len(set(scenes)) == 18
    assert scanners.JUDGED in scenes
    for scene in scenes:
        assert scene.scanners == 1 or replace(scene, teleport=not scene.teleport) in scenes


async def test_a_tablet_server_answers_one_request_after_the_other(autojump_clock: trio.testing.MockClock) -> None:
    inner = LocalRowStore()
    inner.add_table("t", [MemoryTablet("t", b""), MemoryTablet("t", b"m")])
    servers = TabletServers(inner)
    answered: list[tuple[str, float]] = []

    async def put(row: str) -> None:
        await servers.apply([Mutation("t", ((row.encode(), (), ((NOTIFY, 1, 1, b""),)),))])
        answered.append((row, trio.current_time() - began))

    began = trio.current_time()
    await put("a")
    assert answered == [("a", 0.0)]
    servers.request_s = 1.0
    answered.clear()
    async with trio.open_nursery() as nursery:
        for row in ("b", "c", "n"):
            nursery.start_soon(put, row)
    assert sorted(when for row, when in answered if row != "n") == pytest.approx([1.0, 2.0])
    assert dict(answered)["n"] == pytest.approx(1.0)
    await inner.aclose()


def test_the_gap_is_the_largest_stretch_that_nobody_came_to() -> None:
    claims = [(0.1, 0, 10), (0.5, 1, 20), (1.5, 0, 50), (1.6, 0, 30), (1.7, 1, 40)]
    ended = {10: 0.2, 20: 0.6, 50: 1.6, 30: 1.7, 40: 1.8}
    # In the first second three of five rows are not visited; in the second all that are left.
    assert scanners.mean_gap([10, 20, 30, 40, 50], claims, ended) == pytest.approx((3 / 5 + 0) / 2)


def test_a_jump_begins_a_new_line() -> None:
    tablet = (1 << 32) // TABLETS
    claims = [(0.0, 0, 1), (1.0, 1, 5), (1.0, 0, 2), (2.0, 0, 9 * tablet), (3.0, 0, 3)]
    lines = [times for times, _ in scanners.stretches(claims, 0)]
    assert lines == [[0.0, 1.0], [2.0], [3.0]]
