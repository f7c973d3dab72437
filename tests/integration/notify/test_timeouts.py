"""Timeouts of observers that run in threads."""

from __future__ import annotations

import time
from pathlib import Path

import perco
import perco.sync

TIMEOUT_S = 0.05


def test_a_thread_that_takes_too_long_has_failed_when_it_returns(tmp_path: Path) -> None:
    """It cannot be stopped. Its writes are not there."""
    docs = perco.Table("docs", key=perco.TEXT)
    body, note = docs.column("body", perco.TEXT), docs.column("note", perco.TEXT)
    schema = perco.Schema(docs)

    @schema.observe(body, id="blocks", timeout_s=TIMEOUT_S, attempts=1)
    @perco.sync.observer
    def blocks(txn: perco.sync.Transaction, change: perco.Change[str, str]) -> None:
        until = time.monotonic() + (2 * TIMEOUT_S if change.value == "long" else 0)
        while time.monotonic() < until:
            pass
        txn.set(note, change.key, "written")

    with perco.sync.open(tmp_path / "s", schema) as db, db.worker():
        with db.transaction() as txn:
            txn.set(body, "a", "long")
            txn.set(body, "b", "short")
        db.wait_idle()
        with db.snapshot() as snap:
            assert snap.get(note, "a") is None
        [failed, *_] = [change for change in db.failed() if change.key == "a"]
        assert "'blocks' was cancelled after timeout_s=0.05" in failed.error
