"""`perco views`: the views that a program declares, what they compile to, and whether a store has what they say."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

import perco
from perco import views as declared_views
from perco.cli import working
from perco.cli.screen import FINE, FOUND, counted, perform, show_json, show_table
from perco.cli.values import plain, shown
from perco.errors import UsageError
from perco.views.compiled import Each, Grouped, Joined
from perco.views.declaring import Views

Program = Annotated[str, typer.Argument(metavar="MODULE:VIEWS", help="Where the views are declared.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_WIDTH = 60  # of a value

views: typer.Typer = typer.Typer(no_args_is_help=True, rich_markup_mode=None, context_settings=_SETTINGS)


@views.callback()
def _views() -> None:
    """Derived tables that a program declares once, and that observers keep up to date.

    MODULE is imported from the current folder; VIEWS is the perco.views.Views in it.

    \b
    Examples:
      perco views list app:views
      perco views explain app:views totals
      perco views check app:views --store web/
    """


@views.command(name="list", short_help="List the views, what they read and what they write.")
def _list(program: Program, json: Json = False) -> None:
    """List the views of a program, in the order of their declaration.

    \b
    Examples:
      perco views list app:views
      perco views list app:views --json | jq '.[].id'
    """
    perform(_show_list, program, json=json)


@views.command(name="explain", short_help="Show what the views compile to, and what a change costs.")
def _explain(
    program: Program,
    view: Annotated[str | None, typer.Argument(metavar="VIEW", help="Only this view, by its id.")] = None,
) -> None:
    """Show, for each view, the tables and observers that keep it, and what one change of a source row costs.

    \b
    Examples:
      perco views explain app:views
      perco views explain app:views totals
    """
    perform(_show_plans, program, view)


@views.command(name="check", short_help="Compute the views from scratch, and compare the result with a store.")
def _check(
    program: Program,
    store: Annotated[
        str, typer.Option("--store", metavar="STORE", help="The store's folder, or the address of a served one.")
    ],
    limit: Annotated[int, typer.Option(min=0, help="Show at most this many differences.")] = 20,
    json: Json = False,
) -> None:
    """Compute the views from their sources, at one snapshot, and compare the result with what the store has.

    This runs beside writers. Rows that a waiting observer has still to write count as differences, so first let the
    store become idle (perco wait). The exit code is 1 if a row differs. The sources are held in memory.

    \b
    Examples:
      perco views check app:views --store web/
      perco wait web/ && perco views check app:views --store web/ --json
    """
    perform(_show_check, program, store, limit, json=json)


def _loaded(what: str) -> Views:
    found = working.declared(what, "MODULE:VIEWS, such as app:views for `views` in app.py")
    if not isinstance(found, Views):
        raise UsageError(f"{what} is {type(found).__name__}, not a perco.views.Views")
    return found


def _reads(view: Each | Grouped | Joined) -> list[str]:
    return [repr(column) for column in (*view.columns, *(view.rights.columns if isinstance(view, Joined) else ()))]


def _writes(view: Each | Grouped | Joined) -> list[str]:
    return sorted(repr(column) for columns in view.outputs.values() for column in columns)


async def _show_list(program: str, *, json: bool) -> int:
    found = _loaded(program).declared.values()
    if json:
        kinds = {Each: "each", Grouped: "group", Joined: "join"}
        show_json(
            [
                {"id": view.id, "kind": kinds[type(view)], "reads": _reads(view), "writes": _writes(view)}
                for view in found
            ]
        )
        return FINE
    of = {Each: "each row", Grouped: "groups", Joined: "pairs"}
    rows = [(view.id, of[type(view)], ", ".join(_reads(view)), ", ".join(_writes(view))) for view in found]
    show_table(("view", "of", "reads", "writes"), rows)
    return FINE


async def _show_plans(program: str, wanted: str | None) -> int:
    found = _loaded(program)
    if wanted is not None and wanted not in found.declared:
        raise UsageError(f"there is no view {wanted!r}; there are: {', '.join(map(repr, found.declared))}")
    for view in found.declared.values():
        if wanted in (None, view.id):
            print("\n".join([f"{view.id}:", *(f"  {line}" for line in explained(view))]))
    return FINE


def explained(view: Each | Grouped | Joined) -> list[str]:
    """The tables and runs that keep a view, and the cost of a change, a sentence each."""
    lines = [f"reads {', '.join(_reads(view))}; writes {', '.join(_writes(view))}"]
    if isinstance(view, Each):
        lines.append("after a change of a row, its function runs for this row")
        if view.several:
            lines.append("one run handles changes of several columns of a row that came together")
    elif isinstance(view, Grouped):
        lines += _grouped(view)
    else:
        lines += _joined(view)
    lines.append("writes only rows that are new or have changed, and deletes those that are gone")
    return lines


def _grouped(view: Grouped) -> list[str]:
    if view.by_prefix:
        by = "the first part of the key" if view.by_prefix == 1 else f"the first {view.by_prefix} parts of the key"
    else:
        by = "a function of the row"
    lines = [f"groups the rows of {view.members.source.name} by {by}"]
    lines.append(f"keeps the rows sorted by group in {view.members.table.name!r}: one more run, and a copy of each row")
    if view.deltas is None:
        lines.append(f"a run reads all members of a group (at most {view.members_max:,})")
        return lines
    kept = ["count", *(f"sum of {each.column!r}" for each in view.sums)]
    for order in view.orders:
        kept += [f"smallest {order.first} by {order.column!r}"] if order.first else []
        kept += [f"largest {order.last} by {order.column!r}"] if order.last else []
    lines.append(f"keeps {', '.join(kept)}")
    lines.append("a run costs the same for a small group and a large one")
    return lines


def _joined(view: Joined) -> list[str]:
    left, right = view.table.name, view.rights.source.name
    return [
        f"{view.how} join: each row of {left} with the rows of {right} that have the same key",
        f"keeps the rows of {right} sorted by key in {view.rights.table.name!r}",
        f"keeps which rows of {left} have a key in {view.lefts.name!r}",
        f"after a change of a row of {left}, its function runs for this row and its matches (at most "
        f"{view.matches_max:,})",
        f"after a change of a row of {right}, the same happens for each row of {left} with its key",
    ]


async def _show_check(program: str, store: str, limit: int, *, json: bool) -> int:
    found = _loaded(program)
    async with perco.open(store, found.schema, readonly=True) as db, db.snapshot() as snap:
        with _progress() as tell:
            checked = await declared_views.check(found, snap, differences_max=limit, progress=tell)
    if json:
        show_json(_plain(checked))
        return FINE if checked.equal else FOUND
    rows = [(id, rows, checked.digests[id]) for id, rows in checked.rows.items()]
    show_table(("view", "rows", "digest"), rows)
    for each in checked.differences:
        given = "" if each.owner is None else f" (given by {shown(each.owner)})"
        print(f"{each.view}: {each.table}[{shown(each.key)}]{given}")
        print(f"  expected  {_row(each.expected)}")
        print(f"  found     {_row(each.found)}")
    if checked.count > len(checked.differences):
        print(f"... and {counted(checked.count - len(checked.differences), 'more row')}")
    if checked.equal:
        print(f"equal, as of timestamp {checked.ts}")
        return FINE
    verb = "differs" if checked.count == 1 else "differ"
    print(f"{counted(checked.count, 'row')} {verb}, as of timestamp {checked.ts}")
    return FOUND


def _row(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={shown(value, _WIDTH)}" for name, value in sorted(values.items())) or "no row"


def _plain(checked: declared_views.Checked) -> dict[str, Any]:
    return {
        "equal": checked.equal,
        "ts": checked.ts,
        "views": {id: {"rows": rows, "digest": checked.digests[id]} for id, rows in checked.rows.items()},
        "differing": checked.count,
        "differences": [
            {
                "view": each.view,
                "table": each.table,
                "key": plain(each.key),
                "expected": {name: plain(value) for name, value in each.expected.items()},
                "found": {name: plain(value) for name, value in each.found.items()},
                "owner": plain(each.owner),
            }
            for each in checked.differences
        ],
    }


class _progress:
    """On a terminal, says on stderr how many rows of the sources have been read."""

    def __enter__(self) -> Any:
        self._bar = Progress(
            TextColumn("reading {task.description}: {task.completed:,.0f} rows"),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._bar.start()
        self._tasks: dict[str, Any] = {}
        return self._tell

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _tell(self, table: str, rows: int) -> None:
        if table not in self._tasks:
            self._tasks[table] = self._bar.add_task(table, total=None)
        self._bar.update(self._tasks[table], completed=rows)


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.add_typer(views, name="views", short_help="Derived tables that a program declares.")
