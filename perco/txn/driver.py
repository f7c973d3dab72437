"""Performs commits: the only place where the pure core of a commit meets the store.

`commit.py` decides the next step, `Driver.commit` performs the steps to the end.

T7  A transaction that holds locks never waits for another one. It releases all its locks and then waits; after that,
    its function runs again.
T8  Every step that changes a lock checks that the lock is still there (`mutations.py`).
T10 A cancellation before the primary's commit is sent raises Cancelled, and the locks are removed in the background.
    If the cancellation comes later, the call completes and reports its outcome.
T14 A serializable transaction's reads are validated between the draw of its commit_ts and its primary's commit.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import trio

from perco.clock.oracle import Oracle
from perco.errors import (
    CatalogueChanged,
    CommitUnknown,
    Corruption,
    PercoError,
    RolledBack,
    SessionEnded,
    StoreError,
    WriteConflict,
    reason_of,
)
from perco.protocol import commit as core
from perco.protocol.commit import Commit, State
from perco.protocol.mutations import bytes_of
from perco.protocol.reads import Stale
from perco.protocol.records import READ, Cellref
from perco.protocol.recovery import Recovery, Step, primary_queries
from perco.settings import check_options
from perco.storage import (
    APPLIED,
    LOCK,
    SHARED,
    TRACE,
    TS_MAX,
    WRITE,
    Deferring,
    Mutation,
    Query,
    ReadRequest,
    RowStore,
    Verdict,
)
from perco.txn.background import Background
from perco.txn.chain import Chain, Settling
from perco.txn.entered import Entry, Where
from perco.txn.fates import Fates
from perco.txn.resolver import Resolver, make_token
from perco.txn.shipping import Shipping
from perco.txn.validation import Validation

_ASK_PAUSE_MAX_S = 0.5  # between two reads of a primary that does not answer
_SHARED_MAX = 1024  # how many shared locks of one cell are settled, at most, before the prewrite is sent again


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitOptions:
    """Attributes:
    commit_timeout_s: how long to wait for a disk that does not answer, and how long to ask for the outcome of a
        commit whose reply was lost, before CommitUnknown is raised (T4, T10).
    one_step: commit the cells in the primary's tablet in one write transaction, without locks (C1). False: always in
        two phases, as in the paper.
    """

    commit_timeout_s: float = 30.0
    one_step: bool = True

    def __post_init__(self) -> None:
        check_options(self)


class Driver(Resolver):
    """Reads, recoveries and commits on one store. Loop thread only.

    Attributes:
        laned: whether one-step commits may take a lane (`lane.py`).
        lane: the driver's own lane; None: that of a process that draws the timestamps of its commits.
    """

    laned = True
    lane: Callable[..., Awaitable[int]] | None = None

    @property
    def start(self) -> Any:
        """A `Start` (`starting.py`), if the first read of a transaction can draw its timestamp; else None."""
        return None

    @property
    def shipping(self) -> Shipping | None:
        """Through which operations go to the store's owner (C9); None: they run here."""
        return None

    @property
    def one_step(self) -> bool:
        """Whether commits take one step where they can (C1)."""
        return self.options.one_step and self.fates.alone and self.store.once

    def __init__(
        self,
        store: RowStore,
        oracle: Oracle,
        fates: Fates,
        options: CommitOptions,
        background: Background,
        event: Callable[[str], None] | None,
    ) -> None:
        super().__init__(store, oracle, fates, background, event)
        self.options = options

    @trio.lowlevel.enable_ki_protection
    async def commit(self, commit: Commit, *, observed: bool, version: int) -> int:
        """Drive a commit to its end; returns commit_ts.

        Raises: ConflictAt, StaleAt, RolledBack, CatalogueChanged, StoreFull, CommitUnknown; trio.Cancelled only if the
        transaction certainly has not committed, and never will (T10).
        """
        start_ts = commit.header.start_ts
        began = time.perf_counter() if self.timings is not None else 0.0
        self.fates.begin(start_ts)
        if observed:
            self.fates.observed += 1
        return await self.go_on(commit, began, observed=observed, version=version)

    async def go_on(
        self, commit: Commit, began: float, *, observed: bool, version: int, asked: tuple[Any] | None = None
    ) -> int:
        """`commit` from any state on. `began`: when it began, if that is measured. `asked`: another process was asked
        to do it in one step, and has given this answer."""
        start_ts = commit.header.start_ts
        try:
            if commit.state is State.DRAW:
                await self._in_one_step(commit, version, asked)
            elif commit.state is State.PREWRITE:
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
        self.committed(start_ts, commit.commit_ts, began)
        if commit.has_secondaries:
            if observed:
                self.notified(commit.notified(0, 1))
            self._begin_phase_two(commit, observed=observed)
        elif observed:
            self.tell_workers(commit.notified())
        return commit.commit_ts

    def committed(self, start_ts: int, commit_ts: int, began: float) -> None:
        """Count a commit, and end its transaction."""
        self.counters.commits += 1
        if self.timings is not None and began:
            self.timings.commits.note(time.perf_counter() - began)
        if self._event is not None:
            self._event("commit")
        self.oracle.holds.open.discard(start_ts)
        self.fates.settle(start_ts, commit_ts)

    def never_sent(self, start_ts: int, *, observed: bool) -> None:
        """End a transaction of which nothing was sent (T10)."""
        self.counters.aborts += 1
        self._settled(start_ts, 0, observed=observed)

    async def _prewritten(self, commit: Commit, version: int) -> None:
        """Send prewrites, and the primary's commit if it can follow at once (`Chain`)."""
        chain = Chain(commit, self.oracle, version, self._event, self.entered)
        try:
            chain.ended(await self.chained(commit.prewrites(), chain))
        except BaseException:
            if chain.entered:
                self.entered.leave(commit)  # C3: it was never sent
            raise
        if chain.entered and commit.state is not State.ASK:
            self.entered.leave(commit)

    async def _in_one_step(self, commit: Commit, version: int, asked: tuple[Any] | None = None) -> None:
        """In state DRAW: check and write the primary's part in one write transaction (C1 - C5)."""
        entered = self.entered
        while True:
            found = entered.in_the_way(commit)
            if found is not None:
                await self._settle_entered(commit, *found)
                continue
            deferring = self.store.deferring
            if deferring is not None:
                if await self._in_one_step_late(deferring, commit, version):
                    return
                continue
            if self._enter(commit, version):
                break
            await self.oracle.extend()
        try:
            [verdict] = await self.chained((commit.primary_commit(),), None)
        except BaseException:
            entered.leave(commit)  # C3: it was never sent (T10)
            raise
        commit.primary_told(verdict)
        if commit.state is not State.ASK:
            entered.leave(commit)

    def _enter(self, commit: Commit, version: int) -> bool:
        """Draw commit_ts and enter the cells. C2: no await between the caller's `in_the_way`, the draw and the entry.
        Returns False if no timestamp is available at once.

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

    async def _in_one_step_late(self, store: Deferring, commit: Commit, version: int) -> bool:
        """Like `_in_one_step`, but with a delay window (D1): draws the timestamp, and enters the cells, when the window
        has ended. Returns False if another commit was in the way by then, or no timestamp was available: try again."""
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
        """C3: remove the entries of a one-step commit whose outcome is known now."""
        self.entered.leave(commit)

    def _leave_behind(self, commit: Commit) -> None:
        self.entered.leave_behind(commit)

    async def _settle_entered(self, commit: Commit, where: Where, entry: Entry) -> None:
        """Wait for another transaction's one-step commit of a cell, without holding locks (T7)."""
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
                return  # the other transaction did not commit, or did so before this transaction began
        raise ConflictAt(self._met(Cellref(*where)), entry.commit_ts, start_ts)

    def chained(self, mutations: Sequence[Mutation], chain: Chain | None) -> Awaitable[list[Verdict]]:
        """Send mutations. If the store can, it continues with `chain` by itself."""
        chaining = self.store.chaining
        return self.store.apply(mutations) if chaining is None else chaining.apply_then(mutations, chain)

    async def _until_decided(self, commit: Commit, version: int) -> None:
        apply = self.store.apply
        while True:
            state = commit.state
            if state is State.PREWRITE:
                await self._prewritten(commit, version)
            elif state is State.DRAW and commit.one_step:
                await self._in_one_step(commit, version)
            elif state is State.DRAW:
                commit.drawn(await self._draw_commit())
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
                    raise copy(commit.failure)  # all commits of a batch have the same
                raise RolledBack(commit.header.start_ts)
            else:  # pragma: no cover
                raise AssertionError(state)

    def _met(self, cell: Cellref) -> Cellref:
        """Count a conflict at a cell."""
        self.counters.conflicts += 1
        self.contended.note(cell)
        return cell

    async def _draw_commit(self) -> int:
        return await self.oracle.draw_commit()

    async def _validate(self, commit: Commit) -> None:
        """T14: repeat the reads, now that the locks are written and commit_ts is drawn."""
        assert commit.reads is not None
        start_ts, commit_ts = commit.header.start_ts, commit.commit_ts
        stale = await Validation(self.store, self.fates, self.entered, start_ts, commit_ts).run(commit.reads)
        if stale is not None:
            self.counters.conflicts += 1
            for cell in stale.cells[:1]:
                self.contended.note(cell)
            raise StaleAt(stale, start_ts, commit_ts)
        commit.validated()

    async def _unblock(self, commit: Commit) -> None:
        """After a refused prewrite: settle the locks in the way, so that it can be sent again, or give up (T7)."""
        start_ts = commit.header.start_ts
        foreign: list[tuple[Cellref, int, bytes]] = []
        for part, refused in commit.refusals:
            intent, check = commit.refused_cell(part, refused)
            if check in (core.MARKER_CHECK, core.FLOOR_CHECK):
                raise RolledBack(start_ts)
            where = Cellref(intent.table, intent.row, intent.column)
            if check == core.LISTED_CHECK:  # N6: since the run began, the failed list has changed
                raise ConflictAt(self._met(where), start_ts, start_ts)
            queries: list[Query] = [
                (LOCK, where.column, 0, TS_MAX, 1),
                (WRITE, where.column, start_ts, TS_MAX, 1),
            ]
            readers = check in (core.SHARED_CHECK, core.TRACE_CHECK)
            if readers:
                queries += [(TRACE, where.column, start_ts, TS_MAX, 1), (SHARED, where.column, 0, TS_MAX, _SHARED_MAX)]
            [[locks, records, *read]] = await self.store.read([(where.table, where.row, queries)])
            if records:
                raise ConflictAt(self._met(where), records[0][0], start_ts)
            if readers and read[0]:  # T14
                raise ConflictAt(self._met(where), read[0][0][0], start_ts, read=True)
            if locks and locks[0][0] == start_ts:
                commit.echoed(part)
            elif locks:  # else the lock has gone meanwhile
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
            # T7: two transactions that wait while they hold locks could wait for each other forever.
            commit.give_up()
            await self._release(commit)
            self._waits_for_others(commit.header.start_ts)
            await self._outlive(where, other_ts, packed)
            read = self.lock_at(where, other_ts, packed).kind == READ
            raise ConflictAt(self._met(where), other_ts, commit.header.start_ts, read=read)
        await self._outlive(where, other_ts, packed)

    async def _ask_primary(self, commit: Commit) -> None:
        """T4: read the primary after a lost reply, or after a refusal that our own earlier success may have caused."""
        header = commit.header
        token = make_token(header.start_ts, header.primary)
        with trio.move_on_after(self.options.commit_timeout_s, shield=True):
            pause_s = 0.0
            queries = primary_queries(header.primary, header.start_ts)
            request: ReadRequest = (header.primary.table, header.primary.row, queries)
            recovery = Recovery(header.start_ts, header.primary, ())
            while commit.state is State.ASK:
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s + 0.001, _ASK_PAUSE_MAX_S)
                try:
                    [cells] = await self.store.read([request])
                    recovery.asked(cells, alive=False)
                    if recovery.fate is not None:
                        await self._must_be_certain(recovery)  # an ended session does not hold the watermark (R5)
                except SessionEnded:  # R5: the next session will answer
                    recovery = Recovery(header.start_ts, header.primary, ())
                    continue
                if recovery.step is Step.ROLL_PRIMARY:
                    commit.asked(None)
                    [verdict] = await self.store.apply([commit.primary_commit()])
                    commit.primary_told(verdict)
                    recovery = Recovery(header.start_ts, header.primary, ())
                elif recovery.fate is not None:
                    commit.asked(recovery.fate)
                else:  # our lock is gone, and left no record: only a rollback marker makes this an abort
                    [verdict] = await self.store.apply([recovery.decision()])
                    recovery.decided(verdict)
                    if recovery.fate is not None:
                        commit.asked(recovery.fate)
            return
        raise CommitUnknown(token, f"no answer within {self.options.commit_timeout_s} s")

    async def _release(self, commit: Commit) -> None:
        """Release our locks, the primary's first (T5). Completes even if its scope is cancelled."""
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
                    await self._settle_all(Settling(commit.releases_by_cell(0), None))  # the rest of the primary's part
            if releases[first:]:
                await self._settle_all(Settling(releases[first:], lambda i: commit.releases_by_cell(first + i)))
            commit.released()

    async def _decide_own(self, commit: Commit) -> bool:
        """Make sure that the primary can never commit (T5), after its release was refused or lost.

        Returns whether the transaction has committed: a commit request that seemed to be lost may have arrived (T4).
        """
        header = commit.header
        recovery = Recovery(header.start_ts, header.primary, ())
        try:
            await self._decide(recovery, None)
            if recovery.fate is not None and commit.maybe_sent:
                await self._must_be_certain(recovery)
            if recovery.fate:
                commit.committed_after_all(recovery.fate)
                return True
        except Corruption as error:
            named = self.at(header.primary, error)
            if commit.maybe_sent:
                raise CommitUnknown(make_token(header.start_ts, header.primary), str(named)) from error
            raise named from error
        if recovery.failure is not None:
            self.orphaned.set()  # the disk is full: the dead lock stays until there is space
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
        except (StoreError, SessionEnded):  # R6, R7: this happens only in a served store
            self.orphaned.set()
            fate = None
        self._settled(commit.header.start_ts, fate, observed=observed)

    def _begin_phase_two(self, commit: Commit, *, observed: bool) -> None:
        """Roll the secondaries forward. A reader that encounters a lock earlier rolls it forward itself (T3, S2)."""
        settling = Settling(commit.secondaries(), commit.secondaries_by_cell)
        chaining = self.store.chaining
        if chaining is None or not chaining.queues:
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
        chaining.apply_behind(settling.groups, told)  # a task would cost more than the work itself

    async def _phase_two(self, commit: Commit, settling: Settling, *, observed: bool) -> None:
        await self._settle_all(settling)
        self._phase_two_done(commit, settling, observed=observed)

    def _phase_two_done(self, commit: Commit, settling: Settling, *, observed: bool) -> None:
        if settling.left:
            self.orphaned.set()
        if self._event is not None:
            self._event("secondaries")
        if observed:
            self.tell_workers(commit.notified(1))  # a reader or the sweeper rolls forward the cells that are left

    async def _settle_all(self, settling: Settling) -> None:
        more = settling.groups
        while more:
            more = settling.told(await self.store.apply(more))
        if settling.left:
            self.orphaned.set()

    def _settled(self, start_ts: int, fate: int | None, *, observed: bool) -> None:
        if start_ts not in self.entered.left:  # otherwise its records may still appear
            self.oracle.holds.open.discard(start_ts)
        self.fates.settle(start_ts, fate)
        if observed:
            self.tell_workers(() if fate == 0 else None)

    def _waits_for_others(self, start_ts: int) -> None:
        """T7: before a transaction that has released its locks waits, mark it as aborted, so that no other transaction,
        in any process, waits for it. Otherwise two transactions that have encountered each other's locks would wait
        forever."""
        self.oracle.holds.open.discard(start_ts)
        self.fates.settle(start_ts, 0)


class ConflictAt(PercoError):
    """A WriteConflict whose cell is not named yet; the transaction adds the names."""

    cell: Cellref
    other_ts: int
    start_ts: int
    read: bool

    def __init__(self, cell: Cellref, other_ts: int, start_ts: int, *, read: bool = False) -> None:
        self.cell, self.other_ts, self.start_ts, self.read = cell, other_ts, start_ts, read
        super().__init__(cell)


class StaleAt(PercoError):
    """A ReadConflict whose cells and ranges are not named yet."""

    stale: Stale
    start_ts: int
    commit_ts: int

    def __init__(self, stale: Stale, start_ts: int, commit_ts: int) -> None:
        self.stale, self.start_ts, self.commit_ts = stale, start_ts, commit_ts
        super().__init__(stale)


def conflict(found: ConflictAt, name: Callable[[Cellref], tuple[str, Any, str]]) -> WriteConflict:
    met = WriteConflict([name(found.cell)], found.other_ts, found.start_ts, read=found.read)
    met.met_on = (found.cell,)
    return met
