"""A transaction's cache of its reads, and the cells that are read ahead for it (the paper's section 2.5). Pure.

    ahead = predictor.begin("app.index_page")       one for each transaction
    plan = ahead.plan(table, row, columns)          what to read of the row along with these columns
    ahead.took(table, plan, cells)                  take the result of that read
    ahead.find(table, row, column)                  a cell that is known without a read

Reading a second cell of a row along with the first costs almost nothing, while another read costs a round trip. So a
read of one column also reads those columns of the row that the transaction is *likely* to read later. The likelihood is
the share of past transactions that read the other column after this one. (Transactions that read this column first in
the row are counted apart from those that read it after other columns.) Each observer, and each function that is run,
has statistics of its own, in which old transactions count less and less; for a function that gains nothing, only a
sample of the transactions is observed. A value that is too long for its record takes a second read. If that is likely,
the first read also fetches the newest data of the cell, which is used if the record points at it.

Long values are read ahead only while the total of one read stays small (`ahead_bytes_max`, estimated from the sizes of
past values).

T9  Cells read ahead are kept as found. They are interpreted only when the transaction reads them: only then is a cell
    with a lock read again, and damage reported. A cell without a lock is the same for every later read at this
    timestamp: any transaction that commits at or below the timestamp had put its lock, or was entered (C4), before the
    timestamp was drawn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from perco.protocol.snapshot import InData, Missing, Seen, Value, look
from perco.settings import check_options
from perco.storage import LOCK, WRITE, Cell, Query, RowCells

_FADE: Final = 1 - 1 / 16  # the factor by which each transaction reduces the weight of earlier ones
_KEPT_PER_CHECKPOINT: Final = 64
_FRUITLESS: Final = 32  # after so many transactions without a gain, only a sample is observed
_LOOK_EVERY: Final = 16
_ROWS_LEARNT: Final = 64  # from one transaction
_TRIGGERS_MAX: Final = 1024  # remembered for one function
_WRAPPED_MAX: Final = 16  # wrappers that are removed from a function to find its name
_SEEN_MIN: Final = 1.5  # so that one transaction is not enough

_Place: TypeAlias = tuple[str, int]
_Trigger: TypeAlias = tuple[str, int, bool]  # a column, and whether it is the first that was read in its row


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchOptions:
    """Attributes:
    cache: a transaction keeps what it has read, and reads no cell twice. None: only in clients of a served store.
    predict: a read also returns those cells of the row that the transaction is likely to read later; this implies the
        cache. None: only in clients of a served store.
    likely_share: the share of past transactions that must have read a column later for it to be read ahead.
    columns_max: the largest number of columns that are read ahead in one row.
    ahead_bytes_max: the most bytes of long values, as estimated, that one read returns ahead.
    cells_max, bytes_max: how much a transaction keeps; cells beyond that are read again.
    functions_max: how many observers and functions are remembered; the least recently run one is forgotten first.
    """

    cache: bool | None = None
    predict: bool | None = None
    likely_share: float = 0.5
    columns_max: int = 64
    ahead_bytes_max: int = 1 << 20
    cells_max: int = 10_000
    bytes_max: int = 16 << 20
    functions_max: int = 256

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(slots=True)
class PrefetchCounters:
    """Counters of one observer or function, or of all, over the transactions that were observed.

    Attributes:
        reads: rows that were read from the store.
        sent: cells that these reads returned.
        predicted: how many of these cells were read ahead.
        used, wasted: predicted cells that the transaction then read, or did not read.
        kept: reads that the cache answered: first reads of predicted cells, and repeated reads of any cell.
    """

    reads: int = 0
    sent: int = 0
    predicted: int = 0
    used: int = 0
    wasted: int = 0
    kept: int = 0

    def add(self, other: PrefetchCounters) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Raw(NamedTuple):
    """A cell as found, not yet interpreted; `data`: its newest data in `group`, if the same read fetched them."""

    locks: Sequence[Cell]
    writes: Sequence[Cell]
    data: Cell | None
    group: str


class Plan(NamedTuple):
    """A read of one row.

    Attributes: `columns`, those asked for, then those to be read ahead; `groups`, for each column the data group from
    which the same read fetches the newest data, or ""; `asked`, how many columns are asked for.
    """

    row: bytes
    columns: tuple[int, ...]
    groups: tuple[str, ...]
    asked: int

    def queries(self, ts: int) -> list[Query]:
        """For each column its lock, its record, and, if likely to be needed, its newest data."""
        out: list[Query] = []
        for column, group in zip(self.columns, self.groups, strict=True):
            out += ((LOCK, column, 0, ts, 1), (WRITE, column, 0, ts, 1))
            if group:
                out.append((group, column, 0, ts, 1))
        return out

    def without(self, columns: Container[int]) -> Plan:
        """The plan without some of the columns that were to be read ahead."""
        left = [
            (column, group)
            for i, (column, group) in enumerate(zip(self.columns, self.groups, strict=True))
            if i < self.asked or column not in columns
        ]
        return self._replace(columns=tuple(c for c, _ in left), groups=tuple(g for _, g in left))

    def only_asked(self) -> Plan:
        """The plan without any read-ahead."""
        return self._replace(columns=self.columns[: self.asked], groups=("",) * self.asked)


class _Later:
    """How often other columns were read after one column of a row; old transactions count less."""

    __slots__ = ("columns", "likely", "seen")

    def __init__(self) -> None:
        self.seen = 0.0
        self.columns: dict[int, float] = {}
        self.likely: tuple[int, ...] = ()

    def learn(self, read: Iterable[int], options: PrefetchOptions) -> None:
        columns = self.columns
        self.seen = self.seen * _FADE + 1
        for column in columns:
            columns[column] *= _FADE
        for column in read:
            columns[column] = columns.get(column, 0.0) + 1
        least = self.seen * options.likely_share
        if self.seen < _SEEN_MIN:
            return
        likely = [(count, column) for column, count in columns.items() if count >= least]
        likely.sort(key=lambda each: (-each[0], each[1]))
        self.likely = tuple(column for _, column in likely[: options.columns_max])
        for column in [column for column, count in columns.items() if count < 0.01]:
            del columns[column]


class _Long:
    """How many values of a column were too long for their records (old transactions count less), the data group of the
    last such value, and an estimate of their size."""

    __slots__ = ("group", "long", "seen", "size")

    def __init__(self) -> None:
        self.seen = self.long = 0.0
        self.group = ""
        self.size = 0


class _Memory:
    """The statistics that are kept for one observer or function."""

    fruitless: int
    passed_by: int
    counters: PrefetchCounters

    __slots__ = ("counters", "fruitless", "later", "long", "passed_by")

    def __init__(self) -> None:
        self.fruitless = 0  # consecutive transactions that read no cell twice, and no second cell of any row
        self.passed_by = 0  # transactions since then
        self.counters = PrefetchCounters()
        self.later: dict[_Trigger, _Later] = {}
        self.long: dict[_Place, _Long] = {}


class _RowAhead:
    """One row in one transaction."""

    __slots__ = ("cells", "order", "triggers", "unused")

    def __init__(self) -> None:
        self.cells: dict[int, Value | Missing | Raw] = {}
        self.order: list[int] = []  # columns, in the order in which they were first read
        self.triggers: list[tuple[int, int]] = []  # for each read, its first column and the length of `order` after it
        self.unused: set[int] = set()  # columns read ahead that the transaction has not read yet


class Predictor:
    """Remembers what observers and functions read. Bounded; loop thread only."""

    predicts: bool
    on: bool

    def __init__(self, options: PrefetchOptions, *, served: bool) -> None:
        self.options = options
        self.predicts = served if options.predict is None else options.predict
        cache = served if options.cache is None else options.cache
        self.on = cache or self.predicts
        self._memories: OrderedDict[str, _Memory] = OrderedDict()
        self._forgotten = PrefetchCounters()

    def begin(self, function: str) -> Ahead | None:
        """The cache of one transaction of an observer or function, with its read-ahead. None if the function has gained
        nothing for a long time: then only one transaction in `_LOOK_EVERY` is observed."""
        memory = self._memories.get(function)
        if memory is None:
            memory = self._memories[function] = _Memory()
            if len(self._memories) > self.options.functions_max:
                _, oldest = self._memories.popitem(last=False)
                self._forgotten.add(oldest.counters)
        else:
            self._memories.move_to_end(function)
            if memory.fruitless >= _FRUITLESS:
                memory.passed_by += 1
                if memory.passed_by % _LOOK_EVERY:
                    return None
        return Ahead(memory, self)

    def statistics(self) -> dict[str, PrefetchCounters]:
        """Counters by observer or function; under "", the sum for those that were forgotten."""
        out = {}
        for name, memory in [*self._memories.items()]:
            out[name] = PrefetchCounters()
            out[name].add(memory.counters)
        if self._forgotten.reads:
            out[""] = PrefetchCounters()
            out[""].add(self._forgotten)
        return out


def with_data(seen: Seen, raw: Raw) -> Seen:
    """What was seen of a cell; if the record points at the long value that the same read has fetched, that value."""
    data = raw.data
    if type(seen) is InData and data is not None and data[0] == seen.start_ts and raw.group == seen.group:
        return Value(seen.commit_ts, data[1])
    return seen


def name_of(function: object) -> str:
    """The name under which a function is remembered."""
    for _ in range(_WRAPPED_MAX):  # bounded: some objects have every attribute
        inside = function.func if isinstance(function, partial) else getattr(function, "__wrapped__", None)
        if inside is None:
            break
        function = inside
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or ''}.{name}"


class Ahead:
    """The cells that one transaction has read, and those that were read ahead for it."""

    __slots__ = ("_budget", "_bytes", "_cells", "_gained", "_kept", "_memory", "_options", "_predicts", "_rows")

    def __init__(self, memory: _Memory, of: Predictor) -> None:
        self._memory, self._options, self._predicts = memory, of.options, of.predicts
        self._kept = 0  # cells read from the cache since the task last yielded
        self._budget = of.options.ahead_bytes_max  # bytes of long values that the current read may still return ahead
        self._rows: dict[tuple[str, bytes], _RowAhead] = {}
        self._cells = self._bytes = 0
        self._gained = False

    def find(self, table: str, row: bytes, column: int) -> Value | Missing | InData | None:
        """A cell, as far as it is known without a read. None: it must be read; InData: its data must be read.

        Raises: Corruption.
        """
        here = self._rows.get((table, row))
        if here is None:
            return None
        known = here.cells.get(column)
        if known is None:
            return None
        if type(known) is Raw:
            if known.locks:
                del here.cells[column]  # T9: read it again, past the lock if it is still there
                here.unused.discard(column)
                self._memory.counters.wasted += 1
                return None
            seen = look(known.locks, known.writes)
            self._read(here, column)
            self._note_long(table, column, seen)
            here.unused.discard(column)
            self._memory.counters.used += 1
            seen = with_data(seen, known)
            if type(seen) is InData:
                del here.cells[column]
                return seen
            assert type(seen) is Value or type(seen) is Missing
            here.cells[column] = known = seen
        assert type(known) is Value or type(known) is Missing
        self._memory.counters.kept += 1
        self._kept += 1
        self._gained = True
        return known

    def begin_read(self) -> None:
        """Begin a read of some rows; the caller then calls `plan` for each row."""
        options = self._options
        self._budget = min(options.ahead_bytes_max, options.bytes_max - self._bytes)

    def plan(self, table: str, row: bytes, columns: Sequence[int]) -> Plan:
        """Plan a read of cells that are not known; the caller makes the read."""
        where = table, row
        here = self._rows.get(where)
        if here is None:
            here = _RowAhead()
            if len(self._rows) < self._options.cells_max:
                self._rows[where] = here
        for column in columns:
            self._read(here, column)
        trigger = columns[0]
        first = not here.triggers
        self._gained |= not first
        if here.triggers[-1:] != [(trigger, len(here.order))]:
            here.triggers.append((trigger, len(here.order)))
        more: tuple[int, ...] = ()
        if self._predicts:
            later = self._memory.later.get((table, trigger, first))
            if later is not None and later.likely and self._cells < self._options.cells_max and self._budget > 0:
                more = tuple(c for c in later.likely if c not in here.cells and c not in columns)
        every = (*columns, *more)
        return Plan(row, every, tuple(self._group(table, column) for column in every), len(columns))

    def took(self, table: str, plan: Plan, cells: RowCells) -> list[tuple[int, Raw]]:
        """Take the result of a read: keep what was read ahead; return what was asked for, by column."""
        here = self._rows.get((table, plan.row))
        counters = self._memory.counters
        counters.reads += 1
        counters.sent += len(plan.columns)
        asked: list[tuple[int, Raw]] = []
        at = 0
        for i, (column, group) in enumerate(zip(plan.columns, plan.groups, strict=True)):
            data = cells[at + 2] if group else ()
            raw = Raw(cells[at], cells[at + 1], data[0] if data else None, group)
            if data:
                self._note_size(table, column, len(data[0][1]))
            at += 3 if group else 2
            if i < plan.asked:
                asked.append((column, raw))
                continue
            counters.predicted += 1
            size = sum(len(value) for _, value in raw.writes) + (len(raw.data[1]) if raw.data else 0)
            if here is None or column in here.cells or not self._room(size):
                counters.wasted += 1
                continue
            here.cells[column] = raw
            here.unused.add(column)
        return asked

    def look(self, table: str, column: int, raw: Raw) -> Seen:
        """Interpret a cell that was asked for. Raises: Corruption."""
        seen = look(raw.locks, raw.writes)
        self._note_long(table, column, seen)
        return with_data(seen, raw)

    def keep(self, table: str, row: bytes, column: int, seen: Value | Missing) -> None:
        """Keep what was found in a cell, for later reads of it."""
        here = self._rows.get((table, row))
        size = len(seen.value) if type(seen) is Value else 0
        self._note_size(table, column, size)
        if here is not None and self._room(size):
            here.cells[column] = seen

    def rests(self) -> bool:
        """Whether the task should yield now, after many reads from the cache; if so, restarts the count."""
        if self._kept < _KEPT_PER_CHECKPOINT:
            return False
        self._kept = 0
        return True

    def drop(self) -> None:
        """Learn nothing from this transaction: it did not run, or was abandoned without `end`."""
        for here in self._rows.values():
            self._memory.counters.wasted += len(here.unused)
        self._rows = {}
        self._predicts = False

    def end(self) -> None:
        """Learn from this transaction, which reads no more."""
        memory, options = self._memory, self._options
        memory.fruitless = 0 if self._gained else memory.fruitless + 1
        for number, ((table, _), here) in enumerate(self._rows.items()):
            memory.counters.wasted += len(here.unused)
            if not self._predicts or number >= _ROWS_LEARNT:
                continue
            order = here.order
            first = True
            for trigger, after in here.triggers:
                place = table, trigger, first
                later = memory.later.get(place)
                if later is None:
                    if len(memory.later) >= _TRIGGERS_MAX:
                        break
                    later = memory.later[place] = _Later()
                later.learn(order[after:], options)
                first = False
        self._rows.clear()

    def _read(self, here: _RowAhead, column: int) -> None:
        if column not in here.order:
            here.order.append(column)

    def _room(self, size: int) -> bool:
        if self._cells >= self._options.cells_max or self._bytes + size > self._options.bytes_max:
            return False
        self._cells += 1
        self._bytes += size
        return True

    def _note_long(self, table: str, column: int, seen: object) -> None:
        if type(seen) is Missing or not self._predicts:
            return
        long = self._memory.long.get((table, column))
        if long is None:
            if type(seen) is not InData:
                return  # the usual case
            long = self._memory.long[table, column] = _Long()
        long.seen = long.seen * _FADE + 1
        long.long *= _FADE
        if type(seen) is InData:
            long.long += 1
            long.group = seen.group

    def _note_size(self, table: str, column: int, size: int) -> None:
        long = self._memory.long.get((table, column))
        if long is not None and size:
            long.size = max(size, int(long.size * _FADE))

    def _group(self, table: str, column: int) -> str:
        long = self._memory.long.get((table, column))
        if long is None or long.seen < _SEEN_MIN or long.long < long.seen * self._options.likely_share:
            return ""
        size = max(long.size, 1)
        if size > self._budget:
            return ""
        self._budget -= size
        return long.group
