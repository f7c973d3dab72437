"""`perco import`: rows from a file of JSON lines, Arrow or Parquet, in transactions or in bulk."""

from __future__ import annotations

import json as jsons
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

import trio

import perco
from perco.cli.exporting import STDIO, counting_rows, format_of
from perco.cli.looks import observed_by
from perco.cli.reading import column_named, table_named
from perco.cli.screen import FINE, counted, show_json
from perco.cli.values import from_plain
from perco.cli.versions import COMMIT_TS, DELETED, Sorted, Version
from perco.database.inside import inside
from perco.errors import UsageError
from perco.schema.catalogue import schema_of
from perco.schema.codecs import Codec, TupleCodec
from perco.storage import TS_MAX

if TYPE_CHECKING:
    import pyarrow as pa

_IN_FLIGHT: Final = 16  # transactions
_BATCH: Final = 10_000  # rows that are read of a file at once


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """Attributes:
    key: the columns with the key, or its parts; empty: "key", or "key_1", "key_2", ...
    group: rows in a transaction.
    bulk: load all rows at once, into an empty table.
    delete: a null deletes the cell; else it is left as it is.
    versions: the file has all versions of its rows, which are written in the order of their timestamps.
    append: with `versions`, also into a table that has rows.
    """

    key: Sequence[str] = ()
    group: int = 100
    bulk: bool = False
    delete: bool = False
    versions: bool = False
    append: bool = False


class _Row(NamedTuple):
    place: str  # in the file
    key: Any
    values: Mapping[perco.Column[Any, Any], Any]  # None: a null
    commit_ts: int = 0


async def import_(store: str, table: str, file: str, options: ImportOptions, kind: str | None, *, json: bool) -> int:
    """Write the rows of a file into a table, and notify observers, which the catalogue lists (N10)."""
    kind = format_of(file, kind)
    if file == STDIO and kind != "jsonl":
        raise UsageError(f"{kind} needs a file: it cannot be read from a pipe")
    if options.versions and (options.bulk or options.delete):
        raise UsageError(
            "--versions writes transaction after transaction, and knows what was deleted: leave out "
            "--bulk and --delete-nulls"
        )
    async with perco.open(store, readonly=True) as db:
        schema = schema_of(inside(db).catalogue)
        table_named(db, table)
    async with perco.open(store, schema) as db:
        here = table_named(db, table)
        read = _lines if kind == "jsonl" else partial(_arrow, kind)
        with counting_rows(table) as tell:
            rows = read(file, here, options)
            if options.versions:
                if not options.append:
                    await _must_be_empty(db, here)
                count = await _one_by_one(db, here, rows, tell)
            elif options.bulk:
                count = await _in_bulk(db, here, rows, tell)
            else:
                count = await _in_transactions(db, rows, options, tell)
        observers = sorted({id for name in here.columns for id in observed_by(inside(db).catalogue, table, name)})
    what = "version" if options.versions else "row"
    if json:
        show_json({"table": table, "file": file, f"{what}s": count, "observers": observers})
    else:
        print(f"{counted(count, what)} of {'standard input' if file == STDIO else file} written to {table}")
        if observers:
            print(f"observers: {', '.join(observers)}; they run as soon as a worker has the store open")
    return FINE


# ------------------------------------------------------------------ write


