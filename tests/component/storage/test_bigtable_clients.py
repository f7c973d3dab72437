"""Clients that read and write a store on Bigtable by themselves: their tickets, permits and floors.

Time is virtual, and stands still while a call to the emulator is in flight; a call that is lost takes real time."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio

import perco
from perco.bigtable import client as client_module, rows as rows_module
from perco.bigtable.address import Place
from perco.bigtable.chunks import ReadCell, ReadRow
from perco.bigtable.client import ClientRows, address_of
from perco.bigtable.keys import HINT_KEY, MICROS, OWNER_KEY, PROTOCOL_FAMILY, TICKET_KEY, qualifier
from perco.bigtable.owner_row import Notice, admit, notice, raise_floor, serve_at
from perco.bigtable.rows import FORMAT, FORMAT_ROW, BigtableRows
from perco.bigtable.store import BigtableStore
from perco.errors import FormatUnknown, SessionEnded, StoreLocked, TransactionClosed, Unavailable, UsedAfterFork
from perco.rpc.channel import WireOptions
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import (
    ABSENT,
    APPLIED,
    DATA,
    LOCK,
    NOTIFY,
    TS_MAX,
    WRITE,
    Failed,
    Mutation,
    NoReply,
    Refused,
    ScanQuery,
    ScanRequest,
)
from tests.component.storage.sessions import Session
from tests.component.storage.stores import TABLE, put
from tests.component.storage.test_bigtable import (
    QUICK as PLAIN,
    hint_is_written_again,
    hints_of,
    losing,
    notifying,
    opened,
)
from tests.support import bigtable

QUICK = replace(PLAIN, call_s=4.0, late_s=1.0)
_WAITING = ScanRequest(TABLE, b"", None, (ScanQuery(NOTIFY, None, 0, TS_MAX, 1),))
LASTS_S = 5.0


@pytest.fixture
def clock(autojump_clock: Any) -> Any:
    return autojump_clock


@pytest.fixture(autouse=True, params=["emulator", "model"])
def virtual(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Virtual time, for rows in the emulator or in the table of the simulation."""
    set_clock(monkeypatch, trio.current_time)
    with bigtable.modelled() if request.param == "model" else bigtable.real_time():
        yield request.param


def set_clock(patch: pytest.MonkeyPatch, now: Callable[[], float]) -> None:
    """Of permits."""
    for module in (client_module, rows_module):
        patch.setattr(module, "now", now)


@asynccontextmanager
async def client(store: BigtableStore, name: str = "one") -> AsyncIterator[tuple[ClientRows, Session]]:
    session = Session(store.let_clients_in(), name)
    rows = ClientRows(store.rows.place, QUICK, ticket=session.ask)
    await rows.adopt(store.rows.tables())
    try:
        yield rows, session
    finally:
        await rows.calls.aclose()


@pytest.fixture
async def store(virtual: str) -> AsyncIterator[BigtableStore]:
    async with opened(bigtable.fresh(), QUICK) as made:
        made.store._sent.clear()  # there was no former owner
        yield made


def below(ts: int, row: bytes = b"a") -> Mutation:
    return Mutation(TABLE, [(row, [], [(DATA, 1, ts, b"")])], ts)


async def value(rows: BigtableRows, row: bytes = b"a") -> list[tuple[int, bytes]]:
    [[cells]] = await rows.read([(TABLE, row, [(DATA, 1, 0, TS_MAX, 1)])])
    return cells


async def ends_in(rows: ClientRows, row: bytes = b"b") -> None:
    """Neither reads nor writes: its session has ended."""
    [verdict] = await rows.apply([put(row)])
    assert isinstance(verdict, Failed)
    assert isinstance(verdict.error, SessionEnded)
    with pytest.raises(SessionEnded):
        await value(rows)


def calls(rows: BigtableRows, act: Any, *, before: bool = False) -> None:
    """After each call, or before it, do something: `act` gets the first request."""
    plain = rows.calls.ask

    async def ask(requests: Any, deadline: float) -> Any:
        if before:
            await act(requests[0])
        answers = await plain(requests, deadline)
        if not before:
            await act(requests[0])
        return answers

    rows.calls.ask = ask  # type: ignore[method-assign]


def about(seconds: float) -> Any:
    """The clock of the tests creeps between two jumps."""
    return pytest.approx(seconds, abs=0.05)


