"""`perco export`: the rows of a table as a file of JSON lines, Arrow or Parquet."""

from __future__ import annotations

import json as jsons
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio
from rich.console import Console
from rich.progress import Progress as Bar, SpinnerColumn, TextColumn, TimeElapsedColumn

import perco
from perco.cli.reading import Range, When, columns_of, range_in, scan_of, snapshot, table_named
from perco.cli.screen import FINE, counted, show_json, size
from perco.cli.values import exact
from perco.cli.versions import COMMIT_TS, DELETED, Version, must_have_room, version_batches, versions_between
from perco.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE: Final = 1_000  # lines of JSON
_ROW_GROUP: Final = 100_000  # rows of Arrow and Parquet that are written together
_ROW_GROUP_BYTES: Final = 64 << 20
FORMATS: Final = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".parquet": "parquet",
}
STDIO: Final = "-"


def format_of(file: str, wanted: str | None) -> str:
    """The format of a file: as wanted, or as its name says. Raises: UsageError."""
    known = sorted(set(FORMATS.values()))
    if wanted is not None:
        if wanted not in known:
            raise UsageError(f"--format {wanted}: it is {', '.join(known[:-1])} or {known[-1]}")
        return wanted
    if file == STDIO:
        return "jsonl"
    found = FORMATS.get(Path(file).suffix.lower())
    if found is None:
        raise UsageError(f"{file}: its name ends with none of {', '.join(FORMATS)}; say what it is with --format")
    return found


class _Writer(Protocol):
    def write(self, rows: Any) -> None: ...
    def close(self) -> None: ...


async def export(
    store: str,
    table: str,
    file: str,
    chosen: Range,
    when: When,
    kind: str | None,
    *,
    versions: bool,
    replace: bool,
    json: bool,
) -> int:
    """Write the rows of a table to a file, all as of one moment; with `versions`, as of each moment up to it."""
    kind = format_of(file, kind)
    if file == STDIO and kind != "jsonl":
        raise UsageError(f"{kind} needs a file: it cannot be written to a pipe")
    rows = 0
    async with snapshot(store, when) as (db, snap):
        here = table_named(db, table)
        columns = columns_of(here, chosen.columns)
        pieces: AsyncIterator[tuple[int, Any]]
        if versions:
            must_have_room(here, columns)
            found = versions_between(db, snap, here, columns, *range_in(here, chosen))
            if kind == "jsonl":
                pieces = _lines(_versions(found, here))
            else:
                made = version_batches(db, here, columns)
                pieces = _tables(made.of(found), made.schema)
        else:
            scan = scan_of(snap, here, columns, chosen)
            if kind == "jsonl":
                pieces = _lines(_rows(scan, here, columns))
            else:
                batches = scan.to_batches(packed=True)  # MSGPACK as stored: JSON cannot express all of its values
                pieces = _tables(batches, batches.schema)
        with counting_rows(table) as tell, _new_file(file, replace=replace) as path:
            writer: _Writer | None = None
            try:
                piece: Any
                async for count, piece in pieces:
                    if writer is None:
                        writer = _Lines(path) if kind == "jsonl" else _Tables(kind, path, piece.schema)
                    await trio.to_thread.run_sync(writer.write, piece)
                    rows += count
                    tell(rows)
            finally:
                if writer is not None:
                    writer.close()
        ts = snap.start_ts
    if file == STDIO:
        return FINE
    taken = _bytes_of(file)
    if json:
        count_of = "versions" if versions else "rows"
        show_json({"table": table, "file": file, "format": kind, count_of: rows, "bytes": taken, "ts": ts})
    else:
        what = counted(rows, "version" if versions else "row")
        print(f"{file}: {what} of {table}, {size(taken)}, as of timestamp {ts}")
    return FINE


async def _lines(rows: AsyncIterator[dict[str, Any]]) -> AsyncIterator[tuple[int, str]]:
    lines: list[str] = []
    async for row in rows:
        lines.append(jsons.dumps(row, ensure_ascii=False) + "\n")
        if len(lines) == _ROWS_AT_ONCE:
            yield len(lines), "".join(lines)
            lines = []
    yield len(lines), "".join(lines)


async def _rows(
    scan: perco.Scan[Any], table: perco.Table[Any], columns: Sequence[perco.Column[Any, Any]]
) -> AsyncIterator[dict[str, Any]]:
    async for row in scan:
        values = {column.name: exact(column.codec, row[column]) for column in columns if column in row}
        yield {"key": exact(table.key, row.key), "values": values}


async def _versions(versions: AsyncIterator[Version], table: perco.Table[Any]) -> AsyncIterator[dict[str, Any]]:
    async for version in versions:
        values = {c.name: exact(c.codec, value) for c, value in version.values.items() if value is not None}
        told = {"key": exact(table.key, version.key), COMMIT_TS: version.commit_ts, "values": values}
        yield told | ({DELETED: version.deleted} if version.deleted else {})


async def _tables(batches: AsyncIterator[pa.RecordBatch], schema: pa.Schema) -> AsyncIterator[tuple[int, pa.Table]]:
    """The rows of batches in tables of many."""
    import pyarrow as pa

    some: list[pa.RecordBatch] = []
    rows = taken = 0
    async for batch in batches:
        some.append(batch)
        rows, taken = rows + batch.num_rows, taken + batch.nbytes
        if rows >= _ROW_GROUP or taken >= _ROW_GROUP_BYTES:
            yield rows, pa.Table.from_batches(some)
            some, rows, taken = [], 0, 0
    yield rows, pa.Table.from_batches(some, schema=schema)


class _Lines:
    """Writes lines to a file, or to stdout."""

    def __init__(self, path: Path | None) -> None:
        self._file = sys.stdout if path is None else path.open("w", encoding="utf-8")

    def write(self, text: str) -> None:
        self._file.write(text)

    def close(self) -> None:
        self._file.flush()
        if self._file is not sys.stdout:
            os.fsync(self._file.fileno())
            self._file.close()


class _Tables:
    """Writes tables of Arrow to a file."""

    def __init__(self, kind: str, path: Path | None, schema: pa.Schema) -> None:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        assert path is not None
        self._file = path.open("wb")
        self._of = (
            parquet.ParquetWriter(self._file, schema, compression="zstd")
            if kind == "parquet"
            else pa.ipc.new_file(self._file, schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))
        )

    def write(self, table: pa.Table) -> None:
        if table.num_rows:
            self._of.write_table(table)

    def close(self) -> None:
        self._of.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _bytes_of(file: str) -> int:
    return Path(file).stat().st_size


@contextmanager
def _new_file(file: str, *, replace: bool) -> Iterator[Path | None]:
    """A path beside a file, which gets the file's name at the end of the block. If the block fails, nothing is left.
    Raises: UsageError if the file exists."""
    if file == STDIO:
        yield None
        return
    path = Path(file)
    if path.exists() and not replace:
        raise UsageError(f"{file} exists; --replace replaces it")
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield made
        made.replace(path)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(FileNotFoundError):
            made.unlink()


@contextmanager
def counting_rows(table: str) -> Iterator[Callable[[int], None]]:
    """Show the number of rows, on a terminal; the block gets the function to call with it."""
    if not sys.stderr.isatty():
        yield lambda rows: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(table, total=None)
        yield lambda rows: bar.update(task, description=f"{table}: {rows:,} rows")