async def _in_transactions(
    db: perco.Database, rows: Iterator[_Row], options: ImportOptions, tell: Callable[[int], None]
) -> int:
    """Some rows in each transaction. Each row is written once or not at all; the same import again writes the same."""
    done = 0
    send, receive = trio.open_memory_channel[list[_Row]](0)
    writing: set[Any] = set()  # keys; a later row with one of them waits, so the last row of a key wins
    written = trio.lowlevel.ParkingLot()

    def group() -> list[_Row]:
        return [row for _, row in zip(range(options.group), rows, strict=False)]

    async def write() -> None:
        nonlocal done
        async for some in receive:
            await db.run(_write, some, delete=options.delete)
            done += len(some)
            writing.difference_update(row.key for row in some)
            written.unpark_all()
            tell(done)

    try:
        async with trio.open_nursery() as nursery, send:
            for _ in range(_IN_FLIGHT):
                nursery.start_soon(write)
            while some := await trio.to_thread.run_sync(group, abandon_on_cancel=True):
                keys = {row.key for row in some}
                while not writing.isdisjoint(keys):
                    await written.park()
                writing |= keys
                await send.send(some)
    except* UsageError as errors:
        error = _first(errors)
        if not done:
            raise error from errors
        stay = f"What was written before ({counted(done, 'row')}) stays; mend the file, and import it again"
        raise UsageError(f"{error}. {stay}") from errors
    return done


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _write(txn: perco.Transaction, rows: Sequence[_Row | Version], *, delete: bool) -> None:
    for row in rows:
        for column, value in row.values.items():
            if value is not None:
                txn.set(column, row.key, value)
            elif delete:
                txn.delete(column, row.key)


async def _in_bulk(
    db: perco.Database, table: perco.Table[Any], rows: Iterator[_Row], tell: Callable[[int], None]
) -> int:
    """All rows, or none. They must be in the order of their keys, as in an exported file."""
    count = 0

    def counting() -> Iterator[tuple[Any, Mapping[perco.Column[Any, Any], Any]]]:
        nonlocal count
        for row in rows:
            count += 1
            if count % _BATCH == 0:
                trio.from_thread.run_sync(tell, count)
            yield row.key, {column: value for column, value in row.values.items() if value is not None}

    await db.bulk_load({table: counting()})
    return count


async def _must_be_empty(db: perco.Database, table: perco.Table[Any]) -> None:
    async with db.snapshot() as snap:
        if await snap.scan(table, limit=1).all():
            raise UsageError(
                f"{table.name} has rows: a history is imported into an empty table. With --append, its versions come "
                "on top of those that the table has"
            )


async def _one_by_one(
    db: perco.Database, table: perco.Table[Any], rows: Iterator[_Row], tell: Callable[[int], None]
) -> int:
    """Each transaction of the file in a transaction, in their order. They get new timestamps."""

    def sort() -> Sorted:
        return Sorted(table, ((row.place, Version(row.key, row.commit_ts, dict(row.values))) for row in rows))

    done = 0
    with closing(await trio.to_thread.run_sync(sort, abandon_on_cancel=True)) as found:
        commits = found.commits()
        while some := await trio.to_thread.run_sync(next, commits, None):
            await db.run(_write, some, delete=True)
            done += len(some)
            tell(done)
    return done


# ------------------------------------------------------------------ read


def _lines(file: str, table: perco.Table[Any], options: ImportOptions) -> Iterator[_Row]:
    """Lines as `perco scan --json` and `perco export` write them."""
    if options.key:
        raise UsageError('--key is for Arrow and Parquet; a line of JSON has its key in "key"')
    with _text(file) as lines:
        for n, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"line {n}"
            try:
                found = jsons.loads(line)
            except ValueError as error:
                raise UsageError(f"{file}, {place}: this is not JSON: {error}") from None
            if not isinstance(found, dict) or "key" not in found or not isinstance(found.get("values"), dict):
                raise UsageError(f'{file}, {place}: write {{"key": KEY, "values": {{COLUMN: VALUE, ...}}}}')
            try:
                key = from_plain(table.key, found["key"])
                columns = {column_named(table, name): value for name, value in found["values"].items()}
                values = {c: None if value is None else from_plain(c.codec, value) for c, value in columns.items()}
            except UsageError as error:
                raise UsageError(f"{file}, {place}: {error}") from None
            if options.versions or COMMIT_TS in found:
                yield _version(file, table, _Row(place, key, values), found.get(COMMIT_TS), found.get(DELETED), options)
            else:
                yield _Row(place, key, values)


