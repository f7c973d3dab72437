"""Faults in the protocol itself, switched on one at a time: the simulation must find each of them.

Each fault is a function that takes a `pytest.MonkeyPatch` and breaks one rule. The changes in `HARMLESS` break none.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from perco.clock import holds, oracle, timestamps
from perco.errors import CommitUnknown, RolledBack, TransientError
from perco.history import past, vacuum
from perco.notify import idle, working
from perco.protocol import claim, commit, mutations, records, recovery, retention, snapshot
from perco.protocol.mutations import Header, Intent
from perco.storage import LOCK, NOTIFY, ROLLBACK, TS_MAX, WRITE, Mutation, NoReply, tablet
from perco.testing import faults
from perco.txn import beginning, driver, reader, running, snapshot as point_reads, transaction

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Mutant] = {}
SLOW: dict[str, Mutant] = {}  # these take too many seeds for the suite
PROTECTED: dict[str, Mutant] = {}  # another rule covers for these: their docstrings say which
HARMLESS: dict[str, Mutant] = {}


def mutant(name: str, *, slow: bool = False) -> Callable[[Mutant], Mutant]:
    def note(function: Mutant) -> Mutant:
        (SLOW if slow else MUTANTS)[name] = function
        return function

    return note


def protected(name: str) -> Callable[[Mutant], Mutant]:
    def note(function: Mutant) -> Mutant:
        PROTECTED[name] = function
        return function

    return note


def harmless(name: str) -> Callable[[Mutant], Mutant]:
    def note(function: Mutant) -> Mutant:
        HARMLESS[name] = function
        return function

    return note


def changed(
    patch: pytest.MonkeyPatch, function: str, change: Callable[[Mutation], Mutation], module: Any = mutations
) -> None:
    """Change the result of a function of mutations.py."""
    right = getattr(module, function)
    patch.setattr(module, function, lambda *args, **kwargs: change(right(*args, **kwargs)))


def without_checks(mutation: Mutation, group: str | None = None) -> Mutation:
    rows = [
        (row, [check for check in checks if group is not None and check[1] != group], writes)
        for row, checks, writes in mutation.rows
    ]
    return mutation._replace(rows=rows)


def without_writes(mutation: Mutation, group: str) -> Mutation:
    rows = [(row, checks, [write for write in writes if write[0] != group]) for row, checks, writes in mutation.rows]
    return mutation._replace(rows=rows)


# ------------------------------------------------------------ timestamps


@mutant("O1 the bound is never made durable")
def bound(patch: pytest.MonkeyPatch) -> None:
    async def make_durable(self: oracle.Oracle, bound: int) -> None:
        self._timestamps.extend(bound)

    patch.setattr(oracle.Oracle, "_make_durable", make_durable)


@mutant("O1 timestamps continue below the bound after a restart")
def restart(patch: pytest.MonkeyPatch) -> None:
    right = timestamps.Timestamps.__init__

    def below(self: timestamps.Timestamps, bound: int) -> None:
        right(self, bound)
        self.last = max(bound - 9_990, 0)

    patch.setattr(timestamps.Timestamps, "__init__", below)


@mutant("T2 commit_ts is drawn before the prewrites")
def early(patch: pytest.MonkeyPatch) -> None:
    right = driver.Driver.commit
    drawn = commit.Commit.drawn

    async def first(self: driver.Driver, commit: commit.Commit, **how: Any) -> int:
        early_ts[id(commit)] = self.oracle.draw_nowait()
        return await right(self, commit, **how)

    early_ts: dict[int, int] = {}
    patch.setattr(driver.Driver, "commit", first)
    patch.setattr(
        commit.Commit, "drawn", lambda self, commit_ts: drawn(self, early_ts.pop(id(self), commit_ts) or commit_ts)
    )


@mutant("O1 the bound is durable only after its first use")
def bound_after_use(patch: pytest.MonkeyPatch) -> None:
    right = oracle.Oracle._make_durable

    async def make_durable(self: oracle.Oracle, bound: int) -> None:
        first = self._timestamps
        before = first.bound
        first.extend(bound)  # others draw from it while it is on its way to the disk
        shadow = timestamps.Timestamps(before)
        self._timestamps = shadow
        writing = right(self, bound)
        told = None
        while True:
            self._timestamps = shadow
            try:
                waited = writing.send(told)
            except StopIteration:
                return
            finally:
                self._timestamps = first
            told = await _pass_on(waited)

    patch.setattr(oracle.Oracle, "_make_durable", make_durable)


@types.coroutine
def _pass_on(waited: Any) -> Any:
    return (yield waited)


# ------------------------------------------------------------ commit


@mutant("T7 a repeated prewrite takes any lock for its own")
def any_lock_is_ours(patch: pytest.MonkeyPatch) -> None:
    right = mutations.prewrite

    def prewrite(header: Any, part: Any, *, again: bool) -> Mutation:
        made = right(header, part, again=again)
        if again:
            rows = [(row, [check for check in checks if check[1] != LOCK], writes) for row, checks, writes in made.rows]
            made = made._replace(rows=rows)
        return made

    patch.setattr(mutations, "prewrite", prewrite)


@mutant("T7 a transaction that holds locks waits for another's lock")
def waits_while_holding(patch: pytest.MonkeyPatch) -> None:
    async def settle(self: driver.Driver, commit: commit.Commit, where: Any, other_ts: int, packed: bytes) -> None:
        await self.clear(where, snapshot.Blocked(other_ts, packed))

    patch.setattr(driver.Driver, "_settle_foreign", settle)


@mutant("T8 a roll-forward does not check the lock")
def forward_unchecked(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "roll_forward", without_checks)


@mutant("T11 a retry reuses the writes of the failed attempt")
def replayed(patch: pytest.MonkeyPatch) -> None:
    async def attempts(engine: Any, retry: Any, _: bool, function: Any, args: Any, kwargs: Any, *more: Any) -> Any:
        writes: dict[Any, Any] = {}
        result: Any = None
        for _attempt in range(retry.attempts):
            txn = await beginning.begin(engine, None)
            try:
                if writes:
                    txn._writes = dict(writes)
                else:
                    result = await function(txn, *args, **kwargs)
                writes = dict(txn._writes)
                await txn.commit()
                return result
            except TransientError:
                pass
            finally:
                txn.discard()
        raise TransientError

    patch.setattr(running, "attempts", attempts)


@mutant("T12 another primary is chosen after a lost reply")
def chosen_again(patch: pytest.MonkeyPatch) -> None:
    right = commit.Commit.prewrites_told

    def told(self: commit.Commit, verdicts: Any) -> None:
        right(self, verdicts)
        if self.state is commit.State.PREWRITE and len(self._parts) > 1 and not self.one_step:
            self._parts = [*self._parts[1:], self._parts[0]]
            self._standing = [*self._standing[1:], self._standing[0]]
            first = self._parts[0][0]
            self.header = self.header._replace(primary=records.Cellref(first.table, first.row, first.column))

    patch.setattr(commit.Commit, "prewrites_told", told)


@mutant("T3 a secondary commits before the primary")
def secondaries_first(patch: pytest.MonkeyPatch) -> None:
    right = commit.Commit.primary_commit

    def last_part(self: commit.Commit) -> Mutation:
        if len(self._parts) > 1 and not self.maybe_sent:
            return mutations.commit(self.header, self._parts[-1], self.commit_ts)
        return right(self)

    def secondaries(self: commit.Commit) -> list[Mutation]:
        return [mutations.commit(self.header, part, self.commit_ts) for part in self._parts[:-1]]

    patch.setattr(commit.Commit, "primary_commit", last_part)
    patch.setattr(commit.Commit, "secondaries", secondaries)


@mutant("T4 a lost reply to the primary's commit is taken for an abort")
def lost(patch: pytest.MonkeyPatch) -> None:
    right = commit.Commit.primary_told

    def told(self: commit.Commit, verdict: Any) -> None:
        if isinstance(verdict, NoReply) and not self.one_step:
            self.state = commit.State.ABORTED
            raise RolledBack(self.header.start_ts)
        right(self, verdict)

    patch.setattr(commit.Commit, "primary_told", told)


@mutant("T4 a missing record is taken for an abort although old versions were collected")
def collected(patch: pytest.MonkeyPatch) -> None:
    right = driver.Driver.outcome

    async def outcome(self: driver.Driver, start_ts: int, primary: Any) -> int:
        try:
            return await right(self, start_ts, primary)
        except CommitUnknown:
            return 0

    patch.setattr(driver.Driver, "outcome", outcome)


@mutant("T7 a prewrite ignores newer records")
def record(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "prewrite", lambda mutation: without_checks(mutation, WRITE))


@mutant("T7 a prewrite ignores locks")
def lock(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "prewrite", lambda mutation: without_checks(mutation, LOCK))


@mutant("T7 a prewrite ignores rollback markers")
def marker(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "prewrite", lambda mutation: without_checks(mutation, ROLLBACK))


@mutant("T8 a commit does not check the lock")
def commit_unchecked(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "commit", without_checks)


@mutant("T8 a rollback does not check the lock")
def rollback_unchecked(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "roll_back_primary", without_checks)
    changed(patch, "roll_back_secondary", without_checks)


# ------------------------------------------------------------ recovery


@mutant("T5 a rollback leaves no marker")
def no_marker(patch: pytest.MonkeyPatch) -> None:
    for name in ("put_marker", "roll_back_primary", "release"):
        changed(patch, name, lambda mutation: without_writes(mutation, ROLLBACK))


@mutant("T5 a marker is put without checking for a lock or record")
def marker_unchecked(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "put_marker", without_checks)


# ------------------------------------------------------------ reading


def _blind(locks: Any, writes: Any, settled: int = -1) -> Any:
    return snapshot.look((), writes)


@mutant("T9 reads skip locks")
def skip(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(point_reads, "plain", lambda locks, writes: snapshot.plain((), writes))
    for module in point_reads, reader:
        patch.setattr(module, "look", _blind)


@mutant("T9 a reader that encounters a lock does not wait for its transaction's fate")
def stale(patch: pytest.MonkeyPatch) -> None:
    async def finish(self: driver.Driver, table: str, row: bytes, column: int, ts: int, seen: Any) -> Any:
        if type(seen) is snapshot.Blocked:
            queries = [(WRITE, column, 0, ts, 1)]
            [[writes]] = await self.store.read([(table, row, queries)])
            seen = snapshot.look((), writes)
        return await right(self, table, row, column, ts, seen)

    right = driver.Driver.finish
    patch.setattr(driver.Driver, "finish", finish)


@mutant("T9 a read of many cells treats locked cells as missing")
def a_part(patch: pytest.MonkeyPatch) -> None:
    right = reader.Reader._finish

    async def finish(self: reader.Reader, table: str, seen: Any, *rest: Any) -> Any:
        free = {at: snapshot.Missing() if type(one) is snapshot.Blocked else one for at, one in seen.items()}
        return await right(self, table, free, *rest)

    patch.setattr(reader.Reader, "_finish", finish)


# ------------------------------------------------------------ observers


@mutant("N1 a roll-forward leaves no notify cell")
def roll_forward(patch: pytest.MonkeyPatch) -> None:
    changed(patch, "roll_forward", lambda mutation: without_writes(mutation, NOTIFY))


@mutant("N1 secondaries leave no notify cell")
def no_secondary_notify(patch: pytest.MonkeyPatch) -> None:
    right = commit.Commit.secondaries
    patch.setattr(
        commit.Commit, "secondaries", lambda self: [without_writes(mutation, NOTIFY) for mutation in right(self)]
    )


@mutant("N2 a notify cell is removed without a run")
def without_a_run(patch: pytest.MonkeyPatch) -> None:
    right = claim.decide

    def decide(cells: Any, start_ts: int, version: int) -> Any:
        verdict = right(cells, start_ts, version)
        return claim.Handled(verdict.covers) if isinstance(verdict, claim.Run) and start_ts % 7 == 0 else verdict

    patch.setattr(working, "decide", decide)


@mutant("N3 an ack is compared by its commit_ts, not by its pointer")
def ack_by_commit(patch: pytest.MonkeyPatch) -> None:
    right = claim.decide

    def decide(cells: Any, start_ts: int, version: int) -> Any:
        notified, ack_locks, acks, locks, writes, _ = cells
        if acks and writes and writes[0][0] <= acks[0][0] and notified and not ack_locks and not locks:
            return claim.Handled(tuple(ts for ts, _ in notified))
        return right(cells, start_ts, version)

    patch.setattr(working, "decide", decide)


@mutant("N1 deletes do not notify")
def quiet_deletes(patch: pytest.MonkeyPatch) -> None:
    right = transaction.write_of

    def write_of(*args: Any) -> Any:
        made = right(*args)
        return made._replace(observers=()) if made.kind == records.DELETE else made

    patch.setattr(transaction, "write_of", write_of)


@mutant("N1 a transaction's own commit leaves no notify cell")
def no_notify(patch: pytest.MonkeyPatch) -> None:
    right = mutations.commit
    forward = mutations.roll_forward

    def commit_only(header: Any, part: Any, commit_ts: int) -> Mutation:
        return right(header, [intent._replace(observers=()) for intent in part], commit_ts)

    def roll_forward(*args: Any) -> Mutation:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(mutations, "commit", right)
            return forward(*args)

    patch.setattr(mutations, "commit", commit_only)
    patch.setattr(mutations, "roll_forward", roll_forward)


@mutant("N1 notify cells are put only in phase two, not with the records")
def in_phase_two(patch: pytest.MonkeyPatch) -> None:
    notify = mutations._notify
    secondaries = commit.Commit.secondaries

    def only_removed(intent: Intent, header: Header, commit_ts: int) -> Any:
        return notify(intent._replace(observers=()), header, commit_ts)

    def with_notify(self: commit.Commit) -> list[Mutation]:
        more = [
            Mutation(
                intent.table,
                ((intent.row, (), notify(intent._replace(covers=()), self.header, self.commit_ts)),),
                None,
                True,
            )
            for part in self._parts
            for intent in part
            if intent.observers
        ]
        return [*secondaries(self), *more]

    patch.setattr(mutations, "_notify", only_removed)
    patch.setattr(commit.Commit, "has_secondaries", property(lambda self: True))
    patch.setattr(commit.Commit, "secondaries", with_notify)


def _also_removed(patch: pytest.MonkeyPatch, more: Callable[[int, int], range]) -> None:
    """A run also removes the notify cells at the timestamps that `more` gives for its start and its commit."""
    right = mutations._notify

    def notify(intent: Intent, header: Header, commit_ts: int) -> Any:
        writes = right(intent, header, commit_ts)
        if intent.covers:
            also = [ts for ts in more(header.start_ts, commit_ts) if ts not in intent.covers]
            writes += [(NOTIFY, intent.column, ts, None) for ts in also]
        return writes

    patch.setattr(mutations, "_notify", notify)


@mutant("N2 a run removes notify cells newer than its start")
def newer(patch: pytest.MonkeyPatch) -> None:
    _also_removed(patch, lambda start_ts, commit_ts: range(start_ts, commit_ts))


@protected("N2 a run removes notify cells that it has not seen, up to its start")
def unseen(patch: pytest.MonkeyPatch) -> None:
    """Covered by T9, and by N1: a notify cell comes in one mutation with its record, in the same row.

    When the run read the row, every change that committed at or before its start was there with its notify cell, or
    its lock or its entry was: the run waits for those, and reads again. So it has seen every change whose notify cell
    it removes unseen. A notify cell could come later than its record only if notify cells lay in other rows.
    """
    _also_removed(patch, lambda start_ts, commit_ts: range(max(start_ts - 100, 0), start_ts))


@mutant("N2 a run removes notify cells before it commits")
def before_commit(patch: pytest.MonkeyPatch) -> None:
    right = mutations.prewrite

    def prewrite(header: Any, part: Any, *, again: bool) -> Mutation:
        made = right(header, part, again=again)
        gone = {intent.row: [(NOTIFY, intent.column, ts, None) for ts in intent.covers if ts > 0] for intent in part}
        return made._replace(rows=[(row, checks, [*writes, *gone.get(row, ())]) for row, checks, writes in made.rows])

    patch.setattr(mutations, "prewrite", prewrite)


@mutant("N3 the ack's record is stored at start_ts")
def ack_at_start(patch: pytest.MonkeyPatch) -> None:
    def moved(mutation: Mutation) -> Mutation:
        rows = []
        for row, checks, writes in mutation.rows:
            out = []
            for group, column, ts, value in writes:
                if (
                    group == WRITE
                    and value is not None
                    and (record := records.unpack_record(value)).kind == records.ACK
                ):
                    ts = record.start_ts
                out.append((group, column, ts, value))
            rows.append((row, checks, out))
        return mutation._replace(rows=rows)

    changed(patch, "commit", moved)
    changed(patch, "one_step", moved)


@mutant("N3 the ack is not read")
def ack_unread(patch: pytest.MonkeyPatch) -> None:
    right = claim.decide
    patch.setattr(working, "decide", lambda cells, *rest: right([cells[0], (), (), *cells[3:]], *rest))


@mutant("N7 the idle check looks only for notify cells and pending signals", slow=True)
def one_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(idle.Idle, "now", lambda self: not self.pending())


@mutant("N11 only the first observer of a column gets a notify cell")
def one_cell(patch: pytest.MonkeyPatch) -> None:
    right = mutations._notify

    def notify(intent: Intent, header: Header, commit_ts: int) -> Any:
        return right(intent._replace(observers=intent.observers[:1]), header, commit_ts)

    patch.setattr(mutations, "_notify", notify)


# ------------------------------------------------------------ collection


@mutant("G1 the watermark passes an active transaction")
def over_the_living(patch: pytest.MonkeyPatch) -> None:
    right = holds.Holds.lowest

    def lowest(self: holds.Holds, last: int, now_ms: int) -> Any:
        open_now, self.open = self.open, set()
        try:
            return right(self, last, now_ms)
        finally:
            self.open = open_now

    patch.setattr(holds.Holds, "lowest", lowest)


@mutant("G2 collection deletes without settling locks first")
def unsettled(patch: pytest.MonkeyPatch) -> None:
    async def settle_none(self: vacuum.Vacuum) -> None:
        pass

    patch.setattr(vacuum.Vacuum, "_settle_locks", settle_none)


@mutant("G2 collection settles locks and deletes versions one table at a time")
def by_tablet(patch: pytest.MonkeyPatch) -> None:
    settle, collect = vacuum.Vacuum._settle_locks, vacuum.Vacuum._collect

    async def later(self: vacuum.Vacuum) -> None:
        pass

    async def settled_and_collected(self: vacuum.Vacuum, table: str) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(vacuum.Vacuum, "_tables", lambda self: [table])
            await settle(self)
        await collect(self, table)

    patch.setattr(vacuum.Vacuum, "_settle_locks", later)
    patch.setattr(vacuum.Vacuum, "_collect", settled_and_collected)


@mutant("G3 a delete marker is removed while its column has a notify cell")
def marker_with_notify(patch: pytest.MonkeyPatch) -> None:
    right = retention.waste_of

    def waste_of(*args: Any, **kwargs: Any) -> Any:
        return right(*args[:5], set(), **{**kwargs, "acks_of": lambda column: ()})._replace(checks=[])

    patch.setattr(vacuum, "waste_of", waste_of)


@mutant("G3 a delete marker is removed, but not the versions that it hides")
def marker_first(patch: pytest.MonkeyPatch) -> None:
    right = retention.waste_of

    def waste_of(*args: Any, **kwargs: Any) -> Any:
        waste = right(*args, **kwargs)
        newest: dict[tuple[str, int], int] = {}
        for group, column, ts, _ in waste.ends:
            newest[group, column] = max(ts, newest.get((group, column), 0))
        return waste._replace(ends=[write for write in waste.ends if write[2] == newest[write[0], write[1]]])

    patch.setattr(vacuum, "waste_of", waste_of)


@mutant("G4 the newest ack is removed too")
def newest_ack(patch: pytest.MonkeyPatch) -> None:
    right = retention.waste_of

    def waste_of(table: str, row: bytes, found: Any, *args: Any, **kwargs: Any) -> Any:
        waste = right(table, row, found, *args, **kwargs)
        acks = [(((WRITE, column, ts, None),)) for column, ts, _ in found if records.observer_of(column)]
        return waste._replace(units=[*waste.units, *(unit for unit in acks if unit not in waste.units)])

    patch.setattr(vacuum, "waste_of", waste_of)


@mutant("G5 a snapshot that is no longer kept can still be read")
def not_kept(patch: pytest.MonkeyPatch) -> None:
    async def kept(self: past.PastSnapshot, table: str, failure: Any = None) -> None:
        if failure is not None:
            raise failure

    patch.setattr(past.PastSnapshot, "_still_kept", kept)
    patch.setattr(holds.Holds, "oldest", lambda self: 0)


@mutant("T13 the floor is never raised")
def no_floor(patch: pytest.MonkeyPatch) -> None:
    async def raise_none(self: tablet.MemoryTablet, ts: int) -> None:
        pass

    patch.setattr(tablet.MemoryTablet, "raise_floor", raise_none)


# ------------------------------------------------------------ harmless changes


@harmless("locks are settled twice")
def forward_twice(patch: pytest.MonkeyPatch) -> None:
    right = recovery.Recovery.clearing
    patch.setattr(recovery.Recovery, "clearing", lambda self: [one for made in right(self) for one in (made, made)])


@harmless("readers wait for locks above their timestamp too")
def waits_above(patch: pytest.MonkeyPatch) -> None:
    right = faults.FaultyRowStore.read

    async def read(self: faults.FaultyRowStore, requests: Any) -> Any:
        wider = []
        for table, row, queries in requests:
            _, column, low, _, _ = queries[0]
            plain = [query[0] for query in queries] == [LOCK, WRITE] and not low
            wider.append((table, row, [(LOCK, column, 0, TS_MAX, 1), *queries[1:]] if plain else queries))
        return await right(self, wider)

    patch.setattr(faults.FaultyRowStore, "read", read)


@harmless("secondaries commit in another order")
def order(patch: pytest.MonkeyPatch) -> None:
    right = commit.Commit.secondaries
    patch.setattr(commit.Commit, "secondaries", lambda self: list(reversed(right(self))))
    patch.setattr(
        commit.Commit,
        "secondaries_by_cell",
        lambda self, group: [
            mutations.commit(self.header, [intent], self.commit_ts) for intent in list(reversed(self._parts[1:]))[group]
        ],
    )


@harmless("a rollback puts markers on secondaries too")
def markers(patch: pytest.MonkeyPatch) -> None:
    right = mutations.roll_back_secondary

    def marked(cell: Any, start_ts: int, lock: Any) -> Mutation:
        [(row, checks, writes)] = right(cell, start_ts, lock).rows
        return Mutation(cell.table, ((row, checks, [*writes, (ROLLBACK, cell.column, start_ts, b"")]),), None, True)

    patch.setattr(mutations, "roll_back_secondary", marked)
