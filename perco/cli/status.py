"""`perco status`: which process has a store open, what is in it, and which changes wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import perco
from perco.cli.history import age_of, history_of, kept, show_pins, watermark_line
from perco.cli.looks import Look, connected, look, observed_by, some
from perco.cli.screen import FINE, ago, counted, show_fields, show_json, show_table, size
from perco.cli.values import shown
from perco.clock.heartbeat import LEASE_ROW, Lease, read_lease
from perco.clock.oracle import durable_bound, newest_note
from perco.database.inside import inside, local_owner
from perco.notify.breakers import trips_in
from perco.schema.catalogue import SYSTEM_TABLE
from perco.serve.client import is_client, remote_owner
from perco.serve.folders import folder_of
from perco.serve.messages import FolderIs
from perco.serve.opening import visiting
from perco.serve.tasks import lines
from perco.storage import DATA, LOCK, NOTIFY, PENDING, SHARED, WRITE, native_why_not
from perco.storage.folder import FORMAT

_DURABILITY = {
    "": "power: acknowledged writes survive power loss",
    "since this boot": "process: the newest writes survive the death of the process, but not power loss",
    "before a restart": "process, and the machine has restarted since: run perco check with --accept",
}


_GROUPS = "cells by group (write: commits; lock, shared: locks; notify: waiting changes; data: long values)"


async def status(store: str, *, json: bool, groups: bool) -> int:
    async with perco.open(store, readonly=True) as db:
        found = await gather(db)
        users = await connected(store, db)
        found["clients"], found["workers"] = users or (None, None)
    if json:
        show_json(found)
    else:
        _render(found, groups=groups)
    return FINE


async def tablets(store: str, *, json: bool) -> int:
    """Show which process of an open store has which tablets."""
    async with visiting(store) as db:
        servers = await remote_owner(db).servers()
    if json:
        show_json([{**each._asdict(), "tablets": [tablet._asdict() for tablet in each.tablets]} for each in servers])
        return FINE
    rows: list[tuple[object, ...]] = []
    for server in servers:
        name = f"{server.number or 'owner'}, process {server.process}"
        rows += [
            (
                *(tablet.table, tablet.number, shown(tablet.start, 24) if tablet.start else ""),
                *(name, max(tablet.epoch - 1, 0), tablet.mutations, tablet.batches, size(tablet.used_bytes)),
            )
            for tablet in server.tablets
        ] or [("(no tablet)", "", "", name, 0, 0, 0, "")]
    head = ("table", "tablet", "from", "server", "taken over", "mutations", "batches", "size")
    numbers = ("tablet", "taken over", "mutations", "batches", "size")
    _show_told(head, sorted(rows, key=lambda row: tuple(map(str, row[:2]))), keep=("table", "server"), numbers=numbers)
    return FINE


async def tasks(store: str, *, json: bool) -> int:
    """Show the tasks of all processes that have the store open."""
    async with visiting(store) as db:
        found = await remote_owner(db).tasks()
    if json:
        show_json([{**each._asdict(), "tasks": [task._asdict() for task in each.tasks]} for each in found])
        return FINE
    for i, process in enumerate(found):
        count = sum(task.alike for task in process.tasks) + process.more
        print(f"{'' if i == 0 else chr(10)}{process.role}, process {process.pid}: {counted(count, 'task')}")
        show_table(("task", "at", "waits for"), lines(process.tasks), whole=("task",))
        if process.more:
            print(f"and {counted(process.more, 'more task')}")
    return FINE


async def gather(db: perco.Database) -> dict[str, Any]:
    """Everything that `status` shows, as plain data."""
    folder = await place_of_store(db)
    now = time.time()
    waiting = await look(db)
    bound, note = await durable_bound(inside(db).driver.store), await newest_note(inside(db).driver.store)
    history = await history_of(db, now=now)
    catalogue = inside(db).catalogue
    return {
        "store": folder.path,
        "format": FORMAT,
        "owner": await owner_of(db, folder, now=now),
        "durability": {"mark": folder.mark, "meaning": _DURABILITY[folder.mark]},
        "catalogue": catalogue.version,
        "clock": {
            "ts": note[0] if note else 0,
            "wall": datetime.fromtimestamp(note[1]).astimezone().isoformat() if note else None,
            "age_s": round(max(now - note[1], 0.0), 3) if note else None,
            "bound": bound,
        },
        "watermark": history["watermark"],
        "pins": history["pins"],
        "tables": [
            await table_told(db, folder, name, history["watermark"]["cuts"].get(name, 0), now)
            for name in catalogue.tables
            if name in inside(db).place.store.tables()
        ],
        "dropped": [
            f"{catalogue.title(name)}.{gone.name}"
            for name, entry in catalogue.tables.items()
            for gone in entry.gone.values()
            if not gone.clean
        ],
        "observers": await _observers(db, waiting, now),
        "waiting": waiting.changes,
        "failing": sum(changes for changes, _ in waiting.failing.values()),
        "failed": await db.failed_count(),
        "damaged": waiting.damaged,
        "locks": sum(
            file.entries[group]
            for file in folder.files
            if file.table != SYSTEM_TABLE
            for group in (LOCK, SHARED, PENDING)
        ),
    }


async def place_of_store(db: perco.Database) -> FolderIs:
    """The store's folder."""
    if is_client(db):
        return await remote_owner(db).folder()
    return folder_of(local_owner(db).local, inside(db).catalogue)


