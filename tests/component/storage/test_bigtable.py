"""A store on Bigtable beyond the contract of a row store: its lease, lost requests and answers, hints."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import perco
from perco.bigtable.hints import Hints
from perco.bigtable.keys import HINT_KEY, row_key
from perco.bigtable.lease import BigtableLease
from perco.bigtable.options import BigtableOptions
from perco.bigtable.rows import BigtableRows
from perco.bigtable.store import BigtableStore
from perco.bigtable.wire import grpc, types
from perco.clock.holds import Holds
from perco.clock.oracle import BOUND_ROW, Oracle, OracleOptions
from perco.clock.pins import Pins
from perco.database.inside import inside
from perco.errors import BackgroundFailure, FormatUnknown, StoreLocked, Unavailable, UsedAfterFork, WriteUnknown
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import (
    ABSENT,
    APPLIED,
    DATA,
    FAILED_LIST,
    LOCK,
    NOTIFY,
    PRESENT,
    TS_MAX,
    Failed,
    Mutation,
    NoReply,
    Refused,
    ScanPage,
    ScanQuery,
    ScanRequest,
)
from tests.component.storage.stores import GROUPS, TABLE, newest, put
from tests.support import bigtable

QUICK = BigtableOptions(call_s=5.0, late_s=0.0, lease_s=60.0, channels=1)
CLAIMED = replace(QUICK, lease_s=3.0)  # where a test waits for a lease to be renewed, or to end
_TABLES = SimpleNamespace(tables=(TABLE,), groups=lambda table: [GROUPS[-1]])  # stands in for a catalogue
WAITING = ScanRequest(TABLE, b"", None, (ScanQuery(NOTIFY, None, 0, TS_MAX, 9),))


@pytest.fixture(autouse=True, params=["emulator", "model"])
def kept_in(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the rows are."""
    with bigtable.modelled() if request.param == "model" else nullcontext():
        yield request.param


# Of a test about the calls themselves, which the model does without.
on_emulator = pytest.mark.parametrize("kept_in", ["emulator"], indirect=True)


@asynccontextmanager
async def opened(url: str, options: BigtableOptions = QUICK) -> AsyncIterator[BigtableStore]:
    store = await BigtableStore.open(url, options)
    try:
        await store.adapt(_TABLES)  # type: ignore[arg-type]
        yield store
    finally:
        await store.aclose()


@pytest.fixture
async def store() -> AsyncIterator[BigtableStore]:
    async with opened(bigtable.fresh()) as made:
        yield made


@contextmanager
def losing(rows: BigtableRows, what: str) -> Iterator[None]:
    """While the block lasts, requests ("before") or answers ("after") are lost."""
    plain = rows.calls._metadata
    rows.calls._metadata = (*plain, ("perco-fault", what))
    try:
        yield
    finally:
        rows.calls._metadata = plain


def of_one(ts: int = 1) -> Mutation:
    """Puts a cell, if there is none."""
    return Mutation(TABLE, [(b"a", [(ABSENT, DATA, 1, 0, TS_MAX)], [(DATA, 1, ts, b"v")])])


def notifying(row: bytes, ts: int = 3, value: bytes | None = b"") -> Mutation:
    return Mutation(TABLE, [(row, [], [(NOTIFY, 1, ts, value)])])


async def found(store: BigtableStore, row: bytes = b"a") -> list[Any]:
    [[cells]] = await store.rows.read([newest(row)])
    return cells


def hints_of(store: BigtableStore) -> list[bytes]:
    """The rows with hints."""
    return [
        row.removeprefix(HINT_KEY[1:] + TABLE.encode() + b"\x00")
        for row, *_ in bigtable.cells_of(store.rows, "")
        if row.startswith(HINT_KEY[1:])
    ]


async def test_a_former_owners_mutations_may_be_late(store: BigtableStore) -> None:  # T13
    """So an owner that has just claimed the store waits, however quiet it has been."""
    with trio.move_on_after(0.1) as scope:
        await store.store.raise_floor(2, wait=True)
    assert scope.cancelled_caught


# ------------------------------------------------------------ lost on the way


