"""The rows of a store on PostgreSQL: reads, scans, and batches of mutations, each in one round trip.

S1  A mutation, of one row or of several, is checked and written within one transaction of the server. Mutations of a
    call share a transaction unless two of them have a row in common; then the later one sees the writes of the earlier.
S4  If the server refuses a mutation, for example because its disk is full, only this mutation fails: the others are
    sent again without it.
C6  A mutation is sent again only if it certainly was not applied, so it takes effect at most once.
T4  If a connection is lost, the mutations sent over it may have been applied. Their verdict is `NoReply`, which is
    returned once they can no longer take effect (`PostgresqlRows.renew`), or after `call_s`.
T13 See `Bare`: the owner refuses its own mutations below the floor; PostgreSQL refuses those of clients.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import trio

from perco.errors import Corruption, PercoError, SessionEnded, StoreFull, Unavailable, UsageError
from perco.postgresql.address import Place
from perco.postgresql.arrays import bools, byteas, int4, int4s, int8, int8s, number
from perco.postgresql.connection import Connection, Lost, Refusal, Rows, Statement
from perco.postgresql.fence import LOCKS, Fence, Shown, hashed, salt_of
from perco.postgresql.options import PostgresqlOptions
from perco.postgresql.statements import DURABLE, NOT_DURABLE, SETTINGS, Statements
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import (
    APPLIED,
    PRESENT,
    ROW_BYTES_MAX,
    TS_MAX,
    Failed,
    Mutation,
    NoReply,
    Query,
    ReadRequest,
    Refused,
    RowCells,
    ScanCell,
    ScanPage,
    ScanQuery,
    ScanRequest,
    Tablet,
    Verdict,
    read_in_parts,
)

_END: Final = b"\xff" * (ROW_BYTES_MAX + 1)  # above every row
_PAUSES_MAX: Final = 10  # the longest pause between two attempts, in units of `_PAUSE_S`
_PAUSE_S: Final = 0.05  # the pause before a statement that failed temporarily is sent again
_ROWS_MAX: Final = 1000  # rows of all mutations that share a transaction
_PART_BYTES: Final = 8 << 20  # size of the values of these mutations

# Errors after which a transaction may succeed if it is sent again: conflicts with other transactions, and timeouts.
_AGAIN: Final = frozenset({"40001", "40P01", "55P03", "57014", "53300"})
_CHECKED: Final[tuple[Callable[[Any], bytes], ...]] = (int4s, int4s, bools, int4s, byteas, int8s, int8s, int8s)
_NO_SPACE: Final = 0  # has no cells. Used for a group that does not exist, which only a damaged cell can name
YES: Final[Rows] = [(b"\x01",)]
_NEXT: Final = int4(-1)  # in place of a query's index: this row is the one after the page
_FULL: Final = "53100"
_READ_ONLY: Final = "25006"
_NO_TABLE: Final = "42P01"


class Pool:
    """Connections, opened when they are needed. Loop thread only."""

    place: Place
    options: PostgresqlOptions

    def __init__(self, place: Place, options: PostgresqlOptions, settings: Sequence[str]) -> None:
        self.place, self.options = place, options
        self._settings = settings
        self._idle: list[Connection] = []
        self._limit = trio.CapacityLimiter(options.connections)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection that no other task uses. Raises: Lost."""
        async with self._limit:
            found = None
            while found is None and self._idle:
                found = self._idle.pop()
                if not found.is_alive():
                    found = None
            if found is None:
                found = await Connection.open(self.place, self._settings)
            try:
                yield found
            finally:
                if found.usable:
                    self._idle.append(found)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class PostgresqlRows:
    """All rows of a store, in the tables of one prefix, for its owner or for a client with a ticket. Loop thread only.

    Attributes:
        renew: set by the store. Begins a new term, if the fence has none. After that, nothing that was sent under an
            earlier term can take effect (O1). Raises: Lost, PercoError.
        wait_out: set by a client. Returns when no transaction that holds the given lock of a ticket is under way.
            Raises: Lost, PercoError.
        usable: set by the store. Raises PercoError if the store is closed, or was opened before a fork.
        check: set by the store. Raises what `usable` raises, and an error unless this process surely owns the store.
            A read counts only if `check`, called after the read, raises nothing: a new owner may remove versions that
            only this process still reads (G1). A mutation needs no `check`, because PostgreSQL compares its term.
    """

    pool: Pool
    statements: Statements
    fence: Fence

    groups = True
    once = True
    logs = False
    near = False
    chaining = None
    deferring = None
    prompt = None

    def __init__(
        self,
        place: Place,
        options: PostgresqlOptions,
        *,
        durable: bool,
        fence: Fence,
        client: bool = False,
    ) -> None:
        limit = f"SET statement_timeout = {round(1000 * options.call_s)}"
        settings = [SETTINGS, limit, DURABLE if durable else NOT_DURABLE]
        self.pool = Pool(place, options, settings)
        self._writers = Pool(place, options, settings)  # a separate pool, so that reads do not wait for writes (S3)
        self._durable = durable
        self.statements = Statements(place.prefix, client)
        self.fence = fence
        self._options = options
        self._spaces: dict[tuple[str, str], int] = {}
        self._tables: dict[str, int] = {}
        self._salt = salt_of(place.prefix)
        self._first_lock = number(hashed(self._salt)) & ~(2 * LOCKS - 1)  # the owner's fence is in the other half
        self.renew: Callable[[], Awaitable[None]]
        self.wait_out: Callable[[bytes], Awaitable[None]]
        self.usable: Callable[[], None] = lambda: None
        self.check: Callable[[], None] = lambda: None

    def close(self) -> None:
        self.pool.close()
        self._writers.close()

    def add(self, spaces: dict[tuple[str, str], int]) -> None:
        """Register the numbers of tables and groups."""
        self._spaces |= spaces
        for table, _ in spaces:
            self._tables.setdefault(table, len(self._tables))

    def has(self, table: str, group: str) -> bool:
        return (table, group) in self._spaces

    def tables(self) -> list[str]:
        return list(self._tables)

    def tablets_here(self) -> Sequence[Tablet]:
        return ()

    def locate(self, table: str, row: bytes) -> int:
        """A table is one tablet."""
        found = self._tables.get(table)
        if found is None:
            raise UsageError(f"there is no table {table!r} in this store; declare it in the schema")
        return found

    def bounds(self, table: str) -> list[bytes]:
        self.locate(table, b"")
        return [b""]

    def _space(self, table: str, group: str) -> int:
        return self._spaces.get((table, group), _NO_SPACE)

    # ------------------------------------------------------------ reads

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        """Read cells of rows, all as of one moment. Raises: Unavailable."""
        if not requests:
            await trio.lowlevel.checkpoint()
            return []
        for table, row, _ in requests:
            self.locate(table, row)
        asked = [(table, row, query) for table, row, queries in requests for query in queries]
        found: list[list[tuple[int, bytes]]] = [[] for _ in asked]
        if asked:
            oldest = any(query[4] < 0 for _, _, query in asked)
            statement = self.statements.read_any if oldest else self.statements.read
            for at, ts, value in await self._ask(statement, self._queries(asked)):
                found[number(at) - 1].append((number(ts), value))
        for (_, _, query), cells in zip(asked, found, strict=True):
            if len(cells) > 1:  # SQL guarantees no order of the whole result
                cells.sort(reverse=query[4] > 0)
        out, at = [], 0
        for _, _, queries in requests:
            out.append(found[at : at + len(queries)])
            at += len(queries)
        return out

    def _queries(self, asked: Sequence[tuple[str, bytes, Query]]) -> list[bytes]:
        return [
            int4s([self._space(table, query[0]) for table, _, query in asked]),
            byteas([row for _, row, _ in asked]),
            int8s([query[1] for _, _, query in asked]),
            int8s([query[2] for _, _, query in asked]),
            int8s([query[3] for _, _, query in asked]),
            int4s([query[4] for _, _, query in asked]),
        ]

    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        """See `RowStore.read_first`."""
        return await read_in_parts(self.read, requests, bytes_max)

    async def scan(self, request: ScanRequest) -> ScanPage:
        """Read a page of rows, as of one moment. Raises: Unavailable."""
        table, start, stop, queries, reverse, rows_max, bytes_max, seeks_max, _ = request
        self.locate(table, start)
        if stop is not None and stop <= start:
            await trio.lowlevel.checkpoint()
            return ScanPage([], None)
        spaces = list(dict.fromkeys(self._space(table, query.group) for query in queries))
        asked = [(j, query, column) for j, query in enumerate(queries) for column in _columns(query)]
        statement = self.statements.scan_back if reverse else self.statements.scan
        rows = max(1, min(rows_max, seeks_max // (len(asked) + 1)))
        result = await self._ask(
            statement,
            [
                *(start, _END if stop is None else stop, int4s(spaces), int4(rows), int8(bytes_max)),
                *self._scanned(table, asked),
            ],
        )
        found: dict[bytes, tuple[bytes, list[list[ScanCell]]]] = {}
        following: bytes | None = None
        for k, row, j, column, ts, value in result:
            if j == _NEXT:
                following = row + b"\x00" if reverse else row
                continue
            cells = found.setdefault(k, (row, [[] for _ in queries]))[1]
            cells[number(j)].append((number(column), number(ts), value))
        page = []
        for k in sorted(found):
            for query, each in zip(queries, found[k][1], strict=True):
                if len(each) > 1:
                    _put_in_order(query, each)
            page.append(found[k])
        return ScanPage(page, following)

    def _scanned(self, table: str, asked: Sequence[tuple[int, ScanQuery, int]]) -> list[bytes]:
        return [
            int4s([j for j, _, _ in asked]),
            int4s([self._space(table, query.group) for _, query, _ in asked]),
            int8s([column for _, _, column in asked]),
            int8s([query.from_ts for _, query, _ in asked]),
            int8s([query.to_ts for _, query, _ in asked]),
            int4s([query.n for _, query, _ in asked]),
            bools([query.values for _, query, _ in asked]),
        ]

    async def counts(self, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], int]:
        """How many cells there are in these groups of tables, at one moment."""
        spaces = {where: self._space(*where) for where in wanted}
        found = await self._ask(self.statements.counts, [int4s(list(dict.fromkeys(spaces.values())))])
        cells = {number(space): number(count) for space, count in found}
        return {where: cells[space] for where, space in spaces.items()}

    async def _ask(self, statement: Statement, parameters: Sequence[bytes]) -> Rows:
        """Run a statement that only reads; repeat it if it fails temporarily. Raises: Unavailable, Corruption;
        SessionEnded, if this client's session ends meanwhile."""
        self.usable()
        error: Exception | None = None
        attempt, fence = 0, self.fence
        session = fence.session
        with trio.move_on_after(self._options.call_s):
            while True:
                if attempt:
                    await trio.sleep(_PAUSE_S * min(attempt, _PAUSES_MAX))
                attempt += 1
                try:
                    if not self.fence.term:  # else a read might see a commit that a failover undoes (T4)
                        await self.renew()
                    if fence.session != session:
                        raise SessionEnded()
                    async with self.pool.connection() as connection:
                        shown = fence.shown()
                        still = self.statements.still, [shown.token]
                        found, ours = await connection.run([(statement, parameters), still])  # in this order (F3)
                    self.check()
                    if ours == YES and fence.session == session == shown.session:
                        return found
                    if fence.deposed is not None:
                        raise fence.deposed
                    if ours != YES:
                        fence.lapse(shown)
                except (Lost, Unavailable) as lost:
                    error = lost
                except Refusal as refusal:
                    error = refusal
                    if refusal.sqlstate not in _AGAIN:
                        raise self.told(refusal) from refusal
        self.usable()
        if isinstance(error, Unavailable):
            raise error
        raise Unavailable(f"{self.pool.place.shown} does not answer: {error or 'no reply'}") from error

    def told(self, error: Refusal) -> PercoError:
        """perco's error for an error of the server."""
        shown = self.pool.place.shown
        if error.sqlstate == _FULL:
            return StoreFull(shown, error.said)
        if error.sqlstate == _READ_ONLY:
            return Unavailable(f"{shown} is a standby, or was made read-only: {error.said}")
        if error.sqlstate == _NO_TABLE:
            return Corruption(shown, f"its tables have been removed: {error.said}")
        return Unavailable(f"{shown} refuses: {error}", remedy="The message is PostgreSQL's.")

    # ------------------------------------------------------------ mutations

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        """Apply mutations; returns the verdict of each. The call can be cancelled only until the first mutation is sent
        (T10)."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self.usable()
        for mutation in mutations:  # an error here means that nothing was sent
            self.locate(mutation.table, b"")
        verdicts: list[Verdict | None] = [self._unknown_group(mutation) for mutation in mutations]
        parts = _parts(mutations, [i for i, verdict in enumerate(verdicts) if verdict is None])
        with trio.CancelScope(shield=True):
            if not parts:
                await trio.lowlevel.checkpoint()
            deadline = trio.current_time() + self._options.call_s
            session = self.fence.session
            for part in parts:
                await self._apply_part(mutations, part, verdicts, deadline, session)
        return verdicts  # type: ignore[return-value]

    def _unknown_group(self, mutation: Mutation) -> Failed | None:
        for _, _, writes in mutation.rows:
            for write in writes:
                if (mutation.table, write[0]) not in self._spaces:
                    return Failed(Corruption(self.pool.place.shown, f"there is no locality group {write[0]!r}"))
        return None

    async def _apply_part(
        self,
        mutations: Sequence[Mutation],
        part: Sequence[int],
        verdicts: list[Verdict | None],
        deadline: float,
        session: int,
    ) -> None:
        """Apply the mutations whose indices are in `part`, in one transaction."""
        parameters = self._written([mutations[i] for i in part])
        locks = int8s(sorted(self._locks(mutations[i] for i in part)))
        durably = not self._durable and any(mutations[i].table == SYSTEM_TABLE for i in part)  # S2
        attempt, said = 0, "no connection"
        verdict: Verdict
        while True:
            if self.fence.deposed is not None or self.fence.session != session:
                verdict = Failed(self.fence.deposed or SessionEnded())
                break
            if attempt and trio.current_time() > deadline:
                verdict = Failed(Unavailable(f"{self.pool.place.shown} does not answer: {said}"))
                break
            if attempt:
                await trio.sleep(_PAUSE_S * min(attempt, _PAUSES_MAX))
            attempt += 1
            shown, sent = self.fence.shown(), False
            try:
                with trio.fail_at(deadline):
                    if not shown.term:
                        await self.renew()
                        continue
                    async with self._writers.connection() as connection:
                        shown = self.fence.shown()  # the fence may have changed while all connections were busy
                        if shown.session != session or not shown.term:
                            continue
                        sent = True
                        result = await self._send(connection, shown, locks, parameters, durably=durably)
            except (Lost, trio.TooSlowError) as lost:
                said = lost.said if isinstance(lost, Lost) else "no reply"
                if not sent or (isinstance(lost, Lost) and not lost.sent):
                    continue
                await self._forget(shown, deadline)
                verdict = NoReply(f"the connection to PostgreSQL was lost: {said}")
                break
            except Refusal as refusal:
                if refusal.sqlstate in _AGAIN:
                    said = str(refusal)
                    continue
                if len(part) > 1:  # S4: find the mutations that are refused
                    middle = len(part) // 2
                    await self._apply_part(mutations, part[:middle], verdicts, deadline, session)
                    await self._apply_part(mutations, part[middle:], verdicts, deadline, session)
                    return
                verdict = Failed(self.told(refusal))
                break
            except Unavailable as error:  # a new term could not be begun yet
                said = error.what
                continue
            except PercoError as error:
                verdict = Failed(error)
                break
            if result is None:  # the store has another term, so nothing was written
                self.fence.lapse(shown)
                continue
            for at, i in enumerate(part):
                verdicts[i] = _which(mutations[i], result[at]) if at in result else APPLIED
            return
        for i in part:
            verdicts[i] = verdict

    async def settle(self) -> None:
        """Return once no mutation that was sent and not answered can still take effect. Raises: PercoError."""
        said: Lost | None = None
        with trio.move_on_after(self._options.call_s):
            while not self.fence.term and self.fence.deposed is None:
                try:
                    await self.renew()
                except Lost as lost:
                    said = lost
                    await trio.sleep(_PAUSE_S)
        if self.fence.deposed is not None:
            raise self.fence.deposed
        if not self.fence.term:
            raise Unavailable(f"{self.pool.place.shown} cannot be reached: {said or 'no reply'}") from said

    async def _forget(self, shown: Shown, deadline: float) -> None:
        """Wait until no mutation that was sent under this term can take effect, or until the deadline."""
        self.fence.lapse(shown)
        with trio.move_on_at(deadline), suppress(PercoError):
            await self.settle()
            if self.fence.token.encode() != shown.token:
                await self.wait_out(shown.lock)

    async def _send(
        self, connection: Connection, shown: Shown, locks: bytes, parameters: list[bytes], *, durably: bool
    ) -> dict[int, int] | None:
        """Send a transaction; returns the number of the failed check for each refused mutation. None: the store has
        another term."""
        statements = self.statements
        before: list[tuple[Statement, list[bytes]]] = [(statements.durably, [])] if durably else []
        made, *floors = parameters[13:]
        *_, result = await connection.run(
            [
                *before,
                (statements.lock, [locks]),
                (statements.hold, [shown.lock]),
                (statements.apply, [*parameters[:13], int8(shown.term), made, shown.token, *floors]),
            ]
        )
        refused = {number(m): number(n) for m, n in sorted(result, key=_last_first)}
        return None if -1 in refused else refused

    def _locks(self, mutations: Iterable[Mutation]) -> set[int]:
        """The numbers of the advisory locks for the rows of these mutations. There are only 2 048 different numbers,
        because a server has room for about 6 000 locks by default. Mutations of rows with the same number wait for each
        other."""
        found = set()
        first = self._first_lock
        for mutation in mutations:
            salt = self._salt + mutation.table.encode() + b"\x00"
            for row, _, _ in mutation.rows:
                found.add(first + int.from_bytes(hashed(salt + row), "big") % LOCKS)
        return found

    def _written(self, mutations: Sequence[Mutation]) -> list[bytes]:
        """The parameters of `apply`. If a mutation writes a cell twice, the last value counts."""
        checks: list[tuple[int, int, bool, int, bytes, int, int, int]] = []
        writes: dict[tuple[int, bytes, int, int], tuple[int, bytes | None]] = {}
        for m, (table, rows, _, _) in enumerate(mutations):
            n = 0
            for row, conditions, written in rows:
                for kind, group, column, low, high in conditions:
                    checks.append((m, n, kind == PRESENT, self._space(table, group), row, column, low, high))
                    n += 1
                for group, column, ts, value in written:
                    writes[self._space(table, group), row, column, ts] = m, value
        checked: list[tuple[Any, ...]] = list(zip(*checks, strict=True)) if checks else [()] * len(_CHECKED)
        cells, made = list(writes), list(writes.values())
        floors: list[bytes] = []
        if self.statements.client:
            floors = [int4s(range(len(mutations))), int8s([TS_MAX if m[2] is None else m[2] for m in mutations])]
        return [
            *(encode(values) for encode, values in zip(_CHECKED, checked, strict=True)),
            *(int4s([m for m, _ in made]), int4s([space for space, _, _, _ in cells])),
            *(byteas([row for _, row, _, _ in cells]), int8s([column for _, _, column, _ in cells])),
            *(int8s([ts for _, _, _, ts in cells]), byteas([value for _, value in made])),
            *floors,
        ]


def _columns(query: ScanQuery) -> tuple[int, ...]:
    """The columns of a query; -1: all columns."""
    return (-1,) if query.columns is None else query.columns


def _last_first(refused: tuple[bytes, bytes]) -> int:
    """The sort key of refusals. Of several refusals of one mutation, the last in this order counts: the floor (-1),
    or else the first failed check."""
    return -number(refused[1])


def _newest_first(cell: ScanCell) -> tuple[int, int]:
    return cell[0], -cell[1]


def _put_in_order(query: ScanQuery, cells: list[ScanCell]) -> None:
    """Sort cells by column, in the order in which the query names the columns; within a column, the newest first."""
    if query.columns is None or len(query.columns) == 1:
        cells.sort(key=_newest_first)
    else:
        places = {column: at for at, column in enumerate(query.columns)}
        cells.sort(key=lambda cell: (places[cell[0]], -cell[1]))


def _which(mutation: Mutation, failed: int) -> Refused:
    """The refusal for the check with this number; the checks of all rows of the mutation are numbered in sequence. -1:
    the mutation is below the floor."""
    if failed < 0:
        return Refused(0, -1)
    for i, (_, checks, _) in enumerate(mutation.rows):
        if failed < len(checks):
            return Refused(i, failed)
        failed -= len(checks)
    raise AssertionError("PostgreSQL refuses a check that was not sent")


def _parts(mutations: Sequence[Mutation], wanted: Sequence[int]) -> list[list[int]]:
    """Divide the mutations with these indices into parts, one for each transaction. If two mutations have a row in
    common, the later one goes into a later part."""
    parts: list[list[int]] = []
    sizes: list[tuple[int, int]] = []  # rows and bytes
    last: dict[tuple[str, bytes], int] = {}  # (table, row) -> the last part that has the row
    for i in wanted:
        mutation = mutations[i]
        at = max((last[key] + 1 for row in mutation.rows if (key := (mutation.table, row[0])) in last), default=0)
        rows = len(mutation.rows)
        size = sum(len(write[3] or b"") for row in mutation.rows for write in row[2])
        while at < len(parts) and (sizes[at][0] + rows > _ROWS_MAX or sizes[at][1] + size > _PART_BYTES):
            at += 1
        if at == len(parts):
            parts.append([])
            sizes.append((0, 0))
        parts[at].append(i)
        sizes[at] = sizes[at][0] + rows, sizes[at][1] + size
        for row in mutation.rows:
            last[mutation.table, row[0]] = at
    return parts
