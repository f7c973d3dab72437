"""The lane: commits what most transactions are, some cells in one tablet, without a `Commit`.

As long as all goes as usual, the lane does what `Driver.commit` does in one step (C1), with the same mutation. As soon
as anything else happens, a `Commit` is told what was done so far, and the driver goes on with it: so what is unusual is
decided in one place. The two are held against each other in tests/component/txn/test_lane.py.

C2  There is no await between the look at the cells that are entered, the draw of commit_ts, and the entry.
C3  The cells leave when the mutation has been answered, or was never sent.
C6  The mutation is sent once.
N10 A transaction that knows an older catalogue takes the other way, on which it fails.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import trio

from perco.protocol.commit import Commit, State
from perco.protocol.mutations import Header, one_step_of
from perco.schema.catalogue import Bound
from perco.storage import APPLIED
from perco.txn.driver import Driver
from perco.txn.entered import Entry
from perco.txn.writes import Where, intent_of, stored

Writes = Mapping[Where, tuple[Bound, "bytes | None"]]


def has_lane(driver: Driver) -> bool:
    """Whether transactions of this driver can take the lane now."""
    store = driver.store
    return driver.laned and driver.options.one_step and driver.fates.alone and store.once and store.deferring is None


@trio.lowlevel.enable_ki_protection
async def commit_in_lane(driver: Driver, writes: Writes, header: Header, version: int, *, observed: bool) -> int:
    """Commit cells that are written and not locked, and return commit_ts; 0: nothing was done, because this transaction
    has to take the other way. Raises: as `Driver.commit` does."""
    entered = driver.entered.cells
    if entered and _in_the_way(entered, writes):
        return 0
    if len(writes) > 1:
        if not driver.store.groups:
            return 0
        locate = driver.store.locate
        place = locate(header.primary.table, header.primary.row)
        for table, row, _ in writes:
            if locate(table, row) != place:
                return 0
    oracle, start_ts = driver.oracle, header.start_ts
    if oracle.catalogue_version > version:
        return 0
    commit_ts = oracle.draw_nowait()
    if not commit_ts:
        return 0
    began = time.perf_counter() if driver.timings is not None else 0.0
    entry = Entry(commit_ts, start_ts, header.primary)
    for where in writes:
        entered[where] = entry
    driver.fates.begin(start_ts)
    if observed:
        driver.fates.observed += 1
    try:
        root = header.root or commit_ts
        cells = [
            (row, column, *stored(bound, data), bound.observers) for (_, row, column), (bound, data) in writes.items()
        ]
        mutation = one_step_of(header.primary.table, start_ts, commit_ts, cells, root, header.depth, header.path)
        [verdict] = await driver.chained((mutation,), None)
    except BaseException:
        _leave(entered, writes, entry)
        driver.never_sent(start_ts, observed=observed)
        raise
    if verdict is not APPLIED:
        commit = Commit(header, [[intent_of(where, write) for where, write in writes.items()]], one_step=True)
        commit.drawn(commit_ts)
        commit.primary_told(verdict)
        if commit.state is not State.ASK:
            _leave(entered, writes, entry)
        return await driver.go_on(commit, began, observed=observed, version=version)
    _leave(entered, writes, entry)
    driver.committed(start_ts, commit_ts, began)
    if observed:
        driver.tell_workers(
            [(table, row, bound.observers) for (table, row, _), (bound, _) in writes.items() if bound.observers]
        )
    return commit_ts


def _in_the_way(entered: Mapping[Where, Entry], writes: Writes) -> bool:
    return any(where in entered for where in writes)


def _leave(entered: dict[Where, Entry], writes: Writes, entry: Entry) -> None:
    for where in writes:
        found = entered.pop(where)
        assert found is entry, "C3: an entry is its own transaction's"
