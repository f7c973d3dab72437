"""`perco trace`: what a row's values came from, and what else followed from it, as a tree."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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
from perco.notify.tracing import Name, Traced, trace

_WRITES_SHOWN = 12
_KEY_WIDTH = 40


async def trace_row(store: str, table: str, key: str, *, json: bool) -> int:
    """Every tree of causes that the newest values of the row belong to."""
    async with perco.open(store, readonly=True) as db:
        chosen = table_named(db, table)
        parsed = parse_key(chosen.key, key)
        with _progress() as tell:
            found = await trace(db, table, chosen.row(parsed), tell)
    if json:
        show_json([asdict(tree) for tree in found])
    elif found:
        console = Console(markup=False, highlight=False, emoji=False)
        for tree in found:
            console.print(drawn(tree), soft_wrap=True)
    if not found:
        complain(f"{table}[{parsed!r}] was never written")
    return FINE if found else FOUND


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """How many rows have been read, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda rows: None
        return
    with Console(stderr=True).status("reading") as status:
        yield lambda rows: status.update(f"read {counted(rows, 'row')}")


def drawn(traced: Traced) -> Tree:
    """A transaction, and below it what followed."""
    tree = Tree(_head(traced))
    for name in traced.writes[:_WRITES_SHOWN]:
        tree.add(Text(_name(name), style="dim"))
    if len(traced.writes) > _WRITES_SHOWN:
        tree.add(Text(f"and {counted(len(traced.writes) - _WRITES_SHOWN, 'more cell')}", style="dim"))
    for run in traced.runs:
        tree.add(drawn(run))
    return tree


def _head(traced: Traced) -> Text:
    if traced.observer is None:
        text = Text(f"{traced.commit_ts}  from outside", style="bold")
    else:
        assert traced.on is not None
        text = Text(f"{traced.commit_ts}  > {traced.observer} on {_name(traced.on)}", style="cyan")
        if traced.attempts > 1:
            text.append(f"  (attempt {traced.attempts})", style="yellow")
        if traced.through:
            text.append(f"  (through {' > '.join(traced.through)})", style="yellow")
    if traced.asked:
        text.append("  <- wrote what was asked for", style="bold green")
    return text


def _name(name: Name) -> str:
    table, key, column = name
    what: Any = key
    return f"{table}[{shown(what, _KEY_WIDTH)}].{column}"
