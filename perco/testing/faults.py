"""A row store that loses, delays and repeats mutations. It counts the faults: a test must prove that they fired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Final, cast

import trio

from perco.database.database import Database
from perco.database.inside import inside
from perco.errors import StoreFull
from perco.protocol.records import is_bare, unpack_record
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import (
    FAILED_LIST,
    LOCK,
    LOG,
    NOTIFY,
    PENDING,
    ROLLBACK,
    SHARED,
    TRACE,
    WRITE,
    Failed,
    Mutation,
    NoReply,
    OwnerStore,
    ReadRequest,
    RowCells,
    RowStore,
    ScanPage,
    ScanRequest,
    Tablet,
    Verdict,
)


class Fault(Enum):
    LOSE_REQUEST = "it never arrived"
    LOSE_REPLY = "it was made, its reply was lost"
    DELAY = "presumed lost, it is made later"
    REPEAT = "made, and once more later"
    ECHO = "made twice in a row; the caller gets the second answer"
    FAIL = "the store could not"
    HANG = "no answer until the caller gives up; it never arrived"
    HANG_MADE = "no answer until the caller gives up; it was made"


Plan = Callable[[Mutation, int], "Fault | None"]


_SYSTEM_STEPS: Final = {
    b"oracle": "bound",
    b"catalogue": "catalogue",
    b"clock": "clock",
    b"serves": "lease",
    b"watermark": "vacuum",
    b"backfill": "notify",
}
_LOCKS: Final = {LOCK, SHARED, PENDING}
_OLD: Final = {(WRITE, True), (TRACE, True)}


def kind_of(mutation: Mutation) -> str:
    """The step of the protocol that a mutation performs.

    Any table: prewrite, commit (or roll-forward), one step, marker, rollback; tidy (only removes notify cells); notify
    (only puts notify cells); give up (puts a change on the failed list); replay (takes it off the list); vacuum. Only
    the system table: bound, catalogue, clock, lease. All the rest: other.
    """
    if mutation.table == SYSTEM_TABLE:
        return _SYSTEM_STEPS.get(mutation.rows[0][0], "other")
    writes = [write for _, _, row_writes in mutation.rows for write in row_writes]
    groups = {(group, value is None) for group, _, _, value in writes}
    puts = {group for group, gone in groups if not gone}
    unlocks = {group for group, gone in groups if gone} & _LOCKS
    if puts & {WRITE, TRACE}:
        return "commit" if unlocks else "one step"
    if PENDING in unlocks and any(group == NOTIFY for group, _ in groups):
        return "commit"
    if puts & _LOCKS:
        return "prewrite"
    if unlocks:
        return "rollback"
    if (ROLLBACK, False) in groups:
        return "marker"
    if (FAILED_LIST, False) in groups:
        return "give up"
    if (FAILED_LIST, True) in groups and (NOTIFY, False) in groups:
        return "replay"
    if groups & _OLD or groups == {(LOG, True)} or groups == {(ROLLBACK, True)}:
        return "vacuum"
    if (NOTIFY, True) in groups:
        return "tidy"
    return "notify" if (NOTIFY, False) in groups else "other"


def start_ts_of(mutation: Mutation) -> int:
    """The start timestamp of the transaction that a mutation is a step of; 0 if there is none."""
    for _, _, writes in mutation.rows:
        for group, column, ts, value in writes:
            if group in (*_LOCKS, ROLLBACK) or (group == TRACE and is_bare(column)):
                return ts
            if group == WRITE and value is not None:
                return unpack_record(value).start_ts
    return 0


class FaultyRowStore:
    """A row store with faults. It numbers mutations from 0; `plan` chooses the fault of each.

    `before`, if given, is awaited before each mutation is made, one mutation after the other. A task may be stopped or
    cancelled there; its mutation has not been sent then. `after` is awaited when a mutation has been made, before its
    reply. A task cannot be cancelled there (T10). `looking` is awaited before each read and scan.
    Attributes: `fired`, how often each fault fired; `late`, the mutations that have yet to arrive; `log`, the kinds of
    all mutations.
    """

    plan: Callable[[Mutation, int], Fault | None]
    before: Callable[[Mutation], Awaitable[None]] | None
    after: Callable[[Mutation], Awaitable[None]] | None
    looking: Callable[[], Awaitable[None]] | None

    groups: bool

    def __init__(
        self,
        store: RowStore,
        plan: Plan = lambda mutation, number: None,
        *,
        before: Callable[[Mutation], Awaitable[None]] | None = None,
        after: Callable[[Mutation], Awaitable[None]] | None = None,
        looking: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.groups = store.groups
        self.plan, self.before, self.after, self.looking = plan, before, after, looking
        self.fired: Counter[Fault] = Counter()
        self.late: list[Mutation] = []
        self.log: list[str] = []
        self.shuffle: Callable[[list[int]], None] | None = None  # reorders mutations that were sent together
        self.deaf = False  # reads hang
        self.read_error: Exception | None = None  # reads fail
        self.dead: Exception | None = None  # everything raises: the process is gone
        self._store = store

    chaining = None
    deferring = None
    prompt = None

    @property
    def once(self) -> bool:
        return self._store.once

    @property
    def logs(self) -> bool:
        return self._store.logs

    @property
    def near(self) -> bool:
        return self._store.near

    def tablets_here(self) -> Sequence[Tablet]:
        return self._store.tablets_here()

    async def raise_floor(self, ts: int, *, wait: bool) -> None:
        self._alive()
        await cast(OwnerStore, self._store).raise_floor(ts, wait=wait)

    def locate(self, table: str, row: bytes) -> int:
        return self._store.locate(table, row)

    def bounds(self, table: str) -> list[bytes]:
        return self._store.bounds(table)

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        await self._may_read()
        return await self._store.read(requests)

    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        await self._may_read()
        return await self._store.read_first(requests, bytes_max)

    async def _may_read(self) -> None:
        await self._look()
        if self.deaf:
            await trio.sleep_forever()
        if self.read_error is not None:
            raise self.read_error

    async def scan(self, request: ScanRequest) -> ScanPage:
        await self._look()
        return await self._store.scan(request)

    async def _look(self) -> None:
        if self.looking is not None:
            await self.looking()
        self._alive()

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        await trio.lowlevel.checkpoint_if_cancelled()
        order = list(range(len(mutations)))
        if self.shuffle is not None:
            self.shuffle(order)
        verdicts = {i: await self._apply(mutations[i]) for i in order}
        return [verdicts[i] for i in range(len(mutations))]

    async def _apply(self, mutation: Mutation) -> Verdict:
        self._alive()
        if self.before is not None:
            await self.before(mutation)
            self._alive()
        number = len(self.log)
        self.log.append(kind_of(mutation))
        fault = self.plan(mutation, number)
        if self.log[-1] == "one step" and fault in (Fault.REPEAT, Fault.ECHO):
            fault = Fault.LOSE_REPLY  # C6: a one-step commit is never sent twice; its tablets are in this process
        if fault is not None:
            self.fired[fault] += 1
        match fault:
            case None:
                return await self._make(mutation)
            case Fault.LOSE_REQUEST:
                return NoReply(fault.value)
            case Fault.LOSE_REPLY:
                await self._make(mutation)
                return NoReply(fault.value)
            case Fault.DELAY:
                self.late.append(mutation)
                return NoReply(fault.value)
            case Fault.REPEAT:
                self.late.append(mutation)
                return await self._make(mutation)
            case Fault.ECHO:
                await self._make(mutation)
                return await self._make(mutation)
            case Fault.FAIL:
                return Failed(StoreFull("the tests", fault.value))
            case Fault.HANG_MADE:
                await self._make(mutation)
            case Fault.HANG:
                pass
        await trio.sleep_forever()

    async def _make(self, mutation: Mutation) -> Verdict:
        with trio.CancelScope(shield=True):
            [verdict] = await self._store.apply([mutation])
            if self.after is not None:
                await self.after(mutation)
        return verdict

    def _alive(self) -> None:
        if self.dead is not None:
            raise self.dead

    async def deliver_late(self) -> int:
        """Deliver the delayed and the repeated mutations; returns how many."""
        late, self.late = self.late, []
        for mutation in late:
            await self._make(mutation)
        return len(late)


def use(db: Database, store: FaultyRowStore) -> FaultyRowStore:
    """Make the client's transactions go through this store."""
    driver = inside(db).driver
    driver.store = driver.reads = store
    return store