async def owner_of(db: perco.Database, folder: FolderIs, *, now: float) -> dict[str, Any]:
    """The process that has the store open, as plain data."""
    alive = inside(db).place.owner_alive
    pid, command = folder.process or None, folder.command
    [[cells]] = await inside(db).driver.store.read([(SYSTEM_TABLE, LEASE_ROW, [(DATA, 0, 1, 1, 1)])])
    lease = read_lease(cells[0][1]) if cells else Lease(0, "", 0)
    found: dict[str, Any] = {"alive": alive, "pid": pid, "command": command, "heartbeat_age_s": None, "held": None}
    if lease.pid == pid:
        found["heartbeat_age_s"] = round(max(now - lease.wall_ms / 1000, 0.0), 3)
        if alive and lease.where:
            found["held"] = {"seconds": lease.held_s, "where": lease.where}
    return found


async def table_told(db: perco.Database, folder: FolderIs, name: str, cut: int, now: float) -> dict[str, Any]:
    """A table, its columns and its tablets, as plain data. `cut`: since when it can be read."""
    entry, key = (
        inside(db).catalogue.tables[name],
        db.schema.tables[name].key if name in db.schema.tables else perco.BYTES,
    )
    numbers = {start: number for number, start, _ in entry.tablets()}
    tablets = [
        {
            "number": numbers.get(file.start),
            "start": key.decode(file.start) if file.start else None,
            "bytes": file.used_bytes,
            "entries": file.entries,
        }
        for file in folder.files
        if file.table == name
    ]
    columns = [
        {
            "name": column,
            "codec": known.codec,
            "group": "" if known.is_signal else known.group,
            "observers": observed_by(inside(db).catalogue, name, column),
        }
        for column, known in entry.columns.items()
        if not column.startswith("_")  # perco's own
    ]
    keep = inside(db).catalogue.keep_of(name)
    kept = {"seconds": keep.seconds, "versions": keep.versions}
    since = {"ts": cut, "age_s": await age_of(db, cut, now)}
    told = {
        "name": inside(db).catalogue.title(name),
        "dropped": entry.dropped,
        "key": entry.key,
        "keep": kept,
        "readable_since": since,
    }
    return {**told, "columns": columns, "tablets": tablets}


async def _observers(db: perco.Database, waiting: Look, now: float) -> list[dict[str, Any]]:
    trips = await trips_in(inside(db).driver.store, int(now * 1000))
    return [
        {
            "id": id,
            "table": inside(db).catalogue.title(entry.table),
            "column": entry.column,
            "ready": entry.ready,
            "paused": entry.paused,
            "tripped": trips[entry.number].error if entry.number in trips else None,
            "waiting": waiting.waiting.get(id, 0),
            "lag_s": await age_of(db, waiting.causes.get(id, 0), now),
            "failing": waiting.failing.get(id, (0, 0))[0],
            "attempts": waiting.failing.get(id, (0, 0))[1],
        }
        for id, entry in inside(db).catalogue.observers.items()
    ]


# ------------------------------------------------------------------ for human readers


