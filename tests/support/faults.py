"""A row store that loses, delays and repeats, and counts what it did: an injector must prove that it fired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import Enum

import trio
import trio.testing

from perco.errors import StoreFull
from perco.storage import (
    LOCK,
    NOTIFY,
    ROLLBACK,
    WRITE,
    Failed,
    Mutation,
    NoReply,
    ReadRequest,
    RowCells,
    RowStore,
    ScanPage,
    ScanRequest,
    Verdict,
)
from perco.txn.client import Client


class Fault(Enum):
    LOSE_REQUEST = "it never arrived"
    LOSE_REPLY = "it was made, its reply was lost"
    DELAY = "taken for lost, it is made later"
    REPEAT = "made, and once more later"
    ECHO = "made, and once more at once; the second answer is told"
    FAIL = "the store could not"
    HANG = "no answer until the caller gives up; it never arrived"
    HANG_MADE = "no answer until the caller gives up; it was made"


Plan = Callable[[Mutation, int], "Fault | None"]


def kind_of(mutation: Mutation) -> str:
    """Which step of the protocol it is: prewrite, commit (or roll-forward), marker, rollback, tidy, other."""
    writes = [write for _, _, row_writes in mutation.rows for write in row_writes]
    groups = {(group, value is None) for group, _, _, value in writes}
    if (WRITE, False) in groups:
        return "commit"
    if (LOCK, False) in groups:
        return "prewrite"
    if (LOCK, True) in groups:
        return "rollback"
    if (ROLLBACK, False) in groups:
        return "marker"
    return "tidy" if (NOTIFY, True) in groups else "other"


class FaultyRowStore:
    """Every mutation is numbered from 0; `plan` says what becomes of it.

    `before`, if given, is awaited before each mutation is made, one after the other: a place to stop, and to be
    cancelled: it was not sent. `after` likewise when it was made and not yet answered: no place to be cancelled (T10).
    Attributes: `fired`, how often each fault did; `late`, what is still to come; `log`, the kinds of all mutations.
    """

    def __init__(
        self,
        store: RowStore,
        plan: Plan = lambda mutation, number: None,
        *,
        before: Callable[[Mutation], Awaitable[None]] | None = None,
        after: Callable[[Mutation], Awaitable[None]] | None = None,
    ) -> None:
        self.groups = store.groups
        self.plan, self.before, self.after = plan, before, after
        self.fired: Counter[Fault] = Counter()
        self.late: list[Mutation] = []
        self.log: list[str] = []
        self.deaf = False  # reads hang
        self.read_error: Exception | None = None  # reads fail
        self.dead: Exception | None = None  # everything raises: the process is gone
        self._store = store

    def locate(self, table: str, row: bytes) -> int:
        return self._store.locate(table, row)

    def bounds(self, table: str) -> list[bytes]:
        return self._store.bounds(table)

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        self._alive()
        if self.deaf:
            await trio.sleep_forever()
        if self.read_error is not None:
            raise self.read_error
        return await self._store.read(requests)

    async def scan(self, request: ScanRequest) -> ScanPage:
        self._alive()
        return await self._store.scan(request)

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        await trio.lowlevel.checkpoint_if_cancelled()
        return [await self._apply(mutation) for mutation in mutations]

    async def _apply(self, mutation: Mutation) -> Verdict:
        self._alive()
        if self.before is not None:
            await self.before(mutation)
            self._alive()
        number = len(self.log)
        self.log.append(kind_of(mutation))
        fault = self.plan(mutation, number)
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
        """What was delayed or is to be repeated arrives; returns how many."""
        late, self.late = self.late, []
        for mutation in late:
            await self._make(mutation)
        return len(late)


def on(kinds: str | Iterable[str], fault: Fault, *, times: int = 1) -> Plan:
    """The first mutations of these kinds meet the fault."""
    wanted = {kinds} if isinstance(kinds, str) else set(kinds)
    left = [times]

    def plan(mutation: Mutation, number: int) -> Fault | None:
        if kind_of(mutation) in wanted and left[0]:
            left[0] -= 1
            return fault
        return None

    return plan


def at(number: int, fault: Fault) -> Plan:
    """The mutation of that number meets the fault."""
    return lambda mutation, n: fault if n == number else None


def use(client: Client, store: FaultyRowStore) -> FaultyRowStore:
    """From now on the client's transactions go through this store."""
    client.driver.store = store
    client.driver._apply_then = None
    return store


def faulty(client: Client, plan: Plan = lambda mutation, number: None) -> FaultyRowStore:
    return use(client, FaultyRowStore(client.driver.store, plan))


class Gate:
    """As `before` or `after`: stops the first mutation of a kind until it is opened."""

    def __init__(self, kind: str, *, skip: int = 0) -> None:
        self._kind, self._skip = kind, skip
        self._reached, self._opened = trio.Event(), trio.Event()

    async def __call__(self, mutation: Mutation) -> None:
        if kind_of(mutation) != self._kind or self._reached.is_set():
            return
        if self._skip:
            self._skip -= 1
            return
        self._reached.set()
        await self._opened.wait()

    async def reached(self) -> None:
        await self._reached.wait()

    def open(self) -> None:
        self._opened.set()


async def gated(client: Client, kind: str, *, skip: int = 0, made: bool = False) -> Gate:
    """The client's next mutation of that kind waits at a gate; what is under way ends first.

    `made`: the gate keeps its reply.
    """
    await trio.testing.wait_all_tasks_blocked()
    gate = Gate(kind, skip=skip)
    use(client, FaultyRowStore(client.driver.store, **{"after" if made else "before": gate}))  # type: ignore[arg-type]
    return gate
