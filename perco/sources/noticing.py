"""Which paths of a folder have changed, as the operating system tells.

watchdog (`pip install 'perco[watch]'`) asks for these notifications, in threads of its own. Notifications may be lost:
if too many wait, or if another machine has changed a shared folder. So they only say where to look first.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import trio

from perco.errors import PercoWarning

try:
    from watchdog import events
    from watchdog.observers import Observer
except ImportError:
    INSTALLED = False
else:
    INSTALLED = True

log: logging.Logger = logging.getLogger("perco.sources")

_TELLING: Final = (
    "FileCreatedEvent",
    "FileModifiedEvent",
    "FileClosedEvent",  # after writes
    "FileMovedEvent",
    "FileDeletedEvent",
    "DirCreatedEvent",
    "DirMovedEvent",
    "DirDeletedEvent",
)  # of watchdog's events; others tell of reads, or only repeat that something in a folder has changed

_AHEAD_MAX: Final = 100  # results of `ahead` that wait

A = TypeVar("A")


class Notices(Generic[A]):
    """Paths that have changed since they were last taken. Those of folders end with a slash.

    Args: `ahead`: called with the path of a file that has been written, in watchdog's thread. `take` gives what it
    returned, unless another change of the file has followed.
    """

    def __init__(self, ahead: Callable[[str], A | None]) -> None:
        self._paths: dict[str, A | None] = {}
        self._ahead, self._done_ahead = ahead, 0
        self._lock = threading.Lock()  # of both
        self._any = trio.Event()
        self._run = trio.lowlevel.current_trio_token()

    def dispatch(self, event: Any) -> None:
        """Called by watchdog, in its thread."""
        paths = {os.fsdecode(path) for path in (event.src_path, event.dest_path) if path}
        if event.is_directory:
            found: dict[str, A | None] = {os.path.join(path, ""): None for path in paths}
        elif event.event_type == "modified":  # again and again, until the file is closed
            found = dict.fromkeys(paths)
        else:
            found = {path: self._look_ahead(path) for path in paths}
        with self._lock:
            self._paths |= found
            self._done_ahead += sum(each is not None for each in found.values())
        try:
            self._run.run_sync_soon(self._wake)
        except trio.RunFinishedError:
            return  # the program that watched has ended

    def _look_ahead(self, path: str) -> A | None:
        if self._done_ahead >= _AHEAD_MAX:
            return None
        try:
            return self._ahead(path)
        except Exception:  # watchdog's thread would end
            log.exception("a file could not be read ahead")
            return None

    def _wake(self) -> None:
        self._any.set()

    async def take(self) -> dict[str, A | None]:
        """Wait until there are some."""
        while True:
            await self._any.wait()
            self._any = trio.Event()
            with self._lock:
                paths, self._paths, self._done_ahead = self._paths, {}, 0
            if paths:
                return paths


@asynccontextmanager
async def noticed(folder: Path, ahead: Callable[[str], A | None]) -> AsyncIterator[Notices[A] | None]:
    """The changes in a folder, and in those below it, while the block lasts; None if the system cannot tell."""
    if not INSTALLED:
        yield None
        return
    notices, observer = Notices(ahead), Observer()
    telling = [getattr(events, name) for name in _TELLING]
    observer.schedule(notices, str(folder), recursive=True, event_filter=telling)  # type: ignore[arg-type]
    try:
        await trio.to_thread.run_sync(observer.start)  # it looks for the folders, so that it misses nothing from now on
    except OSError as error:
        warnings.warn(
            f"the system does not tell of changes in {str(folder)!r}, so they are only found by looking again and "
            f"again: {error}. On Linux, a higher fs.inotify.max_user_watches lets more folders be watched.",
            PercoWarning,
            stacklevel=2,
        )
        yield None
        return
    try:
        yield notices
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(_stop, observer)


def _stop(observer: Any) -> None:
    observer.stop()
    observer.join()