@pytest.mark.parametrize(("lost", "made"), [("before", False), ("after", True)])
async def test_a_mutation_without_an_answer_may_have_been_made(store: BigtableStore, lost: str, made: bool) -> None:
    """T4: the store does not send it again."""
    with losing(store.rows, lost):
        [verdict] = await store.rows.apply([of_one()])
    assert isinstance(verdict, NoReply)
    assert bool(await found(store)) == made
    assert await store.rows.apply([of_one()]) == [Refused(0, 0) if made else APPLIED]


async def test_a_read_that_is_lost_is_made_again(store: BigtableStore) -> None:
    assert await store.rows.apply([of_one()]) == [APPLIED]
    async with trio.open_nursery() as nursery:
        lost = losing(store.rows, "before")
        lost.__enter__()

        async def later() -> None:
            while store.rows.calls.made < before + 3:
                await trio.lowlevel.checkpoint()
            lost.__exit__(None, None, None)

        before = store.rows.calls.made
        nursery.start_soon(later)
        assert await found(store) == [(1, b"v")]
    assert store.rows.calls.made >= before + 3


async def test_a_read_that_is_lost_for_ever_is_unavailable() -> None:
    async with opened(bigtable.fresh(), replace(QUICK, call_s=0.2)) as store:
        with losing(store.rows, "before"), pytest.raises(Unavailable, match="does not answer: UNAVAILABLE"):
            await found(store)


@on_emulator
async def test_without_its_table_every_call_says_what_to_do() -> None:
    bigtable.running()
    with pytest.raises(Unavailable, match="perco bigtable init"):
        await BigtableStore.open("bigtable://test/test?prefix=nowhere", QUICK)


async def test_of_calls_at_once_that_exclude_each_other_one_is_made(store: BigtableStore) -> None:  # S1
    verdicts: list[Any] = []

    async def write(ts: int) -> None:
        verdicts.extend(await store.rows.apply([of_one(ts)]))

    async with trio.open_nursery() as nursery:
        for ts in range(1, 21):
            nursery.start_soon(write, ts)
    assert verdicts.count(APPLIED) == 1
    assert verdicts.count(Refused(0, 0)) == 19


@on_emulator
async def test_a_call_that_has_to_wait_too_long_was_not_made() -> None:  # T4
    """For one of the calls in flight to end: the mutation was certainly not sent."""
    async with opened(bigtable.fresh(), replace(QUICK, in_flight=1, call_s=0.2)) as store:
        limit = store.rows.calls._limit
        await store.rows.apply([put(b"b")])
        limit._value = 0  # one that never ends
        [verdict] = await store.rows.apply([of_one()])
        limit._value = 1
        assert isinstance(verdict, Failed)
        assert not await found(store)


async def test_a_scan_that_is_cancelled_cancels_its_call(store: BigtableStore) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await store.rows.scan(ScanRequest(TABLE, b"", None, (ScanQuery(DATA, (1,)),)))
    assert scope.cancelled_caught
    assert await store.rows.apply([of_one()]) == [APPLIED], "the thread goes on"


# ------------------------------------------------------------ the lease


async def test_an_owner_that_renews_its_lease_keeps_the_store() -> None:  # O1
    url = bigtable.fresh()
    async with opened(url, CLAIMED):
        with pytest.raises(StoreLocked, match=f"process {os.getpid()} on "):
            await BigtableStore.open(url, CLAIMED)


async def test_a_store_that_is_given_back_is_claimed_at_once() -> None:  # O1
    url = bigtable.fresh()
    async with opened(url) as first:
        assert await first.rows.apply([of_one()]) == [APPLIED]
    async with opened(url, replace(QUICK, lease_s=1000.0)) as next_one:
        assert await found(next_one) == [(1, b"v")]


async def test_an_owner_that_is_silent_loses_the_store_and_knows() -> None:  # O1
    """As one that was stopped, and goes on when another process owns the store."""
    url = bigtable.fresh()
    async with opened(url, CLAIMED) as first:
        assert first._lease is not None
        first._lease.renew = lambda: None  # type: ignore[method-assign]
        async with opened(url, CLAIMED) as second:
            assert await second.rows.apply([of_one()]) == [APPLIED]
            [verdict] = await first.rows.apply([put(b"z")])
            assert isinstance(verdict, Failed)
            assert isinstance(verdict.error, Unavailable), "its lease is over"
            with pytest.raises(Unavailable):
                await found(first)
            del first._lease.renew
            await trio.to_thread.run_sync(first._lease.join)  # it ends once it knows
            with pytest.raises(StoreLocked):
                first.check()
            assert await second.rows.apply([put(b"b")]) == [APPLIED], "the second still has its lease"
            second.check()


