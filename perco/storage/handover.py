"""Lets the loop's thread and the writers' threads share the GIL, which only one of them can hold at a time.

py-lmdb releases the GIL at every call, and takes it again as soon as the call is done. This has two consequences.

While a writer puts the cells of a batch, the loop would take the GIL at each put. Two threads that pass the GIL back
and forth lose more time than the puts take. So the loop waits until the puts are done (`Written`).

While the loop reads, a writer whose commit has ended waits for the GIL. Each read releases the GIL, and so wakes the
writer, which costs ten times as much as the read itself. But by the time the writer is awake, the loop has the GIL
again. The interpreter's own remedy, the switch interval, starts again at each wake-up, and so never expires. Therefore,
before the loop reads, it releases the GIL once, and measures how long that takes. If it took so long that a writer
must have been woken, the loop waits until a writer has handed in its verdicts (`Handover`).
"""

from __future__ import annotations

import select
import threading
from contextlib import suppress
from time import perf_counter
from typing import Final

from perco.storage.completing import Completing

# The longest that the loop waits for a writer, in seconds: a wrong guess must not cost more than a right one saves.
_HOLD_STILL_S: Final = 0.005
_GIVE_WAY_S: Final = 0.0002
_WOKEN: Final = 12  # if a release of the GIL takes more than this many times its minimum, it has woken a thread


class Written:
    """The writer's signal that it has put a batch's cells: only the commit is left, which does not need the GIL."""

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
    """Shared by the tablets of a store. `under_way`: how many batches are with the writers' threads, and their verdicts
    have not reached the loop yet. Native writers (`completing`) do not need the GIL: their batches are not counted."""

    under_way: int
    given: int
    completing: Completing

    __slots__ = ("_least", "_let_go", "_lock", "_wanted", "completing", "given", "under_way")

    def __init__(self) -> None:
        self.under_way = 0
        self.given = 0  # how often the loop gave way
        self.completing = Completing()
        self._let_go = select.poll().poll if hasattr(select, "poll") else None  # the cheapest way to release the GIL
        self._least = 1.0
        self._lock = threading.Lock()
        self._lock.acquire()
        self._wanted = False

    def give_way(self) -> None:
        """Give the GIL to a writer that waits for it. On the loop's thread, while a batch is under way."""
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
        """Let the loop continue. On a writer's thread."""
        if self._wanted:
            self._wanted = False
            with suppress(RuntimeError):  # another writer was faster
                self._lock.release()
