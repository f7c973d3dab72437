"""The lane: commits what most transactions are, some cells in one tablet, without a `Commit`.

As long as all goes as usual, the lane does what `Driver.commit` does in one step (C1), with the same mutation. As soon
as anything else happens, it tells a `Commit` what it has done, and the driver goes on from there: so what is unusual is
decided in one place. tests/component/txn/test_lane.py gives both the same inputs and faults.

C2  There is no await between the look at the cells that are entered, the draw of commit_ts, and the entry.
C3  The cells leave when the mutation has been answered, or was never sent.
C6  The mutation is sent once.
N10 A transaction that knows an older catalogue takes the other way, on which it fails.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence

import trio

from perco.protocol.commit import Commit, State
from perco.protocol.mutations import Header, Intent, one_step
from perco.protocol.records import READ
from perco.storage import APPLIED
from perco.txn.driver import Driver
from perco.txn.entered import Entry, Where

Parts = Sequence[Sequence[Intent]]


def has_lane(driver: Driver) -> bool:
    """Whether transactions of this driver that commit in one step can take the lane, if they have one part and only
    write."""
    return driver.laned and driver.store.deferring is None


@trio.lowlevel.enable_ki_protection
async def commit_in_lane(driver: Driver, header: Header, parts: Parts, version: int, *, observed: bool) -> int:
    """Commit the cells of the only part, and return commit_ts; 0: nothing was done, and the transaction has to take the
    other way. Raises: as `Driver.commit` does."""
    entered, oracle, start_ts = driver.entered.cells, driver.oracle, header.start_ts
    [part] = parts
    assert part[-1].kind < READ, "C2: locked cells and signals are not entered"
    cells = [intent[:3] for intent in part]
    if in_the_way(entered, cells) or oracle.catalogue_version > version:
        return 0
    commit_ts = oracle.draw_nowait()
    if not commit_ts:
        return 0
    began = time.perf_counter() if driver.timings is not None else 0.0
    entry = Entry(commit_ts, start_ts, header.primary)
    for where in cells:
        entered[where] = entry
    driver.fates.begin(start_ts)
    if observed:
        driver.fates.observed += 1
    try:
        [verdict] = await driver.chained((one_step(header, part, commit_ts),), None)
    except BaseException:
        leave(entered, cells, entry)
        driver.never_sent(start_ts, observed=observed)
        raise
    if verdict is not APPLIED:
        commit = Commit(header, parts, one_step=True)
        commit.drawn(commit_ts)
        commit.primary_told(verdict)
        if commit.state is not State.ASK:
            leave(entered, cells, entry)
        return await driver.go_on(commit, began, observed=observed, version=version)
    leave(entered, cells, entry)
    driver.committed(start_ts, commit_ts, began)
    if observed:
        driver.tell_workers([(each.table, each.row, each.observers) for each in part if each.observers])
    return commit_ts


def in_the_way(entered: Container[Where], cells: Sequence[Where]) -> bool:
    """Whether any of the cells is entered."""
    for where in cells:  # noqa: SIM110  # `any` takes longer than the look
        if where in entered:
            return True
    return False


def leave(entered: dict[Where, Entry], cells: Sequence[Where], entry: Entry) -> None:
    """C3: remove a commit's entries."""
    for where in cells:
        found = entered.pop(where)
        assert found is entry, "C3: an entry is its own transaction's"
