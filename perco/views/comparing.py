"""Compares views with what their functions give now: what would a new definition change?

Each view is compared by itself: its function is called with the inputs that the store has, even if these are rows of
another view that differ as well. So each view's own changes show, and a part of the owners can be looked at. (To check
the whole chain of views from its sources, see `checking.py`.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Final

import perco.aio
import perco.aio.calling
import perco.sync
import perco.sync.calling
from perco.errors import UsageError
from perco.schema.schema import Column, Table
from perco.txn.inside import engine_of
from perco.txn.row import Row
from perco.txn.snapshot import Snapshot
from perco.views import batch
from perco.views.batch import Puts
from perco.views.cached import find
from perco.views.checking import Difference, shown_values, stored_values
from perco.views.compiled import CoGrouped, Components, Each, Grouped, Joined, View
from perco.views.declaring import Views
from perco.views.folding import place_in
from perco.views.memory import Given, Memory, Where, fill, given, laters
from perco.views.running import earlier

_ROWS_AT_ONCE: Final = 256
_PROGRESS_EACH: Final = 1000  # owners


@dataclass(frozen=True, slots=True)
class Failure:
    """A view's function failed. Attributes: `owner`: of the call; of `by=`, `on=` or `to=`, the row's key."""

    owner: Any
    error: Exception


@dataclass(slots=True)
class Diff:
    """The difference between a view's tables and what its function gives now.

    Attributes:
        owners: source rows, groups or left rows that were looked at.
        same, added, changed, removed: rows of its tables.
        strays: rows that are there though no owner gives or gave them: a new version leaves them, and `rebuild` deletes
            them. 0 if only a sample was looked at.
        failed: calls of the view's functions that failed, and owners whose runs would fail.
        differences, failures: the first of them.
    """

    view: str
    owners: int = 0
    same: int = 0
    added: int = 0
    changed: int = 0
    removed: int = 0
    strays: int = 0
    failed: int = 0
    differences: list[Difference] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether the tables are what the view gives, and no call failed."""
        return not (self.added or self.changed or self.removed or self.strays or self.failed)


Progress = Callable[[Diff], object]


def _quiet(diff: Diff) -> None:
    pass


async def diff(
    views: Views,
    snap: Snapshot | perco.aio.Snapshot,
    view: str | None = None,
    *,
    sample: float = 1.0,
    differences_max: int = 20,
    progress: Progress = _quiet,
) -> list[Diff]:
    """Compare what the functions of views give now with what the store has. Nothing is written.

    Use it before a new version of a view is deployed: open the store with `perco.open(store, readonly=True)`, without
    a schema, so that the new declarations are not recorded. The store need not know the view yet. `diff_blocking` is
    the same for blocking code.

    The inputs of a group view or a join, and a number for each row of a view, are held in memory; with `sample`, those
    of the part that is looked at.

    Args:
        view: only this one, by its id; by default all, in the order of their declaration.
        sample: which part of the owners to look at, above 0 and at most 1. The same ones each time.
        differences_max: how many differences, and failures, are returned for each view.
        progress: called now and then, with what has been found for the present view.

    Raises: UsageError for an unknown view or an impossible sample; SchemaMismatch if the program's declarations
    contradict the store's. An exception of a view's function is not raised, but counted.
    """
    if isinstance(snap, perco.aio.Snapshot):
        return await perco.aio.calling.ask_for(snap, _diff, views, view, sample, differences_max, progress)
    return await _diff(snap, views, view, sample, differences_max, progress)


def diff_blocking(
    views: Views,
    snap: perco.sync.Snapshot,
    view: str | None = None,
    *,
    sample: float = 1.0,
    differences_max: int = 20,
    progress: Progress = _quiet,
) -> list[Diff]:
    """`diff` for blocking code; `progress` is called on the store's own thread. Raises: as `diff`."""
    return perco.sync.calling.ask_for(snap, _diff, views, view, sample, differences_max, progress)


async def _diff(
    snap: Snapshot, views: Views, view: str | None, sample: float, differences_max: int, progress: Progress
) -> list[Diff]:
    if isinstance(sample, bool) or not isinstance(sample, int | float) or not 0 < sample <= 1:
        raise UsageError(f"sample is a part of the owners, above 0 and at most 1, not {sample!r}")
    chosen = views.chosen(view)
    engine_of(snap).known.catalogue.declare(views.schema)  # a contradiction must be told as it is
    return [await _Comparison(each, views, snap, sample, differences_max, progress).run() for each in chosen]


