"""How Spark cuts a frame into partitions, and whether its tasks give the same rows in the same order whenever they run.

PySpark does not offer this, so perco asks the objects of the JVM that are behind a frame of a classic session.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Final

from perco.errors import UsageError

_SAME: Final = "DETERMINATE"  # Spark's level of an RDD that gives the same rows in the same order
_SHUFFLE: Final = "ShuffleExchangeExec"
_ADAPTIVE: Final = "AdaptiveSparkPlanExec"
_FILES: Final = "FileScanRDD"


def cut_of(rows: Any, group: int) -> str:
    """How a frame is cut, as text: its partitions, with the parts of files that they read, and the rows of a chunk.

    Raises: UsageError if Spark does not hold the rows of its tasks to be the same whenever they run.
    """
    if not hasattr(rows, "_jdf"):
        raise UsageError(
            "chunks=True takes a data frame of a classic session: an RDD may run any function, and Spark Connect does "
            "not show how Spark makes the rows. Load an RDD with key= instead"
        )
    execution = rows._jdf.queryExecution()
    # Spark runs the shuffles of an adaptive plan to make its RDD: so look at the plan first.
    shuffles = any(each.getClass().getSimpleName() == _SHUFFLE for each in _nodes(execution.executedPlan()))
    rdd = None if shuffles else execution.toRdd()
    if rdd is None or rdd.outputDeterministicLevel().toString() != _SAME:
        raise UsageError(
            "chunks=True needs a frame whose tasks give the same rows in the same order whenever they run, and Spark "
            "does not hold this of a frame that it shuffles (repartition, groupBy, join, orderBy, limit): write the "
            "frame to files, and load these files; or give key= instead of chunks=True"
        )
    files = blake2b(digest_size=8)
    for part in _file_parts(rdd):
        files.update(part.encode() + b"\n")
    return f"{rdd.getNumPartitions()} partitions (files {files.hexdigest()}), {group} rows a chunk"


def _nodes(plan: Any) -> Iterator[Any]:
    """The nodes of a physical plan, before Spark runs a part of it."""
    if plan.getClass().getSimpleName() == _ADAPTIVE:
        plan = plan.initialPlan()
    yield plan
    children = plan.children()
    for at in range(children.size()):
        yield from _nodes(children.apply(at))


def _file_parts(rdd: Any) -> Iterator[str]:
    """The parts of files that an RDD's partitions read, each with the number of its partition, as Spark describes them:
    the path and the range of bytes."""
    if rdd.getClass().getSimpleName() == _FILES:
        partitions = rdd.filePartitions()
        for number in range(partitions.size()):
            for part in partitions.apply(number).files():
                yield f"{number} {part.toString()} {part.modificationTime()}"
    dependencies = rdd.dependencies()
    for at in range(dependencies.size()):
        yield from _file_parts(dependencies.apply(at).rdd())
