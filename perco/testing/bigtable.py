"""A Bigtable table in memory, for the simulation. It promises what Bigtable promises, and nothing more.

- A call that changes a row is atomic, and a read sees each row as of one moment between the call and its answer.
- A read of several rows sees each row at a moment of its own; these moments have no particular order.
- A call that fails may have been carried out. It may also be carried out later, even after its process has died, but no
  later than `late_s` after the call has ended.
- An answer may come after the deadline, when its caller no longer waits for it.
- The order of a row's families is unknown.

perco builds Google's messages (filters, mutations, sets of rows), and this module evaluates them. A message of a kind
that perco never sends raises an error.
"""

from __future__ import annotations

import bisect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from random import Random
from typing import Any, Final, TypeAlias

import trio

from perco.bigtable.calls import Answer, CallFailed, Scan, Scanned
from perco.bigtable.chunks import ReadCell, ReadRow
from perco.bigtable.keys import MICROS
from perco.bigtable.wire import types

FILTER_BYTES_MAX: Final = 20_480

_Filter: TypeAlias = Callable[[list[ReadCell]], list[ReadCell]]


class Table:
    """The rows of a table.

    Args:
        rng: decides what Bigtable does not promise: when each row of a read is read, and the order of families.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._rows: dict[bytes, dict[tuple[str, bytes], dict[int, bytes]]] = {}
        self._keys: list[bytes] = []  # sorted
        self._sign = rng.choice((1, -1))
        self._filters: dict[bytes, _Filter] = {}

    # ------------------------------------------------------------ reads

    def cells(self, key: bytes) -> list[ReadCell]:
        """All cells of a row, in Bigtable's order: by family, then by qualifier, then newest first."""
        found = [
            ReadCell(family, name, stamp, value)
            for (family, name), stamps in self._rows.get(key, {}).items()
            for stamp, value in stamps.items()
        ]
        found.sort(key=self._place)
        return found

    def _place(self, cell: ReadCell) -> tuple[int, bytes, int]:
        return self._sign * ord(cell.family), cell.name, -cell.micros

    def in_order(self) -> list[bytes]:
        return list(self._keys)

    def _following(self, request: Any) -> Iterator[bytes]:
        """Yields the keys of a request one by one. Rows that are created meanwhile may or may not be among them."""
        asked = request.rows
        assert bool(asked.row_keys) != bool(asked.row_ranges), "keys, or ranges"
        if asked.row_keys:
            yield from sorted(set(asked.row_keys), reverse=request.reversed)
            return
        [within] = asked.row_ranges
        start, stop = within.start_key_closed, within.end_key_open
        assert start, "a range begins with a key"
        assert stop > start, "Bigtable refuses an empty range"
        if request.reversed:
            at = stop
            while (index := bisect.bisect_left(self._keys, at)) and self._keys[index - 1] >= start:
                at = self._keys[index - 1]
                yield at
            return
        index = bisect.bisect_left(self._keys, start)
        while index < len(self._keys) and self._keys[index] < stop:
            key = self._keys[index]
            yield key
            index = bisect.bisect_right(self._keys, key)

    async def read(self, scan: Scan, pause: Callable[[], Awaitable[None]], part: int = 1 << 30) -> Scanned:
        """Read rows, each at a moment of its own. `part`: stop after this many rows, with an incomplete answer."""
        request = scan.request
        let_through = self._filter(request.filter)
        rows: list[ReadRow] = []
        passed, size = b"", 0
        found: dict[bytes, list[ReadCell]] = {}
        keys = list(self._following(request)) if request.rows.row_keys else None
        if keys is not None and len(keys) > 1:  # they are read in any order
            for key in self._rng.sample(keys, len(keys)):
                await pause()
                found[key] = let_through(self.cells(key))
        for key in keys or self._following(request):
            if key not in found:
                await pause()
                found[key] = let_through(self.cells(key))
            passed = key
            if found[key]:
                rows.append(ReadRow(key, found[key]))
                size += sum(len(cell.value) for cell in found[key])
            if request.rows_limit and len(rows) >= request.rows_limit:
                break
            if len(rows) >= part or (scan.bytes_max and size >= scan.bytes_max):
                return Scanned(rows, passed, False)
        return Scanned(rows, passed, True)

    def read_now(self, request: Any) -> list[ReadRow]:
        """Read rows without a pause."""
        let_through = self._filter(request.filter)
        found = [ReadRow(key, let_through(self.cells(key))) for key in self._following(request)]
        return [row for row in found if row.cells]

    # ------------------------------------------------------------ filters

    def _filter(self, wanted: Any) -> _Filter:
        written = wanted.SerializeToString(deterministic=True)
        assert len(written) <= FILTER_BYTES_MAX, "Bigtable takes no longer filter"
        made = self._filters.get(written)
        if made is None:
            made = self._filters[written] = self._made(wanted)
        return made

    def _made(self, wanted: Any) -> _Filter:
        kind = wanted.WhichOneof("filter")
        value: Any = kind and getattr(wanted, kind)
        match kind:
            case None:
                return lambda cells: cells
            case "chain":
                assert len(value.filters) >= 2, "Bigtable refuses a shorter chain"
                parts = [self._made(each) for each in value.filters]

                def chained(cells: list[ReadCell]) -> list[ReadCell]:
                    for part in parts:
                        cells = part(cells)
                    return cells

                return chained
            case "interleave":
                assert len(value.filters) >= 2, "Bigtable refuses a shorter interleave"
                branches = [self._made(each) for each in value.filters]
                return lambda cells: sorted((cell for each in branches for cell in each(cells)), key=self._place)
            case "column_range_filter":
                return _columns(value)
            case "timestamp_range_filter":
                low, high = value.start_timestamp_micros, value.end_timestamp_micros or 1 << 63
                assert low % MICROS == 0, "Bigtable takes whole milliseconds"
                assert high == 1 << 63 or high % MICROS == 0, "Bigtable takes whole milliseconds"
                return lambda cells: [cell for cell in cells if low <= cell.micros < high]
            case "cells_per_column_limit_filter":
                return lambda cells: _newest(cells, value)
            case "cells_per_row_limit_filter":
                return lambda cells: cells[:value]
            case "cells_per_row_offset_filter":
                return lambda cells: cells[value:]
            case "strip_value_transformer":
                return lambda cells: [cell._replace(value=b"") for cell in cells]
            case "block_all_filter":
                return lambda cells: []
        raise AssertionError(f"the product sends no such filter: {kind}")

    # ------------------------------------------------------------ changes

    def change(self, request: Any) -> Any:
        """Carry out a call now; returns its answer."""
        if isinstance(request, types().MutateRow):
            self._mutate(request.row_key, request.mutations)
            return types().MutateRowResponse()
        assert isinstance(request, types().CheckAndMutateRow)
        matched = bool(self._filter(request.predicate_filter)(self.cells(request.row_key)))
        self._mutate(request.row_key, request.true_mutations if matched else request.false_mutations, optional=True)
        return types().CheckAndMutateRowResponse(predicate_matched=matched)

    def _mutate(self, key: bytes, mutations: Sequence[Any], *, optional: bool = False) -> None:
        assert mutations or optional, "Bigtable refuses a call that changes nothing"
        columns = self._rows.setdefault(key, {})
        for mutation in mutations:
            kind = mutation.WhichOneof("mutation")
            value = getattr(mutation, kind)
            if kind == "set_cell":
                assert value.timestamp_micros >= 0, "the server must not choose a timestamp"
                assert value.timestamp_micros % MICROS == 0, "Bigtable takes whole milliseconds"
                columns.setdefault((value.family_name, value.column_qualifier), {})[value.timestamp_micros] = (
                    value.value
                )
            elif kind == "delete_from_column":
                there = columns.get((value.family_name, value.column_qualifier), {})
                low, high = value.time_range.start_timestamp_micros, value.time_range.end_timestamp_micros or 1 << 63
                for stamp in [stamp for stamp in there if low <= stamp < high]:
                    del there[stamp]
            elif kind == "delete_from_row":
                columns.clear()
            else:
                raise AssertionError(f"the product sends no such mutation: {kind}")
        for name in [name for name, stamps in columns.items() if not stamps]:
            del columns[name]
        at = bisect.bisect_left(self._keys, key)
        known = at < len(self._keys) and self._keys[at] == key
        if columns and not known:
            self._keys.insert(at, key)
        elif not columns:
            del self._rows[key]
            if known:
                del self._keys[at]


