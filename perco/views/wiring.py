"""Makes views from what a program declares: their tables, columns and signals, and the checks of these.

A group view and a join need source rows sorted by keys that a function returns. A view of single rows keeps such copies
for them (`copier`), and tells them of each change. If the source's keys begin with these keys, there are no copies: a
`Teller` tells of the changes.

A view compiles to tables, columns, signals and observers of the schema, so whatever shows these shows views too. For a
view `totals`, these are:

    totals.groups      a row for each group: the signal `changed`, and hidden columns. If the view writes a single table
                       with keys of the same kind, they are there: the signal is `totals.changed`
    totals.members     (group, source key) -> the columns that the view reads; not if the source's keys begin with the
                       group, and the view keeps no aggregates
    totals.deltas      (group, slot) -> what is still to be added to the count and the sums
    totals.by COLUMN   (group, value, source key): the members in the order of a column

(of these, a cogroup has the first one only); for a view of components `clusters`:

    clusters.sides     (node, other node, the rest of the link's key, 1 if backwards): each link from both of its ends

and for a join `credits`:

    credits.rights     (key, right key) -> the columns of the right rows that the view reads; not if the key is the
                       right row's own
    credits.lefts      (key, left key): which left rows have a key
    credits.keys       a row for each key: the signal `changed`, and hidden columns; these two tables are not there if
                       the key is the left row's own

The owner of a derived row is the source row, the group, the left row, the key or the node whose run gave it. A hidden
column of the owner's row lists the rows that it gave (`memory.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from perco.errors import UsageError
from perco.protocol.retention import Keep
from perco.schema.codecs import BOOL, BYTES, INT64, Codec, Tuple, TupleCodec
from perco.schema.schema import Column, Signal, Table
from perco.txn.row import Row
from perco.views.aggregates import Aggregate, Count, Ordered, Sum, order_codec
from perco.views.compiled import (
    PARTS_MAX,
    CoGrouped,
    Components,
    Copies,
    Each,
    First,
    Grouped,
    Joined,
    Lefts,
    Prefix,
    Side,
    Teller,
    View,
    codecs_of,
    key_of,
    normal,
    parts_of,
)
from perco.views.components import sides_of
from perco.views.rows import Group, Put

Columns = tuple[Column[Any, Any], ...]
Outputs = dict[Table[Any], frozenset[Column[Any, Any]]]

_ID_MAX: Final = 40  # the names of a view's tables and observers begin with it
_INTERNAL: Final = Keep(seconds=60.0)  # no reader asks for the past of deltas and orders


# ------------------------------------------------------------ the kinds


def each(
    id: str, version: int, columns: Columns, outputs: Outputs, function: Callable[[Row[Any]], Iterable[Put[Any]]]
) -> Each:
    """A view of single rows."""
    table = columns[0].table
    return Each(
        id=id,
        version=version,
        table=table,
        memory=table.hide(f"_view {id}", BYTES),
        columns=columns,
        outputs=outputs,
        owned=_owned(id, outputs),
        several=len(columns) > 1,
        made_of=(function, *_names(columns, outputs)),
        function=function,
    )


def grouped(
    id: str,
    version: int,
    columns: Columns,
    by: Prefix | Callable[[Row[Any]], Any],
    codec: Codec[Any],
    outputs: Outputs,
    keep: Sequence[Aggregate],
    members_max: int,
    first: int | None,
    function: Callable[[Any, Group[Any]], Iterable[Put[Any]]],
) -> Grouped:
    """A view of groups. `codec`: of the groups' keys. Raises: UsageError."""
    sums, ordered = kept(id, columns, keep)
    groups = _groups(id, codec, outputs)
    in_place = isinstance(by, Prefix) and not keep
    members = _copies(f"{id}.members", columns, _grouping(by, columns[0].table, codec), codec, in_place)
    view = Grouped(
        id=id,
        version=version,
        table=groups,
        memory=groups.hide(f"_view {id}", BYTES),
        columns=columns,
        outputs=outputs,
        owned=_owned(id, outputs),
        several=True,
        made_of=(
            function,
            by.parts if isinstance(by, Prefix) else by,
            *_names(columns, outputs),
            _shape(0, sums, ordered),
            *(() if first is None else (first,)),
        ),
        members=members,
        changed=_signal(groups, f"{id}.changed" if groups in outputs else "changed"),
        kept=groups.hide(f"_kept {id}", BYTES),
        deltas=_deltas(id, codec) if keep else None,
        orders={order: _order(id, order, members) for order in ordered},
        sums=sums,
        shape=_shape(version, sums, ordered) if keep else "",
        by_prefix=by.parts if isinstance(by, Prefix) else 0,
        like_prefix=0 if version == 1 else _like_prefix(codec, columns[0].table.key),
        members_max=members_max,
        first=first,
        function=function,
    )
    view.copier = _copier(view, f"{id}.members", members)
    return view


