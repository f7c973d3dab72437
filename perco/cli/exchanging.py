"""The commands `perco export` and `perco import`."""

from __future__ import annotations

from typing import Annotated

import typer

from perco.cli.exporting import export
from perco.cli.importing import ImportOptions, import_
from perco.cli.reading import Range, When
from perco.cli.screen import perform_or

_NOTHING_LEFT = "interrupted; nothing is left of the file"
_STAYS = "interrupted; rows written so far stay, and the same import again writes the others, too"
_VERSIONS_STAY = "interrupted; versions written so far stay; import the file again into an empty table"

_Store = Annotated[str, typer.Argument(metavar="STORE", help="The store's folder, or the address of a served one.")]
_Table = Annotated[str, typer.Argument(metavar="TABLE", help="A table; status lists them.")]
_File = Annotated[
    str, typer.Argument(metavar="FILE", help="NAME.jsonl, NAME.arrow or NAME.parquet; - for JSON lines in a pipe.")
]
_Format = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="FORMAT", help="jsonl, arrow or parquet; overrides the ending of the file's name."
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _export(
    store: _Store,
    table: _Table,
    file: _File,
    prefix: Annotated[str | None, typer.Option(help="Keys with this prefix; for tuples a JSON array of parts.")] = None,
    start: Annotated[str | None, typer.Option(help="From this key on.")] = None,
    stop: Annotated[str | None, typer.Option(help="Up to, but not including, this key.")] = None,
    columns: Annotated[str | None, typer.Option(help="These columns, separated by commas.")] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="As of TIME: 90s, 5m, 2h, 1d (ago), or 2026-03-01T12:00[+01:00]."),
    ] = None,
    ts: Annotated[int | None, typer.Option("--ts", metavar="N", help="As of a timestamp.")] = None,
    versions: Annotated[
        bool, typer.Option("--versions", help="All versions of the rows that are kept, with their timestamps.")
    ] = False,
    format: _Format = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace FILE if it exists.")] = False,
    json: _Json = False,
) -> None:
    """Write the rows of a table to a file: JSON lines, Arrow or Parquet.

    All rows are as of one moment, and in the order of their keys. Programs may write meanwhile. In Arrow and Parquet,
    the columns have types; a key is the column "key", and the parts of a key of several are "key_1", "key_2", ... JSON
    values are text, and MSGPACK values are binary, as stored. Lines of JSON are as perco scan --json prints them. For
    Arrow and Parquet: pip install 'perco[arrow]'.

    The file has the newest version of each cell. With --versions, it has a row for each version of a row of the table,
    sorted by key, and of each key the oldest first: the cells that one transaction wrote, its "commit_ts", and the
    columns that it deleted, as the list "deleted". Versions that the vacuum has removed are gone. To copy a store with
    the changes that wait for observers, use perco backup or perco copy.

    \b
    Examples:
      perco export web/ docs docs.parquet
      perco export web/ docs docs.jsonl --prefix http://a/ --columns title,rank
      perco export web/ docs - | grep perco | perco import other/ docs -
      perco export web/ docs history.parquet --versions
    """
    names = [name.strip() for name in columns.split(",")] if columns else []
    chosen = Range(prefix=prefix, start=start, stop=stop, columns=names)
    when = When(ts=ts, at=at)
    more = {"versions": versions, "replace": replace, "json": json}
    perform_or(_NOTHING_LEFT, export, store, table, file, chosen, when, format, **more)


def _import(
    store: _Store,
    table: _Table,
    file: _File,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="NAME[,NAME...]", help="The columns with the key, or with its parts."),
    ] = None,
    bulk: Annotated[
        bool, typer.Option("--bulk", help="Load all rows at once, into an empty table; they must be sorted by key.")
    ] = False,
    group: Annotated[int, typer.Option("--group", min=1, max=10_000, help="Rows in a transaction.")] = 100,
    delete: Annotated[bool, typer.Option("--delete-nulls", help="A null deletes the cell.")] = False,
    versions: Annotated[
        bool, typer.Option("--versions", help="FILE is of perco export --versions: write its transactions, in order.")
    ] = False,
    append: Annotated[
        bool, typer.Option("--append", help="With --versions: also into a table that has rows, on top of them.")
    ] = False,
    format: _Format = None,
    json: _Json = False,
) -> None:
    """Write the rows of a file into a table: JSON lines, Arrow or Parquet.

    The table and its columns must exist. Each transaction writes some rows, and notifies the observers of their
    columns. A cell that the file does not have, or has as a null, stays as it is. If the import ends early, import the
    file again: the same rows are then written once more, with the same values.

    With --bulk, all rows appear in one step, some ten times faster; the file must have its rows in the order of their
    keys, as perco export writes them, and the table must be empty.

    With --versions, each transaction of the file is written in a transaction of its own, in their order, so the history
    of the rows is the same, with new timestamps. The table must be empty, unless you add --append: then the versions
    come on top of those that it has. If such an import ends early, begin again with an empty table. A transaction of
    more than 10 000 cells is written in several. The transactions are sorted in $TMPDIR first.

    \b
    Examples:
      perco import web/ docs docs.parquet
      perco import web/ docs crawl.parquet --key url
      perco import web/ docs docs.parquet --bulk
    """
    names = [name.strip() for name in key.split(",")] if key else []
    options = ImportOptions(key=names, group=group, bulk=bulk, delete=delete, versions=versions, append=append)
    perform_or(_VERSIONS_STAY if versions else _STAYS, import_, store, table, file, options, format, json=json)


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(name="export")(_export)
    app.command(name="import")(_import)
