"""The pipeline of a store as a drawing: columns, the observers of each column, and the columns that these write.

A tree for the terminal, and a flowchart for Mermaid. Both show the observers that the catalogue declares, and the
columns that runs have been seen to write.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

import perco

Column = tuple[str, str]  # table, column


def condition(state: perco.ObserverState) -> str:
    """A remark on an observer that is paused, tripped, or being backfilled; else empty."""
    if state.tripped and not state.paused:
        return f"tripped: {state.tripped}"
    return "paused" if state.paused else "" if state.ready else "being notified of existing data"


def _by_column(found: Sequence[perco.ObserverState]) -> dict[Column, list[perco.ObserverState]]:
    out: dict[Column, list[perco.ObserverState]] = {}
    for state in found:
        out.setdefault((state.table, state.column), []).append(state)
    return out


def roots(found: Sequence[perco.ObserverState]) -> list[Column]:
    """Observed columns that no observer of another column writes; also one column of each cycle that cannot be reached
    from such a column."""
    observed = _by_column(found)
    written = {column for state in found for column in state.outputs if (state.table, state.column) != column}
    first = [column for column in observed if column not in written]
    reached = set(first)
    todo = list(first)
    for start in [*observed, None]:
        while todo:
            for state in observed.get(todo.pop(), ()):
                fresh = [column for column in state.outputs if column not in reached]
                reached.update(fresh)
                todo += fresh
        if start is not None and start not in reached:
            first.append(start)
            reached.add(start)
            todo.append(start)
    return first


# ------------------------------------------------------------------ a tree


def show(found: Sequence[perco.ObserverState]) -> None:
    """Print the pipeline as trees, one for each column that changes from outside."""
    console = Console(markup=False, highlight=False, emoji=False)
    for tree in trees(found):
        console.print(tree, soft_wrap=True)


def trees(found: Sequence[perco.ObserverState]) -> list[Tree]:
    """Below each column, draw its observers, and below each observer, draw the columns that it writes. A column
    that was drawn before is only named. A column that leads back to itself is marked as a cycle."""
    observed = _by_column(found)
    drawn: set[Column] = set()

    def grow(branch: Tree, column: Column, above: tuple[Column, ...]) -> None:
        drawn.add(column)
        for state in observed.get(column, ()):
            twig = branch.add(_of_observer(state))
            for output in state.outputs:
                if output in (*above, column):
                    twig.add(Text(f"{'.'.join(output)}  (a cycle)", style="yellow"))
                elif output in drawn and output in observed:
                    twig.add(Text(f"{'.'.join(output)}  (above)", style="dim"))
                else:
                    grow(twig.add(Text(".".join(output))), output, (*above, column))

    out = []
    for column in roots(found):
        tree = Tree(Text(".".join(column), style="bold"))
        grow(tree, column, ())
        out.append(tree)
    return out


def _of_observer(state: perco.ObserverState) -> Text:
    text = Text(f"> {state.id}", style="cyan")
    if condition(state):
        text.append(f"  ({condition(state)})", style="yellow")
    return text


# ------------------------------------------------------------------ Mermaid


def mermaid(found: Sequence[perco.ObserverState]) -> str:
    """A flowchart: boxes are columns, rounded boxes are observers."""
    columns, edges = _columns(found), []
    names = {column: f"c{at}" for at, column in enumerate(columns)}
    lines = ["flowchart LR"]
    lines += [f'    {names[column]}["{_quoted(".".join(column))}"]' for column in columns]
    for at, state in enumerate(found):
        told = f"{state.id} ({condition(state)})" if condition(state) else state.id
        lines.append(f'    o{at}(["{_quoted(told)}"])')
        edges.append(f"    {names[state.table, state.column]} --> o{at}")
        edges += [f"    o{at} --> {names[output]}" for output in state.outputs]
    return "\n".join([*lines, *edges])


def _quoted(text: str) -> str:
    return text.replace("#", "#35;").replace('"', "#quot;")


def _columns(found: Sequence[perco.ObserverState]) -> list[Column]:
    named = [column for state in found for column in ((state.table, state.column), *state.outputs)]
    return list(dict.fromkeys(named))