def joined(
    id: str,
    version: int,
    columns: Columns,
    rights: Columns,
    on: Callable[[Row[Any]], Any] | None,
    to: Callable[[Row[Any]], Any] | None,
    codec: Codec[Any],
    how: str,
    outputs: Outputs,
    matches_max: int,
    function: Callable[[Row[Any], Row[Any] | None], Iterable[Put[Any]]],
) -> Joined:
    """A join. `codec`: of the keys."""
    table = columns[0].table
    own_key: Callable[[Row[Any]], Any] = lambda row: row.key  # noqa: E731
    left_key, right_key = on or own_key, to or own_key
    in_place = to is None and codec.name == rights[0].table.key.name
    lefts = None
    could = len(codecs_of(codec)) + len(codecs_of(table.key)) <= PARTS_MAX
    if on is not None or (version > 1 and could):  # an earlier version may have kept them
        lefts = _lefts(id, codec, table)
    turned = table if lefts is None or on is None else lefts.keys
    view = Joined(
        id=id,
        version=version,
        table=table,
        memory=table.hide(f"_view {id}", BYTES),
        columns=columns,
        outputs=outputs,
        inner={} if lefts is None or on is None else {lefts.left.table: frozenset([lefts.left])},
        owned=_owned(id, outputs),
        several=True,
        made_of=(function, on, to, how, *_names((*columns, *rights), outputs)),
        on=lambda row: normal(codec, left_key(row)),
        how=how,
        rights=_copies(f"{id}.rights", rights, lambda row: normal(codec, right_key(row)), codec, in_place),
        key=codec,
        turned=turned.hide(f"_turned {id}", BYTES),
        lefts=None if on is None else lefts,
        unused=lefts if on is None else None,
        again=_signal(table, f"{id}.again"),
        matches_max=matches_max,
        function=function,
    )
    view.copier = _copier(view, f"{id}.rights", view.rights)
    return view


def cogrouped(
    id: str,
    version: int,
    sides: Sequence[Columns | First],
    codec: Codec[Any],
    outputs: Outputs,
    rows_max: int,
    function: Callable[..., Iterable[Put[Any]]],
) -> CoGrouped:
    """A view of keys. `codec`: of the keys. Raises: UsageError if a table's keys do not begin with them."""
    made = [_side(id, side, codec) for side in sides]
    columns = tuple(column for side in made for column in side.rows.columns)
    groups = _groups(id, codec, outputs)
    view = CoGrouped(
        id=id,
        version=version,
        table=groups,
        memory=groups.hide(f"_view {id}", BYTES),
        columns=columns,
        outputs=outputs,
        owned=_owned(id, outputs),
        several=True,
        made_of=(function, *_names(columns, outputs), [side.first for side in made]),
        sides=tuple(made),
        changed=_signal(groups, f"{id}.changed" if groups in outputs else "changed"),
        rows_max=rows_max,
        function=function,
    )
    for side in made:
        name = f"{id}: {side.rows.source.name}"
        side.teller = Teller(id=name, version=version, columns=tuple(side.rows.columns), rows=side.rows, tells=view)
    return view


def _side(id: str, side: Columns | First, codec: Codec[Any]) -> Side:
    columns = side.columns if isinstance(side, First) else side
    source, parts = columns[0].table, len(codecs_of(codec))
    many = source.key.name != codec.name
    if many and _like_prefix(codec, source.key) == 0:
        raise UsageError(f"view {id!r}: the keys of {source!r} do not begin with a key of the kind {codec!r}")
    if isinstance(side, First) and not many:
        raise UsageError(f"view {id!r}: {source!r} has one row for each key: leave out views.first")

    def key(row: Row[Any]) -> Any:
        return key_of(codec, parts_of(source.key, row.key)[:parts]) if many else row.key

    rows = _copies("", columns, key, codec, True)
    return Side(rows=rows, many=many, first=side.count if isinstance(side, First) else None)


