"""The delay window: holds a client's calls to one tablet for a moment, to send them together (the paper's section 2.5).

    Batching(store)    a row store over any other; gathers the reads, and the mutations, of one tablet
    Gathering          gathers calls of any kind: one-step commits, claims on rows

A *fixed* window is that of the paper: the first call opens it, and every call that arrives within `window_s` joins it.
An *adaptive* window is open only while an earlier call of that kind to that tablet is in flight; it ends when that call
is answered, or after `window_s`. If no call is in flight, but calls have recently overlapped, the calls of one turn of
the loop are sent together, without a further wait.

D1  Calls of one kind to one tablet that arrive within a window are sent in one call, in their order of arrival.
D2  No call is held longer than `window_s`. A full batch (`mutations_max`, `bytes_max`) is sent at once.
D3  A window holds only reads, mutations, one-step commits and claims on rows: no request for a timestamp (O2, T2), no
    scan or page of a scan, no one-way message. No call waits for a call to another tablet, or of another kind.
D4  If a caller is cancelled while its batch is open, its part is withdrawn and never sent. A closed batch is sent, and
    a caller that is cancelled then still waits for the verdicts on its mutations (T10).
D5  When a batch closes, it is divided among the tablets that have its rows at that moment (P1, P3), with one call for
    each tablet. No call waits for another.
D6  Each caller gets its own answers. Groups stay whole (S1). A mutation is sent once; if the reply to its call is lost,
    its verdict is NoReply (T4, C6).
D7  If a session ends while one of its reads waits in a window, the read is not sent, and its caller gets SessionEnded
    (R5).
D8  If a part of a call would have to wait at the server (C4), the server answers `None` for it, and its caller asks
    again, in a call of its own. So no caller waits because of another caller's part.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeAlias

import trio

from perco.errors import SessionEnded, Unavailable
from perco.outcome import Awaited
from perco.storage.cells import Mutation, ReadRequest, RowCells, ScanPage, ScanRequest, Verdict
from perco.storage.rowstore import Deferring, RowStore
from perco.storage.tablet import BatchOptions, Tablet

_FOR_ALL = (Unavailable, SessionEnded)  # errors that concern a whole call, not one of its parts
_CELL_BYTES = 64  # size of a check, a write or a query, without its value

Wanted: TypeAlias = tuple[Hashable, Any, int]  # a tablet, the part for it, and the part's approximate bytes
Spawn: TypeAlias = Callable[[Callable[[], Awaitable[None]]], None]


class _Caller(Awaited):
    """A task that waits for all of its answers. `value`: the answers, in the order of its parts."""

    value: list[Any]

    __slots__ = ("again", "gone", "missing", "sent", "waits")

    def __init__(self, wanted: int, *, again: bool) -> None:
        super().__init__(trio.lowlevel.current_task())
        self.again = again
        self.value = [None] * wanted
        self.missing = wanted
        self.sent = False  # some part is in a closed batch
        self.gone = False  # cancelled: its unsent parts must not be sent
        self.waits = False

    def abort(self, _: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        """Let the caller leave, unless it must wait for the answer to a part that was sent (D4)."""
        if self.sent and not self.again:
            return trio.lowlevel.Abort.FAILED
        self.gone = True
        return trio.lowlevel.Abort.SUCCEEDED

    def told(self) -> None:
        """Count one more answered part; wake the task after the last."""
        self.missing -= 1
        if not self.missing and self.waits and not self.gone:
            self.wake()


_Part: TypeAlias = tuple[_Caller, int, Any]  # the caller, the index among its parts, and the part


class _Batch:
    """Parts that are sent together."""

    __slots__ = ("bytes", "closed", "deadline", "due", "key", "parts", "wake")

    def __init__(self, key: Hashable, deadline: float, *, due: bool) -> None:
        self.key, self.deadline, self.due = key, deadline, due
        self.parts: list[_Part] = []
        self.bytes = 0
        self.closed = False
        self.wake: trio.Event | None = None  # wakes the task that holds it

    def hurry(self) -> None:
        """End its window now."""
        self.due = True
        if self.wake is not None:
            self.wake.set()


class Gathering:
    """Gathers calls of one kind. Loop thread only.

    Args:
        spawn: runs a short task, shielded from cancellation, and finishes it before the store closes.
        ask: sends all parts in one call and returns an answer for each; None: the part's caller must ask alone (D8). An
            exception reaches all callers. But with `again`, if the exception may concern only one of several parts,
            each caller asks alone.
        where: returns the tablet that has a part's row now (D5).
        again: whether a part may be sent again. If so, a cancelled caller may leave while its part is in flight.
        dropped: called with a part and its answer if the part's caller has left.
    """

    def __init__(
        self,
        options: BatchOptions,
        spawn: Spawn,
        ask: Callable[[list[Any]], Awaitable[Sequence[Any]]],
        where: Callable[[Any], Hashable],
        *,
        again: bool,
        dropped: Callable[[Any, Any], None] | None = None,
    ) -> None:
        self._options, self._spawn, self._ask, self._where = options, spawn, ask, where
        self._again, self._dropped = again, dropped
        self._open: dict[Hashable, _Batch] = {}
        self._out: dict[Hashable, int] = {}  # calls in flight to each tablet; kept only if the window is adaptive
        self._crowded: set[Hashable] = set()  # tablets for which a call has lately found another one in flight

    # A KeyboardInterrupt between joining a batch and the wait would leave behind a part whose task is gone.
    @trio.lowlevel.enable_ki_protection
    async def ask(self, wanted: Sequence[Wanted]) -> list[Any] | None:
        """Wait for the window to end, and for the answers. Returns an answer for each part; or None if there was no
        other call to join: then the caller makes its own call, and calls `answered` when that has ended.

        Raises: what the call raises.
        """
        key = wanted[0][0]
        led = None
        if (
            self._options.adaptive
            and key not in self._out
            and key not in self._open
            and (len(wanted) == 1 or all(other == key for other, _, _ in wanted))
        ):
            if key not in self._crowded:
                self._out[key] = 1
                return None
            led = self._begin(key, due=True)
        caller = _Caller(len(wanted), again=self._again)
        for index, (tablet, item, size) in enumerate(wanted):
            self._join(tablet, caller, index, item, size)
        if led is not None and await self._alone(led, caller):
            return None
        if not caller.missing:
            return caller.unwrap()  # type: ignore[no-any-return]
        caller.waits = True
        return await trio.lowlevel.wait_task_rescheduled(caller.abort)  # type: ignore[no-any-return]

    async def _alone(self, batch: _Batch, caller: _Caller) -> bool:
        """Let the tasks of this turn of the loop join a batch, then close it. Returns whether none of them joined."""
        await trio.lowlevel.cancel_shielded_checkpoint()
        if not batch.closed:
            caller.gone = trio.current_effective_deadline() == -math.inf  # D4: cancelled while its batch was open
            if len(batch.parts) == len(caller.value) == caller.missing and not caller.gone:
                self._crowded.discard(batch.key)
                self._close(batch)
                self._out[batch.key] = self._out.get(batch.key, 0) + 1
                return True
            self._close(batch)
        self._spawn(partial(self._send, batch))
        if caller.gone:
            await trio.lowlevel.checkpoint()
        return False

    def _begin(self, key: Hashable, *, due: bool) -> _Batch:
        assert key not in self._open, "D1: one batch is open for a tablet"
        batch = self._open[key] = _Batch(key, trio.current_time() + self._options.window_s, due=due)
        return batch

    def _join(self, key: Hashable, caller: _Caller, index: int, item: Any, size: int) -> None:
        options = self._options
        batch = self._open.get(key)
        if batch is not None and batch.bytes and batch.bytes + size > options.bytes_max:
            self._close(batch)  # D2
            batch = None
        if batch is None:
            batch = self._begin(key, due=options.adaptive and key not in self._out)
            self._crowded.add(key)
            self._spawn(partial(self._hold, batch))
        batch.parts.append((caller, index, item))
        batch.bytes += size
        if len(batch.parts) >= options.mutations_max or batch.bytes >= options.bytes_max:
            self._close(batch)  # D2

    def _close(self, batch: _Batch) -> None:
        assert not batch.closed, "D6: a batch is sent once"
        batch.closed = True
        batch.parts = [part for part in batch.parts if not part[0].gone]
        for caller, _, _ in batch.parts:
            caller.sent = True
        del self._open[batch.key]
        batch.hurry()

    async def _hold(self, batch: _Batch) -> None:
        """Send a batch when its window has ended."""
        if not batch.due:
            batch.wake = trio.Event()
            with trio.CancelScope(deadline=batch.deadline):
                await batch.wake.wait()
        if not batch.closed:
            self._close(batch)
        await self._send(batch)

    async def _send(self, batch: _Batch) -> None:
        found: dict[Hashable, list[_Part]] = {}
        for part in batch.parts:
            found.setdefault(self._where(part[2]), []).append(part)  # D5
        for key in list(found)[1:]:
            self._spawn(partial(self._call, key, found[key]))
        if found:  # otherwise, all callers have been cancelled
            await self._call(*next(iter(found.items())))

    async def _call(self, key: Hashable, parts: list[_Part]) -> None:
        if self._options.adaptive:
            self._out[key] = self._out.get(key, 0) + 1
        answers: Sequence[Any] = ()
        error: BaseException | None = None
        try:
            answers = await self._ask([item for _, _, item in parts])
        except BaseException as failure:
            error = failure
        self.answered(key)
        if self._again and len(parts) > 1 and isinstance(error, Exception) and not isinstance(error, _FOR_ALL):
            answers, error = [None] * len(parts), None  # D8: the error may concern only one of them
        for i, (caller, index, item) in enumerate(parts):
            if error is not None:
                caller.error = _own(error)
            else:
                caller.value[index] = answers[i]
                if caller.gone and self._dropped is not None:
                    self._dropped(item, answers[i])
            caller.told()
        if error is not None and not isinstance(error, Exception):
            raise error

    def answered(self, key: Hashable) -> None:
        """Record that a call to a tablet has ended: the batch that waited for this is sent (D2)."""
        if not self._options.adaptive:
            return
        out = self._out.pop(key) - 1
        if out:
            self._out[key] = out
        batch = self._open.get(key)
        if batch is not None:
            batch.hurry()

    def fail_open(self, error: Callable[[], Exception]) -> None:
        """End all windows: parts that still wait there are not sent, and their callers get an error."""
        for batch in self._open.values():
            parts, batch.parts, batch.bytes = batch.parts, [], 0
            for caller, _, _ in parts:
                caller.error = error()
                caller.told()


def _own(error: BaseException) -> Exception:
    """A copy of an error, for one of several tasks that raise it."""
    if not isinstance(error, Exception):
        return Unavailable("the program ended before an answer came")
    try:
        return copy.copy(error)
    except TypeError:  # its constructor takes arguments other than `args`
        return error


class _Late:
    """A mutation that is made when its batch has been closed."""

    __slots__ = ("make", "row", "table")

    def __init__(self, table: str, row: bytes, make: Callable[[], Mutation | None]) -> None:
        self.table, self.row, self.make = table, row, make


class Batching:
    """A row store in which reads, and mutations, wait in a window for others of their kind to the same tablet.

    Args:
        store: the row store to call.
        options: see `BatchOptions`; with a window of 0 there is no need for this class.
        spawn: as in `Gathering`.
        together: makes the reads of several callers to one tablet, and returns None for each caller that must ask alone
            (D8). By default, this is one `read` of the store.
    """

    inner: RowStore

    def __init__(
        self,
        store: RowStore,
        options: BatchOptions,
        spawn: Spawn,
        together: Callable[[list[Sequence[ReadRequest]]], Awaitable[Sequence[list[RowCells] | None]]] | None = None,
    ) -> None:
        self.inner = store
        self._losses = 0  # sessions that have ended
        self._reads = Gathering(options, spawn, together or self._read_together, self._of_read, again=True)
        self._mutations = Gathering(options, spawn, self._apply_together, self._of_mutation, again=False)

    chaining = None
    prompt = None

    @property
    def groups(self) -> bool:
        return self.inner.groups

    @property
    def once(self) -> bool:
        return self.inner.once

    @property
    def logs(self) -> bool:
        return self.inner.logs

    @property
    def near(self) -> bool:
        return self.inner.near

    @property
    def deferring(self) -> Deferring:
        return self

    def tablets_here(self) -> Sequence[Tablet]:
        return self.inner.tablets_here()

    def locate(self, table: str, row: bytes) -> int:
        return self.inner.locate(table, row)

    def bounds(self, table: str) -> list[bytes]:
        return self.inner.bounds(table)

    async def scan(self, request: ScanRequest) -> ScanPage:
        """Scan the store at once (D3)."""
        return await self.inner.scan(request)

    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        """Read from the store at once (D3): this read is for a page of a scan."""
        return await self.inner.read_first(requests, bytes_max)

    # ------------------------------------------------------------ reads

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        """See `RowStore.read`. Raises: SessionEnded (D7)."""
        if not requests:
            return await self.inner.read(requests)
        losses = self._losses
        wanted, which = self._by_tablet(requests)
        answers = await self._reads.ask(wanted)
        if losses != self._losses:
            if answers is None:
                self._reads.answered(wanted[0][0])
            raise SessionEnded(_ENDED)
        if answers is None:
            try:
                return await self.inner.read(requests)
            finally:
                self._reads.answered(wanted[0][0])
        if len(answers) == 1 and answers[0] is not None:
            return answers[0]  # type: ignore[no-any-return]
        found: list[Any] = [None] * len(requests)
        for mine, answer in zip(which, answers, strict=True):
            for i, cells in zip(mine, answer or (), strict=answer is not None):
                found[i] = cells
        alone = [i for i, cells in enumerate(found) if cells is None]
        if alone:  # D8
            for i, cells in zip(alone, await self.inner.read([requests[i] for i in alone]), strict=True):
                found[i] = cells
        return found

    def _by_tablet(self, requests: Sequence[ReadRequest]) -> tuple[list[Wanted], Sequence[Sequence[int]]]:
        """The requests for each tablet, with their indices."""
        if len(requests) == 1:
            [(table, row, queries)] = requests
            return [(self.inner.locate(table, row), requests, _CELL_BYTES * (1 + len(queries)))], ((0,),)
        found: dict[int, list[int]] = {}
        for i, (table, row, _) in enumerate(requests):
            found.setdefault(self.inner.locate(table, row), []).append(i)
        wanted: list[Wanted] = [
            (tablet, [requests[i] for i in mine], _CELL_BYTES * sum(1 + len(requests[i][2]) for i in mine))
            for tablet, mine in found.items()
        ]
        return wanted, list(found.values())

    def _of_read(self, requests: Sequence[ReadRequest]) -> int:
        return self.inner.locate(requests[0][0], requests[0][1])

    async def _read_together(self, asked: list[Sequence[ReadRequest]]) -> list[list[RowCells]]:
        found = await self.inner.read([request for requests in asked for request in requests])
        answers, at = [], 0
        for requests in asked:
            answers.append(found[at : at + len(requests)])
            at += len(requests)
        return answers

    def end_reads(self) -> None:
        """Fail the reads that wait in a window: their session has ended (D7)."""
        self._losses += 1
        self._reads.fail_open(lambda: SessionEnded(_ENDED))

    # ------------------------------------------------------------ mutations

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        """See `RowStore.apply`."""
        if not mutations:
            return await self.inner.apply(mutations)
        locate = self.inner.locate
        wanted: list[Wanted] = [
            (locate(mutation.table, mutation.rows[0][0]), mutation, _bytes_of(mutation)) for mutation in mutations
        ]
        answers = await self._mutations.ask(wanted)
        if answers is not None:
            return answers
        try:
            return await self.inner.apply(mutations)
        finally:
            self._mutations.answered(wanted[0][0])

    async def apply_late(
        self, table: str, row: bytes, size: int, make: Callable[[], Mutation | None]
    ) -> Verdict | None:
        """Apply a mutation that is made only after its batch has been closed, and is sent in the same step of the loop.
        So its entries in memory (C2) do not exist while it waits in the window.

        Args:
            row: one of its rows.
            size: its approximate size in bytes.
            make: makes the mutation; if it returns None, nothing is applied, and there is no verdict.
        """
        key = self.inner.locate(table, row)
        answers = await self._mutations.ask([(key, _Late(table, row, make), size)])
        if answers is not None:
            return answers[0]  # type: ignore[no-any-return]
        try:
            mutation = make()
            return None if mutation is None else (await self.inner.apply([mutation]))[0]
        finally:
            self._mutations.answered(key)

    def _of_mutation(self, item: Mutation | _Late) -> int:
        if type(item) is _Late:
            return self.inner.locate(item.table, item.row)
        return self.inner.locate(item.table, item.rows[0][0])  # type: ignore[union-attr]

    async def _apply_together(self, items: list[Mutation | _Late]) -> list[Verdict | None]:
        made = [item.make() if type(item) is _Late else item for item in items]
        mutations = [mutation for mutation in made if mutation is not None]
        verdicts = iter(await self.inner.apply(mutations) if mutations else ())  # type: ignore[arg-type]
        return [None if mutation is None else next(verdicts) for mutation in made]


_ENDED = "the connection to the server was lost for too long: all earlier transactions have ended"


def _bytes_of(mutation: Mutation) -> int:
    """The approximate size of a mutation in a message."""
    size = 0
    for row, checks, writes in mutation.rows:
        size += len(row) + _CELL_BYTES * (len(checks) + len(writes))
        for write in writes:
            size += len(write[3] or b"")
    return size
