"""The tables that a view of groups needs, and the checks of what they are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from perco.errors import UsageError
from perco.protocol.retention import Keep
from perco.schema.codecs import BOOL, BYTES, INT64, Codec, Tuple, TupleCodec
from perco.schema.schema import Column, Table
from perco.txn.row import Row
from perco.views.aggregates import Aggregate, Count, Ordered, Sum, order_codec
from perco.views.compiled import PARTS_MAX, Each, Grouped, Joined, Prefix, codecs_of, parts_of
from perco.views.rows import Put

_INTERNAL: Final = Keep(seconds=60.0)  # no reader asks for the past of deltas and orders


def _joined(parts: Sequence[Codec[Any]]) -> Codec[Any]:
    return Tuple(*parts) if len(parts) > 1 else parts[0]


def group_codec(
    id: str, source: Table[Any], by: object, key: Codec[Any] | None, outputs: Iterable[Table[Any]]
) -> Codec[Any]:
    """The codec of the groups' keys. Raises: UsageError."""
    if key is not None and not (isinstance(key, Codec) and key.ordered):
        raise UsageError(f"view {id!r}: key= takes an ordered codec, such as perco.TEXT, not {key!r}")
    if isinstance(by, Prefix):
        if key is not None:
            raise UsageError(f"view {id!r}: views.prefix takes the group's codec from the source's key; leave out key=")
        if not isinstance(source.key, TupleCodec) or len(source.key.parts) < by.parts:
            raise UsageError(f"view {id!r}: the key of {source!r} is no tuple of {by.parts} or more parts")
        if by.parts == 1 and isinstance(source.key.parts[0], TupleCodec):
            raise UsageError(
                f"view {id!r}: a part of the key of {source!r} is a tuple itself: group by a function of the row"
            )
        return _joined(source.key.parts[: by.parts])
    if not callable(by):
        raise UsageError(f"view {id!r}: by= takes views.prefix(n) or a function of a row, not {by!r}")
    if key is not None:
        return key
    tables = list(outputs)
    if len(tables) != 1:
        raise UsageError(f"view {id!r} writes several tables: name the codec of its groups' keys with key=")
    return tables[0].key


def kept(
    id: str, columns: Sequence[Column[Any, Any]], keep: Sequence[Aggregate]
) -> tuple[tuple[Sum, ...], list[Ordered]]:
    """The sums and orders to keep; those of one column are made one."""
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


def _table(id: str, name: str, parts: Sequence[Codec[Any]], keep: Keep | None = None) -> Table[Any]:
    if len(parts) > PARTS_MAX:
        raise UsageError(
            f"view {id!r}: keys of {name!r} would have {len(parts)} parts, and {PARTS_MAX} are the most: "
            "group and source keys together have too many"
        )
    return Table(name, key=_joined(parts), keep=keep)


def members(id: str, codec: Codec[Any], source: Table[Any], columns: Iterable[Column[Any, Any]]) -> Table[Any]:
    """The table that sorts source rows by their groups."""
    table = _table(id, f"{id}.members", (*codecs_of(codec), *codecs_of(source.key)))
    for column in columns:
        table.column(column.name, column.codec, group=column.group)
    return table


def _deltas(id: str, codec: Codec[Any]) -> Column[Any, bytes]:
    table = _table(id, f"{id}.deltas", (*codecs_of(codec), INT64), _INTERNAL)
    return table.column("delta", BYTES)


def _order(id: str, codec: Codec[Any], order: Ordered, rest: Sequence[Codec[Any]]) -> Column[Any, Any]:
    by = order_codec(order.column.codec)
    if isinstance(by, TupleCodec):
        raise UsageError(f"view {id!r}: {order.column!r} is a tuple, which cannot be part of a key")
    table = _table(id, f"{id}.by {order.column.name}", (*codecs_of(codec), by, *rest), _INTERNAL)
    return table.column("value", order.column.codec)


