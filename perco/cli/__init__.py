"""The command `perco`: its commands, options and help. The modules of this package do the work.

`perco.webindex.cli` adds its commands with `register(app)`, if the extra `web` is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

import perco
from perco.cli import (
    backfilling,
    backing,
    bigtable,
    changing,
    checking,
    compacting,
    copying,
    exchanging,
    history,
    logs,
    observed,
    pinging,
    postgresql,
    querying,
    reading,
    serving,
    splitting,
    status as statuses,
    viewing,
    waiting,
    writing,
)
from perco.cli.logs import Level
from perco.cli.numbers import App
from perco.cli.observed import LogJson, LogLevel, Metrics, Ui
from perco.cli.reading import Range, When
from perco.cli.screen import GOES_ON, complain, perform, perform_alone, perform_or
from perco.cli.ui import command as page

_WEB = ("w3lib", "warcio")
_EXTRA = "pip install '.[web]' in perco's checkout"

_HELP = """Inspect, change, check and serve perco stores; build a search index over web pages.

A store is a folder, or the address of a served one: tcp://HOST:PORT, tls://HOST:PORT, unix:PATH. If another
process has the folder open, commands that only read use the folder's files, up to a second behind; commands
that write go through that process. check reads the files of a folder; for an address, it checks only the cells.
check --accept and, for a folder, check --repair need a store that no other process has open.

\b
Write keys and values as the column's codec expects them:
  text     as it is                int64, float64, decimal  a number, such as 12.50
  bytes    text, or hex:00ff       date       2026-03-01
  json     JSON                    timestamp  2026-03-01T12:00:00Z
  tuples   JSON: '["de", 7]'       bool       true or false
A key or value that begins with a minus goes after --, unless it is a number:
  perco set web/ docs k rank -5
  perco set web/ docs k title -- -none-

With --json a command prints one JSON document (scan: one line for each row), with bytes as {"hex": "00ff"}.

\b
Exit codes:
    0  fine
    1  findings, or not found
    2  wrong usage, or the store cannot be used
  130  interrupted

\b
Examples:
  perco status web/
  perco scan web/ docs --prefix http://a/ --columns rank --limit 10
  perco get web/ docs http://a/ rank --at 2026-03-01T12:00
  perco check web/