async def until(look: Callable[[], Awaitable[Any]], found: Callable[[Any], bool]) -> None:
    with trio.fail_after(1000):
        while not found(await look()):  # noqa: ASYNC110
            await trio.sleep(1)


def row_of(request: Any) -> bytes:
    """The row that a mutation is about; b"" of a read."""
    return bytes(getattr(request, "row_key", b""))


def is_read(request: Any) -> bool:
    """Whether it reads rows of perco's."""
    return hasattr(request, "request") and OWNER_KEY not in request.request.rows.row_keys


async def test_clients_and_the_owner_see_each_others_writes(store: BigtableStore, clock: Any) -> None:
    async with client(store) as (one, session), client(store, "two") as (two, other):
        assert await one.apply([put(b"a", b"x", 3)]) == [APPLIED]
        assert await value(two) == await value(store.rows) == [(3, b"x")]
        assert await store.rows.apply([put(b"a", b"y", 4)]) == [APPLIED]
        assert await value(one) == [(4, b"y")]
        assert session.asked == other.asked == 1, "a ticket is good until it ends"


async def test_a_permit_serves_many_calls(store: BigtableStore, clock: Any) -> None:
    async with client(store) as (rows, _):
        await value(rows)
        made = rows.calls.made
        for _ in range(5):
            await value(rows)
        assert rows.calls.made == made + 5
        await trio.sleep(2.1)  # less than half of it is left
        await value(rows)
        assert rows.calls.made == made + 7


async def test_a_client_finds_out_what_the_store_is(store: BigtableStore, clock: Any, virtual: str) -> None:
    """The emulator reads forward, whatever it is asked for; Bigtable, and its model, do not. A store of another version
    is not touched."""
    await store.rows.apply([put(b"a"), put(b"b")])
    async with client(store) as (rows, _):
        assert rows.backwards == (virtual == "model")
        request = ScanRequest(TABLE, b"", None, (ScanQuery(DATA, (1,)),), reverse=True)
        assert [row for row, _ in (await rows.scan(request)).rows] == [b"b", b"a"]
    await store.rows.apply([Mutation(SYSTEM_TABLE, [(FORMAT_ROW, [], [(DATA, 0, FORMAT + 1, b"")])])])
    with pytest.raises(FormatUnknown):
        async with client(store, "two"):
            pass


# ------------------------------------------------------------ sessions that end


async def test_a_session_that_ended_writes_and_reads_nothing_once_its_permit_has_ended(
    store: BigtableStore, clock: Any
) -> None:
    """F3"""
    async with client(store) as (rows, session), client(store, "other") as (other, _):
        assert await rows.apply([put(b"a", b"x", 3)]) == [APPLIED]
        session.end()
        await store.let_clients_in().settle()
        await trio.sleep(4)
        await ends_in(rows)
        assert await value(other, b"b") == []
        assert await other.apply([put(b"b")]) == [APPLIED]


async def test_the_floor_rises_only_when_a_session_that_ended_can_do_nothing(
    store: BigtableStore, clock: Any
) -> None:  # F3 T13
    tickets = store.let_clients_in()
    async with client(store) as (rows, session):
        await value(rows)
        await store.store.raise_floor(5, wait=True)
        began = trio.current_time()
        await store.store.raise_floor(5, wait=True)
        assert trio.current_time() == about(began), "this floor is old enough"
        session.end()
        await store.store.raise_floor(5, wait=True)
        assert trio.current_time() == about(began + LASTS_S)
        await ends_in(rows)
    assert list(tickets._all) == ["one"]


async def test_what_is_read_while_the_ticket_ends_does_not_count(store: BigtableStore, clock: Any) -> None:  # F3 G1
    async with client(store) as (rows, session):
        await value(rows)

        async def ending(request: Any) -> None:
            if is_read(request) and not session.ended:
                session.end()
                await store.let_clients_in().settle()
                await trio.sleep(4.1)

        calls(rows, ending)
        with pytest.raises(SessionEnded):
            await value(rows)


