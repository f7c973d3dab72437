"""A tablet: a contiguous row range of one table, with an engine of its own.

`LmdbTablet` commits in groups: mutations of all tasks gather in a queue; one LMDB write transaction, and one fsync,
serves all that had gathered when the writer became free, while the next batch fills up behind it. The queue is
bounded by the tasks that wait (each waits for its own call), a batch by `BatchOptions`.

The batch closes at the loop's next turn, so that all tasks that were just woken get into it; under load no timer is
needed. Where the loop has more to do than the disk, a batch closes as soon as it holds half of what is in flight: the
disk works on one half of the transactions while the loop works on the other.

P1  A tablet that is being split holds mutations of the rows that it is about to give away, from the cut until the
    tablet that gets them can be asked; other rows, and reads, do not wait.
P6  A tablet's open files are replaced by a copy while all its writes are held, the writer is idle, and nobody reads.
S1, S4, S5, S6: see `cells.py` and `lmdb_engine.py`. T10: see `call.py`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import trio

from perco.errors import StoreFull, TabletSplit, TransactionClosed, Unavailable
from perco.options import check_options
from perco.storage.call import Call
from perco.storage.cells import (
    APPLIED,
    DATA,
    PROTOCOL_GROUPS,
    WRITE,
    Failed,
    Mutation,
    NoReply,
    Refused,
    RowCells,
    ScanPage,
    ScanRequest,
    Verdict,
)
from perco.storage.engine import MemoryBatch, MemoryEngine
from perco.storage.handover import Handover, Written
from perco.storage.lmdb_engine import LmdbEngine, MapTooSmall
from perco.storage.row import NOWHERE, check_and_write, read_row, scan_rows
from perco.storage.splitting import Copying, middle


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOptions:
    """How calls gather: mutations in a write transaction of their tablet; and, if a client has a window
    (`batching.py`), reads, mutations, commits and claims in a call to the tablet.

    Attributes:
        mutations_max: mutations in one write transaction, and parts of one call; 1 switches batching off.
        bytes_max: bytes of file that one write transaction may take, and bytes of one call (a larger mutation still
            goes alone).
        window_s: how long a call waits for others to the same tablet, in seconds. 0: there is no window.
        adaptive: a call waits only while an earlier one of its kind to that tablet is out; it leaves when that is
            answered, or when the window ends. False: every call waits for the whole window, as in the paper, and a
            transaction takes longer by two windows or more.
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
    """The row store's interface to a tablet; reads are synchronous and short (S3)."""

    table: str
    start: bytes
    queues: bool
    floor: int

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
        except Exception as error:  # as over LMDB: it fails by itself and has written nothing (S1, S4)
            verdict = Failed(error)
        self._mutations += 1
        self._refused += isinstance(verdict, Refused)
        self._failures += isinstance(verdict, Failed)
        call.answer(index, verdict)

    def entries(self, group: str) -> int:
        return self.engine.entries(group)

    def groups(self) -> list[str]:
        """The locality groups that are there, whoever made them."""
        return self.engine.groups()

    def expire(self, after_s: float) -> None:
        """There is no disk to wait for."""

    async def raise_floor(self, ts: int) -> None:
        """See `LmdbTablet.raise_floor`."""
        await trio.lowlevel.checkpoint()
        self.floor = max(self.floor, ts)

    async def repack(self, group: str, start: bytes, skip: int) -> tuple[bytes | None, bool]:
        """There are no pages."""
        await trio.lowlevel.checkpoint()
        return None, False

    def live_bytes(self) -> int:
        """There is no file."""
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
        """See `LmdbTablet.cut`; but here nothing is held."""
        await trio.lowlevel.checkpoint()

    def let_go(self) -> list[tuple[Mutation, Call, int]]:
        """Nothing was held."""
        return []

    async def uncut(self) -> None:
        """Nothing has changed."""
        await trio.lowlevel.checkpoint()

    def has_from(self, row: bytes) -> bool:
        """See `LmdbTablet.has_from`."""
        return self.engine.has_from(row)

    async def remove_from(self, row: bytes) -> bool:
        """See `LmdbTablet.remove_from`; all at once."""
        await trio.lowlevel.checkpoint()
        self.engine.remove_from(row)
        return False

    async def add_groups(self, groups: Sequence[str]) -> None:
        await trio.lowlevel.checkpoint()

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
        """There are no threads over memory."""
        raise NotImplementedError

    def end_views(self) -> None:
        """There are none."""

    def forget(self) -> None:
        """A child has its own copy."""