async def test_a_renewal_whose_answer_is_lost_does_not_count_from_the_next(store: BigtableStore) -> None:  # O1
    """Another process counts from the moment when it was made, so the owner has to renew the lease once more."""
    lease = store._lease
    assert lease is not None
    await trio.to_thread.run_sync(lease.end)
    async with opened(store.rows.place.url) as other:
        ours = other._lease
        assert ours is not None
        ours._ending.set()  # the test renews it
        ours.release = lambda: None  # type: ignore[method-assign]
        await trio.to_thread.run_sync(ours.join)

        def renew() -> tuple[int, int]:
            assert ours.renew()
            before, plain = ours._holder.number, ours._write

            def lost(*args: Any, **more: Any) -> Any:
                ours._write = plain
                plain(*args, **more)
                raise LostAnswer

            ours._write = lost
            assert ours.renew() is None
            assert ours.renew()
            ours.close()
            return before, ours._holder.number

        before, after = await trio.to_thread.run_sync(renew)
        assert after == before + 2
        assert (await other._notice()).holder.number == after


async def test_a_renewal_that_hangs_does_not_cost_the_lease(store: BigtableStore) -> None:  # O1
    """There is time for another one before the lease ends."""
    lease = BigtableLease(store.rows.place, store._ours, 3.0, 0.0)
    waited: list[float] = []

    def hang(request: Any, timeout: float, **more: Any) -> Any:
        waited.append(timeout)
        raise LostAnswer

    def renew() -> None:
        lease.renew()
        plain, lease._write = lease._write, hang
        assert lease.renew() is None
        lease._write = plain
        assert lease.renew() is True
        lease.close()

    await trio.to_thread.run_sync(renew)
    assert waited == [1.0]


class LostAnswer(grpc().RpcError):  # type: ignore[misc]
    def code(self) -> Any:
        return SimpleNamespace(name="UNAVAILABLE")

    def details(self) -> str:
        return "lost"


async def test_of_two_claims_at_once_one_holds() -> None:  # O1
    url = bigtable.fresh()
    outcomes: list[str] = []
    all_told = trio.Event()

    def tell(outcome: str) -> None:
        outcomes.append(outcome)
        if len(outcomes) == 4:
            all_told.set()

    async def claim() -> None:
        try:
            async with opened(url, CLAIMED):
                tell("owner")
                await all_told.wait()
        except StoreLocked:
            tell("locked")

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(claim)
    assert sorted(outcomes) == ["locked", "locked", "locked", "owner"]


async def test_a_claim_whose_answer_is_lost_holds(monkeypatch: pytest.MonkeyPatch) -> None:  # O1 T4
    """The row tells whose it is."""
    plain, lost = BigtableStore._asked, 0

    async def asked(self: BigtableStore, request: Any) -> Any:
        nonlocal lost
        if lost or not hasattr(request, "predicate_filter"):
            return await plain(self, request)
        lost += 1
        with losing(self.rows, "after"):
            return await plain(self, request)

    monkeypatch.setattr(BigtableStore, "_asked", asked)
    async with opened(bigtable.fresh()) as store:
        store.check()
    assert lost


async def test_an_owner_that_is_deposed_is_told_that_it_lost_the_store() -> None:  # O1
    url = bigtable.fresh()
    options = perco.Options(bigtable=CLAIMED)

    async def lose() -> None:
        async with perco.open(url, perco.Schema(), options=options) as db:
            place: Any = inside(db).place
            place._lease.deposed = StoreLocked("here", None, "another")
            await trio.sleep_forever()

    with pytest.raises(BackgroundFailure, match="another"):
        await lose()


async def test_another_format_is_refused() -> None:
    url = bigtable.fresh()
    async with opened(url) as store:
        row = (b"format", [], [(DATA, 0, 1, None), (DATA, 0, 99, b"")])
        assert await store.rows.apply([Mutation(SYSTEM_TABLE, [row])]) == [APPLIED]
    with pytest.raises(FormatUnknown, match="format 99"):
        await BigtableStore.open(url, QUICK)


