"""Data pipelines on Spark: load rows, run observers on many machines, read snapshots. Needs `pip install ".[spark]"`.

    import perco.spark

    with perco.spark.serve("folder/", spark) as store:
        perco.spark.load(rows, store, loader, schema=schema, key="url", job="crawl-2026-11")
        perco.spark.drain(spark, store, "app:schema")
        perco.spark.register(spark, store)
        spark.read.format("perco").option("table", "docs").load().show()

Rows are written in transactions, as everywhere in perco, so observers are notified of every change. The executors talk
to the process that serves the store; on its machine, they also read tables' files.
"""

from importlib.util import find_spec

if find_spec("pyspark") is None:
    raise ImportError("perco.spark needs pyspark: pip install 'perco[spark]'")

from perco.spark.building import Built as Built, build as build
from perco.spark.bulk import BulkLoaded as BulkLoaded, bulk_load as bulk_load
from perco.spark.draining import Drained as Drained, drain as drain
from perco.spark.failing import TaskFailed as TaskFailed
from perco.spark.loading import (
    FrameChanged as FrameChanged,
    KeyNotUnique as KeyNotUnique,
    Loaded as Loaded,
    LoadFailed as LoadFailed,
    acknowledge as acknowledge,
    jobs as jobs,
    load as load,
)
from perco.spark.partition import Failure as Failure, LoadOptions as LoadOptions, PartitionResult as PartitionResult
from perco.spark.source import register as register
from perco.spark.store import Store as Store, serve as serve