async def test_a_slow_read_counts_if_the_ticket_is_still_good(store: BigtableStore, clock: Any) -> None:  # F3
    async with client(store) as (rows, _):
        await rows.apply([put(b"a", b"x", 3)])
        slow = [4.1]

        async def slowly(request: Any) -> None:
            if is_read(request):
                await trio.sleep(slow.pop())  # a second read would fail

        rows._options = replace(QUICK, call_s=100.0)  # of the call; the permit lasts for 4 s
        rows._permit = rows._permit._replace(renew_at=trio.current_time() + 4, until=trio.current_time() + 4)
        calls(rows, slowly)
        assert await value(rows) == [(3, b"x")]
        assert slow == []


async def test_what_another_owner_lets_in_meanwhile_is_read_again(store: BigtableStore, clock: Any) -> None:  # F3 O1
    """The ticket has changed: nobody knows whether the first one was good when the cells were read."""
    async with client(store) as (rows, session):
        await value(rows)
        reads = 0

        async def changing(request: Any) -> None:
            nonlocal reads
            if is_read(request):
                reads += 1
                if reads == 1:
                    session.ticket = "another"
                    rows.greeted("another")
                    await trio.sleep(4.1)

        calls(rows, changing)
        assert await value(rows) == []
        assert reads == 2


async def test_an_ended_ticket_stays_ended_whatever_arrives_late(store: BigtableStore, clock: Any) -> None:  # F3
    tickets = store.let_clients_in()
    async with client(store) as (rows, session):
        await value(rows)
        session.end()
        await tickets.settle()
        await store.rows.put([admit(store.rows.place, "one", store._ours.token)])
        assert not (await store.rows.notice("one")).admitted
        with pytest.raises(SessionEnded):
            await tickets.admit("one")


async def test_one_that_does_not_own_the_store_admits_nobody(store: BigtableStore, clock: Any) -> None:  # O1
    assert store._lease is not None
    store._lease.deposed = StoreLocked("here", None, "another")
    with pytest.raises(StoreLocked):
        await store.let_clients_in().admit("one")


async def test_a_ticket_that_ends_while_it_is_asked_for_is_not_given(store: BigtableStore, clock: Any) -> None:  # F3
    tickets = store.let_clients_in()

    async def ending(request: Any) -> None:
        tickets.end("one")

    plain = store.rows.calls.ask
    calls(store.rows, ending)
    with pytest.raises(SessionEnded):
        await tickets.admit("one")
    store.rows.calls.ask = plain  # type: ignore[method-assign]
    await tickets.settle()
    assert not (await store.rows.notice("one")).admitted


async def test_those_who_wait_for_a_session_to_be_gone_are_told_once_it_is(
    store: BigtableStore, clock: Any
) -> None:  # F3
    """Only then no further lock of it can appear."""
    tickets, told = store.let_clients_in(), list[float]()
    tickets.on_gone.append(lambda: told.append(trio.current_time()))
    async with client(store) as (rows, session), trio.open_nursery() as nursery:
        nursery.start_soon(tickets.run)
        await value(rows)
        session.end()
        ended = trio.current_time()
        await trio.sleep(LASTS_S + 2)
        assert len(told) == 2, "at once, for what it did not tell of; and when no lock can follow"
        assert told[0] < ended + 1
        assert told[1] >= ended + LASTS_S
        assert await store.rows.tickets() == [], "nor is its row needed any more"
        nursery.cancel_scope.cancel()


async def test_a_ticket_that_cannot_be_ended_yet_is_ended_later(store: BigtableStore, clock: Any) -> None:  # F3
    tickets = store.let_clients_in()
    async with client(store) as (rows, session):
        await value(rows)
        session.end()
        with losing(store.rows, "before"), pytest.raises(Unavailable):
            await store.store.raise_floor(5, wait=True)
        assert store.store.floor == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tickets.run)
            await until(lambda: store.rows.notice("one"), lambda found: not found.admitted)
            nursery.cancel_scope.cancel()


async def test_the_rows_of_former_owners_tickets_are_removed(store: BigtableStore, clock: Any) -> None:
    tickets = store.let_clients_in()
    await store.rows.put([admit(store.rows.place, name, "a former owner") for name in ("x", "y")])
    async with client(store) as (rows, _), trio.open_nursery() as nursery:
        await value(rows)
        assert sorted(await store.rows.tickets()) == ["one", "x", "y"]
        nursery.start_soon(tickets.run)
        await until(store.rows.tickets, lambda found: found == ["one"])
        assert await value(rows) == []
        nursery.cancel_scope.cancel()


# ------------------------------------------------------------ what a session has begun


