"""A thread that keeps leases and locks fresh while the loop computes, and notices who holds the loop.

L1  Liveness is the transaction's: the wall time in its primary's lock is refreshed, under T8's check. From a thread, so
    that an observer which computes for twenty seconds without an await does not let others' locks go stale.
L2  Leases are advice.

Single-threaded stores (memory) have no heartbeat.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgpack
import trio

from perco.options import check_options
from perco.storage import DATA, LocalRowStore, Mutation
from perco.txn.catalogue import SYSTEM_TABLE
from perco.txn.driver import Driver

if TYPE_CHECKING:
    from types import FrameType

LEASE_ROW: Final = b"lease"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatOptions:
    """Attributes:
    refresh_s: how old a lock's wall time may get before it is refreshed; also the period of the owner's lease.
    tick_s: how often the loop is asked whether it still turns.
    held_s: from when on it counts as held, and is looked at.
    """

    refresh_s: float = 10.0
    tick_s: float = 0.1
    held_s: float = 0.25

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class Held:
    """The loop did not turn for `seconds`; it was last seen at `where` ("file:line in function")."""

    seconds: float
    where: str


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    """`lag_s`: of the last tick; `lag_max_s`: the worst; `held`: the newest times the loop was held, at most 16."""

    lag_s: float
    lag_max_s: float
    held: tuple[Held, ...]
    refreshed: int


class Heartbeat:
    """Started and stopped with the store."""

    def __init__(
        self, options: HeartbeatOptions, store: LocalRowStore, driver: Driver, wall: Callable[[], float], token: str
    ) -> None:
        self.options, self._store, self._driver, self._wall, self._token = options, store, driver, wall, token
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop_thread = 0
        self._trio: trio.lowlevel.TrioToken | None = None
        self._answered = 0.0
        self._lag = self._lag_max = 0.0
        self._held: deque[Held] = deque(maxlen=16)
        self._refreshed = 0

    def start(self) -> None:
        """Called on the loop's thread."""
        self._loop_thread = threading.get_ident()
        self._trio = trio.lowlevel.current_trio_token()
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="perco-heartbeat", daemon=True)
        self._thread.start()

    async def aclose(self) -> None:
        self._stop.set()
        if self._thread is not None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._thread.join)

    def statistics(self) -> LoopStatistics:
        return LoopStatistics(self._lag, self._lag_max, tuple(self._held), self._refreshed)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        refresh_at = 0.0
        while not self._stop.is_set():
            asked = time.monotonic()
            try:
                assert self._trio is not None
                self._trio.run_sync_soon(self._tick, asked, idempotent=True)
            except trio.RunFinishedError:
                return
            if asked >= refresh_at:
                refresh_at = asked + self.options.refresh_s
                self._refresh()
            if not self._stop.wait(self.options.tick_s) and self._answered < asked:
                self._watch(asked)

    def _tick(self, asked: float) -> None:
        now = time.monotonic()
        self._answered = now
        self._lag = now - asked
        self._lag_max = max(self._lag_max, self._lag)

    def _watch(self, asked: float) -> None:
        """The loop has not answered: wait until it does, and keep on refreshing; then note who held it."""
        seen: Counter[str] = Counter()  # a look may come when the long computation has just ended: the most count
        refresh_at = asked + self.options.refresh_s
        while self._answered < asked and not self._stop.wait(self.options.tick_s / 4):
            now = time.monotonic()
            if now - asked >= self.options.held_s:
                seen[_where(sys._current_frames().get(self._loop_thread))] += 1
            if now >= refresh_at:
                refresh_at = now + self.options.refresh_s
                self._refresh()
        seconds = self._answered - asked
        if seconds >= self.options.held_s:
            where = seen.most_common(1)[0][0] if seen else ""
            self._held.append(Held(round(seconds, 3), where or "unknown"))

    def _refresh(self) -> None:
        """Refresh the owner's lease and the locks that are getting old (L1)."""
        wall_ms = int(self._wall() * 1000)
        value = msgpack.packb([os.getpid(), self._token, wall_ms])
        lease = Mutation(SYSTEM_TABLE, ((LEASE_ROW, (), ((DATA, 0, 1, value),)),), None, True)
        self._send(lease)
        for mutation in self._driver.refreshes(wall_ms, int(self.options.refresh_s * 1000)):
            self._send(mutation)
            self._refreshed += 1

    def _send(self, mutation: Mutation) -> None:
        tablet = self._store.tablet(mutation.table, mutation.rows[0][0])
        tablet.submit_from_thread([mutation], lambda _: None)  # refused: the transaction is done (T8)


def _where(frame: FrameType | None) -> str:
    """The innermost frame of the loop's thread that is not trio's or ours."""
    chosen = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if f"{os.sep}trio{os.sep}" not in name and f"{os.sep}perco{os.sep}txn{os.sep}" not in name:
            chosen = frame
            break
        frame = frame.f_back
    if chosen is None:
        return ""
    return f"{chosen.f_code.co_filename}:{chosen.f_lineno} in {chosen.f_code.co_qualname}"
