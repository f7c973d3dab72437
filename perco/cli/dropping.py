"""`perco views drop`, `perco observers --drop`: what no program declares any more."""

from __future__ import annotations

from dataclasses import asdict

import perco
from perco import views as declared_views
from perco.cli.screen import FINE, FOUND, counted, show_json
from perco.cli.working import loaded_views
from perco.database.inside import inside
from perco.schema.catalogue import schema_of
from perco.views.dropping import Dropped


async def drop_view(program: str, view: str, store: str, *, yes: bool, json: bool) -> int:
    """Show what belongs to a view in a store and, with `yes`, remove it."""
    found = loaded_views(program)
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(inside(db).catalogue)  # the program's own schema would register the view again
        plan = await declared_views.would_drop(found, db, view)
    if json and not yes:
        show_json(asdict(plan))
        return FOUND
    if not json:
        _show(plan)
    if not yes:
        print("nothing was deleted: add --yes to drop it")
        return FOUND
    async with perco.open(store, schema) as db:
        done = await declared_views.drop(found, db, view)
    if json:
        show_json(asdict(done))
        return FINE
    print(f"dropped {view}; views that read its tables follow when a worker runs")
    if view in found.declared or view in found.sinks:
        print(f"{program} still declares it: a program that opens the store with that registers it again")
    return FINE


def _show(plan: Dropped) -> None:
    print(f"observers: {', '.join(plan.observers) or 'none are registered'}")
    for table, rows in sorted(plan.rows.items()):
        print(f"rows of {table}: {rows}")
    print(f"kept for it: for {counted(plan.owners, 'owner')}, and {counted(plan.kept, 'cell')} besides")
    print(f"changes that wait: {plan.changes}")


async def drop_observer(store: str, id: str, *, json: bool) -> int:
    """Unregister an observer, and remove the changes that wait for it."""
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(inside(db).catalogue)
    async with perco.open(store, schema) as db:
        removed = (await db.drop_observer(id))[id]
    if json:
        show_json({"observer": id, "changes": removed})
    else:
        print(f"dropped observer {id}, and {counted(removed, 'change')} that waited for it or had failed")
    return FINE
