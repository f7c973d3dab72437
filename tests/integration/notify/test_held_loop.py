"""An observer that computes without an await holds the loop; a thread keeps others' locks fresh meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
from perco.storage import LOCK, ScanQuery, ScanRequest
from perco.txn import heartbeat as heartbeats
from perco.txn.records import Lock, unpack_lock


class Held:
    """Lets the loop go when the thread has refreshed a lock and has seen who holds the loop."""

    def __init__(self, db: perco.Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.noted = trio.Event()
        self._named = self._let_go = self._watching = False
        heartbeat, token = db.heartbeat, trio.lowlevel.current_trio_token()
        refresh, watch, where = heartbeat._refresh, heartbeat._watch, heartbeats._where

        def named(frame: Any) -> str:
            found = "" if self._let_go else where(frame)
            self._named |= "compute" in found
            return found

        def refreshed() -> None:
            refresh()
            # Only from within a watch, which then tells who held the loop.
            if self._watching and self._named and heartbeat._refreshed and not self._let_go:
                self._let_go = True
                self.gate.release()

        def watched(asked: float) -> None:
            self._watching = True
            watch(asked)
            self._watching = False
            if self._let_go:
                token.run_sync_soon(self.noted.set)

        monkeypatch.setattr(heartbeats, "_where", named)
        monkeypatch.setattr(heartbeat, "_refresh", refreshed)
        monkeypatch.setattr(heartbeat, "_watch", watched)


def locks(db: perco.Database) -> list[Lock]:
    request = ScanRequest("docs", b"", None, (ScanQuery(LOCK, None, n=100),))
    return [
        unpack_lock(value)
        for tablet in db.local.store.tablets()
        if tablet.table == "docs"
        for _, [cells] in tablet.scan(request).rows
        for _, _, value in cells
    ]


async def test_locks_are_refreshed_while_an_observer_computes(  # L1
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = perco.Table("docs", key=perco.TEXT)
    body, size = docs.column("body", perco.TEXT), docs.column("size", perco.INT64)
    schema = perco.Schema(docs)
    fresh: list[int] = []

    @schema.observe(body, id="compute")
    async def compute(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
        if change.key == "long":
            before = max(lock.wall_ms for lock in locks(db))
            held.gate.acquire()
            fresh.append(max(lock.wall_ms for lock in locks(db)) - before)
        txn.set(size, change.key, len(change.value or ""))

    options = perco.Options(
        heartbeat=perco.HeartbeatOptions(refresh_s=0.02, tick_s=0.01, held_s=0.03),
        commit=perco.CommitOptions(one_step=False),  # a lock is what is looked at
    )
    async with perco.open(tmp_path / "store", schema, options=options) as db:
        held = Held(db, monkeypatch)
        holding, commit_now = trio.Event(), trio.Event()
        draw = db.oracle.draw

        async def draw_later() -> int:
            holding.set()
            await commit_now.wait()
            return await draw()

        txn = await db.begin()
        other = await db.begin()
        txn.set(body, "waits", "with its locks held")
        other.set(body, "long", "to be observed")
        async with trio.open_nursery() as nursery:
            monkeypatch.setattr(db.oracle, "draw", draw_later)
            monkeypatch.setattr(db.oracle, "draw_nowait", lambda: 0)
            nursery.start_soon(txn.commit)
            await holding.wait()
            assert len(locks(db)) == 1
            monkeypatch.setattr(db.oracle, "draw", draw)
            await other.commit()
            async with db.worker() as worker:
                await held.noted.wait()
                loop = db.statistics().loop
                assert loop.refreshed > 0
                assert any("test_held_loop.py" in each.where and "compute" in each.where for each in loop.held)
                commit_now.set()
                await db.wait_idle()
                assert worker.statistics()["compute"].conflicts == 0
        assert fresh[0] > 0, "the lock on disk was newer before the loop turned again"
        assert txn.outcome == "committed"
        counters = db.statistics().counters
        assert (counters.rolled_back, counters.aborts) == (0, 0)


class Looks:
    """What the thread sees of the loop, one look after the other; at the last one the loop turns again."""

    def __init__(self, heartbeat: heartbeats.Heartbeat, *seen: str) -> None:
        self._heartbeat, self._seen = heartbeat, list(seen)

    def __call__(self, frame: object) -> str:
        where = self._seen.pop(0)
        if not self._seen:
            self._heartbeat._answered = time.monotonic()
        return where


def test_who_held_the_loop_is_who_was_seen_most(monkeypatch: pytest.MonkeyPatch) -> None:
    options = perco.HeartbeatOptions(refresh_s=1000.0, tick_s=0.001, held_s=0.0)
    nothing: Any = None
    heartbeat = heartbeats.Heartbeat(options, nothing, nothing, time.time, "token")
    monkeypatch.setattr(heartbeats, "_where", Looks(heartbeat, "compute", "compute", "compute", "innocent"))
    heartbeat._watch(time.monotonic())
    [held] = heartbeat.statistics().held
    assert held.where == "compute"
