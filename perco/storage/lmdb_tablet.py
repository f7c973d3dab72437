"""Tablets in LMDB: each has a writer thread, with a queue in front of it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import trio

from perco.errors import PercoError, StoreFull, TabletSplit, TransactionClosed, Unavailable
from perco.storage.call import Call
from perco.storage.cells import (
    APPLIED,
    DATA,
    PROTOCOL_GROUPS,
    WRITE,
    Failed,
    Mutation,
    NoReply,
    RowCells,
    ScanPage,
    ScanRequest,
    Verdict,
)
from perco.storage.handover import Handover, Written
from perco.storage.lmdb_engine import LmdbEngine, MapTooSmall
from perco.storage.row import NOWHERE
from perco.storage.splitting import Copying, middle
from perco.storage.tablet import _CLOSED, BatchOptions, Resubmit, TabletStatistics

T = TypeVar("T")


# In the queue: the mutation, the call that waits for it, its index in the call.
_Entry = tuple[Mutation, Call, int]


# The writer's work: mutations, their room, what to do with the verdicts (on the writer's thread), the signal that the
# cells have been put, and the groups that were empty when the batch closed.
_Work = tuple[Sequence[Mutation], int, Callable[[Sequence[Verdict]], None], "Written | None", Container[str]]


# A native writer returns a batch in three cases: Python has to write it (None); its commit failed, with the reason; or
# the loop listens no more, with the verdicts.
_HandedBack = tuple[tuple["LmdbTablet", list[_Entry]], "list[Verdict] | tuple[int, str, int] | None"]


_PASSING = frozenset(PROTOCOL_GROUPS) - {DATA, WRITE}  # groups whose cells come and go


_EXPIRED: list[_Entry] = []  # in place of a batch that no caller waits for any more


_HALF_MIN = 16  # a smaller batch is never closed early


_LONE_MIN = 4  # after so many batches of one mutation each, the next mutation does not wait for others


_BATCHES_AVERAGED = 8  # a single batch may be all prewrites, or all new transactions, which cost several times as much


_NEVER = 1 << 62


_LARGE = 1 << 20  # bytes: above this, a closer estimate of a mutation's room is worth its cost


_ENTRY_BYTES = 64  # of a cell, besides its row and value


_REPACKED = 1000  # cells rewritten in one write transaction


_REPACKED_BYTES = 2 << 20


_SPARE = 16 * 4096  # bytes of the file that a batch needs besides the room of its mutations


_REMOVED = 2000  # another tablet's cells removed in one write transaction


def _reaches(mutation: Mutation, row: bytes) -> bool:
    """Whether any row of the mutation is at or after `row`."""
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

    table: str
    start: bytes
    engine: LmdbEngine
    options: BatchOptions

    on_written: Callable[[float], object] | None = None
    on_queued: Callable[[float], object] | None = None

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
        self._resubmit = resubmit  # a method of the row store: a call's next mutations may go to any tablet
        self._token = trio.lowlevel.current_trio_token()
        self._open = True
        self._queue: list[_Entry] = []
        self._closing_soon = False  # the batch closes at the loop's next turn
        self._patient = False  # the batch closes one turn later: tasks were just woken, and may submit more
        self._writing = False
        self._batch: list[_Entry] = []  # the writer's batch; `_EXPIRED` once no caller waits for it any more
        self._closed_at = 0.0
        self._half = _NEVER  # this many mutations close a batch before the loop's next turn
        self._lone = 0  # how many batches in a row had one mutation each, with none behind it
        self._handed_over = 0.0  # when the loop left the last batch to the writer's thread
        self._busy = 0.0  # the loop's CPU seconds when that batch was closed
        self._busy_each = 0.0  # CPU seconds that the loop spends on each mutation, averaged over some batches
        self._native = engine.native is not None
        self._work: Any = handover.completing.writer() if self._native else queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._idle = trio.Event()
        self.floor = floor
        self._chores: set[_Chore] = set()  # upkeep that a caller waits for
        self._splitting: Copying | None = None
        self._copying: Copying | None = None  # the copy for which the writer notes its commits (P2)
        self._held: list[_Entry] | None = None  # the mutations held since a cut; None: the tablet is not cut
        self._held_since = 0.0
        self._cut_row = b""  # the first row whose mutations are held
        self._stop: bytes | None = None  # the writer refuses mutations of rows from this one on
        self._gone: bytes | None = None  # rows from this one on belong to another tablet, for good
        self._ended = False
        # Groups that hold no cell, and into which the batch in flight puts none: reads and checks skip them. A group
        # leaves the set when a batch with a put into it closes, and comes back when a batch has removed its last cell.
        self._empty: set[str] = set()
        if not engine.readonly:  # otherwise another process writes, unseen by this one
            self._empty = {group for group in _PASSING if not engine.entries(group)}
        self._cut: set[str] = set()  # groups from which the batch in flight removes cells
        self._batches = self._mutations = self._refused = self._failures = 0

    @property
    def floor(self) -> int:
        """See `raise_floor`."""
        return self._floor

    @floor.setter
    def floor(self, ts: int) -> None:
        self._floor = ts  # T13
        if self._native:
            self._work.floor = ts

    # ------------------------------------------------------------ reading (loop thread)

    def read(self, row: bytes, queries: Sequence[tuple[str, int, int, int, int]]) -> RowCells:
        if self._handover.under_way:
            self._handover.give_way()
        # All reads while a batch is in flight may share one view. No read has to see a write of the batch before the
        # batch has been answered: a prewrite is answered before its commit_ts is drawn, and a one-step commit is
        # entered in memory (C2).
        return self.engine.read(row, queries, self._empty, shared=self._writing and self._batch is not _EXPIRED)

    def scan(self, request: ScanRequest) -> ScanPage:
        if self._handover.under_way:
            self._handover.give_way()
        return self.engine.scan(request)

    def entries(self, group: str) -> int:
        return self.engine.entries(group)

    def groups(self) -> list[str]:
        """The names of all locality groups in the file."""
        return self.engine.groups()

    # ------------------------------------------------------------ writing (loop thread)

    def submit(self, mutation: Mutation, call: Call, index: int) -> None:
        """Queue a mutation; `call` is answered and woken when its batch has been committed."""
        if not self._open:
            call.answer(index, Failed(TransactionClosed(_CLOSED)))
            return
        if self.on_queued is not None and not call.since:
            call.since = self._now_s()
        if self._held is not None and _reaches(mutation, self._cut_row):
            self._held.append((mutation, call, index))
            return
        self._queue.append((mutation, call, index))
        if self._writing:
            return
        if len(self._queue) >= self._half:
            self._close_batch()
        elif not self._closing_soon:
            self._closing_soon = True
            self._token.run_sync_soon(self._close_soon)

    def _room(self, mutation: Mutation, puts: set[str], cuts: set[str]) -> int:
        """How many bytes of the file a mutation may take: its values, and one copied page for every write. Also notes
        the passing groups that it puts cells into, and those that it removes cells from. On any thread."""
        room = 0
        for _, _, writes in mutation.rows:
            room += 4096 * len(writes)
            for group, _, _, value in writes:
                if value is None:
                    cuts.add(group)
                else:
                    puts.add(group)
                    if len(value) > 1024:
                        room += len(value) + (len(value) >> 2)
        if self.engine.logs:  # every record has an entry in the log, in another page (E1)
            room *= 2
        return room if room <= _LARGE else min(room, self._room_of_large(mutation))

    def _room_of_all(self, mutations: Iterable[Mutation]) -> int:
        return sum(self._room(mutation, set(), set()) for mutation in mutations)

    def _look_for_empty(self) -> None:
        """Find groups that have become empty, now that no batch is in flight."""
        cut, self._cut = self._cut & _PASSING, set()
        for group in cut:
            try:
                if not self.engine.entries(group):
                    self._empty.add(group)
            except PercoError:  # no reader's slot is free, or the like: reads of the group say so
                self._cut.add(group)  # look again after the next batch

    def _room_of_large(self, mutation: Mutation) -> int:
        """An upper bound on a mutation's room: at most all pages are copied, and new data takes twice its bytes, in
        half-full pages."""
        new = sum(
            len(row) + len(value or b"") + _ENTRY_BYTES for row, _, writes in mutation.rows for _, _, _, value in writes
        )
        return self.engine.used_bytes() + 2 * new + _LARGE

    def _close_soon(self) -> None:
        if self._patient:
            # trio runs the tasks of a turn in any order: after one more turn, all woken tasks have run.
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
        self._batch = batch
        self._closed_at = trio.current_time()
        busy = self._cpu_s()
        self._busy_each += ((busy - self._busy) / len(batch) - self._busy_each) / _BATCHES_AVERAGED
        self._busy = busy
        if self._native and self._submit_natively(batch, room):
            self._handed_over = self._now_s()
            return
        self._handover.under_way += 1
        written = Written()
        mutations = [entry[0] for entry in batch]
        # This batch's puts have already been noted: a group that is empty stays empty until after the batch.
        self._hand_over(mutations, room, lambda verdicts: self._post(batch, verdicts), written, self._empty.copy())
        written.wait()
        self._handed_over = self._now_s()

    def _submit_natively(self, batch: list[_Entry], room: int) -> bool:
        """Hand a batch to the native writer; returns whether it can write such a batch."""
        engine, stop = self.engine, self._stop
        if engine.native is None or (stop is not None and any(_reaches(entry[0], stop) for entry in batch)):
            return False
        self._start()
        self._handover.completing.start()
        need = _SPARE + room + engine.options.reserve_bytes
        made: bool = self._work.submit(engine.native, batch, need, self._empty, (self, batch))
        return made

    def _take(self) -> tuple[list[_Entry], int]:
        """Take the next batch from the queue, up to the limits; returns the batch and its room. Mutations of cancelled
        calls are dropped here (T10)."""
        waiting, self._queue = self._queue, []
        batch: list[_Entry] = []
        size, bytes_max, mutations_max = 0, self.options.bytes_max, self.options.mutations_max
        puts: set[str] = set()
        for at, entry in enumerate(waiting):
            call = entry[1]
            if call.dropped:
                continue
            room = self._room(entry[0], puts, self._cut)
            if batch and (size + room > bytes_max or len(batch) == mutations_max):
                self._queue = waiting[at:]
                break
            size += room
            call.taken = True
            batch.append(entry)
        if self.on_queued is not None:
            now = self._now_s()
            for _, call, _ in batch:
                if call.since:
                    self.on_queued(now - call.since)
        self._empty -= puts
        return batch, size

    def _post(self, batch: list[_Entry], verdicts: Sequence[Verdict]) -> None:
        """On the writer's thread: bring the verdicts to the loop, with one hop per batch."""
        try:
            self._token.run_sync_soon(self._finish, batch, verdicts, self._now_s())
        except trio.RunFinishedError:
            self._writing = False  # the loop is gone, and so are all callers

    def _finish(self, batch: list[_Entry], verdicts: Sequence[Verdict], ended: float) -> None:
        self._handover.under_way -= 1
        self.batch_ended(batch, verdicts, 0.0, ended)

    def batch_ended(self, batch: list[_Entry], verdicts: Sequence[Verdict], took_s: float, ended: float) -> None:
        """Answer the callers of a batch, and close the next one. `took_s`: how long the native writer took for it."""
        if took_s and self.on_written is not None:
            self.on_written(took_s)
        self._batches += 1
        self._mutations += len(batch)
        expired = batch is not self._batch
        in_flight = len(batch) + len(self._queue)
        self.engine.end_shared()  # T2: later reads see what this batch wrote
        slow_disk = ended - self._handed_over > in_flight * self._busy_each
        self._lone = self._lone + 1 if in_flight == 1 else 0
        if self._lone >= _LONE_MIN:
            self._half = 1
        else:
            self._half = _NEVER if slow_disk else max(in_flight // 2, _HALF_MIN)
        self._writing = False
        if self._cut:
            self._look_for_empty()
        if len(self._queue) >= self._half:
            self._close_batch()
        if not expired:
            self._patient = slow_disk
            self._answer(batch, verdicts)
        if self._writing or self._closing_soon:
            return
        if self._half == 1 and not self._queue:
            self._idle.set()
        else:
            self._closing_soon = True
            self._token.run_sync_soon(self._close_soon)

    def _answer(self, batch: Sequence[_Entry], verdicts: Sequence[Verdict]) -> None:
        reschedule = trio.lowlevel.reschedule
        for (_, call, index), verdict in zip(batch, verdicts, strict=True):
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
        """Answer the callers of a batch if the disk has not answered for `after_s` (T10). Loop thread.

        The batch may or may not have been written (T4); mutations queued behind it were not sent. Upkeep is done when
        the disk answers, even if no caller waits for it any more.
        """
        reason = f"the disk has not answered for {after_s:g} s"
        for chore in self._chores:
            if trio.current_time() - chore.began >= after_s:
                chore.end(Unavailable(f"{self.table}: {reason}"))
        if self._held and trio.current_time() - self._held_since >= after_s:
            self._expire_held(reason)
        if not self._writing or trio.current_time() - self._closed_at < after_s:
            return
        self.engine.end_shared()  # S3: it is not known when this batch ends
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

        For the heartbeat thread, which must be able to write its lease even while the loop is held (L4).
        """
        self._hand_over(mutations, self._room_of_all(mutations), done)

    def _hand_over(
        self,
        mutations: Sequence[Mutation],
        room: int,
        done: Callable[[Sequence[Verdict]], None],
        written: Written | None = None,
        empty: Container[str] = NOWHERE,
    ) -> None:
        self._start()
        self._work.put((mutations, room, done, written, empty))

    def _start(self) -> None:
        if self._thread is None:
            with self._starting:  # the loop and the heartbeat thread may both be first (S5)
                if self._thread is None:
                    name = f"perco-writer-{self.table}"
                    thread = threading.Thread(target=self._write, name=name, daemon=True)
                    thread.start()
                    self._thread = thread

    # ------------------------------------------------------------ the writer's thread (S5)

    def _write(self) -> None:
        while (work := self._work.get()) is not None:
            failure = None
            if len(work) == 2:
                if isinstance(work[1], list):
                    self._post_ended(work[0][1], work[1])
                    continue
                work, failure = self._handed_back(work)
            mutations, room, done, written, empty = work
            self.engine.busy = True
            verdicts: Sequence[Verdict]
            tell = self.on_written
            began = time.perf_counter() if tell is not None else 0.0
            try:
                verdicts = self._commit(mutations, room, written, empty, failure)
            except Exception as error:  # after any error, the thread goes on, and no caller waits forever
                verdicts = [NoReply(f"{type(error).__name__}: {error}")] * len(mutations)
            if written is not None:
                written.tell()
            if tell is not None:
                tell(time.perf_counter() - began)
            done(verdicts)
            self.engine.busy = False
            self._handover.handed_in()

    def _handed_back(self, work: _HandedBack) -> tuple[_Work, Any]:
        """A batch that the native writer could not write, as work for this thread."""
        (_, batch), failure = work

        def done(verdicts: Sequence[Verdict]) -> None:
            self._post_ended(batch, verdicts)

        mutations = [entry[0] for entry in batch]
        return (mutations, self._room_of_all(mutations), done, None, NOWHERE), failure

    def _post_ended(self, batch: list[_Entry], verdicts: Sequence[Verdict]) -> None:
        with contextlib.suppress(trio.RunFinishedError):  # as in `_post`
            self._token.run_sync_soon(self.batch_ended, batch, verdicts, 0.0, self._now_s())

    def _commit(
        self,
        mutations: Sequence[Mutation],
        room: int,
        written: Written | None,
        empty: Container[str],
        failure: tuple[int, str, int] | None = None,
    ) -> Sequence[Verdict]:
        if failure is not None:
            return self._write_batch(mutations, None, empty, failure)
        full = self._room_for(room, reserve=False)
        if full is None:
            return self._write_batch(mutations, written, empty)
        # S4: the disk is full. Mutations that free space or unblock others are still written, into the reserve.
        verdicts: list[Verdict] = [Failed(full)] * len(mutations)
        chosen = [i for i, mutation in enumerate(mutations) if mutation.reserve]
        through = self._into_reserve([mutations[i] for i in chosen])
        for i, verdict in zip(chosen, through, strict=True):
            verdicts[i] = verdict
        return verdicts

    def _into_reserve(self, mutations: Sequence[Mutation]) -> Sequence[Verdict]:
        """Write mutations together if the reserve is large enough for that, else in smaller batches."""
        if not mutations:
            return []
        full = self._room_for(self._room_of_all(mutations), reserve=True)
        if full is None:
            return self._write_batch(mutations, None)
        if len(mutations) == 1:
            return [Failed(full)]
        half = len(mutations) // 2
        return [*self._into_reserve(mutations[:half]), *self._into_reserve(mutations[half:])]

    def _room_for(self, room: int, *, reserve: bool) -> StoreFull | None:
        """Make room for a batch in the file and the map, with some pages to spare; None: there is room."""
        need = _SPARE + room
        full = None
        if not self.engine.has_map_for(need, reserve=reserve):
            full = self._grow(need, reserve=reserve)
        if full is None:
            full = self.engine.make_room(need, reserve=reserve)
        return None if full is None or self.engine.has_free(need, reserve=reserve) else full

    def _grow(self, need: int, *, reserve: bool) -> StoreFull | None:
        """Have the reading thread grow the map, and wait for it: no transaction is open then (S6)."""
        answer: queue.SimpleQueue[StoreFull | None] = queue.SimpleQueue()

        def grow() -> None:
            try:
                answer.put(self.engine.grow(need, reserve=reserve))
            except BaseException as error:  # it ends the run; the writer must not wait for ever
                answer.put(StoreFull(str(self.engine.path), repr(error)))
                raise

        self._token.run_sync_soon(grow)
        return answer.get()

    def _write_batch(
        self,
        mutations: Sequence[Mutation],
        written: Written | None,
        empty: Container[str] = NOWHERE,
        failure: tuple[int, str, int] | None = None,
    ) -> Sequence[Verdict]:
        """Write a batch. `failure`: the native writer's, when it committed the batch."""
        if self._stop is not None and any(_reaches(mutation, self._stop) for mutation in mutations):
            return self._write_some(mutations, self._stop, written, empty)
        try:
            if failure is not None:
                verdicts = self.engine.after_failure(failure, len(mutations))
            else:
                told = written.tell if written is not None else None
                verdicts = self.engine.commit(mutations, self.floor, told, empty)
        except MapTooSmall:
            full = self._grow(0, reserve=True)
            if full is None:
                return self._write_batch(mutations, written, empty)
            if len(mutations) == 1:
                return [Failed(full)]
            half = len(mutations) // 2  # S4: the mutations for which there is room are written
            return [*self._write_batch(mutations[:half], None), *self._write_batch(mutations[half:], None)]
        except Exception as error:  # one mutation must not make its neighbours fail (S4)
            if len(mutations) == 1:
                return [Failed(error)]
            return [self._write_batch([mutation], None)[0] for mutation in mutations]
        if self._copying is not None:
            self._copying.note(mutations, verdicts)  # P2
        return verdicts

    def _write_some(
        self, mutations: Sequence[Mutation], stop: bytes, written: Written | None, empty: Container[str]
    ) -> Sequence[Verdict]:
        """Write mutations, but refuse those of rows from `stop` on (P1). They come from other threads: the
        loop's own mutations of these rows are held, or go to the new tablet."""
        rest = [mutation for mutation in mutations if not _reaches(mutation, stop)]
        made = iter(self._write_batch(rest, written, empty) if rest else ())
        return [Failed(TabletSplit(self.table)) if _reaches(mutation, stop) else next(made) for mutation in mutations]

    # ------------------------------------------------------------ splitting

    def live_bytes(self) -> int:
        """The bytes of the file that its cells take."""
        return self.engine.live_bytes()

    async def middle(self, stop: bytes | None) -> bytes | None:
        """A row before `stop` at which to split, in the middle of the cells; None: all cells are in one row."""
        search = middle(self.engine, stop)
        while True:
            found = await self._beside(next, search, b"")
            if found is not None:
                return found or None

    async def copy_from(self, row: bytes, stop: bytes | None, path: Path, groups: Sequence[str]) -> int:
        """Copy the cells of all rows at or after `row`, up to `stop`, into an environment at `path`, while reads and
        writes go on. Call `cut` or `uncut` next. Returns how many cells were copied.

        Raises: StoreFull, Unavailable; then call `uncut`.
        """
        assert self._splitting is None, "one at a time"
        whole = row == self.start  # P6
        copying = self._splitting = Copying(self.engine, row, stop, path, groups, self.engine.options, whole=whole)

        def begin() -> None:
            self._copying = copying
            self._divert()

        await self._on_writer(begin)
        while not await self._beside(copying.step):
            pass
        return copying.cells

    def _divert(self) -> None:
        """Have this thread write all batches, which notes them (P2), while there is a copy."""
        if self._native:
            self._work.divert = self._copying is not None

    def copied(self) -> int:
        """How many cells the unfinished copy has."""
        return self._splitting.cells if self._splitting is not None else 0

    async def cut(self, row: bytes) -> None:
        """Hold all mutations of rows from `row` on (P1, P2). When this returns, the copy is whole, on disk, and closed.
        Call `let_go` or `uncut` next."""
        copying = self._splitting
        assert copying is not None
        assert copying.row == row
        self._held, self._held_since, self._cut_row = [], trio.current_time(), row
        queue, self._queue = self._queue, []
        for entry in queue:
            (self._held if _reaches(entry[0], row) else self._queue).append(entry)

        def stop() -> None:
            self._stop = row

        await self._on_writer(stop)  # behind the batch in flight
        await self._beside(copying.finish)
        await self._end_copying(row)

    async def _end_copying(self, stop: bytes | None) -> None:
        """End the copy, once the writer is done with it; the writer then refuses mutations of rows from `stop` on."""
        copying, self._splitting = self._splitting, None

        def end() -> None:
            self._copying, self._stop = None, stop
            self._divert()

        with trio.CancelScope(shield=True):
            with contextlib.suppress(Unavailable, TransactionClosed):  # if the disk does not answer, it is done later
                await self._on_writer(end)
            if copying is not None:
                await self._beside(copying.close)

    def let_go(self) -> list[_Entry]:
        """After `cut`: return the held mutations, for the tablet that has these rows now."""
        if self._held is not None:
            self._gone = self._cut_row
        return self._no_longer_held()

    def _no_longer_held(self) -> list[_Entry]:
        held, self._held = self._held or [], None
        self._idle.set()
        return [entry for entry in held if not entry[1].dropped]

    async def uncut(self) -> None:
        """End the copy or the cut, if there is one: the tablet keeps its rows, and queues the mutations that it has
        held."""
        if self._splitting is None and self._held is None:
            await trio.lowlevel.checkpoint()
            return
        await self._end_copying(self._gone)
        for mutation, call, index in self._no_longer_held():
            self.submit(mutation, call, index)

    async def replace(self, engine: LmdbEngine) -> LmdbEngine:
        """Switch to the copy (P6), after a `cut` at the first row, so that nothing is being written. Returns the old
        engine, which is no longer in use. Call `uncut` next."""
        assert self._held is not None, "P6: a batch would be lost"
        assert self._cut_row == self.start
        replaced: list[LmdbEngine] = []
        done = trio.Event()

        def swap(swapped: threading.Event) -> None:  # on the loop: no read is open
            self.engine.end_shared()
            replaced.append(self.engine)
            self.engine = engine
            swapped.set()
            done.set()

        def act() -> None:  # on the writer's thread: no batch is being written
            swapped = threading.Event()
            self._token.run_sync_soon(swap, swapped)
            swapped.wait()

        with contextlib.suppress(Unavailable):  # raised if earlier upkeep takes too long
            await self._on_writer(act)
        await done.wait()
        return replaced[0]

    def has_from(self, row: bytes) -> bool:
        """Whether there is any cell at or after a row."""
        return self.engine.has_from(row)

    async def remove_from(self, row: bytes) -> bool:
        """Remove some of the cells at or after a row; another tablet has them (P4). Returns whether any may be left."""
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
        """From now on, refuse mutations that name an older timestamp (T13).

        When this returns, every mutation that was admitted earlier is committed and visible, or has failed.
        """
        if self._thread is None:  # nothing was ever written
            await trio.lowlevel.checkpoint()
            self._raise_floor(ts)
            return
        await self._on_writer(lambda: self._raise_floor(ts))

    def _raise_floor(self, ts: int) -> None:
        self.floor = max(self.floor, ts)

    async def repack(self, group: str, start: bytes, skip: int) -> tuple[bytes | None, bool]:
        """Rewrite some cells of a group if their pages are half empty, between two batches; see `LmdbEngine.repack`.

        If there is no space for that, the cells stay as they are.
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
        self.engine.end_shared()  # the shared view does not have them

    async def park(self, go_on: threading.Event) -> None:
        """Have the writer wait, between two batches, until `go_on` is set (B1). Returns when it waits."""
        parked = trio.Event()

        def wait(_: Sequence[Verdict]) -> None:
            with contextlib.suppress(trio.RunFinishedError):  # the loop is gone, and so is the caller
                self._token.run_sync_soon(parked.set)
                go_on.wait()

        self._hand_over([], 0, wait)
        await parked.wait()

    async def _on_writer(self, action: Callable[[], None]) -> None:
        """Run an action on the writer's thread, between two batches.

        If the caller is cancelled, or gets no answer in time (T10), the action is still done later, and may be
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
            with contextlib.suppress(trio.RunFinishedError):  # the loop is gone, and so is the caller
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
        """End the shared view before a fork (S5)."""
        self.engine.end_shared()

    def forget(self) -> None:
        """In a forked child: drop the tablet, which is the parent's (S5)."""
        self.engine.busy |= self._native and self._work.busy
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
                self._idle = trio.Event()  # several tasks may wait for one event
            await self._idle.wait()
        return busy

    def refuse(self) -> None:
        """From now on, fail each mutation as soon as it is submitted."""
        self._open = False

    async def aclose(self) -> None:
        """End the thread and close the environment, after `drain`."""
        with trio.CancelScope(shield=True):
            self._ended = True
            if self._thread is not None:
                await self._join()
        self.engine.close()

    # ------------------------------------------------------------ work on other threads (simulations override these)

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