T = TypeVar("T")
Resubmit = Callable[[Sequence[Mutation], Call], None]

# In the queue: the mutation, who waits for it, which of the caller's mutations it is, its `_room`, its number.
_Entry = tuple[Mutation, Call, int, int, int]
# What the writer thread is handed: mutations, their room, what to do with the verdicts (on the writer's thread), and
# which groups were empty when the batch closed.
_Work = tuple[Sequence[Mutation], int, Callable[[Sequence[Verdict]], None], "Written | None", Container[str]]

_PASSING = frozenset(PROTOCOL_GROUPS) - {DATA, WRITE}  # groups whose cells come and go

_EXPIRED: list[_Entry] = []  # stands for a batch that nobody waits for any more

_HALF_MIN = 16  # a smaller batch is never closed early
_BATCHES_AVERAGED = 8  # one alone may be all prewrites, or all new transactions, which cost several times as much
_NEVER = 1 << 62
_LARGE = 1 << 20  # bytes: from here on it is worth while to foresee more exactly what a mutation takes
_ENTRY_BYTES = 64  # of a cell, besides its row and value
_REPACKED = 1000  # cells written again in one write transaction
_REPACKED_BYTES = 2 << 20
_REMOVED = 2000  # the same, of cells that are another tablet's
_CLOSED = "the store that this belongs to has been closed"


def _room(mutation: Mutation) -> int:
    """Bytes of file that a mutation may take: its values, and a page copied for every write on its way down."""
    size = 0
    for _, _, writes in mutation.rows:
        size += 4096 * len(writes)
        for write in writes:
            value = write[3]
            if value is not None and len(value) > 1024:
                size += len(value) + (len(value) >> 2)
    return size


def _reaches(mutation: Mutation, row: bytes) -> bool:
    """Whether it has a row from there on."""
    return any(each[0] >= row for each in mutation.rows)


class _Chore:
    """Upkeep that the writer does between two batches."""

    __slots__ = ("began", "ended", "error")

    def __init__(self) -> None:
        self.began = trio.current_time()
        self.ended = trio.Event()
        self.error: Exception | None = None

    def end(self, error: Exception | None) -> None:
        if not self.ended.is_set():
            self.error = error
            self.ended.set()


