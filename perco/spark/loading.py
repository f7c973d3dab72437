"""`perco.spark.load`: loads every row of a data set exactly once, in transactions of several rows."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import trio
from pyspark import RDD, TaskContext
from pyspark.sql import DataFrame, SparkSession

import perco
from perco.errors import PercoError, UsageError
from perco.naming import named
from perco.schema.codecs import TupleCodec, codec_named
from perco.spark import keys, ledger as ledgers
from perco.spark.arrow import Batches, over_arrow
from perco.spark.chunks import FrameChanged as FrameChanged, cut as cut_rows
from perco.spark.failing import reason_first
from perco.spark.ledger import BYTES, LEDGER, KeyNotUnique as KeyNotUnique, Ledger
from perco.spark.partition import (
    Chunked,
    Failure,
    Grouped,
    Loader,
    LoadOptions,
    PartitionResult,
    load_partition,
    short,
)
from perco.spark.scans import cut_of
from perco.spark.sink import QUERY
from perco.spark.store import WHERE, Store, described, in_task, serve
from perco.spark.workers import working

_SHARED: Final = 5  # how many shared keys an error names
_COLUMNS: Final = (
    "partition int, attempt int, committed bigint, skipped bigint, failed bigint, stopped boolean, seconds double, "
    "failures array<struct<row: string, reason: string>>"
)


class Loaded:
    """The result of a job; `str` gives a one-line summary.

    Attributes:
        job: its name. If `load` was called without a name and has succeeded, the job has already been acknowledged.
        committed, skipped, failed: numbers of inputs; the skipped ones had taken effect before, in another attempt or
            an earlier call.
        seconds: the running times of all tasks, added up.
        partitions: the result of each task.
    """

    job: str
    partitions: list[PartitionResult]
    committed: int
    skipped: int
    failed: int

    def __init__(self, job: str, partitions: list[PartitionResult], spark: SparkSession) -> None:
        self.job, self.partitions, self._spark = job, partitions, spark
        self.committed = sum(each.committed for each in partitions)
        self.skipped = sum(each.skipped for each in partitions)
        self.failed = sum(each.failed for each in partitions)
        self.seconds = sum(each.seconds for each in partitions)

    @property
    def failures(self) -> list[Failure]:
        """The first failures of each partition."""
        return [failure for each in self.partitions for failure in each.failures]

    @property
    def dataframe(self) -> DataFrame:
        """A row for each partition."""
        rows = []
        for p in self.partitions:
            failures = [(failure.row, failure.reason) for failure in p.failures]
            rows.append((p.partition, p.attempt, p.committed, p.skipped, p.failed, p.stopped, p.seconds, failures))
        return self._spark.createDataFrame(rows, _COLUMNS)

    def __str__(self) -> str:
        return (
            f"job {self.job!r}: {self.committed} committed, {self.skipped} skipped (loaded before), "
            f"{self.failed} failed"
        )


class LoadFailed(PercoError):
    """More inputs have failed than allowed. The inputs that were loaded stay; to load the rest, call `load` again with
    the same job.

    Attributes: `loaded`, the result of the job so far.
    """

    def __init__(self, loaded: Loaded, chunks: bool = False) -> None:
        self.loaded = loaded
        first = loaded.failures[0]
        fix = "Change the loader, but not the frame (chunks=True)," if chunks else "Fix them"
        super().__init__(
            f"{loaded}; the first: {first.reason}, in row {first.row}. {fix} and load again with "
            f"job={loaded.job!r}: no row is loaded twice. Or allow more: LoadOptions(failures_max=...)."
        )


def load(
    rows: DataFrame | RDD[Any],
    store: str | os.PathLike[str] | Store,
    loader: Loader | str,
    *,
    schema: perco.Schema | None = None,
    key: str | Callable[[Any], Any] | None = None,
    beside: perco.Table[Any] | None = None,
    chunks: bool = False,
    job: str | None = None,
    concurrency: int | None = None,
    options: LoadOptions | None = None,
) -> Loaded:
    """Run `await loader(txn, row)` for every row, on the executors. By default, up to 100 rows share a transaction.

        async def loader(txn, row):
            txn.set(app.body, row.url, row.body)

        perco.spark.load(spark.read.parquet("pages/"), "store/", loader, schema=app.schema, key="url", beside=app.pages)

    Each input takes effect exactly once, even if a task runs again, runs twice at once, or dies after a commit. A
    ledger in the store says which inputs have taken effect. It is kept until the job is acknowledged, so another call
    with the same `job` loads only the missing inputs.

    Args:
        rows: a data frame or an RDD. Its partitions are loaded in parallel, one on each core of the executors.
        store: a folder, which is served to the executors during the call (`serve`); or an address, or a `Store`.
        loader: an `async def` function, or "module:name" of one. It reads and writes in the transaction, runs again
            after a conflict, and must have no effects outside the transaction.
        schema: the schema to open the store with; by default the store's own. It must have the tables that `loader`
            uses.
        key: identifies an input: a column's name, or a function of the row that returns a str, bytes, a number, or a
            tuple of these. Each row needs a key of its own. By default, the key is the whole row, and rows that are
            equal are all loaded; for this, Spark shuffles the rows, so that equal rows are in the same partition.
        beside: a table in which `loader` writes a row under the input's own key. The input's mark, which says that the
            input has taken effect, then goes into that row, at the cost of one cell; otherwise, each transaction
            involves one more tablet.
        chunks: whether the rows of a transaction share one mark, instead of `key`. A row is then identified by its
            place in the frame, so `rows` is a data frame whose tasks give the same rows in the same order whenever they
            run, such as files that do not change. If Spark would shuffle the rows, perco refuses the frame.
        job: a name under which the load can be run again. Without a name, the load is acknowledged when it succeeds.
        concurrency: transactions in flight in each partition, instead of `options.concurrency`.
        options: how many rows share a transaction, how many inputs may fail, and other limits.

    Raises: LoadFailed if more than `options.failures_max` inputs fail; KeyNotUnique; FrameChanged if the frame of
    `chunks` gives other rows than before; UsageError; TaskFailed if a task fails for good; and the errors of
    `perco.open`.
    """
    options = _chosen(options, concurrency)
    _must_make_sense(schema, key, beside, chunks)
    cut = cut_of(rows, options.group) if chunks else ""  # first: Spark runs the shuffles of a frame to make an RDD
    rdd, spark = _rdd(rows)
    function = _loader(loader)
    unnamed, job = job is None, _name_of(job, spark)
    with serve(store, spark) as reached:
        ledger = trio.run(_begin, reached, schema, job, beside, cut)
        take = None if key is None else keys.chosen(key) if beside is None else keys.valued(key)
        if take is None and not chunks:
            rdd = _numbered(rdd)
        task = functools.partial(_task, reached, function, ledger, take, options, key if isinstance(key, str) else None)
        arrow = over_arrow(rows, task) if chunks or take is not None else None
        with _can_go_on(job), described(spark, f"perco.spark.load: job {job!r}"), reason_first():
            results = rdd.mapPartitionsWithIndex(task).collect() if arrow is None else arrow()
        loaded = Loaded(job, results, spark)
        if loaded.failed > options.failures_max:
            raise LoadFailed(loaded, chunks)
        _must_be_unique(loaded, rdd, key, beside)
        if unnamed:
            trio.run(_acknowledge, reached, job)
    return loaded


@contextlib.contextmanager
def _can_go_on(job: str) -> Iterator[None]:
    """Add to an error how to load the rest of the job, unless the job cannot be continued."""
    try:
        yield
    except FrameChanged:
        raise
    except Exception as error:
        error.add_note(f"perco: all rows loaded so far stay; load the rest with job={job!r}")
        raise


def _numbered(rows: RDD[Any]) -> RDD[Any]:
    """Pairs (key, row) of rows without a key: Spark shuffles equal rows into one partition, where they are numbered."""
    count = rows.getNumPartitions()
    return rows.map(_with_digest).repartitionAndSortWithinPartitions(count, _spread).mapPartitions(_counted)


def _chosen(options: LoadOptions | None, concurrency: int | None) -> LoadOptions:
    options = LoadOptions() if options is None else options
    if not isinstance(options, LoadOptions):
        raise UsageError(f"options= takes perco.spark.LoadOptions(...), not {options!r}")
    return options if concurrency is None else replace(options, concurrency=concurrency)


def _must_make_sense(schema: Any, key: Any, beside: Any, chunks: Any) -> None:
    """Check the other arguments of `load`. Raises: UsageError."""
    if schema is not None and not isinstance(schema, perco.Schema):
        raise UsageError(f"schema= takes a perco.Schema, not {schema!r}")
    if key is not None and not isinstance(key, str) and not callable(key):
        raise UsageError(f"key= is a column's name or a function of the row, not {key!r}")
    if not isinstance(chunks, bool):
        raise UsageError(f"chunks= is True or False, not {chunks!r}; LoadOptions(group=...) sets the rows of a chunk")
    if chunks and (key is not None or beside is not None):
        raise UsageError("chunks=True has one mark for many rows, and key= or beside= one for each: give one of them")
    if beside is not None and (key is None or not isinstance(beside, perco.Table)):
        raise UsageError("beside= is a perco.Table, and needs key=, which gives keys of that table")
    if beside is not None and not isinstance(beside.key, TupleCodec) and codec_named(beside.key.name) is not beside.key:
        raise UsageError(f"beside= needs a table whose key codec is one of perco's own; {beside.key.name!r} is not")


def _name_of(job: str | None, spark: SparkSession) -> str:
    """The name of a job; of one without a name, a random one. Raises: UsageError if a stream would repeat the job."""
    if job is not None:
        return job
    if spark.sparkContext.getLocalProperty(QUERY) is not None:
        raise UsageError(
            "these rows are a micro-batch of a stream, which Spark repeats after a failure: give "
            "job=f'NAME {batch_id}', and acknowledge the job of the batch before it"
        )
    return f"unnamed {secrets.token_hex(8)}"


def acknowledge(store: str | os.PathLike[str] | Store, job: str, spark: SparkSession) -> int:
    """Forget which inputs of a job have taken effect; returns how many had. From then on, `load` with the same name
    loads all inputs again. Tasks that are left over from the job have no further effect."""
    with serve(store, spark) as reached:
        return trio.run(_acknowledge, reached, job)


def jobs(store: str | os.PathLike[str] | Store, spark: SparkSession) -> dict[str, bool]:
    """The jobs of a store that have not been acknowledged, by name. False: the acknowledgement was interrupted, and
    must be repeated."""

    async def main(reached: Store) -> dict[str, bool]:
        async with reached.open(perco.Schema(LEDGER)) as db:
            return await ledgers.jobs(db)

    with serve(store, spark) as reached:
        return trio.run(main, reached)


async def _begin(
    store: Store, schema: perco.Schema | None, job: str, beside: perco.Table[Any] | None, cut: str
) -> Ledger:
    async with store.open(_with_ledger(schema, beside)):
        pass
    async with store.joining() as db:  # has all tables of the store
        return await ledgers.begin(db, job, beside.name if beside is not None else "", cut)


async def _acknowledge(store: Store, job: str) -> int:
    async with store.open(perco.Schema(LEDGER)):
        pass
    async with store.joining() as db:
        return await ledgers.acknowledge(db, job)


def _with_ledger(schema: perco.Schema | None, beside: perco.Table[Any] | None) -> perco.Schema:
    tables = {table.name: table for table in schema.tables.values()} if schema is not None else {}
    if beside is not None:
        ledgers.taken_in(tables.setdefault(beside.name, beside))
    whole = perco.Schema(*tables.values(), LEDGER, keep=schema.keep if schema is not None else None)
    whole.observers = dict(schema.observers) if schema is not None else {}
    return whole


def _shared(rows: RDD[Any], key: Callable[[Any], Any], beside: perco.Table[Any] | None) -> dict[str, int]:
    """Some keys that several rows share, as text, each with the number of its rows."""
    counted = rows.mapPartitions(functools.partial(_keyed, key, beside)).reduceByKey(_together)
    return dict(counted.mapPartitions(_several).collect()[:_SHARED])


def _must_be_unique(
    loaded: Loaded, rows: RDD[Any], key: str | Callable[[Any], Any] | None, beside: perco.Table[Any] | None
) -> None:
    """Raises: KeyNotUnique.

    If no row was skipped, each row has written a mark of its own. A skipped row either was loaded before, by this task
    or this job, or shares its key with another row; a mark does not show which."""
    if key is None or not loaded.skipped or not (shared := _shared(rows, keys.valued(key), beside)):
        return
    first, number = next(iter(shared.items()))
    raise KeyNotUnique(
        f"key= is not unique: {number} rows have the key {first}, and only one of them has been loaded. If they are "
        "the same input, keep one row for each key (rows.dropDuplicates([...])) and load again with "
        f"job={loaded.job!r}. If they are different inputs, remove what this job has loaded, and load under "
        "another job with a key that tells them apart, such as key=lambda row: (row.url, row.day).",
        shared,
        loaded,
    )


def _rdd(rows: Any) -> tuple[RDD[Any], SparkSession]:
    if isinstance(rows, RDD):
        spark = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
        return rows, spark
    if not isinstance(rows, DataFrame):
        raise UsageError(f"load takes a DataFrame or an RDD, not {type(rows).__name__}")
    try:
        return rows.rdd, rows.sparkSession
    except (NotImplementedError, AttributeError) as error:
        raise UsageError("a Spark Connect DataFrame has no partitions to load; use a classic session") from error


def _loader(loader: Loader | str) -> Loader | str:
    """Check a loader on the driver, where the user sees the error."""
    if isinstance(loader, str):
        _named(loader)
    else:
        _must_load(loader, repr(loader))
    return loader


def _named(name: str) -> Loader:
    found: Loader = named(name, "MODULE:NAME, such as app:load_page", WHERE)
    _must_load(found, name)
    return found


def _must_load(loader: Any, name: str) -> None:
    inner = loader.func if isinstance(loader, functools.partial) else loader
    inner = inner if inspect.isroutine(inner) else getattr(inner, "__call__", inner)  # noqa: B004
    if not inspect.iscoroutinefunction(inner):
        raise UsageError(f"a loader is an `async def` function of (txn, row), which {name} is not")


# ------------------------------------------------------------------ on the executors


def _task(
    store: Store,
    loader: Loader | str,
    ledger: Ledger,
    key: Callable[[Any], Any] | None,
    options: LoadOptions,
    sort: str | None,
    partition: int,
    rows: Iterator[Any] | Batches,
) -> list[PartitionResult]:
    """Load a partition's rows: what `load_partition` takes. `sort`: the column to sort Arrow batches by."""
    context = TaskContext.get()
    result = PartitionResult(partition, context.attemptNumber() if context is not None else 0)
    function = _named(loader) if isinstance(loader, str) else loader

    async def main() -> None:
        async with in_task(store, store.joining()) as db:
            given = _given(rows, ledger, options, sort, partition)
            await load_partition(db, given, key, function, ledger, options, result)

    with working():
        trio.run(main)
    return [result]


