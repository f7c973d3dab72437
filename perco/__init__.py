"""perco: multi-row ACID transactions and observers over a plain row store.

import perco

docs   = perco.Table("docs", key=perco.TEXT)
body   = docs.column("body", perco.BYTES)
schema = perco.Schema(docs)

async with perco.open("folder/", schema) as db:
    async with db.transaction() as txn:
        txn.set(body, "a", b"...")

Numbers such as (T5) or (N1) refer to the invariants in docs/protocol.md.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING, Any as _Any

from perco import errors as errors, options as options
from perco.clock.holds import Holder as Holder, Pin as Pin
from perco.database.backing import Backup as Backup
from perco.database.database import Database as Database
from perco.database.options import Options as Options, Statistics as Statistics
from perco.errors import (
    CommitUnknown as CommitUnknown,
    GiveUp as GiveUp,
    NotFresh as NotFresh,
    NotIdle as NotIdle,
    PercoError as PercoError,
    Retry as Retry,
    StoreError as StoreError,
    TransientError as TransientError,
    Unavailable as Unavailable,
    UsageError as UsageError,
    WriteConflict as WriteConflict,
)
from perco.history.changes import Changes as Changes, ChangeStream as ChangeStream, RowChange as RowChange
from perco.history.past import PinnedSnapshot as PinnedSnapshot
from perco.history.vacuumed import (
    VacuumResult as VacuumResult,
    VacuumStatistics as VacuumStatistics,
)
from perco.notify.backfill import BackfillProgress as BackfillProgress
from perco.notify.failures import FailedChange as FailedChange
from perco.notify.lagging import Lag as Lag
from perco.notify.observers import ObserverState as ObserverState
from perco.notify.options import ObserverCounters as ObserverCounters, WorkerOptions as WorkerOptions
from perco.notify.tracing import Traced as Traced
from perco.notify.workers import WorkerHandle as WorkerHandle
from perco.protocol.reads import Isolation as Isolation
from perco.protocol.retention import Keep as Keep, Removed as Removed
from perco.schema.codecs import (
    BOOL as BOOL,
    BYTES as BYTES,
    DATE as DATE,
    DECIMAL as DECIMAL,
    FLOAT64 as FLOAT64,
    INT64 as INT64,
    JSON as JSON,
    MSGPACK as MSGPACK,
    TEXT as TEXT,
    TIMESTAMP as TIMESTAMP,
    Codec as Codec,
    Tuple as Tuple,
)
from perco.schema.schedules import Due as Due
from perco.schema.schema import (
    Change as Change,
    Column as Column,
    Schema as Schema,
    Signal as Signal,
    Table as Table,
)
from perco.serve.opening import open as open
from perco.tablets.compactor import Compacted as Compacted
from perco.tablets.splitter import Split as Split
from perco.tuning import tune_gc as tune_gc
from perco.txn.attempts import Attempt as Attempt, Attempts as Attempts
from perco.txn.prefetch import PrefetchCounters as PrefetchCounters
from perco.txn.row import Row as Row
from perco.txn.running import Retrying as Retrying
from perco.txn.scan import Scan as Scan
from perco.txn.snapshot import Snapshot as Snapshot
from perco.txn.transaction import Transaction as Transaction
from perco.txn.turns import TurnCounters as TurnCounters

if _TYPE_CHECKING:
    from perco import testing as testing
else:

    def __getattr__(name: str) -> _Any:
        """Import `perco.testing` on first use, because programs that only run transactions do not need it."""
        if name == "testing":
            return _import_module("perco.testing")
        raise AttributeError(f"module 'perco' has no attribute {name!r}")


__version__ = "0.1.0"
