"""Removes the changes that wait for a dropped observer.

N12 An observer is dropped in a version of the catalogue that writers must know (N10): no transaction that draws its
    commit timestamp after that version was announced notifies the observer. So after the announcement, a timestamp is
    drawn. Every lock and pending entry up to it that lists the observer is settled; then its notify cells, and its
    failed changes, are removed. Another process may put one meanwhile, from a transaction that had committed before:
    the row that is read then has a lock, or the notify cell.
C4  One-step commits up to that timestamp are waited for first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perco.protocol.records import Cellref, ack_of, column_of
from perco.protocol.snapshot import Blocked
from perco.schema.catalogue import Catalogue, raise_for
from perco.storage import (
    APPLIED,
    FAILED_LIST,
    LOCK,
    NOTIFY,
    PENDING,
    TS_MAX,
    Mutation,
    Query,
    ScanQuery,
    ScanRequest,
    Write,
)
from perco.txn.driver import Driver

_PAGE_ROWS: Final = 128
_CELLS: Final = 1 << 12  # of a row, in one mutation


async def remove_changes(driver: Driver, catalogue: Catalogue, number: int) -> int:
    """Remove what waits for a dropped observer, page by page. It may be repeated, and interrupted at any moment.

    Returns how many changes were removed.

    Raises: StoreError if the store cannot be written to; Corruption for a lock that cannot be read.
    """
    grave = catalogue.dropped[number]
    column = column_of(catalogue.tables[grave.table].columns[grave.column].number)
    ack = ack_of(column, number)
    await driver.oracle.announce(catalogue.binds)
    at = await driver.oracle.draw_commit()  # nothing is read at it, so nothing needs to be kept for it
    await driver.visible(at)  # C4
    groups = ((LOCK, column), (LOCK, ack), (PENDING, column), (PENDING, ack), (NOTIFY, ack), (FAILED_LIST, ack))
    queries = tuple(ScanQuery(group, (where,), 0, TS_MAX, 1) for group, where in groups)
    removed = 0
    start: bytes | None = b""
    while start is not None:
        page = await driver.store.scan(ScanRequest(grave.table, start, None, queries, False, _PAGE_ROWS))
        for row, _ in page.rows:
            removed += await _clean_row(driver, Cellref(grave.table, row, column), ack, number, at)
        start = page.next
    return removed


async def _clean_row(driver: Driver, cell: Cellref, ack: int, number: int, at: int) -> int:
    """Settle what may still notify the observer in a row, and remove what waits for it there."""
    table, row, column = cell
    queries: Sequence[Query] = [
        (LOCK, column, 0, at, 1),
        (LOCK, ack, 0, at, 1),
        (PENDING, column, 0, at, _CELLS),
        (PENDING, ack, 0, at, _CELLS),
        (NOTIFY, ack, 0, TS_MAX, _CELLS),
        (FAILED_LIST, ack, 0, TS_MAX, _CELLS),
    ]
    removed = 0
    while True:
        [found] = await driver.store.read([(table, row, queries)])
        held = [(column, each) for each in (*found[0], *found[2])] + [(ack, each) for each in (*found[1], *found[3])]
        mine = [(where, each) for where, each in held if where == ack or _lists(driver, cell, each, number)]
        for where, (start_ts, packed) in mine:
            await driver.clear(Cellref(table, row, where), Blocked(start_ts, packed))
        if mine:
            continue
        waiting = [(NOTIFY, ts) for ts, _ in found[4]] + [(FAILED_LIST, ts) for ts, _ in found[5]]
        if not waiting:
            return removed
        writes: tuple[Write, ...] = tuple([(group, ack, ts, None) for group, ts in waiting])
        with driver.observing():  # N7
            [verdict] = await driver.store.apply([Mutation(table, ((row, (), writes),), None, True)])
        if verdict is not APPLIED:
            raise_for(verdict, "removing the changes that wait for a dropped observer")
        removed += len(waiting)


def _lists(driver: Driver, cell: Cellref, held: tuple[int, bytes], number: int) -> bool:
    """Whether a lock, or a pending entry, notifies the observer once it is settled."""
    return number in driver.lock_at(cell, *held).observers
