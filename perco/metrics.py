"""Metrics of an open store, for Prometheus: `pip install 'perco[metrics]'`.

    async with perco.open("web/", schema) as db, db.worker():
        perco.metrics.serve(db, "127.0.0.1:9464")     # http://127.0.0.1:9464/metrics, until the store is closed
        prometheus_client.REGISTRY.register(perco.metrics.collector(db))    # or: beside the program's own metrics

Every process reports its own transactions and observer runs. The process that owns the store also reports how far
observers lag behind, over all processes. Names are those of OpenTelemetry's conventions for databases and messaging
where these have one, and begin with `perco_` otherwise.

A task of the store takes a sample every few seconds. Scrapes show the last sample, so they never wait for the store's
loop, and they may come from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import trio

from perco.behind import AnyDatabase, behind_any
from perco.clock.durations import BOUNDS_S, Durations, Timings
from perco.database.database import Database
from perco.database.inside import inside
from perco.database.options import Statistics
from perco.errors import PercoError, UsageError, must_be_number
from perco.notify.lagging import Lag
from perco.notify.options import ObserverCounters
from perco.rpc import addresses
from perco.storage import Tablet, TabletStatistics

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

log: logging.Logger = logging.getLogger("perco.store")

_SYSTEM: Final = "perco"
_TABLES: Final = object()  # under which an open store keeps the durations of its tablets, by table


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of an open store, as one process knows it.

    Attributes:
        observers: counters of the observers that this process runs; None: it has no worker.
        tripped: ids of the observers that are tripped here (N14).
        runs_s: how long committed runs took, by observer.
        lag: how far observers lag behind; None: this process does not own the store.
        timings: how long commits, reads and scans took.
        tables: how long mutations and write transactions of this process's tablets took, by table.
        taken_at: when this sample was taken, by the monotonic clock.
    """

    statistics: Statistics
    observers: Mapping[str, ObserverCounters] | None
    tripped: frozenset[str]
    runs_s: Mapping[str, Durations]
    lag: Mapping[str, Lag] | None
    timings: Timings
    tables: Mapping[str, _Writes]
    taken_at: float


class _Writes:
    """How long mutations were queued, and how long write transactions took."""

    __slots__ = ("queued", "written")

    def __init__(self) -> None:
        self.queued, self.written = Durations(), Durations()

    def add(self, other: _Writes) -> None:
        self.queued.add(other.queued)
        self.written.add(other.written)


class _Tablets:
    """Measurements of the tablets of this process, since each of them was first seen here. Each tablet has a thread
    of its own, and so counts by itself."""

    def __init__(self) -> None:
        self._here: dict[Tablet, _Writes] = {}
        self._gone: dict[str, _Writes] = {}  # of tablets that this process no longer has, by table

    def by_table(self, tablets: Iterable[Tablet]) -> dict[str, _Writes]:
        here = set(tablets)
        for tablet in self._here.keys() - here:
            self._gone.setdefault(tablet.table, _Writes()).add(self._here.pop(tablet))
        for tablet in here - self._here.keys():
            self._here[tablet] = writes = _Writes()
            tablet.on_queued, tablet.on_written = writes.queued.note, writes.written.note
        out: dict[str, _Writes] = {}
        for table, writes in (*self._gone.items(), *((tablet.table, each) for tablet, each in self._here.items())):
            out.setdefault(table, _Writes()).add(writes)
        return out


class StoreCollector:
    """Collects an open store's metrics. Made by `collector`; register it with a registry of prometheus_client."""

    def __init__(self, db: Database, every_s: float) -> None:
        self._db, self._every_s = db, every_s
        self._last: Sample | None = None
        self._first = threading.Event()

    def _begin(self) -> None:
        """Called on the store's loop."""
        driver = inside(self._db).driver
        if driver.timings is None:
            driver.measure(Timings())
        inside(self._db).engine.background.start(self._sample_again_and_again, "metrics")

    async def _sample_again_and_again(self) -> None:
        failed = False
        try:
            while True:
                try:
                    self._last = await self._sample()
                    self._first.set()
                    failed = False
                except PercoError as error:  # the last sample stays, and `perco_sample_age_seconds` grows
                    if not failed:
                        log.warning("the metrics are those of an earlier sample, because this one failed: %s", error)
                    failed = True
                await trio.sleep(self._every_s)
        finally:
            self._last = None

    async def _sample(self) -> Sample:
        parts = inside(self._db)
        worker = parts.workers.worker
        lag = await self._db.lag() if parts.owner.is_here and not parts.engine.readonly else None
        observers: Mapping[str, ObserverCounters] | None = None
        runs_s: Mapping[str, Durations] = {}
        tripped: frozenset[str] = frozenset()
        if worker is not None:
            if worker.durations is None:
                worker.durations = {id: Durations() for id in worker.counters}
            names = {number: observer.id for number, observer in worker.observers.items()}
            tripped = frozenset(names[number] for number in worker.breakers.tripped if number in names)
            observers, runs_s = worker.statistics(), worker.durations
        measured: _Tablets = parts.engine.kept.setdefault(_TABLES, _Tablets())
        tables = measured.by_table(parts.place.store.tablets_here())
        timings = parts.driver.timings or Timings()
        return Sample(self._db.statistics(), observers, tripped, runs_s, lag, timings, tables, time.monotonic())

    def collect(self) -> Iterator[Metric]:
        """The metrics, as of the last sample; none once the store is closed. Any thread."""
        sample = self._last
        return iter(()) if sample is None else _metrics(sample)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the first sample, in a thread other than the store's. Returns whether it is there."""
        return self._first.wait(timeout_s)