def _given(
    rows: Iterator[Any] | Batches, ledger: Ledger, options: LoadOptions, sort: str | None, partition: int
) -> Iterator[Any] | Grouped | Chunked:
    """The rows of a partition, as `load_partition` takes them."""
    if ledger.cut:
        return Chunked(cut_rows(partition, rows.rows() if isinstance(rows, Batches) else rows, options.group, BYTES))
    return Grouped(rows.groups(options.group, BYTES, sort)) if isinstance(rows, Batches) else rows


def _keyed(
    key: Callable[[Any], Any], beside: perco.Table[Any] | None, rows: Iterable[Any]
) -> Iterator[tuple[bytes, tuple[str, int]]]:
    """For each row: the digest of its key (of the stored key, if marks are beside rows), and (the key as text, 1). Rows
    that have no valid key have already failed, and are left out."""
    for row in rows:
        with contextlib.suppress(PercoError, TypeError, ValueError):
            value = key(row)
            stored = value if beside is None else beside.row(value)
            yield keys.digest_of(stored), (short(repr(value)), 1)


def _together(one: tuple[str, int], other: tuple[str, int]) -> tuple[str, int]:
    return one[0], one[1] + other[1]


def _several(counted: Iterable[tuple[bytes, tuple[str, int]]]) -> Iterator[tuple[str, int]]:
    """Some of the keys that more than one row has."""
    return itertools.islice(((key, rows) for _, (key, rows) in counted if rows > 1), _SHARED)


def _with_digest(row: Any) -> tuple[bytes, Any]:
    return keys.digest_of(row), row


def _spread(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def _counted(rows: Iterable[tuple[bytes, Any]]) -> Iterator[tuple[bytes, Any]]:
    """Give equal rows different keys, by numbering them: all of them are in this partition, next to each other. The
    rows may be numbered in any order."""
    last, number = b"", 0
    for digest, row in rows:
        last, number = digest, number + 1 if digest == last else 0
        yield (digest + number.to_bytes(8, "big") if number else digest), row
