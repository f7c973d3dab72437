"""Random graphs of views in tests: one transaction, and the comparison of a store with the batch build."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import perco
from perco import views
from perco.testing.graphs import Graph as Graph, State as State


async def write(db: perco.Database, changes: Iterable[tuple[perco.Column[Any, Any], Any, Any]]) -> None:
    """One transaction."""

    async def body(txn: perco.Transaction) -> None:
        for column, key, value in changes:
            if value is None:
                txn.delete(column, key)
            else:
                txn.set(column, key, value)

    await db.run(body)


async def stored(db: perco.Database, graph: views.Views) -> State:
    """The store's rows of all tables and columns that the views write."""
    out: State = {}
    async with db.snapshot() as snap:
        for view in graph.declared.values():
            for table, columns in view.outputs.items():
                rows = out.setdefault(table, {})
                async for row in snap.scan(table, columns=list(columns)):
                    rows.setdefault(row.key, {}).update({each: row[each] for each in columns if row[each] is not None})
    return out


async def check_equal(db: perco.Database, graph: views.Views, state: State) -> None:
    """V7: the store has what the batch build makes of the sources, value for value."""
    expected, found = graph.build(state), await stored(db, graph)
    assert found.keys() == expected.keys()
    for table, rows in expected.items():
        plain = {key: {column.name: repr(value) for column, value in values.items()} for key, values in rows.items()}
        there = {key: {column.name: repr(value) for column, value in v.items()} for key, v in found[table].items()}
        assert there == plain, table