class _Comparison:
    """Of one view."""

    def __init__(
        self,
        view: View,
        views: Views,
        snap: Snapshot,
        sample: float,
        differences_max: int,
        progress: Progress,
    ) -> None:
        self._view, self._snap, self._sample, self._most, self._progress = view, snap, sample, differences_max, progress
        self._declared = views.schema.tables
        self._found = Diff(view.id)
        self._given: set[int] = set()  # digests of the rows that owners give
        self._waiting: list[tuple[Any, dict[Where, Given], Memory]] = []
        self._rows = 0  # of the owners that wait
        self._known = engine_of(snap).known
        self._seen: dict[Table[Any], int] = dict.fromkeys(view.outputs, 0)  # rows found, by table

    async def run(self) -> Diff:
        found = self._found
        async for owner, puts, stored in self._owned():
            memory = Memory.unpack(stored)
            try:
                after = {} if puts is None else given(self._view.id, puts(), self._view.outputs)
                self._must_be_possible(owner, after, memory)
            except Exception as error:
                self._failed(owner, error)
                continue
            found.owners += 1
            self._waiting.append((owner, after, memory))
            self._rows += len({**after, **memory.rows})
            if self._rows >= _ROWS_AT_ONCE:
                await self._compare()
            if found.owners % _PROGRESS_EACH == 0:
                self._progress(found)
        await self._compare()
        if self._sample == 1 and not found.failed:
            await self._strays()
        self._progress(found)
        return found

    def _must_be_possible(self, owner: Any, after: Mapping[Where, Given], memory: Memory) -> None:
        """Raises: UsageError if the owner's run would fail though its function does not."""
        for name in memory.columns:
            if name not in self._declared:
                raise UsageError(
                    f"an earlier version gave rows of table {name!r}: keep it declared until they have been removed"
                )
        for table, row in after:
            number = _number(table, row)
            if number in self._given:
                key = after[table, row].key
                raise UsageError(f"{table}[{key!r}] is given for another owner, too: a row has one owner")
            self._given.add(number)

    # ------------------------------------------------------------ owners

    async def _owned(self) -> AsyncGenerator[tuple[Any, Puts | None, bytes | None], None]:
        """Each owner that is looked at, a function that returns what it gives, and its memory. No function: the owner
        gives nothing any more."""
        view = self._view
        if isinstance(view, Each):
            async for row, inputs in self._scan(view.table, view.columns, view.memory):
                if self._wanted(row.key):
                    puts = None if inputs is None else next(iter(batch.owned(view, [inputs])))[1]
                    yield row.key, puts, row[view.memory] if self._has(view.memory) else None
            return
        owners = set()
        for owner, puts in await self._several(view):
            owners.add(view.table.row(owner))
            yield owner, puts, await self._memory(owner)
        async for row, _ in self._scan(view.table, (), view.memory):
            if view.table.row(row.key) not in owners and self._wanted(row.key):
                yield row.key, None, row[view.memory]

    async def _several(self, view: Grouped | Joined | CoGrouped | Components) -> Iterable[tuple[Any, Puts]]:
        """The owners that several source rows make."""
        if isinstance(view, Components):
            links = [inputs async for inputs in self._inputs(view.links, view.columns)]
            return [(node, puts) for node, puts in batch.owned(view, links) if self._wanted(node)]
        if isinstance(view, CoGrouped):
            return await self._cogroups(view)
        return await (self._groups(view) if isinstance(view, Grouped) else self._lefts(view))

    async def _groups(self, view: Grouped) -> Iterable[tuple[Any, Puts]]:
        rows = []
        sizes: Counter[bytes] = Counter()
        async for inputs in self._inputs(view.members.source, view.columns):
            for group in self._keys(partial(self._member, view), inputs):
                if group is not None and self._wanted(group):
                    rows.append(inputs)
                    sizes[view.table.row(group)] += 1
        for stored, size in sizes.items():
            if view.deltas is None and min(size, view.first or size) > view.members_max:
                self._failed(view.table.key.decode(stored), UsageError(f"it has {size} members (members_max)"))
        return batch.owned(view, rows)

    async def _cogroups(self, view: CoGrouped) -> Iterable[tuple[Any, Puts]]:
        sides: list[list[Row[Any]]] = []
        for side in view.sides:
            rows: list[Row[Any]] = []
            sizes: Counter[bytes] = Counter()
            async for inputs in self._inputs(side.rows.source, side.rows.columns):
                key = side.rows.key_of(inputs)
                if self._wanted(key):
                    rows.append(inputs)
                    sizes[view.table.row(key)] += 1
            for stored, size in sizes.items():
                if side.first is None and size > view.rows_max:
                    what = f"{side.rows.source.name} has {size} rows for it (rows_max)"
                    self._failed(view.table.key.decode(stored), UsageError(what))
            sides.append(rows)
        return batch.owned(view, *sides)

    def _member(self, view: Grouped, inputs: Row[Any]) -> Any:
        """The group of a row. Raises: what `by` raises; TooLarge if the view could not keep the row."""
        group = view.members.key_of(inputs)
        if group is not None:
            member = view.members.place(group, inputs.key)
            view.members.table.row(member)
            for order, column in view.orders.items():
                if inputs[order.column] is not None:
                    column.table.row(place_in(view, order, member, inputs[order.column]))
        return group

    async def _lefts(self, view: Joined) -> Iterable[tuple[Any, Puts]]:
        lefts, rights, keys = [], [], set()
        matches: Counter[bytes] = Counter()
        async for inputs in self._inputs(view.table, view.columns):
            if self._wanted(inputs.key):
                for key in self._keys(view.key_of_left, inputs):
                    lefts.append(inputs)
                    if key is not None:
                        keys.add(view.key.encode(key))
        async for inputs in self._inputs(view.rights.source, view.rights.columns):
            for key in self._keys(view.rights.key_of, inputs):
                if key is not None and view.key.encode(key) in keys:
                    rights.append(inputs)
                    matches[view.key.encode(key)] += 1
        for stored, count in matches.items():
            if count > view.matches_max:
                key = view.key.decode(stored)
                self._failed(key, UsageError(f"left rows with this key match {count} right rows (matches_max)"))
        return batch.owned(view, lefts, rights)

    def _keys(self, function: Callable[[Row[Any]], Any], inputs: Row[Any]) -> list[Any]:
        """What a function returns for a row; nothing if it fails."""
        try:
            return [function(inputs)]
        except Exception as error:
            self._failed(inputs.key, error)
            return []

    async def _inputs(self, table: Table[Any], columns: Iterable[Column[Any, Any]]) -> AsyncGenerator[Row[Any], None]:
        async for _, inputs in self._scan(table, columns):
            if inputs is not None:
                yield inputs

    async def _scan(
        self, table: Table[Any], columns: Iterable[Column[Any, Any]], memory: Column[Any, bytes] | None = None
    ) -> AsyncGenerator[tuple[Row[Any], Row[Any] | None], None]:
        """The rows of a table, and as the view's function reads them: None if none of the columns has a value."""
        columns = list(columns)
        there = [column for column in [*columns, *([memory] if memory is not None else [])] if self._has(column)]
        if not there:
            return
        async for row in self._snap.scan(table, columns=there):
            cells = {
                column: (row[column], row.commit_ts(column)) if column in there else (None, 0) for column in columns
            }
            yield row, Row(row.key, cells) if any(value is not None for value, _ in cells.values()) else None

    def _wanted(self, owner: Any) -> bool:
        if self._sample == 1:
            return True
        digest = blake2b(self._view.table.row(owner), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._sample * (1 << 64)

    async def _memory(self, owner: Any) -> bytes | None:
        memory = self._view.memory
        if not self._has(memory):
            return None
        return await self._snap.get(memory, owner)

    def _has(self, column: Column[Any, Any]) -> bool:
        """Whether the store has a column, and not only the program."""
        entry = self._known.catalogue.tables.get(column.table.name)
        return entry is not None and column.name in entry.columns

    def _failed(self, owner: Any, error: Exception) -> None:
        self._found.failed += 1
        if len(self._found.failures) < self._most:
            self._found.failures.append(Failure(owner, error))

    # ------------------------------------------------------------ rows

    async def _compare(self) -> None:
        """Compare the rows of the owners that wait with those that are there."""
        there = await self._there()
        rows = [row for _, after, _ in self._waiting for row in after.values() if row.later]
        wanted = [each for each in laters(rows) if self._has(each.cached.results)]
        fill(rows, await find(self._snap, wanted, compute=False))
        for owner, after, memory in self._waiting:
            for where in {**memory.rows, **after}:
                table = self._table(where[0])
                if table is None or (where not in after and where[0] in self._inner):
                    continue
                key = table.key.decode(where[1])
                values, by = there[where]
                if where not in after and by not in (None, self._view.table.row(owner)):
                    continue  # it is another owner's by now
                if values and table in self._seen:
                    self._seen[table] += 1
                expected = after[where].values if where in after else {}
                if values and where in after and after[where].later and after[where].digest == memory.rows.get(where):
                    expected = values  # V9: the values of cached functions are not computed
                self._note(table, key, expected, values, owner)
        self._waiting.clear()
        self._rows = 0

    async def _there(self) -> dict[Where, tuple[dict[Column[Any, Any], Any], bytes | None]]:
        """The values, and the owner, of all rows that are needed."""
        places: dict[Table[Any], dict[Any, Where]] = {}
        columns: dict[Table[Any], set[Column[Any, Any]]] = {}
        for _, after, memory in self._waiting:
            for where in {**memory.rows, **after}:
                table = self._table(where[0])
                if table is not None:
                    places.setdefault(table, {})[table.key.decode(where[1])] = where
                    before = earlier(self._view, memory, table)
                    columns.setdefault(table, set()).update(before, self._view.outputs.get(table, ()))
        out: dict[Where, tuple[dict[Column[Any, Any], Any], bytes | None]] = {}
        for table, keys in places.items():
            mark = self._view.owned.get(table)
            values = {c: await self._snap.get_many(c, keys) for c in columns[table] if self._has(c)}
            marks = await self._snap.get_many(mark, keys) if mark is not None and self._has(mark) else {}
            for key, where in keys.items():
                found = {column: got[key] for column, got in values.items() if got[key] is not None}
                out[where] = found, marks.get(key)
        return out

    @property
    def _inner(self) -> set[str]:
        return {table.name for table in self._view.inner}

    def _table(self, name: str) -> Table[Any] | None:
        """An output of the view, or of an earlier version of it."""
        return next((t for t in self._view.outputs if t.name == name), None) or self._known.schema.tables.get(name)

    def _note(
        self,
        table: Table[Any],
        key: Any,
        expected: Mapping[Column[Any, Any], Any],
        there: Mapping[Column[Any, Any], Any],
        owner: Any,
        *,
        stray: bool = False,
    ) -> None:
        found = self._found
        if stored_values(expected) == stored_values(there):
            found.same += bool(there)
            return
        if stray:
            found.strays += 1
        elif not there:
            found.added += 1
        elif not expected:
            found.removed += 1
        else:
            found.changed += 1
        if len(found.differences) < self._most:
            wanted, has = shown_values(expected), shown_values(there)
            found.differences.append(Difference(found.view, table.title, key, wanted, has, owner))

    async def _strays(self) -> None:
        """Find the rows that no owner gives or gave, if there are more rows than the owners have."""
        view = self._view
        for table, columns in view.outputs.items():
            names, mark = [column for column in columns if self._has(column)], view.owned[table]
            if not names:
                continue
            rows = 0
            async for _ in self._snap.scan(table, columns=names):
                rows += 1
            if rows == self._seen[table]:
                continue
            async for row in self._snap.scan(table, columns=[*names, *([mark] if self._has(mark) else [])]):
                values = {column: row[column] for column in names if row[column] is not None}
                if values and not await self._is_given(table, row, mark):
                    self._note(table, row.key, {}, values, None, stray=True)

    async def _is_given(self, table: Table[Any], row: Row[Any], mark: Column[Any, bytes]) -> bool:
        if _number(table.name, table.row(row.key)) in self._given:
            return True
        by = row[mark] if self._has(mark) else None
        stored = None if by is None else await self._memory(self._view.table.key.decode(by))
        return (table.name, table.row(row.key)) in Memory.unpack(stored).rows


def _number(table: str, row: bytes) -> int:
    """Stands for a row in memory."""
    return int.from_bytes(blake2b(row, digest_size=8, key=table.encode()[:64]).digest(), "big")
