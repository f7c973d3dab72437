"""`perco backfill`: how far observers have been told of what was there before them, and telling them of the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn

import perco
from perco.cli.screen import FINE, counted, show_json, show_table
from perco.txn.backfill import progress_of
from perco.txn.catalogue import schema_of

_STATES = {"done": "yes", "under way": "under way", "not begun": "not yet"}


async def backfill(store: str, *, running: bool, json: bool) -> int:
    """Show it; or open the store as its owner, and do what is left."""
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(db.catalogue)
        found = await progress_of(db.driver.store, db.catalogue)
    if not running:
        if json:
            show_json([_plain(each) for each in found])
        elif found:
            _show(found)
        else:
            print("no observers")
        return FINE
    options = perco.Options(vacuum=perco.VacuumOptions(on=False), backfill=perco.BackfillOptions(on=False))
    async with perco.open(store, schema, options=options) as db:
        with _progress() as tell:
            done = await db.backfill(progress=tell)
    if json:
        show_json([_plain(each) for each in done])
        return FINE
    for each in done:
        told = f"observer {each.id}, version {each.version}, was told of {counted(each.notified, 'change')}"
        print(f"{told}; looked at {counted(each.rows, 'row')} of {each.table}")
    print("all observers have been told of what was there; they run when a program that has them opens the store")
    return FINE


def _state(found: perco.BackfillProgress) -> str:
    return "done" if found.done else "under way" if found.rows else "not begun"


def _plain(found: perco.BackfillProgress) -> dict[str, Any]:
    """`rows`, `notified`: None where nobody knows any more."""
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
    head = ("observer", "version", "table", "told of all", "rows so far", "changes so far")
    show_table(head, lines, numbers=["version", "rows so far", "changes so far"])


@contextmanager
def _progress() -> Iterator[Callable[[perco.BackfillProgress], None]]:
    """A line on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with Progress(TextColumn("{task.description}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("backfill", total=None)

        def tell(so_far: perco.BackfillProgress) -> None:
            text = f"backfill of {so_far.id}: {so_far.rows} rows of {so_far.table}, {so_far.notified} changes told"
            bar.update(task, description=text)

        yield tell
