"""`perco sql`: a query over one snapshot, by DuckDB."""

from __future__ import annotations

import json as json_of
import sys
from collections.abc import Collection, Sequence
from datetime import date
from decimal import Decimal
from typing import Annotated, Any

import trio
import typer

from perco.cli.reading import When, snapshot
from perco.cli.screen import FINE, Columns, perform, show_json
from perco.cli.values import shown
from perco.errors import UsageError

_ROWS = 1_000  # of the result that are shown at a time
_CELL_WIDTH = 60
_ROWS_OF = "rows of the store"  # what DuckDB calls the rows of a table while it reads them
_KNOWN = (str, bytes, bool, int, float, date, Decimal)


async def sql(store: str, query: str, when: When, *, json: bool) -> int:
    """Print the rows of a query."""
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise UsageError("perco sql needs duckdb: pip install 'perco[sql]'") from error
    connection = duckdb.connect()
    connection.execute("set python_enable_replacements = false")  # a table is never a variable of this program
    async with snapshot(store, when) as (db, snap):
        tables = {name: table for name, table in db.schema.tables.items() if table.columns}

        def reader(name: str) -> Any:
            return trio.from_thread.run_sync(lambda: snap.scan(tables[name]).to_arrow())

        def run() -> None:
            for name in _chosen(_tables_of(connection, query), tables):
                rows = reader(name)
                _must_differ(name, rows.schema.names)
                connection.register(_ROWS_OF, rows)
                connection.execute(f"create temp table {_quoted(name)} as select * from {_quoted(_ROWS_OF)}")
                connection.unregister(_ROWS_OF)
            result = connection.execute(query)
            # DuckDB 1.5 has another name for it
            batches = getattr(result, "to_arrow_reader", None) or result.fetch_record_batch
            _show(batches(_ROWS), json=json)

        try:
            await trio.to_thread.run_sync(run, abandon_on_cancel=True)
        except trio.Cancelled:
            connection.interrupt()
            raise
        except duckdb.CatalogException as error:
            raise UsageError(f"{error}\nthe store has: {', '.join(sorted(tables))}") from error
        except duckdb.Error as error:
            raise UsageError(str(error)) from error
    return FINE


def _chosen(named: set[str], tables: Collection[str]) -> set[str]:
    """The tables that a query names. DuckDB ignores case. Raises: UsageError if two tables differ only in that."""
    found = set()
    for name in named:
        alike = [each for each in tables if each.lower() == name.lower()]
        if len(alike) > 1:
            raise UsageError(f"DuckDB does not tell the tables {' and '.join(alike)} apart: it ignores case")
        found.update(alike)
    return found


def _must_differ(table: str, columns: Sequence[str]) -> None:
    """Raises: UsageError if DuckDB, which ignores case, would confuse two columns."""
    lower = [name.lower() for name in columns]
    if twice := next((name for name in columns if lower.count(name.lower()) > 1), None):
        raise UsageError(f"DuckDB ignores case: table {table!r} has several columns {twice!r}")


def _unique(names: Sequence[str]) -> list[str]:
    """The names of a result's columns, of which several may have one name: the later ones get a number."""
    found: list[str] = []
    for name in names:
        other, n = name, 0
        while other in found:
            n += 1
            other = f"{name}_{n}"
        found.append(other)
    return found


def _tables_of(connection: Any, query: str) -> set[str]:
    """The names of tables in a query. Raises: UsageError if it is no query."""
    [[text]] = connection.execute("select json_serialize_sql(?)", [query]).fetchall()
    tree = json_of.loads(text)
    if tree["error"]:
        raise UsageError(f"{tree['error_message'].rstrip('!')}: perco sql takes one SELECT")
    if len(tree["statements"]) != 1:
        raise UsageError("perco sql takes one SELECT, and this is several")
    found: set[str] = set()
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            if node.get("type") == "BASE_TABLE":
                found.add(node["table_name"])
            left += node.values()
        elif isinstance(node, list):
            left += node
    return found


def _show(rows: Any, *, json: bool) -> None:
    """Print batches of rows: as a table, as lines with tabs in a pipe, or as a line of JSON for each row."""
    names = _unique(rows.schema.names)
    numbers = [field.name for field in rows.schema if _is_number(field.type)]
    table = Columns(names, numbers=numbers) if sys.stdout.isatty() else None
    if not json and table is None:
        print("\t".join(names))
    none = True
    for batch in rows:
        lines = list(zip(*(column.to_pylist() for column in batch.columns), strict=True))
        none = none and not lines
        if json:
            for line in lines:
                show_json(dict(zip(names, map(_plain, line), strict=True)))
            continue
        cells = [["" if value is None else _shown(value) for value in line] for line in lines]
        if table is not None and cells:
            table.show(cells)
        elif table is None:
            print("".join("\t".join(line) + "\n" for line in cells), end="")
    if none and table is not None and not json:
        print("no rows")


def _is_number(type: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(type) or types.is_floating(type) or types.is_decimal(type))


def _plain(value: Any) -> Any:
    """A value of DuckDB as JSON can express it: what perco does not have, as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, _KNOWN) else str(value)


def _shown(value: Any) -> str:
    return shown(_plain(value), _CELL_WIDTH)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _sql(
    store: Annotated[str, typer.Argument(metavar="STORE", help="The store's folder, or the address of a served one.")],
    query: Annotated[str, typer.Argument(metavar="QUERY", help="A query in DuckDB's SQL.")],
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="As of TIME: 90s, 5m, 2h, 1d (ago), or 2026-03-01T12:00[+01:00]."),
    ] = None,
    ts: Annotated[int | None, typer.Option("--ts", metavar="N", help="As of a timestamp.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each row.")] = False,
) -> None:
    """Query the tables of a store with SQL, all as of one moment.

    DuckDB runs the query. It reads all rows of each table that the query names, so a query takes a second or two for
    each million rows. A table has the column "key" (for a key of several parts "key_1", "key_2", ...), and the columns
    that perco status lists. JSON values are text, for DuckDB's functions: tags->>'$.lang'. The query cannot change the
    store. pip install 'perco[sql]'

    \b
    Examples:
      perco sql web/ "select count(*), avg(rank) from docs"
      perco sql web/ "select d.key, l.seen from docs d join links l on l.key_1 = d.key" --json
      perco sql web/ "select key, title from docs where title ilike '%index%'" --at 1h
    """
    perform(sql, store, query, When(ts=ts, at=at), json=json)


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(name="sql")(_sql)