async def test_a_child_after_a_fork_is_refused(store: BigtableStore) -> None:
    store.forked = True
    try:
        with pytest.raises(UsedAfterFork):
            await found(store)
    finally:
        store.forked = False


# ------------------------------------------------------------ hints


async def test_what_waits_is_found_by_hints_which_go_when_it_has_gone(store: BigtableStore) -> None:  # N7
    rows = [b"%03d" % number for number in range(250)]
    assert set(await store.rows.apply([notifying(row) for row in rows])) == {APPLIED}
    assert sorted(hints_of(store)) == rows
    request, seen, pages = WAITING, [], 0
    while True:
        page = await store.rows.scan(request)
        pages += 1
        seen += [row for row, _ in page.rows]
        if page.next is None:
            break
        request = request._replace(start=page.next)
    assert seen == rows
    assert pages == 3
    await store.rows.apply([notifying(row, value=None) for row in rows[:40]])
    assert len((await store.rows.scan(WAITING)).rows) == 60
    assert sorted(hints_of(store)) == rows[40:]
    assert store.rows.hints.removed == 40


async def test_the_hint_of_a_mutation_that_may_still_arrive_stays() -> None:  # N7
    async with opened(bigtable.fresh(), replace(QUICK, late_s=1000.0)) as store:
        plain = store.rows.calls.ask

        async def ask(requests: Any, deadline: float) -> Any:
            if not hasattr(requests[0], "mutations") or requests[0].row_key.startswith(HINT_KEY):
                return await plain(requests, deadline)
            with losing(store.rows, "before"):
                return await plain(requests, deadline)

        store.rows.calls.ask = ask  # type: ignore[method-assign]
        [verdict] = await store.rows.apply([notifying(b"a")])
        assert isinstance(verdict, NoReply)
        for _ in range(2):
            assert await store.rows.scan(WAITING) == ScanPage([], None)
            assert hints_of(store) == [b"a"]


async def test_a_mutation_whose_hint_is_lost_is_not_sent() -> None:  # N7
    async with opened(bigtable.fresh(), replace(QUICK, call_s=0.3)) as store:
        with losing(store.rows, "after"):
            [verdict] = await store.rows.apply([notifying(b"a")])
        assert isinstance(verdict, Failed)
        assert list(bigtable.cells_of(store.rows, TABLE)) == []
        assert await store.rows.scan(WAITING) == ScanPage([], None)


async def test_a_hint_that_is_written_while_another_is_removed_stays(store: BigtableStore) -> None:  # N7
    """The scan has read the row, and found nothing in it; only the stamps that it saw may go."""
    assert await store.rows.apply([notifying(b"a")]) == [APPLIED]
    assert await store.rows.apply([notifying(b"a", value=None)]) == [APPLIED]
    plain, again = store.rows.calls.ask, 0

    async def ask(requests: Any, deadline: float) -> Any:
        nonlocal again
        if getattr(requests[0], "row_key", b"").startswith(HINT_KEY) and not again:  # the removal
            again += 1
            store.rows.calls.ask = plain  # type: ignore[method-assign]
            assert await store.rows.apply([notifying(b"a", 5)]) == [APPLIED]
        return await plain(requests, deadline)

    store.rows.calls.ask = ask  # type: ignore[method-assign]
    assert await store.rows.scan(WAITING) == ScanPage([], None)
    assert again
    assert [row for row, _ in (await store.rows.scan(WAITING)).rows] == [b"a"]


# ------------------------------------------------------------ a former owner's messages


async def test_a_former_oracles_range_that_arrives_late_is_not_handed_out() -> None:  # O1
    url = bigtable.fresh()
    options = OracleOptions(range_size=10)
    async with opened(url) as first:
        former = Oracle(first.store, options, time.time)
        await former.start()
        assert [await former.draw() for _ in range(3)] == [1, 2, 3]
        late = Mutation(
            SYSTEM_TABLE, ((BOUND_ROW, [(ABSENT, DATA, 0, 11, TS_MAX)], [(DATA, 0, 20, b""), (DATA, 0, 10, None)]),)
        )
        call = first.rows._call(late)
        assert first._lease is not None
        await trio.to_thread.run_sync(first._lease.end)
        async with opened(url) as second:
            oracle = Oracle(second.store, options, time.time)
            await oracle.start()
            [answer] = await first.rows.calls.ask([call], trio.current_time() + 5)
            assert not answer.predicate_matched
            assert [await oracle.draw() for _ in range(11)] == list(range(21, 32))


