"""The lease under which a process owns a store that other machines can reach, too; renewed by a thread.

O1  A process owns the store from its claim on, until another process claims the store. Before it claims the store, the
    next process waits until the owner has not renewed its lease for `lease_s`, measured on the next process's clock.
    The owner begins no transaction later than `lease_s` after it sent its last renewal, measured on its own clock. No
    wall times are compared. Pauses count, too: the clock goes on while a process is stopped, or the machine is asleep.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Final

import trio

from perco.errors import PercoError, StoreLocked, TransactionClosed, Unavailable, UsedAfterFork
from perco.storage.cells import Mutation

_RENEWALS: Final = 3  # in the time of a lease
_AGAIN_S: Final = 0.1  # after an attempt that failed
CLOSED: Final = "the store that this belongs to has been closed"
_REMEDY: Final = "Stop that process, or serve the store with `perco serve` and open the address that it listens at."


def now() -> float:
    """Seconds on a clock that goes on while the machine is asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def command() -> str:
    """The name of this process, for an error message in another process. Without arguments, which may be secret."""
    return f"process {os.getpid()} on {os.uname().nodename} ({Path(sys.argv[0]).name or 'python'})"


def locked(shown: str, command: str) -> StoreLocked:
    """The error of a process that does not own the store."""
    return StoreLocked(shown, None, command or "another process", _REMEDY)


class Lease(threading.Thread):
    """Renews the lease until `end` is called. For each kind of store, a subclass does the renewal.

    Attributes: `until`, a time on the clock of `now()`: no transaction may begin later; `deposed`, the error once
    another process owns the store; `said`, why the lease could not be renewed.
    """

    until: float
    deposed: PercoError | None
    said: str
    _asked_at: float

    def __init__(self, shown: str, lease_s: float, claimed_at: float) -> None:
        super().__init__(name="perco-lease", daemon=True)
        self._shown, self._lease_s = shown, lease_s
        self._ending = threading.Event()
        self._asked_at = 0.0  # when the renewal was sent, by `now()`; a subclass sets it to 0 if the renewal fails
        self.until = claimed_at + lease_s
        self.deposed = None
        self.said = ""

    def run(self) -> None:
        while not self._ending.wait(_AGAIN_S if self.said else self._lease_s / _RENEWALS) and self.deposed is None:
            try:
                self._renew()
            except Exception as error:  # it must not end the thread: the store's `check` reports it
                self.said = f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # if this fails, the next owner waits for the lease to end
            if self.deposed is None:
                self.release()
        self.close()

    def _renew(self) -> None:
        if not self._asked_at:
            self._asked_at = now()
        renewed = self.renew()
        if renewed is None:
            return
        if renewed:
            self.until, self.said = self._asked_at + self._lease_s, ""
        else:
            self.deposed = locked(self._shown, "another process: this one did not renew its lease in time")
        self._asked_at = 0.0

    def renew(self) -> bool | None:
        """Whether the store has renewed the lease; None: there is no answer yet, and `said` is the reason."""
        raise NotImplementedError

    def release(self) -> None:
        """Let the next process claim the store at once."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up the connection."""
        raise NotImplementedError

    def end(self) -> None:
        """Release the store. Waits for the database; call it from a thread."""
        self._ending.set()
        self.join()


_stores: weakref.WeakSet[LeasedStore] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child: mark the stores, because their connections and leases are the parent's."""
    for store in list(_stores):
        store.forked = True


os.register_at_fork(after_in_child=_after_fork)


class LeasedStore:
    """The base of a store in a database, which this process owns under a lease. Loop thread only.

    Args:
        shown: the store's address, without a password.
        lease_s: the length of its lease, in seconds.

    Attributes: `forked`: this process is a forked child of the process that opened the store.
    """

    forked: bool

    path: Path | None = None
    readonly = False
    threaded = False
    remote = True
    owner_alive = False
    term = b""
    local = None

    def __init__(self, shown: str, lease_s: float) -> None:
        self._shown, self._lease_s = shown, lease_s
        self._lease: Lease | None = None  # set once the store is claimed
        self._closed = False
        self.forked = False
        _stores.add(self)

    def check(self) -> None:
        """Raises UsedAfterFork, TransactionClosed; StoreLocked, if another process owns the store; Unavailable, if this
        process cannot be sure that it still owns the store (O1)."""
        self._usable()
        lease = self._lease
        if lease is None:
            return
        if lease.deposed is not None:
            raise lease.deposed
        if now() > lease.until:
            raise Unavailable(
                f"{self._shown} has not renewed this process's lease for {self._lease_s:g} s"
                + (f": {lease.said}" if lease.said else "")
            )

    def _usable(self) -> None:
        if self.forked:
            raise UsedAfterFork(self._shown)
        if self._closed:
            raise TransactionClosed(CLOSED)

    async def watch(self) -> None:
        """Raise an error once another process owns the store: this process can no longer acknowledge any write."""
        while True:
            await trio.sleep(self._lease_s / 2)
            with contextlib.suppress(Unavailable):
                self.check()

    def write_from_thread(self, mutation: Mutation) -> None:
        raise AssertionError("writers of this store are not threads")

    def clear_dead_readers(self) -> None:
        """Do nothing: a reader that dies holds nothing."""

    def expire(self, after_s: float) -> None:
        """Do nothing: each call has a time limit of its own."""
