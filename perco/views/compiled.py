"""Views as they are compiled. Plain values; no I/O.

The owner of a derived row is the source row, the group, or the left row whose run gave it. A hidden column of the
owner's row lists the rows that it gave (`memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

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
    """Group rows by the first parts of their tuple key. The group's key is that part or, of several, their tuple."""
    if isinstance(parts, bool) or not isinstance(parts, int) or not 1 <= parts < PARTS_MAX:
        raise UsageError(f"views.prefix takes a number of parts from 1 to {PARTS_MAX - 1}, not {parts!r}")
    return Prefix(parts)


@dataclass(frozen=True, slots=True)
class First:
    """The first rows of a table for a key."""

    count: int
    columns: tuple[Column[Any, Any], ...]


def first(count: int, *columns: Column[Any, Any]) -> First:
    """A side of a cogroup that reads at most so many rows for a key: the first ones, by their keys."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"views.first takes a number of rows, at least 1, not {count!r}")
    return First(count, columns)


def parts_of(codec: Codec[Any], key: Any) -> tuple[Any, ...]:
    """A key as a tuple of its parts."""
    return tuple(key) if isinstance(codec, TupleCodec) else (key,)


def key_of(codec: Codec[Any], parts: tuple[Any, ...]) -> Any:
    """The key that has these parts."""
    return parts if isinstance(codec, TupleCodec) else parts[0]


def codecs_of(codec: Codec[Any]) -> tuple[Codec[Any], ...]:
    """The codecs of the key's parts."""
    return codec.parts if isinstance(codec, TupleCodec) else (codec,)


def normal(codec: Codec[Any], key: Any) -> Any:
    """A key as a read returns it; None stays None. Raises: TypeError or ValueError for what is no key."""
    return None if key is None else codec.decode(codec.encode(key))


@dataclass(slots=True, eq=False, kw_only=True)
class Owners:
    """The common part of all views: who owns rows, and which rows the runs may write.

    Attributes:
        table: a row of it is an owner.
        memory: the hidden column of the owner's row.
        columns: the source's columns that the view reads; of a join, the left rows'.
        outputs: the columns that the view writes, by table.
        inner: the columns of the view's own tables that its runs write besides, by table.
        owned: for each table of `outputs`, the hidden column that names a row's owner (V5). The view's own tables need
            none, because their keys contain the owner's.
        writers: for each column that views write, its view.
        tellers: for each table that the runs write, what they tell of their rows themselves (V12).
        several: whether several observers run for one owner, so that their runs could overlap (V2).
        made_of: the program's functions, and what else it has declared, for the view's fingerprint (`code.py`).
    """

    id: str
    version: int
    table: Table[Any]
    memory: Column[Any, bytes]
    columns: tuple[Column[Any, Any], ...]
    outputs: dict[Table[Any], frozenset[Column[Any, Any]]]
    inner: dict[Table[Any], frozenset[Column[Any, Any]]] = field(default_factory=dict)
    owned: dict[Table[Any], Column[Any, bytes]] = field(default_factory=dict)
    writers: Mapping[Column[Any, Any], Owners] = field(default_factory=dict)
    tellers: dict[Table[Any], list[Teller]] = field(default_factory=dict)
    several: bool
    made_of: tuple[object, ...] = ()

    @property
    def writes(self) -> dict[Table[Any], frozenset[Column[Any, Any]]]:
        """All columns that the runs write, by table."""
        return {**self.outputs, **self.inner} if self.inner else self.outputs


