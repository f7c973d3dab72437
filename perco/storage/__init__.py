"""The row store: cells, tablets, and the one seam that everything above rests on (`rowstore.py`).

Read `cells.py` (the vocabulary), `keys.py` (key bytes), `row.py` (check, then write), `lmdb_engine.py` and
`tablet.py` (group commit), `rowstore.py` (the seam), `folder.py` (who owns the files).
"""

from perco.storage.cells import (
    ABSENT as ABSENT,
)
from perco.storage.cells import (
    APPLIED as APPLIED,
)
from perco.storage.cells import (
    DATA as DATA,
)
from perco.storage.cells import (
    LOCK as LOCK,
)
from perco.storage.cells import (
    NOTIFY as NOTIFY,
)
from perco.storage.cells import (
    PENDING as PENDING,
)
from perco.storage.cells import (
    PRESENT as PRESENT,
)
from perco.storage.cells import (
    PROTOCOL_GROUPS as PROTOCOL_GROUPS,
)
from perco.storage.cells import (
    ROLLBACK as ROLLBACK,
)
from perco.storage.cells import (
    ROW_BYTES_MAX as ROW_BYTES_MAX,
)
from perco.storage.cells import (
    TS_MAX as TS_MAX,
)
from perco.storage.cells import (
    VALUE_BYTES_MAX as VALUE_BYTES_MAX,
)
from perco.storage.cells import (
    WRITE as WRITE,
)
from perco.storage.cells import (
    Applied as Applied,
)
from perco.storage.cells import (
    Cell as Cell,
)
from perco.storage.cells import (
    Check as Check,
)
from perco.storage.cells import (
    Failed as Failed,
)
from perco.storage.cells import (
    Mutation as Mutation,
)
from perco.storage.cells import (
    NoReply as NoReply,
)
from perco.storage.cells import (
    Query as Query,
)
from perco.storage.cells import (
    ReadRequest as ReadRequest,
)
from perco.storage.cells import (
    Refused as Refused,
)
from perco.storage.cells import (
    RowCells as RowCells,
)
from perco.storage.cells import (
    RowMutation as RowMutation,
)
from perco.storage.cells import (
    ScanCell as ScanCell,
)
from perco.storage.cells import (
    ScanPage as ScanPage,
)
from perco.storage.cells import (
    ScanQuery as ScanQuery,
)
from perco.storage.cells import (
    ScanRequest as ScanRequest,
)
from perco.storage.cells import (
    Verdict as Verdict,
)
from perco.storage.cells import (
    Write as Write,
)
from perco.storage.folder import Folder as Folder
from perco.storage.folder import file_system as file_system
from perco.storage.folder import owner as owner
from perco.storage.lmdb_engine import LmdbEngine as LmdbEngine
from perco.storage.lmdb_engine import LmdbOptions as LmdbOptions
from perco.storage.rowstore import LocalRowStore as LocalRowStore
from perco.storage.rowstore import RowStore as RowStore
from perco.storage.tablet import (
    BatchOptions as BatchOptions,
)
from perco.storage.tablet import (
    LmdbTablet as LmdbTablet,
)
from perco.storage.tablet import (
    MemoryTablet as MemoryTablet,
)
from perco.storage.tablet import (
    Tablet as Tablet,
)
from perco.storage.tablet import (
    TabletStatistics as TabletStatistics,
)
