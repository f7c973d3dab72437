"""`perco backfill`: show how far observers have been notified of older data, and notify them of the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn

import perco
from perco.cli.screen import FINE, counted, show_json, show_table
from perco.database.inside import inside
from perco.notify.backfill import progress_of
from perco.schema.catalogue import schema_of

_STATES = {"done": "yes", "under way": "under way", "not begun": "not yet"}


async def backfill(store: str, *, running: bool, json: bool) -> int:
    """Show the progress of backfills or, with `running`, open the store for writing and finish them."""
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(inside(db).catalogue)
        found = await progress_of(inside(db).driver.store, inside(db).catalogue)
    if not running:
        if json:
            show_json([_plain(each) for each in found])
        elif found:
            _show(found)
        else:
            print("no observers")
        return FINE
    options = perco.Options(
        vacuum=perco.options.VacuumOptions(on=False), backfill=perco.options.BackfillOptions(on=False)
    )
    async with perco.open(store, schema, options=options) as db:
        with _progress() as tell:
            done = await db.backfill(progress=tell)
    if json:
        show_json([_plain(each) for each in done])
        return FINE
    for each in done:
        told = f"observer {each.id}, version {each.version}, was notified of {counted(each.notified, 'change')}"
        print(f"{told}; looked at {counted(each.rows, 'row')} of {each.table}")
    print("all observers have been notified of existing data; they run when a program that has them opens the store")
    return FINE


def _state(found: perco.BackfillProgress) -> str:
    return "done" if found.done else "under way" if found.rows else "not begun"


def _plain(found: perco.BackfillProgress) -> dict[str, Any]:
    """A backfill as plain data; `rows`, `notified`: None if they are no longer known."""
    known = not found.done or found.rows
    return {
        "observer": found.id,
        "version": found.version,
        "table": found.table,
        "state": _state(found),
        "rows": found.rows if known else None,
        "notified": found.notified if known else None,
    }


def _show(found: list[perco.BackfillProgress]) -> None:
    lines = [
        (
            each.id,
            each.version,
            each.table,
            _STATES[_state(each)],
            "" if each.done else each.rows,
            "" if each.done else each.notified,
        )
        for each in found
    ]
    head = ("observer", "version", "table", "notified of all", "rows so far", "changes so far")
    show_table(head, lines, numbers=["version", "rows so far", "changes so far"])


@contextmanager
def _progress() -> Iterator[Callable[[perco.BackfillProgress], None]]:
    """Show a line on a terminal; elsewhere, show nothing."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with Progress(TextColumn("{task.description}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("backfill", total=None)

        def tell(so_far: perco.BackfillProgress) -> None:
            text = f"backfill of {so_far.id}: {so_far.rows} rows of {so_far.table}, {so_far.notified} changes notified"
            bar.update(task, description=text)

        yield tell