@on_emulator
async def test_nothing_is_sent_after_its_deadline(store: BigtableStore) -> None:  # T13
    """As by a process that was stopped between the decision to send a mutation and the call."""
    [answer] = await store.rows.calls.ask([store.rows._call(of_one())], trio.current_time() - 1)
    assert not answer.sent
    assert not await found(store)


async def test_an_owner_that_is_stopped_after_a_hint_does_not_send_the_mutation(store: BigtableStore) -> None:  # N7
    plain = store.rows.calls.ask

    async def ask(requests: Any, deadline: float) -> Any:
        answers = await plain(requests, deadline)
        if requests[0].row_key.startswith(HINT_KEY):
            assert store._lease is not None
            store._lease.deposed = StoreLocked("here", None, "another")
        return answers

    store.rows.calls.ask = ask  # type: ignore[method-assign]
    [verdict] = await store.rows.apply([notifying(b"a")])
    assert isinstance(verdict, Failed)
    assert isinstance(verdict.error, StoreLocked)
    assert list(bigtable.cells_of(store.rows, TABLE)) == []


# ------------------------------------------------------------ calls, and many hints about one row


def stamps_of(store: BigtableStore) -> list[tuple[bytes, int]]:
    """All hints."""
    return [(name, ts) for row, _, name, ts, _ in bigtable.cells_of(store.rows, "") if row.startswith(HINT_KEY[1:])]


async def test_of_a_row_that_always_has_something_waiting_many_hints_become_one(store: BigtableStore) -> None:  # N7
    assert await store.rows.apply([notifying(b"a", ts) for ts in range(1, 33)]) == [APPLIED] * 32
    assert len((await store.rows.scan(WAITING)).rows) == 1
    assert len(hints_of(store)) == 32
    assert await store.rows.apply([notifying(b"a", 40)]) == [APPLIED]
    before = stamps_of(store)
    assert len((await store.rows.scan(WAITING)).rows) == 1
    [stamp] = stamps_of(store)
    assert stamp not in before, "another process may be removing any of those"
    assert await store.rows.apply([notifying(b"a", 50)]) == [APPLIED]
    await store.rows.apply([notifying(b"a", ts, None) for ts in (*range(1, 33), 40, 50)])
    assert await store.rows.scan(WAITING) == ScanPage([], None)
    assert hints_of(store) == []


async def test_many_hints_stay_if_the_new_one_is_not_written(store: BigtableStore) -> None:  # N7
    assert await store.rows.apply([notifying(b"a", ts) for ts in range(1, 41)]) == [APPLIED] * 40
    plain, lost = store.rows.calls.ask, 0

    async def ask(requests: Any, deadline: float) -> Any:
        nonlocal lost
        if getattr(requests[0], "row_key", b"").startswith(HINT_KEY):
            lost += 1
            with losing(store.rows, "before"):
                return await plain(requests, deadline)
        return await plain(requests, deadline)

    store.rows.calls.ask = ask  # type: ignore[method-assign]
    assert len((await store.rows.scan(WAITING)).rows) == 1
    assert lost == 1, "no removal was sent"
    assert len(hints_of(store)) == 40


async def foreign(store: BigtableStore, mutation: Mutation) -> Hints:
    """The hint that another process has written for a mutation."""
    other = Hints(store.rows.place, QUICK)
    [answer] = await store.rows.calls.ask([other.begin(mutation)[1]], trio.current_time() + 5)
    assert not isinstance(answer, BaseException)
    return other


async def test_the_hint_of_another_process_stays_as_long_as_its_mutation_may_arrive() -> None:  # N7
    """Only that process knows whether the mutation was answered."""
    async with opened(bigtable.fresh(), replace(QUICK, call_s=5.0, late_s=2.0)) as store:
        await foreign(store, notifying(b"a"))
        times = iter([100.0, 106.9, 107.0])
        plain, store.rows.hints.removable = store.rows.hints.removable, lambda cells: at(next(times), cells)  # type: ignore

        def at(now: float, cells: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trio, "current_time", lambda: now)
                return plain(cells)

        for left in (1, 1, 0):
            assert await store.rows.scan(WAITING) == ScanPage([], None)
            assert len(hints_of(store)) == left


