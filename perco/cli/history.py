"""`perco vacuum`, `perco pins`, and the part of `perco status` that is about old versions."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import msgpack
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

import perco
from perco.cli.screen import FINE, FOUND, ago, complain, counted, show_json, show_table
from perco.clock.oracle import newest_note, note_below, published
from perco.database.inside import inside, local_owner
from perco.history.vacuum import VACUUM_ROW
from perco.schema.catalogue import SYSTEM_TABLE, schema_of
from perco.serve.client import is_client, remote_owner
from perco.serve.folders import folder_of
from perco.storage import DATA, WRITE

_REMOVED = {  # singular and plural
    "versions": ("version", "versions"),
    "acks": ("ack", "acks"),
    "rollbacks": ("rollback marker", "rollback markers"),
    "traces": ("trace of a read lock", "traces of read locks"),
    "data": ("long value", "long values"),
    "notes": ("note of the clock", "notes of the clock"),
    "system": ("old version of the store's own rows", "old versions of the store's own rows"),
    "log": ("entry of a log of changes", "entries of logs of changes"),
    "dropped": ("cell of what was dropped", "cells of what was dropped"),
}
_KINDS = {
    "transaction": "an open transaction or snapshot",
    "snapshot": "an open snapshot of the past",
    "pin": "pin",
    "retention": "the retention period (perco.Keep)",
}


async def vacuum(store: str, *, json: bool) -> int:
    """Remove old versions, as the store's owner or through the owner."""
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(inside(db).catalogue)
    options = perco.Options(vacuum=perco.options.VacuumOptions(on=False))
    async with perco.open(store, schema, options=options) as db:
        before = await _records(db)
        with _progress(db) as tell:
            result = await db.vacuum(progress=tell)
        after = await _records(db)
        age_s = await age_of(db, result.watermark, time.time())
        holder = {**result.holder._asdict(), "age_s": await age_of(db, result.holder.ts, time.time())}
    if json:
        found = asdict(result) | {"holder": holder, "records": {"before": before, "after": after}}
        show_json({key: value for key, value in found.items() if key != "table"})
        return FINE
    kinds = [_counted(count, kind) for kind, count in asdict(result.removed).items() if count]
    left = "is left" if after == 1 else "are left"
    print(f"removed {', '.join(kinds) or 'nothing'}; {after} of {counted(before, 'record')} {left}")
    looked = f"looked at {counted(result.rows, 'row')}, settled {counted(result.locks, 'lock')}"
    print(f"{looked}, in {result.seconds:.1f} s")
    print(f"all tables can be read from {watermark_line({'ts': result.watermark, 'age_s': age_s, 'holder': holder})}")
    if result.blocked:
        wait = "waits for observers, and stays" if result.blocked == 1 else "wait for observers, and stay"
        print(f"{counted(result.blocked, 'deleted row')} {wait} until these have run")
    if result.corrupt:
        done = "does not decode and was" if result.corrupt == 1 else "do not decode and were"
        print(f"{counted(result.corrupt, 'row')} {done} left alone: run perco check {store}")
    return FINE


async def _records(db: perco.Database) -> int:
    folder = (
        await remote_owner(db).folder() if is_client(db) else folder_of(local_owner(db).local, inside(db).catalogue)
    )
    return sum(file.entries[WRITE] for file in folder.files)


def _counted(count: int, kind: str) -> str:
    return f"{count} {_REMOVED[kind][count != 1]}"


