"""An observer that computes without an await holds the loop; a thread writes the owner's lease meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import perco
from perco.clock import loopwatch
from perco.clock.heartbeat import LEASE_ROW, Lease, read_lease
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import DATA
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT)
body, size = docs.column("body", perco.TEXT), docs.column("size", perco.INT64)


def lease(db: perco.Database) -> Lease:
    """As it lies on disk."""
    tablet = local_of(db).store.tablet(SYSTEM_TABLE, LEASE_ROW)
    [[(_, value)]] = tablet.read(LEASE_ROW, [(DATA, 0, 1, 1, 1)])
    return read_lease(value)


async def test_the_lease_is_written_and_names_who_holds_the_loop_while_an_observer_computes(  # L2
    tmp_path: Path,
) -> None:
    schema = perco.Schema(docs)
    leases: list[Lease] = []

    @schema.observe(body, id="compute")
    async def compute(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
        while not leases or not leases[-1].where or leases[-1].wall_ms == leases[0].wall_ms:
            leases.append(lease(db))
        txn.set(size, change.key, len(change.value or ""))

    options = perco.Options(heartbeat=perco.options.HeartbeatOptions(refresh_s=0.02, tick_s=0.01, held_s=0.03))
    async with perco.open(tmp_path / "store", schema, options=options) as db:
        async with db.worker() as worker:
            async with db.transaction() as txn:
                txn.set(body, "a", "hello")
            await db.wait_idle(timeout=60)
            assert worker.statistics()["compute"].conflicts == 0
        assert "test_held_loop.py" in leases[-1].where
        assert leases[-1].held_s > 0
        assert any("test_held_loop.py" in each.where for each in db.statistics().loop.held)


class Token:
    """Of a loop that runs what it was asked to when it is told so."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def run_sync_soon(self, function: Any, *args: Any) -> None:
        self.asked.append((function, args))

    def turn(self) -> None:
        asked, self.asked = self.asked, []
        for function, args in asked:
            function(*args)


def test_who_held_the_loop_is_who_was_seen_most(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = ["innocent", "compute", "compute", "innocent", "compute"]
    monkeypatch.setattr(loopwatch, "_where", lambda frame: seen.pop(0))
    watch = loopwatch.LoopWatch(perco.options.HeartbeatOptions(held_s=0.25))
    watch._trio = token = Token()  # type: ignore[assignment]
    assert watch._look(10.0) is None
    assert watch._look(10.2) is None, "held for less than held_s"
    looks = [watch._look(10.3 + i) for i in range(5)]
    assert [look.where for look in looks if look] == ["innocent", "innocent", "compute", "innocent", "compute"]
    assert [look.seconds for look in looks if look] == pytest.approx([0.3, 1.3, 2.3, 3.3, 4.3])
    assert len(token.asked) == 1, "it is asked once"
    assert watch.statistics().held == ()
    token.turn()
    assert watch._look(20.0) is None
    [held] = watch.statistics().held
    assert held.where == "compute"
    assert len(token.asked) == 1, "and again"
