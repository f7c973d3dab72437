"""Keeps a store still for a moment: parks the writers of its owner or, if it has none, owns it (B1)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from perco.errors import StoreLocked, Unavailable, UsageError
from perco.rpc.link import LostError
from perco.serve.client import remote_owner
from perco.serve.messages import Method
from perco.serve.opening import visiting
from perco.storage import TS_MAX
from perco.storage.folder import Folder, shared_by_owner


@dataclass(frozen=True, slots=True)
class Moment:
    """The owner's timestamps while its writers are parked.

    Attributes:
        last: the last timestamp that it has handed out.
        settled: no commit in one step at or before this timestamp is in progress (C4).
    """

    last: int
    settled: int


Parked = Callable[[], AbstractAsyncContextManager[Moment]]


class Owner:
    """The process that has a folder open, whichever it is. `alone`: at the last look there was none."""

    alone: bool

    def __init__(self, path: Path) -> None:
        self._path = path
        self.alone = False

    def look(self) -> None:
        """Check that there is a store, and that its files can be read: LMDB aborts a process that reads a torn copy.

        Raises: UnsuitableFolder, FormatUnknown, CopiedWhileOpen, UsageError.
        """
        Folder.beside(self._path).release(clean=False)

    @asynccontextmanager
    async def parked(self) -> AsyncIterator[Moment]:
        """While the block lasts, the store's files do not change.

        Raises: UsageError: it cannot be done; Unavailable: the owner did not answer in time, or the block took too
        long, so that files may have changed; NeedsCheck, UnsuitableFolder, FormatUnknown.
        """
        try:
            folder = Folder.claim(self._path, durable=True, accept_loss=False)
        except StoreLocked as locked:
            if not shared_by_owner(self._path):
                raise UsageError(
                    f"{self._path} is in use by process {locked.pid} ({locked.command}), which does not share it: open "
                    "it there with shared=True, or close it for the backup"
                ) from locked
        else:
            self.alone = True
            try:
                yield Moment(TS_MAX, TS_MAX)
            finally:
                folder.release(clean=True)
            return
        self.alone = False
        async with visiting(self._path) as db:
            link = remote_owner(db).link
            try:
                last, settled = await link.call(Method.PARK, None, again=False)
            except LostError as error:  # the writers go on by themselves
                raise Unavailable(f"parking the writers of {self._path}: {error}") from error
            try:
                yield Moment(last, settled)
            except BaseException:
                with trio.CancelScope(shield=True):
                    await link.call(Method.GO_ON, None, again=True)
                raise
            if not await link.call(Method.GO_ON, None, again=True):
                raise Unavailable("taking one state of all tablets", remedy="The machine is very busy. Try again.")
