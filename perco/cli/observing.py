"""`perco observers`, `perco pause`, `perco resume`: show which columns observers read and write, and pause them."""

from __future__ import annotations

from dataclasses import asdict

import perco
from perco.cli import graph
from perco.cli.looks import look
from perco.cli.screen import FINE, show_json, show_table
from perco.database.inside import inside
from perco.errors import UsageError
from perco.schema.catalogue import schema_of


async def observers(store: str, *, draw: bool, mermaid: bool, json: bool) -> int:
    """Print the observers as a table, or the pipeline as a drawing."""
    if draw + mermaid + json > 1:
        raise UsageError("choose one of --graph, --mermaid and --json")
    async with perco.open(store, readonly=True) as db:
        found = await db.observers()
        waiting = (await look(db)).waiting
    if json:
        show_json([asdict(state) | {"waiting": waiting.get(state.id, 0)} for state in found])
    elif not found:
        print("no observers are registered")
    elif mermaid:
        print(graph.mermaid(found))
    elif draw:
        graph.show(found)
    else:
        rows = [
            (
                state.id,
                f"{state.table}.{state.column}",
                ", ".join(map(".".join, state.outputs)),
                state.version,
                waiting.get(state.id, 0),
                graph.condition(state),
                ", ".join(f"{name}={value}" for name, value in state.limits.items()),
            )
            for state in found
        ]
        head = ["observer", "observes", "writes", "version", "waiting", "state", "limits"]
        last = len(head) if any(state.limits for state in found) else -1
        show_table(head[:last], [row[:last] for row in rows], numbers=["version", "waiting"], spare=["version"])
    return FINE


async def pause(store: str, id: str, *, paused: bool, json: bool) -> int:
    """Pause an observer, or resume it."""
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(inside(db).catalogue)
        inside(db).catalogue.with_paused(id, paused)  # raises for an unknown id, before the store is opened to write
        before = id in await db.paused()
    async with perco.open(store, schema) as db:
        await (db.pause(id) if paused else db.resume(id))
        waiting = (await db.waiting()).get(id, 0)
    word = "paused" if paused else "resumed"
    if json:
        show_json({"observer": id, "paused": paused, "waiting": waiting})
    elif before == paused:
        print(f"{id} was {'paused already' if paused else 'not paused'}")
    else:
        print(f"{word} {id}; {waiting} change{'s wait' if waiting != 1 else ' waits'} for it")
    return FINE