@dataclass(slots=True, eq=False, kw_only=True)
class Each(Owners):
    """A view of single source rows.

    Attributes:
        tells: the group view or join for which this view writes copies of source rows, or the view of components for
            which it writes the sides of links, and nothing else; None for the views that a program declares.
        copies: these copies.
    """

    function: Callable[[Row[Any]], Iterable[Put[Any]]]
    tells: Grouped | Joined | Components | None = None
    copies: Copies | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Copies:
    """The rows of a source, sorted by keys that a function returns: (key, source key) -> the columns that a view reads.

    If the source is sorted by these keys itself, its rows are read *in place*: `table` is the source, and a "copy" is
    the source row.

    Attributes:
        key_of: the key of a source row; None: it is left out.
        key: the codec of these keys.
        table, columns: the copies, and their columns by the source's.
    """

    source: Table[Any]
    key_of: Callable[[Row[Any]], Any]
    key: Codec[Any]
    table: Table[Any]
    columns: Mapping[Column[Any, Any], Column[Any, Any]]

    @property
    def in_place(self) -> bool:
        """Whether the source rows are read themselves."""
        return self.table is self.source

    def place(self, key: Any, source_key: Any) -> Any:
        """The key of a copy."""
        return source_key if self.in_place else (*parts_of(self.key, key), *parts_of(self.source.key, source_key))

    def split(self, place: Any) -> tuple[Any, tuple[Any, ...]]:
        """The key of a copy's group (or of the join), and the parts of the copy's key that follow it."""
        parts, count = parts_of(self.table.key, place), len(codecs_of(self.key))
        return key_of(self.key, parts[:count]), parts[count:]

    def source_key(self, place: Any) -> Any:
        """The key of the source row of a copy."""
        return place if self.in_place else key_of(self.source.key, self.split(place)[1])

    def original(self, copy: Row[Any]) -> Row[Any]:
        """The source row of a copy."""
        if self.in_place:
            return copy
        cells = {column: (copy[mine], copy.commit_ts(mine)) for column, mine in self.columns.items()}
        return Row(self.source_key(copy.key), cells)


@dataclass(slots=True, eq=False, kw_only=True)
class Teller:
    """Tells a group view or a join, which reads its source rows in place, that one of them has changed.

    Attributes:
        columns: the source's columns that the view reads.
        rows: the source rows.
        earlier: gives nothing, and so removes the copies that an earlier version of the view may have kept.
    """

    id: str
    version: int
    columns: tuple[Column[Any, Any], ...]
    rows: Copies
    tells: Grouped | Joined | CoGrouped
    earlier: Each | None = None

    def observer(self, column: Column[Any, Any]) -> str:
        """The id of the observer of a column."""
        return f"{self.id}: {column.first_name}"


@dataclass(slots=True, eq=False, kw_only=True)
class Grouped(Owners):
    """A view of groups of source rows.

    Attributes:
        members: the source rows, sorted by groups; `copier`: the view that keeps these copies, or what tells of changes
            if they are read in place.
        changed: the signal that a group's members have changed (V3).
        kept: the hidden column with the group's aggregates.
        deltas: the column, in a table of slots, of what is still to be folded; None: the view keeps no aggregates.
        orders: for each kept order, the column of the table that has it.
        shape: names the aggregates and the version; aggregates that were kept in another shape are counted again.
        by_prefix: the number of parts of the source's key that are the group; 0: a function returns the group.
        like_prefix: the number of parts of the source's key that could be the group: an earlier version may have
            grouped by these, and kept no copies; 0: none.
        first: the function gets at most so many members, the first ones; None: all.
    """

    members: Copies
    changed: Signal[Any]
    kept: Column[Any, bytes]
    deltas: Column[Any, bytes] | None
    orders: dict[Ordered, Column[Any, Any]]
    sums: tuple[Sum, ...]
    shape: str
    by_prefix: int
    like_prefix: int
    members_max: int
    first: int | None
    function: Callable[[Any, Group[Any]], Iterable[Put[Any]]]
    copier: Each | Teller = field(init=False)


@dataclass(slots=True, eq=False, kw_only=True)
class Lefts:
    """Which left rows of a join have a key.

    Attributes:
        left: the only column of a table (key, left key).
        keys: a row for each key.
        reached: the hidden column of a key's row that says how far the left rows have been signalled.
        changed: the signal that the right rows of a key have changed.
    """

    left: Column[Any, bool]
    keys: Table[Any]
    reached: Column[Any, bytes]
    changed: Signal[Any]


