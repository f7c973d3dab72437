"""The lease under which a process owns a store on PostgreSQL, renewed by a thread.

O1  A process owns the store from its claim on, until another process claims it. The next process waits until the owner
    has not renewed its lease for `lease_s`, by the waiting process's own clock; the owner begins no transaction later
    than `lease_s` after it sent its last renewal, by its own clock. No wall time is compared. A pause of either process
    counts: the clock goes on while a process is stopped, or the machine asleep.
    What a former owner still sends writes nothing: it names an older term.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from perco.errors import PercoError, StoreLocked
from perco.postgresql.address import Place
from perco.postgresql.libpq import error_of_libpq, libpq
from perco.postgresql.statements import Statements

_RENEWALS: Final = 3  # in the time of a lease
_AGAIN_S: Final = 0.1  # after an attempt that failed
_REMEDY: Final = "Stop that process, or serve the store with `perco serve` and open the address that it listens at."


def now() -> float:
    """Seconds on a clock that never stops."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def command() -> str:
    """Name this process, for an error in another one; without its arguments, which may be secret."""
    return f"process {os.getpid()} on {os.uname().nodename} ({Path(sys.argv[0]).name or 'python'})"


def locked(place: Place, command: str) -> StoreLocked:
    """The error of a process that does not own the store."""
    return StoreLocked(place.shown, None, command or "another process", _REMEDY)


class Lease(threading.Thread):
    """Renews the lease until `end`.

    Attributes: `until`, by `now()`: no transaction may begin later; `deposed`, the error once another process owns the
    store; `said`, why the lease could not be renewed.
    """

    until: float
    deposed: PercoError | None
    said: str

    def __init__(self, place: Place, token: str, lease_s: float, claimed_at: float) -> None:
        super().__init__(name="perco-lease", daemon=True)
        self._place, self._token, self._lease_s = place, token, lease_s
        self._statements = Statements(place.prefix)
        self._ending = threading.Event()
        self._link: Any = None
        self._busy = False  # a statement has been sent, and not answered
        self._asked_at = 0.0  # when, by `now()`
        self.until = claimed_at + lease_s
        self.deposed = None
        self.said = ""  # why the lease could not be renewed

    def run(self) -> None:
        while not self._ending.wait(_AGAIN_S if self.said else self._lease_s / _RENEWALS) and self.deposed is None:
            try:
                self._renew()
            except Exception as error:  # not to be lost with the thread: `check` tells it
                self.said = f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # else the next owner waits for the lease to end
            if self.deposed is None:
                self._ask(self._statements.release)
        self._close()

    def _renew(self) -> None:
        if not self._asked_at:
            self._asked_at = now()
        renewed = self._ask(self._statements.renew)
        if renewed is None:
            return
        if renewed:
            self.until, self.said = self._asked_at + self._lease_s, ""
        else:
            self.deposed = locked(self._place, "another process: this one did not renew its lease in time")
        self._asked_at = 0.0

    def _ask(self, sql: str) -> int | None:
        """Run a statement with the token; returns how many rows it changed, or None if there is no answer yet. The next
        call then waits for the same answer: to begin again would leave one more waiting backend in the server."""
        pq = libpq()
        if self._link is None:
            self._link = pq.PGconn.connect(self._place.conninfo.encode())  # which has a limit, `connect_timeout`
            self._busy = False
            if self._link.status == pq.ConnStatus.OK:
                self._link.exec_(b"SET synchronous_commit = on")
        link = self._link
        try:
            if link.status == pq.ConnStatus.OK and not self._busy:
                link.send_query_params(sql.encode(), [self._token.encode()])
                self._busy = True
            result = self._answer(link) if link.status == pq.ConnStatus.OK else None
        except error_of_libpq():
            result = None
        if result is not None and result.status == pq.ExecStatus.COMMAND_OK:
            return int(result.command_tuples or 0)
        if link.status == pq.ConnStatus.OK and self._busy and result is None:
            self.said = "no answer"
            return None
        self.said = " ".join(link.get_error_message().split()) or "no answer"
        self._asked_at = 0.0
        self._close()
        return None

    def _answer(self, link: Any) -> Any:
        """The result of the statement; None: not within the time of a lease."""
        poll = select.poll()
        poll.register(link.socket, select.POLLIN)
        until = now() + self._lease_s
        while link.is_busy():
            if not poll.poll(max(1000 * (until - now()), 0)) and now() >= until:
                return None
            link.consume_input()
        result = link.get_result()
        while link.get_result() is not None:
            pass
        self._busy = False
        return result

    def _close(self) -> None:
        if self._link is not None:
            self._link.finish()
        self._link, self._busy = None, False

    def end(self) -> None:
        """Release the store. Waits for the server; call it from a thread."""
        self._ending.set()
        self.join()
