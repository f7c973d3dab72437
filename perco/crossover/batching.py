"""The batch: reads all source rows from a file, computes the views by their definition, and writes them to another.

It is `Views.build`: plain Python, in one process, and without memories. Each doubt favors the batch: its files are
local and are not synced, it does not start an interpreter, and what cached functions return is in its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgpack

from perco.crossover.rows import SourceRow
from perco.errors import PercoError, UsageError
from perco.schema.schema import Column, Table
from perco.views.batch import Results
from perco.views.checking import Checked
from perco.views.declaring import Views


@dataclass(frozen=True, slots=True)
class Ran:
    """A run over so many rows. `cpu_s`: of its thread."""

    rows: int
    seconds: float
    cpu_s: float


class Batches(Protocol):
    """A batch. `write` and `run` block: they are called in a thread.

    Attributes:
        name: what it is, for messages.
    """

    name: str

    def write(self, rows: Iterable[SourceRow], count: int) -> None:
        """Prepare runs over these rows, `count` of them."""
        ...

    def run(self, count: int) -> Ran:
        """Raises: UsageError if a function of the views fails."""
        ...

    async def check(self) -> Checked | None:
        """Compare what the last run has made with the definition; None: it is the definition itself."""
        ...


Making = Callable[[Views, Path, Results], Batches]
"""Makes a batch, in a folder that is not there yet, with the values of cached functions that are known."""


class Batch:
    """Runs over files of a folder."""

    name = "Views.build in one Python process, which reads the rows from a local file, and writes the tables to another"

    def __init__(self, views: Views, folder: Path, results: Results) -> None:
        folder.mkdir()
        self._views, self._folder, self._results = views, folder, results
        self._tables = {table.name: table for table in views.schema.tables.values()}

    def write(self, rows: Iterable[SourceRow], count: int) -> None:
        """Write the file that runs over `count` rows read."""
        with self._at(count).open("wb") as file:
            for row in rows:
                stored = {column.name: column.codec.encode(value) for column, value in row.values.items()}
                file.write(msgpack.packb([row.table.name, row.table.row(row.key), stored]))

    def run(self, count: int) -> Ran:
        """Raises: UsageError if a function of the views fails."""
        began, cpu = time.perf_counter(), time.thread_time()
        sources = self._read(count)
        try:
            made = self._views.build(sources, results=self._results)
        except PercoError:
            raise
        except Exception as error:
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            raise UsageError(f"a function of the program failed: {type(error).__name__}: {error}{notes}") from error
        with (self._folder / "out").open("wb") as file:
            for table, rows in made.items():
                for key, values in rows.items():
                    stored = {column.name: column.codec.encode(value) for column, value in values.items()}
                    file.write(msgpack.packb([table.name, table.row(key), stored]))
        return Ran(count, time.perf_counter() - began, time.thread_time() - cpu)

    async def check(self) -> None:
        """It is the definition."""

    def _read(self, count: int) -> dict[Table[Any], dict[Any, dict[Column[Any, Any], Any]]]:
        sources: dict[Table[Any], dict[Any, dict[Column[Any, Any], Any]]] = {}
        with self._at(count).open("rb") as file:
            for name, row, stored in msgpack.Unpacker(file):
                table = self._tables[name]
                values = {table.columns[of]: table.columns[of].codec.decode(data) for of, data in stored.items()}
                sources.setdefault(table, {})[table.key.decode(row)] = values
        return sources

    def _at(self, count: int) -> Path:
        return self._folder / f"rows-{count}"
