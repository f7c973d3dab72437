"""`perco drop`, `perco views drop`, `perco observers --drop`: what no program declares any more."""

from __future__ import annotations

from dataclasses import asdict

import perco
from perco import views as declared_views
from perco.cli.looks import look
from perco.cli.screen import FINE, FOUND, counted, show_json
from perco.cli.working import loaded_views
from perco.database.inside import inside
from perco.errors import UsageError
from perco.schema.catalogue import Catalogue, schema_of
from perco.schema.removing import without_columns, without_table
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


async def drop_observer(store: str, id: str, *, yes: bool, json: bool) -> int:
    """Unregister an observer, and remove the changes that wait for it; only with `yes`, if there are any."""
    async with perco.open(store, readonly=True) as db:
        waiting = (await look(db)).waiting.get(id, 0)
        failed = len(await db.failed(id, limit=None)) if id in inside(db).catalogue.observers else 0
    if (waiting or failed) and not yes:
        if json:
            show_json({"observer": id, "waiting": waiting, "failed": failed, "dropped": False})
        else:
            wait = "waits" if waiting == 1 else "wait"
            print(f"{counted(waiting, 'change')} {wait} for observer {id}, and {failed} are on its failed list")
            print("nothing was dropped: add --yes to drop it, with these")
        return FOUND
    async with perco.open(store, perco.Schema()) as db:  # it declares nothing, so it makes nothing again
        removed = (await db.drop_observer(id))[id]
    if json:
        show_json({"observer": id, "changes": removed})
    else:
        print(f"dropped observer {id}, and {counted(removed, 'change')} that waited for it or had failed")
    return FINE


async def drop(store: str, what: str, *, group: str | None, yes: bool, json: bool) -> int:
    """Show what belongs to a table, or to one of its columns or groups, in a store and, with `yes`, drop it."""
    async with perco.open(store, readonly=True) as db:
        catalogue = inside(db).catalogue
        table, columns = _named(catalogue, what, group)
        if columns is None:
            without_table(catalogue, table)
        else:
            without_columns(catalogue, table, columns)
        values = await _values(db, table, columns)
        writers = [
            state.id
            for state in await db.observers()
            if any(at == table and (columns is None or name in columns) for at, name in state.outputs)
        ]
    found = {"table": table, "columns": columns, "values": values, "written_by": writers, "dropped": yes}
    if yes:
        async with perco.open(store, perco.Schema()) as db:  # it declares nothing, so it makes nothing again
            await (db.drop_table(table) if columns is None else db.drop_column(table, columns))
    if json:
        show_json(found)
    else:
        names = ", ".join(f"{table}.{name}" for name in columns or ())
        whole = f"table {table}" if columns is None else f"column{'s' if len(columns) != 1 else ''} {names}"
        for id in writers:
            print(f"observer {id} has been seen to write it")
        print(f"{whole}: {', '.join(f'{name} {count:,}' for name, count in values.items()) or 'no values'}")
        print("dropped: the next vacuum removes the values" if yes else "nothing was dropped: add --yes to drop it")
    return FINE if yes else FOUND


def _named(catalogue: Catalogue, what: str, group: str | None) -> tuple[str, list[str] | None]:
    """The table, and the columns to drop; None: the table itself. Raises: UsageError."""
    live = {name: entry for name, entry in catalogue.tables.items() if not entry.dropped}
    titles = {catalogue.title(name): entry for name, entry in live.items()}
    tables = {**live, **titles}  # a renamed table can be given by its name in the store, too (N18)
    if what in tables:  # a table's name may have dots
        title = next(title for title, entry in titles.items() if entry is tables[what])
        if group is None:
            return title, None
        found = [name for name, entry in tables[what].columns.items() if entry.group.partition(":")[2] == group]
        if not found:
            raise UsageError(f"table {what!r} has no group {group!r}")
        return title, found
    for table in sorted(tables, key=len, reverse=True):
        column = what.removeprefix(f"{table}.")
        if column != what and group is None and column in tables[table].columns:
            return next(title for title, entry in titles.items() if entry is tables[table]), [column]
    for name, entry in catalogue.tables.items():
        gone = {f"{catalogue.title(name)}.{each.name}" for each in entry.gone.values()}
        if what in gone or (entry.dropped and what in (name, *entry.names)):
            raise UsageError(f"{what!r} was dropped already")
    known = ", ".join(titles) or "none"
    raise UsageError(f"there is no table or column {what!r} (TABLE or TABLE.COLUMN); there are tables: {known}")


async def _values(db: perco.Database, table: str, columns: list[str] | None) -> dict[str, int]:
    """How many values each column has."""
    known = db.schema.tables[table]
    found = [column for name, column in known.columns.items() if columns is None or name in columns]
    counts = {column.name: 0 for column in found}
    if found:
        async with db.snapshot() as snap:
            async for row in snap.scan(known, columns=found):
                for column in found:
                    counts[column.name] += row[column] is not None
    return counts
