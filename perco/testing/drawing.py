"""Anomalies for the eye: as text, and as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from typing import Final

from perco.testing.history import Transaction
from perco.testing.isolation import Anomaly, Edge

_OPS_SHOWN: Final = 8
_COLOURS: Final = {"ww": "#b45309", "wr": "#047857", "rw": "#b91c1c", "rt": "#475569"}
_SAYS: Final = {
    "ww": "ww {key!r}: overwritten by",
    "wr": "wr {key!r}: read by",
    "rw": "rw {key!r}: did not see what is written by",
    "rt": "rt: had ended before the beginning of",
}


def draw(anomaly: Anomaly, history: Iterable[Transaction] = ()) -> str:
    """An anomaly as text; with the history, the transactions' operations on the keys of the cycle as well, and their
    times, from the beginning of the first."""
    by_id = {one.id: one for one in history}
    zero = min((one.begin for one in by_id.values()), default=0.0)
    keys = {edge.key for edge in anomaly.cycle if edge.key is not None}
    lines = [anomaly.name, f"  {anomaly.text}"]
    if not anomaly.cycle:
        lines += ["", *(f"  {_title(id, by_id, keys, zero)}" for id in anomaly.transactions)]
        return "\n".join(lines)
    lines.append("")
    for edge in anomaly.cycle:
        lines += [f"  {_title(edge.before, by_id, keys, zero)}", "    |", f"    | {_says(edge)}", "    v"]
    lines.append(f"  T{anomaly.cycle[0].before}, where it began")
    return "\n".join(lines)


def _says(edge: Edge) -> str:
    return _SAYS[edge.kind].format(key=edge.key)


def _title(id: int, by_id: dict[int, Transaction], keys: set[str | int], zero: float) -> str:
    one = by_id.get(id)
    if one is None:
        return f"T{id}"
    ops = [op for op in one.ops if not keys or op[1] in keys]
    shown = ", ".join(_op(*op) for op in ops[:_OPS_SHOWN]) + (", ..." if len(ops) > _OPS_SHOWN else "")
    return f"T{id}  client {one.client}, {one.begin - zero:.6f} to {one.end - zero:.6f} s, {one.status}: {shown}"


def _op(kind: str, key: str | int, value: object) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"{kind} {key} [... {', '.join(map(repr, value[-3:]))}]"
    return f"{kind} {key} {value!r}"


def svg(anomaly: Anomaly) -> str:
    """A cycle as an SVG picture: transactions on a circle, an arrow for each edge. Needs no other package."""
    n = max(len(anomaly.cycle), 1)
    radius = max(90.0, 34.0 * n)
    size = 2 * radius + 180
    middle = size / 2
    places = [
        (middle + radius * math.sin(2 * math.pi * i / n), middle - radius * math.cos(2 * math.pi * i / n))
        for i in range(n)
    ]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size:.0f} {size + 30:.0f}" font-family="sans-serif">',
        f'<rect width="100%" height="100%" fill="white"/><title>{escape(anomaly.name)}</title>',
        f'<text x="16" y="28" font-size="17">{escape(anomaly.name)}</text>',
        "<defs>",
        *(
            f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'
            for kind, colour in _COLOURS.items()
        ),
        "</defs>",
    ]
    for i, edge in enumerate(anomaly.cycle):
        (x1, y1), (x2, y2) = places[i], places[(i + 1) % n]
        length = math.hypot(x2 - x1, y2 - y1) or 1.0
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        bend = 26 if n == 2 else 0  # two arrows between the same two must not lie on each other
        aside = 14 if n == 2 else -26  # labels lie outside
        mx, my = (x1 + x2) / 2 - dy * bend, (y1 + y2) / 2 + dx * bend
        colour = _COLOURS[edge.kind]
        label = edge.kind if edge.key is None else f"{edge.kind} {edge.key}"
        out.append(
            f'<path d="M{x1 + 24 * dx:.1f} {y1 + 24 * dy:.1f} '
            f'Q{mx:.1f} {my:.1f} {x2 - 26 * dx:.1f} {y2 - 26 * dy:.1f}" '
            f'fill="none" stroke="{colour}" stroke-width="1.6" marker-end="url(#{edge.kind})"/>'
            f'<text x="{mx - aside * dy:.1f}" y="{my + aside * dx + 4:.1f}" font-size="13" fill="{colour}" '
            f'text-anchor="middle">{escape(label)}</text>'
        )
    for (x, y), edge in zip(places, anomaly.cycle, strict=False):
        out.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="22" fill="#eef2ff" stroke="#3730a3"/>'
            f'<text x="{x:.1f}" y="{y + 5:.1f}" font-size="13" text-anchor="middle">T{edge.before}</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"
