"""What views compile to. Plain values; no I/O.

The owner of a row is the source row, or the group, whose run gave it. What it gave is in a hidden column of the
owner's row (`memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from perco.errors import UsageError
from perco.schema.codecs import Codec, TupleCodec
from perco.schema.schema import Column, Signal, Table
from perco.txn.row import Row
from perco.views.aggregates import Ordered, Sum
from perco.views.rows import Group, Put

PARTS_MAX: Final = 8
"""Of a tuple key."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Groups by the first parts of a tuple key."""

    parts: int


def prefix(parts: int) -> Prefix:
    """Group rows by the first `parts` parts of their tuple key. Of one part, the group is that part;
    of more, a tuple of them."""
    if isinstance(parts, bool) or not isinstance(parts, int) or not 1 <= parts < PARTS_MAX:
        raise UsageError(f"views.prefix takes a number of parts from 1 to {PARTS_MAX - 1}, not {parts!r}")
    return Prefix(parts)


def parts_of(codec: Codec[Any], key: Any) -> tuple[Any, ...]:
    """A key as a tuple of its parts."""
    return tuple(key) if isinstance(codec, TupleCodec) else (key,)


def key_of(codec: Codec[Any], parts: tuple[Any, ...]) -> Any:
    """The key that has these parts."""
    return parts if isinstance(codec, TupleCodec) else parts[0]


def codecs_of(codec: Codec[Any]) -> tuple[Codec[Any], ...]:
    return codec.parts if isinstance(codec, TupleCodec) else (codec,)


def normal(table: Table[Any], key: Any) -> Any:
    """A key as a read returns it; None stays None. Raises: TypeError, ValueError, TooLarge."""
    return None if key is None else table.key.decode(table.row(key))


@dataclass(slots=True, eq=False)
class Owners:
    """What the runs of all views have in common: who owns rows, and which rows they may write.

    Attributes:
        table: a row of it is an owner.
        memory: the hidden column of the owner's row.
        outputs: the columns that the view writes, by table.
        owned: for each of these tables, the hidden column that names a row's owner (V5); none for tables of a view's
            own, whose keys contain the owner's.
        told: the views that the runs of this one tell of their writes, by table: groups, whose members these rows are,
            and joins, whose right rows they are.
        inner: the columns of the view's own tables that its runs write besides, by table.
        writers: which view writes a column.
    """

    id: str
    version: int
    table: Table[Any]
    memory: Column[Any, bytes]
    outputs: dict[Table[Any], frozenset[Column[Any, Any]]]
    owned: dict[Table[Any], Column[Any, bytes]]
    told: dict[Table[Any], list[Grouped | Joined]] = field(default_factory=dict)
    inner: dict[Table[Any], frozenset[Column[Any, Any]]] = field(default_factory=dict)
    writers: Mapping[Column[Any, Any], Owners] = field(default_factory=dict)

    @property
    def several(self) -> bool:
        """Whether several observers run for one owner: their runs could overlap (V2)."""
        return False


@dataclass(slots=True, eq=False)
class Each(Owners):
    """A view of single source rows."""

    columns: tuple[Column[Any, Any], ...] = ()
    function: Callable[[Row[Any]], Iterable[Put[Any]]] = lambda row: ()

    @property
    def several(self) -> bool:
        return len(self.columns) > 1


