"""`perco views`: the views that a program declares, what they compile to, and whether a store has what they say."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

import perco
from perco import views as declared_views
from perco.cli import crossing, dropping, reasons
from perco.cli.numbers import App
from perco.cli.reading import When
from perco.cli.screen import FAILED, FINE, FOUND, complain, counted, perform, show_json, show_table
from perco.cli.values import plain, shown
from perco.cli.working import loaded_views
from perco.database.inside import inside
from perco.errors import PercoError, UsageError
from perco.notify.concerned import Freshness
from perco.serve.client import is_client
from perco.views.code import place_of
from perco.views.compiled import CoGrouped, Components, Each, Grouped, Joined, View as DeclaredView
from perco.views.declaring import Views
from perco.views.sinking import Calling

Program = Annotated[str, typer.Argument(metavar="MODULE:VIEWS", help="Where the views are declared.")]
View = Annotated[str | None, typer.Argument(metavar="[VIEW]", help="Only this view, by its id.")]
StoreOption = Annotated[
    str, typer.Option("--store", metavar="STORE", help="The store's folder, or the address of a served one.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_WIDTH = 60  # of a value

views: typer.Typer = App(no_args_is_help=True, rich_markup_mode=None, context_settings=_SETTINGS)


@views.callback()
def _views() -> None:
    """Derived tables that a program declares once, and that observers keep up to date.

    MODULE is imported from the current folder; VIEWS is the perco.views.Views in it, or a function that returns them.

    \b
    Examples:
      perco views list app:views
      perco views explain app:views totals
      perco views check app:views --store web/
      perco views diff app:views --store web/ --sample 0.01
    """


@views.command(name="list", short_help="List the views, what they read and write, and how fresh they are.")
def _list(
    program: Program,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="STORE", help="Show how fresh this store's views are."),
    ] = None,
    json: Json = False,
) -> None:
    """List the views of a program, in the order of their declaration.

    With --store, also show up to which timestamp each view reflects all changes, how many changes wait for it or are on
    the failed list, and for how long the oldest of these has waited.

    \b
    Examples:
      perco views list app:views
      perco views list app:views --store web/
      perco views list app:views --json | jq '.[].id'
    """
    perform(_show_list, program, store, json=json)


@views.command(name="explain", short_help="Show what the views compile to, and what a change costs.")
def _explain(
    program: Program,
    view: View = None,
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
    store: StoreOption,
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


@views.command(name="diff", short_help="Show what the views, as the program declares them, would change.")
def _diff(
    program: Program,
    store: StoreOption,
    view: View = None,
    sample: Annotated[float, typer.Option(min=0, max=1, help="Look at this part of the owners.")] = 1.0,
    limit: Annotated[int, typer.Option(min=0, help="Show at most this many differences of a view.")] = 5,
    json: Json = False,
) -> None:
    """Compare what the views' functions give now with what the store has. Nothing is written.

    Use it before you deploy a new version of a view. Each view is computed from the inputs that the store has, so the
    command shows the view's own changes, not those of the views that it reads. --sample looks at a part of its source
    rows, groups or left rows, the same ones each time. The exit code is 1 if a row would change, or if a call fails.

    \b
    Examples:
      perco views diff app:views --store web/ --sample 0.01
      perco views diff app:views totals --store web/ --json
    """
    perform(_show_diff, program, store, view, sample, limit, json=json)


@views.command(name="rebuild", short_help="Make the tables of views what their definition says.")
def _rebuild(program: Program, store: StoreOption, view: View = None, json: Json = False) -> None:
    """Compute views again from their inputs, and write what differs.

    Use it if a program has written to a view's tables by mistake, or after a change of code that should have had a new
    version. Rows that no source gives are deleted. The store may be in use meanwhile. Views that read the tables are
    told of the changes, so let a worker run. If the command is interrupted, start it again. The store must know the
    program's views already.

    \b
    Examples:
      perco views rebuild app:views --store web/
      perco views rebuild app:views totals --store web/
    """
    perform(_show_rebuilt, program, store, view, json=json)


@views.command(name="accept", short_help="Record that changed code gives the same rows as before.")
def _accept(program: Program, store: StoreOption, view: View = None, json: Json = False) -> None:
    """Record that the views' code, though it has changed, gives the same rows as before.

    perco warns of code that has changed without a new version of its view. If the results are the same, this command
    ends the warning. If they are not, raise the view's version= instead. (perco views diff shows which it is.) The
    store must know the program's views already.

    \b
    Examples:
      perco views accept app:views --store web/
      perco views accept app:views totals --store web/
    """
    perform(_show_accepted, program, store, view, json=json)


@views.command(name="drop", short_help="Delete a view's rows, and all that perco keeps for it.")
def _drop(
    program: Program,
    view: Annotated[str, typer.Argument(metavar="VIEW", help="The view, or the sink, by its id.")],
    store: StoreOption,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without this, only show what would be deleted.")] = False,
    json: Json = False,
) -> None:
    """Drop a view that your program declares no more: delete its rows and unregister its observers.

    First deploy the program without the view: the command is refused while a worker has it. The store may be in use
    meanwhile, and views that read the rows follow. MODULE:VIEWS are the views of the program now; the columns that they
    write are left as they are. If the command is interrupted, start it again.

    \b
    Examples:
      perco views drop app:views totals --store web/
      perco views drop app:views totals --store web/ --yes
    """
    perform(dropping.drop_view, program, view, store, yes=yes, json=json)


def why(
    program: Program,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A table that views write.")],
    key: Annotated[str, typer.Argument(metavar="ROW", help="The row's key.")],
    store: StoreOption,
    ts: Annotated[int | None, typer.Option("--ts", metavar="N", help="As of a timestamp.")] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="As of TIME: 90s, 5m, 2h, 1d (ago), or 2026-03-01T12:00[+01:00]."),
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="Follow inputs that are derived themselves this far.")] = 4,
    inputs: Annotated[int, typer.Option(min=1, help="Show at most this many inputs of a row.")] = 5,
    json: Json = False,
) -> None:
    """Show why a derived row is what it is.

    Prints a tree: which view gave the row its values, which version and code of it, and the inputs of that run; below
    an input that is derived itself, the same for it. The function is called again with these inputs: "made again, byte
    by byte" means that it gives the same values. The exit code is 1 if it does not, or if there is no such row.

    \b
    Examples:
      perco why app:views words apple --store web/
      perco why app:views postings '["apple", "http://a/"]' --store web/ --at 2026-03-01T12:00
    """
    when = When(ts=ts, at=at)
    perform(reasons.show_reasons, loaded_views, program, table, key, store, when, depth=depth, inputs=inputs, json=json)


def _reads(view: DeclaredView) -> list[str]:
    return [repr(column) for column in (*view.columns, *(view.rights.columns if isinstance(view, Joined) else ()))]


def _writes(view: DeclaredView) -> list[str]:
    return sorted(repr(column) for columns in view.outputs.values() for column in columns)


async def _freshness(store: str, loaded: Views) -> dict[str, Freshness]:
    """How fresh the views of a store are (V14): as its owner says, or, if no process owns it, as its rows say."""
    await _must_be_registered(store, loaded)
    async with perco.open(store, loaded.schema, readonly=True) as db:
        if not inside(db).place.owner_alive or is_client(db):
            ask = inside(db).owner.freshness
            return await inside(db).waiting.freshness_of(None, ask)
    async with perco.open(store, loaded.schema) as db:  # a client of the owner
        return await db.freshness()


async def _show_list(program: str, store: str | None, *, json: bool) -> int:
    loaded = loaded_views(program)
    fresh = {} if store is None else await _freshness(store, loaded)
    found = loaded.declared.values()
    sinks = [(each.id, [repr(column) for column in each.columns], _told_sink(each)) for each in loaded.sinks.values()]
    if json:
        kinds = {Each: "each", Grouped: "group", Joined: "join", CoGrouped: "cogroup", Components: "components"}
        show_json(
            [
                {"id": view.id, "kind": kinds[type(view)], "reads": _reads(view), "writes": _writes(view)}
                | _plain_fresh(fresh.get(view.id))
                for view in found
            ]
            + [
                {"id": id, "kind": "sink", "reads": reads, "writes": [to]} | _plain_fresh(fresh.get(id))
                for id, reads, to in sinks
            ]
        )
        return FINE
    if store is not None:
        _show_freshness(fresh)
        return FINE
    of = {Each: "each row", Grouped: "groups", Joined: "pairs", CoGrouped: "keys", Components: "connected nodes"}
    rows = [(view.id, of[type(view)], ", ".join(_reads(view)), ", ".join(_writes(view))) for view in found]
    rows += [(id, "rows, for a sink", ", ".join(reads), to) for id, reads, to in sinks]
    show_table(("view", "of", "reads", "writes"), rows)
    return FINE


def _plain_fresh(fresh: Freshness | None) -> dict[str, Any]:
    return {} if fresh is None else {"fresh": asdict(fresh)}


def _show_freshness(fresh: dict[str, Freshness]) -> None:
    rows = [
        (id, each.ts or "still being built", each.waiting, each.failed, f"{each.lag_s:.0f} s" if each.lag_s else "")
        for id, each in fresh.items()
    ]
    show_table(("view", "fresh to", "waiting", "failed", "lag"), rows, numbers=("waiting", "failed"))


def _told_sink(sinking: declared_views.Sinking) -> str:
    to = sinking.to
    if isinstance(to, declared_views.SqliteTable):
        return f"{to.path}: {to.name}"
    if isinstance(to, declared_views.PostgresTable):
        return f"PostgreSQL: {to.name}"
    return place_of(to.function) if isinstance(to, Calling) else type(to).__qualname__


async def _show_plans(program: str, wanted: str | None) -> int:
    loaded = loaded_views(program)
    for view in loaded.chosen(wanted) if wanted not in loaded.sinks else ():
        print("\n".join([f"{view.id}:", *(f"  {line}" for line in explained(view))]))
    for id, sinking in loaded.sinks.items():
        if wanted in (None, id):
            print(f"{id}:")
            print(f"  reads {', '.join(map(repr, sinking.columns))}; delivers to {_told_sink(sinking)}")
            print(f"  after a change of a row, the row is delivered, with up to {sinking.batch - 1:,} others")
    return FINE


def explained(view: DeclaredView) -> list[str]:
    """The tables and runs that keep a view, and the cost of a change, a sentence each."""
    lines = [f"reads {', '.join(_reads(view))}; writes {', '.join(_writes(view))}"]
    if isinstance(view, Each):
        lines.append("after a change of a row, its function runs for this row")
        if view.several:
            lines.append("one run handles changes of several columns of a row that came together")
    elif isinstance(view, Grouped):
        lines += _grouped(view)
    elif isinstance(view, Components):
        lines += _components(view)
    elif isinstance(view, CoGrouped):
        lines += _cogrouped(view)
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
    if view.members.in_place:
        lines.append("reads the rows where they are, because they are sorted by group")
        lines += _told_by(view, view.members.columns)
    else:
        lines.append(f"keeps the rows sorted by group in {view.members.table.name!r}: one more run, and a copy of each")
    if view.first is not None:
        lines.append(f"a run reads the first {view.first:,} members of a group")
        return lines
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


def _cogrouped(view: CoGrouped) -> list[str]:
    lines = []
    for side in view.sides:
        name = side.rows.source.name
        many = "all rows" if side.first is None else f"the first {side.first:,} rows"
        what = f"{many} of {name} whose keys begin with it" if side.many else f"the row of {name}"
        lines += [f"for each key, reads {what}", *(f"  {line}" for line in _told_by(view, side.rows.columns))]
    return [
        *lines,
        f"after a change of one of these rows, its function runs for the key (at most {view.rows_max:,} rows)",
    ]


def _told_by(view: Grouped | Joined | CoGrouped, read: Iterable[perco.Column[Any, Any]]) -> list[str]:
    """Which views tell this one of changes themselves."""
    writers = [view.writers[column].id for column in read if column in view.writers]
    if not writers:
        return ["an observer runs first for each changed row, and tells this view of it"]
    return [f"is told of changes by the runs of {', '.join(sorted(set(map(repr, writers))))}"]


def _joined(view: Joined) -> list[str]:
    left, right = view.table.name, view.rights.source.name
    kept = [f"keeps the rows of {right} sorted by key in {view.rights.table.name!r}"]
    if view.rights.in_place:
        kept = [
            f"reads the row of {right} where it is, because the key is its own",
            *_told_by(view, view.rights.columns),
        ]
    if view.lefts is not None:
        kept.append(f"keeps which rows of {left} have a key in {view.lefts.left.table.name!r}")
    return [
        f"{view.how} join: each row of {left} with the rows of {right} that have the same key",
        *kept,
        f"after a change of a row of {left}, its function runs for this row and its matches (at most "
        f"{view.matches_max:,})",
        f"after a change of a row of {right}, the same happens for each row of {left} with its key",
    ]


def _components(view: Components) -> list[str]:
    return [
        f"gives each node, a row of {view.table.name}, the smallest node that links connect it with",
        f"keeps the links, rows of {view.links.name}, from both of their ends in {view.sides.table.name!r}",
        "after a new link, the nodes of one of the two parts that it connects get the label of the other",
        "after the end of a link, looks for another path between its ends; if there is none, the nodes of one of the "
        "two parts get a new label",
        f"a run may read {view.nodes_max:,} rows of {view.table.name}",
    ]


async def _show_check(program: str, store: str, limit: int, *, json: bool) -> int:
    found = loaded_views(program)
    async with perco.open(store, found.schema, readonly=True) as db, db.snapshot() as snap:
        with _counting("reading {task.description}: {task.completed:,.0f} rows") as tell:
            try:
                checked = await declared_views.check(found, snap, differences_max=limit, progress=tell)
            except PercoError:
                raise
            except Exception as error:
                return _failed(error)
    if json:
        show_json(_plain(checked))
        return FINE if checked.equal else FOUND
    rows = [(id, rows, checked.digests[id]) for id, rows in checked.rows.items()]
    show_table(("view", "rows", "digest"), rows)
    for each in checked.differences:
        _show_difference(each, "expected", "found")
    if checked.count > len(checked.differences):
        print(f"... and {counted(checked.count - len(checked.differences), 'more row')}")
    if checked.equal:
        print(f"equal, as of timestamp {checked.ts}")
        return FINE
    verb = "differs" if checked.count == 1 else "differ"
    print(f"{counted(checked.count, 'row')} {verb}, as of timestamp {checked.ts}")
    return FOUND


async def _show_diff(program: str, store: str, view: str | None, sample: float, limit: int, *, json: bool) -> int:
    found = loaded_views(program)
    # Without the schema: the new declarations must not be recorded, and the store need not know them.
    async with perco.open(store, readonly=True) as db, db.snapshot() as snap:
        with _counting("comparing {task.description}: {task.completed:,.0f} owners") as tell:
            done = await declared_views.diff(
                found,
                snap,
                view,
                sample=sample,
                differences_max=limit,
                progress=lambda each: tell(each.view, each.owners),
            )
    code = FINE if all(each.equal for each in done) else FOUND
    if json:
        show_json([_plain_diff(each) for each in done])
        return code
    counts = ("owners", "same", "added", "changed", "removed", "strays", "failed")
    show_table(
        ("view", *counts), [(each.view, *(getattr(each, name) for name in counts)) for each in done], numbers=counts
    )
    for each in done:
        for difference in each.differences:
            _show_difference(difference, "new", "now")
        rest = each.added + each.changed + each.removed + each.strays - len(each.differences)
        if rest and each.differences:
            print(f"... and {counted(rest, 'more row')} of {each.view}")
        for failure in each.failures:
            print(f"{each.view}: for {shown(failure.owner)}: {_told(failure.error)}")
    print(f"as of timestamp {snap.start_ts}")
    return code


async def _show_rebuilt(program: str, store: str, view: str | None, *, json: bool) -> int:
    found = loaded_views(program)
    await _must_be_registered(store, found)
    async with perco.open(store, found.schema) as db:
        with _counting("computing {task.description}: {task.completed:,.0f} owners") as tell:
            try:
                done = await declared_views.rebuild(found, db, view, progress=lambda each: tell(each.view, each.owners))
            except PercoError:
                raise
            except Exception as error:
                return _failed(error)
    if json:
        show_json([asdict(each) for each in done])
        return FINE
    counts = ("owners", "mended", "strays")
    show_table(
        ("view", *counts), [(each.view, *(getattr(each, name) for name in counts)) for each in done], numbers=counts
    )
    if any(each.mended or each.strays for each in done):
        print("views that read these tables follow when a worker runs", file=sys.stderr)
    return FINE


async def _must_be_registered(store: str, found: Views) -> None:
    """Raises: UsageError if the store does not know all that the program declares: a command that repairs a store must
    not deploy a program."""
    async with perco.open(store, readonly=True) as db:
        catalogue = inside(db).catalogue
        if catalogue.declare(found.schema) is not catalogue:
            raise UsageError(
                "the program declares tables, views or versions that the store does not know. Run the program first: "
                "they are registered when it opens the store for writing. (perco views diff shows what they change.)"
            )


async def _show_accepted(program: str, store: str, view: str | None, *, json: bool) -> int:
    found = loaded_views(program)
    await _must_be_registered(store, found)
    async with perco.open(store, found.schema) as db:
        accepted = await declared_views.accept(found, db, view)
    if json:
        show_json(accepted)
    else:
        print(f"accepted: {', '.join(accepted)}" if accepted else "no code had changed")
    return FINE


def _show_difference(each: declared_views.Difference, wanted: str, found: str) -> None:
    given = "" if each.owner is None else f" (given by {shown(each.owner)})"
    width = max(len(wanted), len(found)) + 2
    print(f"{each.view}: {each.table}[{shown(each.key)}]{given}")
    print(f"  {wanted:{width}}{_row(each.expected)}")
    print(f"  {found:{width}}{_row(each.found)}")


def _row(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={shown(value, _WIDTH)}" for name, value in sorted(values.items())) or "no row"


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _failed(error: Exception) -> int:
    """Tell that a function of the program has failed."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    complain(f"a function of the program failed: {_told(error)}{notes}")
    return FAILED


