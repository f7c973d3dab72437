"""The options and the counters of a worker."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from perco.errors import UsageError
from perco.notify.backoff import BackoffOptions
from perco.notify.breakers import BreakerOptions
from perco.settings import check_options


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """Attributes:
    concurrency: runs in flight, over all scanners.
    scanners: tasks that look for work, each with its share of the runs.
    conflicts_max: conflicts after which a run backs off like a failed one.
    page_rows: rows with notify cells that a scanner reads at a time.
    failing_share: the part of the runs in flight that may be retries of failed ones.
    teleport: whether a scanner that encounters another one jumps to a random place (paper, section 2.4; N8). False:
        for measurements only.
    row_locks: whether scanners lock rows, so that no two of them run observers on one row. False: for measurements
        only; concurrent runs on a row then conflict.
    attempts: how many runs of an observer may fail for a change, with an error of the observer itself, before the
        change is moved to the failed list; 0: it is never given up. The store keeps the count, so it survives restarts.
    chain_max: how many observers, each triggered by the one before it, a chain may have; 0: any number.
    outputs: note in the store which columns each observer writes, once for each column. `db.observers()` and
        `perco observers --graph` show these notes.
    backoff: how long a failed run waits before it is tried again.
    breaker: when an observer whose runs all fail is stopped (N14).
    only, without: ids of the observers that the worker runs, or that it leaves to other workers; None: all, or none.
    """

    concurrency: int = 64
    scanners: int = 4
    conflicts_max: int = 16
    page_rows: int = 64
    failing_share: float = 0.25
    teleport: bool = True
    row_locks: bool = True
    attempts: int = 16
    chain_max: int = 100
    outputs: bool = True
    backoff: BackoffOptions = field(default_factory=BackoffOptions)
    breaker: BreakerOptions = field(default_factory=BreakerOptions)
    only: Collection[str] | None = None
    without: Collection[str] | None = None

    def __post_init__(self) -> None:
        check_options(self, zero=("attempts", "chain_max"))
        for name, ids in ("only", self.only), ("without", self.without):
            if ids is not None and (isinstance(ids, str | bytes) or not all(isinstance(id, str) for id in ids)):
                raise UsageError(f"WorkerOptions: {name} takes a list of observer ids, not {ids!r}")


@dataclass(slots=True)
class ObserverCounters:
    """Counters of one observer since the worker was started.

    `runs`: begun; `commits`: runs that have completed; `collapsed`: changes beyond the first that such a run handled
    (N4); `batched`: completed runs that shared a transaction with others (N20); `conflicts`, `failures`: runs that did
    not commit; `later`: runs that asked to be run later (`Retry`); `given_up`: changes that were moved to the failed
    list (N6); `running`: runs in flight now; `seconds`: time spent in its function.
    """

    runs: int = 0
    commits: int = 0
    collapsed: int = 0
    batched: int = 0
    conflicts: int = 0
    failures: int = 0
    later: int = 0
    given_up: int = 0
    running: int = 0
    seconds: float = 0.0