"""

app: typer.Typer = App(
    name="perco",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Store = Annotated[str, typer.Argument(metavar="STORE", help="The store's folder, or the address of a served one.")]
Served = Annotated[
    str,
    typer.Argument(metavar="STORE", help="The store's folder, or a database: postgresql://..., bigtable://..."),
]
Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="The store's folder.")]
TableName = Annotated[str, typer.Argument(metavar="TABLE", help="A table; status lists them.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The row's key.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_TIME = "As of TIME: 90s, 5m, 2h, 1d (ago), or 2026-03-01T12:00[+01:00]."
At = Annotated[str | None, typer.Option("--at", metavar="TIME", help=_TIME)]
Ts = Annotated[int | None, typer.Option("--ts", metavar="N", help="As of a timestamp.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"perco {perco.__version__}")
        raise typer.Exit


@app.callback(help=_HELP)
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def status(
    store: Store,
    groups: Annotated[
        bool, typer.Option("--groups", help="Also show how many cells of each group a tablet holds.")
    ] = False,
    tasks: Annotated[
        bool, typer.Option("--tasks", help="Show instead what each task of the store's processes waits for.")
    ] = False,
    json: Json = False,
) -> None:
    """Show a store's owner, tables and waiting changes.

    Shows the owner; the tables with their columns and tablets; how far back each table can be read; which transaction
    or pin keeps old versions (as the vacuum last saw it: at most 30 s ago while a process has the store open); the
    number of locks; and the changes that wait for each observer, including those that have failed and are retried. If
    the store is open, it also shows how many clients the owner has, and how many processes run observers. The column
    "ready" says whether an observer has been notified of all older data. --json shows everything.

    --tasks asks the owner and its clients for the tasks of their event loops. For each task, it shows the line of code
    where the task began, the line where it waits, and what it waits for; tasks that look alike share a line.

    \b
    Examples:
      perco status web/
      perco status web/ --json | jq .waiting
      perco status web/ --tasks
    """
    if tasks:
        perform(statuses.tasks, store, json=json)
    perform(statuses.status, store, json=json, groups=groups)


@app.command()
def scan(
    store: Store,
    table: TableName,
    prefix: Annotated[str | None, typer.Option(help="Keys with this prefix; for tuples a JSON array of parts.")] = None,
    start: Annotated[str | None, typer.Option(help="From this key on.")] = None,
    stop: Annotated[str | None, typer.Option(help="Up to, but not including, this key.")] = None,
    columns: Annotated[str | None, typer.Option(help="These columns, separated by commas.")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="At most this many rows.")] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="In reverse key order.")] = False,
    at: At = None,
    ts: Ts = None,
    json: Json = False,
) -> None:
    """Print rows of a table in key order, all as of one moment.

    Long values are cut; --json prints them whole, one line of JSON per row. In a pipe, each row is a line, with its
    cells separated by tabs.

    \b
    Examples:
      perco scan web/ docs --limit 20
      perco scan web/ docs --prefix http://a/ --columns rank,title
      perco scan web/ links --prefix '["http://a/"]' --json
    """
    names = [name.strip() for name in columns.split(",")] if columns else []
    chosen = Range(prefix=prefix, start=start, stop=stop, columns=names, limit=limit, reverse=reverse)
    perform(reading.scan, store, table, chosen, When(ts=ts, at=at), json=json)


@app.command()
def get(
    store: Store,
    table: TableName,
    key: Key,
    column: Annotated[str | None, typer.Argument(metavar="COLUMN", help="One column; all by default.")] = None,
    versions: Annotated[bool, typer.Option("--versions", help="Every version, newest first.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="The stored bytes of one column, and nothing else.")] = False,
    at: At = None,
    ts: Ts = None,
    json: Json = False,
) -> None:
    """Print one cell, or all cells of a row.

    With COLUMN, it prints only that value. Exits with 1 if there is no value.

    \b
    Examples:
      perco get web/ docs http://a/
      perco get web/ docs http://a/ rank
      perco get web/ docs http://a/ rank --versions
      perco get web/ docs http://a/ contents --raw > page.html
    """
    when = When(ts=ts, at=at)
    if versions:
        perform(reading.versions, store, table, key, column, when, json=json)
    perform(reading.get, store, table, key, column, when, json=json, raw=raw)


@app.command(name="set")
def set_(
    store: Store,
    table: TableName,
    key: Key,
    column: Annotated[str, typer.Argument(metavar="COLUMN", help="The column.")],
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The new value.")],
    json: Json = False,
) -> None:
    """Write one cell, in a transaction of its own.

    Notifies the observers that the store's catalogue lists for the column.
    They run as soon as a worker has the store open.

    \b
    Examples:
      perco set web/ docs http://a/ rank 0.5
      perco set web/ docs http://a/ title 'A page'
      perco set web/ docs http://a/ digest hex:00ff12
    """
    perform(writing.set_cell, store, table, key, column, value, json=json)


@app.command()
def delete(
    store: Store,
    table: TableName,
    key: Key,
    columns: Annotated[
        list[str] | None, typer.Argument(metavar="COLUMN", help="These columns; all by default.")
    ] = None,
    json: Json = False,
) -> None:
    """Delete cells of one row, in a transaction of its own.

    Notifies observers, as set does. Older versions stay readable for as
    long as the table keeps them. Exits with 1 if there is no value.

    \b
    Examples:
      perco delete web/ docs http://a/
      perco delete web/ docs http://a/ rank title
    """
    perform(writing.delete_cells, store, table, key, columns or (), json=json)


@app.command()
def signal(
    store: Store,
    table: TableName,
    key: Key,
    name: Annotated[str, typer.Argument(metavar="SIGNAL", help="The signal.")],
    json: Json = False,
) -> None:
    """Raise a signal, in a transaction of its own.

    Its observers run in a program that declares them. Exits with 1 if the signal
    has no observer, because then raising it has no effect.

    \b
    Examples:
      perco signal web/ clusters 3fa9 changed
    """
    perform(writing.raise_signal, store, table, key, name, json=json)


@app.command()
def serve(
    store: Served,
    listen: Annotated[
        list[str] | None,
        typer.Option("--listen", metavar="ADDRESS", help="unix:PATH, tcp://HOST:PORT or tls://HOST:PORT; repeatable."),
    ] = None,
    durability: Annotated[
        str, typer.Option(help='"power": acknowledged writes survive power loss; "process": only process death.')
    ] = "power",
    processes: Annotated[int, typer.Option(min=1, max=64, help="Tablet servers; 1: everything in one process.")] = 1,
    connections: Annotated[int, typer.Option(min=1, help="The maximum number of clients at a time.")] = 1024,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="A certificate, for tls://.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="The private key, if in a separate file.")] = None,
    direct: Annotated[
        bool, typer.Option("--direct", help="For a database store: let clients read and write the rows directly.")
    ] = False,
    standby: Annotated[
        bool, typer.Option("--standby", help="For a database store: while another process owns it, wait to take over.")
    ] = False,
    advertise: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="With --direct: the address for clients; by default that of --listen."),
    ] = "",
    metrics: Metrics = None,
    ui: Ui = None,
    log_level: LogLevel = Level.warning,
    log_json: LogJson = False,
) -> None:
    """Keep a store open for other processes, until SIGTERM or Ctrl-C.

    Programs that open the same folder become clients automatically, over a socket in the folder. Use this command to
    keep the store open after such programs have ended, and to serve clients on other hosts. This command runs no
    observers; start workers, which connect as clients. If the folder does not exist, the command creates a store.

    On TCP, a client must present the store's token, a file in the folder with mode 0600. Programs of the
    same user on the same machine find it automatically; others use perco.open(..., token=...), or PERCO_TOKEN in the
    environment. An address that other hosts can reach needs TLS.

    STORE may be a database, postgresql://... or bigtable://...: this process then owns the store. --listen sets the
    address for clients; over TCP, the token is the value of PERCO_TOKEN. With --standby, a second server waits while
    the first one owns the store, and takes over if the first one fails. With --direct, programs that open the
    database's address read and write the rows directly; they get timestamps from the server that owns the store.

    With --processes N, N tablet servers have the tablets of all tables, and clients call them directly. If a tablet
    server dies, the others take over its tablets, and a new one replaces it. Without --processes, the server commits a
    transaction in one step if it stays within one tablet; with tablet servers, every commit takes two phases. So more
    processes help only if a single one is limited by its CPU. A table that has grown has several tablets.

    \b
    Examples:
      perco serve web/
      perco serve web/ --listen tcp://localhost:7420
      perco serve web/ --metrics localhost:9464 --log-level info --log-json
      perco serve web/ --ui localhost:7430
      perco serve web/ --processes 4
      perco serve web/ --listen tls://0.0.0.0:7420 --tls-cert cert.pem --tls-key key.pem
      perco serve 'postgresql://localhost/shop?prefix=web' --listen tcp://localhost:7420
      perco serve 'postgresql://db/shop?prefix=web' --direct --standby --listen tls://0.0.0.0:7420 --tls-cert cert.pem
      perco serve 'bigtable://acme/main?prefix=web' --direct --standby --listen tls://0.0.0.0:7420 --tls-cert cert.pem
      perco scan tcp://localhost:7420 docs
    """
    logs.begin(log_level, as_json=log_json)
    mould = serving.mould() if processes > 1 and serving.is_kept() else None
    perform_alone(
        serving.serve,
        *(store, listen or [], durability, connections, tls_cert, tls_key, processes, mould),
        serving.Also(direct, standby, advertise, metrics, ui, logs.arguments(log_level, as_json=log_json)),
    )


@app.command(short_help="See whether a store's owner answers.")
def ping(
    store: Store,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for an answer.")] = 5.0,
    json: Json = False,
) -> None:
    """Ask the process that owns a store for an answer: a check of its health.

    Exits with 0 if it answers, with 1 if it does not answer in time, and with 2 if no process has the store open.

    \b
    Examples:
      perco ping web/
      perco ping tcp://localhost:7420 --timeout 1
    """
    perform(pinging.ping, store, timeout_s=timeout, json=json)


@app.command()
def wait(
    store: Store,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Give up after this time, with exit code 1.")
    ] = None,
    until_ts: Annotated[
        int | None, typer.Option("--until-ts", min=1, metavar="N", help="Only for changes caused up to timestamp N.")
    ] = None,
    json: Json = False,
) -> None:
    """Wait until all observers have run.

    Ends when no change waits anywhere. While other programs keep writing, that moment may never come. With --until-ts,
    the command waits only for changes that programs committed up to a timestamp, and for all that followed from them.

    \b
    Examples:
      perco wait web/ --timeout 60
      perco wait web/ --until-ts 4711
    """
    perform(waiting.wait, store, timeout, until_ts, json=json)


@app.command()
def check(
    store: Store,
    accept: Annotated[
        bool, typer.Option("--accept", help="If there are no errors, accept that the newest writes may be lost.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Make safe repairs; if STORE is a folder, no other process may have it open."),
    ] = False,
    json: Json = False,
) -> None:
    """Verify all stored data.

    Reads every cell and reports contradictions: records without data, commits without a primary, lost notifications
    and more, each with a remedy. The check is safe while another process writes, because it looks again before it
    reports a finding. It reports the locks of dead clients as notes, not as errors: the next transaction that
    encounters such a lock settles it.

    First, it reads the pages of every file, in a process of its own. If a file cannot be read, or if LMDB aborts on it,
    the check reports an error of that tablet, and continues with the other tablets. --repair does nothing while there
    is such an error.

    For an address, the check asks the server for the cells, even while other clients write. It does not read the
    files. The last line of output names the command that also checks the files, to be run on the server's host. With
    --json, the output then has "files_checked": false.

    --repair settles the locks of dead clients, deletes orphaned data and notifications, puts lost notifications back,
    and so on; it does so only where the finding still holds. It does not guess what cannot be known, such as which of
    two values was meant. Without --repair, the check changes nothing, and says what a repair would do. For an address,
    --repair works through the server, which keeps running and settles the locks of dead clients itself.

    After the machine has restarted, perco refuses to open a store that was written with durability="process" and
    not closed. Check it; if the check finds no errors, --accept makes the store usable again.

    \b
    Exit codes:
      0  clean, or clean after the repair
      1  errors or warnings (with --repair: those that are left)
      2  wrong usage, or the store cannot be used

    \b
    Examples:
      perco check web/
      perco check web/ --repair
      perco check web/ --accept
      perco check tcp://localhost:7420
      perco check web/ --json | jq '.findings[]'
    """
    checking.check_contained(store, json=json, accepting=accept, repairing=repair)


@app.command()
def vacuum(store: Store, json: Json = False) -> None:
    """Remove old versions that no reader needs any more.

    The owner of a store does this by itself, in the background; this command does it now. If another process owns the
    store, that process does the work. Tables declare how long they keep old versions, a day by default:
    perco.Table("docs", keep=perco.Keep(seconds=3600)). Open transactions and pins keep the versions that they may read.
    Later writes reuse the space; perco compact returns it to the file system.

    \b
    Examples:
      perco vacuum web/
      perco vacuum web/ --json | jq .removed
    """
    perform_or(GOES_ON, history.vacuum, store, json=json)


@app.command()
def backfill(
    store: Store,
    run: Annotated[bool, typer.Option("--run", help="Finish all backfills now.")] = False,
    json: Json = False,
) -> None:
    """Show how far new observers have been notified of older data.

    perco notifies a new observer, or a higher version of an observer, of all existing data, unless it was declared
    with backfill=False. The store's owner does this in the background, a page at a time; if the owner ends, the next
    owner continues. --run finishes all backfills now. It runs no observers: a program that declares them does.

    \b
    Examples:
      perco backfill web/
      perco backfill web/ --run
      perco backfill web/ --json | jq '.[] | select(.state != "done")'
    """
    if run:
        perform_or(GOES_ON, backfilling.backfill, store, running=True, json=json)
    perform(backfilling.backfill, store, running=False, json=json)


@app.command()
def pins(
    store: Store,
    drop: Annotated[str | None, typer.Option("--drop", metavar="NAME", help="Drop this pin.")] = None,
    json: Json = False,
) -> None:
    """Show the pins: named snapshots that keep old versions readable.

    A pin has a name, an owner and a lease; when its lease has expired, it keeps nothing. Programs make pins:
    async with db.pin("nightly-export", lease_s=3600) as pin: ...

    \b
    Examples:
      perco pins web/
      perco pins web/ --drop nightly-export
    """
    perform(history.pins, store, drop, json=json)


@app.command()
def tablets(store: Store, json: Json = False) -> None:
    """Show which process has which tablets of an open store.

    A tablet is a range of a table's rows with files and a writer of its own. With `perco serve --processes N`, tablet
    servers have the tablets. The column "taken over" says how often another process has taken the tablet over.

    \b
    Examples:
      perco tablets web/
      perco tablets tcp://localhost:7420 --json
    """
    perform(statuses.tablets, store, json=json)


@app.command()
def split(
    store: Store,
    table: TableName,
    at: Annotated[
        str | None, typer.Option("--at", metavar="KEY", help="The new tablet's first key; by default in the middle.")
    ] = None,
    json: Json = False,
) -> None:
    """Split a tablet in two.

    Some rows of the table then have files and a writer of their own. perco splits large tablets by itself
    (perco.options.SplitOptions). Reads and writes continue meanwhile; writes to rows of the new tablet wait for a
    moment at the end. Another process may have the store open, or serve it.

    \b
    Examples:
      perco split web/ pages
      perco split web/ pages --at com.example/
      perco split tcp://localhost:7420 pages --json
    """
    perform(splitting.split, store, table, at, json=json)


@app.command()
def compact(
    store: Store,
    table: Annotated[str | None, typer.Argument(metavar="[TABLE]", help="Only this table.")] = None,
    json: Json = False,
) -> None:
    """Give the unused space of a store's files back to the file system.

    Later writes reuse the space of removed versions, but a file does not shrink by itself. This command writes each
    tablet's cells into a new file, in order, which then replaces the old one. Reads and writes continue meanwhile;
    writes to the tablet wait for a moment at the end. The disk needs room for one tablet's new file next to its old
    one. If the command is interrupted or killed, the store stays whole: each tablet has its old file or its new one.
    Another process may have the store open, or serve it, but not with --processes. Old versions are copied too; run
    perco vacuum first to remove those that no reader needs any more.

    \b
    Examples:
      perco compact web/
      perco compact web/ pages
      perco compact tcp://localhost:7420 --json | jq .given_back
    """
    perform_or("interrupted; finished tablets stay compacted", compacting.compact, store, table, json=json)


def _register_others() -> None:
    """Register the commands of the extra `web`; if the extra is not installed, they say how to install it."""
    if all(importlib.util.find_spec(name) for name in _WEB):
        importlib.import_module("perco.webindex.cli").register(app)
        app.add_typer(importlib.import_module("perco.embeddings.cli").embeddings)
        return
    for name in ("demo", "web", "embeddings"):
        anything = {"ignore_unknown_options": True, "allow_extra_args": True}
        app.command(name, context_settings=anything, help=f"Needs an extra: {_EXTRA}")(_needs_web)


def _needs_web() -> None:
    complain(f"this command needs an extra: {_EXTRA}")
    raise typer.Exit(2)


for _module in observed, changing, bigtable, backing, copying, exchanging, querying, postgresql, viewing, page:
    _module.register(app)
_register_others()


def run() -> None:
    """Run the command `perco`."""
    perco.tune_gc()
    app(prog_name="perco")
