"""Removes the cells of dropped columns and tables, as a part of the vacuum.

N17 A timestamp is drawn once the drop has been announced (N10), so each transaction that has written the column began
    before it. Once the watermark has passed it, the vacuum has settled the locks of all of these (G2), in all tables.
    So no lock anywhere has a primary in the column, and no cell of the column is written any more. Readers that began
    before the drop keep the watermark below the timestamp, and so the cells.
E1  With a write record, its entry in the log goes.
S4  A removal may use the reserve of a full disk.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Final

from perco.errors import StoreFull
from perco.protocol.records import ack_of, bare_column, column_of
from perco.schema.catalogue import Catalogue, raise_for
from perco.schema.entries import TableEntry
from perco.schema.removing import cleaned, dated, undated
from perco.storage import (
    APPLIED,
    DATA,
    FAILED_LIST,
    LOG,
    NOTIFY,
    ROLLBACK,
    TRACE,
    TS_MAX,
    WRITE,
    Failed,
    Mutation,
    NoReply,
    RowMutation,
    RowStore,
    ScanCell,
    ScanQuery,
    ScanRequest,
    Verdict,
    Write,
    is_logged,
)
from perco.txn.driver import Driver

Change = Callable[[Callable[[Catalogue], Catalogue]], Awaitable[None]]

_GROUPS: Final = (WRITE, ROLLBACK, TRACE, NOTIFY, FAILED_LIST)  # but for the values, and for locks: none are left
_PAGE_ROWS: Final = 128
_CELLS: Final = 32  # of a column of a row, in one mutation: it must fit the reserve


async def date(driver: Driver, catalogue: Catalogue, change: Change) -> None:
    """Draw and record the timestamp of the drops that have none. Raises: StoreError."""
    if columns := undated(catalogue):
        await driver.oracle.announce(catalogue.binds)  # the task that changed the catalogue may still be about to
        at = await driver.oracle.draw_commit()
        await change(partial(dated, columns=columns, at=at))


def needed(catalogue: Catalogue, table: str) -> int:
    """The watermark that is needed to remove the cells of all columns that were dropped from a table; 0: there are
    none."""
    return max((gone.at for gone in catalogue.tables[table].gone.values() if not gone.clean), default=0)


def due(catalogue: Catalogue, table: str, watermark: int) -> list[int]:
    """Of the columns that were dropped from a table, those whose cells can be removed now, by number."""
    gone = catalogue.tables[table].gone
    return [number for number, each in gone.items() if not each.clean and 0 < each.at <= watermark]


async def remove(
    driver: Driver,
    catalogue: Catalogue,
    table: str,
    numbers: Collection[int],
    change: Change,
    give_way: Callable[[int], Awaitable[None]],
) -> int:
    """Remove all cells of dropped columns, and record that this is done. It may be interrupted, and repeated.

    Args:
        give_way: called after each page, with the number of cells that were removed.

    Returns how many replies were lost: the next vacuum looks at the rows again. Raises: StoreError if the store cannot
    be written to.
    """
    entry, store = catalogue.tables[table], driver.store
    queries = _queries(catalogue, table, numbers)
    lost = 0
    start: bytes | None = b""
    while start is not None:
        page = await store.scan(ScanRequest(table, start, None, queries, False, _PAGE_ROWS))
        start = page.next
        rows: list[RowMutation] = []
        again: bytes | None = None
        for row, found in page.rows:
            writes = list(_writes(entry, queries, found))
            if writes:
                rows.append((row, (), writes))
            if any(len(cells) >= _CELLS for cells in found):
                again = row  # there may be more in this row
                break
        lost_here = await _apply(store, table, rows)
        lost += lost_here
        if again is not None:  # after a lost reply, the next vacuum looks at the row again
            start = again if not lost_here else again + b"\0"
        count = sum(len(writes) for _, _, writes in rows)
        await give_way(count)
    if not lost:
        await change(partial(cleaned, table=table, numbers=numbers))
    return lost


def _queries(catalogue: Catalogue, table: str, numbers: Collection[int]) -> tuple[ScanQuery, ...]:
    """The queries that find the cells of dropped columns. Observers that were dropped long ago have left
    acknowledgements, and late notify cells (N12)."""
    entry = catalogue.tables[table]
    values = tuple(column_of(number) for number in numbers)
    observers = [number for number, grave in catalogue.dropped.items() if grave.table == table]
    acks = [ack_of(column, number) for column in values for number in observers]
    every = (*values, *map(bare_column, values), *acks)
    groups = sorted({DATA, *(entry.gone[number].group for number in numbers)})
    return (
        *(ScanQuery(group, every, 0, TS_MAX, _CELLS, False) for group in _GROUPS),
        *(ScanQuery(group, values, 0, TS_MAX, _CELLS, False) for group in groups),
    )


def _writes(entry: TableEntry, queries: Sequence[ScanQuery], found: Sequence[Sequence[ScanCell]]) -> Iterator[Write]:
    """The writes that remove these cells from a row."""
    for query, cells in zip(queries, found, strict=True):
        for column, ts, _ in cells:
            yield query.group, column, ts, None
            if query.group == WRITE and entry.changes and is_logged(column):
                yield LOG, column, ts, None


async def _apply(store: RowStore, table: str, rows: Sequence[RowMutation]) -> int:
    """Returns how many replies were lost. Raises: StoreError."""
    together = [list(rows)] if store.groups else [[row] for row in rows]
    mutations = [Mutation(table, group, None, True) for group in together if group]
    lost = 0
    for mutation, verdict in zip(mutations, await store.apply(mutations) if mutations else (), strict=True):
        if isinstance(verdict, Failed) and isinstance(verdict.error, StoreFull) and len(mutation.rows) > 1:
            for row in mutation.rows:  # one row fits the reserve
                [alone] = await store.apply([Mutation(table, [row], None, True)])
                lost += _is_lost(table, alone)
        else:
            lost += _is_lost(table, verdict)
    return lost


def _is_lost(table: str, verdict: Verdict) -> bool:
    """Whether a reply was lost. Raises: StoreError, if the mutation failed."""
    if verdict is not APPLIED and not isinstance(verdict, NoReply):
        raise_for(verdict, f"removing dropped columns of table {table!r}")
    return verdict is not APPLIED