def _columns(wanted: Any) -> _Filter:
    family, start = wanted.family_name, wanted.start_qualifier_closed
    closed = wanted.WhichOneof("end_qualifier") == "end_qualifier_closed"
    stop = wanted.end_qualifier_closed if closed else wanted.end_qualifier_open
    if closed:
        return lambda cells: [cell for cell in cells if cell.family == family and start <= cell.name <= stop]
    return lambda cells: [cell for cell in cells if cell.family == family and start <= cell.name < stop]


def _newest(cells: list[ReadCell], limit: int) -> list[ReadCell]:
    out: list[ReadCell] = []
    before, count = ("", b""), 0
    for cell in cells:
        column = cell.family, cell.name
        count = count + 1 if column == before else 1
        before = column
        if count <= limit:
            out.append(cell)
    return out


class PromptCalls:
    """Replaces `bigtable.calls.Calls`, without a network: each call is carried out at once."""

    made: int

    def __init__(self, table: Table) -> None:
        self._table = table
        self.made = 0
        self._closed = False

    def close(self, closed: Callable[[], object] = lambda: None) -> None:
        """See `bigtable.calls.Calls`."""
        self._closed = True
        closed()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    async def ask(self, requests: Sequence[Any], deadline: float) -> list[Answer]:
        """See `bigtable.calls.Calls`."""
        await trio.lowlevel.checkpoint()
        if self._closed:
            return [CallFailed("CANCELLED", "the store has been closed", sent=False) for _ in requests]
        self.made += len(requests)
        return [await self._answer(request) for request in requests]

    async def _answer(self, request: Any) -> Answer:
        if isinstance(request, Scan):
            return await self._table.read(request, trio.lowlevel.checkpoint)
        return self._table.change(request)


class PromptChannel:
    """Replaces the gRPC channel for the calls of a lease, without a network."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def unary_unary(self, name: str, **_: Any) -> Callable[..., Any]:
        return lambda request, **_: self._table.change(request)

    def unary_stream(self, name: str, **_: Any) -> Callable[..., Any]:
        return lambda request, **_: [Response(self._table.read_now(request))]

    def close(self) -> None: ...


class Response:
    """A message of a `ReadRows` stream, with these rows."""

    chunks: Any
    last_scanned_row_key: bytes

    def __init__(self, rows: Sequence[ReadRow]) -> None:
        made = types().ReadRowsResponse()
        for row in rows:
            for number, cell in enumerate(row.cells, 1):
                chunk = made.chunks.add(row_key=row.key, timestamp_micros=cell.micros, value=cell.value)
                chunk.family_name.value = cell.family
                chunk.qualifier.value = cell.name
                chunk.commit_row = number == len(row.cells)
        self.chunks, self.last_scanned_row_key = made.chunks, b""