async def test_those_who_wait_are_told_once_nothing_of_former_owners_clients_can_arrive(
    store: BigtableStore, clock: Any
) -> None:  # T5 N8
    """The client may have died together with its owner."""
    await store.rows.put([admit(store.rows.place, "x", "a former owner")])
    tickets, told = store.let_clients_in(), list[float]()
    tickets.on_gone.append(lambda: told.append(trio.current_time()))
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tickets.run)
        await until(store.rows.tickets, lambda found: not found)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert [at - began >= LASTS_S for at in told] == [True]


async def test_one_that_does_not_own_the_store_removes_no_ticket(store: BigtableStore, clock: Any) -> None:  # F3 O1
    """They may be those of the next owner, whose ended ones must stay ended."""
    await store.rows.put([admit(store.rows.place, "x", "the next owner")])

    def check() -> None:
        raise StoreLocked("the store", None, "the next owner")

    tickets, store.rows.check = store.let_clients_in(), check
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tickets.run)
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    store.rows.check = store.check
    assert await store.rows.tickets() == ["x"]


async def test_the_owners_own_floor_does_not_rise_before_its_clients(store: BigtableStore, clock: Any) -> None:  # T13
    """Below its own floor, the owner rolls back without a marker; a client may still prewrite there."""
    async with client(store) as (rows, _):
        await value(rows)
        await store.store.raise_floor(5, wait=False)
        assert await rows.apply([below(3)]) == [APPLIED]
        assert store.store.floor == 0  # type: ignore[attr-defined]


async def test_what_a_session_has_begun_the_next_one_does_not_send(store: BigtableStore, clock: Any) -> None:  # R5 R7
    async def ending(request: Any) -> None:
        rows.session_ended()

    for step in ("the ticket", "the hint", "the answer", "the read"):
        async with client(store, step) as (rows, session):
            if step == "the ticket":

                async def ended() -> str:
                    rows.session_ended()
                    return await session.ask()

                rows._ask_for, rows._ticket = ended, ""
                [verdict] = await rows.apply([put(b"b")])
            elif step == "the hint":
                await value(rows)
                calls(rows, lambda request: ending(request) if row_of(request).startswith(HINT_KEY) else _no())
                [verdict] = await rows.apply([notifying(b"b")])
            elif step == "the answer":  # it is refused, and would be sent again
                absent = Mutation(TABLE, [(b"b", [(ABSENT, DATA, 1, 0, TS_MAX)], [(DATA, 1, 9, b"v")])])
                await store.rows.apply([put(b"b", b"other", 7)])

                async def gone(request: Any) -> None:
                    if is_read(request):
                        await store.rows.apply([Mutation(TABLE, [(b"b", [], [(DATA, 1, 7, None)])])])
                        rows.session_ended()

                await value(rows)
                calls(rows, gone, before=True)
                [verdict] = await rows.apply([absent])
            else:
                await value(rows)
                calls(rows, ending)
                with pytest.raises(SessionEnded):
                    await value(rows)
                continue
            assert isinstance(verdict, Failed), step
            assert isinstance(verdict.error, SessionEnded), step
            assert await value(store.rows, b"b") == [], step


async def _no() -> None:
    """Nothing."""


async def test_the_owner_says_how_long_a_permit_lasts(clock: Any) -> None:  # F3 T13 N7
    url = bigtable.fresh()
    patient = replace(QUICK, call_s=100.0)
    async with opened(url, QUICK) as owner:
        owner.store._sent.clear()
        session = Session(owner.let_clients_in(), "one")
        rows = ClientRows(owner.rows.place, patient, ticket=session.ask)
        await rows.adopt(owner.rows.tables())
        assert await rows.apply([below(4)]) == [APPLIED]
        assert rows.hints.lasts_s == patient.call_s + patient.late_s, "it waits for the longer of the two"
        await owner.store.raise_floor(5, wait=True)
        assert await rows.apply([below(4, b"b")]) == [Refused(0, -1)]
        session.end()
        await owner.let_clients_in().settle()
        await trio.sleep(QUICK.call_s)
        await ends_in(rows)
        await rows.calls.aclose()
    async with opened(url, replace(QUICK, call_s=1.0)) as second:  # whose own calls are shorter
        assert second._ours.lasts_s == second.rows.hints.lasts_s == LASTS_S, "it waits for those of before"
        session = Session(second.let_clients_in(), "two")
        rows = ClientRows(second.rows.place, replace(QUICK, call_s=0.5), ticket=session.ask)
        await rows.adopt(second.rows.tables())
        assert rows.hints.lasts_s == LASTS_S, "others may have longer permits"
        await rows.calls.aclose()


