"""The driver over a store that loses, delays and repeats: it tells the client what happened."""

from __future__ import annotations

import contextlib

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside, local_owner
from perco.storage import APPLIED, LOCK, WRITE, Mutation
from perco.testing import faults
from tests.support import bank
from tests.support.faults import Fault, FaultyRowStore, at, faulty, on, use
from tests.support.machines import CrashedError, Machine

SOURCE, TARGET = bank.ACCOUNTS[0], bank.ACCOUNTS[9]
PARTS = {True: 6, False: 12}  # of a transaction that writes every account
STEPS = {groups: 2 * parts for groups, parts in PARTS.items()}
ALL = [(groups, n) for groups in (True, False) for n in range(STEPS[groups])]


@pytest.fixture(params=[True, False], ids=["groups", "rows"])
def groups(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def opened(groups: bool) -> Machine:
    machine = Machine(bank.SCHEMA, groups=groups, one_step=False)
    async with machine.opened() as db:
        await db.run(bank.opening)
    return machine


async def intact(machine: Machine, *, moved: bool | None) -> None:
    """Nothing is locked, and the money is all there: some of it moved, or not."""
    async with machine.opened() as db, db.snapshot() as snap:
        assert await bank.total_by_get(snap) == await bank.total_by_scan(snap) == bank.TOTAL
        assert await bank.total_by_scan(snap, reverse=True) == bank.TOTAL
        if moved is not None:
            assert (await snap.get(*SOURCE) != bank.OPENING) == moved
    assert not machine.locks()


# ------------------------------------------------------------ crash at every step, on the driver


@pytest.mark.parametrize(("groups", "number"), ALL)
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("by", ["read", "write", "scan", "sweeper"])
async def test_a_crash_at_any_step_is_recovered_by_whoever_comes(
    groups: bool, number: int, made: bool, by: str
) -> None:  # T1 T3 T5 T7 T9
    machine = await opened(groups)
    async with machine.crashing(number, made=made) as (db, store):
        with contextlib.suppress(CrashedError, perco.CommitUnknown):
            await db.run(bank.scatter, SOURCE, 55)
        await trio.testing.wait_all_tasks_blocked()
        assert store.dead or (number, made) == (STEPS[groups] - 1, True), "it never came so far"
        sent = store.log
    moved = (number, made) >= (PARTS[groups], True)
    assert sent[: PARTS[groups]] == ["prewrite"] * min(len(sent), PARTS[groups])
    async with machine.opened() as db:
        match by:
            case "read":
                async with db.snapshot() as snap:
                    assert await bank.total_by_get(snap) == bank.TOTAL
            case "scan":
                async with db.snapshot() as snap:
                    assert await bank.total_by_scan(snap, reverse=made) == bank.TOTAL
            case "write":
                async with db.transaction() as txn:  # reads nothing: it meets the locks when it writes
                    for column, name in bank.ACCOUNTS:
                        txn.set(column, name, 7)
                async with db.snapshot() as snap:
                    assert await bank.total_by_get(snap) == 7 * len(bank.ACCOUNTS)
                await trio.testing.wait_all_tasks_blocked()
                assert not machine.locks()
                return
    await machine.swept()
    await intact(machine, moved=moved)


@pytest.mark.parametrize("number", range(STEPS[True]))
async def test_all_that_a_dead_client_sent_may_come_again(number: int) -> None:  # T5 T6 T7
    """After its locks were settled every message of it arrives once more; then again, backwards."""
    machine = await opened(True)
    async with machine.crashing(number, made=True) as (db, store):
        store.plan = lambda mutation, n: Fault.REPEAT
        with contextlib.suppress(CrashedError, perco.CommitUnknown):
            await db.run(bank.scatter, SOURCE, 55)
        await trio.testing.wait_all_tasks_blocked()
        await machine.swept()
        again = [*store.late, *reversed(store.late)]
        assert len(again) == 2 * (number + 1)
        for mutation in again:
            await machine.store.apply([mutation])
    await machine.swept()
    await intact(machine, moved=number >= PARTS[True])


# ------------------------------------------------------------ one fault


@pytest.mark.parametrize("fault", [Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.DELAY, Fault.REPEAT])
@pytest.mark.parametrize(("groups", "number"), ALL)
async def test_a_lost_reply_at_any_step_is_not_an_abort(groups: bool, number: int, fault: Fault) -> None:  # T4 T6
    machine = await opened(groups)
    async with machine.opened(sweeper=True) as db:
        store = faulty(db, at(number, fault))
        async with db.transaction() as txn:
            await bank.scatter(txn, SOURCE, 55)
        assert txn.outcome == "committed"
        await trio.testing.wait_all_tasks_blocked()
        assert store.fired[fault] == 1
        assert await store.deliver_late() == (fault in (Fault.DELAY, Fault.REPEAT))
    await machine.swept()
    await intact(machine, moved=True)


@pytest.mark.parametrize(("groups", "number"), ALL)
async def test_a_refusal_may_be_the_echo_of_its_own_success(groups: bool, number: int) -> None:  # T6
    """A message was made twice, and the answer to the second copy was told."""
    machine = await opened(groups)
    async with machine.opened() as db:
        store = faulty(db, at(number, Fault.ECHO))

        async def bounded(mutation: object) -> None:
            assert len(store.log) < 100, "it goes round in circles"

        store.before = bounded
        async with db.transaction() as txn:
            await bank.scatter(txn, SOURCE, 55)
        assert txn.outcome == "committed"
        await trio.testing.wait_all_tasks_blocked()
        assert store.fired[Fault.ECHO] == 1
    await intact(machine, moved=True)


@pytest.mark.parametrize("number", range(PARTS[True]))
async def test_an_echo_and_a_conflict_leave_no_lock(number: int) -> None:  # T5 T6
    """One part was made twice and says refused; another is refused by a later record: all is let go."""
    machine = await opened(True)
    async with machine.opened() as db:
        late = await db.begin()
        async with db.transaction() as txn:
            txn.set(*bank.ACCOUNTS[6], bank.OPENING)
        await bank.scatter(late, SOURCE, 55)
        await trio.testing.wait_all_tasks_blocked()
        store = faulty(db, at(number, Fault.ECHO))
        with pytest.raises(perco.WriteConflict):
            await late.commit()
        await trio.testing.wait_all_tasks_blocked()
        assert store.fired[Fault.ECHO] == 1
        assert await db.outcome(late.token) == 0
    await machine.swept()
    await intact(machine, moved=False)


@pytest.mark.parametrize(("groups", "number"), [(g, n) for g, n in ALL if n <= PARTS[g]])
async def test_a_store_that_cannot_write_aborts(groups: bool, number: int) -> None:  # S4
    """Prewrite or primary: StoreFull, nothing moved, no lock left."""
    machine = await opened(groups)
    async with machine.opened() as db:
        store = faulty(db, at(number, Fault.FAIL))
        with pytest.raises(perco.errors.StoreFull):
            async with db.transaction() as txn:
                await bank.scatter(txn, SOURCE, 55)
        assert store.fired[Fault.FAIL] == 1
        assert txn.outcome == "aborted"
        assert await db.outcome(txn.token) == 0
        await trio.testing.wait_all_tasks_blocked()
        assert not machine.locks()
    await intact(machine, moved=False)


async def test_a_secondary_that_cannot_be_written_is_still_read(groups: bool) -> None:  # S4 T9
    """Committed is committed: readers answer from the lock until there is space again."""
    machine = await opened(groups)
    async with machine.opened() as db:
        full = True
        store = faulty(db, lambda mutation, n: Fault.FAIL if full and n > PARTS[groups] else None)
        async with db.transaction() as txn:
            await bank.scatter(txn, SOURCE, 55)
        await trio.testing.wait_all_tasks_blocked()
        async with db.snapshot() as snap:
            assert await bank.total_by_get(snap) == await bank.total_by_scan(snap) == bank.TOTAL
            assert await snap.get(*SOURCE) == bank.OPENING - 55
        assert store.fired[Fault.FAIL] >= PARTS[groups] - 1
        assert machine.locks()
        full = False
    await machine.swept()
    await intact(machine, moved=True)


async def test_a_dead_lock_that_cannot_be_settled_is_read_past(groups: bool) -> None:  # S4 T9
    machine = await opened(groups)
    async with machine.crashing(PARTS[groups] - 1, made=True) as (db, _):
        with pytest.raises(CrashedError):
            await db.run(bank.scatter, SOURCE, 55)
        await trio.testing.wait_all_tasks_blocked()
    assert machine.locks() == len(bank.ACCOUNTS)
    async with machine.opened() as db:
        store = faulty(db, on(["rollback", "marker"], Fault.FAIL, times=1000))
        async with db.snapshot() as snap:
            assert await bank.total_by_get(snap) == await bank.total_by_scan(snap) == bank.TOTAL
        assert store.fired[Fault.FAIL]
        with pytest.raises(perco.errors.StoreFull):  # a writer cannot get past
            await db.options(attempts=1).run(bank.move, SOURCE, TARGET, 1)
    await machine.swept()
    await intact(machine, moved=False)


@pytest.mark.parametrize("fault", [Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.DELAY, Fault.REPEAT])
@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("committed", [False, True])
async def test_a_lost_reply_during_recovery(
    autojump_clock: trio.testing.MockClock, groups: bool, committed: bool, number: int, fault: Fault
) -> None:  # T5 T6 T8
    machine = await crashed_before_or_after_the_commit(groups, committed)
    async with machine.opened() as db:
        store = faulty(db, at(number, fault))
        inside(db).background.start(local_owner(db).sweeper.run, "sweeper")
        while not local_owner(db).sweeper.clean:  # noqa: ASYNC110
            await trio.sleep(1)
        assert store.fired[fault] == 1
        await store.deliver_late()
    await machine.swept()
    await intact(machine, moved=committed)


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("committed", [False, True])
async def test_a_recovery_that_crashes_is_recovered(groups: bool, committed: bool, number: int, made: bool) -> None:
    """T5 T6 T8: at every step of the sweeper."""
    machine = await crashed_before_or_after_the_commit(groups, committed)
    before = machine.locks()
    async with machine.crashing(number, made=made) as (db, store):
        with pytest.raises(CrashedError):
            await local_owner(db).sweeper._sweep()
        assert len(store.log) == number + made
    assert machine.locks() == before - number - made
    await machine.swept()
    await intact(machine, moved=committed)


async def crashed_before_or_after_the_commit(groups: bool, committed: bool) -> Machine:
    machine = await opened(groups)
    async with machine.crashing(PARTS[groups] - (not committed), made=True) as (db, _):
        with contextlib.nullcontext() if committed else pytest.raises(CrashedError):
            await db.run(bank.scatter, SOURCE, 55)
        await trio.testing.wait_all_tasks_blocked()
    assert machine.locks() == len(bank.ACCOUNTS) - committed * (2 if groups else 1)
    return machine


# ------------------------------------------------------------ many faults


async def test_a_request_to_commit_that_comes_late_after_all(groups: bool) -> None:  # T4
    """It was taken for lost; sent again the store was full; meanwhile the first had arrived: committed."""
    machine = await opened(groups)
    async with machine.opened() as db:
        store: FaultyRowStore

        def plan(mutation: object, number: int) -> Fault | None:
            return {PARTS[groups]: Fault.DELAY, PARTS[groups] + 1: Fault.FAIL}.get(number)

        async def before(mutation: object) -> None:
            if len(store.log) == PARTS[groups] + 2:  # now it would let go
                assert await store.deliver_late() == 1

        store = use(db, FaultyRowStore(inside(db).driver.store, plan, before=before))
        async with db.transaction() as txn:
            await bank.scatter(txn, SOURCE, 55)
        assert store.fired == {Fault.DELAY: 1, Fault.FAIL: 1}
        assert txn.outcome == "committed"
        await trio.testing.wait_all_tasks_blocked()
    await intact(machine, moved=True)


async def test_a_commit_sent_again_that_fails_is_unknown_while_the_first_may_arrive(groups: bool) -> None:  # T4 T10
    """The request was taken for lost; sent again it failed, and so did the release: nobody knows the outcome yet."""
    machine = await opened(groups)
    async with machine.opened() as db:
        store: FaultyRowStore

        def plan(mutation: object, number: int) -> Fault | None:
            return {PARTS[groups]: Fault.DELAY, PARTS[groups] + 1: Fault.FAIL}.get(number)

        async def before(mutation: object) -> None:
            if len(store.log) == PARTS[groups] + 2:
                raise perco.errors.SessionEnded("the session has ended")

        store = use(db, FaultyRowStore(inside(db).driver.store, plan, before=before))
        with pytest.raises(perco.CommitUnknown) as caught:
            async with db.transaction() as txn:
                await bank.scatter(txn, SOURCE, 55)
        assert store.fired == {Fault.DELAY: 1, Fault.FAIL: 1}
        assert isinstance(caught.value.__cause__, perco.errors.SessionEnded)
        assert txn.outcome == "unknown"
        store.before = None
        assert await store.deliver_late() == 1
        assert await db.outcome(txn.token) > 0
    await machine.swept()
    await intact(machine, moved=True)


@pytest.mark.parametrize("by", ["itself", "another", "another, after it was sent again"])
async def test_a_release_that_fails_after_the_primary_is_rolled_back_is_abort(groups: bool, by: str) -> None:  # T4
    """The request to commit was lost, and by now it can do nothing any more."""
    machine = await opened(groups)
    async with machine.opened() as db:
        store: FaultyRowStore
        commit = PARTS[groups]
        fails = commit + 1 if by == "another" else commit + 3  # its first release of a secondary

        def plan(mutation: object, number: int) -> Fault | None:
            if number == commit:
                return Fault.LOSE_REQUEST
            return Fault.FAIL if by != "another" and number == commit + 1 else None

        async def roll_back() -> None:
            async with machine.opened() as other:
                assert await other.outcome(txn.token) == 0

        async def looking() -> None:
            if by == "another" and len(store.log) == commit + 1:
                store.looking = None
                await roll_back()

        async def before(mutation: object) -> None:
            if by == "another, after it was sent again" and len(store.log) == commit + 2:
                await roll_back()
            if len(store.log) == fails:
                store.before = None
                raise perco.errors.SessionEnded("the session has ended")

        store = use(db, FaultyRowStore(inside(db).driver.store, plan, before=before, looking=looking))
        with pytest.raises(perco.errors.SessionEnded):
            async with db.transaction() as txn:
                await bank.scatter(txn, SOURCE, 55)
        assert store.before is None
        assert store.fired[Fault.LOSE_REQUEST] == 1
        assert txn.outcome == "aborted"
        await trio.testing.wait_all_tasks_blocked()
    await machine.swept()
    await intact(machine, moved=False)


async def test_a_commit_that_another_ruled_out_leaves_no_lock(groups: bool) -> None:  # T5
    """The other has rolled back the primary alone; the rest of its part is still locked."""
    machine = await opened(groups)
    async with machine.opened() as db:
        store: FaultyRowStore

        async def looking() -> None:
            if len(store.log) == PARTS[groups] + 1:
                store.looking = None
                async with machine.opened() as other:
                    assert await other.outcome(txn.token) == 0

        store = use(db, FaultyRowStore(inside(db).driver.store, on("commit", Fault.LOSE_REQUEST), looking=looking))
        with pytest.raises(perco.errors.RolledBack):
            async with db.transaction() as txn:
                await bank.scatter(txn, SOURCE, 55)
        assert store.looking is None
        assert not machine.locks()
    await intact(machine, moved=False)


async def test_a_late_commit_whose_record_was_collected_is_unknown(
    monkeypatch: pytest.MonkeyPatch, groups: bool
) -> None:  # T4 R5
    """As after the end of a client's session, nothing holds its start. Its release, sent in vain, finds no trace."""
    machine = await opened(groups)
    async with machine.opened() as db:
        store: FaultyRowStore

        def plan(mutation: object, number: int) -> Fault | None:
            return {PARTS[groups]: Fault.DELAY, PARTS[groups] + 1: Fault.FAIL}.get(number)

        async def watermark() -> int:
            return txn.start_ts + 100

        async def before(release: Mutation) -> None:
            if len(store.log) != PARTS[groups] + 2:
                return
            store.before = None
            [commit] = store.late
            assert await store.deliver_late() == 1
            async with machine.opened() as other:
                await other.run(bank.scatter, SOURCE, 55)
            # What a vacuum then removes.
            row, _, writes = commit.rows[0]
            [(group, column, ts, _)] = [write for write in writes if write[0] == WRITE][:1]
            [verdict] = await machine.store.apply([Mutation(commit.table, ((row, (), ((group, column, ts, None),)),))])
            assert verdict is APPLIED
            monkeypatch.setattr(inside(db).oracle, "watermark", watermark)

        store = use(db, FaultyRowStore(inside(db).driver.store, plan, before=before))
        with pytest.raises(perco.CommitUnknown, match="may have been collected"):
            async with db.transaction() as txn:
                await bank.scatter(txn, SOURCE, 55)
        assert store.fired == {Fault.DELAY: 1, Fault.FAIL: 1}
        assert txn.outcome == "unknown"


@pytest.mark.parametrize("ends", [False, True])
async def test_a_commit_below_the_floor_that_left_no_trace_is_soon_unknown(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock, groups: bool, ends: bool
) -> None:  # T4 T13 R5
    """No marker can be put there any more: the primary is read once more, and that decides. `ends`: a client's session
    does, before the watermark is read."""
    machine = await opened(groups)
    async with machine.opened() as db:
        store: FaultyRowStore

        async def watermark() -> int:
            nonlocal ends
            if ends:
                ends = False
                raise perco.errors.SessionEnded("the session has ended")
            return txn.start_ts + 100

        async def looking() -> None:
            if len(store.log) != PARTS[groups] + 1:
                return
            store.looking = None
            row, _, writes = commits[0].rows[0]
            [(group, column, ts, _)] = [write for write in writes if write[0] == LOCK][:1]
            gone = Mutation(commits[0].table, ((row, (), ((group, column, ts, None),)),))
            assert await machine.store.apply([gone]) == [APPLIED]
            for tablet in machine.store.tablets():
                await tablet.raise_floor(txn.start_ts + 100)
            monkeypatch.setattr(inside(db).oracle, "watermark", watermark)

        commits: list[Mutation] = []

        async def before(mutation: Mutation) -> None:
            if len(store.log) == PARTS[groups]:
                commits.append(mutation)

        plan = at(PARTS[groups], Fault.LOSE_REQUEST)
        store = use(db, FaultyRowStore(inside(db).driver.store, plan, before=before, looking=looking))
        began = trio.current_time()
        with pytest.raises(perco.CommitUnknown, match="may have been collected"):
            async with db.transaction() as txn:
                await bank.scatter(txn, SOURCE, 55)
        assert (store.looking, ends) == (None, False)
        assert trio.current_time() - began < 1


async def test_a_store_that_never_answers_prewrites(autojump_clock: trio.testing.MockClock, groups: bool) -> None:
    """Bounded: it is an error of the store, and nothing was written."""
    machine = await opened(groups)
    async with machine.opened() as db:
        store = faulty(db, lambda mutation, n: Fault.LOSE_REQUEST)
        with trio.fail_after(3600), pytest.raises(perco.Unavailable):
            async with db.transaction() as txn:
                await bank.scatter(txn, SOURCE, 55)
        assert txn.outcome == "aborted"
        assert store.fired[Fault.LOSE_REQUEST] > PARTS[groups]
    await machine.swept()
    await intact(machine, moved=False)


async def test_a_store_that_never_answers_the_commit(autojump_clock: trio.testing.MockClock, groups: bool) -> None:
    """T4: until commit_timeout, then CommitUnknown; asking later tells."""
    machine = await opened(groups)
    async with machine.opened(perco.Options(commit=perco.options.CommitOptions(commit_timeout_s=7))) as db:
        store = faulty(db, on("commit", Fault.LOSE_REQUEST, times=1 << 30))
        began = trio.current_time()
        with pytest.raises(perco.CommitUnknown) as caught:
            async with db.transaction() as txn:
                await bank.scatter(txn, SOURCE, 55)
        assert trio.current_time() - began == pytest.approx(7)
        assert store.fired[Fault.LOSE_REQUEST] > 3
        assert caught.value.token == txn.token
        assert txn.outcome == "unknown"
        assert await db.outcome(txn.token) == 0
    await machine.swept()
    await intact(machine, moved=False)


async def test_reads_that_fail_while_asking_leave_the_outcome_open(groups: bool) -> None:  # T4
    machine = await opened(groups)
    async with machine.opened() as db:
        store = faulty(db)

        async def before(mutation: object) -> None:
            if len(store.log) == PARTS[groups]:
                store.plan = at(PARTS[groups], Fault.LOSE_REPLY)
                store.read_error = OSError("the disk is gone")

        store.before = before
        with pytest.raises(perco.CommitUnknown) as caught:
            async with db.transaction() as txn:
                await bank.scatter(txn, SOURCE, 55)
        assert isinstance(caught.value.__cause__, OSError)
        assert txn.outcome == "unknown"
        store.read_error = None
        assert await db.outcome(txn.token) > txn.start_ts
    await machine.swept()
    await intact(machine, moved=True)


async def test_each_caller_gets_an_error_of_its_own(groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All mutations of a batch fail with the same error; each raised one has its own traceback and notes."""
    shared = perco.errors.StoreFull("the tests", "full")
    monkeypatch.setattr(faults, "StoreFull", lambda *_: shared)
    machine = await opened(groups)
    async with machine.opened() as db:
        store = faulty(db, on(["prewrite"], Fault.FAIL, times=1000))
        met: list[perco.errors.StoreFull] = []
        for i in range(3):
            with pytest.raises(perco.errors.StoreFull) as found:
                await db.run(bank.scatter, SOURCE, 55)
            found.value.add_note(f"caller {i}")
            met.append(found.value)
        assert store.fired[Fault.FAIL] >= 3
        assert [error.__notes__ for error in met] == [[f"caller {i}"] for i in range(3)]
        assert {str(error) for error in met} == {str(shared)}
        assert not hasattr(shared, "__notes__")
