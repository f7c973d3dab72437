"""Holds up the batches of an LMDB environment, whichever path they take."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from perco.storage import LmdbEngine


@contextmanager
def held(engine: LmdbEngine) -> Iterator[None]:
    """Meanwhile, no batch gets its write transaction: a thread of the test has it."""
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with engine._env.begin(write=True) as txn:
            begun.set()
            assert go_on.wait(60)
            txn.abort()

    thread = threading.Thread(target=hold)
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        go_on.set()
        thread.join()
