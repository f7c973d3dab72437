"""The batch as a Spark job: `perco.spark.build`, in a local session with all cores.

Each run builds the views in a new store, which has the source rows already. So it also writes what observers would need
to go on from there. The session is warm: the first run is not counted. The CPU time is that of this process and of all
that it has started: Spark, Python's workers, and the process that serves the store.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio
from pyspark.sql import SparkSession

from perco.crossover.batching import Ran
from perco.crossover.rows import SourceRow
from perco.errors import UsageError
from perco.schema.schema import Column, Schema, Table
from perco.serve.opening import open as open_store
from perco.spark.building import build
from perco.views.batch import Results
from perco.views.checking import Checked, check
from perco.views.declaring import Views

_TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def session(folder: Path) -> Iterator[SparkSession]:
    """A local session, whose workers import what this process does. `folder`: for its temporary files."""
    before = {name: os.environ.get(name) for name in ("PYSPARK_PYTHON", "PYTHONPATH", "SPARK_LOCAL_IP")}
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    os.environ.update(PYSPARK_PYTHON=sys.executable, PYTHONPATH=paths, SPARK_LOCAL_IP="127.0.0.1")
    builder = SparkSession.builder.master("local[*]").appName("perco crossover")
    cores = str(os.cpu_count() or 1)
    for name, value in (
        ("spark.ui.enabled", "false"),
        ("spark.ui.showConsoleProgress", "false"),
        ("spark.log.level", "OFF"),
        ("spark.local.dir", str(folder)),
        ("spark.sql.shuffle.partitions", cores),
    ):
        builder = builder.config(name, value)
    try:
        spark: SparkSession = builder.getOrCreate()
        try:
            yield spark
        finally:
            spark.stop()
    finally:
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old


class SparkBatch:
    """Runs of the job. Blocks: call it in a thread."""

    name = "perco.spark.build, a Spark job on all cores, which also writes what observers need to go on from there"

    def __init__(self, spark: SparkSession, program: str, views: Views, folder: Path, results: Results) -> None:
        folder.mkdir()
        self._spark, self._program, self._views, self._folder, self._results = spark, program, views, folder, results
        self._rows: dict[int, list[SourceRow]] = {}
        self._runs = 0

    def write(self, rows: Iterable[SourceRow], count: int) -> None:
        """Note the rows of runs over `count` rows."""
        self._rows[count] = list(rows)

    def run(self, count: int) -> Ran:
        """Raises: the errors of `perco.spark.build`."""
        shutil.rmtree(self._store, ignore_errors=True)
        self._runs += 1
        trio.run(self._load, self._rows[count])
        began, cpu = time.perf_counter(), tree_cpu_s(os.getpid())
        build(self._program, self._spark, self._store)
        return Ran(count, time.perf_counter() - began, tree_cpu_s(os.getpid()) - cpu)

    @property
    def _store(self) -> Path:
        return self._folder / f"store-{self._runs}"

    async def _load(self, rows: Iterable[SourceRow]) -> None:
        """A new store with the rows, and with the values of cached functions."""
        tables: dict[Table[Any], dict[Any, Mapping[Column[Any, Any], Any]]] = {}
        for row in rows:
            tables.setdefault(row.table, {})[row.key] = row.values
        for cached, values in self._results.items():
            if values:
                tables[cached.results.table] = {key: {cached.results: value} for key, value in values.items()}
        ordered = {table: sorted(of.items(), key=partial(_row_of, table)) for table, of in tables.items()}
        async with open_store(self._store, Schema(*self._views.schema.tables.values())) as db:
            await db.bulk_load(ordered)

    async def check(self) -> Checked:
        """Compare what the last run has made with the definition."""
        async with (
            open_store(self._store, Schema(*self._views.schema.tables.values()), readonly=True) as db,
            db.snapshot() as snap,
        ):
            return await check(self._views, snap)


def _row_of(table: Table[Any], item: tuple[Any, Any]) -> bytes:
    return table.row(item[0])


def tree_cpu_s(pid: int) -> float:
    """CPU time of a process, of the processes below it, and of those among them that have ended."""
    stats: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        stats[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15])) / _TICKS
    if pid not in stats:
        raise UsageError("the CPU time of processes is read from /proc, which this system does not have")
    below, total = {pid}, stats[pid][1]
    while more := {each for each, (parent, _) in stats.items() if parent in below} - below:
        total += sum(stats[each][1] for each in more)
        below |= more
    return total
