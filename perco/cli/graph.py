"""The pipeline of a store as a drawing: columns, the observers of each, and the columns that these write.

As a tree for the terminal, as a flowchart for Mermaid, as a picture. From the catalogue, and from what runs have been
seen to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

import perco

Column = tuple[str, str]  # table, column

_NODE_W, _NODE_H, _GAP_X, _GAP_Y, _MARGIN = 190, 34, 60, 18, 28
_CHAR_W: Final = 7.2
_LANE_H: Final = 14  # of an edge that passes below other nodes
_BEND: Final = _GAP_X // 2


def condition(state: perco.ObserverState) -> str:
    """What is to be said of an observer besides."""
    return "paused" if state.paused else "" if state.ready else "being told of what is there"


def _by_column(found: Sequence[perco.ObserverState]) -> dict[Column, list[perco.ObserverState]]:
    out: dict[Column, list[perco.ObserverState]] = {}
    for state in found:
        out.setdefault((state.table, state.column), []).append(state)
    return out


def roots(found: Sequence[perco.ObserverState]) -> list[Column]:
    """Observed columns that nothing else leads to; of each circle that nothing leads to, the first."""
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
    """Print it as trees, one for each column that changes from outside."""
    console = Console(markup=False, highlight=False, emoji=False)
    for tree in trees(found):
        console.print(tree, soft_wrap=True)


def trees(found: Sequence[perco.ObserverState]) -> list[Tree]:
    """A column's observers hang below it, and the columns that these write below them. What was drawn already is named
    and not drawn again; what leads back to itself is called a circle."""
    observed = _by_column(found)
    drawn: set[Column] = set()

    def grow(branch: Tree, column: Column, above: tuple[Column, ...]) -> None:
        drawn.add(column)
        for state in observed.get(column, ()):
            twig = branch.add(_of_observer(state))
            for output in state.outputs:
                if output in (*above, column):
                    twig.add(Text(f"{'.'.join(output)}  (in a circle)", style="yellow"))
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
    """A flowchart: boxes are columns, rounded ones observers."""
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


# ------------------------------------------------------------------ a picture


def _layers(found: Sequence[perco.ObserverState]) -> dict[str | Column, int]:
    """How far to the right each node stands: after all that lead to it, but for those that close a circle."""
    observed = _by_column(found)
    place: dict[str | Column, int] = {}

    def put(column: Column, at: int, above: tuple[Column, ...]) -> None:
        if column in above or place.get(column, -1) >= at:
            return
        place[column] = at
        for state in observed.get(column, ()):
            place[state.id] = max(place.get(state.id, 0), at + 1)
            for output in state.outputs:
                put(output, at + 2, (*above, column))

    for column in roots(found):
        put(column, 0, ())
    return place


def _lanes(
    edges: Sequence[tuple[str | Column, str | Column]], place: dict[str | Column, int], bottoms: dict[int, int]
) -> dict[tuple[int | None, str | Column], int]:
    """The height at which edges to a node pass the layers between, below the nodes there; of those that lead back, the
    height below all, under None. `bottoms`: where the last node of each layer stands."""
    lanes: dict[tuple[int | None, str | Column], int] = {}
    taken = {at: y + _NODE_H for at, y in bottoms.items()}
    for source, target in edges:
        for at in range(place[source] + 1, place[target]):
            if (at, target) not in lanes:
                lanes[at, target] = taken[at] = taken[at] + _LANE_H
    lowest = max(taken.values())
    for source, target in edges:
        if place[target] <= place[source] and (None, target) not in lanes:
            lanes[None, target] = lowest = lowest + _LANE_H
    return lanes


def svg(found: Sequence[perco.ObserverState]) -> str:
    """Columns and observers from left to right."""
    place = _layers(found)
    layers: dict[int, list[str | Column]] = {}
    for node, at in place.items():
        layers.setdefault(at, []).append(node)
    labels = {node: node if isinstance(node, str) else ".".join(node) for node in place}
    wide = {at: max(_NODE_W, max(int(_CHAR_W * len(labels[n])) + 24 for n in nodes)) for at, nodes in layers.items()}
    left = {at: _MARGIN + sum(wide[n] + _GAP_X for n in layers if n < at) for at in layers}
    spot = {
        n: (left[at], _MARGIN + i * (_NODE_H + _GAP_Y)) for at, nodes in layers.items() for i, n in enumerate(nodes)
    }
    edges: list[tuple[str | Column, str | Column]] = [((state.table, state.column), state.id) for state in found]
    edges += [(state.id, output) for state in found for output in state.outputs]
    lanes = _lanes(edges, place, {at: max(spot[n][1] for n in nodes) for at, nodes in layers.items()})
    width = max(left[at] + wide[at] for at in layers) + _MARGIN
    height = max([*(y + _NODE_H for _, y in spot.values()), *lanes.values()]) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#64748b"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for source, target in edges:
        (x0, y0), (x1, y1) = spot[source], spot[target]
        x0, y0, y1 = x0 + wide[place[source]], y0 + _NODE_H // 2, y1 + _NODE_H // 2
        line = f"M{x0} {y0}"
        if place[target] <= place[source]:  # it closes a circle
            below = lanes[None, target]
            line += f"C{x0 + _BEND} {y0} {x0 + _BEND} {below} {x0} {below}H{x1}"
            x0, y0 = x1, below
        for at in range(place[source] + 1, place[target]):
            x, y = left[at], lanes[at, target]
            line += f"C{x0 + _BEND} {y0} {x - _BEND} {y} {x} {y}H{x + wide[at]}"
            x0, y0 = x + wide[at], y
        line += f"C{x0 + (_BEND if x0 < x1 else -_BEND)} {y0} {x1 - _BEND} {y1} {x1} {y1}"
        parts.append(f'<path d="{line}" fill="none" stroke="#64748b" stroke-width="1.3" marker-end="url(#tip)"/>')
    states = {state.id: state for state in found}
    for node, (x, y) in spot.items():
        observer = states.get(node) if isinstance(node, str) else None
        fill, stroke = ("#f1f5f9", "#94a3b8") if observer is None else ("#dbeafe", "#2563eb")
        if observer is not None and observer.paused:
            fill, stroke = "#fef3c7", "#d97706"
        across, round_ = wide[place[node]], 4 if observer is None else 17
        parts.append(
            f'<rect x="{x}" y="{y}" width="{across}" height="{_NODE_H}" rx="{round_}" fill="{fill}" stroke="{stroke}"/>'
            f'<text x="{x + across // 2}" y="{y + 22}" text-anchor="middle" font-family="ui-monospace, monospace" '
            f'font-size="12" fill="#0f172a">{escape(labels[node])}</text>'
        )
    return "\n".join([*parts, "</svg>"])