def _render(found: dict[str, Any], *, groups: bool) -> None:
    clock = found["clock"]
    noted = f"timestamp {clock['ts']}, noted {ago(clock['age_s'])} ({clock['wall']})" if clock["ts"] else "never noted"
    show_fields(
        [
            ("store", f"{found['store']} ({found['format']})"),
            ("owner", _owner_line(found["owner"])),
            *([("used by", _users_line(found))] if found["clients"] is not None else []),
            ("durability", found["durability"]["meaning"]),
            *([("extension", f"not used here, so perco is slower: {reason}")] if (reason := native_why_not()) else []),
            ("catalogue", f"version {found['catalogue']}"),
            ("clock", noted),
            ("locks", str(found["locks"])),
            (
                "history",
                "readable in all tables from " + watermark_line(found["watermark"], alive=found["owner"]["alive"]),
            ),
            ("waiting", f"{found['waiting']} change{'' if found['waiting'] == 1 else 's'} for observers"),
            *([("failing", _failing_line(found["observers"]))] if found["failing"] else []),
            *(
                ("tripped", f"{o['id']}, whose runs all fail: {o['tripped']}")
                for o in found["observers"]
                if o["tripped"]
            ),
            *([("failed", f"{counted(found['failed'], 'change')}: perco failed list")] if found["failed"] else []),
            *(
                [("dropped", f"{some(found['dropped'])}: still to be removed (perco vacuum)")]
                if found["dropped"]
                else []
            ),
            *([("damaged", f"{some(found['damaged'])}: run perco check")] if found["damaged"] else []),
        ]
    )
    if tables := [table for table in found["tables"] if not table["dropped"]]:
        print()
        _render_tables(tables)
        if groups:
            print()
            _render_groups(tables)
    if found["pins"]:
        print()
        show_pins(found["pins"])
    if found["observers"]:
        print()
        lines = [
            (
                *(o["id"], f"{o['table']}.{o['column']}", o["waiting"]),
                *("" if o["lag_s"] is None else f"{o['lag_s']:.0f} s", _state(o)),
            )
            for o in found["observers"]
        ]
        head = ("observer", "observes", "waiting", "lag", "ready")
        _show_told(head, lines, keep=("observer", "observes", "waiting", "ready"), numbers=["waiting"])


def _users_line(found: dict[str, Any]) -> str:
    clients, workers = counted(found["clients"], "client"), found["workers"]
    return f"{clients} of the owner; {workers or 'no'} process{'' if workers == 1 else 'es'} with a worker"


def _failing_line(observers: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{o['failing']} for {o['id']} (attempt {o['attempts']}), being retried" for o in observers if o["failing"]
    )


def _state(observer: dict[str, Any]) -> str:
    if observer["tripped"] and not observer["paused"]:
        return "tripped"
    return "paused" if observer["paused"] else "yes" if observer["ready"] else "not yet"


def _owner_line(found: dict[str, Any]) -> str:
    who = f"process {found['pid'] or 'unknown'} ({found['command'] or 'unknown command'})"
    if not found["alive"]:
        return f"no process; last: {who}" if found["pid"] else "no process"
    beat, held = found["heartbeat_age_s"], found["held"]
    line = who if beat is None else f"{who}, heartbeat {ago(beat)}"
    return (
        line
        if held is None
        else f"{line}; its event loop was blocked then, for {held['seconds']:.1f} s at {held['where']}"
    )


def _render_tables(tables: list[dict[str, Any]]) -> None:
    lines = [
        (
            f"{table['name']}.{column['name']}",
            column["codec"],
            column["group"],
            ", ".join(column["observers"]),
        )
        for table in tables
        for column in table["columns"]
    ]
    show_table(("column", "codec", "group", "observers"), lines)
    print()
    rows: list[tuple[object, ...]] = [
        (
            table["name"],
            table["key"],
            kept(table["keep"]),
            _since(table["readable_since"]),
            tablet["number"],
            "" if tablet["start"] is None else shown(tablet["start"], 24),
            tablet["entries"][WRITE],
            size(tablet["bytes"]),
            sum(tablet["entries"][group] for group in (LOCK, SHARED, PENDING)),
            tablet["entries"][NOTIFY],
        )
        for table in tables
        for tablet in table["tablets"]
    ]
    head = ("table", "key", "keeps", "readable since", "tablet", "from", "records", "size", "locks", "waiting")
    numbers = ("tablet", "records", "size", "locks", "waiting")
    _show_told(
        head, rows, keep=("records",), numbers=numbers, whole=("readable since",), spare=("key", "from", "keeps")
    )


def _render_groups(tables: list[dict[str, Any]]) -> None:
    print(_GROUPS)
    tablets = [(table["name"], t["number"], t) for table in tables for t in table["tablets"]]
    groups = list(dict.fromkeys(group for _, _, tablet in tablets for group in tablet["entries"]))
    rows = [(name, number, *(tablet["entries"].get(group, 0) for group in groups)) for name, number, tablet in tablets]
    _show_told(("table", "tablet", *groups), rows, keep=(), numbers=("tablet", *groups))


def _show_told(
    head: Sequence[str], rows: Sequence[Sequence[object]], *, keep: Sequence[str], **kwargs: Sequence[str]
) -> None:
    """Show a table without the columns that are 0 or empty in all rows, except those in `keep`."""
    told = [at for at, name in enumerate(head) if name in keep or any(row[at] for row in rows)]
    show_table([head[at] for at in told], [[row[at] for at in told] for row in rows], **kwargs)


def _since(cut: dict[str, Any]) -> str:
    if not cut["ts"]:
        return "its beginning"
    return f"timestamp {cut['ts']}" if cut["age_s"] is None else ago(cut["age_s"])