def grouped(
    id: str,
    version: int,
    codec: Codec[Any],
    source: Table[Any],
    columns: tuple[Column[Any, Any], ...],
    by: Prefix | Callable[[Row[Any]], Any],
    members: Table[Any],
    outputs: dict[Table[Any], frozenset[Column[Any, Any]]],
    sums: tuple[Sum, ...],
    ordered: Sequence[Ordered],
    keep: Sequence[Aggregate],
    members_max: int,
) -> Grouped:
    """A view of groups, without its function. `codec`: of the groups' keys."""
    groups: Table[Any] = Table(f"{id}.groups", key=codec)
    parts = len(codecs_of(codec))
    rest = codecs_of(members.key)[parts:]
    return Grouped(
        id,
        version,
        groups,
        groups.hide(f"_view {id}", BYTES),
        outputs,
        {each: each.hide(f"_owner {id}", BYTES) for each in outputs},
        source=source,
        columns=columns,
        by=by,
        members=members,
        copied={column: members.columns[column.name] for column in columns},
        parts=parts,
        changed=groups.signal("changed"),
        kept=groups.hide(f"_kept {id}", BYTES),
        deltas=_deltas(id, codec) if keep else None,
        orders={each: _order(id, codec, each, rest) for each in ordered},
        sums=sums,
        members_max=members_max,
    )


def indexing(view: Grouped) -> Each:
    """The view that keeps the members of another one sorted by their groups."""

    def member(row: Row[Any]) -> Iterable[Put[Any]]:
        group = view.group_of(row)
        if group is not None:
            parts = (*parts_of(view.table.key, group), *parts_of(view.source.key, row.key))
            yield Put(view.members, parts, {view.copied[column]: row[column] for column in view.columns})

    outputs = {view.members: frozenset(view.copied.values())}
    memory = view.source.hide(f"_view {view.id}.members", BYTES)
    index = Each(f"{view.id}.members", view.version, view.source, memory, outputs, {})
    index.columns, index.function = view.columns, member
    index.told = {view.members: [view]}
    return index


def joined(
    id: str,
    version: int,
    codec: Codec[Any],
    columns: tuple[Column[Any, Any], ...],
    rights_columns: tuple[Column[Any, Any], ...],
    on: Callable[[Row[Any]], Any],
    to: Callable[[Row[Any]], Any] | None,
    how: str,
    outputs: dict[Table[Any], frozenset[Column[Any, Any]]],
    matches_max: int,
) -> Joined:
    """A join, without its function. `codec`: of the keys."""
    table, source = columns[0].table, rights_columns[0].table
    keys: Table[Any] = Table(f"{id}.keys", key=codec)
    lefts = _table(id, f"{id}.lefts", (*codecs_of(codec), *codecs_of(table.key)))
    rights = _table(id, f"{id}.rights", (*codecs_of(codec), *codecs_of(source.key)))
    copied = {column: rights.column(column.name, column.codec, group=column.group) for column in rights_columns}
    left = lefts.column("left", BOOL)
    return Joined(
        id,
        version,
        table,
        table.hide(f"_view {id}", BYTES),
        outputs,
        {each: each.hide(f"_owner {id}", BYTES) for each in outputs},
        inner={lefts: frozenset([left])},
        columns=columns,
        source=source,
        rights_columns=rights_columns,
        on=on,
        to=to,
        how=how,
        keys=keys,
        lefts=lefts,
        left=left,
        rights=rights,
        copied=copied,
        turned=keys.hide(f"_turned {id}", BYTES),
        reached=keys.hide(f"_reached {id}", BYTES),
        changed=keys.signal("changed"),
        again=table.signal(f"{id}.again"),
        matches_max=matches_max,
    )


def matching(view: Joined) -> Each:
    """The view that keeps the right rows of a join sorted by their keys."""

    def match(row: Row[Any]) -> Iterable[Put[Any]]:
        key = view.key_of_right(row)
        if key is not None:
            parts = (*parts_of(view.keys.key, key), *parts_of(view.source.key, row.key))
            yield Put(view.rights, parts, {copy: row[column] for column, copy in view.copied.items()})

    outputs = {view.rights: frozenset(view.copied.values())}
    memory = view.source.hide(f"_view {view.id}.rights", BYTES)
    index = Each(f"{view.id}.rights", view.version, view.source, memory, outputs, {})
    index.columns, index.function = view.rights_columns, match
    index.told = {view.rights: [view]}
    return index
