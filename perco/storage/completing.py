"""Brings the batches that the native writers of a store have written to the loop, all those that are ready at once."""

from __future__ import annotations

from typing import Any

import trio

from perco.storage.lmdb_native import completions, writer


class Completing:
    """Shared by the tablets of a store."""

    __slots__ = ("_ended", "_scope")

    def __init__(self) -> None:
        self._ended: Any = None  # what the writers report to
        self._scope: trio.CancelScope | None = None

    def writer(self) -> Any:
        """A queue and its loop for a tablet with a native engine (native/writing.c)."""
        if self._ended is None:
            self._ended = completions()
        return writer(self._ended)

    def start(self) -> None:
        """Begin to listen, unless this has been called before. On the loop."""
        if self._scope is None:
            self._scope = trio.CancelScope()
            trio.lowlevel.spawn_system_task(self._listen, self._scope, name="perco-batches")

    async def _listen(self, scope: trio.CancelScope) -> None:
        try:
            with scope:
                while True:
                    await trio.lowlevel.wait_readable(self._ended)
                    self._deliver()
        finally:  # the run may end before the stores are closed: then the writers' threads deliver the rest
            self._ended.close()
            self._deliver()

    def _deliver(self) -> None:
        for (tablet, batch), verdicts, took_s, at in self._ended.take():
            tablet.batch_ended(batch, verdicts, took_s, at)

    def close(self) -> None:
        """Listen no more: all tablets have been closed."""
        if self._scope is not None:
            self._scope.cancel()
            self._scope = None
