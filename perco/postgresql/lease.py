"""The lease under which a process owns a store on PostgreSQL (O1). If a former owner still sends a mutation, it writes
nothing, because it names an older term.
"""

from __future__ import annotations

import select
from typing import Any

from perco.postgresql.address import Place
from perco.postgresql.libpq import error_of_libpq, libpq
from perco.postgresql.statements import Statements
from perco.storage.lease import Lease, now


class PostgresqlLease(Lease):
    """Renews the lease over a connection of its own."""

    said: str

    def __init__(self, place: Place, token: str, lease_s: float, claimed_at: float) -> None:
        super().__init__(place.shown, lease_s, claimed_at)
        self._place, self._token = place, token
        self._statements = Statements(place.prefix)
        self._link: Any = None
        self._busy = False  # a statement has been sent, and its answer has not been read

    def renew(self) -> bool | None:
        """See `Lease.renew`."""
        renewed = self._ask(self._statements.renew)
        return None if renewed is None else bool(renewed)

    def release(self) -> None:
        """See `Lease.release`."""
        self._ask(self._statements.release)

    def _ask(self, sql: str) -> int | None:
        """Run a statement with the token as its parameter; returns how many rows it changed, or None if there is no
        answer yet. In that case, the next call waits for the same answer: if it sent the statement again, one more
        backend of the server would be waiting."""
        pq = libpq()
        if self._link is None:
            self._link = pq.PGconn.connect(self._place.conninfo.encode())  # limited by `connect_timeout`
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
        self.close()
        return None

    def _answer(self, link: Any) -> Any:
        """The result of the statement; None: it did not arrive within the length of the lease."""
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

    def close(self) -> None:
        """See `Lease.close`."""
        if self._link is not None:
            self._link.finish()
        self._link, self._busy = None, False
