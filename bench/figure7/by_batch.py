"""The batch side of figure 7: Spark, warm and tuned, runs over all documents again and again.

A run begins when the one before it has ended. Documents that arrive meanwhile wait for the next run, and are clustered
when it ends, so a document waits 1.5 runs in the median. The runs are real, and over what has really arrived by then;
their times give the delays of documents that arrive at any moment between the first run's beginning and the last's.

Three choices made it fastest on two cores: one shuffle for all three clusterings, over a number for both clustering and
key (one for each took up to a fifth longer); as many partitions as cores, or more if a partition would have too many
documents; narrow columns, LZ4. Adaptive planning made no difference, and is off.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet

from bench.against.load import cpu_of
from bench.figure7.documents import CLUSTERINGS, SHIFT, Canonicals, Documents, smallest
from bench.harness import percentile

CORES = os.cpu_count() or 1
MEMORY = "6g"
PARTITION_DOCUMENTS = 1_000_000  # at most, of a partition
SCHEMA = "id int, " + ", ".join(f"key{i} int" for i in range(CLUSTERINGS))
_MOMENTS = 10_000  # of arrival, of which the delays are taken


@contextmanager
def session(temporary: Path) -> Iterator[Any]:
    """A Spark session that uses all cores."""
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{CORES}]").appName("bench")
    for name, value in (
        ("spark.ui.enabled", "false"),
        ("spark.ui.showConsoleProgress", "false"),
        ("spark.log.level", "OFF"),
        ("spark.driver.memory", MEMORY),
        ("spark.local.dir", str(temporary)),
        ("spark.serializer", "org.apache.spark.serializer.KryoSerializer"),
        ("spark.sql.shuffle.partitions", str(CORES)),
        ("spark.sql.adaptive.enabled", "false"),
        ("spark.sql.parquet.compression.codec", "lz4"),
    ):
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def clustered(documents: Any) -> Any:
    """The smallest document of each cluster, as a data frame, from one of documents."""
    from pyspark.sql import functions as F

    numbers = F.array(*(F.col(f"key{i}").cast("bigint") + (i << SHIFT) for i in range(CLUSTERINGS)))
    each = documents.select("id", F.explode(numbers).alias("cluster"))
    return each.groupBy("cluster").agg(F.min("id").alias("canonical"))


def jvm_cpu_s(spark: Any) -> float:
    """CPU time of Spark's process, and of this one, which drives it."""
    pid = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
    return cpu_of(pid) + time.process_time()


def read_result(folder: Path) -> Canonicals:
    """A result in Parquet files."""
    table = pyarrow.parquet.read_table(folder)
    return smallest(table["cluster"].to_numpy(), table["canonical"].to_numpy().astype(numpy.int64))


@dataclass(frozen=True, slots=True)
class Ran:
    """A run: when it began and ended, in seconds; its CPU time; over how many documents, and how many new ones."""

    began: float
    ended: float
    cpu_s: float
    documents: int
    new: int

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def delays_s(runs: Sequence[Ran]) -> list[float]:
    """The delays of documents that arrive at evenly spread moments from the first run's beginning to the last's."""
    begins = numpy.array([run.began for run in runs])
    moments = numpy.linspace(begins[0], begins[-1], _MOMENTS, endpoint=False)
    ends = numpy.array([run.ended for run in runs])
    delays: list[float] = (ends[numpy.searchsorted(begins, moments, side="right")] - moments).tolist()
    return delays


@dataclass(frozen=True, slots=True)
class Cycles:
    """Runs back to back while documents arrived at some rate."""

    per_s: float
    runs: tuple[Ran, ...]

    def delay_s(self, share: float) -> float:
        return percentile(delays_s(self.runs), share)


class Batch:
    """The repository as Parquet files, and the runs over it."""

    def __init__(self, spark: Any, folder: Path, documents: Documents) -> None:
        self._spark, self._folder, self._documents = spark, folder, documents
        self._rng = random.Random(documents.size + 1)
        self._runs = 0
        self.next = 0  # the document that arrives next
        (folder / "in").mkdir(parents=True)
        share = documents.size // CORES
        for core in range(CORES):
            self.take(documents.size if core == CORES - 1 else (core + 1) * share)

    def take(self, end: int) -> None:
        """Add documents below `end` to the repository."""
        if end > self.next:
            self._documents.write(self._folder / "in" / f"{self.next:012}.parquet", self.next, end)
            self.next = end

    def run(self, new: int = 0) -> Ran:
        """One run over all that is there."""
        self._runs += 1
        partitions = max(CORES, -(-self.next // PARTITION_DOCUMENTS))
        self._spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
        cpu, began = jvm_cpu_s(self._spark), time.perf_counter()
        documents = self._spark.read.schema(SCHEMA).parquet(str(self._folder / "in"))
        clustered(documents).write.parquet(str(self._result))
        ended = time.perf_counter()
        return Ran(began, ended, jvm_cpu_s(self._spark) - cpu, self.next, new)

    @property
    def _result(self) -> Path:
        return self._folder / f"out-{self._runs}"

    def cycles(self, per_s: float, count: int) -> Cycles:
        """Runs back to back, each over what has arrived when it begins."""
        runs = []
        at = time.perf_counter() + self._rng.expovariate(per_s)
        for _ in range(count):
            now, arrived = time.perf_counter(), 0
            while at <= now:
                arrived += 1
                at += self._rng.expovariate(per_s)
            self.take(self.next + arrived)
            runs.append(self.run(arrived))
        return Cycles(per_s, tuple(runs))

    def canonicals(self) -> Canonicals:
        """The result of the last run."""
        return read_result(self._result)
