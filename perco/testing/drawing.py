"""Draws anomalies: as text, and as a flowchart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from perco.testing.history import Transaction
from perco.testing.isolation import Anomaly, Edge

_OPS_SHOWN: Final = 8
_SAYS: Final = {
    "ww": "ww {key!r}: overwritten by",
    "wr": "wr {key!r}: read by",
    "rw": "rw {key!r}: did not see what is written by",
    "rt": "rt: had ended before the beginning of",
}


def draw(anomaly: Anomaly, history: Iterable[Transaction] = ()) -> str:
    """An anomaly as text. If the history is given, the text also shows each transaction's operations on the keys of the
    cycle, and its times since the history began."""
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


def mermaid(anomaly: Anomaly) -> str:
    """A cycle as a flowchart in Mermaid's language: a node for each transaction, an arrow for each edge."""
    lines = ["flowchart LR"]
    for edge, following in zip(anomaly.cycle, (*anomaly.cycle[1:], *anomaly.cycle[:1]), strict=True):
        label = edge.kind if edge.key is None else f"{edge.kind} {_quoted(str(edge.key))}"
        lines.append(f'    T{edge.before} -- "{label}" --> T{following.before}')
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace("#", "#35;").replace('"', "#quot;")
