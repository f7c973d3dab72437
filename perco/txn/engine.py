"""The parts that all transactions of one opened store share: the oracle, the driver, limits and options."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

from perco.clock.oracle import Oracle
from perco.errors import ReadConflict, ReadOnly
from perco.protocol.reads import Isolation, is_serializable
from perco.schema.catalogue import Catalogue
from perco.schema.known import Known
from perco.settings import check_options
from perco.storage import Tablet
from perco.txn.background import Background
from perco.txn.combining import Combining
from perco.txn.driver import Driver, StaleAt
from perco.txn.fates import Fates
from perco.txn.prefetch import Predictor
from perco.txn.retry import RetryOptions
from perco.txn.spans import Spans
from perco.txn.turns import Lines


@dataclass(frozen=True, kw_only=True, slots=True)
class TransactionOptions:
    """Limits of one transaction, and its default isolation.

    Attributes:
        cells_max: cells that the transaction may write; and, counted separately, cells that it may lock.
        bytes_max: bytes of values that it may write.
        reads_max: cells and scans that a serializable transaction may read.
        isolation: "snapshot", which allows write skew, or "serializable" (T14).
    """

    cells_max: int = 100_000
    bytes_max: int = 256 << 20
    reads_max: int = 100_000
    isolation: Isolation = "snapshot"

    def __post_init__(self) -> None:
        check_options(self)
        is_serializable(self.isolation)


class Tables(Protocol):
    """The tables of a store, and those of its tablets that this process has open."""

    def tables(self) -> list[str]: ...

    def tablets_here(self) -> Sequence[Tablet]: ...

    def bounds(self, table: str) -> list[bytes]:
        """The first rows of a table's tablets."""
        ...


class Place(Protocol):
    """Where the store's rows are: in a folder, in memory, in a database, or behind another process."""

    forked: bool

    @property
    def store(self) -> Tables: ...

    @property
    def path(self) -> Path | None:
        """The folder, if this process has one open; else None."""
        ...

    @property
    def readonly(self) -> bool:
        """Whether this process only reads files that another process may own."""
        ...

    @property
    def owner_alive(self) -> bool:
        """Whether a process owns the store now."""
        ...

    async def adapt(self, catalogue: Catalogue) -> None:
        """Open or create the tablets and groups that a catalogue names."""
        ...

    @property
    def term(self) -> bytes:
        """If this process only reads files that another process may own: the term (a new one with every owner) of the
        current or last owner; else empty."""
        ...

    def check(self) -> None:
        """Raises UsedAfterFork, TransactionClosed."""
        ...


class Engine:
    """Loop thread only.

    Attributes:
        driver: replaced when a client's session has ended (R5).
        lease_token: names this process in its locks.
        on_event: see `Options.on_event`.
        readonly: True if the store may not be written.
        on_asyncio: True if the store's loop is the guest of an asyncio loop.
        renew: loads the newest catalogue (N10).
        kept: what higher packages keep with an open store, by objects of theirs.
        spans: traces transactions and runs; None: they are not traced.
        hasty: names of functions that wait for something, or want the timestamp, before they read (`starting.py`).
    """

    place: Place
    known: Known
    oracle: Oracle
    fates: Fates
    driver: Driver
    background: Background
    prefetch: Predictor
    limits: TransactionOptions
    retry: RetryOptions
    random: Random
    lease_token: str
    on_event: Callable[[str], None] | None
    readonly: bool
    lines: Lines
    combining: Combining
    serializable: bool
    kept: dict[object, Any]
    spans: Spans | None
    hasty: set[str]

    def __init__(
        self,
        place: Place,
        known: Known,
        oracle: Oracle,
        fates: Fates,
        driver: Driver,
        background: Background,
        prefetch: Predictor,
        limits: TransactionOptions,
        retry: RetryOptions,
        rng: Random,
        lease_token: str,
        on_event: Callable[[str], None] | None,
    ) -> None:
        self.place, self.known = place, known
        self.kept, self.spans, self.hasty = {}, None, set()
        self.oracle, self.fates, self.driver, self.background = oracle, fates, driver, background
        self.prefetch, self.limits, self.retry = prefetch, limits, retry
        self.random, self.lease_token, self.on_event = rng, lease_token, on_event
        self.on_asyncio = False
        self.readonly = place.readonly
        self.lines = Lines()  # queues of transactions that conflicted
        self.combining = Combining()
        self.serializable = is_serializable(limits.isolation)
        self.renew: Callable[[], Awaitable[None]]

    def is_serializable(self, isolation: Isolation | None) -> bool:
        """Whether a transaction begun with this argument is serializable."""
        return self.serializable if isolation is None else is_serializable(isolation)

    def usable(self, *, writing: bool) -> None:
        """Raise an error if the store is closed, has failed or was forked; if `writing`, also if it is read-only."""
        self.background.check()
        self.place.check()
        if writing and self.readonly:
            raise ReadOnly("this store was opened with readonly=True; to write, open it without that option")

    def read_conflict(self, found: StaleAt) -> ReadConflict:
        """The ReadConflict of a failed validation, with names and keys."""
        key_of = self.known.key_of
        ranges = [(r.table, key_of(r.table, r.low), key_of(r.table, r.high)) for r in found.stale.ranges]
        cells = [self.known.name_of(cell) for cell in found.stale.cells]
        met = ReadConflict(cells, ranges, found.start_ts, found.commit_ts)
        met.met_on = (*found.stale.cells, *((r.table, r.low or b"", -1) for r in found.stale.ranges))
        return met
