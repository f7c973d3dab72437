"""The web index on Spark: tasks crawl, load and run observers; the result is read back as a data frame.

    sources --(a task each)--> pages --(load)--> store <--(observers, as tasks)--> search index

The search index is a file next to the store, so this process runs the observer that exports to it. Tasks run all other
observers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast

import trio
from pyspark import Accumulator
from pyspark.sql import DataFrame, SparkSession

import perco
import perco.spark
from perco.errors import UsageError
from perco.webindex.crawled import CrawlError, Skipped, read_crawl
from perco.webindex.index import WebIndex
from perco.webindex.pages import Page, canonical_url
from perco.webindex.places import search_path
from perco.webindex.search import SearchIndex
from perco.webindex.service import Service, serve

T = TypeVar("T")

_JOB: Final = "perco web load"
_EXPORT: Final = "export"
_INDEX: Final = WebIndex()

schema: Final = WebIndex().schema
del schema.observers[_EXPORT]  # the driver runs this one


async def load_page(unchanged: Accumulator[int], txn: perco.Transaction, page: Page) -> None:
    """Load a page; counts it in `unchanged` if the store had it already."""
    if not await _INDEX.load(txn, page):
        unchanged.add(1)


# ------------------------------------------------------------------ on the executors


def crawled(skipped: Accumulator[int], given: tuple[int, Sequence[str]]) -> Iterator[tuple[str, tuple[Any, Page]]]:
    """The pages of a source, by URL, each with its position in the crawl. Raises: CrawlError."""
    number, source = given
    command = [sys.executable, "-m", "perco.webindex.crawl", *source]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True) as crawler:
        assert crawler.stdout is not None
        try:
            for at, record in enumerate(read_crawl(cast(BinaryIO, crawler.stdout))):
                url = canonical_url(record.url) if isinstance(record, Page) else None
                if isinstance(record, Page) and url is not None:
                    yield url, ((number, at), record)
                elif isinstance(record, Page | Skipped):
                    skipped.add(1)
            if crawler.wait():
                raise CrawlError(f"the crawler of {' '.join(source)} ended with {crawler.returncode}")
        finally:
            crawler.kill()


def later(one: tuple[Any, Page], other: tuple[Any, Page]) -> tuple[Any, Page]:
    """The later of two pages with the same URL: as in a load by one process, only the later page counts."""
    return one if one[0] > other[0] else other


def url_of(page: Page) -> str:
    return page.url


def _page(given: tuple[Any, Page]) -> Page:
    return given[1]


# ------------------------------------------------------------------ on the driver


def split(arguments: Sequence[str]) -> list[list[str]]:
    """The crawler's arguments for each task: one source, with the options that apply to all sources.

    Raises: UsageError for a limit with several sources.
    """
    sources: list[list[str]] = []
    shared: list[str] = []
    left = list(arguments)
    while left:
        some, left = (left[:1], left[1:]) if left[0] == "--stdlib" else (left[:2], left[2:])
        if some[0] in ("--limit", "--seed"):
            shared += some
        else:
            sources.append(some)
    if "--limit" in shared and len(sources) > 1:
        raise UsageError("with --spark, each source is a task of its own: give --limit only with a single source")
    return [[*source, *shared] for source in sources] or [shared]


def session(master: str) -> SparkSession:
    """A Spark session whose tasks run this Python, unless the environment names another. Raises: UsageError."""
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        raise UsageError("Spark needs Java 17 or newer, and no java was found: apt install openjdk-17-jre-headless")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("perco web").master(master)
    for name, value in (("spark.ui.showConsoleProgress", "false"), ("spark.log.level", "ERROR")):
        builder = builder.config(name, value)
    return builder.getOrCreate()


async def on_spark(spark: SparkSession, work: Callable[[], T]) -> T:
    """Run blocking work in a thread; cancelling it cancels Spark's jobs."""
    try:
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
    except trio.Cancelled:
        spark.sparkContext.cancelAllJobs()
        raise


async def load(service: Service, spark: SparkSession, store: perco.spark.Store, sources: Sequence[str]) -> None:
    """Crawl, load, and run the observers, all but `export`, until they have run for all changes; counts in
    `service.loaded`. Like a load in one process, this removes pages of documentation that it did not find."""
    context = spark.sparkContext
    skipped, unchanged = context.accumulator(0), context.accumulator(0)
    tasks = list(enumerate(split(sources)))
    found = context.parallelize(tasks, len(tasks)).flatMap(partial(crawled, skipped))
    latest = found.reduceByKey(later, max(len(tasks), context.defaultParallelism))
    counts = service.loaded

    def load_all() -> perco.spark.Loaded:
        # A failed load may have left its job open. Close the job and load all pages again, because pages may have
        # changed since. Those that have not changed are not written again.
        perco.spark.acknowledge(store, _JOB, spark)
        pages, loader = latest.values().map(_page), partial(load_page, unchanged)
        given: dict[str, Any] = {"schema": _INDEX.schema, "key": url_of, "beside": _INDEX.pages, "job": _JOB}
        return perco.spark.load(pages, store, loader, **given)

    done = await on_spark(spark, load_all)
    counts.crawled, counts.unchanged = done.committed + done.skipped, unchanged.value
    counts.changed = counts.crawled - counts.unchanged
    counts.skipped, counts.done = skipped.value, True
    await on_spark(spark, lambda: perco.spark.acknowledge(store, _JOB, spark))
    if not sources:
        await service.remove_vanished(set(await on_spark(spark, latest.keys().collect)))
    await on_spark(spark, lambda: perco.spark.drain(spark, store, schema))
    await service.remember_sources(sources)


