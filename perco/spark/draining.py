"""`perco.spark.drain`: runs a program's observers on the executors until no change waits for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import trio
from pyspark.sql import SparkSession

import perco
from perco.database.inside import inside
from perco.errors import UsageError
from perco.naming import named
from perco.spark.failing import reason_first
from perco.spark.store import WHERE, Store, described, in_task, serve
from perco.spark.workers import working


@dataclass(slots=True)
class Drained:
    """The result of a drain.

    Attributes:
        commits, conflicts, failures: numbers of observer runs, by observer.
        failed: how many changes were on the failed list at the end; `perco failed list` shows them.
        workers: how many workers have run.
    """

    commits: dict[str, int] = field(default_factory=dict)
    conflicts: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    workers: int = 0

    def add(self, other: Drained) -> None:
        for mine, more in (
            (self.commits, other.commits),
            (self.conflicts, other.conflicts),
            (self.failures, other.failures),
        ):
            for id, count in more.items():
                mine[id] = mine.get(id, 0) + count
        self.failed = max(self.failed, other.failed)
        self.workers += other.workers

    def __str__(self) -> str:
        runs = ", ".join(f"{id} {count}" for id, count in self.commits.items()) or "nothing"
        return f"{self.workers} workers: {runs}; {self.failed} on the failed list"


def drain(
    spark: SparkSession,
    store: str | os.PathLike[str] | Store,
    schema: perco.Schema | str,
    *,
    workers: int | None = None,
    options: perco.WorkerOptions | None = None,
) -> Drained:
    """Run a schema's observers in tasks on the executors until the store is idle.

        perco.spark.drain(spark, "store/", "app:schema")

    Workers elsewhere may run at the same time: each takes rows that no other worker has claimed. If an executor dies,
    the other workers take over, and Spark starts its task again.

    Args:
        schema: "module:name" of a schema with observers, or the schema itself; the executors must have its module.
        workers: the number of tasks; by default, as many as Spark runs at a time.
        options: the options of each worker.

    Raises: UsageError; TaskFailed if a worker fails for good; and the errors of `perco.open`.
    """
    found = named_schema(schema)
    if not found.observers:
        raise UsageError("the schema declares no observers: there is nothing to run")
    count = workers if workers is not None else int(spark.sparkContext.defaultParallelism)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"workers={workers!r}: it must be a number of tasks, at least 1")
    done = Drained()
    with serve(store, spark) as reached:
        trio.run(_declare, reached, found)
        task = partial(_task, reached, schema, options or perco.WorkerOptions())
        with described(spark, "perco.spark.drain"), reason_first():
            drained = spark.sparkContext.parallelize(range(count), count).mapPartitions(task).collect()
    for each in drained:
        done.add(each)
    return done


def named_schema(schema: perco.Schema | str) -> perco.Schema:
    """The schema that MODULE:NAME names, or the schema that was passed. Raises: UsageError."""
    if isinstance(schema, perco.Schema):
        return schema
    if not isinstance(schema, str):
        raise UsageError(f"drain takes a perco.Schema, or MODULE:NAME of one, not {schema!r}")
    found = named(schema, "MODULE:NAME, such as app:schema", WHERE)
    if not isinstance(found, perco.Schema):
        raise UsageError(f"{schema} is {type(found).__name__}, not a perco.Schema")
    return found


async def _declare(store: Store, schema: perco.Schema) -> None:
    async with store.open(schema):
        pass


def _task(
    store: Store, schema: perco.Schema | str, options: perco.WorkerOptions, partition: Iterator[int]
) -> list[Drained]:
    done = Drained(workers=1)

    async def main() -> None:
        async with in_task(store, store.open(named_schema(schema))) as db:
            inside(db).known.borrowed = True  # a schema sent to a task is a copy of the one in its observers' module
            async with db.worker(options=options) as handle:
                done.failed = await db.wait_idle()
            for id, each in handle.statistics().items():
                done.commits[id] = each.commits
                done.conflicts[id] = each.conflicts
                done.failures[id] = each.failures

    with working():
        trio.run(main)
    return [done]
