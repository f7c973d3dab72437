"""A tablet: a contiguous row range of one table, with an engine of its own.

`LmdbTablet` uses group commit: the mutations of all tasks gather in a queue. When the writer is free, one LMDB write
transaction, with one fsync, commits all mutations in the queue, while the next batch fills. The number of waiting tasks
limits the queue (each task waits for its own call); `BatchOptions` limits a batch.

A batch closes at the loop's next turn, so that it gets the mutations of all tasks that were just woken; under load no
timer is needed. If the loop has more to do than the disk, a batch closes as soon as it holds half of what is in flight:
the disk works on one half of the transactions while the loop works on the other.

P1  From the cut on, a tablet that is being split holds back mutations of the rows that it is about to give away, until
    the new tablet can take them. Reads, and mutations of other rows, do not wait.
P6  A tablet's open files are replaced by a copy while all its writes are held, the writer is idle, and no read is open.
S1, S4, S5, S6: see `cells.py` and `lmdb_engine.py`. T10: see `call.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import trio

from perco.errors import TransactionClosed
from perco.settings import check_options
from perco.storage.call import Call
from perco.storage.cells import (
    LOG,
    WRITE,
    Failed,
    Mutation,
    Refused,
    RowCells,
    ScanPage,
    ScanRequest,
    Verdict,
)
from perco.storage.engine import MemoryBatch, MemoryEngine
from perco.storage.row import check_and_write, read_row, scan_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOptions:
    """How calls are batched: mutations in one write transaction of their tablet; and, if a client has a window
    (`batching.py`), reads, mutations, commits and claims in one call to the tablet.

    Attributes:
        mutations_max: mutations in one write transaction, and parts of one call; 1 switches batching off.
        bytes_max: bytes of the file that one write transaction may take, and bytes of one call (a larger mutation is
            still sent, alone).
        window_s: how long a call waits for others to the same tablet, in seconds. 0: there is no window.
        adaptive: a call waits only while an earlier one of its kind to that tablet is in flight; it is sent when the
            earlier call is answered, or when the window ends. False: every call waits for the whole window, as in the
            paper, and a transaction takes at least two windows longer.
    """

    mutations_max: int = 4096
    bytes_max: int = 64 << 20
    window_s: float = 0.0
    adaptive: bool = True

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class TabletStatistics:
    """Counts since the tablet was opened."""

    table: str
    start: bytes
    batches: int
    mutations: int
    refused: int
    failed: int
    queued: int
    used_bytes: int
    map_bytes: int


class Tablet(Protocol):
    """The row store's interface to a tablet; reads are synchronous and short (S3).

    Attributes:
        on_written: called on the writer's thread after each write transaction, with its duration in seconds. A tablet
            without a writer's thread in this process never calls it.
        on_queued: called on the loop for each mutation when its write transaction begins, with the seconds for which it
            was queued. A tablet without a queue in this process never calls it.
    """

    table: str
    start: bytes
    queues: bool
    floor: int
    on_written: Callable[[float], object] | None
    on_queued: Callable[[float], object] | None

    def read(self, row: bytes, queries: Sequence[tuple[str, int, int, int, int]]) -> RowCells: ...
    def scan(self, request: ScanRequest) -> ScanPage: ...
    def submit(self, mutation: Mutation, call: Call, index: int) -> None: ...
    def entries(self, group: str) -> int: ...
    def groups(self) -> list[str]: ...
    def expire(self, after_s: float) -> None: ...
    async def raise_floor(self, ts: int) -> None: ...
    async def repack(self, group: str, start: bytes, skip: int) -> tuple[bytes | None, bool]: ...
    async def add_groups(self, groups: Sequence[str]) -> None: ...
    def statistics(self) -> TabletStatistics: ...
    def live_bytes(self) -> int: ...
    async def middle(self, stop: bytes | None) -> bytes | None: ...
    async def copy_from(self, row: bytes, stop: bytes | None, path: Path, groups: Sequence[str]) -> int: ...
    async def cut(self, row: bytes) -> None: ...
    def let_go(self) -> list[tuple[Mutation, Call, int]]: ...
    async def uncut(self) -> None: ...
    def has_from(self, row: bytes) -> bool: ...
    async def remove_from(self, row: bytes) -> bool: ...
    async def drain(self) -> bool: ...
    def refuse(self) -> None: ...
    async def aclose(self) -> None: ...
    def submit_from_thread(self, mutations: Sequence[Mutation], done: Callable[[Sequence[Verdict]], None]) -> None: ...
    def end_views(self) -> None: ...
    def forget(self) -> None: ...


class MemoryTablet:
    """A tablet without a disk and without a thread: a mutation is applied when it is submitted."""

    table: str
    start: bytes
    engine: MemoryEngine
    floor: int
    on_written: Callable[[float], object] | None = None
    on_queued: Callable[[float], object] | None = None

    queues = False

    def __init__(self, table: str, start: bytes, engine: MemoryEngine | None = None, floor: int = 0) -> None:
        self.table, self.start = table, start
        self.engine = engine or MemoryEngine()
        self._open = True
        self.floor = floor
        self._mutations = self._refused = self._failures = 0

    def read(self, row: bytes, queries: Sequence[tuple[str, int, int, int, int]]) -> RowCells:
        return read_row(self.engine, row, queries)

    def scan(self, request: ScanRequest) -> ScanPage:
        return scan_rows(self.engine, request)

    def submit(self, mutation: Mutation, call: Call, index: int) -> None:
        if not self._open:
            call.answer(index, Failed(TransactionClosed(_CLOSED)))
            return
        batch = MemoryBatch(self.engine)
        verdict: Verdict
        try:
            verdict = check_and_write(batch, mutation, self.floor)
            batch.commit()
        except Exception as error:  # as with LMDB: the mutation fails alone, and has written nothing (S1, S4)
            verdict = Failed(error)
        self._mutations += 1
        self._refused += isinstance(verdict, Refused)
        self._failures += isinstance(verdict, Failed)
        call.answer(index, verdict)

    def entries(self, group: str) -> int:
        return self.engine.entries(group)

    def groups(self) -> list[str]:
        """The names of the locality groups that hold anything."""
        return self.engine.groups()

    def expire(self, after_s: float) -> None:
        """Do nothing: there is no disk to wait for."""

    async def raise_floor(self, ts: int) -> None:
        """See `LmdbTablet.raise_floor`."""
        await trio.lowlevel.checkpoint()
        self.floor = max(self.floor, ts)

    async def repack(self, group: str, start: bytes, skip: int) -> tuple[bytes | None, bool]:
        """Do nothing: there are no pages."""
        await trio.lowlevel.checkpoint()
        return None, False

    def live_bytes(self) -> int:
        """Zero: there is no file."""
        return 0

    async def middle(self, stop: bytes | None) -> bytes | None:
        """See `LmdbTablet.middle`."""
        await trio.lowlevel.checkpoint()
        return self.engine.middle(WRITE, stop)

    async def copy_from(self, row: bytes, stop: bytes | None, path: Path, groups: Sequence[str]) -> int:
        """See `LmdbTablet.copy_from`; there is nothing to copy before the cut."""
        await trio.lowlevel.checkpoint()
        return 0

    async def cut(self, row: bytes) -> None:
        """See `LmdbTablet.cut`; here nothing is held."""
        await trio.lowlevel.checkpoint()

    def let_go(self) -> list[tuple[Mutation, Call, int]]:
        """No mutations: none were held."""
        return []

    async def uncut(self) -> None:
        """Do nothing: `cut` has changed nothing."""
        await trio.lowlevel.checkpoint()

    def has_from(self, row: bytes) -> bool:
        """See `LmdbTablet.has_from`."""
        return self.engine.has_from(row)

    async def remove_from(self, row: bytes) -> bool:
        """See `LmdbTablet.remove_from`; removes all at once."""
        await trio.lowlevel.checkpoint()
        self.engine.remove_from(row)
        return False

    async def add_groups(self, groups: Sequence[str]) -> None:
        await trio.lowlevel.checkpoint()
        self.engine.logs = self.engine.logs or LOG in groups

    def statistics(self) -> TabletStatistics:
        done = self._mutations
        return TabletStatistics(self.table, self.start, done, done, self._refused, self._failures, 0, 0, 0)

    async def drain(self) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    def refuse(self) -> None:
        self._open = False

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

    def submit_from_thread(self, mutations: Sequence[Mutation], done: Callable[[Sequence[Verdict]], None]) -> None:
        """Not supported: a tablet in memory has no threads."""
        raise NotImplementedError

    def end_views(self) -> None:
        """Do nothing: there are no views to end."""

    def forget(self) -> None:
        """Do nothing: a forked child has its own copy."""


T = TypeVar("T")
Resubmit = Callable[[Sequence[Mutation], Call], None]


_CLOSED = "the store that this belongs to has been closed"
