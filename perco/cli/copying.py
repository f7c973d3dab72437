"""`perco copy`: copy a store to another place, and switch over to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress as Bar, SpinnerColumn, TextColumn

from perco.cli.screen import FINE, FOUND, complain, counted, perform_or, show_json
from perco.copying.copy import Copied, CopyOptions, Tell, copy as copy_store
from perco.copying.passes import Sums

_STAYS = "interrupted; all rows copied so far stay, and the same command continues"


async def copy(source: str, target: str, options: CopyOptions, *, json: bool) -> int:
    """Copy, and say how far the copy is. Returns 1 if the copy is not complete."""
    with _progress() as tell:
        copied = await copy_store(source, target, options, tell, _passed)
    if json:
        told = asdict(copied) | {"complete": not copied.used_by, "used_by": copied.used_by or None}
        show_json(told)
    else:
        for line in _told(copied, options):
            print(line)
    return FOUND if copied.used_by else FINE


def _passed(copied: Copied, trouble: str) -> None:
    """Say what a pass of --wait has done."""
    if trouble:
        complain(f"pass {copied.passes} ended early: {trouble}")
    else:
        complain(
            f"pass {copied.passes}: {counted(copied.sums.changed, 'cell')} changed. {copied.source} is in use by "
            f"{copied.used_by}: stop that process when you want the copy to finish"
        )


def _told(copied: Copied, options: CopyOptions) -> Iterator[str]:
    sums = copied.sums
    changed = f"{counted(sums.written, 'cell')} written, {sums.deleted} deleted"
    yield f"{counted(sums.cells, 'cell')} of {counted(sums.rows, 'row')} compared: {changed}"
    if copied.used_by:
        yield f"{copied.source} is in use by {copied.used_by}."
        yield f"So {copied.target} is not complete, and cannot be opened yet."
        yield "Stop that process and run the same command again; or run it with --wait, and stop the process then."
        return
    tables = counted(len(copied.digests) - 1, "table")  # without the table `_perco`
    yield f"{tables}: the digests are equal in both stores. {copied.target} is complete: open it."
    if copied.moved:
        yield f"{copied.source} has moved: no program can open it any more."
    else:
        yield f"{copied.source} can still be opened. The copy does not get its later changes."


@contextmanager
def _progress() -> Iterator[Tell]:
    """Show the progress, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda phase, table, sums: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("opening the stores", total=None)

        def tell(phase: str, table: str, sums: Sums) -> None:
            changed = f", {sums.changed} changed" if sums.changed else ""
            bar.update(task, description=f"{phase} {table}: {counted(sums.cells, 'cell')}{changed}")

        yield tell


def _copy(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A store: its folder, postgresql://... or bigtable://...")
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new place for the copy, of any of these kinds.")],
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the changes until no process has SOURCE open; then finish.")
    ] = False,
    switch: Annotated[
        bool, typer.Option("--switch", help="At the end, mark SOURCE as moved: programs can then open only TARGET.")
    ] = False,
    through: Annotated[
        str | None,
        typer.Option(
            "--through", metavar="ADDRESS", help="While SOURCE is in use, read it through the server at this address."
        ),
    ] = None,
    every: Annotated[
        float, typer.Option("--every", min=0.0, metavar="SECONDS", help="The pause between two passes of --wait.")
    ] = 5.0,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Discard what is in TARGET: an unfinished copy, or a store that moved."),
    ] = False,
    moved: Annotated[
        bool, typer.Option("--moved", help="SOURCE may be a store that has moved: copy what it held when it moved.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Copy a store to another place: a folder, PostgreSQL or Bigtable.

    The copy has all cells of the store, with their timestamps, and so the history and the changes that wait for
    observers. The command verifies the copy: it compares digests of all tables. While a program has SOURCE open, the
    command makes one pass over SOURCE, and exits with 1; run it again to copy what has changed since, or use --wait.
    When no other process has SOURCE open, the command makes the last pass, which reads both stores twice. Until the
    last pass has ended, no program can open TARGET. If the command is interrupted, run it again: it continues.

    If SOURCE is in use and is a folder, the command reads the files in it. If SOURCE is in use and in a database, the
    command reads it with the help of the perco serve --direct that owns it; if SOURCE is served without --direct, give
    the server's address with --through. Before a copy to Bigtable, make the table with perco bigtable init.

    With --switch, no program can open SOURCE afterwards. If you then serve TARGET at the address where SOURCE was
    served, clients of that address continue on TARGET. To move back, copy TARGET to SOURCE.

    \b
    Examples:
      perco copy web/ 'postgresql://app@db/shop?prefix=web'
      perco copy web/ 'bigtable://acme/main?prefix=web' --wait --switch
      perco copy 'bigtable://acme/main?prefix=web' web/ --through tls://db1:7000
    """
    options = CopyOptions(through, wait, every, switch, replace, moved)
    perform_or(_STAYS, copy, source, target, options, json=json)


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(name="copy")(_copy)