async def test_a_hint_about_a_lock_that_has_gone_goes_at_once(store: BigtableStore) -> None:  # N7
    """Any process may remove it: without the lock, which was there before the hint, the mutation has no effect."""
    commit = Mutation(TABLE, [(b"a", [(PRESENT, LOCK, 1, 2, 2)], [(LOCK, 1, 2, None), (NOTIFY, 1, 3, b"")])])
    await store.rows.apply([Mutation(TABLE, [(b"a", [], [(LOCK, 1, 2, b"")])])])
    await foreign(store, commit)
    assert await store.rows.scan(WAITING) == ScanPage([], None)
    assert hints_of(store) == [b"a"]
    assert await store.rows.apply([commit]) == [APPLIED]
    assert [row for row, _ in (await store.rows.scan(WAITING)).rows] == [b"a"]
    assert len(stamps_of(store)) == 2
    await store.rows.apply([notifying(b"a", value=None)])
    assert await store.rows.scan(WAITING) == ScanPage([], None)
    assert hints_of(store) == []


async def test_what_replaces_a_notify_cell_needs_no_hint(store: BigtableStore) -> None:  # N7
    """The row has one already."""
    assert await store.rows.apply([notifying(b"a")]) == [APPLIED]
    calls, stamps = store.rows.calls.made, stamps_of(store)
    moved = Mutation(TABLE, [(b"a", [(PRESENT, NOTIFY, 1, 3, 3)], [(NOTIFY, 1, 3, None), (FAILED_LIST, 1, 3, b"x")])])
    assert await store.rows.apply([moved]) == [APPLIED]
    assert store.rows.calls.made == calls + 1
    await store.rows.scan(WAITING)
    assert stamps_of(store) == stamps


async def test_after_the_store_was_closed_a_call_fails_at_once(store: BigtableStore) -> None:
    await store.rows.calls.aclose()
    [verdict] = await store.rows.apply([of_one()])
    assert isinstance(verdict, Failed)
    assert "has been closed" in str(verdict.error)


@on_emulator
async def test_ctrl_c_does_not_come_between_the_beginning_of_calls_and_the_wait(store: BigtableStore) -> None:
    """The calls would go on in the thread, and wake a task that waits for something else by then."""
    loop = store.rows.calls._loop
    assert loop is not None
    protected = []
    plain = loop.call_soon_threadsafe

    def begin(act: Any) -> None:
        protected.append(trio.lowlevel.currently_ki_protected())
        plain(act)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_soon_threadsafe", begin)
        await found(store)
    assert protected == [True]


@on_emulator
async def test_a_scan_that_takes_too_long_gets_on_by_what_it_has_passed(store: BigtableStore) -> None:
    """A long range in which there is little: the server tells how far it is."""
    told = types().ReadRowsResponse(last_scanned_row_key=row_key(TABLE, b"m"))

    class Slow(grpc().RpcError):  # type: ignore[misc]
        def code(self) -> Any:
            return SimpleNamespace(name="DEADLINE_EXCEEDED")

        def details(self) -> str:
            return "slow"

    async def responses() -> AsyncIterator[Any]:
        yield told
        raise Slow

    request = ScanRequest(TABLE, b"", None, (ScanQuery(DATA, (1,)),))
    assert await store.rows.apply([put(b"a"), put(b"z")]) == [APPLIED, APPLIED]
    stubs = store.rows.calls._stubs[0]
    plain = stubs[types().ReadRows]
    stubs[types().ReadRows] = lambda *_, **more: responses()
    page = await store.rows.scan(request)
    stubs[types().ReadRows] = plain
    assert page == ScanPage([], b"m\x00")
    assert [row for row, _ in (await store.rows.scan(request._replace(start=page.next or b""))).rows] == [b"z"]


