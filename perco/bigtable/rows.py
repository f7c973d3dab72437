"""The rows of a store on Bigtable: reads, scans, and mutations of single rows.

S1  A mutation of a row is one call of CheckAndMutateRow, which is atomic. There are no groups. Two mutations of one row
    in one call of `apply` follow each other.
S4  A mutation that Bigtable refuses for itself (too large, for example) fails alone.
T4  If no answer comes, a mutation may have been made: `NoReply`. It is not sent again here. It may still be made, for
    as long as `BigtableOptions.late_s` after the call has ended.
T13 See `Bare`: the owner sends no mutation below the floor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import trio

from perco.bigtable import filters
from perco.bigtable.address import Place
from perco.bigtable.calls import CallFailed, Calls, Scan, Scanned
from perco.bigtable.hints import Hints, hint_key, is_hinted, stamps_of, wants_hint
from perco.bigtable.keys import HINT_KEY, micros, place_of, qualifier, row_key, row_of, table_end
from perco.bigtable.options import BigtableOptions
from perco.bigtable.reading import Shape, by_place, chosen, scanned, shape_of, shared
from perco.bigtable.wire import types
from perco.errors import Corruption, PercoError, Unavailable, UsageError
from perco.storage import (
    ABSENT,
    APPLIED,
    PROTOCOL_GROUPS,
    TS_MAX,
    Cell,
    Check,
    Failed,
    Mutation,
    NoReply,
    Query,
    ReadRequest,
    Refused,
    RowCells,
    ScanPage,
    ScanRequest,
    ScanRow,
    Tablet,
    Verdict,
    Write,
    read_in_parts,
)

_KEYS_MAX: Final = 100  # in one call; more are read side by side
_PAUSE_S: Final = 0.02  # before a call is made again, at first
_PAUSE_MAX_S: Final = 1.0
_REVERSED_MAX: Final = 1 << 16  # rows that are read forward, of a server that cannot read backward

# Errors after which a call may succeed if it is made again.
_AGAIN: Final = frozenset(
    {"UNAVAILABLE", "ABORTED", "INTERNAL", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNKNOWN", "CANCELLED"}
)
# Errors that say that a call was not carried out.
_NOT_DONE: Final = frozenset(
    {
        *("INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "FAILED_PRECONDITION"),
        *("OUT_OF_RANGE", "UNIMPLEMENTED"),
    }
)
_REMEDIES: Final = {
    "NOT_FOUND": "Run `perco bigtable init` with this address.",
    "PERMISSION_DENIED": "The program's account needs the role roles/bigtable.user on the instance.",
    "UNAUTHENTICATED": "Set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`.",
    "FAILED_PRECONDITION": "`perco bigtable check` examines the table and the app profile.",
}


class BigtableRows:
    """All rows of a store. Loop thread only.

    Attributes:
        usable: set by the store. Raises PercoError if it is closed, or was opened before a fork.
        check: set by the store. The same, and if this process may not own the store any more (O1).
    """

    calls: Calls
    place: Place
    hints: Hints
    backwards: bool

    groups = False
    once = False
    chaining = None
    deferring = None
    prompt = None

    def __init__(self, place: Place, options: BigtableOptions) -> None:
        self.place, self._options = place, options
        self.calls = Calls(place, options)
        self.hints = Hints(place, options)
        self._tables: dict[str, int] = {}
        self._groups: set[tuple[str, str]] = set()
        self.backwards = True  # whether the server reads rows in reverse
        self.usable: Callable[[], None] = lambda: None
        self.check: Callable[[], None] = lambda: None

    def add(self, table: str, groups: Sequence[str]) -> None:
        """Take in a table and its groups."""
        self._tables.setdefault(table, len(self._tables))
        self._groups.update((table, group) for group in (*PROTOCOL_GROUPS, *groups))

    def tables(self) -> list[str]:
        return list(self._tables)

    def tablets_here(self) -> Sequence[Tablet]:
        return ()

    def locate(self, table: str, row: bytes) -> int:
        """A table is one tablet: Bigtable's own are not told."""
        found = self._tables.get(table)
        if found is None:
            raise UsageError(f"there is no table {table!r} in this store; declare it in the schema")
        return found

    def bounds(self, table: str) -> list[bytes]:
        self.locate(table, b"")
        return [b""]

    # ------------------------------------------------------------ reads

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        """Cells of rows; each row as of one moment. Raises: Unavailable."""
        if not requests:
            await trio.lowlevel.checkpoint()
            return []
        for table, _, _ in requests:
            self.locate(table, b"")
        shapes: dict[Shape, list[int]] = {}
        for index, (_, _, queries) in enumerate(requests):
            shapes.setdefault(shape_of(queries), []).append(index)
        out: list[RowCells | None] = [None] * len(requests)
        plans: list[tuple[list[int], list[Query]]] = []
        for shape, indices in shapes.items():
            if not shape:
                for index in indices:
                    out[index] = []
                continue
            for at in range(0, len(indices), _KEYS_MAX):
                some = indices[at : at + _KEYS_MAX]
                plans.append((some, shared([requests[index][2] for index in some])))
        await self._read_plans(requests, plans, out)
        left = [([index], list(requests[index][2])) for index, found in enumerate(out) if found is None]
        await self._read_plans(requests, left, out)  # whose versions were too old for a shared call
        assert all(found is not None for found in out), "a call for one request has all that it asks for"
        return out  # type: ignore[return-value]

    async def _read_plans(
        self, requests: Sequence[ReadRequest], plans: list[tuple[list[int], list[Query]]], out: list[RowCells | None]
    ) -> None:
        """Make one call for each plan: requests with the same queries, but for the timestamps."""
        calls = []
        for indices, queries in plans:
            row_filter = filters.reading(queries)
            if row_filter is None:
                for index in indices:
                    out[index] = [[] for _ in queries]
                continue
            request = self._reading(row_filter)
            request.rows.row_keys.extend({row_key(*requests[index][:2]) for index in indices})
            calls.append((indices, queries, Scan(request)))
        answers = await self._ask([call for _, _, call in calls])
        for (indices, queries, _), answer in zip(calls, answers, strict=True):
            rows = {row.key: by_place(row) for row in answer.rows}
            for index in indices:
                table, row, wanted = requests[index]
                out[index] = chosen(rows.get(row_key(table, row), {}), wanted, queries)

    def _reading(self, row_filter: Any) -> Any:
        return types().ReadRows(table_name=self.place.table, app_profile_id=self.place.app_profile, filter=row_filter)

    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        """See `RowStore.read_first`."""
        return await read_in_parts(self.read, requests, bytes_max)

    async def scan(self, request: ScanRequest) -> ScanPage:
        """A page of rows, each as of one moment. Raises: Unavailable."""
        table, start, stop, queries, reverse, rows_max, bytes_max, seeks_max = request
        self.locate(table, b"")
        if stop is not None and stop <= start:
            await trio.lowlevel.checkpoint()
            return ScanPage([], None)
        asked_for = filters.scanning(queries)
        if asked_for is None:
            await trio.lowlevel.checkpoint()
            return ScanPage([], None)
        if is_hinted(request):
            return await self._scan_hinted(request)
        made = self._reading(asked_for)
        asked = sum(1 if query.columns is None else len(query.columns) for query in queries)
        rows_max = max(1, min(rows_max, seeks_max // (asked + 1)))
        forward = reverse and not self.backwards
        made.rows_limit = _REVERSED_MAX if forward else rows_max + 1  # the next page begins with the last of these
        made.reversed = reverse and not forward
        within = made.rows.row_ranges.add()
        within.start_key_closed = row_key(table, start)
        within.end_key_open = table_end(table) if stop is None else row_key(table, stop)
        [answer] = await self._ask([Scan(made) if forward else Scan(made, bytes_max, True)])
        found = answer.rows
        if forward:
            if len(found) >= _REVERSED_MAX:
                raise Unavailable(f"{self.place.shown}: this server cannot scan so many rows in reverse")
            found = found[::-1]
        rows: list[ScanRow] = []
        size = 0
        for row in found:
            name = row_of(table, row.key)
            if len(rows) == rows_max or size >= bytes_max:
                return ScanPage(rows, name + b"\x00" if reverse else name)
            at = by_place(row)
            cells = [scanned(at, query) for query in queries]
            size += sum(len(value) for each in cells for _, _, value in each)
            rows.append((name, cells))
        if answer.ended:
            return ScanPage(rows, None)
        passed = row_of(table, answer.passed)
        return ScanPage(rows, passed if reverse else passed + b"\x00")

    async def _scan_hinted(self, request: ScanRequest) -> ScanPage:
        """A page of rows, found by their hints. Needless hints are removed, by one scan at a time (N7)."""
        removes = self.hints.begin_removing()
        try:
            return await self._hinted_page(request, removes=removes)
        finally:
            if removes:
                self.hints.end_removing()

    async def _hinted_page(self, request: ScanRequest, *, removes: bool) -> ScanPage:
        table, start, stop, queries, _, rows_max, bytes_max, _ = request
        rows_max = min(rows_max, _KEYS_MAX)
        asked = self._reading(filters.hints())
        asked.rows_limit = rows_max + 1
        within = asked.rows.row_ranges.add()
        within.start_key_closed = hint_key(table, start)
        within.end_key_open = HINT_KEY + table_end(table) if stop is None else hint_key(table, stop)
        [answer] = await self._ask([Scan(asked)])
        if not answer.rows:
            return ScanPage([], None)
        following = row_of(table, answer.rows[-1].key[len(HINT_KEY) :]) if len(answer.rows) > rows_max else None
        stamps = {row.key[len(HINT_KEY) :]: stamps_of(row.cells) for row in answer.rows[:rows_max]}
        settled = {key: self.hints.settled(seen) for key, seen in stamps.items()}  # before the rows are read (N7)
        made = self._reading(filters.scanning_hinted(queries))
        made.rows.row_keys.extend(stamps)
        [answer] = await self._ask([Scan(made)])
        rows: list[ScanRow] = []
        size = 0
        for row in answer.rows:
            if size >= bytes_max:
                following = row_of(table, row.key)
                break
            at = by_place(row)
            cells = [scanned(at, query) for query in queries]
            if any(cells):
                size += sum(len(value) for each in cells for _, _, value in each)
                rows.append((row_of(table, row.key), cells))
        if removes:
            marked = {row.key for row in answer.rows}
            await self._remove_hints(self.hints.removals(stamps, settled, marked))
        return ScanPage(rows, following)

    async def _remove_hints(self, removals: Sequence[tuple[Any, list[int]]]) -> None:
        """Remove hints. One that is not removed now is found, and removed, again."""
        if removals:
            with trio.CancelScope(shield=True):
                calls = [call for call, _ in removals]
                answers = await self.calls.ask(calls, trio.current_time() + self._options.call_s)
            for (_, stamps), answer in zip(removals, answers, strict=True):
                if not isinstance(answer, BaseException):
                    self.hints.removed_all(stamps)

    async def _ask(self, calls: Sequence[Scan]) -> list[Scanned]:
        """Make calls that only read, again if they fail for a moment. Raises: Unavailable, Corruption."""
        self.usable()
        if not calls:
            await trio.lowlevel.checkpoint()
            return []
        deadline = trio.current_time() + self._options.call_s
        answers: list[Scanned | None] = [None] * len(calls)
        left = list(range(len(calls)))
        attempt = 0
        while True:
            failure: CallFailed | None = None
            for index, answer in zip(left, await self.calls.ask([calls[i] for i in left], deadline), strict=True):
                if isinstance(answer, Scanned):
                    answers[index] = answer
                elif not isinstance(answer, CallFailed):
                    raise answer
                elif failure is None or answer.code not in _AGAIN:
                    failure = answer
            self.check()  # G1: the next owner may remove what only this process still reads
            if failure is None:
                return answers  # type: ignore[return-value]
            left = [index for index in left if answers[index] is None]
            pause = _pause(attempt)
            attempt += 1
            if failure.code not in _AGAIN or trio.current_time() + pause > deadline:
                raise self.told(failure) from failure
            await trio.sleep(pause)

    def told(self, error: CallFailed) -> PercoError:
        """The error of perco's for one of Bigtable's."""
        shown = self.place.shown
        if error.code in _NOT_DONE:
            return Unavailable(
                f"{shown} refuses: {error}", remedy=_REMEDIES.get(error.code, "The message is Bigtable's.")
            )
        return Unavailable(f"{shown} does not answer: {error}")

    # ------------------------------------------------------------ mutations

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        """The verdict of each mutation. Cancelled before the first is sent, or not at all (T10)."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self.usable()
        for mutation in mutations:  # an error here means that nothing was sent
            self.locate(mutation.table, b"")
            assert len(mutation.rows) == 1, "S1: this store has no groups"
        verdicts: list[Verdict | None] = [None] * len(mutations)
        with trio.CancelScope(shield=True):
            deadline = trio.current_time() + self._options.call_s
            turns = _turns(mutations)
            if not turns:
                await trio.lowlevel.checkpoint()
            for turn in turns:
                await self._apply_turn(mutations, turn, verdicts, deadline)
        return verdicts  # type: ignore[return-value]

    async def _apply_turn(
        self, mutations: Sequence[Mutation], turn: Sequence[int], verdicts: list[Verdict | None], deadline: float
    ) -> None:
        """Apply mutations of different rows, side by side."""
        left, calls = [], []
        for index in turn:
            mutation = mutations[index]
            try:
                self.check()
                call = self._call(mutation)
            except PercoError as error:
                verdicts[index] = Failed(error)
                continue
            if call is None:
                verdicts[index] = await self._only_checked(mutation)
                continue
            left.append(index)
            calls.append(call)
        hints = await self._hint(mutations, left, calls, verdicts, deadline)
        if hints:
            try:
                self.check()  # as before the hint: they must not be far apart (N7)
            except PercoError as error:
                for index in left:
                    verdicts[index] = Failed(error)
                left, calls = [], []
        refused = await self._send(left, calls, verdicts, deadline)
        if refused:
            await self._explain(mutations, refused, verdicts, deadline)
        self._must_own(left, verdicts)
        for index, stamp in hints.items():
            self.hints.end(stamp, answered=not isinstance(verdicts[index], NoReply))

    async def _send(
        self, indices: Sequence[int], calls: Sequence[Any], verdicts: list[Verdict | None], deadline: float
    ) -> list[int]:
        """Make the calls of these mutations, and note their verdicts; returns those that were refused."""
        refused: list[int] = []
        if not calls:
            return refused
        for index, call, answer in zip(indices, calls, await self.calls.ask(calls, deadline), strict=True):
            if isinstance(answer, CallFailed):
                verdicts[index] = self._unanswered(answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif isinstance(call, types().MutateRow) or _is_made(call, answer):
                verdicts[index] = APPLIED
            else:
                refused.append(index)
        return refused

    def _must_own(self, sent: Sequence[int], verdicts: list[Verdict | None]) -> None:
        """Acknowledge mutations only if this process owned the store until now: then the next owner, which reads the
        catalogue and the pins when it claims the store, has seen them (O1)."""
        try:
            self.check()
        except PercoError as error:
            for index in sent:
                if verdicts[index] is APPLIED:
                    verdicts[index] = NoReply(f"it was made, but perhaps too late: {error}")

    async def _hint(
        self,
        mutations: Sequence[Mutation],
        left: list[int],
        calls: list[Any],
        verdicts: list[Verdict | None],
        deadline: float,
    ) -> dict[int, int]:
        """Write the hints of these mutations (N7); returns the stamp of each, by index. A mutation whose hint could not
        be written is taken out of `left` and `calls`: it must not be sent."""
        stamps, writing = {}, []
        for index in left:
            if wants_hint(mutations[index]):
                stamps[index], call = self.hints.begin(mutations[index])
                writing.append(call)
        if not writing:
            return stamps
        missing = dict(zip(stamps, writing, strict=True))
        attempt = 0
        while missing:  # to write a hint again does no harm
            failed: dict[int, CallFailed] = {}
            answers = await self.calls.ask(list(missing.values()), deadline)
            for index, answer in zip(list(missing), answers, strict=True):
                if isinstance(answer, CallFailed):
                    failed[index] = answer
                elif isinstance(answer, BaseException):
                    raise answer
            pause = _pause(attempt)
            attempt += 1
            again = trio.current_time() + pause <= deadline
            for index, failure in failed.items():
                if failure.code not in _AGAIN or not again:
                    verdicts[index] = Failed(self.told(failure))
                    del calls[left.index(index)]
                    left.remove(index)
            missing = {index: missing[index] for index in failed if verdicts[index] is None}
            if missing:
                await trio.sleep(pause)
        return stamps

    def _unanswered(self, failure: CallFailed) -> Verdict:
        if not failure.sent or failure.code in _NOT_DONE:
            return Failed(self.told(failure))
        return NoReply(f"Bigtable did not answer: {failure}")

    def _call(self, mutation: Mutation) -> Any:
        """The call that makes a mutation; None: it writes nothing. Raises: UsageError, Corruption."""
        row, checks, writes = mutation.rows[0]
        if not writes:
            return None
        made = [self._written(mutation.table, write) for write in _last_of_each(writes)]
        where = {
            "table_name": self.place.table,
            "app_profile_id": self.place.app_profile,
            "row_key": row_key(mutation.table, row),
        }
        predicate = filters.predicate(checks)
        if predicate is None:
            return types().MutateRow(**where, mutations=made)
        side = "true_mutations" if predicate.writes_if_found else "false_mutations"
        return types().CheckAndMutateRow(**where, predicate_filter=predicate.filter, **{side: made})

    def _written(self, table: str, write: Write) -> Any:
        group, column, ts, value = write
        if (table, group) not in self._groups:
            raise Corruption(self.place.shown, f"there is no locality group {group!r}")
        if not 0 <= ts <= TS_MAX:
            raise UsageError(f"{ts} is no timestamp of a cell")
        where = {"family_name": place_of(group)[0], "column_qualifier": qualifier(group, column)}
        if value is None:
            stamps = {"start_timestamp_micros": micros(ts), "end_timestamp_micros": micros(ts + 1)}
            return types().Mutation(delete_from_column={**where, "time_range": stamps})
        return types().Mutation(set_cell={**where, "timestamp_micros": micros(ts), "value": value})

    async def _explain(
        self,
        mutations: Sequence[Mutation],
        refused: Sequence[int],
        verdicts: list[Verdict | None],
        deadline: float,
    ) -> None:
        """Find out which check of each refused mutation does not hold: Bigtable tells only that one does not. If all
        hold by now, the mutation is sent again."""
        for attempt in range(1 << 30):
            try:
                found = await self._failing([mutations[index] for index in refused])
            except PercoError as error:
                for index in refused:
                    verdicts[index] = Failed(error)  # it has written nothing
                return
            again = []
            for index, failing in zip(refused, found, strict=True):
                if failing >= 0:
                    verdicts[index] = Refused(0, failing)
                elif trio.current_time() > deadline:
                    verdicts[index] = Failed(Unavailable(f"{self.place.shown}: others change this row all the time"))
                else:
                    again.append(index)
            if not again:
                return
            await trio.sleep(_pause(attempt))
            calls = [self._call(mutations[index]) for index in again]
            refused = await self._send(again, calls, verdicts, deadline)
            if not refused:
                return

    async def _failing(self, mutations: Sequence[Mutation]) -> list[int]:
        """For each mutation the first check that does not hold now; -1: all do."""
        requests: list[ReadRequest] = []
        for mutation in mutations:
            row, checks, _ = mutation.rows[0]
            requests.append((mutation.table, row, [(group, col, low, high, 1) for _, group, col, low, high in checks]))
        out = []
        for mutation, cells in zip(mutations, await self.read(requests), strict=True):
            checks = mutation.rows[0][1]
            out.append(next((i for i, check in enumerate(checks) if not _holds(check, cells[i])), -1))
        return out

    async def _only_checked(self, mutation: Mutation) -> Verdict:
        """The verdict of a mutation that writes nothing: Bigtable refuses such a call."""
        try:
            [failing] = await self._failing([mutation])
        except PercoError as error:
            return Failed(error)
        return APPLIED if failing < 0 else Refused(0, failing)


def _is_made(call: Any, answer: Any) -> bool:
    return bool(answer.predicate_matched) == bool(call.true_mutations)


def _holds(check: Check, found: Sequence[Cell]) -> bool:
    return bool(found) != (check[0] == ABSENT)


def _pause(attempt: int) -> float:
    longest = min(_PAUSE_S * 2.0 ** min(attempt, 10), _PAUSE_MAX_S)
    return random.uniform(0.5, 1.0) * longest


def _turns(mutations: Sequence[Mutation]) -> list[list[int]]:
    """The mutations by index: those of a turn have different rows, and are sent side by side."""
    turns: list[list[int]] = []
    seen: dict[tuple[str, bytes], int] = {}
    for index, mutation in enumerate(mutations):
        where = mutation.table, mutation.rows[0][0]
        turn = seen[where] = seen.get(where, -1) + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(index)
    return turns


def _last_of_each(writes: Sequence[Write]) -> list[Write]:
    """A cell that is written twice in a mutation has the last value."""
    if len(writes) == 1:
        return list(writes)
    return list({(group, column, ts): (group, column, ts, value) for group, column, ts, value in writes}.values())
