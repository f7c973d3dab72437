"""`perco schema`: the schema of a store, and what a program would change in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import perco
from perco.cli.screen import FAILED, FINE, FOUND, show_json, show_table
from perco.cli.working import declared
from perco.database.inside import inside
from perco.errors import UsageError
from perco.schema import catalogue as catalogues
from perco.schema.catalogue import Catalogue
from perco.schema.differing import ADDS, CHANGES, LEAVES, REFUSES, Difference, differences
from perco.views import Views

_SIGNS: Final = {ADDS: "+", CHANGES: "~", LEAVES: " ", REFUSES: "!"}


async def schema(store: str, what: str | None, *, check: bool, json: bool) -> int:
    """Show the schema of a store; with a program's, what opening the store with it would change."""
    if what is None:
        if check:
            raise UsageError("--check compares the store with a program: give MODULE:SCHEMA, too")
        async with perco.open(store, readonly=True) as db:
            _show(inside(db).catalogue, json=json)
        return FINE
    wanted = _schema(what)
    async with perco.open(store, readonly=True) as db:
        found = differences(await catalogues.load(inside(db).driver.store), wanted)
    if json:
        show_json([each._asdict() for each in found])
    elif not found:
        print("opening the store with this program changes nothing")
    else:
        for kind in _SIGNS:
            _print(kind, [each for each in found if each.kind == kind])
    kinds = {each.kind for each in found}
    if REFUSES in kinds:
        return FAILED
    return FOUND if check and kinds & {ADDS, CHANGES} else FINE


def _print(kind: str, found: list[Difference]) -> None:
    heads = {
        ADDS: "opening the store with this program would add:",
        CHANGES: "it would change:",
        LEAVES: "it would leave as they are:",
        REFUSES: "it would be refused, because of:",
    }
    if found:
        print(heads[kind])
        for each in found:
            print(f"  {_SIGNS[kind]} {each.what}: {each.effect}")


def _schema(what: str) -> perco.Schema:
    found = declared(what, "MODULE:SCHEMA, such as app:schema for `schema` in app.py")
    if isinstance(found, Views):
        return found.schema
    if not isinstance(found, perco.Schema):
        raise UsageError(f"{what} is {type(found).__name__}, not a perco.Schema")
    return found


def _show(catalogue: Catalogue, *, json: bool) -> None:
    tables = {catalogue.title(name): table for name, table in catalogue.tables.items() if not table.dropped}
    entries = {id: replace(each, table=catalogue.title(each.table)) for id, each in catalogue.observers.items()}
    catalogue = replace(catalogue, tables=tables, observers=entries)
    columns = [
        (name, column, entry.codec, entry.group.partition(":")[2])
        for name, table in catalogue.tables.items()
        for column, entry in table.columns.items()
        if not column.startswith("_")  # perco's own
    ]
    observers = [
        (id, f"{each.table}.{each.column}", each.version, "paused" if each.paused else "")
        for id, each in catalogue.observers.items()
    ]
    if json:
        show_json(_plain(catalogue))
        return
    keys = [(name, table.key, "yes" if table.changes else "") for name, table in catalogue.tables.items()]
    show_table(("table", "key", "log of changes"), keys)
    print()
    show_table(("table", "column", "codec", "group"), columns)
    if observers:
        print()
        show_table(("observer", "observes", "version", "state"), observers, numbers=["version"])


def _plain(catalogue: Catalogue) -> dict[str, Any]:
    return {
        "version": catalogue.version,
        "tables": {
            name: {
                "key": table.key,
                "changes": table.changes,
                "columns": {
                    column: {"codec": entry.codec, "group": entry.group.partition(":")[2]}
                    for column, entry in table.columns.items()
                },
            }
            for name, table in catalogue.tables.items()
        },
        "observers": {
            id: {"table": each.table, "column": each.column, "version": each.version, "paused": each.paused}
            for id, each in catalogue.observers.items()
        },
    }