def _plain_difference(each: declared_views.Difference) -> dict[str, Any]:
    return {
        "view": each.view,
        "table": each.table,
        "key": plain(each.key),
        "expected": {name: plain(value) for name, value in each.expected.items()},
        "found": {name: plain(value) for name, value in each.found.items()},
        "owner": plain(each.owner),
    }


def _plain(checked: declared_views.Checked) -> dict[str, Any]:
    return {
        "equal": checked.equal,
        "ts": checked.ts,
        "views": {id: {"rows": rows, "digest": checked.digests[id]} for id, rows in checked.rows.items()},
        "differing": checked.count,
        "differences": [_plain_difference(each) for each in checked.differences],
    }


def _plain_diff(each: declared_views.Diff) -> dict[str, Any]:
    counts = ("view", "equal", "owners", "same", "added", "changed", "removed", "strays", "failed")
    return {
        **{name: getattr(each, name) for name in counts},
        "differences": [_plain_difference(difference) for difference in each.differences],
        "failures": [{"owner": plain(one.owner), "error": _told(one.error)} for one in each.failures],
    }


class _counting:
    """On a terminal, says on stderr how far something is."""

    def __init__(self, form: str) -> None:
        self._form = form

    def __enter__(self) -> Callable[[str, int], None]:
        self._bar = Progress(
            TextColumn(self._form), console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
        )
        self._bar.start()
        self._tasks: dict[str, Any] = {}
        return self._tell

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _tell(self, what: str, done: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=None)
        self._bar.update(self._tasks[what], completed=done)


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.add_typer(views, name="views", short_help="Derived tables that a program declares.")
    app.command()(why)
    crossing.register(app)