def _version(
    file: str, table: perco.Table[Any], row: _Row, commit_ts: Any, deleted: Any, options: ImportOptions
) -> _Row:
    """A version of a row. `deleted`: names of the columns that it deleted. Raises: UsageError."""
    if not options.versions:
        raise UsageError(f"{file} has the versions of rows ({COMMIT_TS}): import it with --versions")
    where = f"{file}, {row.place}"
    if type(commit_ts) is not int or not 0 <= commit_ts <= TS_MAX:
        raise UsageError(f'{where}: a version has its timestamp in "{COMMIT_TS}", as perco export --versions writes it')
    names = [] if deleted is None else deleted
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f'{where}: "{DELETED}" is a list of columns')
    values = {column: value for column, value in row.values.items() if value is not None}
    deletes = [column_named(table, name) for name in names]
    if both := [column.name for column in deletes if column in values]:
        raise UsageError(f"{where}: column {both[0]!r} has a value, and is one of those that were deleted")
    values |= dict.fromkeys(deletes)
    return _Row(row.place, row.key, values, commit_ts)


@contextmanager
def _text(file: str) -> Iterator[TextIO]:
    try:
        opened = sys.stdin if file == STDIO else open(file, encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    with opened:
        try:
            yield opened
        except UnicodeDecodeError as error:
            raise UsageError(f"{file} is not UTF-8: {error}") from None


def _arrow(kind: str, file: str, table: perco.Table[Any], options: ImportOptions) -> Iterator[_Row]:
    """The rows of a file of Arrow or Parquet: the key's columns, and columns that have the names of the table's."""
    from perco.cli.columns import batches_of, values_of

    codec = table.key
    parts: Sequence[Codec[Any]] = codec.parts if isinstance(codec, TupleCodec) else [codec]
    default = [f"key_{n}" for n in range(1, len(parts) + 1)] if isinstance(codec, TupleCodec) else ["key"]
    names = list(options.key) or default
    if len(names) != len(parts):
        raise UsageError(f"--key: the key of {table.name} has {len(parts)} parts: {codec.name}")
    first = 1
    for batch in batches_of(kind, file, _BATCH):
        missing = [name for name in names if name not in batch.schema.names]
        if missing:
            raise UsageError(
                f"{file} has no column {missing[0]!r} for the key; it has {', '.join(batch.schema.names)}: say with "
                "--key which column has the key"
            )
        keys = [values_of(file, batch, name, part) for name, part in zip(names, parts, strict=True)]
        stamps = _stamps(file, batch, table, options)
        others = {*names, *(() if stamps is None else (COMMIT_TS, DELETED))}
        columns = [column_named(table, name) for name in batch.schema.names if name not in others]
        values = [values_of(file, batch, column.name, column.codec) for column in columns]
        for n in range(batch.num_rows):
            place = f"row {first + n}"
            key = tuple(each[n] for each in keys)
            if None in key:
                raise UsageError(f"{file}, {place}: a key cannot be null")
            found = {column: each[n] for column, each in zip(columns, values, strict=True)}
            row = _Row(place, key if isinstance(codec, TupleCodec) else key[0], found)
            if stamps is not None:
                row = _version(file, table, row, *stamps[n], options)
            yield row
        first += batch.num_rows


def _stamps(
    file: str, batch: pa.RecordBatch, table: perco.Table[Any], options: ImportOptions
) -> list[tuple[Any, Any]] | None:
    """Of a file with versions: the timestamp of each row, and the columns that were deleted. None: it has no versions.
    Raises: UsageError."""
    own = COMMIT_TS, DELETED
    there = sorted(name for name in batch.schema.names if name in own)
    if not options.versions and (not {*own} <= {*there} or {*own} <= table.columns.keys()):
        return None
    if there != sorted(own):
        raise UsageError(
            f"{file}: a file with versions has one column {COMMIT_TS!r} and one {DELETED!r}; was it exported with "
            "--versions?"
        )
    return list(zip(*(batch.column(name).to_pylist() for name in own), strict=True))