@contextmanager
def _progress(db: perco.Database) -> Iterator[Callable[[perco.VacuumResult], None]]:
    """Show a progress bar on a terminal; elsewhere, show nothing."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} cells removed"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("vacuum", total=None)

        def tell(so_far: perco.VacuumResult) -> None:
            text = f"vacuum {so_far.table}: {so_far.rows} rows"
            bar.update(task, description=text, completed=so_far.removed.cells)

        yield tell


async def pins(store: str, drop: str | None, *, json: bool) -> int:
    """List the pins, or drop one."""
    async with perco.open(store, readonly=True) as db:
        found = [_pin(pin, time.time()) for pin in await db.pins()]
        schema = schema_of(inside(db).catalogue)
    if drop is None:
        if json:
            show_json(found)
        elif found:
            show_pins(found)
        else:
            print("no pins")
        return FINE
    async with perco.open(store, schema, options=perco.Options(vacuum=perco.options.VacuumOptions(on=False))) as db:
        dropped = await db.drop_pin(drop)
    if not dropped:
        complain(f"there is no pin {drop!r} in {store}; the store has: {', '.join(p['name'] for p in found) or 'none'}")
        return FOUND
    if json:
        show_json({"dropped": dropped})
    else:
        print(f"dropped {drop}")
    return FINE


def show_pins(pins: list[dict[str, Any]]) -> None:
    lines = [(p["name"], p["ts"], ago(p["age_s"]), _left(p["lease_left_s"]), p["owner"]) for p in pins]
    show_table(("pin", "timestamp", "made", "lease", "owner"), lines, numbers=["timestamp"], whole=["made", "lease"])


def _left(seconds: float) -> str:
    return f"{seconds:.0f} s left" if seconds > 0 else "has expired"


def _pin(pin: perco.Pin, now: float) -> dict[str, Any]:
    return {
        "name": pin.name,
        "owner": pin.owner,
        "ts": pin.ts,
        "age_s": round(max(now - pin.made_ms / 1000, 0.0), 3),
        "lease_left_s": round(max(pin.expires_ms / 1000 - now, 0.0), 3),
    }


# ------------------------------------------------------------------ for status


async def history_of(db: perco.Database, *, now: float) -> dict[str, Any]:
    """The watermark, what held it back when the owner last looked, and the pins, as plain data."""
    _, watermark, cuts = await published(inside(db).driver.store)
    [[cells]] = await inside(db).driver.store.read([(SYSTEM_TABLE, VACUUM_ROW, [(DATA, 0, 1, 1, 1)])])
    pins = [_pin(pin, now) for pin in await db.pins()]
    holder = None
    if cells:
        wall_ms, told = msgpack.unpackb(cells[0][1])
        kind, ts, name, oldest_open = msgpack.unpackb(told)
        holder = {
            "kind": kind,
            "ts": ts,
            "name": name,
            "owner": next((pin["owner"] for pin in pins if pin["name"] == name), None),
            "age_s": await age_of(db, ts, now),
            "oldest_open": {"ts": oldest_open, "age_s": await age_of(db, oldest_open, now)} if oldest_open else None,
            "since_s": round(max(now - wall_ms / 1000, 0.0), 3),
        }
    age_s = await age_of(db, watermark, now)
    return {"watermark": {"ts": watermark, "age_s": age_s, "cuts": cuts, "holder": holder}, "pins": pins}


async def age_of(db: perco.Database, ts: int, now: float) -> float | None:
    """How many seconds ago a timestamp was handed out, exact to about a second; None if no note of the clock is at or
    above it. The first such note was made soon after the timestamp was handed out."""
    note = await newest_note(inside(db).driver.store)
    if not ts or note is None or note[0] < ts:
        return None
    low = ts
    while low < note[0]:
        middle = (low + note[0] - 1) // 2
        below = await note_below(inside(db).driver.store, middle)
        if below is not None and below[0] >= ts:
            note = below
        else:
            low = middle + 1
    return round(max(now - note[1], 0.0), 3)


def watermark_line(found: dict[str, Any], *, alive: bool = True) -> str:
    """The watermark and what holds it back, in words; `alive`: whether an owner keeps this up to date."""
    if not found["ts"]:
        return "its beginning"
    age = "" if found["age_s"] is None else f", {ago(found['age_s'])}"
    text = f"timestamp {found['ts']}{age}"
    holder = found["holder"]
    if holder is None:
        return text
    who = _KINDS[holder["kind"]]
    if holder["kind"] == "pin":
        who += f" {holder['name']!r}" + (f" of {holder['owner']}" if holder.get("owner") else "")
    elif holder["kind"] != "retention":
        begun = alive and holder["age_s"] is not None
        who += f", timestamp {holder['ts']}" + (f", begun {ago(holder['age_s'])}" if begun else "")
    if alive:
        return f"{text}; held back by {who}"
    return f"{text}; was held back by {who} when last looked at, first seen {ago(holder['since_s'])}"


def kept(keep: dict[str, Any]) -> str:
    """How long a table's history is kept, in words."""
    seconds, versions = keep["seconds"], keep["versions"]
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds and not seconds % unit:
            text = f"{seconds / unit:g} {name}"
            break
    else:
        text = f"{seconds:g} s"
    return text if versions == 1 else f"{text}, {versions} versions"
