"""Loads whole tables without a transaction for each row (P7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from perco.database.owner import Owner
from perco.errors import UsageError
from perco.schema.schema import Column, Table
from perco.tablets.loading import BulkLoad, Published
from perco.tablets.sorting import Layout, SortedFile
from perco.txn.engine import Engine

Rows = Iterable[tuple[Any, Mapping[Column[Any, Any], Any]]]

_FILE_BYTES: Final = 256 << 20  # of values, in one file


async def bulk_load(engine: Engine, owner: Owner, tables: Mapping[Table[Any], Rows]) -> Published:
    """See `Database.bulk_load`."""
    for table in tables:
        if not isinstance(table, Table) or engine.known.schema.tables.get(table.name) is not table:
            raise UsageError(f"bulk_load takes rows by tables of the schema, and {table!r} is none of them")
    load = await owner.begin_load([table.name for table in tables])
    try:
        load.check()
        files = {}
        for number, (table, rows) in enumerate(tables.items()):
            layout = Layout.of(engine.known.catalogue, table.name)
            write = partial(_write, load, layout, f"table-{number}", table, rows)
            files[table.name] = await trio.to_thread.run_sync(write)
        return await owner.publish_load(load.id, files)
    finally:
        with trio.CancelScope(shield=True):
            await owner.end_load(load.id)


def _write(load: BulkLoad, layout: Layout, name: str, table: Table[Any], rows: Rows) -> list[tuple[bytes, str]]:
    """Make the files of a table. In a thread."""
    made: list[tuple[bytes, str]] = []
    file: SortedFile | None = None
    size = 0
    try:
        for key, values in rows:
            trio.from_thread.check_cancelled()
            row, cells = table.row(key), []
            for column, value in values.items():
                if column.table is not table:
                    raise UsageError(f"{column!r} is not a column of {table!r}, into which this row is loaded")
                cells.append((column.name, column.codec.encode(value)))
                size += len(cells[-1][1])
            if file is None:
                file = SortedFile(Path(load.path) / f"{name}-{len(made)}", layout, load.ts)
            file.put(row, cells)
            if size > _FILE_BYTES:
                made.append(_finished(file, f"{name}-{len(made)}"))
                file, size = None, 0
        if file is not None and file.rows:
            made.append(_finished(file, f"{name}-{len(made)}"))
            file = None
    finally:
        if file is not None:
            file.abandon()
    return made


def _finished(file: SortedFile, name: str) -> tuple[bytes, str]:
    file.finish()
    return file.first, name
