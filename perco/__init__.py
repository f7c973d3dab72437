"""perco: multi-row ACID transactions and observers over a plain row store.

import perco

docs   = perco.Table("docs", key=perco.TEXT)
body   = docs.column("body", perco.BYTES)
schema = perco.Schema(docs)

async with perco.open("folder/", schema) as db:
    async with db.transaction() as txn:
        txn.set(body, "a", b"...")
"""

# What users work with.
# Errors.
from perco.errors import (
    BackgroundFailure as BackgroundFailure,
)
from perco.errors import (
    CatalogueChanged as CatalogueChanged,
)
from perco.errors import (
    CommitUnknown as CommitUnknown,
)
from perco.errors import (
    Corruption as Corruption,
)
from perco.errors import (
    FormatUnknown as FormatUnknown,
)
from perco.errors import (
    NeedsCheck as NeedsCheck,
)
from perco.errors import (
    PercoError as PercoError,
)
from perco.errors import (
    PercoWarning as PercoWarning,
)
from perco.errors import (
    ReadOnly as ReadOnly,
)
from perco.errors import (
    RolledBack as RolledBack,
)
from perco.errors import (
    SchemaMismatch as SchemaMismatch,
)
from perco.errors import (
    SnapshotTooOld as SnapshotTooOld,
)
from perco.errors import (
    StoreError as StoreError,
)
from perco.errors import (
    StoreFull as StoreFull,
)
from perco.errors import (
    StoreLocked as StoreLocked,
)
from perco.errors import (
    TooLarge as TooLarge,
)
from perco.errors import (
    TransactionClosed as TransactionClosed,
)
from perco.errors import (
    TransientError as TransientError,
)
from perco.errors import (
    Unavailable as Unavailable,
)
from perco.errors import (
    UnsuitableFolder as UnsuitableFolder,
)
from perco.errors import (
    UsageError as UsageError,
)
from perco.errors import (
    UsedAfterFork as UsedAfterFork,
)
from perco.errors import (
    WriteConflict as WriteConflict,
)
from perco.notify.backoff import BackoffOptions as BackoffOptions
from perco.notify.database import Database as Database
from perco.notify.database import WorkerHandle as WorkerHandle
from perco.notify.database import open as open
from perco.notify.worker import ObserverCounters as ObserverCounters
from perco.notify.worker import WorkerOptions as WorkerOptions
from perco.storage import BatchOptions as BatchOptions
from perco.storage import LmdbOptions as LmdbOptions
from perco.txn.client import (
    Attempt as Attempt,
)
from perco.txn.client import (
    Attempts as Attempts,
)
from perco.txn.client import (
    Options as Options,
)
from perco.txn.client import (
    Retrying as Retrying,
)
from perco.txn.client import (
    RetryOptions as RetryOptions,
)
from perco.txn.client import (
    Statistics as Statistics,
)
from perco.txn.client import (
    TransactionOptions as TransactionOptions,
)

# Declaring.
from perco.txn.codecs import (
    BOOL as BOOL,
)
from perco.txn.codecs import (
    BYTES as BYTES,
)
from perco.txn.codecs import (
    FLOAT64 as FLOAT64,
)
from perco.txn.codecs import (
    INT64 as INT64,
)
from perco.txn.codecs import (
    JSON as JSON,
)
from perco.txn.codecs import (
    MSGPACK as MSGPACK,
)
from perco.txn.codecs import (
    TEXT as TEXT,
)
from perco.txn.codecs import (
    Codec as Codec,
)
from perco.txn.codecs import (
    Tuple as Tuple,
)
from perco.txn.driver import CommitOptions as CommitOptions
from perco.txn.heartbeat import HeartbeatOptions as HeartbeatOptions
from perco.txn.oracle import OracleOptions as OracleOptions
from perco.txn.schema import Change as Change
from perco.txn.schema import Column as Column
from perco.txn.schema import Schema as Schema
from perco.txn.schema import Table as Table
from perco.txn.transaction import Row as Row
from perco.txn.transaction import Scan as Scan
from perco.txn.transaction import Snapshot as Snapshot
from perco.txn.transaction import Transaction as Transaction

__version__ = "0.1.0"
