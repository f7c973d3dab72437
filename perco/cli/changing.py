"""`perco changes`, `perco diff`: what has changed in a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any

import typer

import perco
from perco.cli.reading import table_named
from perco.cli.screen import FINE, FOUND, perform, show_json
from perco.cli.values import parse_moment, shown
from perco.database.inside import inside
from perco.history.diff import differences
from perco.schema.catalogue import schema_of

_CELL_WIDTH = 60
_KEY_WIDTH = 2000

_Store = Annotated[str, typer.Argument(metavar="STORE", help="The store's folder, or the address of a served one.")]
_Table = Annotated[str, typer.Argument(metavar="TABLE", help="A table; status lists them.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_MOMENT = "a timestamp, or a time: 90s, 5m, 2h, 1d (ago), or 2026-03-01T12:00[+01:00]"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(changes)
    app.command()(diff)


def changes(
    store: _Store,
    tables: Annotated[list[str], typer.Argument(metavar="TABLE...", help="One or more tables that keep a log.")],
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help=f"Only what committed after WHEN: {_MOMENT}. By default, all that is kept."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for further changes, until Ctrl-C.")] = False,
    json: _Json = False,
) -> None:
    """Print what transactions have changed, in the order in which they committed.

    The tables must keep a log: perco.Table(..., changes=True). Each line is one changed cell, with its values before
    and after; long values are cut. With --json, each line is one transaction, whole: {"commit_ts": N, "rows":
    [{"table": ..., "key": ..., "before": {...}, "after": {...}}]}; before and after have the columns that it wrote,
    and null means "no value".

    To resume, pass the last commit_ts that you have processed as --since. A table keeps its changes for as long as its
    old versions (perco.Keep). If some of those that you ask for are gone, the command says so; then copy the table as
    it is now, in a snapshot, and follow the changes since the snapshot's timestamp.

    \b
    Examples:
      perco changes web/ docs --since 1h
      perco changes web/ docs links --since 48211 --json
      perco changes web/ docs --follow --json | my-consumer
    """
    perform(_changes, store, tables, since, follow=follow, json=json)


def diff(
    store: _Store,
    table: _Table,
    begin: Annotated[str, typer.Option("--from", metavar="WHEN", help=f"The older moment: {_MOMENT}.")],
    end: Annotated[str | None, typer.Option("--to", metavar="WHEN", help="The newer moment; now by default.")] = None,
    json: _Json = False,
) -> None:
    """Print how a table differs between two moments, in the order of its keys.

    Reads the table twice, as of both moments, so it needs no log; but the table must keep its old versions for long
    enough (perco.Keep). Each line is one cell that differs; with --json, one row: {"key": ..., "before": {...},
    "after": {...}}. Exits with 1 if there is a difference.

    \b
    Examples:
      perco diff web/ docs --from 1d
      perco diff web/ docs --from 48211 --to 50000 --json
    """
    perform(_diff, store, table, begin, end, json=json)


async def _changes(store: str, tables: list[str], since: str | None, *, follow: bool, json: bool) -> int:
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(inside(db).catalogue)
        for table in tables:
            table_named(db, table)
    async with perco.open(store, schema) as db:
        if not json:
            _show(("commit_ts", *_place(tables, "table"), "key", "column", "before", "after"))
        oldest = max([await inside(db).oracle.cut(table) for table in tables])
        begin = oldest if since is None else _moment(since)
        async for found in db.changes(*tables, since=begin, follow=follow):
            if json:
                rows = [{"table": r.table, "key": r.key, "before": r.before, "after": r.after} for r in found.rows]
                show_json({"commit_ts": found.commit_ts, "rows": rows})
                sys.stdout.flush()
                continue
            for row in found.rows:
                for cells in _cells(row):
                    _show((str(found.commit_ts), *_place(tables, row.table), *cells))
    return FINE


async def _diff(store: str, table: str, begin: str, end: str | None, *, json: bool) -> int:
    found = FINE
    async with perco.open(store, readonly=True) as db:
        here = table_named(db, table)
        async with db.snapshot(**_when(begin)) as older, db.snapshot(**({} if end is None else _when(end))) as newer:
            if not json:
                _show(("key", "column", "before", "after"))
            async for row in differences(older, newer, here):
                found = FOUND
                if json:
                    show_json({"key": row.key, "before": row.before, "after": row.after})
                    continue
                for cells in _cells(row):
                    _show(cells)
    return found


def _moment(text: str) -> int | datetime:
    return int(text) if text.isdecimal() else parse_moment(text)


def _when(text: str) -> dict[str, Any]:
    moment = _moment(text)
    return {"ts": moment} if isinstance(moment, int) else {"at": moment}


def _place(tables: list[str], name: str) -> tuple[str, ...]:
    """The column for the table, if there are several."""
    return (name,) if len(tables) > 1 else ()


def _cells(row: perco.RowChange) -> Iterable[tuple[str, str, str, str]]:
    for name, before in row.before.items():
        yield shown(row.key, _KEY_WIDTH), name, _value(before), _value(row.after[name])


def _value(value: Any) -> str:
    return "" if value is None else shown(value, _CELL_WIDTH)


def _show(cells: Iterable[str]) -> None:
    print("\t".join(cells), flush=True)