async def test_a_process_that_was_asleep_sends_nothing(store: BigtableStore, clock: Any) -> None:  # F3 T13 N7
    """Of the clocks, only that of the permit counts the sleep of a machine."""
    async with client(store) as (rows, _):
        await value(rows)

        async def asleep(request: Any) -> None:
            if row_of(request).startswith(HINT_KEY):
                slept.append(1000.0)

        slept: list[float] = []
        with pytest.MonkeyPatch.context() as patch:
            set_clock(patch, lambda: trio.current_time() + sum(slept))
            calls(rows, asleep)
            [verdict] = await rows.apply([notifying(b"a")])
        assert slept
        assert isinstance(verdict, Failed)
        assert "held up for too long" in str(verdict.error)
        assert await value(store.rows) == []


async def test_a_process_that_was_asleep_sends_nothing_again(store: BigtableStore, clock: Any) -> None:  # F3 T13
    """The mutation was refused; when the client has found that all its checks hold by now, its permit has ended."""
    absent = Mutation(TABLE, [(b"b", [(ABSENT, DATA, 1, 0, TS_MAX)], [(DATA, 1, 9, b"v")])])
    await store.rows.apply([put(b"b", b"other", 7)])
    async with client(store) as (rows, _):
        await value(rows)
        slept: list[float] = []

        async def gone(request: Any) -> None:
            if is_read(request):
                await store.rows.apply([Mutation(TABLE, [(b"b", [], [(DATA, 1, 7, None)])])])
                slept.append(3.0)

        with pytest.MonkeyPatch.context() as patch:
            set_clock(patch, lambda: trio.current_time() + sum(slept))
            until = rows._permit.until
            await trio.sleep(1.5)
            calls(rows, gone, before=True)
            [verdict] = await rows.apply([absent])
            assert trio.current_time() + 3 > until
        assert isinstance(verdict, Failed)
        assert "held up for too long" in str(verdict.error)
        assert await value(store.rows, b"b") == []


async def test_a_call_ends_before_its_permit_although_the_machine_was_asleep(
    store: BigtableStore, clock: Any
) -> None:  # F3 T13
    async with client(store) as (rows, _):
        await value(rows)
        slept: list[float] = []
        deadlines: list[float] = []
        plain = rows.calls.ask

        async def ask(requests: Any, deadline: float) -> Any:
            if row_of(requests[0]).startswith(HINT_KEY):
                slept.append(1.5)  # while the hint is written
            else:
                deadlines.append(deadline)
            return await plain(requests, deadline)

        rows.calls.ask = ask  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            set_clock(patch, lambda: trio.current_time() + sum(slept))
            until = rows._permit.until
            assert await rows.apply([notifying(b"a")]) == [APPLIED]
        assert deadlines == [about(until - 1.5)]


async def test_what_was_refused_is_not_sent_again_once_the_session_has_ended(
    store: BigtableStore, clock: Any
) -> None:  # R7
    """The mutation was refused, and its checks hold by now."""
    absent = Mutation(TABLE, [(b"b", [(ABSENT, DATA, 1, 0, TS_MAX)], [(DATA, 1, 9, b"v")])])
    await store.rows.apply([put(b"b", b"other", 7)])
    async with client(store) as (rows, _):
        await value(rows)
        plain, sent = rows.calls.ask, 0

        async def ask(requests: Any, deadline: float) -> Any:
            nonlocal sent
            if is_read(requests[0]):
                await store.rows.apply([Mutation(TABLE, [(b"b", [], [(DATA, 1, 7, None)])])])
            sent += row_of(requests[0]).startswith(TABLE.encode())
            return await plain(requests, deadline)

        rows.calls.ask = ask  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            paused = []

            async def sleep(seconds: float) -> None:
                paused.append(seconds)
                rows.session_ended()

            patch.setattr(rows_module.trio, "sleep", sleep)
            [verdict] = await rows.apply([absent])
        assert len(paused) == sent == 1
        assert isinstance(verdict, Failed)
        assert isinstance(verdict.error, SessionEnded)
    assert await value(store.rows, b"b") == []