@on_emulator
async def test_without_credentials_a_program_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("BIGTABLE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(Unavailable, match=r"no credentials for Google's services(.|\n)*gcloud auth"):
        await BigtableStore.open("bigtable://acme/main?prefix=web", QUICK)


async def test_a_hint_stays_while_its_row_is_locked(store: BigtableStore) -> None:  # N1 N7
    """The mutation that puts the notify cell replaces a lock, however late it arrives."""
    lock = Mutation(TABLE, [(b"a", [], [("lock", 1, 2, b"")])])
    await store.rows.apply([lock, notifying(b"a"), notifying(b"a", value=None)])
    assert await store.rows.scan(WAITING) == ScanPage([], None)
    assert hints_of(store) == [b"a"]
    await store.rows.apply([Mutation(TABLE, [(b"a", [], [("lock", 1, 2, None)])])])
    assert await store.rows.scan(WAITING) == ScanPage([], None)
    assert hints_of(store) == []


async def hint_is_written_again(rows: BigtableRows) -> None:
    """Lose the first hint twice: the mutation is sent once it was written."""
    plain, sent = rows.calls.ask, list[str]()

    async def ask(requests: Any, deadline: float) -> Any:
        key = getattr(requests[0], "row_key", b"")  # reads have none
        what = "hint" if key.startswith(HINT_KEY) else "mutation" if key.startswith(TABLE.encode()) else ""
        if what:
            sent.append(what)
        if what == "hint" and sent.count("hint") <= 2:
            with losing(rows, "before"):
                return await plain(requests, deadline)
        return await plain(requests, deadline)

    rows.calls.ask = ask  # type: ignore[method-assign]
    assert await rows.apply([notifying(b"a")]) == [APPLIED]
    assert sent == ["hint", "hint", "hint", "mutation"]


async def test_a_hint_that_is_lost_is_written_again(store: BigtableStore) -> None:  # N7
    await hint_is_written_again(store.rows)
    assert hints_of(store) == [b"a"]


async def test_what_was_made_after_the_lease_is_not_acknowledged(store: BigtableStore) -> None:  # O1
    """The next owner has read the catalogue and the pins by then."""
    plain = store.rows.calls.ask

    async def ask(requests: Any, deadline: float) -> Any:
        answers = await plain(requests, deadline)
        assert store._lease is not None
        store._lease.until = 0.0
        return answers

    store.rows.calls.ask = ask  # type: ignore[method-assign]
    store._lease.renew = lambda: None  # type: ignore[union-attr, method-assign]
    [verdict] = await store.rows.apply([of_one()])
    assert isinstance(verdict, NoReply)
    assert "perhaps too late" in verdict.reason


async def test_a_pin_that_a_former_owner_has_put_late_is_kept_and_told() -> None:  # T15
    holds = [Holds(), Holds()]
    url = bigtable.fresh()
    async with opened(url) as first:
        former = Pins(first.store, holds[0], lambda: 1000, lambda: 5)
        verdicts: list[Any] = []
        plain = first.rows.apply

        async def kept(mutations: Any) -> Any:
            verdicts.extend(mutations)
            return [NoReply("late")]

        first.store._store.apply = kept  # type: ignore[method-assign]
        with pytest.raises(WriteUnknown):
            await former.put("nightly", "me", 3, 60.0, "one")
        first.rows.apply = plain  # type: ignore[method-assign]
        call = first.rows._call(verdicts[0])
        assert first._lease is not None
        await trio.to_thread.run_sync(first._lease.end)
        async with opened(url) as second:
            pins = Pins(second.store, holds[1], lambda: 1000, lambda: 5)
            await pins.load()
            await first.rows.calls.ask([call], trio.current_time() + 5)
            with pytest.raises(Unavailable, match="former owner"):
                await pins.put("nightly", "other", 4, 60.0, "two")
            assert holds[1].pins["nightly"].ts == 3


@on_emulator
async def test_the_server_says_where_a_table_may_be_cut(store: BigtableStore) -> None:
    rows = [b"r%04d" % number for number in range(1000)]
    assert set(await store.rows.apply([put(row, b"x" * 100) for row in rows])) == {APPLIED}
    starts = await store.rows.sample(TABLE, 4)  # the emulator samples one row of a hundred, at random
    assert starts[0] == b""
    assert 2 <= len(starts) <= 4  # all of it in one sample: once in 20 000 times
    assert set(starts[1:]) <= set(rows)
    assert all(low < high for low, high in pairwise(starts))
