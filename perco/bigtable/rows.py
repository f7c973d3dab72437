"""The rows of a store on Bigtable: reads, scans, and mutations of single rows.

S1  A mutation of a row is one call of CheckAndMutateRow, which is atomic. There are no groups. Two mutations of one row
    in one call of `apply` are made one after the other, in order.
S4  If Bigtable refuses a mutation because of its contents (for example, if it is too large), only this mutation fails.
T4  If no answer comes, the mutation may have been applied, and its verdict is `NoReply`. This module does not send it
    again. For `BigtableOptions.late_s` after the call has ended, it may still be applied.
T13 See `Bare`: the owner sends no mutation below the floor. Nor does a client (`client.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

import trio

from perco.bigtable import filters
from perco.bigtable.address import Place
from perco.bigtable.calls import CallFailed, Scan, Scanned
from perco.bigtable.hints import Hint, Hints, hint_key, is_hinted, wants_hint
from perco.bigtable.keys import (
    HINT_KEY,
    MICROS,
    PROTOCOL_FAMILY,
    micros,
    place_of,
    qualifier,
    row_key,
    row_of,
    table_end,
)
from perco.bigtable.options import BigtableOptions
from perco.bigtable.reading import Shape, by_place, chosen, scanned, shape_of, shared
from perco.bigtable.repeating import AGAIN, FIRST, NOT_DONE, Repeating, pause_of
from perco.bigtable.sampling import cuts
from perco.bigtable.wire import types
from perco.errors import Corruption, FormatUnknown, PercoError, Unavailable, UsageError
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import (
    ABSENT,
    APPLIED,
    DATA,
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
from perco.storage.lease import now

_KEYS_MAX: Final = 100  # keys in one call; if there are more, several calls are made side by side
_REVERSED_MAX: Final = 1 << 16  # rows read forward, at most, if the server cannot read in reverse


FORMAT: Final = 1
FORMAT_ROW: Final = b"format"  # in the system table
_PROBES: Final = [row_key("a probe", row) for row in (b"1", b"2")]  # no perco table has such a name


def probes(place: Place) -> list[Any]:
    """The calls that write two rows. The order in which the server returns them shows whether it reads in reverse."""
    cell = {"family_name": PROTOCOL_FAMILY, "column_qualifier": b"probe", "timestamp_micros": MICROS, "value": b""}
    where = {"table_name": place.table, "app_profile_id": place.app_profile}
    mutations = [types().Mutation(set_cell=cell)]
    return [types().MutateRow(**where, row_key=key, mutations=mutations) for key in _PROBES]


class Attempt(NamedTuple):
    """Limits of the calls for some mutations. `until`: when the calls must end, by `now()`, which also counts the time
    for which the machine is suspended. `check`: raises an error if no more calls may be sent."""

    until: float
    check: Callable[[], None]

    @property
    def deadline(self) -> float:
        """`until` on trio's clock, computed now."""
        return trio.current_time() + self.until - now()


