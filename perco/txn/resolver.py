"""Reads, and settles what is in the way of reads: the locks and commits of other transactions.

Recovery:  `recovery.py` decides the next step, `Resolver.resolve` performs it.
Reading:   `snapshot.py` says what the cells mean; if a lock is in the way, `Resolver.finish` waits or resolves (T9).

T2  Reads open their view after the reader's timestamp was drawn: every read here is a new call of the store.
L1  A reader waits for a lock whose transaction is in the live set. Any other transaction is dead, unless its lease
    shows that it is alive in another process. In that case, the reader polls the lock.
S4  A reader that knows the outcome of a lock's transaction answers without settling the lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from zlib import crc32

import trio

from perco.clock.durations import Timings
from perco.clock.oracle import Oracle
from perco.errors import (
    CommitUnknown,
    Corruption,
    StoreError,
    TooLarge,
    UsageError,
)
from perco.protocol.records import PUT, PUT_DATA, Cellref, Lock, unpack_lock
from perco.protocol.recovery import Recovery, Step, primary_queries
from perco.protocol.snapshot import Blocked, InData, Missing, Seen, Value, look
from perco.storage import (
    LOCK,
    WRITE,
    Cell,
    Query,
    ReadRequest,
    RowCells,
    RowReads,
    RowStore,
)
from perco.txn.background import Background
from perco.txn.contended import Contended
from perco.txn.entered import Entered, Entry, Where
from perco.txn.fates import Fates
from perco.txn.prefetch import Plan
from perco.txn.timed import TimedReads

_POLL_S, _POLL_MAX_S = 0.002, 0.25  # between two reads of a lock whose transaction is alive in another process
_DAMAGED_MAX = 1000  # cells that are remembered

log: logging.Logger = logging.getLogger("perco.store")


Hint: TypeAlias = tuple[str, bytes, tuple[int, ...]]  # table, row, numbers of the observers notified there


@dataclass(slots=True)
class Counters:
    """The driver's counters since the store was opened; `Database.statistics` shows them."""

    commits: int = 0
    aborts: int = 0
    conflicts: int = 0
    lock_waits: int = 0
    rolled_forward: int = 0
    rolled_back: int = 0
    unknown: int = 0


