"""The history of rows, for `perco export --versions` and `perco import --versions`."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby, starmap
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import msgpack

import perco
from perco.cli.reading import versions_of
from perco.database.inside import inside
from perco.errors import Corruption, UsageError
from perco.protocol.records import DELETE, PUT_DATA, unpack_record
from perco.schema.codecs import decoded
from perco.storage import LOCK, WRITE, ReadRequest, ScanCell, ScanQuery, ScanRequest
from perco.txn.inside import driver_of, still_kept

if TYPE_CHECKING:
    import pyarrow as pa

    from perco.arrow.fields import Field

COMMIT_TS: Final = "commit_ts"  # the further columns of a file with versions
DELETED: Final = "deleted"

_PER_COLUMN: Final = 64  # versions of a column that one scan reads; further ones are read by themselves
_ROWS: Final = 256  # of a page
_LONG_AT_ONCE: Final = 64
_LONG_BYTES: Final = 4 << 20
_CELLS_MAX: Final = 10_000  # that one transaction writes
_BYTES_MAX: Final = 16 << 20

Column = perco.Column[Any, Any]


@dataclass(frozen=True, slots=True)
class Version:
    """The cells of a row that one transaction wrote.

    Attributes: `values`: by column; None: it deleted the cell.
    """

    key: Any
    commit_ts: int
    values: dict[Column, Any]

    def __getitem__(self, column: Column) -> Any:
        return self.values.get(column)

    @property
    def deleted(self) -> list[str]:
        return sorted(column.name for column, value in self.values.items() if value is None)


def must_have_room(table: perco.Table[Any], columns: Iterable[Column]) -> None:
    """Raises: UsageError if a column has the name of one of the file's own."""
    for column in columns:
        if column.name in (COMMIT_TS, DELETED):
            raise UsageError(
                f"{table.name}.{column.name}: a file with versions has a column {column.name!r} of its own; choose "
                "other columns with --columns"
            )


# ------------------------------------------------------------------ read a store


async def versions_between(
    db: perco.Database,
    snap: perco.Snapshot,
    table: perco.Table[Any],
    columns: Sequence[Column],
    low: bytes,
    high: bytes | None,
) -> AsyncIterator[Version]:
    """All versions up to the snapshot that the vacuum has not removed, in the order of the rows, the oldest first.

    Raises: UsageError; as reads of the snapshot do, SnapshotTooOld, OwnerChanged, SessionEnded.
    """
    if not columns:
        raise UsageError(f"table {table.name!r}: no columns to read")
    driver, known, ts = driver_of(snap), inside(db).known, snap.start_ts
    await driver.visible(ts)  # C4
    bounds = {known.bind(column).column: column for column in columns}
    stored = known.bind(columns[0]).table
    numbers = tuple(bounds)
    start: bytes | None = low
    while start is not None:
        queries = ScanQuery(LOCK, numbers, 0, ts), ScanQuery(WRITE, numbers, 0, ts, _PER_COLUMN)
        page = await driver.reads.scan(ScanRequest(stored, start, high, queries, False, _ROWS))
        try:
            long, failure = await _long(driver.reads, stored, page.rows), None
        except Corruption as error:
            long, failure = {}, error
        await still_kept(snap, stored, failure)  # G5, T9: the snapshot's newest versions were there
        for row, (locks, records) in page.rows:
            key = table.key.decode(row)
            found: dict[int, dict[Column, Any]] = {}
            locked = {number for number, _, _ in locks}
            for number, some in groupby(records, lambda cell: cell[0]):
                cells = list(some)
                column = bounds[number]
                if number in locked or len(cells) == _PER_COLUMN:
                    locked.add(number)
                    continue
                for _, at, packed in cells:
                    kind, _, body = unpack_record(packed)
                    if kind == PUT_DATA:
                        if (row, number, at) not in long:
                            continue  # the vacuum has removed it since
                        body = long[row, number, at]
                    value = None if kind == DELETE else decoded(column.codec, body, column, key)
                    found.setdefault(at, {})[column] = value
            for number in locked:
                column = bounds[number]
                for at, gone, value in await versions_of(db, snap, column, key):
                    found.setdefault(at, {})[column] = None if gone else value
            for at in sorted(found):
                yield Version(key, at, {column: found[at][column] for column in columns if column in found[at]})
        start = page.next


