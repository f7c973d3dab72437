"""`perco failed`: changes whose observer failed too often."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

import perco
from perco.cli.looks import Look, look, retried
from perco.cli.screen import FINE, FOUND, ago, complain, counted, show_fields, show_json, show_table
from perco.cli.values import parse_key, shown
from perco.database.inside import inside
from perco.errors import UsageError
from perco.schema.catalogue import schema_of

_ERROR_WIDTH = 60
_KEY_WIDTH = 40


async def show_list(store: str, observer: str | None, limit: int, *, json: bool) -> int:
    """Print the failed list, or its beginning."""
    async with perco.open(store, readonly=True) as db:
        found = await db.failed(observer, limit=limit)
        count = await db.failed_count()
        waiting = await look(db)
        if observer is not None:
            waiting = replace(waiting, failing={id: of for id, of in waiting.failing.items() if id == observer})
    now = time.time()
    if json:
        show_json({"count": count, "changes": [_plain(change, now) for change in found], "failing": _failing(waiting)})
        return FINE
    if not found:
        print(f"the failed list {'is empty' if observer is None else f'has no change of {observer}'}")
        _show_retried(waiting)
        return FINE
    rows = [
        (c.observer, f"{c.table}[{shown(c.key, _KEY_WIDTH)}]", c.attempts, ago(max(now - c.wall, 0.0)), _cut(c.error))
        for c in found
    ]
    show_table(("observer", "row", "attempts", "given up", "error"), rows, numbers=["attempts"], spare=["given up"])
    if len(found) < count and len(found) == limit:
        print(f"the first {limit} of {counted(count, 'failed change')}; --limit shows more")
    _show_retried(waiting)
    return FINE


async def show_one(store: str, observer: str, key: str, *, json: bool) -> int:
    """Print everything about one failed change, with its traceback."""
    async with perco.open(store, readonly=True) as db:
        parsed = _key(db, observer, key)
        found = await db.failed(observer, key=parsed)
    if not found:
        complain(f"no change of {parsed!r} is on the failed list of observer {observer!r}; it may still be retried")
        return FOUND
    [change] = found
    now = time.time()
    if json:
        show_json(_plain(change, now) | {"traceback": change.traceback})
        return FINE
    when = datetime.fromtimestamp(change.wall).astimezone().isoformat(timespec="seconds")
    chain = " > ".join((*change.chain, change.observer))
    show_fields(
        [
            ("observer", change.observer),
            ("row", f"{change.table}[{shown(change.key)}]"),
            ("change", f"of {change.column}, committed at {change.commit_ts}"),
            ("attempts", str(change.attempts)),
            ("given up", f"{ago(max(now - change.wall, 0.0))} ({when})"),
            ("caused by", f"timestamp {change.cause}: {chain}"),
            ("error", change.error),
        ]
    )
    if change.traceback:
        print()
        print(change.traceback.rstrip())
    return FINE


async def replay(store: str, observer: str | None, key: str | None, *, everything: bool, json: bool) -> int:
    """Make failed changes wait for their observers again."""
    _chosen(observer, everything=everything)

    async def act(db: perco.Database, parsed: Any) -> int:
        return await db.replay_failed(observer, key=parsed)

    return await _change(store, observer, key, act, "replayed", "they run as soon as a worker does", json=json)


async def drop(store: str, observer: str, key: str | None, *, everything: bool, json: bool) -> int:
    """Acknowledge failed changes without a run."""
    if key is None and not everything:
        raise UsageError(
            "no observer runs for a dropped change: name the row's KEY, or give --all to drop all of OBSERVER's"
        )

    async def act(db: perco.Database, parsed: Any) -> int:
        return await db.drop_failed(observer, key=parsed)

    return await _change(store, observer, key, act, "dropped", "", json=json)


def _chosen(observer: str | None, *, everything: bool) -> None:
    if everything == (observer is not None):
        raise UsageError("name an OBSERVER, and optionally a KEY of its table; or give --all")


async def _change(
    store: str,
    observer: str | None,
    key: str | None,
    act: Callable[[perco.Database, Any], Coroutine[Any, Any, int]],
    done: str,
    then: str,
    *,
    json: bool,
) -> int:
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(inside(db).catalogue)
        parsed = None if key is None or observer is None else _key(db, observer, key)
        await db.failed(observer, limit=1)  # raises for an unknown observer, before the store is opened to write
    async with perco.open(store, schema) as db:
        count = await act(db, parsed)
        left = await db.failed_count()
    if json:
        show_json({done: count, "left": left})
    elif count:
        print(f"{done} {counted(count, 'change')}{'; ' + then if then else ''}; {left} left on the list")
    else:
        complain("no such change is on the failed list")
    return FINE if count else FOUND


def _key(db: perco.Database, observer: str, key: str) -> Any:
    entry = inside(db).catalogue.observers.get(observer)
    if entry is None:
        known = ", ".join(inside(db).catalogue.observers) or "none"
        raise UsageError(f"there is no observer {observer!r}; the store has: {known}")
    return parse_key(db.schema.tables[entry.table].key, key)


def _show_retried(found: Look) -> None:
    if found.failing:
        print(f"failing, and retried until they move to the failed list: {retried(found)}")


def _failing(found: Look) -> dict[str, dict[str, int]]:
    return {id: {"changes": changes, "attempts": attempts} for id, (changes, attempts) in found.failing.items()}


def _cut(text: str) -> str:
    return text if len(text) <= _ERROR_WIDTH else text[: _ERROR_WIDTH - 3] + "..."


def _plain(change: perco.FailedChange, now: float) -> dict[str, Any]:
    told = asdict(change) | {"given_up_s": round(max(now - change.wall, 0.0), 3)}
    del told["traceback"]
    return told