class BigtableRows(Repeating):
    """All rows of a store. Loop thread only.

    Attributes:
        check: set by the store. Raises what `usable` raises, and an error if this process may no longer own the store
            (O1).
        backwards: whether the server reads rows in reverse.
    """

    hints: Hints
    backwards: bool

    groups = False
    once = False
    logs = False
    near = False
    chaining = None
    deferring = None
    prompt = None

    def __init__(self, place: Place, options: BigtableOptions) -> None:
        super().__init__(place, options)
        self.hints = Hints(place, options)
        self._tables: dict[str, int] = {}
        self._groups: set[tuple[str, str]] = set()
        self.backwards = True
        self.check: Callable[[], None] = lambda: None

    def add(self, table: str, groups: Sequence[str]) -> None:
        """Register a table and its groups."""
        self._tables.setdefault(table, len(self._tables))
        self._groups.update((table, group) for group in (*PROTOCOL_GROUPS, *groups))

    def _has(self, table: str, group: str) -> bool:
        return (table, group) in self._groups

    def tables(self) -> list[str]:
        return list(self._tables)

    def tablets_here(self) -> Sequence[Tablet]:
        return ()

    def locate(self, table: str, row: bytes) -> int:
        """Here, a table is one tablet: perco does not ask for Bigtable's own tablets."""
        found = self._tables.get(table)
        if found is None:
            raise UsageError(f"there is no table {table!r} in this store; declare it in the schema")
        return found

    def bounds(self, table: str) -> list[bytes]:
        self.locate(table, b"")
        return [b""]

    async def sample(self, table: str, pieces: int) -> list[bytes]:
        """See `TicketRows.sample`. Raises: Unavailable."""
        self.locate(table, b"")
        request = types().SampleRowKeys(table_name=self.place.table, app_profile_id=self.place.app_profile)
        [answer] = await self._repeat([request], self.check)
        return cuts(table, [(each.row_key, each.offset_bytes) for each in answer], pieces)

    # ------------------------------------------------------------ reads

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        """Read cells of rows, each row as of one moment. Raises: Unavailable."""
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
        await self._read_plans(requests, left, out)  # a shared call may have left out the versions that these need
        assert all(found is not None for found in out), "a call for a single request leaves nothing out"
        return out  # type: ignore[return-value]

    async def _read_plans(
        self, requests: Sequence[ReadRequest], plans: list[tuple[list[int], list[Query]]], out: list[RowCells | None]
    ) -> None:
        """Make one call for each plan: the indices of requests that share a call, and the queries of that call."""
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

    async def format(self) -> int:
        """The number of the store's format; 0: none is recorded. Raises: Unavailable."""
        [[found]] = await self.read([(SYSTEM_TABLE, FORMAT_ROW, [(DATA, 0, 0, TS_MAX, 1)])])
        return found[0][0] if found else 0

    async def must_have_format(self) -> None:
        """Raises: FormatUnknown, Unavailable."""
        if (found := await self.format()) != FORMAT:
            raise FormatUnknown(self.place.shown, f"format {found}" if found else "no format", f"format {FORMAT}")

    async def look_backwards(self) -> None:
        """Find out whether the server reads rows in reverse. Make the calls of `probes` first. A server that does not
        know the field `reversed` ignores it, and reads forward. Raises: Unavailable."""
        request = types().ReadRows(
            table_name=self.place.table, app_profile_id=self.place.app_profile, reversed=True, rows_limit=2
        )
        request.rows.row_keys.extend(_PROBES)
        [answer] = await self._ask([Scan(request)])
        self.backwards = [row.key for row in answer.rows] == _PROBES[::-1]

    def _reading(self, row_filter: Any) -> Any:
        return types().ReadRows(table_name=self.place.table, app_profile_id=self.place.app_profile, filter=row_filter)

    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        """See `RowStore.read_first`."""
        return await read_in_parts(self.read, requests, bytes_max)

    async def scan(self, request: ScanRequest) -> ScanPage:
        """Read a page of rows, each row as of one moment. Raises: Unavailable."""
        table, start, stop, queries, reverse, rows_max, bytes_max, seeks_max, _ = request
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
        made.rows_limit = _REVERSED_MAX if forward else rows_max + 1  # the next page begins at the extra row
        made.reversed = reverse and not forward
        within = made.rows.row_ranges.add()
        within.start_key_closed = row_key(table, start)
        within.end_key_open = table_end(table) if stop is None else row_key(table, stop)
        [answer] = await self._ask([Scan(made) if forward else Scan(made, bytes_max, True)])
        found = answer.rows
        if forward:
            if len(found) >= _REVERSED_MAX:
                raise Unavailable(
                    f"{self.place.shown}: this server cannot scan so many rows in reverse",
                    remedy="Scan a smaller range, or forward. Bigtable itself has no such limit.",
                )
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
        """Read a page of rows that hints lead to. Needless hints are removed (N7)."""
        table, start, stop, queries, _, rows_max, bytes_max, *_ = request
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
        removable = {row.key[len(HINT_KEY) :]: self.hints.removable(row.cells) for row in answer.rows[:rows_max]}
        made = self._reading(filters.scanning_hinted(queries))
        made.rows.row_keys.extend(removable)
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
        marked = {row.key for row in answer.rows}
        await self._remove_hints(self.hints.needless(removable, marked), marked)
        return ScanPage(rows, following)

    async def _remove_hints(self, needless: dict[bytes, list[Hint]], marked: Collection[bytes]) -> None:
        """Remove hints (N7). If this fails for a hint, a later scan finds the hint and tries again."""
        if not needless:
            return
        if replaced := [key for key in needless if key in marked]:
            answers = await self.calls.ask([self.hints.replacement(key) for key in replaced], self._until())
            for key, answer in zip(replaced, answers, strict=True):
                if isinstance(answer, BaseException):
                    del needless[key]
        if needless:
            calls = [self.hints.removal(key, found) for key, found in needless.items()]
            answers = await self.calls.ask(calls, self._until())
            for found, answer in zip(needless.values(), answers, strict=True):
                if not isinstance(answer, BaseException):
                    self.hints.gone(found)

    async def _ask(self, calls: Sequence[Scan]) -> list[Scanned]:
        """Make calls that only read; repeat those that fail temporarily. Raises: Unavailable, Corruption."""
        return await self._repeat(calls, self.check)  # G1: a new owner may remove what only this process still reads

    # ------------------------------------------------------------ mutations

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        """Apply mutations; returns the verdict of each. The call can be cancelled only until the first mutation is sent
        (T10)."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self.usable()
        self._must_fit(mutations)
        verdicts: list[Verdict | None] = [None] * len(mutations)
        all_turns = turns(mutations, range(len(mutations)))
        await self._apply_all(mutations, all_turns, verdicts, Attempt(now() + self._options.call_s, self.check))
        return verdicts  # type: ignore[return-value]

    def _must_fit(self, mutations: Sequence[Mutation]) -> None:
        """Check the tables of mutations before any mutation is sent. Raises: UsageError."""
        for mutation in mutations:
            self.locate(mutation.table, b"")
            assert len(mutation.rows) == 1, "S1: this store has no groups"

    async def _apply_all(
        self,
        mutations: Sequence[Mutation],
        in_turn: Sequence[Sequence[int]],
        verdicts: list[Verdict | None],
        attempt: Attempt,
    ) -> None:
        with trio.CancelScope(shield=True):
            if not in_turn:
                await trio.lowlevel.checkpoint()
            for turn in in_turn:
                await self._apply_turn(mutations, turn, verdicts, attempt)

    async def _apply_turn(
        self,
        mutations: Sequence[Mutation],
        turn: Sequence[int],
        verdicts: list[Verdict | None],
        attempt: Attempt,
    ) -> None:
        """Apply mutations of different rows, side by side."""
        left, calls = [], []
        for index in turn:
            mutation = mutations[index]
            try:
                attempt.check()
                call = self._call(mutation)
            except PercoError as error:
                verdicts[index] = Failed(error)
                continue
            if call is None:
                verdicts[index] = await self._only_checked(mutation)
                continue
            left.append(index)
            calls.append(call)
        stamps: dict[int, int] = {}
        try:
            await self._hint(mutations, left, calls, verdicts, attempt, stamps)
            try:
                attempt.check()  # writing hints took time, and so did mutations that only check
            except PercoError as error:
                for index in left:
                    verdicts[index] = Failed(error)
                left, calls = [], []
            refused = await self._send(left, calls, verdicts, attempt.deadline)
            if refused:
                await self._explain(mutations, refused, verdicts, attempt)
        finally:
            for index, stamp in stamps.items():
                answered = verdicts[index] is not None and not isinstance(verdicts[index], NoReply)
                self.hints.end(stamp, answered=answered)
        self._acknowledge(left, verdicts)

    async def _send(
        self, indices: Sequence[int], calls: Sequence[Any], verdicts: list[Verdict | None], deadline: float
    ) -> list[int]:
        """Make the calls of the mutations with these indices, and note their verdicts. Returns the indices of the
        mutations that Bigtable has refused."""
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

    def _acknowledge(self, sent: Sequence[int], verdicts: list[Verdict | None]) -> None:
        """Turn the acknowledgements of mutations into `NoReply` unless this process has owned the store until now. So
        the next owner, which reads the catalogue and the pins when it claims the store, sees every acknowledged write
        (O1)."""
        try:
            self.check()
        except PercoError as error:
            for index in sent:
                if verdicts[index] is APPLIED:
                    verdicts[index] = NoReply(f"applied, but perhaps too late for the next owner: {error}")

    async def _hint(
        self,
        mutations: Sequence[Mutation],
        left: list[int],
        calls: list[Any],
        verdicts: list[Verdict | None],
        attempt: Attempt,
        stamps: dict[int, int],
    ) -> None:
        """Write the hints of these mutations (N7), and note in `stamps` each hint's stamp by the mutation's index. If a
        hint cannot be written, its mutation is taken out of `left` and `calls`, because it must not be sent. Writing
        the hints takes at most half of the time that is left, because the other mutations wait for it."""
        missing: dict[int, Any] = {}
        for index in left:
            if wants_hint(mutations[index]):
                stamps[index], missing[index] = self.hints.begin(mutations[index])
        until = (trio.current_time() + attempt.deadline) / 2
        attempt_s = (until - trio.current_time()) / FIRST
        round = 0
        while missing:  # writing a hint again does no harm
            failed: dict[int, CallFailed] = {}
            answers = await self.calls.ask(list(missing.values()), min(until, trio.current_time() + attempt_s))
            for index, answer in zip(list(missing), answers, strict=True):
                if isinstance(answer, CallFailed):
                    failed[index] = answer
                elif isinstance(answer, BaseException):
                    raise answer
            pause = pause_of(round)
            round += 1
            attempt_s *= 2
            again = trio.current_time() + pause <= until
            for index, failure in list(failed.items()):
                if failure.code not in AGAIN or not again:
                    verdicts[index] = Failed(self.told(failure))
                    del calls[left.index(index)], failed[index]
                    left.remove(index)
            missing = {index: missing[index] for index in failed}
            if missing:
                await trio.sleep(pause)

    def _unanswered(self, failure: CallFailed) -> Verdict:
        if not failure.sent or failure.code in NOT_DONE:
            return Failed(self.told(failure))
        return NoReply(f"Bigtable did not answer: {failure}")

    def _call(self, mutation: Mutation) -> Any:
        """The call that applies a mutation; None: the mutation writes nothing. Raises: UsageError, Corruption."""
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
        if not self._has(table, group):
            raise Corruption(self.place.shown, f"there is no locality group {group!r}")
        if not 0 <= ts <= TS_MAX:
            raise UsageError(f"{ts} is not a valid timestamp of a cell")
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
        attempt: Attempt,
    ) -> None:
        """Find out which check of each refused mutation failed, because Bigtable says only that one of them did. If all
        checks of a mutation hold by now, it is sent again."""
        for round in range(1 << 30):
            try:
                found = await self._failing([mutations[index] for index in refused])
                attempt.check()
            except PercoError as error:
                for index in refused:
                    verdicts[index] = Failed(error)  # a refused mutation has written nothing
                return
            again = []
            for index, failing in zip(refused, found, strict=True):
                if failing >= 0:
                    verdicts[index] = Refused(0, failing)
                elif trio.current_time() > attempt.deadline:
                    verdicts[index] = Failed(Unavailable(f"{self.place.shown}: other processes keep changing this row"))
                else:
                    again.append(index)
            if not again:
                return
            await trio.sleep(pause_of(round))
            try:
                attempt.check()
            except PercoError as error:
                for index in again:
                    verdicts[index] = Failed(error)
                return
            calls = [self._call(mutations[index]) for index in again]
            refused = await self._send(again, calls, verdicts, attempt.deadline)
            if not refused:
                return

    async def _failing(self, mutations: Sequence[Mutation]) -> list[int]:
        """For each mutation, the index of the first check that does not hold now; -1: all checks hold."""
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
        """The verdict of a mutation that only checks, from a read: Bigtable refuses a call that writes nothing."""
        try:
            [failing] = await self._failing([mutation])
        except PercoError as error:
            return Failed(error)
        return APPLIED if failing < 0 else Refused(0, failing)


def _is_made(call: Any, answer: Any) -> bool:
    return bool(answer.predicate_matched) == bool(call.true_mutations)


def _holds(check: Check, found: Sequence[Cell]) -> bool:
    return bool(found) != (check[0] == ABSENT)


def turns(mutations: Sequence[Mutation], wanted: Iterable[int]) -> list[list[int]]:
    """Divide the mutations with these indices into turns. The mutations of one turn have different rows, and are sent
    side by side; one turn is sent after another."""
    out: list[list[int]] = []
    seen: dict[tuple[str, bytes], int] = {}
    for index in wanted:
        where = mutations[index].table, mutations[index].rows[0][0]
        turn = seen[where] = seen.get(where, -1) + 1
        if turn == len(out):
            out.append([])
        out[turn].append(index)
    return out


def _last_of_each(writes: Sequence[Write]) -> list[Write]:
    """The writes without those that a later write of the same cell replaces."""
    if len(writes) == 1:
        return list(writes)
    return list({(group, column, ts): (group, column, ts, value) for group, column, ts, value in writes}.values())
