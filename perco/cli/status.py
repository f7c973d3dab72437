"""`perco status`: who has a store open, what is in it, and what waits."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import msgpack

import perco
from perco.cli.history import history_of, kept, show_pins, watermark_line
from perco.cli.looks import Look, look, observed_by, some
from perco.cli.screen import FINE, ago, show_fields, show_json, show_table, size
from perco.cli.values import shown
from perco.storage import DATA, LOCK, PROTOCOL_GROUPS, SHARED, owner
from perco.storage.folder import FORMAT, unsynced
from perco.txn.catalogue import SYSTEM_TABLE
from perco.txn.heartbeat import LEASE_ROW
from perco.txn.oracle import durable_bound, newest_note

_DURABILITY = {
    "": "power: what was acknowledged survives power loss",
    "since this boot": "process: the newest writes survive the death of the process, not power loss",
    "before a restart": "process, and the machine has restarted since: run perco check with --accept",
}


async def status(store: str, *, json: bool) -> int:
    async with perco.open(store, readonly=True) as db:
        found = await gather(db)
    if json:
        show_json(found)
    else:
        _render(found)
    return FINE


async def gather(db: perco.Database) -> dict[str, Any]:
    """All that `status` tells, as plain data."""
    path = db.local.path
    assert path is not None, "only folders are opened for reading"
    now = time.time()
    alive = db.local.owner_alive
    waiting = await look(db)
    bound, note = await durable_bound(db.driver.store), await newest_note(db.driver.store)
    history = await history_of(db, now=now)
    catalogue = db.catalogue
    return {
        "store": str(path.absolute()),
        "format": FORMAT,
        "owner": await _owner(db, path, alive=alive, now=now),
        "durability": {"mark": unsynced(path), "meaning": _DURABILITY[unsynced(path)]},
        "catalogue": catalogue.version,
        "clock": {
            "ts": note[0] if note else 0,
            "wall": datetime.fromtimestamp(note[1]).astimezone().isoformat() if note else None,
            "age_s": round(max(now - note[1], 0.0), 3) if note else None,
            "bound": bound,
        },
        "watermark": history["watermark"],
        "pins": history["pins"],
        "tables": [_table(db, name) for name in catalogue.tables if name in db.local.store.tables()],
        "observers": _observers(db, waiting),
        "waiting": waiting.changes,
        "damaged": waiting.damaged,
        "locks": sum(
            tablet.entries(group)
            for tablet in db.local.store.tablets()
            if tablet.table != SYSTEM_TABLE
            for group in (LOCK, SHARED)
        ),
    }


async def _owner(db: perco.Database, path: Path, *, alive: bool, now: float) -> dict[str, Any]:
    pid, command = owner(path)
    [[cells]] = await db.driver.store.read([(SYSTEM_TABLE, LEASE_ROW, [(DATA, 0, 1, 1, 1)])])
    beat = msgpack.unpackb(cells[0][1]) if cells else None
    age_s = round(max(now - beat[2] / 1000, 0.0), 3) if beat and beat[0] == pid else None
    return {"alive": alive, "pid": pid, "command": command, "heartbeat_age_s": age_s}


def _table(db: perco.Database, name: str) -> dict[str, Any]:
    entry, key = db.catalogue.tables[name], db.schema.tables[name].key if name in db.schema.tables else perco.BYTES
    groups = [*PROTOCOL_GROUPS, *db.catalogue.groups(name)]
    tablets = [
        {
            "start": key.decode(tablet.start) if tablet.start else None,
            "bytes": tablet.statistics().used_bytes,
            "entries": {group: tablet.entries(group) for group in groups},
        }
        for tablet in db.local.store.tablets()
        if tablet.table == name
    ]
    columns = [
        {
            "name": column,
            "codec": known.codec,
            "group": known.group,
            "observers": observed_by(db.catalogue, name, column),
        }
        for column, known in entry.columns.items()
    ]
    keep = db.catalogue.keep_of(name)
    kept = {"seconds": keep.seconds, "versions": keep.versions}
    return {"name": name, "key": entry.key, "keep": kept, "columns": columns, "tablets": tablets}


def _observers(db: perco.Database, waiting: Look) -> list[dict[str, Any]]:
    return [
        {
            "id": id,
            "table": entry.table,
            "column": entry.column,
            "ready": entry.ready,
            "waiting": waiting.waiting.get(id, 0),
        }
        for id, entry in db.catalogue.observers.items()
    ]


# ------------------------------------------------------------------ for people


def _render(found: dict[str, Any]) -> None:
    clock = found["clock"]
    noted = f"timestamp {clock['ts']}, noted {ago(clock['age_s'])} ({clock['wall']})" if clock["ts"] else "never noted"
    show_fields(
        [
            ("store", f"{found['store']} ({found['format']})"),
            ("owner", _owner_line(found["owner"])),
            ("durability", found["durability"]["meaning"]),
            ("catalogue", f"version {found['catalogue']}"),
            ("clock", noted),
            ("locks", str(found["locks"])),
            ("history", "readable from " + watermark_line(found["watermark"])),
            ("waiting", f"{found['waiting']} change{'' if found['waiting'] == 1 else 's'} for observers"),
            *([("damaged", f"{some(found['damaged'])}: run perco check")] if found["damaged"] else []),
        ]
    )
    if found["tables"]:
        print()
        _render_tables(found["tables"])
    if found["pins"]:
        print()
        show_pins(found["pins"])
    if found["observers"]:
        print()
        lines = [
            (o["id"], f"{o['table']}.{o['column']}", o["waiting"], "yes" if o["ready"] else "not yet")
            for o in found["observers"]
        ]
        show_table(("observer", "observes", "waiting", "ready"), lines, numbers=["waiting"])


def _owner_line(found: dict[str, Any]) -> str:
    who = f"process {found['pid'] or 'unknown'} ({found['command'] or 'unknown command'})"
    if not found["alive"]:
        return f"nobody; last: {who}" if found["pid"] else "nobody"
    beat = found["heartbeat_age_s"]
    return who if beat is None else f"{who}, heartbeat {ago(beat)}"


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
    groups = list(
        dict.fromkeys(group for table in tables for tablet in table["tablets"] for group in tablet["entries"])
    )
    rows = [
        (
            table["name"],
            table["key"],
            kept(table["keep"]),
            "" if tablet["start"] is None else shown(tablet["start"], 24),
            size(tablet["bytes"]),
            *(tablet["entries"].get(group, "") for group in groups),
        )
        for table in tables
        for tablet in table["tablets"]
    ]
    show_table(("table", "key", "history", "from", "size", *groups), rows, numbers=["size", *groups])
