"""The options of a store, and its statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from perco.bigtable.options import BigtableOptions
from perco.clock.loopwatch import HeartbeatOptions, LoopStatistics
from perco.clock.oracle import OracleOptions
from perco.errors import UsageError
from perco.history.vacuum import VacuumOptions
from perco.history.vacuumed import VacuumStatistics
from perco.notify.backfill import BackfillOptions
from perco.notify.lagging import Lag
from perco.postgresql.options import PostgresqlOptions
from perco.rpc.channel import WireOptions
from perco.settings import check_options
from perco.storage import BatchOptions, LmdbOptions, TabletStatistics
from perco.tablets.splitter import SplitOptions
from perco.txn.driver import CommitOptions
from perco.txn.engine import TransactionOptions
from perco.txn.prefetch import PrefetchCounters, PrefetchOptions
from perco.txn.resolver import Counters
from perco.txn.retry import RetryOptions
from perco.txn.turns import TurnCounters


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of a store. Each component has a frozen dataclass for its own options.

    Attributes:
        durability: "power": an acknowledged write survives power loss; "process": only the death of the process (S2).
            The process that owns the folder decides this, and also `lmdb`, `oracle`, `vacuum`, `backfill` and `split`;
            its clients use the values that it has chosen (`perco serve --durability`).
        shared: let other processes of the same user open the folder through this one; if the folder already has an
            owner, open it through that owner. False: this process alone uses the folder.
        wire: options of the connections between clients and servers.
        wall: the machine's clock, seconds since 1970.
        seed: the seed of every random choice; None: a seed from the system.
        on_event: called on the loop with the name of each step of the store ("prewrite", "commit", "secondaries",
            "recovery", "ack"; in a vacuum: "watermark", "floor", "locks", "vacuum"). It is for tests that interrupt
            the store anywhere, and for tracing.
    """

    durability: str = "power"
    shared: bool = True
    wire: WireOptions = field(default_factory=WireOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    lmdb: LmdbOptions = field(default_factory=LmdbOptions)
    postgresql: PostgresqlOptions = field(default_factory=PostgresqlOptions)
    bigtable: BigtableOptions = field(default_factory=BigtableOptions)
    oracle: OracleOptions = field(default_factory=OracleOptions)
    commit: CommitOptions = field(default_factory=CommitOptions)
    retry: RetryOptions = field(default_factory=RetryOptions)
    transaction: TransactionOptions = field(default_factory=TransactionOptions)
    prefetch: PrefetchOptions = field(default_factory=PrefetchOptions)
    heartbeat: HeartbeatOptions = field(default_factory=HeartbeatOptions)
    vacuum: VacuumOptions = field(default_factory=VacuumOptions)
    backfill: BackfillOptions = field(default_factory=BackfillOptions)
    split: SplitOptions = field(default_factory=SplitOptions)
    wall: Callable[[], float] = time.time
    seed: int | None = None
    on_event: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        check_options(self, free=("seed",))
        if self.durability not in ("power", "process"):
            raise UsageError(f'durability is "power" or "process", not {self.durability!r}')


@dataclass(frozen=True, slots=True)
class Statistics:
    """A store's statistics since it was opened.

    Attributes: `prefetch`: counters by observer and by function that `db.run` has called; the names
    "transaction" and "snapshot" count the transactions and snapshots opened as `with` blocks. `damaged`: the first 1000
    stored cells that background tasks could not read, and skipped; `perco check` finds them all. `lag`: how far
    observers lag behind, by id, as `db.lag()` last found it, `counted_s` ago; empty before its first call. `combined`:
    how many operations of this process on a cell shared the commit of another one (C10).
    """

    live_transactions: int
    last_ts: int
    catalogue_version: int
    counters: Counters
    tablets: tuple[TabletStatistics, ...]
    loop: LoopStatistics
    vacuum: VacuumStatistics
    turns: TurnCounters
    prefetch: Mapping[str, PrefetchCounters]
    damaged: tuple[str, ...] = ()
    lag: Mapping[str, Lag] = field(default_factory=dict)
    combined: int = 0
