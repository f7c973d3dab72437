"""perco: multi-row ACID transactions and observers over a plain row store.

import perco

docs   = perco.Table("docs", key=perco.TEXT)
body   = docs.column("body", perco.BYTES)
schema = perco.Schema(docs)

async with perco.open("folder/", schema) as db:
    async with db.transaction() as txn:
        txn.set(body, "a", b"...")

Numbers such as (T5) or (N1) are those of docs/protocol.md.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING, Any as _Any

from perco.errors import (
    BackgroundFailure as BackgroundFailure,
    CatalogueChanged as CatalogueChanged,
    ChainTooLong as ChainTooLong,
    CommitUnknown as CommitUnknown,
    Corruption as Corruption,
    FormatUnknown as FormatUnknown,
    NeedsCheck as NeedsCheck,
    NotIdle as NotIdle,
    OwnerChanged as OwnerChanged,
    PercoError as PercoError,
    PercoWarning as PercoWarning,
    ReadConflict as ReadConflict,
    ReadOnly as ReadOnly,
    RolledBack as RolledBack,
    SchemaMismatch as SchemaMismatch,
    SessionEnded as SessionEnded,
    SnapshotTooOld as SnapshotTooOld,
    StoreError as StoreError,
    StoreFull as StoreFull,
    StoreLocked as StoreLocked,
    TabletSplit as TabletSplit,
    TooLarge as TooLarge,
    TransactionClosed as TransactionClosed,
    TransientError as TransientError,
    Unavailable as Unavailable,
    UnsuitableFolder as UnsuitableFolder,
    UsageError as UsageError,
    UsedAfterFork as UsedAfterFork,
    VersionMismatch as VersionMismatch,
    WriteConflict as WriteConflict,
    WriteUnknown as WriteUnknown,
    WrongToken as WrongToken,
)
from perco.notify.backoff import BackoffOptions as BackoffOptions
from perco.notify.database import Database as Database, WorkerHandle as WorkerHandle
from perco.notify.failures import FailedChange as FailedChange
from perco.notify.observers import ObserverState as ObserverState
from perco.notify.worker import ObserverCounters as ObserverCounters, WorkerOptions as WorkerOptions
from perco.rpc.channel import WireOptions as WireOptions
from perco.serve.opening import open as open
from perco.storage import BatchOptions as BatchOptions, LmdbOptions as LmdbOptions
from perco.tuning import tune_gc as tune_gc
from perco.txn.attempts import Attempt as Attempt, Attempts as Attempts, RetryOptions as RetryOptions
from perco.txn.backfill import BackfillOptions as BackfillOptions, BackfillProgress as BackfillProgress
from perco.txn.client import (
    Options as Options,
    Retrying as Retrying,
    Statistics as Statistics,
    TransactionOptions as TransactionOptions,
)
from perco.txn.codecs import (
    BOOL as BOOL,
    BYTES as BYTES,
    FLOAT64 as FLOAT64,
    INT64 as INT64,
    JSON as JSON,
    MSGPACK as MSGPACK,
    TEXT as TEXT,
    Codec as Codec,
    Tuple as Tuple,
)
from perco.txn.compactor import Compacted as Compacted
from perco.txn.driver import CommitOptions as CommitOptions
from perco.txn.holds import Holder as Holder, Pin as Pin
from perco.txn.loopwatch import HeartbeatOptions as HeartbeatOptions
from perco.txn.oracle import OracleOptions as OracleOptions
from perco.txn.past import PinnedSnapshot as PinnedSnapshot
from perco.txn.prefetch import PrefetchCounters as PrefetchCounters, PrefetchOptions as PrefetchOptions
from perco.txn.reads import Isolation as Isolation
from perco.txn.retention import Keep as Keep, Removed as Removed
from perco.txn.scan import Scan as Scan
from perco.txn.schema import (
    Change as Change,
    Column as Column,
    Schema as Schema,
    Signal as Signal,
    Table as Table,
)
from perco.txn.splitter import Split as Split, SplitOptions as SplitOptions
from perco.txn.transaction import (
    Row as Row,
    Snapshot as Snapshot,
    Transaction as Transaction,
)
from perco.txn.turns import TurnCounters as TurnCounters
from perco.txn.vacuum import (
    VacuumOptions as VacuumOptions,
    VacuumResult as VacuumResult,
    VacuumStatistics as VacuumStatistics,
)

if _TYPE_CHECKING:
    from perco import testing as testing
else:

    def __getattr__(name: str) -> _Any:
        """`perco.testing`, imported when it is first asked for: programs that only run transactions do without."""
        if name == "testing":
            return _import_module("perco.testing")
        raise AttributeError(f"module 'perco' has no attribute {name!r}")


__version__ = "0.1.0"