async def test_the_owner_says_how_long_a_mutation_may_be_late(clock: Any) -> None:  # N7
    """A hint of a mutation that was not answered stays for as long, also that of a process whose option is shorter."""
    url = bigtable.fresh()
    async with opened(url, replace(QUICK, late_s=60.0)) as store:
        session = Session(store.let_clients_in(), "one")
        rows = ClientRows(store.rows.place, QUICK, ticket=session.ask)
        await rows.adopt(store.rows.tables())
        with losing(rows, "before"):
            [verdict] = await rows.apply([notifying(b"a")])
        assert isinstance(verdict, Failed), "its hint was not written"
        plain = rows.calls.ask

        async def ask(requests: Any, deadline: float) -> Any:
            if row_of(requests[0]).startswith(TABLE.encode()):
                with losing(rows, "before"):
                    return await plain(requests, deadline)
            return await plain(requests, deadline)

        rows.calls.ask = ask  # type: ignore[method-assign]
        [verdict] = await rows.apply([notifying(b"a")])
        assert isinstance(verdict, NoReply)
        for seconds in (0.0, 50.0):
            await trio.sleep(seconds)
            await rows.scan(_WAITING)
            assert hints_of(store) == [b"a"]
        await trio.sleep(11.0)
        await rows.scan(_WAITING)
        assert hints_of(store) == []
        await rows.calls.aclose()
    async with opened(url, QUICK) as second:
        assert second.rows.hints.late_s == 60.0, "as long as for the last owner"


async def test_a_hint_that_keeps_failing_leaves_others_time(store: BigtableStore, clock: Any) -> None:  # N7
    async with client(store) as (rows, _):
        await value(rows)
        plain = rows.calls.ask

        async def ask(requests: Any, deadline: float) -> Any:
            if row_of(requests[0]).startswith(HINT_KEY):
                with losing(rows, "before"):
                    return await plain(requests, deadline)
            return await plain(requests, deadline)

        rows.calls.ask = ask  # type: ignore[method-assign]
        began = trio.current_time()
        failed, made = await rows.apply([notifying(b"a"), put(b"b")])
        assert isinstance(failed, Failed)
        assert made is APPLIED
        assert trio.current_time() - began < QUICK.call_s * 0.6


async def test_a_call_ends_before_its_permit(store: BigtableStore, clock: Any) -> None:  # F3 T13
    async with client(store) as (rows, _):
        await value(rows)
        until = rows._permit.until
        await trio.sleep(1.5)
        deadlines = []
        plain = rows.calls.ask

        async def ask(requests: Any, deadline: float) -> Any:
            deadlines.append(deadline)
            return await plain(requests, deadline)

        rows.calls.ask = ask  # type: ignore[method-assign]
        assert await rows.apply([put(b"a")]) == [APPLIED]
        assert deadlines == [about(until)], "2.5 s, not 4"


async def test_what_was_sent_too_late_may_have_been_made(store: BigtableStore, clock: Any) -> None:  # T4
    async with client(store) as (rows, _):
        await value(rows)
        with losing(rows, "after"):
            [verdict] = await rows.apply([put(b"a", b"x", 3)])
        assert isinstance(verdict, NoReply)
        assert await value(rows) == [(3, b"x")]


# ------------------------------------------------------------ floors


async def test_below_the_floor_a_clients_mutation_is_not_sent(store: BigtableStore, clock: Any) -> None:  # T13
    async with client(store) as (rows, _):
        assert await rows.apply([below(4)]) == [APPLIED]
        await store.store.raise_floor(5, wait=True)
        made = rows.calls.made
        assert await rows.apply([below(4, b"b"), below(5, b"c")]) == [Refused(0, -1), APPLIED]
        assert rows.calls.made == made + 2, "the permit, and one mutation"
        assert await rows.apply([below(4, b"b")]) == [Refused(0, -1)]
        assert await value(rows, b"b") == []


async def test_the_floor_waits_for_what_clients_may_still_send(store: BigtableStore, clock: Any) -> None:  # T13
    began = trio.current_time()
    await store.store.raise_floor(4, wait=True)
    assert trio.current_time() == about(began), "there are no clients"
    async with client(store) as (rows, _):
        await value(rows)
        await store.store.raise_floor(5, wait=False)
        assert trio.current_time() == about(began)
        assert await rows.apply([below(4)]) == [APPLIED], "under the permit of before"
        await store.store.raise_floor(5, wait=True)
        assert trio.current_time() == about(began + LASTS_S)
        assert await rows.apply([below(4, b"b")]) == [Refused(0, -1)]