class Resolver:
    """Reads and recoveries on one store. Loop thread only."""

    store: RowStore
    oracle: Oracle
    fates: Fates
    counters: Counters
    contended: Contended
    entered: Entered
    orphaned: trio.Event

    def __init__(
        self,
        store: RowStore,
        oracle: Oracle,
        fates: Fates,
        background: Background,
        event: Callable[[str], None] | None,
    ) -> None:
        self.store, self.oracle, self.fates = store, oracle, fates
        self.reads: RowReads = store  # after a client's session has ended, one that only raises (R5)
        self.timings: Timings | None = None  # for metrics
        self.counters = Counters()
        self.contended = Contended()
        self.entered = Entered()  # C2
        self.writing: dict[int, trio.Event | None] = {}  # other processes' one-step commits; an event if a task waits
        self.damaged: dict[str, Corruption] = {}  # unreadable cells that background tasks have skipped, by place
        self.name: Callable[[Cellref], tuple[str, Any, str]] = lambda cell: (cell.table, cell.row, f"#{cell.column}")
        self.orphaned = trio.Event()  # set when locks were left behind: the sweeper has work
        self._background = background
        self._event = event
        self.quiet: Callable[[], None] = lambda: None  # called when no observed write is under way (N7)
        # Called when notify cells have become visible, with where they are; None: anywhere (N8).
        self.on_notified: list[Callable[[Collection[Hint] | None], None]] = []
        self.hints: list[Callable[[Iterable[Hint]], None]] = []  # called with these rows, if they are known (N8)

    def measure(self, timings: Timings) -> None:
        """From now on, note how long operations take."""
        self.timings, self.reads = timings, TimedReads(self.store, timings)

    def notified(self, where: Collection[Hint] | None = None) -> None:
        """Call `hints` and `on_notified`: notify cells have become visible (N8). `where`: on which rows; None:
        anywhere."""
        if where and self.hints:
            self.hint(where)
        for act in self.on_notified:
            act(where)

    def hint(self, told: Iterable[Hint]) -> None:
        """Call `hints`: notify cells have become visible on these rows (N8)."""
        for hear in self.hints:
            hear(told)

    def leave_orphans(self) -> None:
        """Wake the sweeper: locks may have been left behind."""
        self.orphaned.set()

    @contextmanager
    def observing(self, where: Collection[Hint] | None = None) -> Iterator[None]:
        """A block in which notify cells may be put or removed other than by a commit (N7). `where`: on which rows they
        are put; None: anywhere."""
        self.fates.observed += 1
        try:
            yield
        finally:
            self.tell_workers(where)

    def tell_workers(self, where: Collection[Hint] | None) -> None:
        """End a write that may have put or removed notify cells (N7). `where`: on which rows notify cells have become
        visible; None: anywhere (N8)."""
        self.fates.observed -= 1
        self.notified(where)
        if not self.fates.observed:
            self.quiet()

    # ------------------------------------------------------------ damaged cells

    def at(self, cell: Cellref, error: Corruption) -> Corruption:
        """The error, with the names of the cell in question."""
        return error.at(self.name(cell))

    def lock_at(self, cell: Cellref, start_ts: int, packed: bytes) -> Lock:
        """A cell's lock. Raises: Corruption, with the cell's names."""
        try:
            return unpack_lock(packed, start_ts)
        except Corruption as error:
            raise self.at(cell, error) from error

    def note_damage(self, error: Corruption) -> None:
        """Log, once, that a background task cannot read a cell, and skips it."""
        if error.where not in self.damaged and len(self.damaged) < _DAMAGED_MAX:
            self.damaged[error.where] = error.again()
            log.warning("%s", error)

    # ------------------------------------------------------------ reading

    async def finish(self, table: str, row: bytes, column: int, ts: int, seen: Seen) -> Value | Missing:
        """Turn what was seen of a cell at `ts` into a value."""
        while True:
            if type(seen) is Value or type(seen) is Missing:
                return seen
            if type(seen) is InData:
                return await self._data(table, row, column, seen)
            assert type(seen) is Blocked
            seen = await self._past(Cellref(table, row, column), ts, seen)

    async def _past(self, cell: Cellref, ts: int, blocked: Blocked) -> Seen:
        """T9: find out the outcome of the transaction of a lock at or below `ts`, then look again."""
        start_ts = blocked.start_ts
        fate = self.fates.known(start_ts)
        lock = self.lock_at(cell, blocked.start_ts, blocked.lock)
        if fate is None:
            if self.fates.alive(start_ts):
                self.counters.lock_waits += 1
                await self.fates.wait(start_ts)
            else:
                try:
                    fate = await self.resolve(cell, start_ts, lock)
                except StoreError:
                    self.orphaned.set()
                    if start_ts in self.fates.doubtful or not self.fates.exact:
                        raise  # T4, L2: its commit may still arrive
                    # S4: no space to decide its outcome, but it cannot commit either: its client is gone
                    settled = start_ts
                    return await self._look_again(cell, ts, settled)
                if fate is None:
                    self.counters.lock_waits += 1
                    await self._outlive(cell, start_ts, blocked.lock)
            fate = self.fates.known(start_ts) if fate is None else fate
        if fate is not None and 0 < fate <= ts:
            return from_lock(lock, start_ts, fate)
        return await self._look_again(cell, ts, start_ts if fate is not None else -1)

    async def _look_again(self, cell: Cellref, ts: int, settled: int) -> Seen:
        queries: list[Query] = [(LOCK, cell.column, 0, ts, 1), (WRITE, cell.column, 0, ts, 1)]
        [[locks, writes]] = await self.reads.read([(cell.table, cell.row, queries)])
        try:
            return look(locks, writes, settled)
        except Corruption as error:
            raise self.at(cell, error) from error

    async def _data(self, table: str, row: bytes, column: int, seen: InData) -> Value:
        query: Query = (seen.group, column, seen.start_ts, seen.start_ts, 1)
        cells: list[Cell] = []
        with suppress(Corruption):  # there is no such group
            [[cells]] = await self.reads.read([(table, row, [query])])
        if not cells:
            what = f"the record at {seen.commit_ts} points at missing data"
            raise self.at(Cellref(table, row, column), Corruption("", what))
        return Value(seen.commit_ts, cells[0][1])

    async def read_plans(
        self, table: str, plans: list[Plan], ts: int, before: Sequence[Query] = ()
    ) -> list[tuple[Plan, RowCells]]:
        """Read rows together with the cells to be read ahead; without those, if they are too large or damaged.
        `before`: a claim's queries for its row, instead of those for the first column's lock and record."""
        skip = 2 if before else 0
        try:
            found = await self.reads.read([(table, plan.row, [*before, *plan.queries(ts)[skip:]]) for plan in plans])
        except (TooLarge, Corruption):
            less = [plan.only_asked() for plan in plans]
            if less == plans:
                raise
            plans = less
            found = await self.reads.read([(table, plan.row, [*before, *plan.queries(ts)[skip:]]) for plan in plans])
        return list(zip(plans, found, strict=True))

    def not_entered(self, table: str, plan: Plan, ts: int) -> Plan:
        """C4: the plan without the columns that would only be read ahead, if these have an entry at or below `ts`: they
        are not worth a wait. (A served store's entries are in its owner, which waits for every cell that is read.)"""
        met = set()
        for column in plan.columns[plan.asked :]:
            entry = self.entered.cells.get((table, plan.row, column))
            if entry is not None and entry.commit_ts <= ts:
                met.add(column)
        return plan.without(met) if met else plan

    # ------------------------------------------------------------ one-step commits

    async def past(self, entry: Entry) -> int:
        """C4: wait until an entry's records are visible, or can never become so; returns its commit_ts, or 0."""
        start_ts = entry.start_ts
        if entry.commit_ts in self.writing:  # the client that commits may be silent for a long time
            self.counters.lock_waits += 1
            writing = self.writing[entry.commit_ts]
            if writing is None:
                writing = self.writing[entry.commit_ts] = trio.Event()
            await writing.wait()
        if not self.entered.stands(entry):  # C3
            return self.fates.known(start_ts) or 0
        if self.fates.alive(start_ts):
            self.counters.lock_waits += 1
            await self.fates.wait(start_ts)
        known = self.fates.known(start_ts)
        if known is None:
            with suppress(CommitUnknown):  # unknown for good: no more of it will become visible (T13)
                known = await self.outcome(start_ts, entry.primary)
        return known or 0

    def written(self, commit_ts: int) -> None:
        """Record that another process's one-step commit has been written, or will not be."""
        writing = self.writing.pop(commit_ts)
        if writing is not None:
            writing.set()

    async def past_cells(self, cells: Iterable[Where], ts: int) -> None:
        """C4: wait until the entries of these cells at or below `ts` are removed. Later entries are above `ts`."""
        for entry in self.entered.among(cells, ts):
            await self.past(entry)

    async def visible(self, ts: int) -> None:
        """C4: wait until all one-step commits at or below `ts` are visible, in other processes too."""
        for entry in self.entered.up_to(ts):
            await self.past(entry)

    async def settle_left(self, stuck: dict[tuple[Cellref, int], Corruption]) -> int:
        """Settle the one-step commits whose answer was lost; returns how many. `stuck`: filled with the cells of those
        whose records do not decode.

        Raises: StoreError if that cannot be done now.
        """
        settled = 0
        for entry, cells in list(self.entered.left.values()):
            try:
                await self.past(entry)
                settled += 1
            except Corruption as error:
                self.note_damage(error)
                stuck.update(((Cellref(*cell), entry.start_ts), error.again()) for cell in cells)
        return settled

    def _left_settled(self, start_ts: int, fate: int) -> None:
        """Release the watermark, which a one-step commit without an answer holds until its outcome is known (G1)."""
        if self.entered.settled(start_ts):
            self.oracle.holds.open.discard(start_ts)
            if fate:
                self.notified()  # N8: its notify cells became visible without a wake-up

    # ------------------------------------------------------------ recovery

    async def resolve(self, cell: Cellref, start_ts: int, lock: Lock) -> int | None:
        """Settle a lock that is in the way. Returns its transaction's commit_ts, 0 if aborted, None if still alive.

        Raises: StoreFull if there was no space to decide the outcome; Corruption if the transaction's records do not
        decode.
        """
        recovery = Recovery(start_ts, lock.primary, [(cell, lock)])
        self.fates.observed += 1  # N7: a roll-forward puts notify cells
        try:
            await self._decide(recovery, lock)
            if recovery.fate is None:
                if isinstance(recovery.failure, Corruption):
                    raise self.at(recovery.primary, recovery.failure)
                if recovery.failure is not None:
                    raise recovery.failure
                return None
            if recovery.fate or start_ts >= await self.oracle.watermark():
                # T4: below the watermark an apparent abort may be a commit whose record has been collected meanwhile.
                self._learn(cell, start_ts, recovery.fate)
            self._left_settled(start_ts, recovery.fate)
            clearing = recovery.clearing()
            if clearing:
                recovery.cleared(await self.store.apply(clearing))
            if isinstance(recovery.failure, Corruption):
                raise self.at(cell, recovery.failure)
            if recovery.failure is not None:
                self.orphaned.set()  # S4: the outcome is known, but the lock is not settled
            elif recovery.fate:
                self.counters.rolled_forward += 1
            else:
                self.counters.rolled_back += 1
            if self._event is not None:
                self._event("recovery")
            return recovery.fate
        finally:
            self.tell_workers(None)

    def _learn(self, cell: Cellref, start_ts: int, fate: int) -> None:
        known = self.fates.known(start_ts)
        if known is not None and known != fate:
            what = f"T1: this lock gives transaction {start_ts} the fate {fate} (0: aborted); others gave it {known}"
            raise self.at(cell, Corruption("lock group", what))
        self.fates.learn(start_ts, fate)

    async def _decide(self, recovery: Recovery, found: Lock | None) -> None:
        """Read the primary and decide, until the outcome is known, the transaction turns out to be alive, or the store
        cannot write. `found`: the lock in the way; None: the transaction is known to be dead."""
        primary, fates = recovery.primary, self.fates
        request: ReadRequest = (primary.table, primary.row, primary_queries(primary, recovery.start_ts))
        while recovery.failure is None:
            try:
                [cells] = await self.store.read([request])
            except UsageError as error:
                what = f"its primary cannot be read: {error}"
                raise self.at(recovery.asker, Corruption("lock group", what)) from error
            alive = found is not None and fates.alive(recovery.start_ts)
            if found is not None and not alive and not fates.exact:
                locks = cells[0]
                lock = self.lock_at(primary, recovery.start_ts, locks[0][1]) if locks else found
                alive = await fates.lives_elsewhere(recovery.start_ts, lock)
            try:
                recovery.asked(cells, alive=alive)
            except Corruption as error:
                raise self.at(primary, error) from error
            if recovery.step not in (Step.ROLL_PRIMARY, Step.MARK):
                return
            [verdict] = await self.store.apply([recovery.decision()])
            recovery.decided(verdict)
            if recovery.fate is not None:
                return

    async def clear(self, cell: Cellref, blocked: Blocked) -> None:
        """Wait until a lock's transaction has settled it, or settle it here.

        Raises: StoreFull if there is no space to settle it; Corruption as `resolve` does.
        """
        if self.fates.alive(blocked.start_ts):
            self.counters.lock_waits += 1
            await self.fates.wait(blocked.start_ts)
        if await self.resolve(cell, blocked.start_ts, self.lock_at(cell, blocked.start_ts, blocked.lock)) is None:
            self.counters.lock_waits += 1
            await self._outlive(cell, blocked.start_ts, blocked.lock)

    async def _outlive(self, where: Cellref, other_ts: int, packed: bytes) -> None:
        """Wait until the transaction of a lock has ended."""
        pause_s = _POLL_S
        await self.fates.wait(other_ts)
        while not self.fates.exact:
            lock = self.lock_at(where, other_ts, packed)
            if await self.resolve(where, other_ts, lock) is not None:
                return
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MAX_S)

    async def outcome(self, start_ts: int, primary: Cellref) -> int:
        """The commit_ts of a transaction, or 0 if it did not commit and never will (T4).

        Raises: CommitUnknown, for good, if its records may have been collected.
        """
        while True:
            known = self.fates.known(start_ts)
            if known is not None:
                return known
            if self.fates.alive(start_ts):
                await self.fates.wait(start_ts)
                continue
            recovery = Recovery(start_ts, primary, ())
            await self._decide(recovery, None)
            if recovery.fate is None:
                assert recovery.failure is not None
                raise recovery.failure
            self._left_settled(start_ts, recovery.fate)
            try:
                await self._must_be_certain(recovery)
            except CommitUnknown:
                self.fates.doubtful.discard(start_ts)  # it can no longer commit (T13)
                raise
            self.fates.learn(start_ts, recovery.fate)
            return recovery.fate

    async def _must_be_certain(self, recovery: Recovery) -> None:
        """T4: below the watermark an apparent abort may be a commit whose record has been collected meanwhile.

        Raises: CommitUnknown, for good.
        """
        if recovery.conclusive:
            return
        # Read after the primary: when the primary was read, nothing at or above this watermark had been collected.
        watermark = await self.oracle.watermark()
        if recovery.start_ts < watermark:
            token = make_token(recovery.start_ts, recovery.primary)
            raise CommitUnknown(token, _collected(watermark), for_good=True)


