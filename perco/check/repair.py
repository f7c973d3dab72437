"""Repairs what `check` finds, if a repair is safe. Runs in the process that owns the store, or in a client, even while
the store is in use.

Each repair is a mutation of one row, which checks that the finding still holds (`repairs.py`). Locks that were left
behind are settled as any transaction would settle them (T5, T8); a client leaves that to the owner. If a transaction or
a cell has an error without a repair, it is left alone. Its locks stay, too, because they may be all that shows
what was to be written.

One repair may uncover another finding, so checks and repairs alternate until nothing more can be done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from perco.check.check import CheckOptions, CheckResult, Progress, check
from perco.check.examine import Finding
from perco.check.system import Groups
from perco.errors import WriteUnknown
from perco.notify.sweeper import sweep
from perco.protocol.records import Cellref
from perco.storage import APPLIED, Failed, NoReply, OwnerStore, RowStore
from perco.txn.driver import Driver

_ROUNDS_MAX = 16


@dataclass(frozen=True, slots=True)
class RepairResult:
    """The result of a repair, and of the check after it.

    Attributes: `repaired`: the findings, in the order of their repair; `settled`: how many locks left behind were
    settled; `after`: the result of the last check.
    """

    repaired: tuple[Finding, ...]
    settled: int
    after: CheckResult


async def repair(
    driver: Driver,
    store: OwnerStore,
    *,
    ts: int = 0,
    options: CheckOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> RepairResult:
    """Repair all that can be repaired safely, in the process that owns the store. Arguments as for `check`.

    Raises: StoreFull and other errors of the store; repairs made up to then are kept.
    """
    repaired: list[Finding] = []
    settled = 0
    for _ in range(_ROUNDS_MAX):
        result = await check(store, ts=ts, alive=driver.fates.alive, options=options, progress=progress)
        done = [finding for finding in result.findings if await _repaired(driver, finding)]
        left = result.unsettled + result.orphans
        swept = await _settle(driver, store, result) if left and not result.dropped else 0
        repaired += done
        settled += swept
        if not done and not swept:
            break
    return RepairResult(tuple(repaired), settled, result)


async def repair_elsewhere(
    driver: Driver,
    store: RowStore,
    *,
    groups: Callable[[], Awaitable[list[Groups]]],
    ts: int = 0,
    options: CheckOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> RepairResult:
    """Like `repair`, but in a client. The owner settles the locks.

    Raises: as `repair`; Unavailable, SessionEnded; WriteUnknown if the answer to a repair was lost.
    """
    repaired: list[Finding] = []
    for _ in range(_ROUNDS_MAX):
        result = await check(store, ts=ts, options=options, progress=progress, groups=groups)
        done = [finding for finding in result.findings if await _repaired(driver, finding)]
        repaired += done
        if not done:
            break
    return RepairResult(tuple(repaired), 0, result)


async def _repaired(driver: Driver, finding: Finding) -> bool:
    """Repair a finding. Returns False if it has no repair, or no longer holds."""
    if finding.repair is None:
        return False
    with driver.observing():  # N7: the repair may put or remove notify cells
        [verdict] = await driver.store.apply([finding.repair.mutation])
    if isinstance(verdict, Failed):
        raise verdict.error
    if isinstance(verdict, NoReply):
        what = f"a repair of {finding.where}"
        raise WriteUnknown(what, verdict.reason, "Run the repair again: nothing is repaired twice.")
    return verdict is APPLIED


async def _settle(driver: Driver, store: OwnerStore, result: CheckResult) -> int:
    errors = [finding for finding in result.findings if finding.severity == "error"]
    cells = {finding.cell for finding in errors}
    transactions = {finding.start_ts for finding in errors}

    def spared(cell: Cellref, start_ts: int) -> bool:
        return cell in cells or start_ts in transactions

    return (await sweep(store, driver, spared)).settled