def _groups(id: str, codec: Codec[Any], outputs: Outputs) -> Table[Any]:
    """The table with a row for each group: the only one that the view writes, if it has the groups' keys."""
    tables = list(outputs)
    if len(tables) == 1 and tables[0].key.name == codec.name:
        return tables[0]
    return Table(f"{id}.groups", key=codec)


def components(id: str, version: int, columns: Columns, label: Column[Any, Any], nodes_max: int) -> Components:
    """A view of connected components."""
    links, nodes = columns[0].table, label.table
    outputs = {nodes: frozenset([label])}
    view = Components(
        id=id,
        version=version,
        table=nodes,
        memory=nodes.hide(f"_view {id}", BYTES),
        columns=columns,
        outputs=outputs,
        owned=_owned(id, outputs),
        several=False,
        made_of=_names(columns, outputs),
        links=links,
        label=label,
        sides=table_of_parts(f"{id}.sides", (*codecs_of(links.key), INT64)).column("side", BOOL),
        turned=nodes.hide(f"_turned {id}", BYTES),
        nodes_max=nodes_max,
    )
    view.copier = _linking(view)
    return view


def _linking(view: Components) -> Each:
    """The view of single links that keeps both sides of each."""

    def sides(row: Row[Any]) -> Iterable[Put[Any]]:
        for side in sides_of(view, row.key):
            yield Put(view.sides.table, side, {view.sides: True})

    return Each(
        id=f"{view.id}.sides",
        version=view.version,
        table=view.links,
        memory=view.links.hide(f"_view {view.id}.sides", BYTES),
        columns=view.columns,
        outputs={},
        inner={view.sides.table: frozenset([view.sides])},
        several=len(view.columns) > 1,
        function=sides,
        tells=view,
    )


def _like_prefix(codec: Codec[Any], source: Codec[Any]) -> int:
    parts = len(codecs_of(codec))
    return parts if [each.name for each in codecs_of(source)[:parts]] == [each.name for each in codecs_of(codec)] else 0


def _copier(view: Grouped | Joined, name: str, rows: Copies) -> Each | Teller:
    """The view that keeps the copies of a group view or a join, or the teller, if it reads the rows in place."""
    columns = tuple(rows.columns)
    if not rows.in_place:
        return _copying(view, rows)
    parts = len(codecs_of(rows.key)) + len(codecs_of(rows.source.key))
    earlier = None
    if view.version > 1 and parts <= PARTS_MAX:  # an earlier version may have kept copies
        earlier = _copying(view, _copies(name, columns, lambda row: None, rows.key, False))
        earlier.several = False  # once it has run, it remembers nothing
    return Teller(id=name, version=view.version, columns=columns, rows=rows, tells=view, earlier=earlier)


def _copying(view: Grouped | Joined, copies: Copies) -> Each:
    """The view of single rows that keeps the copies of a group view or a join, and tells it of each change."""

    def copy(row: Row[Any]) -> Iterable[Put[Any]]:
        key = copies.key_of(row)
        if key is not None:
            values = {mine: row[column] for column, mine in copies.columns.items()}
            yield Put(copies.table, copies.place(key, row.key), values)

    return Each(
        id=copies.table.name,
        version=view.version,
        table=copies.source,
        memory=copies.source.hide(f"_view {copies.table.name}", BYTES),
        columns=tuple(copies.columns),
        outputs={},
        inner={copies.table: frozenset(copies.columns.values())},
        several=len(copies.columns) > 1,
        function=copy,
        tells=view,
        copies=copies,
    )


def _lefts(id: str, codec: Codec[Any], table: Table[Any]) -> Lefts:
    keys: Table[Any] = Table(f"{id}.keys", key=codec)
    lefts = table_of_parts(f"{id}.lefts", (*codecs_of(codec), *codecs_of(table.key)))
    return Lefts(
        left=lefts.column("left", BOOL),
        keys=keys,
        reached=keys.hide(f"_reached {id}", BYTES),
        changed=keys.signal("changed"),
    )


def own_tables(view: View) -> list[Table[Any]]:
    """The tables that a view adds to the schema."""
    if isinstance(view, Each):
        return []
    if isinstance(view, Components):
        return [view.sides.table]
    if isinstance(view, CoGrouped):
        return [] if view.table in view.outputs else [view.table]
    copier = view.copier.earlier if isinstance(view.copier, Teller) else view.copier
    copies = [] if copier is None or copier.copies is None else [copier.copies.table]
    if isinstance(view, Joined):
        lefts = view.lefts or view.unused
        return [*([] if lefts is None else [lefts.keys, lefts.left.table]), *copies]
    deltas = [] if view.deltas is None else [view.deltas.table]
    groups = [] if view.table in view.outputs else [view.table]
    return [*groups, *copies, *(column.table for column in view.orders.values()), *deltas]