def collector(db: AnyDatabase, *, every_s: float = 5.0) -> StoreCollector:
    """A collector of an open store's metrics: `prometheus_client.REGISTRY.register(perco.metrics.collector(db))`.

    Call it inside of the block that opened the store, on the thread of the store's loop or, for `perco.sync`, on any.

    Args:
        every_s: seconds between two samples.

    Raises: UsageError if prometheus_client is missing.
    """
    _prometheus()
    must_be_number("every_s", every_s)
    if not every_s > 0:
        raise UsageError(f"every_s is {every_s!r}; it is a number of seconds above 0")
    of = behind_any(db)
    made = StoreCollector(of, float(every_s))
    inside(of).engine.background.soon(made._begin)
    return made


def serve(db: AnyDatabase, address: str, *, every_s: float = 5.0) -> str:
    """Serve an open store's metrics, and those of its process, over HTTP, in a thread, until the store is closed.

    Args:
        address: HOST:PORT, such as "127.0.0.1:9464"; port 0: any free port.

    Returns the URL. Raises: UsageError if the address cannot be used, or prometheus_client is missing.
    """
    prometheus = _prometheus()
    host, port = _parsed(address)
    registry: CollectorRegistry = prometheus.CollectorRegistry()
    for each in prometheus.ProcessCollector, prometheus.PlatformCollector, prometheus.GCCollector:
        each(registry=registry)
    try:
        server, thread = prometheus.start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise UsageError(f"metrics cannot be served at {address}: {error.strerror or error}") from error
    registry.register(collector(db, every_s=every_s))

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    of = behind_any(db)
    inside(of).engine.background.soon(lambda: inside(of).engine.background.start(_until_closed(end), "metrics-http"))
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{server.server_port}/metrics"


def _until_closed(end: Callable[[], None]) -> Callable[[], Any]:
    async def wait() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(end)

    return wait


def must_be_possible(address: str) -> None:
    """Raises: UsageError if `serve` would refuse this address, or prometheus_client is missing."""
    _prometheus()
    _parsed(address)


def _parsed(address: str) -> tuple[str, int]:
    try:
        parsed = addresses.parse(f"tcp://{address}")
        assert parsed.path is None
    except (UsageError, ValueError) as error:
        raise UsageError(f"metrics are served at HOST:PORT, such as 127.0.0.1:9464, not at {address!r}") from error
    return parsed.host, parsed.port


def _prometheus() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise UsageError("metrics need the package prometheus_client: pip install 'perco[metrics]'") from error
    return prometheus_client


# ------------------------------------------------------------------ what is told

_COUNTS: Final = {  # of observers: field of ObserverCounters -> name, what it counts
    "runs": ("perco_observer_runs", "Runs of an observer that began, with repeated ones"),
    "commits": ("perco_observer_commits", "Runs of an observer that committed"),
    "collapsed": ("perco_observer_collapsed_changes", "Changes that a run handled beside the first one"),
    "batched": ("perco_observer_batched_runs", "Runs of an observer that shared a transaction"),
    "conflicts": ("perco_observer_conflicts", "Runs of an observer that conflicted and were repeated"),
    "failures": ("perco_observer_failures", "Runs of an observer that failed"),
    "later": ("perco_observer_retries_asked", "Runs that asked to be run later"),
    "given_up": ("perco_observer_given_up", "Changes that were moved to the failed list"),
    "seconds": ("perco_observer_seconds", "Time spent in the function of an observer"),
}
_LAG: Final = {  # field of Lag -> name, what it is
    "waiting": ("perco_observer_waiting", "Changes that wait for an observer"),
    "oldest_s": ("perco_observer_lag_seconds", "Age of the oldest change that waits for an observer"),
    "failing": ("perco_observer_failing", "Waiting changes that have had a failed run"),
    "failed": ("perco_observer_failed", "Changes of an observer on the failed list"),
    "workers": ("perco_observer_workers", "Processes that run an observer"),
    "counted_s": ("perco_observer_counted_seconds", "How long before the sample the waiting changes were counted"),
}
_TABLETS: Final = {  # field of TabletStatistics -> name, what it counts; the sums over the tablets of a table
    "batches": ("perco_batches", "Write transactions of the tablets of a table, each with one fsync"),
    "mutations": ("perco_mutations", "Mutations that the tablets of a table were asked for"),
    "refused": ("perco_mutations_refused", "Mutations that did not apply, because a check failed"),
    "failed": ("perco_mutations_failed", "Mutations that the disk could not write"),
}
_TABLETS_NOW: Final = {
    "queued": ("perco_mutations_queued", "Mutations that wait for a write transaction"),
    "used_bytes": ("perco_used_bytes", "Bytes in use in the files of a table"),
}
_TRANSACTIONS: Final = {  # field of Counters -> the outcome
    "commits": "committed",
    "aborts": "aborted",
    "conflicts": "conflict",
    "unknown": "unknown",
}

