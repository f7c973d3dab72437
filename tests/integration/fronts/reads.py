"""What every public method of a store answers to a program that only reads it, on all fronts (R9)."""

from __future__ import annotations

from typing import Any, Final

import perco
from tests.integration.fronts.cases import LONG, SCHEMA, Asked, Case, docs, n, sums, title, total
from tests.integration.fronts.owners import OPTIONS


async def fill(folder: str) -> None:
    """A store with something in it that waits, something that has failed, and a pin."""
    async with perco.open(folder, SCHEMA, options=OPTIONS) as db:
        async with db.transaction() as txn:
            for key, value in {"a": 1, "b": 2, "fails": 13, "z": 26}.items():
                txn.set(n, key, value)
            txn.set(total, 5, 42)
        async with db.worker(options=perco.WorkerOptions(attempts=1)):
            await db.wait_idle(timeout=LONG)
        async with db.pin("kept", lease_s=86400, keep=True):
            pass
        async with db.transaction() as txn:
            txn.set(n, "waits", 3)


async def nothing(txn: Any) -> None:
    """Of what a transaction may be, the least."""


async def each_attempt(asked: Asked) -> None:
    async for attempt in asked.each(asked.db.attempts()):
        async with asked.block(attempt):
            pass


async def in_block(asked: Asked, given: Any) -> None:
    async with asked.block(given):
        pass


async def of_snapshot(asked: Asked, what: str) -> Any:
    async with asked.block(asked.db.snapshot()) as snap:
        if what == "get":
            return [await asked.told(snap.get, n, key) for key in ("a", "nowhere")]
        if what == "row":
            return [await asked.told(snap.row, docs, "z"), await asked.told(snap.get_many, n, ["b", "waits"])]
        return [await asked.told(lambda: snap.scan(table).all()) for table in (docs, sums)]  # noqa: B023


async def of_statistics(asked: Asked) -> Any:
    told = await asked.call(asked.db.statistics())
    return "gives", (told.last_ts > 0, told.live_transactions, told.damaged)


async def of_snapshot_at(asked: Asked) -> Any:
    taken = await asked.call(asked.db.snapshot_at())
    found = await asked.call(taken.get(n, "a"))
    taken.end()
    return "gives", found


async def observers_of(asked: Asked) -> Any:
    return "gives", [(each.id, each.version, each.paused) for each in await asked.call(asked.db.observers())]


async def lag_of(asked: Asked) -> Any:
    return "gives", {id: (each.waiting, each.failed) for id, each in (await asked.call(asked.db.lag())).items()}


def told(name: str, *args: Any, **kwargs: Any) -> Case:
    return lambda asked: asked.told(getattr(asked.db, name), *args, **kwargs)


def within(name: str, *args: Any, **kwargs: Any) -> Case:
    return lambda asked: asked.told(in_block, asked, getattr(asked.db, name)(*args, **kwargs))


READS: Final[dict[str, Case]] = {
    "snapshot": lambda asked: of_snapshot(asked, "get"),
    "snapshot.row": lambda asked: of_snapshot(asked, "row"),
    "snapshot.scan": lambda asked: of_snapshot(asked, "scan"),
    "snapshot_at": of_snapshot_at,
    "statistics": of_statistics,
    "observers": observers_of,
    "options": lambda asked: asked.told(lambda: asked.db.options(attempts=2) is not None),
    "run": lambda asked: asked.told(asked.db.run, asked.function(nothing)),
    "attempts": lambda asked: asked.told(each_attempt, asked),
    "transaction": within("transaction"),
    "pin": within("pin", "mine", lease_s=LONG),
    "pinned": within("pin", "kept", lease_s=LONG),
    "worker": within("worker"),
    "begin": told("begin"),
    "put": told("put", n, "a", 1),
    "put_if": told("put_if", n, "a", 1, expected=None),
    "add": told("add", n, "a", 1),
    "append": told("append", title, "a", "x"),
    "delete": told("delete", n, "a"),
    "pins": told("pins"),
    "watermark": told("watermark"),
    "changes": told("changes", docs),
    "trace": told("trace", docs, "nothing there"),
    "drop_pin": told("drop_pin", "kept"),
    "outcome": told("outcome", "not a token"),
    "vacuum": told("vacuum"),
    "split": told("split", docs, "b"),
    "compact": told("compact", docs),
    "backup": told("backup", "backups"),
    "bulk_load": told("bulk_load", {docs: []}),
    "backfill": told("backfill"),
    "unserved": told("unserved"),
    "waiting": told("waiting"),
    "lag": lag_of,
    "pending": told("pending"),
    "is_idle": told("is_idle"),
    "wait_idle": told("wait_idle", timeout=LONG),
    "wait_for": told("wait_for", 1, timeout=LONG),
    "freshness": told("freshness"),
    "drop_observer": told("drop_observer", "double"),
    "drop_column": told("drop_column", "docs", "title"),
    "drop_table": told("drop_table", "sums"),
    "pause": told("pause", "double"),
    "resume": told("resume", "double"),
    "paused": told("paused"),
    "failed": told("failed"),
    "failed_count": told("failed_count"),
    "replay_failed": told("replay_failed"),
    "drop_failed": told("drop_failed", "double"),
}
REFUSED: Final = {
    *("put", "put_if", "add", "append", "delete"),
    *("run", "attempts", "transaction", "begin", "outcome", "pin", "pinned", "drop_pin", "worker"),
    *("vacuum", "split", "compact", "backup", "bulk_load", "backfill", "is_idle", "wait_idle", "wait_for", "freshness"),
    *("pause", "resume", "replay_failed", "drop_failed", "drop_observer"),
    *("drop_column", "drop_table"),
}
