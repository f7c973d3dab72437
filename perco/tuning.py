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
    flight is some thirty objects, which live until its commit is durable: with a few dozen in flight it looks at them
    many times, and finds nothing, because transactions make no cycles. So this raises the threshold above what is in
    flight, and exempts what the program has imported so far (`gc.freeze`). The application's own cycles are still
    collected, only later.

    It changes the whole process: call it once, after the imports, in a process that is yours. The command `perco` and
    the benchmarks do so.

    Args:
        threshold: objects made and not freed before the collector looks at the youngest; above thirty for each
            transaction or observer in flight.

    Raises: ValueError below 1, which would switch the collector off.
    """
    if threshold < 1:
        raise ValueError(f"threshold is {threshold}; it must be at least 1")
    gc.set_threshold(threshold, *_OLDER)
    gc.freeze()


@contextmanager
def collecting_less() -> Iterator[None]:
    """Use that threshold while a block lasts, in a process that belongs to another program; leave a higher threshold,
    or a disabled collector, as it is."""
    before = gc.get_threshold()
    if 0 < before[0] < _THRESHOLD:
        gc.set_threshold(_THRESHOLD, *_OLDER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