@dataclass(slots=True, eq=False, kw_only=True)
class Joined(Owners):
    """A view of left rows, each with the right rows that have the same key.

    Attributes:
        on: the key of a left row; None: it has none.
        how: "inner", or "left": the function also gets left rows that match nothing.
        rights: the right rows, sorted by keys; `copier`: as of a group view.
        key: the codec of the keys.
        turned: the hidden column of a key's row that changes with its right rows (V8).
        lefts: which left rows have a key; None: the key is the left row's own.
        unused: the tables of `lefts` for a version that may have needed them; runs delete their rows.
        again: the signal that a left row must run again.
    """

    on: Callable[[Row[Any]], Any]
    how: str
    rights: Copies
    key: Codec[Any]
    turned: Column[Any, bytes]
    lefts: Lefts | None
    unused: Lefts | None
    again: Signal[Any]
    matches_max: int
    function: Callable[[Row[Any], Row[Any] | None], Iterable[Put[Any]]]
    copier: Each | Teller = field(init=False)

    def key_of_left(self, left: Row[Any]) -> Any:
        """The key of a left row, or None. Raises: what `on` raises; TooLarge if it cannot be kept."""
        key = self.on(left)
        if key is not None and self.lefts is not None:
            self.lefts.keys.row(key)
            self.lefts.left.table.row((*parts_of(self.key, key), *parts_of(self.table.key, left.key)))
        return key

    def gives(self, left: Row[Any], rights: Iterable[Row[Any]]) -> Iterable[Put[Any]]:
        """The rows that a left row gives with these right rows."""
        none = True
        for right in rights:
            none = False
            yield from self.function(left, right)
        if none and self.how == "left":
            yield from self.function(left, None)


@dataclass(slots=True, eq=False, kw_only=True)
class Side:
    """The rows of one table that a cogroup reads in place.

    Attributes:
        rows: the rows, sorted by keys.
        many: whether the table's keys only begin with the key, so that several rows have it.
        first: of these, the function gets at most so many, the first ones; None: all.
    """

    rows: Copies
    many: bool
    first: int | None
    teller: Teller = field(init=False)


Found: TypeAlias = "Row[Any] | list[Row[Any]] | None"
"""The rows of a side for a key: a list if it may have many."""


@dataclass(slots=True, eq=False, kw_only=True)
class CoGrouped(Owners):
    """A view of keys, each with the rows of several tables that have it.

    Attributes:
        changed: the signal that rows with the key have changed.
        rows_max: a run that has to read more rows of a side fails.
    """

    sides: tuple[Side, ...]
    changed: Signal[Any]
    rows_max: int
    function: Callable[..., Iterable[Put[Any]]]

    def gives(self, key: Any, found: Sequence[Found]) -> Iterable[Put[Any]]:
        """The rows that a key gives; none if no side has any rows for it."""
        return self.function(key, *found) if any(found) else ()


@dataclass(slots=True, eq=False, kw_only=True)
class Components(Owners):
    """A view of nodes: each has the smallest node of its component, all of whose nodes are connected by links.

    Attributes:
        links: the table of the links. The keys begin with two nodes.
        label: the column that the view writes, in a table of nodes.
        sides: the only column of a table (node, other node, the rest of the link's key, 1 if backwards): each
            link from both of its nodes; a link from a node to itself, once.
        turned: the hidden column of a label's row that is written (deleted, in fact) when a link of the component is
            removed (V13).
        nodes_max: a run that has to read more nodes fails.
        copier: the view that keeps `sides`.
    """

    links: Table[Any]
    label: Column[Any, Any]
    sides: Column[Any, bool]
    turned: Column[Any, bytes]
    nodes_max: int
    copier: Each = field(init=False)

    def same(self, one: Any, other: Any) -> bool:
        """Whether two nodes are the same."""
        return self.table.row(one) == self.table.row(other)

    def ends(self, side: tuple[Any, ...]) -> tuple[Any, Any]:
        """The node of a side, and the one at the other end of the link."""
        count = len(codecs_of(self.table.key))
        return key_of(self.table.key, side[:count]), key_of(self.table.key, side[count : 2 * count])

    def ends_of(self, link: Any) -> tuple[Any, Any]:
        """The nodes of a link."""
        return self.ends(parts_of(self.links.key, link))

    def link_of(self, side: tuple[Any, ...]) -> Any:
        """The key of the link of a side."""
        count = len(codecs_of(self.table.key))
        *parts, backwards = side
        if backwards:
            parts = [*parts[count : 2 * count], *parts[:count], *parts[2 * count :]]
        return key_of(self.links.key, tuple(parts))

    def gives(self, node: Any, label: Any) -> Iterable[Put[Any]]:
        """The row of a node; none without a label."""
        return () if label is None else (Put(self.table, node, {self.label: label}),)


View: TypeAlias = Each | Grouped | Joined | CoGrouped | Components
"""The kinds of views that a program declares."""
