"""Python workers of Spark: processes that import perco once, and run one task after the other."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from perco.tuning import collecting_less

_exempt = 0  # how many modules were loaded when objects were exempted


@contextmanager
def working() -> Iterator[None]:
    """A block in which perco does its part of a task, or of the planning of a read."""
    if is_worker():
        _exempt_modules()
    with collecting_less():
        yield


def is_worker() -> bool:
    """Whether this process is such a worker, whose settings belong to no other program."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")


def _exempt_modules() -> None:
    """Exempt what has been imported from garbage collection, before a task has made anything.

    After each task, Spark collects all garbage (`manager` in `pyspark/daemon.py`). To look at all objects of perco,
    trio and pyarrow takes some 30 ms of CPU time, for which the next stage of the query waits where cores are few. Only
    new modules are a reason to do it again: a program that keeps objects with reference cycles for a while must not
    have them exempted task after task.
    """
    global _exempt
    loaded = len(sys.modules)
    if loaded > _exempt:
        gc.collect()
        gc.freeze()
        _exempt = loaded
