"""Takes a restored store back to an earlier timestamp, before anybody opens it.

B6  All locks are settled first: their transactions have committed, or never will (T5, T8). Then everything that
    committed after the timestamp is removed: records, with the data that they name; acknowledgements; notifications and
    failed changes of changes that are gone. An acknowledgement that is removed may have been for a change that stays.
    Such a change waits again (N1), and so does a signal that was raised before and handled after (N5). They get the
    earliest cause, because the true one may be gone (N9).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final

from perco.check.repair import repair
from perco.database.inside import inside, local_owner
from perco.database.making import offline
from perco.errors import Corruption, SnapshotTooOld, UsageError
from perco.notify.sweeper import sweep
from perco.protocol.records import (
    ACK,
    ACK_HEAD_BYTES,
    DELETE,
    PUT_DATA,
    Cellref,
    ack_version,
    cause_of_run,
    data_group,
    observed_column,
    observer_of,
    pack_cause,
    unpack_record,
)
from perco.schema.catalogue import Catalogue
from perco.storage import (
    APPLIED,
    FAILED_LIST,
    NOTIFY,
    ROLLBACK,
    TRACE,
    TS_MAX,
    WRITE,
    Mutation,
    OwnerStore,
    ScanCell,
    ScanQuery,
    ScanRequest,
    Write,
)

_GROUPS: Final = (WRITE, NOTIFY, FAILED_LIST, TRACE, ROLLBACK)
_CELLS: Final = 1 << 10  # of one group of a row, at once
_ROWS: Final = 512
_EARLIEST: Final = pack_cause(1, 0)


async def trim(folder: str, at: int | datetime, last: int) -> int:
    """Remove from a store in a folder what committed after a timestamp, or a time. Returns the timestamp.

    Args:
        last: up to this timestamp, the store has every transaction.

    Raises: UsageError for a later timestamp; SnapshotTooOld if the store no longer has the history; Corruption if it
    has faults that cannot be repaired.
    """
    async with offline(folder) as db:
        parts, store = inside(db), local_owner(db).local.store
        ts = at if isinstance(at, int) else (await parts.oracle.at(at.timestamp()))[0]
        if not 0 < ts <= last:
            raise UsageError(f"the backup has every transaction up to {last}, not up to {ts}: take a later backup")
        for table in parts.catalogue.tables:
            cut = await parts.oracle.cut(table)
            if cut > ts:
                raise SnapshotTooOld(ts, cut, table)
        await sweep(store, parts.driver, lambda cell, start_ts: False)
        for table in parts.catalogue.tables:
            start: bytes | None = b""
            while start is not None:
                queries = tuple(ScanQuery(group, None, ts + 1, TS_MAX, _CELLS) for group in _GROUPS)
                page = await store.scan(ScanRequest(table, start, None, queries, False, _ROWS))
                for row, found in page.rows:
                    full = any(len(cells) == _CELLS for cells in found)
                    writes = list(_writes(parts.catalogue, table, found, ts))
                    notified = {cell[0] for group in found[:3] for cell in group if observer_of(cell[0])}
                    for ack in notified:
                        writes += await _again(store, parts.catalogue, Cellref(table, row, ack), ts)
                    await _apply(store, table, row, writes)
                    if full:  # there may be more in this row: read it again
                        page = page._replace(next=row)
                        break
                start = page.next
        done = await repair(parts.driver, store, ts=parts.oracle.last)
        if done.after.errors:
            raise Corruption(folder, f"it has faults that cannot be repaired: {done.after.findings[0].what}")
        return ts


def _writes(catalogue: Catalogue, table: str, found: Sequence[Sequence[ScanCell]], ts: int) -> Iterator[Write]:
    """The writes that take a row back to `ts`. `found`: its later cells, by group."""
    for group, cells in zip(_GROUPS, found, strict=True):
        for column, at, value in cells:
            yield group, column, at, None
            if group != WRITE:
                continue
            record = unpack_record(value)
            if record.kind == PUT_DATA:
                yield data_group(record.body), column, record.start_ts, None
            elif record.kind == ACK and observed_column(column) in catalogue.signals(table):
                cause = cause_of_run(record.body, signal=True)
                raised = cause[0] if cause is not None else 0
                if 0 < raised <= ts and observer_of(column) not in catalogue.dropped:
                    yield NOTIFY, column, raised, _EARLIEST


async def _again(store: OwnerStore, catalogue: Catalogue, at: Cellref, ts: int) -> list[Write]:
    """Of an observer that was notified, or ran, after `ts`: what notifies it of the newest change that stays, if it has
    not seen that change (N1, N3)."""
    table, row, ack = at
    observed, number = observed_column(ack), observer_of(ack)
    entry = next((each for each in catalogue.observers.values() if each.number == number), None)
    if entry is None or entry.told or observed in catalogue.signals(table):
        return []  # V12: what an observer that was told would do was done with the change
    queries = ((WRITE, observed, 0, ts, 1), (WRITE, ack, 0, ts, 1), (FAILED_LIST, ack, 0, ts, 1))
    [[changes, acks, failed]] = await store.read([(table, row, queries)])
    if not changes:
        return []
    newest, record = changes[0][0], unpack_record(changes[0][1])
    run = unpack_record(acks[0][1]) if acks else None
    old = run is not None and bool(entry.at) and ack_version(run.body[:ACK_HEAD_BYTES]) < entry.version
    pointer = run.start_ts if run is not None and not old else 0
    told = newest > entry.at or (entry.whole and record.kind != DELETE)  # N10
    if newest <= entry.built[0] or newest == entry.built[1]:
        return []  # N10: the job that built the view has seen it
    if newest <= pointer or not (pointer or told) or (failed and failed[0][0] >= newest):
        return []
    return [(NOTIFY, ack, newest, _EARLIEST)]


async def _apply(store: OwnerStore, table: str, row: bytes, writes: list[Write]) -> None:
    [verdict] = await store.apply([Mutation(table, ((row, (), tuple(writes)),), None, True)])
    if verdict is not APPLIED:
        raise Corruption(f"table {table!r}", f"it could not be written to: {verdict}")
