"""Performs what the pure cores decide: the only place where commit, recovery and reads meet the store.

Commit:    `commit.py` says the next step, `Driver.commit` performs it, to its end.
Recovery:  `recovery.py` likewise, `Driver.resolve`.
Reading:   `snapshot.py` says what the cells mean; if a lock is in the way, `Driver.read` waits or resolves (T9).

T2  Reads open their view after the reader's timestamp was drawn: every read here is a new call of the store.
T7  A transaction that holds locks never waits for another's: it releases all of them, waits, and the function runs
    again.
T8  ... and no step touches a lock without the check that it is still there (`mutations.py`).
T10 Cancelled before the primary's commit was sent: Cancelled; own locks are removed in the background. After: the call
    completes and reports its outcome.
T14 A serializable transaction's reads are validated between the draw of its commit_ts and its primary's commit.
L1  A lock whose owner is in the live set is waited for; any other is dead, unless its lease says that it lives
    elsewhere: then it is looked at again and again.
S4  A reader that knows the outcome of a lock answers without settling it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import trio

from perco.errors import (
    CatalogueChanged,
    CommitUnknown,
    Corruption,
    PercoError,
    RolledBack,
    SessionEnded,
    StoreError,
    TooLarge,
    Unavailable,
    UsageError,
    WriteConflict,
    reason_of,
)
from perco.options import check_options
from perco.storage import (
    APPLIED,
    LOCK,
    SHARED,
    TRACE,
    TS_MAX,
    WRITE,
    Batching,
    Cell,
    LocalRowStore,
    Mutation,
    Query,
    ReadRequest,
    RowCells,
    RowStore,
    Verdict,
)
from perco.txn import commit as core
from perco.txn.background import Background
from perco.txn.chain import Chain, Settling
from perco.txn.commit import Commit, State
from perco.txn.entered import Entered, Entry, Where
from perco.txn.fates import Fates
from perco.txn.mutations import bytes_of
from perco.txn.oracle import Oracle
from perco.txn.prefetch import Plan
from perco.txn.reads import Stale
from perco.txn.records import PUT, PUT_DATA, READ, Cellref, Lock, unpack_lock
from perco.txn.recovery import Recovery, Step, primary_queries
from perco.txn.snapshot import Blocked, InData, Missing, Seen, Value, look
from perco.txn.validation import Validation

_ASK_PAUSE_MAX_S = 0.5  # between two questions to a primary that does not answer
_POLL_S, _POLL_MAX_S = 0.002, 0.25  # between two looks at a lock whose owner lives in another process
_DAMAGED_MAX = 1000  # cells that are remembered
_SHARED_MAX = 1024  # shared locks of one cell that are settled before the prewrite is sent again


log = logging.getLogger("perco.store")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitOptions:
    """Attributes:
    commit_timeout_s: how long a disk that does not answer is waited for, and how long a commit whose reply was
        lost is asked after, before CommitUnknown (T4, T10).
    one_step: commit what lies in the primary's tablet in one write transaction, without locks (C1). False: always
        in two phases, as in the paper.
    """

    commit_timeout_s: float = 30.0
    one_step: bool = True

    def __post_init__(self) -> None:
        check_options(self)


class Driver:
    """Performs commits, recoveries and reads on one store. Loop thread only."""

    def __init__(
        self,
        store: RowStore,
        oracle: Oracle,
        fates: Fates,
        options: CommitOptions,
        background: Background,
        event: Callable[[str], None] | None,
    ) -> None:
        self.store, self.oracle, self.fates, self.options = store, oracle, fates, options
        self.reads = store  # of snapshots; else that of an ended session, which answers nothing (R5)
        self.counters = Counters()
        self.entered = Entered()  # C2
        self.writing: dict[int, trio.Event | None] = {}  # what others commit in one step; an event if somebody waits
        self.damaged: dict[str, Corruption] = {}  # what the background has met, by place
        self.name: Callable[[Cellref], tuple[str, Any, str]] = lambda cell: (cell.table, cell.row, f"#{cell.column}")
        self.orphaned = trio.Event()  # set when locks were left behind: the sweeper has work
        self._background = background
        self._event = event
        self.quiet: Callable[[], None] = lambda: None  # called when no observed write is under way (N7)
        self.on_notified: list[Callable[[], None]] = []  # called when notify cells have become visible (N8)

    def notified(self) -> None:
        """Notify cells have become visible (N8)."""
        for act in self.on_notified:
            act()

    def leave_orphans(self) -> None:
        """Locks may have been left behind: the sweeper has work."""
        self.orphaned.set()

    # ------------------------------------------------------------ commit

    @trio.lowlevel.enable_ki_protection
    async def commit(self, commit: Commit, *, observed: bool, version: int) -> int:
        """Drive a commit to its end; returns commit_ts.

        Raises: ConflictAt, StaleAt, RolledBack, CatalogueChanged, StoreFull, CommitUnknown; trio.Cancelled only if it
        surely did not and will not commit (T10).
        """
        start_ts = commit.header.start_ts
        self.fates.begin(start_ts)
        if observed:
            self.fates.observed += 1
        try:
            if commit.state is State.DRAW:
                await self._in_one_step(commit, version)
            else:
                await self._prewritten(commit, version)
            if commit.state is not State.COMMITTED:
                await self._until_decided(commit, version)
        except BaseException as error:
            if commit.state is State.COMMITTED:
                raise  # a bug, not an abort: leave the records alone
            asking = commit.maybe_sent and commit.state in (State.ASK, State.COMMIT, State.RELEASE)
            if isinstance(error, CommitUnknown) or asking:
                self.counters.unknown += 1
                if commit.one_step and commit.state is State.ASK:
                    self._leave_behind(commit)
                self._settled(start_ts, None, observed=observed)
                self.orphaned.set()
                if isinstance(error, CommitUnknown) or not isinstance(error, Exception):
                    raise
                raise CommitUnknown(make_token(start_ts, commit.header.primary), reason_of(error)) from error
            self.counters.aborts += 1
            if commit.state is State.ABORTED:
                self._settled(start_ts, 0, observed=observed)
            else:
                if commit.state is not State.RELEASE:
                    commit.give_up()
                self._background.spawn(lambda: self._release_later(commit, observed=observed))
            raise
        self.counters.commits += 1
        if self._event is not None:
            self._event("commit")
        self.oracle.holds.open.discard(start_ts)
        self.fates.settle(start_ts, commit.commit_ts)
        if commit.has_secondaries:
            if observed:
                self.notified()
            self._begin_phase_two(commit, observed=observed)
        elif observed:
            self._observed_done(observed=True)
        return commit.commit_ts

    async def _prewritten(self, commit: Commit, version: int) -> None:
        """Send prewrites, and what follows from their verdicts by itself."""
        chain = Chain(commit, self.oracle, version, self._event, self.entered)
        try:
            chain.ended(await self._chained(commit.prewrites(), chain))
        except BaseException:
            if chain.entered:
                self.entered.leave(commit)  # C3: it was never sent
            raise
        if chain.entered and commit.state is not State.ASK:
            self.entered.leave(commit)

    async def _in_one_step(self, commit: Commit, version: int) -> None:
        """State DRAW: check, and write what the primary's part writes, in one write transaction (C1 - C5)."""
        entered = self.entered
        while True:
            found = entered.in_the_way(commit)
            if found is not None:
                await self._settle_entered(commit, *found)
                continue
            if isinstance(self.store, Batching):
                if await self._in_one_step_late(self.store, commit, version):
                    return
                continue
            if self._enter(commit, version):
                break
            await self.oracle.extend()
        try:
            [verdict] = await self._chained((commit.primary_commit(),), None)
        except BaseException:
            entered.leave(commit)  # C3: it was never sent (T10)
            raise
        commit.primary_told(verdict)
        if commit.state is not State.ASK:
            entered.leave(commit)

    def _enter(self, commit: Commit, version: int) -> bool:
        """C2: no await between the look, the draw, and the entry. False: no timestamp is available at once.

        Raises: CatalogueChanged.
        """
        commit_ts = self.oracle.draw_nowait()
        if not commit_ts:
            return False
        commit.drawn(commit_ts)
        if self.oracle.catalogue_version > version:  # N10
            raise CatalogueChanged(commit.header.start_ts, self.oracle.catalogue_version)
        self.entered.enter(commit)
        return True

    async def _in_one_step_late(self, store: Batching, commit: Commit, version: int) -> bool:
        """The same in a window: the timestamp is drawn, and the cells are entered, when the window has ended. False: by
        then another commit was in the way."""
        entered, stale, has_entered = self.entered, False, False

        def make() -> Mutation | None:
            nonlocal stale, has_entered
            if entered.in_the_way(commit) is not None:
                return None
            try:
                has_entered = self._enter(commit, version)
            except CatalogueChanged:
                stale = True
            return commit.primary_commit() if has_entered else None

        primary = commit.header.primary
        try:
            verdict = await store.apply_late(primary.table, primary.row, bytes_of(commit.primary_part), make)
        except BaseException:
            if has_entered:
                entered.leave(commit)  # C3: it was never sent
            raise
        if stale:
            raise CatalogueChanged(commit.header.start_ts, self.oracle.catalogue_version)
        if verdict is None:
            await self.oracle.extend()
            return False
        commit.primary_told(verdict)
        if commit.state is not State.ASK:
            entered.leave(commit)
        return True

    def _leave(self, commit: Commit) -> None:
        """C3: the fate of a commit in one step has been asked for."""
        self.entered.leave(commit)

    def _leave_behind(self, commit: Commit) -> None:
        self.entered.leave_behind(commit)

    async def _settle_entered(self, commit: Commit, where: Where, entry: Entry) -> None:
        """Another's one-step commit of a cell is under way: wait for it, holding nothing (T7)."""
        start_ts = commit.header.start_ts
        if commit.holds_any:
            commit.give_up()
            await self._release(commit)
            self._waits_for_others(start_ts)
            await self.past(entry)
        else:
            if entry.commit_ts not in self.writing:
                await self.fates.wait(entry.start_ts)
            if await self.past(entry) < start_ts:
                return  # it did not commit, or before this transaction began
        self.counters.conflicts += 1
        raise ConflictAt(Cellref(*where), entry.commit_ts, start_ts)

    async def past(self, entry: Entry) -> int:
        """C4: until the records of an entry are visible, or surely never will be; returns its commit_ts, or 0."""
        start_ts = entry.start_ts
        if entry.commit_ts in self.writing:  # whoever asked for it may be silent for long
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
            with suppress(CommitUnknown):  # for good: then what is visible now is all that ever will be (T13)
                known = await self.outcome(start_ts, entry.primary)
        return known or 0

    def written(self, commit_ts: int) -> None:
        """What another process committed in one step has been made, or will not be."""
        writing = self.writing.pop(commit_ts)
        if writing is not None:
            writing.set()

    async def past_cells(self, cells: Iterable[Where], ts: int) -> None:
        """C4: until the entries of these cells at or below `ts` have left; what enters from now on is above it."""
        for entry in self.entered.among(cells, ts):
            await self.past(entry)

    def not_entered(self, table: str, plan: Plan, ts: int) -> Plan:
        """C4: of what is to be read ahead, what has no entry at or below `ts`: for that nobody waits. (The entries of
        a served store are with its owner, which waits for whatever is asked for.)"""
        met = set()
        for column in plan.columns[plan.asked :]:
            entry = self.entered.cells.get((table, plan.row, column))
            if entry is not None and entry.commit_ts <= ts:
                met.add(column)
        return plan.without(met) if met else plan

    async def read_plans(
        self, table: str, plans: list[Plan], ts: int, before: Sequence[Query] = ()
    ) -> list[tuple[Plan, RowCells]]:
        """Rows with what is to be read ahead of them; without, where it is too much, or damaged. `before`: what a claim
        asks of its row, instead of the lock and the record of the first column."""
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

    async def visible(self, ts: int) -> None:
        """C4: until whatever commits in one step at or below `ts` can be seen by all, in other processes too."""
        for entry in self.entered.up_to(ts):
            await self.past(entry)

    async def settle_left(self, stuck: dict[tuple[Cellref, int], Corruption]) -> int:
        """Settle the one-step commits whose answer did not come; returns how many. `stuck`: cells of those of which
        nothing can be understood are put there.

        Raises: StoreError where that cannot be done now.
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

    def _chained(self, mutations: Sequence[Mutation], chain: Chain | None) -> Awaitable[list[Verdict]]:
        """Where the store can go on by itself, it does."""
        store = self.store
        if isinstance(store, LocalRowStore):
            return store.apply_then(mutations, chain)
        return store.apply(mutations)

    async def _until_decided(self, commit: Commit, version: int) -> None:
        apply = self.store.apply
        while True:
            state = commit.state
            if state is State.PREWRITE:
                await self._prewritten(commit, version)
            elif state is State.DRAW and commit.one_step:
                await self._in_one_step(commit, version)
            elif state is State.DRAW:
                commit.drawn(await self.oracle.draw_commit())
                if self.oracle.catalogue_version > version:  # N10
                    raise CatalogueChanged(commit.header.start_ts, self.oracle.catalogue_version)
            elif state is State.VALIDATE:
                await self._validate(commit)
            elif state is State.COMMIT:
                [verdict] = await apply([commit.primary_commit()])
                commit.primary_told(verdict)
            elif state is State.COMMITTED:
                return
            elif state is State.BLOCKED:
                await self._unblock(commit)
            elif state is State.ASK:
                try:
                    await self._ask_primary(commit)
                except Corruption as error:
                    raise self.at(commit.header.primary, error) from error
                if commit.one_step:
                    self._leave(commit)
            elif state is State.RELEASE:
                await self._release(commit)
                if commit.state is State.COMMITTED:
                    return
                if commit.failure is not None:
                    raise commit.failure
                raise RolledBack(commit.header.start_ts)
            else:  # pragma: no cover
                raise AssertionError(state)

    async def _validate(self, commit: Commit) -> None:
        """T14: what was read is read again, now that the locks stand and commit_ts is drawn."""
        assert commit.reads is not None
        start_ts, commit_ts = commit.header.start_ts, commit.commit_ts
        stale = await Validation(self.store, self.fates, self.entered, start_ts, commit_ts).run(commit.reads)
        if stale is not None:
            self.counters.conflicts += 1
            raise StaleAt(stale, start_ts, commit_ts)
        commit.validated()

    async def _unblock(self, commit: Commit) -> None:
        """A prewrite was refused: settle what can be settled and send again, or give up (T7)."""
        start_ts = commit.header.start_ts
        foreign: list[tuple[Cellref, int, bytes]] = []
        for part, refused in commit.refusals:
            intent, check = commit.refused_cell(part, refused)
            if check in (core.MARKER_CHECK, core.FLOOR_CHECK):
                raise RolledBack(start_ts)
            where = Cellref(intent.table, intent.row, intent.column)
            if check == core.LISTED_CHECK:  # N6: what waited when the run began has been given up, or put back, since
                self.counters.conflicts += 1
                raise ConflictAt(where, start_ts, start_ts)
            queries: list[Query] = [
                (LOCK, where.column, 0, TS_MAX, 1),
                (WRITE, where.column, start_ts, TS_MAX, 1),
            ]
            readers = check in (core.SHARED_CHECK, core.TRACE_CHECK)
            if readers:
                queries += [(TRACE, where.column, start_ts, TS_MAX, 1), (SHARED, where.column, 0, TS_MAX, _SHARED_MAX)]
            [[locks, records, *read]] = await self.store.read([(where.table, where.row, queries)])
            if records:
                self.counters.conflicts += 1
                raise ConflictAt(where, records[0][0], start_ts)
            if readers and read[0]:  # T14
                self.counters.conflicts += 1
                raise ConflictAt(where, read[0][0][0], start_ts, read=True)
            if locks and locks[0][0] == start_ts:
                commit.echoed(part)
            elif locks:  # else it went away meanwhile
                foreign.append((where, *locks[0]))
            elif readers:
                foreign += [(where, *lock) for lock in read[1]]
        for where, other_ts, packed in foreign:
            await self._settle_foreign(commit, where, other_ts, packed)
        commit.retry()

    async def _settle_foreign(self, commit: Commit, where: Cellref, other_ts: int, packed: bytes) -> None:
        if not self.fates.alive(other_ts):
            fate = await self.resolve(where, other_ts, self.lock_at(where, other_ts, packed))
            if fate is not None:
                return
        self.counters.lock_waits += 1
        if commit.holds_any:
            # T7: two that wait while they hold would wait for ever.
            commit.give_up()
            await self._release(commit)
            self._waits_for_others(commit.header.start_ts)
            await self._outlive(where, other_ts, packed)
            self.counters.conflicts += 1
            read = self.lock_at(where, other_ts, packed).kind == READ
            raise ConflictAt(where, other_ts, commit.header.start_ts, read=read)
        await self._outlive(where, other_ts, packed)

    async def _outlive(self, where: Cellref, other_ts: int, packed: bytes) -> None:
        """Until the owner of a lock is done with it."""
        pause_s = _POLL_S
        await self.fates.wait(other_ts)
        while not self.fates.exact:
            lock = self.lock_at(where, other_ts, packed)
            if await self.resolve(where, other_ts, lock) is not None:
                return
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MAX_S)

    async def _ask_primary(self, commit: Commit) -> None:
        """T4: a lost reply, or a refusal that may be the echo of our own success: read the primary."""
        header = commit.header
        token = make_token(header.start_ts, header.primary)
        with trio.move_on_after(self.options.commit_timeout_s, shield=True):
            pause_s = 0.0
            while commit.state is State.ASK:
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s + 0.001, _ASK_PAUSE_MAX_S)
                queries = primary_queries(header.primary, header.start_ts)
                request: ReadRequest = (header.primary.table, header.primary.row, queries)
                recovery = Recovery(header.start_ts, header.primary, ())
                recovery.asked((await self.store.read([request]))[0], alive=False)
                if recovery.step is Step.ROLL_PRIMARY:
                    commit.asked(None)
                    [verdict] = await self.store.apply([commit.primary_commit()])
                    commit.primary_told(verdict)
                elif recovery.fate is not None:
                    commit.asked(recovery.fate)
                else:  # our lock is gone without a trace: somebody must put the marker before we may call it aborted
                    [verdict] = await self.store.apply([recovery.decision()])
                    recovery.decided(verdict)
                    if recovery.fate is not None:
                        commit.asked(recovery.fate)
            return
        raise CommitUnknown(token, f"no answer within {self.options.commit_timeout_s} s")

    async def _release(self, commit: Commit) -> None:
        """Let go of what we hold, the primary first (T5). Completes although its scope is cancelled."""
        with trio.CancelScope(shield=True):
            releases = commit.releases()
            first = 0
            if releases and commit.primary_held:
                [verdict] = await self.store.apply(releases[:1])
                first = 1
                if verdict is APPLIED:
                    commit.ruled_out()
                elif await self._decide_own(commit):
                    return
                else:
                    commit.ruled_out()
                    await self._settle_all(Settling(commit.releases_by_cell(0), None))  # the primary's part's rest
            if releases[first:]:
                await self._settle_all(Settling(releases[first:], lambda i: commit.releases_by_cell(first + i)))
            commit.released()

    async def _decide_own(self, commit: Commit) -> bool:
        """Our release of the primary was refused or lost: make sure that it can never commit (T5).

        Returns whether it has: a request to commit that was taken for lost had arrived (T4).
        """
        header = commit.header
        recovery = Recovery(header.start_ts, header.primary, ())
        try:
            await self._decide(recovery, None)
            if recovery.fate:
                commit.committed_after_all(recovery.fate)
                return True
        except Corruption as error:
            named = self.at(header.primary, error)
            if commit.maybe_sent:
                raise CommitUnknown(make_token(header.start_ts, header.primary), str(named)) from error
            raise named from error
        if recovery.failure is not None:
            self.orphaned.set()  # full disk: the lock stays, dead, until there is space
            if commit.maybe_sent:
                raise CommitUnknown(make_token(header.start_ts, header.primary), reason_of(recovery.failure))
        return False

    async def _release_later(self, commit: Commit, *, observed: bool) -> None:
        fate: int | None = 0
        try:
            await self._release(commit)
        except Corruption as error:
            self.note_damage(error)
            self.orphaned.set()
            fate = None
        except (Unavailable, SessionEnded):  # R6, R7: of a served store
            self.orphaned.set()
            fate = None
        self._settled(commit.header.start_ts, fate, observed=observed)

    def _begin_phase_two(self, commit: Commit, *, observed: bool) -> None:
        """Roll the secondaries forward; whoever meets their locks before that does it for us (T3, S2)."""
        settling = Settling(commit.secondaries(), commit.secondaries_by_cell)
        store = self.store
        if not isinstance(store, LocalRowStore) or not store.queues:
            self._background.spawn(lambda: self._phase_two(commit, settling, observed=observed))
            return
        background = self._background

        def told(verdicts: Sequence[Verdict]) -> list[Mutation] | None:
            try:
                more = settling.told(verdicts)
                if more:
                    return more
                self._phase_two_done(commit, settling, observed=observed)
            except Exception as error:
                background.let_go(error)
            else:
                background.let_go()
            return None

        background.hold()
        store.apply_behind(settling.groups, told)  # a task for this would cost more than the rest of it

    async def _phase_two(self, commit: Commit, settling: Settling, *, observed: bool) -> None:
        await self._settle_all(settling)
        self._phase_two_done(commit, settling, observed=observed)

    def _phase_two_done(self, commit: Commit, settling: Settling, *, observed: bool) -> None:
        if settling.left:
            self.orphaned.set()
        if self._event is not None:
            self._event("secondaries")
        self._observed_done(observed=observed)

    async def _settle_all(self, settling: Settling) -> None:
        more = settling.groups
        while more:
            more = settling.told(await self.store.apply(more))
        if settling.left:
            self.orphaned.set()

    def _settled(self, start_ts: int, fate: int | None, *, observed: bool) -> None:
        if start_ts not in self.entered.left:  # else its records may still come
            self.oracle.holds.open.discard(start_ts)
        self.fates.settle(start_ts, fate)
        self._observed_done(observed=observed)

    def _waits_for_others(self, start_ts: int) -> None:
        """T7: whoever has let go of all is waited for by nobody, in no process; else two that met each other's locks
        would wait for ever."""
        self.oracle.holds.open.discard(start_ts)
        self.fates.settle(start_ts, 0)

    def _left_settled(self, start_ts: int, fate: int) -> None:
        """A one-step commit whose answer did not come holds the watermark until its fate has been learnt (G1)."""
        if self.entered.settled(start_ts):
            self.oracle.holds.open.discard(start_ts)
            if fate:
                self.notified()  # N8: its notify cells became visible and nobody was told

    def _observed_done(self, *, observed: bool) -> None:
        if observed:
            self.fates.observed -= 1
            self.notified()
            if not self.fates.observed:
                self.quiet()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """While notify cells may be put or removed otherwise than by a commit (N7)."""
        self.fates.observed += 1
        try:
            yield
        finally:
            self._observed_done(observed=True)

    # ------------------------------------------------------------ damaged cells

    def at(self, cell: Cellref, error: Corruption) -> Corruption:
        """An error with the names of the cell that it is about."""
        return error.at(self.name(cell))

    def lock_at(self, cell: Cellref, start_ts: int, packed: bytes) -> Lock:
        """A cell's lock. Raises: Corruption with its place."""
        try:
            return unpack_lock(packed, start_ts)
        except Corruption as error:
            raise self.at(cell, error) from error

    def note_damage(self, error: Corruption) -> None:
        """Something in the background has met a cell that cannot be read: tell it once, and go on without it."""
        if error.where not in self.damaged and len(self.damaged) < _DAMAGED_MAX:
            self.damaged[error.where] = error.again()
            log.warning("%s", error)

    # ------------------------------------------------------------ recovery

    async def resolve(self, cell: Cellref, start_ts: int, lock: Lock) -> int | None:
        """Settle a lock that stands in the way: its transaction's commit_ts, 0 for aborted, None: it lives.

        Raises: StoreFull where the fate could not be decided for want of space; Corruption where what is stored of the
        transaction cannot be understood.
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
                # T4: an abort of what began below it may be a commit whose record has been collected meanwhile.
                self._learn(cell, start_ts, recovery.fate)
            self._left_settled(start_ts, recovery.fate)
            clearing = recovery.clearing()
            if clearing:
                recovery.cleared(await self.store.apply(clearing))
            if isinstance(recovery.failure, Corruption):
                raise self.at(cell, recovery.failure)
            if recovery.failure is not None:
                self.orphaned.set()  # S4: known, though not settled
            elif recovery.fate:
                self.counters.rolled_forward += 1
            else:
                self.counters.rolled_back += 1
            if self._event is not None:
                self._event("recovery")
            return recovery.fate
        finally:
            self._observed_done(observed=True)

    def _learn(self, cell: Cellref, start_ts: int, fate: int) -> None:
        known = self.fates.known(start_ts)
        if known is not None and known != fate:
            what = f"T1: by its lock transaction {start_ts} has the fate {fate} (0: aborted), and by others {known}"
            raise self.at(cell, Corruption("lock group", what))
        self.fates.learn(start_ts, fate)

    async def _decide(self, recovery: Recovery, found: Lock | None) -> None:
        """Until the primary's fate is known, the owner lives, or the store cannot write. `found`: the lock in the way;
        None: the owner is surely gone."""
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
        """Wait until a lock's owner is done with it, or settle it.

        Raises: StoreFull where that takes space which is not there; Corruption as `resolve` does.
        """
        if self.fates.alive(blocked.start_ts):
            self.counters.lock_waits += 1
            await self.fates.wait(blocked.start_ts)
        if await self.resolve(cell, blocked.start_ts, self.lock_at(cell, blocked.start_ts, blocked.lock)) is None:
            self.counters.lock_waits += 1
            await self._outlive(cell, blocked.start_ts, blocked.lock)

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
        """T9: learn the fate of a lock at or below `ts`, then look again."""
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
                        raise  # T4, L2: its commit may be on its way
                    # S4: no space to decide it, but nobody can commit it either: its owner is gone
                    settled = start_ts
                    return await self._look_again(cell, ts, settled)
                if fate is None:
                    self.counters.lock_waits += 1
                    await self._outlive(cell, start_ts, blocked.lock)
            fate = self.fates.known(start_ts) if fate is None else fate
        if fate is not None and 0 < fate <= ts:
            return _from_lock(lock, start_ts, fate)
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

    # ------------------------------------------------------------ asking

    async def outcome(self, start_ts: int, primary: Cellref) -> int:
        """commit_ts of a transaction, or 0: it did not and will not commit (T4).

        Raises: CommitUnknown, for good, where its traces may have been collected.
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
            watermark = (
                await self.oracle.watermark()
            )  # after the primary was read: what was there then, was all there is
            if not recovery.conclusive and start_ts < watermark:
                self.fates.doubtful.discard(start_ts)  # it cannot commit any more (T13)
                raise CommitUnknown(make_token(start_ts, primary), _collected(watermark), for_good=True)
            self.fates.learn(start_ts, recovery.fate)
            return recovery.fate


