"""The row store: cells, tablets, and the one interface that every layer above is built on (`rowstore.py`).

Read, in this order: `cells.py` (the vocabulary), `keys.py` (key bytes), `row.py` (check, then write), `lmdb_engine.py`
and `tablet.py` (group commit), `rowstore.py` (the interface), `folder.py` (ownership of the files).
"""

from perco.storage.batching import Batching as Batching, Gathering as Gathering
from perco.storage.cells import (
    ABSENT as ABSENT,
    APPLIED as APPLIED,
    DATA as DATA,
    FAILED_LIST as FAILED_LIST,
    GROUPS_MAX as GROUPS_MAX,
    LOCK as LOCK,
    LOG as LOG,
    NOTIFY as NOTIFY,
    PENDING as PENDING,
    PRESENT as PRESENT,
    PROTOCOL_GROUPS as PROTOCOL_GROUPS,
    ROLLBACK as ROLLBACK,
    ROW_BYTES_MAX as ROW_BYTES_MAX,
    SHARED as SHARED,
    TRACE as TRACE,
    TS_MAX as TS_MAX,
    VALUE_BYTES_MAX as VALUE_BYTES_MAX,
    WRITE as WRITE,
    Applied as Applied,
    Cell as Cell,
    Check as Check,
    Failed as Failed,
    Mutation as Mutation,
    NoReply as NoReply,
    Query as Query,
    ReadRequest as ReadRequest,
    Refused as Refused,
    RowCells as RowCells,
    RowMutation as RowMutation,
    ScanCell as ScanCell,
    ScanPage as ScanPage,
    ScanQuery as ScanQuery,
    ScanRequest as ScanRequest,
    ScanRow as ScanRow,
    Verdict as Verdict,
    Write as Write,
    is_logged as is_logged,
)
from perco.storage.folder import (
    REMOTE as REMOTE,
    VOLATILE as VOLATILE,
    Folder as Folder,
    file_system as file_system,
    owner as owner,
)
from perco.storage.lmdb_engine import LmdbEngine as LmdbEngine
from perco.storage.lmdb_native import native_why_not as native_why_not
from perco.storage.lmdb_options import LmdbOptions as LmdbOptions
from perco.storage.lmdb_tablet import LmdbTablet as LmdbTablet
from perco.storage.rowstore import (
    Chaining as Chaining,
    Deferring as Deferring,
    LocalRowStore as LocalRowStore,
    OwnerStore as OwnerStore,
    Prompt as Prompt,
    RowReads as RowReads,
    RowStore as RowStore,
    read_in_parts as read_in_parts,
)
from perco.storage.tablet import (
    BatchOptions as BatchOptions,
    MemoryTablet as MemoryTablet,
    Tablet as Tablet,
    TabletStatistics as TabletStatistics,
)
