"""The commands about observers and those who operate them: from `worker` to `doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

import perco
from perco.cli import doctoring, dropping, failing, logs, observing, schemas, topping, tracing, working
from perco.cli.logs import Level
from perco.cli.numbers import App
from perco.cli.screen import perform, perform_alone, perform_on_asyncio

Store = Annotated[str, typer.Argument(metavar="STORE", help="The store's folder, or the address of a served one.")]
Observer = Annotated[str, typer.Argument(metavar="OBSERVER", help="An observer's id; perco observers lists them.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
All = Annotated[bool, typer.Option("--all", help="All failed changes.")]
AllOfIts = Annotated[bool, typer.Option("--all", help="All of this observer's failed changes.")]
Metrics = Annotated[
    str | None, typer.Option("--metrics", metavar="HOST:PORT", help="Serve metrics for Prometheus there, over HTTP.")
]
Ui = Annotated[
    str | None,
    typer.Option("--ui", metavar="HOST:PORT", help="Also serve the page of perco ui there."),
]
LogLevel = Annotated[Level, typer.Option("--log-level", help="Log events from this level on.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log one JSON object for each event.")]
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

failed: typer.Typer = App(no_args_is_help=True, rich_markup_mode=None, context_settings=_SETTINGS)


@failed.callback()
def _failed() -> None:
    """Changes whose observer failed too often.

    If an observer fails too often for a change (perco.WorkerOptions(attempts=16)), the change moves to the failed list,
    with the last error. A newer change of the same cell runs the observer again; if that run succeeds, the old change
    is taken off the list.

    \b
    Examples:
      perco failed list web/
      perco failed show web/ parse http://a/
      perco failed replay web/ parse
      perco failed drop web/ parse http://a/
    """


@failed.command(name="list", short_help="List failed changes and their errors.")
def _list(
    store: Store,
    observer: Annotated[str | None, typer.Argument(metavar="OBSERVER", help="Only this observer's changes.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many.")] = 100,
    json: Json = False,
) -> None:
    """List failed changes and their errors, even while another process has the store open.

    \b
    Examples:
      perco failed list web/
      perco failed list web/ parse --limit 10
    """
    perform(failing.show_list, store, observer, limit, json=json)


@failed.command(name="show", short_help="Show a failed change, with its traceback.")
def _show(
    store: Store,
    observer: Observer,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The row's key.")],
    json: Json = False,
) -> None:
    """Show one failed change, with its traceback. Exits with 1 if there is none.

    \b
    Example:
      perco failed show web/ parse http://a/
    """
    perform(failing.show_one, store, observer, key, json=json)


@failed.command(name="replay", short_help="Run observers again for failed changes.")
def _replay(
    store: Store,
    observer: Annotated[str | None, typer.Argument(metavar="OBSERVER", help="Only this observer's changes.")] = None,
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="Only this row's changes.")] = None,
    everything: All = False,
    json: Json = False,
) -> None:
    """Make failed changes wait for their observer again, as before their first attempt.

    Exits with 1 if there are none.

    \b
    Examples:
      perco failed replay web/ --all
      perco failed replay web/ parse
      perco failed replay web/ parse http://a/
    """
    perform(failing.replay, store, observer, key, everything=everything, json=json)


@failed.command(name="drop", short_help="Acknowledge failed changes without a run.")
def _drop(
    store: Store,
    observer: Observer,
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="Only this row's changes.")] = None,
    everything: AllOfIts = False,
    json: Json = False,
) -> None:
    """Acknowledge failed changes: their observer never runs for them.

    Exits with 1 if there are none.

    \b
    Examples:
      perco failed drop web/ parse http://a/
      perco failed drop web/ parse --all
    """
    perform(failing.drop, store, observer, key, everything=everything, json=json)


def worker(
    schema: Annotated[str, typer.Argument(metavar="MODULE:SCHEMA", help="Where the observers are declared.")],
    store: Annotated[
        str, typer.Option("--store", metavar="STORE", help="The store's folder, or the address of a served one.")
    ],
    processes: Annotated[int, typer.Option(min=1, help="Number of processes; one that dies is started again.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Runs in flight, in each process.")] = 64,
    scanners: Annotated[int, typer.Option(min=1, help="Tasks that look for work, in each process.")] = 4,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="OBSERVER", help="Run only this observer. May be repeated.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--except", metavar="OBSERVER", help="Leave this observer to other workers. May be repeated."),
    ] = None,
    on_asyncio: Annotated[
        bool, typer.Option("--asyncio", help="Run on asyncio, for observers under @perco.aio.observer.")
    ] = False,
    until_idle: Annotated[bool, typer.Option("--until-idle", help="Stop when no change is waiting.")] = False,
    drain: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="At the end, how long runs in flight may go on.")
    ] = 10.0,
    metrics: Metrics = None,
    traces: Annotated[bool, typer.Option("--traces", help="Trace runs and transactions with OpenTelemetry.")] = False,
    log_level: LogLevel = Level.warning,
    log_json: LogJson = False,
    json: Json = False,
) -> None:
    """Run a program's observers, until SIGTERM or Ctrl-C.

    MODULE is imported from the current folder; SCHEMA is the perco.Schema, or the perco.views.Views, in it. Several
    workers may run on one store; only one of them at a time works on a row. If no process has the folder open, the
    first worker becomes its owner, and the others are that worker's clients. With `perco serve`, the folder stays open
    when a worker ends. For a store on PostgreSQL or Bigtable, workers are clients of `perco serve --direct`.

    On SIGTERM or Ctrl-C, it begins no more runs, and ends when those in flight have ended, or after --drain seconds. A
    second signal, a second later or more, kills it. A run that was broken off has changed nothing, and runs again.

    With --traces, the program that MODULE belongs to sets the tracer provider, or opentelemetry-instrument does.

    With --only or --except, a worker runs a part of the observers, for example only those that need a GPU. With
    --until-idle, the other ones must run elsewhere: otherwise it exits with 2 when only their changes are left.

    \b
    Examples:
      perco worker app:schema --store web/
      perco worker app:schema --store web/ --processes 4 --concurrency 32
      perco worker app:schema --store tcp://localhost:7420 --until-idle
      perco worker app:schema --store tcp://localhost:7420 --only embed --concurrency 4
      perco worker app:schema --store web/ --asyncio --metrics localhost:9465
      opentelemetry-instrument perco worker app:schema --store web/ --traces
    """
    options = perco.WorkerOptions(
        concurrency=concurrency, scanners=min(scanners, concurrency), only=only or None, without=without or None
    )
    logs.begin(log_level, as_json=log_json)
    how = working.How(options, metrics, drain, until_idle, json, traces)
    if on_asyncio and processes == 1:
        perform_on_asyncio(working.work_on_asyncio, schema, store, how)
    perform_alone(working.work, schema, store, how, processes=processes)


def pause(store: Store, observer: Observer, json: Json = False) -> None:
    """Stop an observer until it is resumed.

    The store records the pause, so no program runs the observer. Its changes keep waiting.

    \b
    Example:
      perco pause web/ parse
    """
    perform(observing.pause, store, observer, paused=True, json=json)


def resume(store: Store, observer: Observer, json: Json = False) -> None:
    """Let a paused observer run again.

    It then runs for the changes that have waited, in a program that declares it.

    \b
    Example:
      perco resume web/ parse
    """
    perform(observing.pause, store, observer, paused=False, json=json)


def observers(
    store: Store,
    draw: Annotated[bool, typer.Option("--graph", help="Draw the pipeline as a tree.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Draw the pipeline as a Mermaid flowchart.")] = False,
    drop: Annotated[
        str | None, typer.Option("--drop", metavar="OBSERVER", help="Unregister an observer that no program declares.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --drop: even if changes wait for it, or failed.")] = False,
    json: Json = False,
) -> None:
    """Show which columns observers read and write.

    The store records which column each observer observes, and which columns its runs have been seen to write so far.
    The command also works while another process has the store open.

    --drop unregisters an observer that no program declares any more, and removes the changes that wait for it or are on
    its failed list; if there are any, only with --yes. It is refused while a worker has the observer. The rows that its
    runs have written stay. (To drop a view: perco views drop.)

    \b
    Examples:
      perco observers web/
      perco observers web/ --graph
      perco observers web/ --mermaid > pipeline.mmd
      perco observers web/ --drop parse
    """
    if drop is not None:
        perform(dropping.drop_observer, store, drop, yes=yes, json=json)
        return
    perform(observing.observers, store, draw=draw, mermaid=mermaid, json=json)


def drop(
    store: Store,
    what: Annotated[str, typer.Argument(metavar="TABLE[.COLUMN]", help="A table, or a column or signal of one.")],
    group: Annotated[
        str | None, typer.Option("--group", metavar="GROUP", help="All columns of this locality group of the table.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Drop it; otherwise only show what is there.")] = False,
    json: Json = False,
) -> None:
    """Drop a table, or a column, that no program needs any more.

    Without --yes, only shows how many values there are, and exits with 1. A drop is refused while observers observe the
    column, or a view has rows in the table: drop these first. Programs that still declare what was dropped get errors
    where they use it, and make it again, empty, when they open the store: deploy programs without it first.

    The values are removed by the vacuum, once no reader needs them (perco vacuum does it at once). A backup that was
    taken before still has them.

    
    Examples:
      perco drop web/ docs.summary
      perco drop web/ docs --group images --yes
      perco drop web/ drafts --yes
    """
    perform(dropping.drop, store, what, group=group, yes=yes, json=json)


def doctor(
    store: Annotated[str, typer.Argument(metavar="FOLDER", help="A store's folder, or where one is to be.")],
    json: Json = False,
) -> None:
    """See whether this machine suits a store.

    Looks at the file system, permissions, free space, how long an fsync takes and whether it can be true, limits of the
    process, and the clock. If a store is there, it must be readable. Writes only a temporary file. Exits with 1 if
    something is wrong; warnings do not count.

    \b
    Examples:
      perco doctor /srv/web
      perco doctor /srv/web --json
    """
    perform(doctoring.doctor, store, json=json)


def schema(
    store: Store,
    program: Annotated[
        str | None, typer.Argument(metavar="MODULE:SCHEMA", help="A program's schema, to compare with.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if the program would change anything.")] = False,
    json: Json = False,
) -> None:
    """Show a store's schema, or what a program would change in it.

    When a program opens a store, its tables, columns and observers are added, and the versions of observers are raised;
    nothing is ever taken away. With MODULE:SCHEMA, this command says what would be added, changed, left as it is, or
    refused, and changes nothing: for a deploy's pipeline. Exits with 2 if the program could not open the store. With
    --check, also exits with 1 if anything would change: for a deploy that must not change the schema.

    \b
    Examples:
      perco schema web/
      perco schema web/ app:schema
      perco schema tcp://localhost:7420 app:schema --check
    """
    perform(schemas.schema, store, program, check=check, json=json)


def top(
    store: Store,
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How often to look.")] = 2.0,
    count: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Look N times; by default until Ctrl-C.")
    ] = None,
    json: Json = False,
) -> None:
    """Watch how far observers lag behind.

    For each observer: how many changes wait for it, by how many this grows or shrinks a second, how old the cause of
    the oldest one is, how many have had a failed run, how many are on the failed list, and how many processes run it.
    With --json, one document for each look.

    \b
    Examples:
      perco top web/
      perco top tcp://localhost:7420 --every 10
      perco top web/ --count 1 --json
    """
    perform(topping.top, store, every_s=every, count=count, json=json)


def trace(
    store: Store,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A table; status lists them.")],
    key: Annotated[str, typer.Argument(metavar="ROW", help="The row's key.")],
    json: Json = False,
) -> None:
    """Show what a row's values came from, and what followed.

    Prints a tree. Its root is the transaction that began the chain: a program's own, not an observer run. Below each
    transaction are the cells that it wrote, except those that have been written again since, and the observer runs
    that followed. If a transaction has many cells or runs, only some are shown, those of the row first; --json has
    all. The command reads all write records of the store once. Exits with 1 if the row was never written.

    \b
    Example:
      perco trace web/ words '["apple", "http://a/"]'
    """
    perform(tracing.trace_row, store, table, key, json=json)


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.command()(worker)
    app.add_typer(failed, name="failed", short_help="Changes whose observer failed too often.")
    app.command()(observers)
    app.command()(top)
    app.command()(schema)
    app.command()(drop)
    app.command()(doctor)
    app.command()(trace)
    app.command()(pause)
    app.command()(resume)