class LmdbTablet:
    """A tablet in an LMDB environment, written by a thread of its own."""

    queues = True

    def __init__(
        self,
        table: str,
        start: bytes,
        engine: LmdbEngine,
        batch: BatchOptions,
        resubmit: Resubmit,
        handover: Handover,
        floor: int = 0,
    ) -> None:
        self.table, self.start, self.engine, self.options = table, start, engine, batch
        self._handover = handover
        self._resubmit = resubmit  # the row store's: what a call sends next may go to any tablet
        self._token = trio.lowlevel.current_trio_token()
        self._open = True
        self._queue: list[_Entry] = []
        self._closing_soon = False  # the batch closes at the loop's next turn
        self._patient = False  # or at the one after it: somebody was just woken, who may come back
        self._writing = False
        self._batch: list[_Entry] = []  # what the writer has; empty once nobody waits for it any more
        self._closed_at = 0.0
        self._half = _NEVER  # so many mutations close a batch before the loop's next turn
        self._handed_over = 0.0  # when the writer was left alone with the last batch
        self._busy = 0.0  # the loop's CPU seconds by then
        self._busy_each = 0.0  # and what it spends on each mutation, averaged over some batches
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._idle = trio.Event()
        self.floor = floor  # T13
        self._chores: set[_Chore] = set()  # upkeep that somebody waits for
        self._splitting: Copying | None = None
        self._copying: Copying | None = None  # the same, for the writer
        self._held: list[_Entry] | None = None  # what has been submitted for rows from the cut on
        self._held_since = 0.0
        self._cut_row = b""  # of what is held
        self._stop: bytes | None = None  # the writer makes nothing from there on
        self._gone: bytes | None = None  # from there on rows are another tablet's, for good
        self._ended = False
        # Groups that hold no cell, and into which none is on its way: there is nothing to look for. A group leaves the
        # set when a put into it is submitted, and comes back when a batch has removed its last cell.
        self._empty: set[str] = set()
        if not engine.readonly:  # else another process writes, and nobody tells us
            self._empty = {group for group in _PASSING if not engine.entries(group)}
        self._submitted = 0
        self._put_at: dict[str, int] = {}  # by group, which mutation was the last to put into it
        self._cut_at: dict[str, int] = {}  # ... to remove from it, if nobody has looked since
        self._batches = self._mutations = self._refused = self._failures = 0

    # ------------------------------------------------------------ reading (loop thread)

    def read(self, row: bytes, queries: Sequence[tuple[str, int, int, int, int]]) -> RowCells:
        if self._handover.under_way:
            self._handover.give_way()
        # All that reads while a batch is under way may share one view: nothing that a reader must see becomes visible
        # before that batch has been answered: prewrites precede their commit_ts, what commits in one step is entered.
        return self.engine.read(row, queries, self._empty, shared=self._writing and self._batch is not _EXPIRED)

    def scan(self, request: ScanRequest) -> ScanPage:
        if self._handover.under_way:
            self._handover.give_way()
        return self.engine.scan(request)

    def entries(self, group: str) -> int:
        return self.engine.entries(group)

    def groups(self) -> list[str]:
        """The locality groups that are there, whoever made them."""
        return self.engine.groups()

    # ------------------------------------------------------------ writing (loop thread)

    def submit(self, mutation: Mutation, call: Call, index: int) -> None:
        """Queue a mutation; `call` is answered and woken when its batch has been committed."""
        if not self._open:
            call.answer(index, Failed(TransactionClosed(_CLOSED)))
            return
        room = _room(mutation)
        if room > _LARGE:
            room = min(room, self._room_of_large(mutation))
        if self._held is not None and _reaches(mutation, self._cut_row):
            self._held.append((mutation, call, index, room, 0))
            return
        self._queue.append((mutation, call, index, room, self._number(mutation)))
        if self._writing:
            return
        if len(self._queue) >= self._half:
            self._close_batch()
        elif not self._closing_soon:
            self._closing_soon = True
            self._token.run_sync_soon(self._close_soon)

    def _number(self, mutation: Mutation) -> int:
        """The mutation's number; notes which of the passing groups it puts into and removes from."""
        self._submitted = number = self._submitted + 1
        for _, _, writes in mutation.rows:
            for group, _, _, value in writes:
                if group in _PASSING:
                    if value is None:
                        self._cut_at[group] = number
                    else:
                        self._put_at[group] = number
                        self._empty.discard(group)
        return number

    def _look_for_empty(self, written: int) -> None:
        """A batch up to the mutation of this number has been written."""
        for group, cut_at in list(self._cut_at.items()):
            if cut_at <= written and self._put_at.get(group, 0) <= written:
                del self._cut_at[group]
                if not self.engine.entries(group):
                    self._empty.add(group)

    def _room_of_large(self, mutation: Mutation) -> int:
        """No more pages can be copied than there are, and what is new takes twice its bytes, pages being half full."""
        new = sum(
            len(row) + len(value or b"") + _ENTRY_BYTES for row, _, writes in mutation.rows for _, _, _, value in writes
        )
        return self.engine.used_bytes() + 2 * new + _LARGE

    def _close_soon(self) -> None:
        if self._patient:
            # trio runs the tasks of a turn in any order: one more turn, and all who were woken have come back.
            self._patient = False
            self._token.run_sync_soon(self._close_soon)
            return
        self._closing_soon = False
        if not self._writing:
            self._close_batch()

    def _close_batch(self) -> None:
        batch, room = self._take()
        if not batch:
            self._idle.set()
            return
        self._writing = True
        self._handover.under_way += 1
        self._batch = batch
        self._closed_at = trio.current_time()
        busy = self._cpu_s()
        self._busy_each += ((busy - self._busy) / len(batch) - self._busy_each) / _BATCHES_AVERAGED
        self._busy = busy
        written = Written()
        mutations = [entry[0] for entry in batch]
        # Whatever puts into a group has been submitted by now: what is empty stays so until after this batch.
        self._hand_over(mutations, room, lambda verdicts: self._post(batch, verdicts), written, self._empty.copy())
        written.wait()
        self._handed_over = self._now_s()

    def _take(self) -> tuple[list[_Entry], int]:
        """The next batch, bounded, and its room; cancelled calls leave the queue here (T10)."""
        waiting, self._queue = self._queue, []
        batch: list[_Entry] = []
        size = 0
        for at, entry in enumerate(waiting):
            _, call, _, room, _ = entry
            if call.dropped:
                continue
            if batch and (len(batch) >= self.options.mutations_max or size + room > self.options.bytes_max):
                self._queue = waiting[at:]
                break
            size += room
            call.taken = True
            batch.append(entry)
        return batch, size

    def _post(self, batch: list[_Entry], verdicts: Sequence[Verdict]) -> None:
        """Writer's thread: bring the verdicts to the loop; one hop per batch."""
        try:
            self._token.run_sync_soon(self._finish, batch, verdicts, self._now_s())
        except trio.RunFinishedError:
            self._writing = False  # the loop is gone and so is everybody who waited

    def _finish(self, batch: list[_Entry], verdicts: Sequence[Verdict], ended: float) -> None:
        self._batches += 1
        self._mutations += len(batch)
        expired = batch is not self._batch
        in_flight = len(batch) + len(self._queue)
        self._handover.under_way -= 1
        self.engine.end_shared()  # T2: what this batch wrote is seen from now on
        slow_disk = ended - self._handed_over > in_flight * self._busy_each
        self._half = _NEVER if slow_disk else max(in_flight // 2, _HALF_MIN)
        self._writing = False
        if self._cut_at:
            self._look_for_empty(batch[-1][4])
        if len(self._queue) >= self._half:
            self._close_batch()
        if not expired:
            self._patient = slow_disk
            self._answer(batch, verdicts)
        if not self._writing and not self._closing_soon:
            self._closing_soon = True
            self._token.run_sync_soon(self._close_soon)

    def _answer(self, batch: Sequence[_Entry], verdicts: Sequence[Verdict]) -> None:
        reschedule = trio.lowlevel.reschedule
        for (_, call, index, _, _), verdict in zip(batch, verdicts, strict=True):
            if verdict is not APPLIED:
                self._count(verdict)
            call.verdicts[index] = verdict
            call.waiting -= 1
            if call.waiting:
                continue
            if call.then is not None and call.resubmitted(self._resubmit):
                continue
            if call.task is not None:
                reschedule(call.task, call)  # type: ignore[arg-type]

    def expire(self, after_s: float) -> None:
        """Loop thread: where the disk has kept a batch for so long, nobody waits for it any more (T10).

        Whether it was written is not known (T4); what queues behind it was not sent. Upkeep is done when the disk
        answers, whether anybody waits for it or not.
        """
        reason = f"the disk has not answered for {after_s:g} s"
        for chore in self._chores:
            if trio.current_time() - chore.began >= after_s:
                chore.end(Unavailable(f"{self.table}: {reason}"))
        if self._held and trio.current_time() - self._held_since >= after_s:
            self._expire_held(reason)
        if not self._writing or trio.current_time() - self._closed_at < after_s:
            return
        self.engine.end_shared()  # S3: who knows when this batch ends
        batch, self._batch = self._batch, _EXPIRED
        queue, self._queue = [entry for entry in self._queue if not entry[1].dropped], []
        self._answer(batch, [NoReply(reason)] * len(batch))
        self._answer(queue, [Failed(Unavailable(reason))] * len(queue))

    def _expire_held(self, reason: str) -> None:
        held, self._held = [entry for entry in self._held or () if not entry[1].dropped], []
        self._answer(held, [Failed(Unavailable(reason))] * len(held))

    def _count(self, verdict: Verdict) -> None:
        if isinstance(verdict, Failed | NoReply):
            self._failures += 1
        else:
            self._refused += 1

    def submit_from_thread(self, mutations: Sequence[Mutation], done: Callable[[Sequence[Verdict]], None]) -> None:
        """Apply mutations for a thread that is not the loop's; `done` is called on the writer's thread.

        For the refresher of leases and locks, which must get through while the loop is held (L1).
        """
        self._hand_over(mutations, sum(map(_room, mutations)), done)

    def _hand_over(
        self,
        mutations: Sequence[Mutation],
        room: int,
        done: Callable[[Sequence[Verdict]], None],
        written: Written | None = None,
        empty: Container[str] = NOWHERE,
    ) -> None:
        if self._thread is None:
            with self._starting:  # the loop and the refresher may both be first (S5)
                if self._thread is None:
                    name = f"perco-writer-{self.table}"
                    thread = threading.Thread(target=self._write, name=name, daemon=True)
                    thread.start()
                    self._thread = thread
        self._work.put((mutations, room, done, written, empty))

    # ------------------------------------------------------------ the writer's thread (S5)

    def _write(self) -> None:
        while (work := self._work.get()) is not None:
            mutations, room, done, written, empty = work
            self.engine.busy = True
            verdicts: Sequence[Verdict]
            try:
                verdicts = self._commit(mutations, room, written, empty)
            except Exception as error:  # whatever it was, the thread goes on and nobody waits forever
                verdicts = [NoReply(f"{type(error).__name__}: {error}")] * len(mutations)
            if written is not None:
                written.tell()
            done(verdicts)
            self.engine.busy = False
            self._handover.handed_in()

    def _commit(
        self, mutations: Sequence[Mutation], room: int, written: Written | None, empty: Container[str]
    ) -> Sequence[Verdict]:
        full = self._room_for(room, reserve=False)
        if full is None:
            return self._write_batch(mutations, written, empty)
        # S4: the disk is full. What frees space or frees others still goes, into the reserve.
        verdicts: list[Verdict] = [Failed(full)] * len(mutations)
        chosen = [i for i, mutation in enumerate(mutations) if mutation.reserve]
        through = self._into_reserve([mutations[i] for i in chosen])
        for i, verdict in zip(chosen, through, strict=True):
            verdicts[i] = verdict
        return verdicts

    def _into_reserve(self, mutations: Sequence[Mutation]) -> Sequence[Verdict]:
        """Together if the reserve is large enough for that, else in smaller batches."""
        if not mutations:
            return []
        full = self._room_for(sum(map(_room, mutations)), reserve=True)
        if full is None:
            return self._write_batch(mutations, None)
        if len(mutations) == 1:
            return [Failed(full)]
        half = len(mutations) // 2
        return [*self._into_reserve(mutations[:half]), *self._into_reserve(mutations[half:])]

    def _room_for(self, room: int, *, reserve: bool) -> StoreFull | None:
        """Allocated file and map for a batch: every write may copy a page on its way down."""
        need = 16 * 4096 + room
        full = None
        if not self.engine.has_map_for(need, reserve=reserve):
            full = self._grow(need, reserve=reserve)
        if full is None:
            full = self.engine.make_room(need, reserve=reserve)
        return None if full is None or self.engine.has_free(need, reserve=reserve) else full

    def _grow(self, need: int, *, reserve: bool) -> StoreFull | None:
        """Ask the reading thread to grow the map, and wait: nobody has a transaction open then (S6)."""
        answer: queue.SimpleQueue[StoreFull | None] = queue.SimpleQueue()
        self._token.run_sync_soon(lambda: answer.put(self.engine.grow(need, reserve=reserve)))
        return answer.get()

    def _write_batch(
        self, mutations: Sequence[Mutation], written: Written | None, empty: Container[str] = NOWHERE
    ) -> Sequence[Verdict]:
        if self._stop is not None and any(_reaches(mutation, self._stop) for mutation in mutations):
            return self._write_some(mutations, self._stop, written, empty)
        try:
            verdicts = self.engine.commit(mutations, self.floor, written.tell if written is not None else None, empty)
        except MapTooSmall:
            full = self._grow(0, reserve=True)
            if full is None:
                return self._write_batch(mutations, written, empty)
            if len(mutations) == 1:
                return [Failed(full)]
            half = len(mutations) // 2  # S4: what there is room for goes
            return [*self._write_batch(mutations[:half], None), *self._write_batch(mutations[half:], None)]
        except Exception as error:  # one mutation must not take its neighbours with it (S4)
            if len(mutations) == 1:
                return [Failed(error)]
            return [self._write_batch([mutation], None)[0] for mutation in mutations]
        if self._copying is not None:
            self._copying.note(mutations, verdicts)  # P2
        return verdicts

    def _write_some(
        self, mutations: Sequence[Mutation], stop: bytes, written: Written | None, empty: Container[str]
    ) -> Sequence[Verdict]:
        """P1: what came by a thread for rows that are another tablet's, or are about to be, is not made."""
        rest = [mutation for mutation in mutations if not _reaches(mutation, stop)]
        made = iter(self._write_batch(rest, written, empty) if rest else ())
        return [Failed(TabletSplit(self.table)) if _reaches(mutation, stop) else next(made) for mutation in mutations]

    # ------------------------------------------------------------ splitting

    def live_bytes(self) -> int:
        """The bytes of the file that its cells take."""
        return self.engine.live_bytes()

    async def middle(self, stop: bytes | None) -> bytes | None:
        """A row before `stop` at which to split, in the middle of the cells; None: all is in one row."""
        search = middle(self.engine, stop)
        while True:
            found = await self._beside(next, search, b"")
            if found is not None:
                return found or None

    async def copy_from(self, row: bytes, stop: bytes | None, path: Path, groups: Sequence[str]) -> int:
        """Copy what lies from a row on, up to `stop`, into an environment at `path`, while all goes on; until `cut`, or
        `uncut`. Returns how many cells.

        Raises: StoreFull, Unavailable; then `uncut`.
        """
        assert self._splitting is None, "one at a time"
        whole = row == self.start  # P6
        copying = self._splitting = Copying(self.engine, row, stop, path, groups, self.engine.options, whole=whole)

        def begin() -> None:
            self._copying = copying

        await self._on_writer(begin)
        while not await self._beside(copying.step):
            pass
        return copying.cells

    def copied(self) -> int:
        """How many cells the unfinished copy has."""
        return self._splitting.cells if self._splitting is not None else 0

    async def cut(self, row: bytes) -> None:
        """P1, P2: from now on what is submitted for rows from there on is held; when this returns, the copy is whole,
        on disk, and closed. Then: `let_go`, or `uncut`."""
        copying = self._splitting
        assert copying is not None
        assert copying.row == row
        self._held, self._held_since, self._cut_row = [], trio.current_time(), row
        queue, self._queue = self._queue, []
        for entry in queue:
            (self._held if _reaches(entry[0], row) else self._queue).append(entry)

        def stop() -> None:
            self._stop = row

        await self._on_writer(stop)  # behind the batch that is under way
        await self._beside(copying.finish)
        await self._end_copying(row)

    async def _end_copying(self, stop: bytes | None) -> None:
        """`stop`: the writer makes nothing from there on; whatever it has still to do for the copy comes first."""
        copying, self._splitting = self._splitting, None

        def end() -> None:
            self._copying, self._stop = None, stop

        with trio.CancelScope(shield=True):
            with contextlib.suppress(Unavailable, TransactionClosed):  # a disk that does not answer: done later
                await self._on_writer(end)
            if copying is not None:
                await self._beside(copying.close)

    def let_go(self) -> list[tuple[Mutation, Call, int]]:
        """After `cut`: what was held, for whoever has these rows now."""
        if self._held is not None:
            self._gone = self._cut_row
        return self._no_longer_held()

    def _no_longer_held(self) -> list[tuple[Mutation, Call, int]]:
        held, self._held = self._held or [], None
        self._idle.set()
        return [(mutation, call, index) for mutation, call, index, _, _ in held if not call.dropped]

    async def uncut(self) -> None:
        """It is not to be split after all."""
        if self._splitting is None and self._held is None:
            await trio.lowlevel.checkpoint()
            return
        await self._end_copying(self._gone)
        for mutation, call, index in self._no_longer_held():
            self.submit(mutation, call, index)

    async def replace(self, engine: LmdbEngine) -> LmdbEngine:
        """P6: switch to the copy, after a `cut` at the first row, so that nothing is being written. Returns the former
        engine, which nobody looks at any more. Then `uncut`."""
        assert self._held is not None, "P6: a batch would be lost"
        assert self._cut_row == self.start
        replaced: list[LmdbEngine] = []
        done = trio.Event()

        def swap(swapped: threading.Event) -> None:  # on the loop: nobody reads
            self.engine.end_shared()
            replaced.append(self.engine)
            self.engine = engine
            swapped.set()
            done.set()

        def act() -> None:  # on the writer's thread: nobody writes
            swapped = threading.Event()
            self._token.run_sync_soon(swap, swapped)
            swapped.wait()

        with contextlib.suppress(Unavailable):  # upkeep before it takes long
            await self._on_writer(act)
        await done.wait()
        return replaced[0]

    def has_from(self, row: bytes) -> bool:
        """Whether anything lies here from a row on."""
        return self.engine.has_from(row)

    async def remove_from(self, row: bytes) -> bool:
        """Remove some of what lies from a row on, and is another tablet's (P4); returns whether there may be more."""
        more: list[bool] = []

        def act() -> None:
            full = self._room_for(_REPACKED_BYTES, reserve=True)
            if full is not None:
                raise full
            try:
                more.append(self.engine.remove_from(row, _REMOVED))
            except MapTooSmall:
                if (full := self._grow(0, reserve=True)) is not None:
                    raise full from None
                more.append(True)

        await self._on_writer(act)
        return more[0]

    # ------------------------------------------------------------ upkeep

    async def raise_floor(self, ts: int) -> None:
        """From now on mutations that name an older timestamp are refused (T13).

        When this returns, what was let in before has been committed and is visible, or has failed.
        """
        if self._thread is None:  # nothing was ever written
            await trio.lowlevel.checkpoint()
            self._raise_floor(ts)
            return
        await self._on_writer(lambda: self._raise_floor(ts))

    def _raise_floor(self, ts: int) -> None:
        self.floor = max(self.floor, ts)

    async def repack(self, group: str, start: bytes, skip: int) -> tuple[bytes | None, bool]:
        """Write some cells of a group again where pages are half empty, between two batches; see `LmdbEngine.repack`.

        Where there is no space for that, they are left as they are.
        """
        found: list[tuple[bytes | None, bool]] = []

        def act() -> None:
            if self._room_for(_REPACKED_BYTES, reserve=False) is None:
                with contextlib.suppress(MapTooSmall, StoreFull):
                    found.append(self.engine.repack(group, start, _REPACKED, skip))

        await self._on_writer(act)
        return found[0] if found else (None, False)

    async def add_groups(self, groups: Sequence[str]) -> None:
        """Make locality groups that the environment lacks (a table got a new one)."""
        await self._on_writer(lambda: self.engine.add_groups(groups))
        self.engine.end_shared()  # it does not know them

    async def _on_writer(self, action: Callable[[], None]) -> None:
        """Run something on the writer's thread, between two batches.

        A caller that is cancelled, or gets no answer in time (T10), leaves it there: it is done later, and may be
        requested again.
        """
        if self._ended:
            raise TransactionClosed(_CLOSED)
        chore = _Chore()

        def run(_: Sequence[Verdict]) -> None:
            error: Exception | None = None
            try:
                action()
            except Exception as failure:
                error = failure
            with contextlib.suppress(trio.RunFinishedError):  # the loop is gone and so is who waited
                self._token.run_sync_soon(chore.end, error)

        self._chores.add(chore)
        try:
            self._hand_over([], 0, run)
            await chore.ended.wait()
        finally:
            self._chores.discard(chore)
        if chore.error is not None:
            raise chore.error

    def end_views(self) -> None:
        """Before a fork (S5)."""
        self.engine.end_shared()

    def forget(self) -> None:
        """In a forked child: it is its parent's (S5)."""
        self.engine.forget()
        if self._splitting is not None:
            self._splitting.forget()

    def statistics(self) -> TabletStatistics:
        return TabletStatistics(
            self.table,
            self.start,
            self._batches,
            self._mutations,
            self._refused,
            self._failures,
            len(self._queue),
            self.engine.used_bytes(),
            self.engine.map_bytes,
        )

    async def drain(self) -> bool:
        """Wait until all that is queued has been committed; returns whether there was anything."""
        busy = False
        while self._queue or self._writing or self._closing_soon or self._held:
            busy = True
            if self._idle.is_set():
                self._idle = trio.Event()  # several may wait for the same
            await self._idle.wait()
        return busy

    def refuse(self) -> None:
        """From now on what is submitted fails, at once."""
        self._open = False

    async def aclose(self) -> None:
        """End the thread, close the environment; the tablet has been drained."""
        with trio.CancelScope(shield=True):
            self._ended = True
            if self._thread is not None:
                await self._join()
        self.engine.close()

    # ------------------------------------------------------------ work on other threads: a simulation overrides these

    def _cpu_s(self) -> float:
        return time.thread_time()

    def _now_s(self) -> float:
        return time.perf_counter()

    async def _beside(self, act: Callable[..., T], *args: object) -> T:
        return await trio.to_thread.run_sync(act, *args)

    async def _join(self) -> None:
        """End the idle writer's thread."""
        assert self._thread is not None
        self._work.put(None)
        await self._beside(self._thread.join)
