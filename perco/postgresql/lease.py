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
import re
import select
import shlex
import sys
import threading
import time
from typing import Any, Final

from perco.errors import PercoError, StoreLocked
from perco.postgresql.address import Place
from perco.postgresql.connection import error_of_libpq, libpq
from perco.postgresql.statements import Statements

_RENEWALS: Final = 3  # in the time of a lease
_AGAIN_S: Final = 0.1  # after an attempt that failed
_COMMAND_MAX: Final = 200
_PASSWORD: Final = re.compile(r"(?<=//)[^/@\s]*@|password=[^&\s]*")
_REMEDY: Final = "Stop that process, or serve the store with `perco serve` and open the address that it listens at."


def now() -> float:
    """Seconds on a clock that never stops."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def command() -> str:
    """What this process is, for an error in another one."""
    shown = _PASSWORD.sub("", shlex.join(sys.orig_argv))[:_COMMAND_MAX]
    return f"process {os.getpid()} on {os.uname().nodename} ({shown})"


def locked(place: Place, command: str) -> StoreLocked:
    """The error of a process that does not own the store."""
    return StoreLocked(place.shown, None, command or "another process", _REMEDY)


class Lease(threading.Thread):
    """Renews the lease until `end`.

    Attributes: `until`, by `now()`: no transaction may begin later; `deposed`, the error once another process owns the
    store.
    """

    until: float
    deposed: PercoError | None

    def __init__(self, place: Place, token: str, lease_s: float, claimed_at: float) -> None:
        super().__init__(name="perco-lease", daemon=True)
        self._place, self._token, self._lease_s = place, token, lease_s
        self._statements = Statements(place.prefix)
        self._ending = threading.Event()
        self._link: Any = None
        self.until = claimed_at + lease_s
        self.deposed = None
        self.said = ""  # why the lease could not be renewed

    def run(self) -> None:
        while not self._ending.wait(_AGAIN_S if self.said else self._lease_s / _RENEWALS) and self.deposed is None:
            self._renew()
        if self.deposed is None:
            self._execute(self._statements.release)
        if self._link is not None:
            self._link.finish()

    def _renew(self) -> None:
        before = now()
        renewed = self._execute(self._statements.renew)
        if renewed:
            self.until, self.said = before + self._lease_s, ""
        elif renewed == 0:
            self.deposed = StoreLocked(
                self._place.shown, None, "it did not renew its lease in time, and another has it"
            )

    def _execute(self, sql: str) -> int | None:
        """Run a statement with the token; returns how many rows it changed, or None if there was no answer in time."""
        pq = libpq()
        if self._link is None or self._link.status != pq.ConnStatus.OK:
            self._link = pq.PGconn.connect(self._place.conninfo.encode())  # which has a limit, `connect_timeout`
        link, result = self._link, None
        with contextlib.suppress(error_of_libpq()):
            if link.status == pq.ConnStatus.OK:
                link.send_query_params(sql.encode(), [self._token.encode()])
                until = now() + self._lease_s
                while link.is_busy() and (left := until - now()) > 0:
                    select.select([link.socket], [], [], left)
                    link.consume_input()
                result = None if link.is_busy() else link.get_result()
        if result is not None and result.status == pq.ExecStatus.COMMAND_OK:
            link.get_result()  # the end of the results
            return int(result.command_tuples or 0)
        self.said = " ".join(link.get_error_message().split()) or "no answer"
        link.finish()
        self._link = None
        return None

    def end(self) -> None:
        """Release the store. Waits for the server; call it from a thread."""
        self._ending.set()
        self.join()