Values = Iterable[tuple[list[str], float]]


def _metrics(sample: Sample) -> Iterator[Metric]:
    yield from _of_transactions(sample)
    yield from _of_tablets(sample.statistics.tablets)
    what = "Duration of the write transactions of a table's tablets, each with its fsync"
    written = (([table], writes.written) for table, writes in sample.tables.items())
    yield _histogram("perco_batch_duration_seconds", what, ["table"], written)
    what = "How long mutations of a table waited for their write transaction to begin"
    queued = (([table], writes.queued) for table, writes in sample.tables.items())
    yield _histogram("perco_mutation_queue_duration_seconds", what, ["table"], queued)
    if sample.observers is not None:
        yield from _of_observers(sample, sample.observers)
    if sample.lag is not None:
        yield from _each("gauge", _LAG, sample.lag)


def _of_transactions(sample: Sample) -> Iterator[Metric]:
    statistics, counters, timings = sample.statistics, sample.statistics.counters, sample.timings
    outcomes = [([outcome], getattr(counters, field)) for field, outcome in _TRANSACTIONS.items()]
    yield _metric("counter", "perco_transactions", "Transactions, by outcome", ["outcome"], outcomes)
    recovered = [(["forward"], counters.rolled_forward), (["back"], counters.rolled_back)]
    yield _metric("counter", "perco_recoveries", "Locks of dead transactions that were settled", ["way"], recovered)
    waits = counters.lock_waits
    yield _metric("counter", "perco_lock_waits", "Waits for a lock of another transaction", [], [([], waits)])
    for name, what, value in (
        ("perco_transactions_open", "Transactions under way", statistics.live_transactions),
        ("perco_loop_lag_seconds", "How long the event loop took to answer", statistics.loop.lag_s),
        ("perco_damaged_cells", "Stored cells that could not be read", len(statistics.damaged)),
        ("perco_sample_age_seconds", "How long ago these figures were taken", time.monotonic() - sample.taken_at),
    ):
        yield _metric("gauge", name, what, [], [([], value)])
    yield _histogram(
        "db_client_operation_duration_seconds",
        "Duration of operations on the store",
        ["db_system_name", "db_operation_name"],
        [
            ([_SYSTEM, name], durations)
            for name, durations in (("commit", timings.commits), ("read", timings.reads), ("scan", timings.scans))
        ],
    )


def _of_tablets(tablets: Iterable[TabletStatistics]) -> Iterator[Metric]:
    tables: dict[str, list[TabletStatistics]] = {}
    for tablet in tablets:
        tables.setdefault(tablet.table, []).append(tablet)
    for kind, told in ("counter", _TABLETS), ("gauge", _TABLETS_NOW):
        for field, (name, what) in told.items():
            sums = ((table, sum(getattr(tablet, field) for tablet in here)) for table, here in tables.items())
            yield _metric(kind, name, what, ["table"], (([table], total) for table, total in sums))
    counts = (([table], len(here)) for table, here in tables.items())
    yield _metric("gauge", "perco_tablets", "Tablets of a table that this process has open", ["table"], counts)


def _of_observers(sample: Sample, observers: Mapping[str, ObserverCounters]) -> Iterator[Metric]:
    yield from _each("counter", _COUNTS, observers)
    yield from _each("gauge", {"running": ("perco_observer_running", "Runs in flight")}, observers)
    what = "1 if all recent runs of an observer failed"
    tripped = (([id], float(id in sample.tripped)) for id in observers)
    yield _metric("gauge", "perco_observer_tripped", what, ["observer"], tripped)
    yield _histogram(
        "messaging_process_duration_seconds",
        "Duration of committed runs",
        ["messaging_system", "messaging_destination_name"],
        (([_SYSTEM, id], durations) for id, durations in sample.runs_s.items()),
    )


def _each(
    kind: str, told: Mapping[str, tuple[str, str]], observers: Mapping[str, ObserverCounters | Lag]
) -> Iterator[Metric]:
    """A metric for each field of what is known of the observers."""
    for field, (name, what) in told.items():
        values = (([id], getattr(each, field)) for id, each in observers.items())
        yield _metric(kind, name, what, ["observer"], values)


def _metric(kind: str, name: str, what: str, labels: list[str], values: Values) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    made: Any = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, what, labels=labels)
    for label_values, value in values:
        made.add_metric(label_values, value)
    metric: Metric = made
    return metric


def _histogram(name: str, what: str, labels: list[str], values: Iterable[tuple[list[str], Durations]]) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    made = HistogramMetricFamily(name, what, labels=labels)
    bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
    for label_values, durations in values:
        buckets = list(zip(bounds, map(float, durations.cumulative()), strict=True))
        made.add_metric(label_values, buckets, durations.total_s)
    return made