async def test_a_floor_that_arrives_late_does_not_lower_the_floor(store: BigtableStore, clock: Any) -> None:  # T13
    await store.rows.put([raise_floor(store.rows.place, 9)])
    await store.rows.put([raise_floor(store.rows.place, 5)])
    assert (await store.rows.notice()).floor == 9


# ------------------------------------------------------------ owners


async def test_a_hint_that_a_client_lost_is_written_again(store: BigtableStore, clock: Any) -> None:  # N7
    async with client(store) as (rows, _):
        await hint_is_written_again(rows)
    assert hints_of(store) == [b"a"]


async def test_the_next_owner_lets_no_client_of_the_last_one_write(clock: Any) -> None:  # O1
    url = bigtable.fresh()
    async with opened(url, QUICK) as first, client(first) as (rows, session):
        assert await rows.apply([put(b"a", b"x", 3)]) == [APPLIED]
        assert first._lease is not None
        await trio.to_thread.run_sync(first._lease.end)
        async with opened(url, QUICK) as second:
            second.let_clients_in()
            began = trio.current_time()
            with trio.move_on_after(LASTS_S - 1) as scope:
                await second.store.raise_floor(5, wait=True)
            assert scope.cancelled_caught, "clients of the former owner may still write"
            assert trio.current_time() >= began + LASTS_S - 1
            session.ended = True
            await ends_in(rows)
            await second.store.raise_floor(5, wait=True)
            session.ended, session.tickets, session.ticket = False, second.let_clients_in(), "new"
            assert await value(rows) == [(3, b"x")]
            assert await rows.apply([below(4)]) == [Refused(0, -1)]


async def test_a_store_that_gives_no_ticket_is_named(store: BigtableStore, clock: Any) -> None:
    async with client(store) as (rows, session):

        async def elsewhere() -> str:
            session.asked += 1
            return "a ticket of another store"

        rows._ask_for, rows._ticket = elsewhere, ""
        began = trio.current_time()
        with pytest.raises(Unavailable, match="gives no ticket that the store accepts"):
            await value(rows)
        assert session.asked > 3
        assert trio.current_time() == about(began + QUICK.call_s), "another owner might take over meanwhile"


async def test_the_address_of_a_former_owner_does_not_count(clock: Any) -> None:  # O1
    url = bigtable.fresh()
    place = Place(url)
    async with opened(url, QUICK) as first:
        first.let_clients_in()
        await first.serve_at("unix:/run/first")
        assert await address_of(place, QUICK) == "unix:/run/first"
    second = await BigtableStore.open(url, QUICK, direct=True)
    assert await address_of(place, QUICK) == "unix:/run/first", "clients go on to look for it"
    await second.serve_at("unix:/run/second")
    await second.rows.put([serve_at(place, first._ours.number, "unix:/run/late")])
    assert await address_of(place, QUICK) == "unix:/run/second"
    await second.aclose()
    async with opened(url, QUICK):
        assert await address_of(place, QUICK) == "", "it serves nobody"


async def test_a_store_that_was_served_to_clients_stays_so(clock: Any) -> None:
    """Until a process owns it that says so: any program that opens the address could take it from the standby."""
    url = bigtable.fresh()
    first = await BigtableStore.open(url, QUICK, direct=True)
    await first.serve_at("unix:/run/x")
    await first.aclose()
    wire = WireOptions(patience_s=0.3, connect_s=0.1)
    with pytest.raises(Unavailable, match=r"serve .* --direct"):
        async with perco.open(url, perco.Schema(), options=perco.Options(wire=wire, bigtable=QUICK)):
            pass
    own = perco.Options(bigtable=replace(QUICK, own=True))
    async with perco.open(url, perco.Schema(), options=own):
        assert await address_of(Place(url), QUICK) == ""
    async with perco.open(url, perco.Schema(), options=perco.Options(bigtable=QUICK)):
        pass


# ------------------------------------------------------------ N7