def written(view: View) -> frozenset[tuple[str, str]]:
    """(table, name) of all columns that the runs of a view write, and of the signals that they raise, as far as another
    observer may observe them (V14)."""
    columns: set[tuple[str, str]] = {(c.table.name, c.name) for found in view.outputs.values() for c in found}
    for table in own_tables(view):
        columns |= {(table.name, name) for name in (*table.columns, *table.signals)}
    if isinstance(view, Grouped | CoGrouped):
        columns.add((view.table.name, view.changed.name))
    elif isinstance(view, Joined):
        columns.add((view.table.name, view.again.name))
    return frozenset(columns)


# ------------------------------------------------------------ their parts


def _signal(table: Table[Any], name: str) -> Signal[Any]:
    """The signal of a table; other views of the same declaration may have made it."""
    return table.signals.get(name) or table.signal(name)


def _owned(id: str, outputs: Outputs) -> dict[Table[Any], Column[Any, bytes]]:
    return {table: table.hide(f"_owner {id}", BYTES) for table in outputs}


def _names(columns: Columns, outputs: Outputs) -> tuple[list[str], list[str]]:
    """The columns that a view reads, and those that it writes, by their oldest names (N18)."""
    written = {f"{c.table.name}.{c.first_name}" for found in outputs.values() for c in found}
    return sorted(f"{c.table.name}.{c.first_name}" for c in columns), sorted(written)


def table_of_parts(name: str, parts: Sequence[Codec[Any]], keep: Keep | None = None) -> Table[Any]:
    """A table whose key has these parts. Raises: UsageError if they are too many."""
    if len(parts) > PARTS_MAX:
        raise UsageError(
            f"the keys of {name!r}, which the view needs, would have {len(parts)} parts, and {PARTS_MAX} are the most: "
            "use keys with fewer parts"
        )
    return Table(name, key=_key(parts), keep=keep)


def _key(parts: Sequence[Codec[Any]]) -> Codec[Any]:
    return Tuple(*parts) if len(parts) > 1 else parts[0]


def _copies(
    name: str, columns: Columns, key_of: Callable[[Row[Any]], Any], codec: Codec[Any], in_place: bool
) -> Copies:
    source = columns[0].table
    if in_place:
        return Copies(source=source, key_of=key_of, key=codec, table=source, columns={each: each for each in columns})
    table = table_of_parts(name, (*codecs_of(codec), *codecs_of(source.key)))
    mine = {column: table.column(column.first_name, column.codec, group=column.group) for column in columns}
    return Copies(source=source, key_of=key_of, key=codec, table=table, columns=mine)


def _grouping(
    by: Prefix | Callable[[Row[Any]], Any], source: Table[Any], codec: Codec[Any]
) -> Callable[[Row[Any]], Any]:
    if isinstance(by, Prefix):
        count = by.parts
        return lambda row: key_of(codec, parts_of(source.key, row.key)[:count])
    function = by
    return lambda row: normal(codec, function(row))


def _shape(version: int, sums: Iterable[Sum], ordered: Iterable[Ordered]) -> str:
    orders = (f"{order.column.first_name} {order.first} {order.last}" for order in ordered)
    return ", ".join([f"version {version}", *(f"sum {each.column.first_name}" for each in sums), *orders])


def _deltas(id: str, codec: Codec[Any]) -> Column[Any, bytes]:
    return table_of_parts(f"{id}.deltas", (*codecs_of(codec), INT64), _INTERNAL).column("delta", BYTES)


def _order(id: str, order: Ordered, members: Copies) -> Column[Any, Any]:
    by = order_codec(order.column.codec)
    if isinstance(by, TupleCodec):
        raise UsageError(f"view {id!r}: {order.column!r} is a tuple, which cannot be part of a key")
    parts = (*codecs_of(members.key), by, *codecs_of(members.source.key))
    return table_of_parts(f"{id}.by {order.column.first_name}", parts, _INTERNAL).column("value", order.column.codec)


# ------------------------------------------------------------ checks


def listed(columns: Column[Any, Any] | Sequence[Column[Any, Any]]) -> tuple[Column[Any, Any], ...]:
    """One column, or several, as a tuple."""
    if isinstance(columns, Column) or not isinstance(columns, list | tuple):
        return (columns,)  # type: ignore[return-value]  # `_must_read` refuses all but a column
    return tuple(columns)


