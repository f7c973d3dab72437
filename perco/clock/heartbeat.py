"""The heartbeat thread of a folder's owner: it writes the lease, and names the code that holds the loop, if any does.

L2  The lease is advisory: it tells `perco status` which process has the store open, and whether that process makes
    progress. It decides nothing: no wall time says whether a transaction is alive.

Single-threaded stores (memory) have no heartbeat.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgpack

from perco.clock.loopwatch import HeartbeatOptions, Held, LoopWatch
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import DATA, Mutation

LEASE_ROW: Final = b"lease"
_TOLD: Final = 4  # times `held_s`: `perco status` does not mention a loop that was held for less


class Lease(NamedTuple):
    """The owner's heartbeat, as stored in the system table. `held_s` and `where`: how long the owner's loop had been
    held by then, and by which code; 0 and "" if it was not held."""

    pid: int
    token: str
    wall_ms: int
    held_s: float = 0.0
    where: str = ""


def read_lease(value: bytes) -> Lease:
    """Decode a lease; a lease of an earlier version does not name the code. Raises: ValueError, TypeError."""
    packed: list[Any] = msgpack.unpackb(value)
    return Lease(*packed[:5])


class Heartbeat(LoopWatch):
    """The heartbeat of the process that has a folder open for writing. `write`: applies a mutation from a thread,
    without the loop."""

    def __init__(
        self, options: HeartbeatOptions, write: Callable[[Mutation], None], wall: Callable[[], float], token: str
    ) -> None:
        super().__init__(options)
        self._write, self._wall, self._token = write, wall, token
        self._refresh_at = 0.0

    def _meanwhile(self, now: float, held: Held | None) -> None:
        if now >= self._refresh_at:
            self._refresh_at = now + self.options.refresh_s
            self._refresh(held)

    def _refresh(self, held: Held | None) -> None:
        """Write the lease, without the loop."""
        lease = Lease(os.getpid(), self._token, int(self._wall() * 1000))
        if held is not None and held.seconds >= _TOLD * self.options.held_s:
            lease = lease._replace(held_s=held.seconds, where=held.where)
        row = (LEASE_ROW, (), ((DATA, 0, 1, msgpack.packb(lease)),))
        self._write(Mutation(SYSTEM_TABLE, (row,), None, True))