def _collected(watermark: int) -> str:
    return f"its records may have been collected: db.outcome knows only transactions that began at {watermark} or later"


def from_lock(lock: Lock, start_ts: int, commit_ts: int) -> Seen:
    """The value that the record of a committed lock will have (S4)."""
    if lock.kind == PUT:
        return Value(commit_ts, lock.body)
    if lock.kind == PUT_DATA:
        return InData(commit_ts, start_ts, lock.body.decode())
    return Missing(commit_ts)


def make_token(start_ts: int, primary: Cellref) -> str:
    """The token with which any process can call `db.outcome`: a str that is short enough for a log."""
    said = f"{start_ts}/{primary.column}/{primary.table}/{primary.row.hex()}"
    return f"{said}/{crc32(said.encode()):08x}"


def read_token(token: str) -> tuple[int, Cellref]:
    """Decode a token. Raises: ValueError if it is not a token, or was truncated. (The checksum matters: a damaged token
    might name another transaction, and asking for that transaction's outcome may roll it back.)"""
    said, _, sum = token.rpartition("/")
    if f"{crc32(said.encode()):08x}" != sum:
        raise ValueError("its checksum does not fit")
    start_ts, column, rest = said.split("/", 2)
    table, row = rest.rsplit("/", 1)
    return int(start_ts), Cellref(table, bytes.fromhex(row), int(column))
