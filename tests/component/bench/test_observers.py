"""The observers' benchmark, on a few writes in memory: its counts are right; none of its figures is judged here."""

from __future__ import annotations

import pytest
import trio.testing

import perco
from bench import observers


@pytest.mark.parametrize("apart", [True, False])
async def test_a_chain_ends_in_the_row_that_is_expected(autojump_clock: trio.testing.MockClock, apart: bool) -> None:
    parts = observers.chain(apart=apart)
    key = b"0123456789"
    async with perco.open("memory:", parts.schema) as db, db.worker() as worker:
        ran: list[tuple[str, bytes]] = []
        worker.on_run(lambda id, row, _: ran.append((id, row)))
        async with db.transaction() as txn:
            txn.set(parts.columns[0], key, b"value")
        await db.wait_idle()
        async with db.snapshot() as snap:
            last = observers.onward(observers.end_of(key))
            assert await snap.get(parts.columns[-1], last) == b"value"
    assert ran == [("o0", b"0123456789"), ("o1", b"1234567890"), (parts.last, observers.end_of(key))]


async def test_every_first_write_has_a_latency(autojump_clock: trio.testing.MockClock) -> None:
    times = await observers.latencies("memory:", 10.0, 1, per_second=5.0, warm=3)
    assert 25 < len(times) < 100
    assert min(times) >= 0.0
    assert times == pytest.approx([0.0] * len(times)), "a memory store takes no virtual time"


async def test_a_round_counts_commits_and_what_collapsed() -> None:
    before: list[None] = []
    rates = await observers.saturation(
        "memory:", 2, lambda: before.append(None), warm_s=0.0, seconds=60.0, backlog=50, least=10, in_flight=8
    )
    assert len(before) == len(rates) == 2
    assert all(rate.commits_per_s > 0 and rate.collapsed >= 0 for rate in rates)


async def test_changes_that_collapsed_count_once(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observers, "ROWS", 1)
    parts = observers.chain()
    async with perco.open("memory:", parts.schema) as db:
        saturated = observers.Saturated(db, parts, 1, backlog=4, in_flight=1)
        await saturated.fill()
        assert await db.pending() == 4
        async with db.worker() as worker:
            await db.wait_idle()
            commits = {id: counts.commits for id, counts in worker.statistics().items()}
            collapsed = {id: counts.collapsed for id, counts in worker.statistics().items()}
    assert commits == {"o0": 1, "o1": 1, "o2": 1}
    assert collapsed == {"o0": 3, "o1": 0, "o2": 0}
