"""`perco check`: verify what is stored, and accept it after a loss (S2)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn

import perco
from perco.cli.screen import FINE, FOUND, show_json
from perco.storage import PROTOCOL_GROUPS
from perco.storage.folder import accept, unsynced
from perco.txn.catalogue import SYSTEM_TABLE
from perco.txn.check import CheckResult, Progress, check

_NOTES_SHOWN = 10


async def check_store(store: str, *, json: bool, accepting: bool) -> int:
    """Findings and counts; with `accepting`, and no errors, a store that needed a check can be opened again."""
    async with perco.open(store, readonly=True) as db:
        path = db.local.path
        assert path is not None, "only folders are opened for reading"
        with _progress(db) as tell:
            result = await check(db.driver.store, ts=await db.oracle.draw(), progress=tell)
    if not json:
        _render(result)
    marked = unsynced(path)
    accepted = accepting and bool(marked) and not result.errors
    if accepted:
        accept(path)
    if json:
        found = {"store": str(path.absolute()), "clean": result.clean, **asdict(result)}
        show_json({**found, "errors": result.errors, "warnings": result.warnings, "mark": marked, "accepted": accepted})
    else:
        _render_mark(path, result, marked, accepted=accepted, accepting=accepting)
    return FINE if result.clean else FOUND


def _render(result: CheckResult) -> None:
    notes = 0
    for finding in result.findings:
        notes += finding.severity == "note"
        if finding.severity != "note" or notes <= _NOTES_SHOWN:
            print(f"{finding.severity:<7}  {finding.invariant:<3}  {finding.where}: {finding.what}")
    if notes > _NOTES_SHOWN:
        print(f"note     T3   and {result.unsettled - _NOTES_SHOWN} more unsettled locks")
    if result.dropped:
        print(f"error    and {result.dropped} more findings")
    verdict = "clean" if result.clean else f"{result.errors} errors, {result.warnings} warnings"
    print(
        f"{verdict}: {result.tables} tables, {result.rows} rows, {result.cells} cells "
        f"({result.records} records, {result.locks} locks, {result.notifications} notifications) "
        f"as of timestamp {result.ts}, in {result.seconds:.1f} s"
    )
    if result.sampled > 1:
        print(f"of its transactions every {result.sampled}th was compared over all its cells")


def _render_mark(path: Path, result: CheckResult, marked: str, *, accepted: bool, accepting: bool) -> None:
    if accepted:
        print("accepted: the store can be opened again; writes of the last moments may be missing")
    elif accepting and not marked:
        print("there was nothing to accept: no write is in doubt")
    elif accepting:
        print("not accepted, because of the errors: restore a copy, or open it with accept_loss=True")
    elif marked == "before a restart":
        print(f"its newest writes may be lost (S2); if that is all right: perco check --accept {path}")


@contextmanager
def _progress(db: perco.Database) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    total = sum(
        tablet.entries(group)
        for tablet in db.local.store.tablets()
        if tablet.table != SYSTEM_TABLE
        for group in (*PROTOCOL_GROUPS, *db.catalogue.groups(tablet.table))
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,} cells"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("checking", total=total)
        yield lambda seen: bar.update(task, description=f"checking {seen.table}", completed=seen.cells)
