"""One connection to a PostgreSQL server, driven by trio: libpq does not block, and the trio loop waits for its socket.

    connection = await Connection.open(place)
    results = await connection.run([(statement, parameters), ...])

`run` sends its statements in one pipeline, as one transaction: one round trip. PostgreSQL commits the transaction only
at the end of the pipeline, so a result counts only once `run` has returned.

T4  If the connection ends between the first byte sent and the last answer, the transaction may have been committed, or
    may be committed later: `Lost`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import trio

from perco.postgresql.address import Place
from perco.postgresql.libpq import error_of_libpq, libpq

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

_BINARY: Final = 1
# Errors that a new connection may avoid: a read-only server, an unknown prepared statement, and a prepared
# statement whose types have changed.
_OF_THE_SESSION: Final = frozenset({"25006", "26000", "0A000"})


Rows: TypeAlias = list[tuple[Any, ...]]  # the rows of a result; the values are bytes, or None


class Statement(NamedTuple):
    """A statement that a connection prepares at its first use. `types`: the OIDs of its parameters."""

    name: str
    sql: str
    types: tuple[int, ...] = ()


class Refusal(Exception):
    """The server's answer is an error: nothing of the transaction was written.

    Attributes: `sqlstate`, five characters, or "" if libpq itself refused; `said`, the server's message.
    """

    sqlstate: str
    said: str

    def __init__(self, sqlstate: str, said: str) -> None:
        self.sqlstate, self.said = sqlstate, said
        super().__init__(f"{said} ({sqlstate})" if sqlstate else said)


class Lost(Exception):
    """The connection has ended. `sent`: whether statements were sent, which may still take effect (T4)."""

    said: str
    sent: bool

    def __init__(self, said: str, *, sent: bool) -> None:
        self.said, self.sent = said, sent
        super().__init__(said)


class Connection:
    """For one task at a time. Loop thread only."""

    def __init__(self, link: PGconn) -> None:
        self._pq = libpq()
        self._link = link
        self._prepared: set[str] = set()
        self._ended = ""  # why this connection can no longer be used; "": it can
        self._warning = ""

    @classmethod
    async def open(cls, place: Place, settings: Sequence[str] = ()) -> Connection:
        """Connect. `settings`: commands to run first. Raises: Lost, Refusal."""
        pq = libpq()
        # In a thread, because this may block: libpq looks up names, and tries several hosts.
        link = await trio.to_thread.run_sync(
            partial(pq.PGconn.connect, place.conninfo.encode()), abandon_on_cancel=True
        )
        connection = cls(link)
        if link.status != pq.ConnStatus.OK:
            said = _plain(link.get_error_message())
            connection.close()
            raise Lost(said, sent=False)
        link.notice_handler = connection._noticed
        link.nonblocking = 1
        link.enter_pipeline_mode()
        try:
            for command in settings:
                await connection.execute(command)
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def usable(self) -> bool:
        return not self._ended

    def is_alive(self) -> bool:
        """Whether the connection is still open, as far as this host knows. The server may have ended an idle
        connection."""
        with contextlib.suppress(error_of_libpq()):
            self._link.consume_input()  # the first call reads the server's last message, the second one the end
            self._link.consume_input()
        if self._link.status != self._pq.ConnStatus.OK:
            self.close()
        return not self._ended

    def close(self) -> None:
        """End the connection. A transaction that was sent over it may still be committed."""
        self._ended = self._ended or "closed"
        self._link.finish()

    async def execute(self, command: str) -> None:
        """Run commands without parameters, as one transaction. Raises: Refusal, Lost."""
        link = self._link
        async with _Talk(self) as talk:
            link.exit_pipeline_mode()
            link.send_query(command.encode())
            talk.sent = True
            results = []
            while (result := await talk.result()) is not None:
                results.append(result)
            talk.must_go_on()
            link.enter_pipeline_mode()
        for result in results:
            self._raise_for(result)

    async def run(self, statements: Sequence[tuple[Statement, Sequence[bytes | None]]]) -> list[Rows]:
        """Run statements as one transaction. Returns the rows of each statement. Parameters and results are binary.

        Raises: Refusal, of the first statement that failed: nothing was written; Lost.
        """
        assert not self._ended, self._ended
        link, new = self._link, []
        self._warning = ""
        async with _Talk(self) as talk:
            for statement, _ in statements:
                if statement.name not in self._prepared and statement.name not in new:
                    link.send_prepare(statement.name.encode(), statement.sql.encode(), statement.types)
                    new.append(statement.name)
                    talk.sent = True
            for statement, parameters in statements:
                link.send_query_prepared(
                    statement.name.encode(), parameters, [_BINARY] * len(parameters), result_format=_BINARY
                )
                talk.sent = True
            link.pipeline_sync()
            results = []
            while True:
                result = await talk.result()
                if result is None:  # the end of one statement's results
                    talk.must_go_on()
                    continue
                if result.status == self._pq.ExecStatus.PIPELINE_SYNC:
                    break
                results.append(result)
        for name, result in zip(new, results, strict=False):
            if result.status == self._pq.ExecStatus.COMMAND_OK:  # it stays prepared, even if a later statement fails
                self._prepared.add(name)
        for result in results:
            self._raise_for(result)
        if self._warning:
            raise Lost(self._warning, sent=True)
        return [_rows(result) for result in results[len(new) :]]

    def _raise_for(self, result: PGresult) -> None:
        """Raises: Refusal; Lost, if the server ends the connection: it may have committed before it did so."""
        pq = self._pq
        if result.status in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            return
        field = pq.DiagnosticField
        said = (result.error_field(field.MESSAGE_PRIMARY) or result.error_message or b"").decode(errors="replace")
        sqlstate = (result.error_field(field.SQLSTATE) or b"").decode()
        if not sqlstate or result.error_field(field.SEVERITY_NONLOCALIZED) in (b"FATAL", b"PANIC"):
            self.close()  # an error without a state is libpq's own, and may occur after the commit
            raise Lost(_plain(said), sent=True)
        if sqlstate in _OF_THE_SESSION:
            self.close()
        detail = result.error_field(field.MESSAGE_HINT)
        raise Refusal(sqlstate, _plain(said + (f"; {detail.decode(errors='replace')}" if detail else "")))

    def _noticed(self, result: PGresult) -> None:
        """Keep the warning of a server that has stopped waiting for its standby. Such a server commits, and only this
        warning says that the standby may lack the commit."""
        field = self._pq.DiagnosticField
        if result.error_field(field.SOURCE_FUNCTION) == b"SyncRepWaitForLSN":
            self._warning = _plain((result.error_field(field.MESSAGE_PRIMARY) or b"").decode(errors="replace"))


class _Talk:
    """A block in which a connection sends and waits for answers. If the block ends early, the connection is closed:
    otherwise the answers to this block would be taken for answers to the next one."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._link, self._pq = connection, connection._link, connection._pq
        self.sent = False

    async def __aenter__(self) -> _Talk:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        said = _plain(self._link.get_error_message()) if isinstance(error, error_of_libpq()) else str(error)
        self._connection._ended = said or "interrupted"
        self._connection.close()
        if isinstance(error, error_of_libpq() | OSError):
            raise Lost(said or "the connection was lost", sent=self.sent) from error

    def must_go_on(self) -> None:
        """Raises OSError if the connection has ended."""
        if self._link.status != self._pq.ConnStatus.OK:
            raise OSError(_plain(self._link.get_error_message()) or "the server closed the connection")

    async def result(self) -> PGresult | None:
        """The next result; None: this statement has no more results.

        Answers are read only once everything has been sent. This cannot deadlock. The statements before a large
        statement are answered with one row each. The statements after it are small, and wait in the server's buffers.
        """
        link = self._link
        while link.flush():
            await trio.lowlevel.wait_writable(link.socket)
        while link.is_busy():
            await trio.lowlevel.wait_readable(link.socket)
            link.consume_input()
        return link.get_result()


def _rows(result: PGresult) -> Rows:
    columns = range(result.nfields)
    return [tuple([result.get_value(i, column) for column in columns]) for i in range(result.ntuples)]


def _plain(message: str) -> str:
    return " ".join(message.split())
