"""How the loop's thread and the writers' threads share the interpreter, which only one of them can run.

py-lmdb lets go of the GIL at every call, and takes it again as soon as the call is made. Two things follow.

While a writer puts a batch, the loop would take the GIL at each put, and two threads that hand it to and fro lose more
time than the puts take. So the loop holds still until they are made (`Written`).

While the loop reads, a writer whose commit has ended waits for the GIL. Each read of the loop's wakes it, which costs
ten times what the read does; but by the time it is awake, the loop has the GIL again. The interpreter's own remedy,
the switch interval, begins anew with each wake and so never ends. Therefore the loop, before it reads, lets go once and
looks how long that took: where it has woken somebody, it waits until a writer has handed in its verdicts (`Handover`).
"""

from __future__ import annotations

import select
import threading
from contextlib import suppress
from time import perf_counter
from typing import Final

# Bounds of what the loop waits for a writer, in seconds: a guess that fails may not cost more than it could gain.
_HOLD_STILL_S: Final = 0.005
_GIVE_WAY_S: Final = 0.0002
_WOKEN: Final = 12  # letting go takes so many times as long as it can, if somebody has to be woken


class Written:
    """Told once by the writer: the batch's cells are put, only the commit is left, which needs no GIL."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self) -> None:
        self._lock.acquire(timeout=_HOLD_STILL_S)

    def tell(self) -> None:
        if self._lock.locked():
            self._lock.release()


class Handover:
    """Shared by the tablets of a store. `under_way`: batches that writers have, and nobody has been told about yet."""

    __slots__ = ("_least", "_let_go", "_lock", "_wanted", "given", "under_way")

    def __init__(self) -> None:
        self.under_way = 0
        self.given = 0  # times that the loop gave way
        self._let_go = select.poll().poll if hasattr(select, "poll") else None  # of all that lets go, the cheapest
        self._least = 1.0
        self._lock = threading.Lock()
        self._lock.acquire()
        self._wanted = False

    def give_way(self) -> None:
        """Loop's thread, while a batch is under way: let its writer have the GIL, if it waits for it."""
        if self._let_go is None:
            return
        began = perf_counter()
        self._let_go(0)
        took = perf_counter() - began
        if took < self._least:
            self._least = took
        elif took > _WOKEN * self._least:
            self.given += 1
            self._wanted = True
            self._lock.acquire(timeout=_GIVE_WAY_S)
            self._wanted = False

    def handed_in(self) -> None:
        """A writer's thread: the loop may go on."""
        if self._wanted:
            self._wanted = False
            with suppress(RuntimeError):  # another writer was quicker
                self._lock.release()