async def _long(
    store: Any, table: str, rows: Sequence[tuple[bytes, Sequence[Sequence[ScanCell]]]]
) -> dict[tuple[bytes, int, int], bytes]:
    """The long values of a page, by row, column and commit_ts; without those that the vacuum has removed meanwhile."""
    wanted: list[tuple[bytes, int, int]] = []
    requests: list[ReadRequest] = []
    for row, (_, records) in rows:
        for number, at, packed in records:
            kind, start_ts, body = unpack_record(packed)
            if kind == PUT_DATA:
                wanted.append((row, number, at))
                data = (body.decode(), number, start_ts, start_ts, 1)
                requests.append((table, row, ((WRITE, number, at, at, 1), data)))
    out: dict[tuple[bytes, int, int], bytes] = {}
    done = 0
    while done < len(wanted):
        answers = await store.read_first(requests[done : done + _LONG_AT_ONCE], _LONG_BYTES)
        for where, (record, data) in zip(wanted[done:], answers, strict=False):
            if data:
                out[where] = data[0][1]
            elif record:
                what = f"the record at {where[2]} points at missing data"
                raise Corruption("", what, (table, where[0], f"#{where[1]}"))
        done += len(answers)
    return out


# ------------------------------------------------------------------ as Arrow


class Batches:
    """Makes record batches of versions. Attributes: `schema`: of the batches."""

    schema: pa.Schema

    def __init__(self, fields: Sequence[Field]) -> None:
        import pyarrow as pa

        from perco.arrow.rows import RowBatch

        self._rows = RowBatch(fields)
        self._own = pa.field(COMMIT_TS, pa.int64(), nullable=False), pa.field(DELETED, pa.list_(pa.string()))
        self.schema = pa.schema([*self._rows.schema, *self._own])

    async def of(self, versions: AsyncIterator[Version]) -> AsyncIterator[pa.RecordBatch]:
        some: list[Version] = []
        async for version in versions:
            self._rows.add(version)
            some.append(version)
            if self._rows.full:
                yield self._taken(some)
                some = []
        yield self._taken(some)

    def _taken(self, some: Sequence[Version]) -> pa.RecordBatch:
        import pyarrow as pa

        own = [version.commit_ts for version in some], [version.deleted for version in some]
        arrays = [pa.array(values, field.type) for values, field in zip(own, self._own, strict=True)]
        return pa.RecordBatch.from_arrays([*self._rows.taken().columns, *arrays], schema=self.schema)


def version_batches(db: perco.Database, table: perco.Table[Any], columns: Sequence[Column]) -> Batches:
    """Makes record batches of a table's versions. MSGPACK values are as stored."""
    from perco.arrow.fields import fields_of

    numbers = [inside(db).known.bind(column).column for column in columns]
    return Batches(fields_of(table, columns, numbers, "key", packed=True))


# ------------------------------------------------------------------ read a file


class Sorted:
    """Versions of a file, sorted by their timestamps, in a file of their own, so that they need not fit in memory.

    Args:
        versions: with the place of each in the file.

    Raises: UsageError: a version does not fit the table, or there is no room for the file.
    """

    def __init__(self, table: perco.Table[Any], versions: Iterable[tuple[str, Version]]) -> None:
        self._table, self._folder = table, TemporaryDirectory(prefix="perco-import-")
        try:
            self._db = sqlite3.connect(f"{self._folder.name}/versions", check_same_thread=False)
            self._db.executescript("pragma journal_mode = off; create table versions (ts integer, packed blob)")
            self._db.executemany("insert into versions values (?, ?)", starmap(self._packed, versions))
            self._db.execute("create index by_ts on versions (ts)")
        except sqlite3.Error as error:
            self.close()
            raise UsageError(f"the versions cannot be sorted in {self._folder.name}: {error}; set TMPDIR") from error
        except BaseException:
            self.close()
            raise

    def _packed(self, place: str, version: Version) -> tuple[int, bytes]:
        try:
            cells = [(c.name, None if v is None else c.codec.encode(v)) for c, v in version.values.items()]
            packed: bytes = msgpack.packb((self._table.row(version.key), cells))
        except (ValueError, TypeError, UsageError) as error:
            raise UsageError(f"{place}: {error}") from error
        return version.commit_ts, packed

    def commits(self) -> Iterator[list[Version]]:
        """The versions of each transaction, the oldest transaction first; those of a large one in parts."""
        columns, key = self._table.columns, self._table.key
        some: list[Version] = []
        cells_in = size = 0
        with closing(self._db.execute("select ts, packed from versions order by ts, rowid")) as rows:
            for ts, packed in rows:
                row, cells = msgpack.unpackb(packed)
                large = cells_in + len(cells) > _CELLS_MAX or size + len(packed) > _BYTES_MAX
                if some and (large or some[-1].commit_ts != ts):
                    yield some
                    some, cells_in, size = [], 0, 0
                values = {columns[name]: None if v is None else columns[name].codec.decode(v) for name, v in cells}
                some.append(Version(key.decode(row), ts, values))
                cells_in, size = cells_in + len(cells), size + len(packed)
        if some:
            yield some

    def close(self) -> None:
        if hasattr(self, "_db"):
            self._db.close()
        self._folder.cleanup()
