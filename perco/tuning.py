"""Settings of the process, for programs that mostly run transactions."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_THRESHOLD: Final = 50_000
_OLDER: Final = (20, 20)


def tune_gc(threshold: int = _THRESHOLD) -> None:
    """Keep Python's collector of reference cycles from walking transactions in flight again and again.

    The collector looks at all young objects whenever 700 more objects have been allocated than freed. A transaction in
    flight is some thirty objects, which live until its commit is durable: with a few dozen transactions in flight,
    the collector looks at these objects many times, and finds nothing, because transactions make no cycles. So this
    function raises the threshold above the number of objects in flight, and exempts everything that the program has
    imported so far (`gc.freeze`). The application's own cycles are still collected, only later.

    The settings apply to the whole process: call this function once, after the imports, and only in a process of your
    own. The command `perco` and the benchmarks do so.

    Args:
        threshold: how many more objects are allocated than freed before the collector looks at the young objects;
            choose more than thirty for each transaction or observer in flight.

    Raises: ValueError for a threshold below 1, which would switch the collector off.
    """
    if threshold < 1:
        raise ValueError(f"threshold is {threshold}; it must be at least 1")
    gc.set_threshold(threshold, *_OLDER)
    gc.freeze()


@contextmanager
def collecting_less() -> Iterator[None]:
    """Use the default threshold of `tune_gc` while a block lasts, in a process that belongs to another program. Leave a
    higher threshold, or a disabled collector, as it is."""
    before = gc.get_threshold()
    if 0 < before[0] < _THRESHOLD:
        gc.set_threshold(_THRESHOLD, *_OLDER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
