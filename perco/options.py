"""The options of a store: the frozen dataclasses that `perco.Options` takes, one for each component."""

from __future__ import annotations

from perco.bigtable.options import BigtableOptions as BigtableOptions
from perco.clock.loopwatch import HeartbeatOptions as HeartbeatOptions
from perco.clock.oracle import OracleOptions as OracleOptions
from perco.database.options import Options as Options
from perco.history.vacuum import VacuumOptions as VacuumOptions
from perco.notify.backfill import BackfillOptions as BackfillOptions
from perco.notify.backoff import BackoffOptions as BackoffOptions
from perco.notify.breakers import BreakerOptions as BreakerOptions
from perco.notify.options import WorkerOptions as WorkerOptions
from perco.postgresql.options import PostgresqlOptions as PostgresqlOptions
from perco.protocol.retention import Keep as Keep
from perco.rpc.channel import WireOptions as WireOptions
from perco.storage import BatchOptions as BatchOptions, LmdbOptions as LmdbOptions
from perco.tablets.splitter import SplitOptions as SplitOptions
from perco.txn.driver import CommitOptions as CommitOptions
from perco.txn.engine import TransactionOptions as TransactionOptions
from perco.txn.prefetch import PrefetchOptions as PrefetchOptions
from perco.txn.retry import RetryOptions as RetryOptions