async def both(folder: Path, limit: int | None, say: Callable[[str], None]) -> bool:
    """`perco demo --spark`: load Python's documentation by Spark and in one process; returns whether both are equal."""
    sources = ["--limit", str(limit)] if limit is not None else []
    say(f"1  Spark tasks crawl the pages, load them and run the observers; the store is {folder}/spark")
    began = time.monotonic()
    spark = await trio.to_thread.run_sync(session, "local[*]")
    begun_s = time.monotonic() - began
    try:
        began = time.monotonic()
        with perco.spark.serve(folder / "spark", spark) as store:
            async with serve(folder / "spark") as service:
                await load(service, spark, store, sources)
                await service.db.wait_idle()
                spark_s = time.monotonic() - began
                say(f"   {service.loaded.crawled} pages loaded and searchable after {spark_s:.0f} s")
            say("\n2  A snapshot of this store as a data frame: the documents with the most duplicates.")
            await on_spark(spark, partial(_show, spark, store))
        say(f"\n3  The same pages, loaded by one process: {folder}/embedded")
        began = time.monotonic()
        async with serve(folder / "embedded") as service:
            await service.load(sources)
            await service.remember_sources(sources)
            await service.db.wait_idle()
            embedded_s = time.monotonic() - began
            say(f"   {service.loaded.crawled} pages loaded and searchable after {embedded_s:.0f} s")
        say(_why(spark_s, embedded_s, begun_s))
        say("\n4  Are they equal? Every table of both stores is compared as a data frame, in both directions.")
        equal = await on_spark(spark, partial(_compare, spark, folder, say))
    finally:
        await trio.to_thread.run_sync(spark.stop)
    digests = []
    for name in ("spark", "embedded"):
        with SearchIndex(search_path(folder / name)) as search:
            digests.append(search.digest())
    say(f"   the search indexes: sha256 {digests[0][:16]}... from Spark, {digests[1][:16]}... from one process")
    return equal and digests[0] == digests[1]


def _why(spark_s: float, embedded_s: float, begun_s: float) -> str:
    """Explain the two times that were measured."""
    return (
        f"   On Spark {spark_s:.0f} s, in one process {embedded_s:.0f} s, on the same {os.cpu_count()} cores. "
        f"Spark took another {begun_s:.0f} s to start.\n"
        "   Spark has more to do: a page goes from the crawler through a shuffle to a task, and all reads\n"
        "   and writes of tasks and observers go to the process that serves the store. The JVM, its\n"
        "   Python workers, that process and this one share the cores; a load by one process only calls functions.\n"
        "   Spark can be faster if there are more cores, or machines, than one process uses."
    )


def _compare(spark: SparkSession, folder: Path, say: Callable[[str], None]) -> bool:
    """Compare both stores as data frames, by the rows that only one of them has; returns whether they are equal."""
    perco.spark.register(spark)
    spark.conf.set("spark.sql.shuffle.partitions", str(spark.sparkContext.defaultParallelism))
    equal = True
    for name in _INDEX.schema.tables:
        one, other = (_frame(spark, folder / which, name).cache() for which in ("spark", "embedded"))
        only_one, only_other = one.exceptAll(other).count(), other.exceptAll(one).count()
        equal = equal and not only_one and not only_other
        said = f"{only_one} only in the store from Spark, {only_other} only in the other"
        say(f"   {name:<8}{one.count():>8} rows: {said if only_one or only_other else 'equal'}")
        for frame in (one, other):
            frame.unpersist()
    return equal


def _frame(spark: SparkSession, store: Path, table: str) -> DataFrame:
    return spark.read.format("perco").options(table=table, url=str(store)).load()


def _show(spark: SparkSession, store: perco.spark.Store) -> None:
    perco.spark.register(spark, store)
    dups = spark.read.format("perco").options(table="dups", columns="canonical,listing").load()
    dups.createOrReplaceTempView("dups")
    spark.sql(
        "select canonical, size(from_json(get_json_object(listing, '$[2]'), 'array<string>')) as duplicates "
        "from dups where canonical is not null order by duplicates desc, canonical limit 5"
    ).show(truncate=60)
