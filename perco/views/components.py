"""Connected components: nodes get the same label if links connect them.

The label is the smallest node of the component. A new link between two components gives the nodes of one of them the
label of the other. If a link is removed, the component is searched from both of its ends, in turn, until the two
searches meet, or one of them has seen a whole part. So a change costs about what the smaller part costs, and what the
part costs whose label changes: that is the larger one if the smaller one has the smallest node.

V13 Labels and links change in one transaction. It locks the labels of a link's ends like reads (T14), so it conflicts
    with a transaction that gives one of them another label. All transactions that remove links of one component write
    one cell, that of its label. So no two of them can each rely on the link that the other removes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from perco.errors import UsageError
from perco.txn.inside import engine_of, lock
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction
from perco.views.compiled import Components, parts_of
from perco.views.memory import Memory

Give = Callable[[Components, Transaction, Any, Any, int], Awaitable[None]]
"""Writes the label of a node, which may be None: `give(view, txn, node, label, attempt)`."""


@dataclass(slots=True)
class Linked:
    """The links that one run adds and removes. It has the methods of `folding.Told`, which a run of the view that keeps
    the sides calls: `read` before it writes, `change` or `again` for each side, and `write` at the end."""

    view: Components
    give: Give
    _changes: list[tuple[tuple[Any, ...], bool]] = field(default_factory=list)
    _again: list[tuple[Any, ...]] = field(default_factory=list)

    async def read(self, txn: Transaction, keys: Iterable[Any]) -> None:
        """Called before the run writes sides, with their keys. The labels do not depend on what was there."""

    def change(self, key: Any, values: object) -> None:
        """Note that a side of a link is written; None: that it is deleted."""
        if not key[-1]:  # the other side is that of the same link
            self._changes.append((key, values is not None))

    def again(self, key: Any) -> None:
        """Note that a side is the same, but of another version of the view."""
        if not key[-1]:
            self._again.append(key)

    async def write(self, txn: Transaction, attempt: int) -> None:
        """Write the labels that change."""
        for place, there in self._changes:
            if there:
                await _link(self, txn, place, attempt)
            else:
                await _cut(self, txn, place, attempt)
        for place in self._again:
            await _take_over(self, txn, place, attempt)


async def _link(linked: Linked, txn: Transaction, place: tuple[Any, ...], attempt: int) -> None:
    view = linked.view
    ends = list(dict.fromkeys(view.ends(place)))
    labels = [await _locked(view, txn, end) for end in ends]
    least = min((end if label is None else label for end, label in zip(ends, labels, strict=True)), key=view.table.row)
    for end, label in zip(ends, labels, strict=True):
        if label is None:
            await linked.give(view, txn, end, least, attempt)
        elif not view.same(label, least):
            for node in await component(view, txn, end, without=view.link_of(place)):
                await linked.give(view, txn, node, least, attempt)


async def _cut(linked: Linked, txn: Transaction, place: tuple[Any, ...], attempt: int) -> None:
    view = linked.view
    ends = list(dict.fromkeys(view.ends(place)))
    labels = [await _locked(view, txn, end) for end in ends]
    for label in labels:
        if label is not None:
            txn.delete(view.turned, label)  # V13
    for piece in await _pieces(view, txn, ends):
        label = await _label(view, txn, piece)
        for node in piece:
            await linked.give(view, txn, node, label, attempt)


async def _take_over(linked: Linked, txn: Transaction, place: tuple[Any, ...], attempt: int) -> None:
    """Write the labels of a component if an earlier version of the view has written them: to another column, perhaps.

    Raises: UsageError if the earlier version wrote to another table.
    """
    view = linked.view
    for name, table in engine_of(txn).known.catalogue.tables.items():
        if view.turned.name in table.columns and name != view.table.name:
            raise UsageError(
                f"an earlier version of view {view.id!r} labelled rows of table {name!r}: keep the labels in that "
                "table, or declare a view with another id"
            )
    ends = view.ends(place)
    labels = {None if label is None else view.table.row(label) for label in [await _locked(view, txn, e) for e in ends]}
    versions = {Memory.unpack(stored).version for stored in (await txn.get_many(view.memory, ends)).values()}
    if len(labels) == 1 and None not in labels and versions == {view.version}:
        return  # the run for another link of the component has done it
    nodes = await component(view, txn, ends[0])
    least = min(nodes, key=view.table.row)
    for each in nodes:
        await _locked(view, txn, each)
        await linked.give(view, txn, each, least, attempt)


async def _locked(view: Components, txn: Transaction, node: Any) -> Any:
    lock(txn, view.label, node)  # V13
    return await txn.get(view.label, node)


async def _label(view: Components, snap: Snapshot, nodes: Iterable[Any]) -> Any:
    """The label of a whole component; None for a node without links."""
    nodes = list(nodes)
    if len(nodes) == 1 and not await neighbours(view, snap, nodes[0], limit=1):
        return None
    return min(nodes, key=view.table.row)


async def _pieces(view: Components, txn: Transaction, ends: list[Any]) -> list[list[Any]]:
    """After a link between these nodes has ended: the parts whose nodes need another label; none if the nodes are still
    connected."""
    if len(ends) == 1:
        return [] if await neighbours(view, txn, ends[0], limit=1) else [ends]
    old = await txn.get(view.label, ends[0])
    seen: list[dict[bytes, Any]] = [{}, {}]
    async with aclosing(_walk(view, txn, ends[0])) as first, aclosing(_walk(view, txn, ends[1])) as second:
        walks, at = (first, second), 0
        while True:
            try:
                node = await anext(walks[at])
            except StopAsyncIteration:
                break
            row = view.table.row(node)
            if row in seen[1 - at]:
                return []
            seen[at][row] = node
            at = 1 - at
    whole, end, other = list(seen[at].values()), ends[at], ends[1 - at]
    kept = end  # the part that keeps the label, unless it has no links at all
    if old is None or view.table.row(old) not in seen[at]:
        changed, kept = [whole], other
    else:
        changed = [await component(view, txn, other)]
    if not await neighbours(view, txn, kept, limit=1):
        changed.append([kept])
    return changed


async def component(view: Components, snap: Snapshot, node: Any, *, without: Any = None) -> list[Any]:
    """All nodes that links connect with a node, itself included. `without`: but for the link with this key.

    Raises: UsageError if these are too many.
    """
    async with aclosing(_walk(view, snap, node, without)) as walk:
        return [found async for found in walk]


async def neighbours(view: Components, snap: Snapshot, node: Any, *, limit: int | None = None) -> list[Any]:
    """The keys of the links of a node."""
    scan = snap.scan(view.sides.table, prefix=parts_of(view.table.key, node), columns=[view.sides], limit=limit)
    return [view.link_of(row.key) async for row in scan]


async def _walk(view: Components, snap: Snapshot, node: Any, without: Any = None) -> AsyncGenerator[Any, None]:
    """The nodes of a component, breadth first. Raises: UsageError if these are too many."""
    seen, waiting = {view.table.row(node)}, deque([node])
    yield node
    while waiting:
        scan = snap.scan(view.sides.table, prefix=parts_of(view.table.key, waiting.popleft()), columns=[view.sides])
        async for side in scan:
            found = view.ends(side.key)[1]
            row = view.table.row(found)
            if row in seen or (without is not None and view.link_of(side.key) == without):
                continue
            if len(seen) >= view.nodes_max:
                raise UsageError(
                    f"view {view.id!r}: more than {view.nodes_max} nodes are connected with {node!r}, and a run reads "
                    "them: raise nodes_max, or leave out the links that connect so many"
                )
            seen.add(row)
            waiting.append(found)
            yield found


def labels(view: Components, links: Iterable[Any]) -> list[tuple[Any, Any]]:
    """The definition: all nodes of links with these keys, in order, and their labels."""
    parent: dict[bytes, bytes] = {}

    def root(row: bytes) -> bytes:
        while parent[row] != row:
            parent[row] = row = parent[parent[row]]
        return row

    for link in links:
        one, other = (view.table.row(end) for end in view.ends_of(link))
        parent.setdefault(one, one)
        parent.setdefault(other, other)
        low, high = sorted((root(one), root(other)))
        parent[high] = low
    decode = view.table.key.decode
    return [(decode(row), decode(root(row))) for row in sorted(parent)]


def sides_of(view: Components, link: Any) -> list[tuple[Any, ...]]:
    """The keys in `view.sides` for a link: one for each end; of a link from a node to itself, one."""
    parts = parts_of(view.links.key, link)
    one, other = view.ends_of(link)
    count = len(parts_of(view.table.key, one))
    found = [(*parts, 0)]
    if not view.same(one, other):
        found.append((*parts[count : 2 * count], *parts[:count], *parts[2 * count :], 1))
    return found
