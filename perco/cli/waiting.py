"""`perco wait`: wait until all observers of a store have run.

N7  *Idle*: at one moment there was no notify cell and no lock of an observed cell anywhere. One look at several tablets
    can miss changes that move between them. So two successive looks must find nothing. If the wait is not only for
    changes caused up to a timestamp, there must also be no commit between the two looks.
"""

from __future__ import annotations

from typing import Final

import trio

import perco
from perco.cli.looks import Look, connected, look, retried, some
from perco.cli.screen import FINE, FOUND, complain, counted, show_json
from perco.clock.oracle import durable_bound
from perco.database.inside import inside
from perco.errors import UsageError
from perco.serve.client import is_client

_POLL_S: Final = 0.1
_TIME_IS_UP: Final = "within the time allowed"
_LOCKED: Final = "locked by transactions that are under way"


async def wait(store: str, timeout: float | None, until_ts: int | None, *, json: bool) -> int:
    """Wait until no change waits, or no process can run the observers that changes wait for, or the time is up."""
    seconds = float("inf") if timeout is None else timeout
    async with perco.open(store, readonly=True) as db:
        if until_ts is not None and until_ts > (bound := await durable_bound(inside(db).driver.store)):
            raise UsageError(f"nothing was committed up to {until_ts}: no timestamp above {bound} has been issued yet")
        began = trio.current_time()
        reason, last = _TIME_IS_UP, None
        with trio.move_on_after(seconds):
            reason, last = await _until_idle(db, until_ts)
        idle = not reason
        if idle and last is None:
            raise AssertionError("an idle store has been looked at")
        if last is None:
            last = await look(db, until_ts)
        waited_s = round(trio.current_time() - began, 3)
        failed = await db.failed_count()
        users = await connected(store, db) if reason == _TIME_IS_UP and last.changes else None
    if json:
        show_json(
            {"idle": idle, "waited_s": waited_s, "waiting": last.waiting, "locks": last.locks, "damaged": last.damaged}
        )
    elif idle:
        print("idle" if until_ts is None else f"no change that was caused up to {until_ts} is waiting")
        if failed:
            print(f"{counted(failed, 'change')} on the failed list: perco failed list")
    if not idle:
        complain(f"not idle {reason}: {describe(last)}")
        if last.failing:
            complain(f"failing: {retried(last)}; the log of their worker (perco.observer) says why")
        if reason == _TIME_IS_UP and last.changes and users is not None and users[1]:
            complain(f"a worker is running{', and retries them' if last.failing else ''}: allow more time")
        elif reason == _TIME_IS_UP and last.changes:
            complain(
                "to run observers, start a program that has a worker, or: perco worker MODULE:SCHEMA --store STORE"
            )
    return FINE if idle else FOUND


async def _until_idle(db: perco.Database, until_ts: int | None) -> tuple[str, Look]:
    """Look until the store is idle; returns ("", the last look). If it never will be, returns (why, the last look)."""
    before: Look | None = None
    told = ""
    while True:
        owned = inside(db).place.owner_alive  # before the look, which then sees all that a dead owner left
        now = await look(db, until_ts)
        if now.empty and until_ts is None and is_client(db):
            if await db.is_idle():  # only the owner can tell (N7), because a client sees no marks
                return "", now
        elif now.empty and before is not None and before.empty and _agree(before, now, until_ts):
            return "", now
        if now.damaged and not now.changes and not now.locks and not now.untold:
            return "and never will be until the damage is repaired", now
        if now.asleep:
            return f"and never will be while {', '.join(sorted(now.asleep))} is paused (perco resume)", now
        if not now.empty and not owned and not inside(db).place.owner_alive:
            return "and no process has the store open to run observers", now
        if not now.empty and describe(now) != told:
            told = describe(now)
            complain(told)
        before = now
        await trio.sleep(_POLL_S)


def _agree(before: Look, now: Look, until_ts: int | None) -> bool:
    return before.version == now.version and (until_ts is not None or before.marks == now.marks)


def describe(found: Look) -> str:
    """The waiting changes, in words."""
    parts = [f"{count} for {id}" for id, count in found.waiting.items() if count]
    wait = "1 change waits" if found.changes == 1 else f"{found.changes} changes wait"
    words = f"{wait} ({', '.join(parts)})" if parts else "no change waits"
    words += f", {counted(found.locks, 'observed cell')} {_LOCKED}" if found.locks else ""
    words += f", observers not yet notified of all existing data: {', '.join(found.untold)}" if found.untold else ""
    return words + (f", {some(found.damaged)} cannot be read: run perco check" if found.damaged else "")
