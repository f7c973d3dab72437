"""Structured Streaming's side of figure 7: the same aggregation as the batch, with its state in RocksDB.

Documents come as Parquet files, which a thread writes every 50 ms if any have become due. A trigger takes all files
that are there, and adds to the result the clusters that have changed, as Parquet files. It begins as soon as the one
before it has ended. A document's delay is the time from its intended arrival until the trigger that took it has written
the result.

Its state is filled by a first trigger, over the repository. There are as many partitions as cores, the state's changes
are logged instead of uploaded whole, and nothing is counted that costs a lookup.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figure7.by_batch import CORES, SCHEMA, clustered, jvm_cpu_s, read_result
from bench.figure7.documents import Canonicals, Documents
from bench.harness import percentile

TICK_S = 0.05
SETTINGS = {
    "spark.sql.shuffle.partitions": str(CORES),
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state"
    ".RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "100000",
}


@dataclass(frozen=True, slots=True)
class Streamed:
    """Measurements of a run in which documents arrived at some rate: the delay of each, in seconds, and the CPU time of
    all."""

    per_s: float
    delays_s: tuple[float, ...]
    cpu_s: float
    triggers: int

    def delay_s(self, share: float) -> float:
        return percentile(self.delays_s, share)

    @property
    def cpu_us(self) -> float:
        """CPU time of a document."""
        return 1e6 * self.cpu_s / len(self.delays_s)


@dataclass(frozen=True, slots=True)
class Backlog:
    """A trigger over many documents: how many, how long it took, in seconds, and its CPU time."""

    documents: int
    seconds: float
    cpu_s: float


class Streaming:
    """A running query."""

    def __init__(self, spark: Any, folder: Path, documents: Documents) -> None:
        self._spark, self._folder, self._documents = spark, folder, documents
        self._rng = random.Random(documents.size + 2)
        self._done: list[float] = []  # when each trigger had written its result
        self.next = 0
        (folder / "in").mkdir(parents=True)
        for name, value in SETTINGS.items():
            spark.conf.set(name, value)
        stream = spark.readStream.schema(SCHEMA).parquet(str(folder / "in"))
        writer = clustered(stream).writeStream.outputMode("update").foreachBatch(self._write)
        self._query = writer.option("checkpointLocation", str(folder / "checkpoint")).start()

    def _write(self, changed: Any, number: int) -> None:
        changed.write.parquet(str(self._folder / "out" / f"batch={number}"))
        self._done.append(time.perf_counter())

    def close(self) -> None:
        self._query.stop()

    def take(self, end: int) -> None:
        """Let documents below `end` arrive, in one file."""
        self._documents.write(self._folder / "in" / f"{self.next:012}.parquet", self.next, end)
        self.next = end

    def backlog(self, end: int) -> Backlog:
        """Let documents arrive at once, and wait for them."""
        count, cpu, began = end - self.next, jvm_cpu_s(self._spark), time.perf_counter()
        self.take(end)
        self._query.processAllAvailable()
        return Backlog(count, self._done[-1] - began, jvm_cpu_s(self._spark) - cpu)

    def arrive(self, per_s: float, seconds: float, least: int = 1) -> Streamed:
        """Documents arrive at random times for so long, or, at low rates, until `least` have arrived."""
        at, due = 0.0, list[float]()
        while (at := at + self._rng.expovariate(per_s)) < seconds or len(due) < least:
            due.append(at)
        self._documents.keys(0, self.next + len(due))  # drawn now
        before = len(self._done)
        cpu, began = jvm_cpu_s(self._spark), time.perf_counter()
        feeder = threading.Thread(target=self._feed, args=([began + each for each in due],))
        feeder.start()
        feeder.join()
        self._query.processAllAvailable()
        cpu = jvm_cpu_s(self._spark) - cpu
        ends: list[float] = []
        for progress in self._query.recentProgress:
            if progress.batchId >= before:
                ends += [self._done[progress.batchId]] * progress.numInputRows
        if len(ends) != len(due):
            raise RuntimeError(f"the triggers took {len(ends)} documents, but {len(due)} arrived")
        delays = tuple(end - began - each for end, each in zip(ends, due, strict=True))
        return Streamed(per_s, delays, cpu, len(self._done) - before)

    def _feed(self, due: list[float]) -> None:
        taken = 0
        while taken < len(due):
            time.sleep(max(due[taken] - time.perf_counter(), TICK_S))
            end = taken
            while end < len(due) and due[end] <= time.perf_counter():
                end += 1
            if end > taken:
                self.take(self.next + end - taken)
                taken = end

    def canonicals(self) -> Canonicals:
        """The files of all triggers: the last canonical of a cluster counts, which is the smallest."""
        return read_result(self._folder / "out")


@contextmanager
def streaming(spark: Any, folder: Path, documents: Documents) -> Iterator[Streaming]:
    """A query that runs meanwhile."""
    query = Streaming(spark, folder, documents)
    try:
        yield query
    finally:
        query.close()