@dataclass(slots=True, eq=False)
class Grouped(Owners):
    """A view of groups of source rows.

    Attributes:
        source, columns: what it reads.
        by: the group of a source row; None: the row is in no group.
        members: (group, source key), the source rows sorted by groups.
        copied: the columns of `members`, by those of the source.
        parts: how many parts of a member's key are the group.
        changed: the signal that a group's members have changed (V3).
        kept: the hidden column with the group's aggregates.
        deltas: the column, in a table of slots, of what is still to be folded; None: the view keeps no aggregates.
        orders: for each kept order, the column of the table that has it.
    """

    source: Table[Any] = field(kw_only=True)
    columns: tuple[Column[Any, Any], ...] = field(kw_only=True)
    by: Prefix | Callable[[Row[Any]], Any] = field(kw_only=True)
    members: Table[Any] = field(kw_only=True)
    copied: Mapping[Column[Any, Any], Column[Any, Any]] = field(kw_only=True)
    parts: int = field(kw_only=True)
    changed: Signal[Any] = field(kw_only=True)
    kept: Column[Any, bytes] = field(kw_only=True)
    deltas: Column[Any, bytes] | None = field(kw_only=True)
    orders: dict[Ordered, Column[Any, Any]] = field(kw_only=True)
    sums: tuple[Sum, ...] = field(kw_only=True)
    members_max: int = field(kw_only=True)
    function: Callable[[Any, Group[Any]], Iterable[Put[Any]]] = lambda group, rows: ()

    @property
    def shape(self) -> str:
        """Which aggregates are kept: what was kept in another shape has to be counted again."""
        orders = (f"{order.column.name} {order.first} {order.last}" for order in self.orders)
        return ", ".join([*(f"sum {each.column.name}" for each in self.sums), *orders])

    def group_of(self, row: Row[Any]) -> Any:
        """The group of a source row; None: none. Raises: TypeError or ValueError if it is no key of `table`."""
        if isinstance(self.by, Prefix):
            parts = parts_of(self.source.key, row.key)[: self.by.parts]
            return parts if self.by.parts > 1 else parts[0]
        return normal(self.table, self.by(row))

    def split(self, member: Any) -> tuple[Any, tuple[Any, ...]]:
        """(group, the rest of the parts) of a member's key."""
        parts = parts_of(self.members.key, member)
        return key_of(self.table.key, parts[: self.parts]), parts[self.parts :]

    def source_key(self, rest: tuple[Any, ...]) -> Any:
        """The key of the source row that has these parts."""
        return key_of(self.source.key, rest)


@dataclass(slots=True, eq=False)
class Joined(Owners):
    """A view of left rows, each with the right rows that have the same key.

    Attributes:
        columns, rights_columns: what it reads of the left rows (of `table`), and of the right rows (of `source`).
        on, to: the key of a left row, and of a right row; None: the row has none.
        how: "inner", or "left": the function also gets left rows that match nothing.
        keys: a row for each key.
        lefts, left: (key, left key), which left rows have the key; its only column.
        rights, copied: (key, right key), the right rows of the key; its columns, by those of the source.
        turned: the hidden column of a key's row that changes with its right rows (V8).
        reached: the hidden column of a key's row that says how far the left rows have been signalled.
        changed: the signal that the right rows of a key have changed.
        again: the signal that a left row must run again.
    """

    columns: tuple[Column[Any, Any], ...] = field(kw_only=True)
    source: Table[Any] = field(kw_only=True)
    rights_columns: tuple[Column[Any, Any], ...] = field(kw_only=True)
    on: Callable[[Row[Any]], Any] = field(kw_only=True)
    to: Callable[[Row[Any]], Any] | None = field(kw_only=True)
    how: str = field(kw_only=True)
    keys: Table[Any] = field(kw_only=True)
    lefts: Table[Any] = field(kw_only=True)
    left: Column[Any, bool] = field(kw_only=True)
    rights: Table[Any] = field(kw_only=True)
    copied: Mapping[Column[Any, Any], Column[Any, Any]] = field(kw_only=True)
    turned: Column[Any, bytes] = field(kw_only=True)
    reached: Column[Any, bytes] = field(kw_only=True)
    changed: Signal[Any] = field(kw_only=True)
    again: Signal[Any] = field(kw_only=True)
    matches_max: int = field(kw_only=True)
    function: Callable[[Row[Any], Row[Any] | None], Iterable[Put[Any]]] = lambda left, right: ()

    @property
    def several(self) -> bool:
        return True

    def gives(self, left: Row[Any], rights: Iterable[Row[Any]]) -> Iterable[Put[Any]]:
        """What a left row gives with these right rows."""
        none = True
        for right in rights:
            none = False
            yield from self.function(left, right)
        if none and self.how == "left":
            yield from self.function(left, None)

    def key_of_right(self, row: Row[Any]) -> Any:
        """The key of a right row; None: none."""
        return normal(self.keys, row.key if self.to is None else self.to(row))

    def key_of_left(self, row: Row[Any]) -> Any:
        """The key of a left row; None: none."""
        return normal(self.keys, self.on(row))

    def key_of(self, parts: tuple[Any, ...]) -> Any:
        """The key with which the parts of a row's key in `lefts` or `rights` begin."""
        return key_of(self.keys.key, parts[: len(codecs_of(self.keys.key))])

    def left_key(self, rest: tuple[Any, ...]) -> Any:
        """The key of a left row, from the other parts."""
        return key_of(self.table.key, rest)

    def right_key(self, rest: tuple[Any, ...]) -> Any:
        """The key of a right row, from the other parts."""
        return key_of(self.source.key, rest)
