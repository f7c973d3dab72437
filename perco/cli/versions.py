"""The history of rows, for `perco export --versions` and `perco import --versions`."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgpack

import perco
from perco.cli.reading import versions_of
from perco.database.inside import inside
from perco.errors import Corruption, UsageError
from perco.protocol.records import DELETE, PUT_DATA, unpack_record
from perco.schema.codecs import decoded
from perco.storage import LOCK, WRITE, ReadRequest, ScanCell, ScanQuery, ScanRequest

COMMIT_TS: Final = "commit_ts"  # the further columns of a file with versions
DELETED: Final = "deleted"

_PER_COLUMN: Final = 64  # versions of a column that one scan reads; further ones are read by themselves
_ROWS: Final = 256  # of a page
_LONG_AT_ONCE: Final = 64
_LONG_BYTES: Final = 4 << 20

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
    """All versions up to the snapshot that the vacuum has not removed, in the order of the rows, the oldest first."""
    driver, known, ts = inside(db).driver, inside(db).known, snap.start_ts
    await driver.visible(ts)  # C4
    bounds = {known.bind(column).column: column for column in columns}
    stored = known.bind(columns[0]).table
    numbers = tuple(bounds)
    start: bytes | None = low
    while start is not None:
        queries = ScanQuery(LOCK, numbers, 0, ts), ScanQuery(WRITE, numbers, 0, ts, _PER_COLUMN)
        page = await driver.store.scan(ScanRequest(stored, start, high, queries, False, _ROWS))
        long = await _long(driver.store, stored, page.rows)
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


# ------------------------------------------------------------------ read a file


class Sorted:
    """Versions of a file, sorted by their timestamps, in a file of their own, so that they need not fit in memory."""

    def __init__(self, table: perco.Table[Any], versions: Iterable[Version]) -> None:
        self._table, self._folder = table, TemporaryDirectory(prefix="perco-import-")
        try:
            self._db = sqlite3.connect(f"{self._folder.name}/versions", check_same_thread=False)
            self._db.executescript("pragma journal_mode = off; create table versions (ts integer, packed blob)")
            self._db.executemany("insert into versions values (?, ?)", map(self._packed, versions))
            self._db.execute("create index by_ts on versions (ts)")
        except BaseException:
            self.close()
            raise

    def _packed(self, version: Version) -> tuple[int, bytes]:
        cells = [(c.name, None if v is None else c.codec.encode(v)) for c, v in version.values.items()]
        packed: bytes = msgpack.packb((self._table.row(version.key), cells))
        return version.commit_ts, packed

    def commits(self) -> Iterator[list[Version]]:
        """The versions of each transaction, the oldest transaction first."""
        columns, key = self._table.columns, self._table.key

        def versions() -> Iterator[Version]:
            with closing(self._db.execute("select ts, packed from versions order by ts, rowid")) as rows:
                for ts, packed in rows:
                    row, cells = msgpack.unpackb(packed)
                    values = {columns[name]: None if v is None else columns[name].codec.decode(v) for name, v in cells}
                    yield Version(key.decode(row), ts, values)

        for _, some in groupby(versions(), attrgetter("commit_ts")):
            yield list(some)

    def close(self) -> None:
        if hasattr(self, "_db"):
            self._db.close()
        self._folder.cleanup()
