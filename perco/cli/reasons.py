"""`perco why`: shows, as a tree, which inputs, version and code made a derived row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

import perco
from perco import views
from perco.cli.reading import When
from perco.cli.screen import FINE, FOUND, complain, counted, show_json
from perco.cli.values import parse_key, parse_moment, plain, shown
from perco.errors import UsageError
from perco.views.declaring import Views

_KEY_WIDTH: Final = 160
_VALUE_WIDTH: Final = 60
_WIDTH: Final = 4096  # of the drawing, so that no line is cut off; a terminal folds long lines


@dataclass(slots=True)
class _Found:
    """The reasons of a row's values. `below`: those of the inputs that are derived, by table and row in stored form."""

    table: str
    key: Any
    reasons: list[views.Reason]
    below: dict[tuple[str, bytes], _Found] = field(default_factory=dict)


async def show_reasons(
    loaded: Callable[[str], Views],
    program: str,
    table: str,
    key: str,
    store: str,
    when: When,
    *,
    depth: int,
    inputs: int,
    json: bool,
) -> int:
    """Print why a row has its values. `loaded`: returns the views that the program names."""
    declared = loaded(program)
    chosen = declared.schema.tables.get(table)
    if chosen is None:
        written = sorted({each.name for view in declared.declared.values() for each in view.outputs})
        raise UsageError(f"{program} has no table {table!r}; its views write: {', '.join(written) or 'none'}")
    parsed = parse_key(chosen.key, key)
    at = parse_moment(when.at) if when.at is not None else None
    async with (
        perco.open(store, readonly=True) as db,
        db.snapshot(ts=when.ts, at=at) as snap,
    ):
        found = await _follow(declared, snap, chosen, parsed, depth, inputs)
    if json:
        show_json(_plain(found))
    elif found.reasons:
        Console(markup=False, highlight=False, emoji=False, width=_WIDTH).print(_drawn(found), soft_wrap=True)
    if not found.reasons:
        complain(f"{table}[{parsed!r}] has no value that a view could have given")
        return FOUND
    return FINE if all(reason.same for reason in found.reasons) else FOUND


async def _follow(
    declared: Views, snap: perco.Snapshot, table: perco.Table[Any], key: Any, depth: int, inputs: int
) -> _Found:
    found = _Found(table.name, key, await views.why(declared, snap, table, key, inputs_max=inputs))
    for reason in found.reasons:
        for each in reason.inputs if depth > 1 else ():
            source = declared.schema.tables[each.table]
            if any(source in view.outputs for view in declared.declared.values()):
                found.below[each.table, source.row(each.key)] = await _follow(
                    declared, snap, source, each.key, depth - 1, inputs
                )
    return found


def _drawn(found: _Found) -> Tree:
    tree = Tree(Text(f"{found.table}[{shown(found.key, _KEY_WIDTH)}]", style="bold"))
    _add(tree, found)
    return tree


def _add(tree: Tree, found: _Found) -> None:
    for reason in found.reasons:
        node = tree.add(_head(reason))
        for each in reason.inputs:
            stamp = max(each.commit_ts.values(), default=0)
            name = Text(f"{each.table}[{shown(each.key, _KEY_WIDTH)}]")
            name.append(f"  {_values(each.values)}", style="dim")
            name.append(f"  written at {stamp}", style="dim")
            below = node.add(name)
            for more in found.below.values():
                if (more.table, more.key) == (each.table, each.key):
                    _add(below, more)
        if reason.more:
            node.add(Text(f"and {counted(reason.more, 'more input')}", style="dim"))


def _head(reason: views.Reason) -> Text:
    text = Text(_values(reason.values))
    if not reason.version:
        text.append("  given by no view: a program has written it", style="yellow")
        return text
    text.append(f"  {reason.view}, version {reason.version}", style="cyan")
    text.append(f", for {shown(reason.owner, _KEY_WIDTH)}", style="cyan")
    text.append(f"  ({reason.function})", style="dim")
    if reason.same:
        text.append("  made again, byte by byte", style="green")
    elif reason.error is not None:
        error = " ".join(f"{type(reason.error).__name__}: {reason.error}".split())
        text.append(f"  not made again: {error}", style="red")
    else:
        again = _values(reason.again) if reason.again else "no row"
        text.append(f"  made again, it is {again}", style="red")
    if reason.newest != reason.version:
        text.append(f"  (the newest version is {reason.newest})", style="yellow")
    elif reason.registered and reason.registered != reason.code:
        text.append("  (the code has changed since this version was registered)", style="yellow")
    return text


def _values(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={shown(value, _VALUE_WIDTH)}" for name, value in sorted(values.items()))


def _plain(found: _Found) -> dict[str, Any]:
    return {
        "table": found.table,
        "key": plain(found.key),
        "reasons": [
            {
                "view": reason.view,
                "version": reason.version,
                "newest_version": reason.newest,
                "owner": plain(reason.owner),
                "function": reason.function,
                "code": reason.code,
                "registered_code": reason.registered,
                "values": {name: plain(value) for name, value in reason.values.items()},
                "again": None if reason.again is None else {name: plain(value) for name, value in reason.again.items()},
                "same": reason.same,
                "error": None if reason.error is None else f"{type(reason.error).__name__}: {reason.error}",
                "inputs": [
                    {
                        "table": each.table,
                        "key": plain(each.key),
                        "values": {name: plain(value) for name, value in each.values.items()},
                        "commit_ts": each.commit_ts,
                    }
                    for each in reason.inputs
                ],
                "more_inputs": reason.more,
            }
            for reason in found.reasons
        ],
        "inputs": [_plain(below) for below in found.below.values()],
    }