def must_be_plain(id: str, function: object) -> None:
    """Raises: UsageError unless the function is a plain one."""
    if not callable(function) or inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"view {id!r} takes a plain function that gives views.Put(...), not {function!r}")


def must_be_id(id: object) -> None:
    """Raises: UsageError."""
    if not isinstance(id, str) or not 0 < len(id) <= _ID_MAX or id.startswith("_") or "." in id:
        raise UsageError(
            f"a view's id is a str of 1 to {_ID_MAX} characters, without '.', that does not begin with '_'; not {id!r}"
        )


def must_be_count(id: str, name: str, value: object, what: str = "rows") -> None:
    """Raises: UsageError unless the value is a number of rows, or of what is named."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"view {id!r}: {name} is a number of {what}, at least 1, not {value!r}")


def must_be_links(id: str, links: Table[Any], label: Column[Any, Any]) -> None:
    """Raises: UsageError if the links' keys do not begin with two nodes, or a label is no node."""
    nodes = label.table
    if any(isinstance(each, TupleCodec) for each in codecs_of(links.key)):
        raise UsageError(f"view {id!r}: a part of the key of {links!r} is a tuple itself; give its parts one by one")
    node = [each.name for each in codecs_of(nodes.key)]
    if [each.name for each in codecs_of(links.key)[: 2 * len(node)]] != node * 2:
        raise UsageError(
            f"view {id!r}: the keys of {links!r} do not begin with two keys of {nodes!r}, which are the ends of a link"
        )
    if label.codec.name != nodes.key.name:
        raise UsageError(f"view {id!r}: {label!r} takes a key of {nodes!r}, so it must have the codec {nodes.key!r}")


def must_be_key(id: str, codec: object) -> None:
    """Raises: UsageError unless the codec may be that of a key."""
    if not isinstance(codec, Codec) or not codec.ordered:
        raise UsageError(f"view {id!r}: key= takes an ordered codec, such as perco.TEXT, not {codec!r}")


def group_codec(
    id: str, source: Table[Any], by: object, key: Codec[Any] | None, outputs: Iterable[Table[Any]]
) -> Codec[Any]:
    """The codec of the groups' keys. Raises: UsageError."""
    if key is not None:
        must_be_key(id, key)
    if isinstance(by, Prefix):
        if key is not None:
            raise UsageError(f"view {id!r}: views.prefix takes the group's codec from the source's key; leave out key=")
        if not isinstance(source.key, TupleCodec) or len(source.key.parts) < by.parts:
            raise UsageError(f"view {id!r}: the key of {source!r} is no tuple of {by.parts} or more parts")
        if by.parts == 1 and isinstance(source.key.parts[0], TupleCodec):
            raise UsageError(
                f"view {id!r}: a part of the key of {source!r} is a tuple itself: group by a function of the row"
            )
        return _key(source.key.parts[: by.parts])
    if not callable(by):
        raise UsageError(f"view {id!r}: by= takes views.prefix(n) or a function of a row, not {by!r}")
    if key is not None:
        return key
    tables = list(outputs)
    if len(tables) != 1:
        raise UsageError(f"view {id!r} writes several tables: name the codec of its groups' keys with key=")
    return tables[0].key


def kept(id: str, columns: Columns, keep: Sequence[Aggregate]) -> tuple[tuple[Sum, ...], list[Ordered]]:
    """The sums and orders to keep; several orders of one column are made one. Raises: UsageError."""
    sums: dict[Column[Any, Any], Sum] = {}
    orders: dict[Column[Any, Any], Ordered] = {}
    if not isinstance(keep, list | tuple):
        raise UsageError(f"view {id!r}: keep= takes a list, such as [views.count()], not {keep!r}")
    for each in keep:
        if isinstance(each, Count):
            continue
        if not isinstance(each, Sum | Ordered):
            raise UsageError(f"view {id!r}: keep= takes views.count(), views.sum(column) and the like, not {each!r}")
        if each.column not in columns:
            raise UsageError(f"view {id!r} keeps an aggregate of {each.column!r}, which it does not read")
        if isinstance(each, Sum):
            sums[each.column] = each
        else:
            known = orders.get(each.column, Ordered(each.column))
            orders[each.column] = Ordered(each.column, max(known.first, each.first), max(known.last, each.last))
    return tuple(sums.values()), list(orders.values())