async def test_a_look_sees_all_groups_of_a_row_at_one_moment(store: BigtableStore, clock: Any) -> None:  # N7
    """A commit replaces the lock by a notify cell while the table is searched: one of the two is found."""
    store.let_clients_in()
    async with client(store) as (rows, _):
        await rows.apply([Mutation(TABLE, [(b"a", [], [(LOCK, 1, 2, b"")])])])

        async def commit(request: Any) -> None:
            if is_read(request):
                replaced = [(LOCK, 1, 2, None), (NOTIFY, 1, 3, b"")]
                await rows.apply([Mutation(TABLE, [(b"a", [("present", LOCK, 1, 2, 2)], replaced)])])  # type: ignore

        calls(store.rows, commit)
        await store.store.look([TABLE], [NOTIFY, LOCK])
        assert store.store.count(TABLE, NOTIFY) + store.store.count(TABLE, LOCK) == 1


async def test_a_look_does_not_count_while_a_mutation_may_still_arrive(store: BigtableStore, clock: Any) -> None:  # N7
    store.let_clients_in()
    with losing(store.rows, "before"):
        [verdict] = await store.store.apply([Mutation(TABLE, [(b"a", [], [(LOCK, 1, 2, b"")])])])
    assert isinstance(verdict, NoReply)
    await store.store.look([TABLE], [LOCK])
    assert not store.store.knows(TABLE, LOCK)
    await trio.sleep(QUICK.late_s)
    await store.store.look([TABLE], [LOCK])
    assert store.store.knows(TABLE, LOCK)


async def test_a_look_that_is_cut_short_leaves_no_count(store: BigtableStore, clock: Any) -> None:  # N7
    """Half of it, and half of the last one, are of no moment."""
    store.let_clients_in()
    await store.store.look([TABLE], [NOTIFY])
    assert store.store.knows(TABLE, NOTIFY)

    async def slowly(request: Any) -> None:
        await trio.sleep(100)

    calls(store.rows, slowly)
    await store.store.look([TABLE], [NOTIFY])
    assert not store.store.knows(TABLE, NOTIFY)


async def test_a_look_goes_on_although_its_asker_waits_no_longer(store: BigtableStore, clock: Any) -> None:  # N7
    """Else those that take longer than a server's answer would never end."""
    store.let_clients_in()

    async def slowly(request: Any) -> None:
        await trio.sleep(5)

    calls(store.rows, slowly)
    with trio.move_on_after(1):
        await store.store.look([TABLE], [NOTIFY])
    assert store.store.knows(TABLE, NOTIFY)


async def test_every_look_counts_what_clients_have_written(store: BigtableStore, clock: Any) -> None:  # N7
    async with client(store) as (rows, _):
        for count in range(3):
            await store.store.look([TABLE], [NOTIFY])
            assert store.store.count(TABLE, NOTIFY) == count
            assert store.store.knows(TABLE, NOTIFY)
            await rows.apply([notifying(b"%d" % count)])


# ------------------------------------------------------------ the end


async def test_after_the_end_and_in_a_child_nothing_is_sent(
    store: BigtableStore, monkeypatch: pytest.MonkeyPatch, clock: Any
) -> None:
    async with client(store) as (rows, _):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(UsedAfterFork):
                await value(rows)
            rows.close()
        assert await store.rows.calls.ask([], 0.0) == []
        rows._closed = False
        assert await value(rows) == []
        rows.close()
        with pytest.raises(TransactionClosed):
            await value(rows)
        with pytest.raises(TransactionClosed):
            await rows.apply([put(b"a")])


def test_a_row_of_a_ticket_cannot_be_one_of_a_table() -> None:
    assert TICKET_KEY.startswith(b"\x00")
    assert Notice._fields == ("holder", "address", "floor", "admitted")


@pytest.mark.parametrize(
    ("stored", "lease_s", "told"),
    [("tok 20.0 5.0 3.0 python -m x", 3.0, "python -m x"), ("tok 20.0 5.0 python -m x", 0.0, "python -m x")],
)
def test_the_row_of_an_owner_that_did_not_note_its_lease_is_read(stored: str, lease_s: float, told: str) -> None:
    cell = ReadCell(PROTOCOL_FAMILY, qualifier(WRITE, 0), 7 * MICROS, stored.encode())
    holder = notice([ReadRow(OWNER_KEY, [cell])]).holder
    assert holder == (7, "tok", 20.0, 5.0, lease_s, told)