def _collected(watermark: int) -> str:
    return f"its traces may have been collected: only what began at {watermark} or later can still be asked for"


class ConflictAt(PercoError):
    """A WriteConflict before the cell has its names; the transaction knows them."""

    def __init__(self, cell: Cellref, other_ts: int, start_ts: int, *, read: bool = False) -> None:
        self.cell, self.other_ts, self.start_ts, self.read = cell, other_ts, start_ts, read
        super().__init__(cell)


class StaleAt(PercoError):
    """A ReadConflict before cells and ranges have their names."""

    def __init__(self, stale: Stale, start_ts: int, commit_ts: int) -> None:
        self.stale, self.start_ts, self.commit_ts = stale, start_ts, commit_ts
        super().__init__(stale)


def conflict(found: ConflictAt, name: Callable[[Cellref], tuple[str, Any, str]]) -> WriteConflict:
    met = WriteConflict([name(found.cell)], found.other_ts, found.start_ts, read=found.read)
    met.met_on = (found.cell,)
    return met


def _from_lock(lock: Lock, start_ts: int, commit_ts: int) -> Seen:
    """What a committed lock's record will say (S4)."""
    if lock.kind == PUT:
        return Value(commit_ts, lock.body)
    if lock.kind == PUT_DATA:
        return InData(commit_ts, start_ts, lock.body.decode())
    return Missing(commit_ts)


def make_token(start_ts: int, primary: Cellref) -> str:
    """What `db.outcome` needs to ask from any process: a short str for a log."""
    said = f"{start_ts}/{primary.column}/{primary.table}/{primary.row.hex()}"
    return f"{said}/{crc32(said.encode()):08x}"


def read_token(token: str) -> tuple[int, Cellref]:
    """Raises: ValueError for what is none, or was cut short: asking about another transaction would roll that back."""
    said, _, sum = token.rpartition("/")
    if f"{crc32(said.encode()):08x}" != sum:
        raise ValueError("its checksum does not fit")
    start_ts, column, rest = said.split("/", 2)
    table, row = rest.rsplit("/", 1)
    return int(start_ts), Cellref(table, bytes.fromhex(row), int(column))
