"""`perco trace`: shows, as a tree, what a row's values came from, and what else followed from that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

import perco
from perco.cli.reading import table_named
from perco.cli.screen import FINE, FOUND, complain, counted, show_json
from perco.cli.values import parse_key, shown
from perco.database.inside import inside
from perco.notify.tracing import Name, Traced, trace

_WRITES_SHOWN = 12
_RUNS_SHOWN = 12
_KEY_WIDTH = 160
_WIDTH = 4096  # of the drawing, so that no line is cut off; a terminal folds long lines


async def trace_row(store: str, table: str, key: str, *, json: bool) -> int:
    """Print every tree of causes that the row's newest values belong to."""
    async with perco.open(store, readonly=True) as db:
        chosen = table_named(db, table)
        parsed = parse_key(chosen.key, key)
        with _progress() as tell:
            found = await trace(inside(db).engine, table, chosen.row(parsed), tell)
    if json:
        show_json([asdict(tree) for tree in found])
    elif found:
        show(found, (table, parsed))
    if not found:
        complain(f"{table}[{parsed!r}] was never written")
    return FINE if found else FOUND


def show(found: Sequence[Traced], row: tuple[str, Any]) -> None:
    """Print the trees that were found for a row (table, key)."""
    console = Console(markup=False, highlight=False, emoji=False, width=_WIDTH)
    for tree in found:
        console.print(drawn(tree, row), soft_wrap=True)


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Show how many rows have been read, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda rows: None
        return
    with Console(stderr=True).status("reading") as status:
        yield lambda rows: status.update(f"read {counted(rows, 'row')}")


def drawn(traced: Traced, row: tuple[str, Any]) -> Tree:
    """Draw a transaction and, below it, its writes and the runs that followed. Long lists are cut; entries of the
    requested row (table, key) come first, and are all kept."""
    tree = Tree(_head(traced))
    writes = sorted(traced.writes, key=lambda name: name[:2] != row)
    shown_writes = max(_WRITES_SHOWN, sum(name[:2] == row for name in writes))
    for name in writes[:shown_writes]:
        tree.add(Text(_name(name), style="dim"))
    if len(writes) > shown_writes:
        tree.add(Text(f"and {counted(len(writes) - shown_writes, 'more cell')}", style="dim"))
    concerned = [run for run in traced.runs if concerns(run, row)]
    others = [run for run in traced.runs if not concerns(run, row)]
    shown_others = max(_RUNS_SHOWN - len(concerned), 0)
    for run in [*concerned, *others[:shown_others]]:
        tree.add(drawn(run, row))
    if len(others) > shown_others:
        tree.add(Text(f"and {counted(len(others) - shown_others, 'more run')}; --json has all", style="cyan"))
    return tree


def concerns(run: Traced, row: tuple[str, Any]) -> bool:
    """Whether the run, or a run that followed from it, ran for the row or wrote to it."""
    on_it = run.asked or any(name[:2] == row for name in (run.on, *run.also) if name is not None)
    return on_it or any(concerns(after, row) for after in run.runs)


def _head(traced: Traced) -> Text:
    if traced.observer is None:
        text = Text(f"{traced.commit_ts}  a program's transaction", style="bold")
        if traced.unsure:
            text.append(", or a run for a signal whose cause is no longer kept", style="yellow")
    else:
        assert traced.on is not None
        on = f"signal {_name(traced.on)}" if traced.signal else _name(traced.on)
        text = Text(f"{traced.commit_ts}  > {traced.observer} on {on}", style="cyan")
        if traced.also:
            text.append(f" (and {len(traced.also)} more in one transaction)")
        if traced.attempts > 1:
            text.append(f"  (attempt {traced.attempts})", style="yellow")
        if traced.through:
            text.append(f"  (through {' > '.join(traced.through)})", style="yellow")
    if traced.asked:
        text.append("  <- wrote the requested row", style="bold green")
    return text


def _name(name: Name) -> str:
    table, key, column = name
    what: Any = key
    return f"{table}[{shown(what, _KEY_WIDTH)}].{column}"
