"""Clients that read and write a store on PostgreSQL by themselves: their tickets, terms and floors."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.errors import SessionEnded, StoreLocked, Unavailable
from perco.postgresql.address import Place
from perco.postgresql.client import ClientRows, address_of
from perco.postgresql.connection import Connection
from perco.postgresql.libpq import libpq
from perco.postgresql.options import PostgresqlOptions
from perco.postgresql.rows import PostgresqlRows
from perco.postgresql.statements import Statements
from perco.postgresql.store import PostgresqlStore
from perco.postgresql.tickets import _Ticket
from perco.rpc.channel import WireOptions
from perco.storage import ABSENT, APPLIED, Failed, Mutation, NoReply, Refused, Verdict
from tests.component.storage.sessions import Session
from tests.component.storage.stores import TABLE, put
from tests.component.storage.test_postgresql import QUICK, opened
from tests.support import postgresql


@asynccontextmanager
async def client(store: PostgresqlStore, name: str, options: PostgresqlOptions = QUICK) -> AsyncIterator[ClientRows]:
    session = Session(store.let_clients_in(), name)
    rows = ClientRows(store.rows.pool.place, options, durable=False, ticket=session.ask)
    rows.session = session  # type: ignore[attr-defined]
    await rows.adopt(store.rows.tables())
    try:
        yield rows
    finally:
        rows.close()


@pytest.fixture
async def store() -> AsyncIterator[PostgresqlStore]:
    async with opened(postgresql.fresh()) as made:
        yield made


def end(rows: ClientRows, *, told: bool) -> None:
    """The owner ends a client's session; `told`: the client knows."""
    session: Session = rows.session  # type: ignore[attr-defined]
    session.end()
    if told:
        rows.session_ended()


def below(ts: int, row: bytes = b"a") -> Mutation:
    return Mutation(TABLE, [(row, [], [("data", 1, ts, b"")])], ts)


async def value(rows: ClientRows | object, row: bytes = b"a") -> list[tuple[int, bytes]]:
    [[cells]] = await rows.read([(TABLE, row, [("data", 1, 0, 1 << 50, 1)])])  # type: ignore[attr-defined]
    return cells  # type: ignore[no-any-return]


def cells_of(store: PostgresqlStore, row: str = "a") -> int:
    [(found,)] = postgresql.execute(f"SELECT count(*) FROM {store.rows.statements.prefix}_cells WHERE row = '{row}'")
    return int(found)


async def until(waiting: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not waiting():
            await trio.lowlevel.checkpoint()


def held_up() -> bool:
    """Whether a mutation waits to insert a cell."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'transactionid' AND query LIKE '%excluded%'"
    return postgresql.execute(waiting) != [(b"0",)]


def waits(event: str) -> bool:
    """Whether someone waits in the server for a lock of that kind."""
    waiting = f"SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND wait_event = '{event}'"
    return postgresql.execute(waiting) != [(b"0",)]


def waited_for() -> bool:
    """Whether someone waits for a lock alone that others share."""
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND NOT granted"
    return postgresql.execute(waiting) != [(b"0",)]


async def test_clients_and_the_owner_see_each_others_writes(store: PostgresqlStore) -> None:
    async with client(store, "one") as one, client(store, "two") as two:
        assert await one.apply([put(b"a", b"x", 3)]) == [APPLIED]
        assert await value(two) == await value(store.rows) == [(3, b"x")]
        assert await store.rows.apply([put(b"a", b"y", 4)]) == [APPLIED]
        assert await value(one) == [(4, b"y")]
        assert one.session.asked == two.session.asked == 1, "a ticket is good until it ends"  # type: ignore


async def test_the_ticket_of_a_session_that_ended_writes_and_reads_nothing(store: PostgresqlStore) -> None:  # F3
    async with client(store, "one") as rows, client(store, "other") as other:
        assert await rows.apply([put(b"a", b"x", 3)]) == [APPLIED]
        end(rows, told=False)
        await store.let_clients_in().settle()
        [verdict] = await rows.apply([put(b"b")])
        assert isinstance(verdict, Failed)
        assert isinstance(verdict.error, SessionEnded)
        with pytest.raises(SessionEnded):
            await value(rows)
        assert cells_of(store, "b") == 0
        assert await other.apply([put(b"b")]) == [APPLIED]


async def test_what_is_read_while_the_session_ends_does_not_count(store: PostgresqlStore) -> None:  # F3 G1
    """The owner may have removed what it needed: the ticket is asked for after the cells were read."""
    async with client(store, "one") as rows:
        assert await rows.apply([put(b"a", b"x", 3)]) == [APPLIED]
        postgresql.execute(f"DELETE FROM {store.rows.statements.prefix}_sessions")
        rows.session.ended = True  # type: ignore[attr-defined]
        with pytest.raises(SessionEnded):
            await value(rows)


async def test_what_a_session_has_begun_the_next_one_does_not_send(store: PostgresqlStore) -> None:  # R7
    async with client(store, "one") as rows:
        assert await rows.apply([put(b"a", b"x", 3)]) == [APPLIED]
        rows.fence.term = 0  # the next call asks for a term first
        ask = rows._ticket

        async def ended_meanwhile() -> None:
            rows.session_ended()
            rows._ticket = ask
            await renew()

        renew, rows.renew = rows.renew, ended_meanwhile
        [verdict] = await rows.apply([put(b"b")])
        assert isinstance(verdict, Failed)
        assert isinstance(verdict.error, SessionEnded)
        rows.renew = ended_meanwhile
        rows.fence.term = 0
        with pytest.raises(SessionEnded):
            await value(rows)
        rows.renew = renew
        assert await rows.apply([put(b"b")]) == [APPLIED], "a mutation of the next session is sent"


@asynccontextmanager
async def holding(store: PostgresqlStore, rows: ClientRows, mutation: Mutation) -> AsyncIterator[list[Verdict]]:
    """While the block lasts, the mutation of row a has been checked, and waits to insert: another transaction has
    inserted the same cell. Then that one is rolled back. Yields the verdicts, which come later."""
    [(_, _, [(group, column, ts, _)])] = mutation.rows
    space, prefix = store.rows._spaces[TABLE, group], store.rows.statements.prefix
    link = libpq().PGconn.connect(store.rows.pool.place.conninfo.encode())
    link.exec_(f"BEGIN; INSERT INTO {prefix}_cells VALUES ({space}, 'a', {column}, {ts}, 'other')".encode())
    verdicts: list[Verdict] = []

    async def apply() -> None:
        verdicts.extend(await rows.apply([mutation]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(apply)
        await until(held_up)
        yield verdicts
        link.exec_(b"ROLLBACK")
        link.finish()


async def test_a_mutation_that_is_held_up_is_not_made_after_its_session(store: PostgresqlStore) -> None:  # F3
    """PostgreSQL has checked it while the ticket was there: `settle` waits for it, and later ones are not made."""
    tickets = store.let_clients_in()
    async with client(store, "one") as rows, trio.open_nursery() as nursery:
        made_then: list[int] = []

        async def settle() -> None:
            await tickets.settle()
            made_then.append(cells_of(store))

        async with holding(store, rows, put(b"a", b"late")) as verdicts:
            end(rows, told=False)
            nursery.start_soon(settle)
            await until(waited_for)
            assert not made_then
    assert made_then == [cells_of(store)], "nothing takes effect after that"
    assert (verdicts == [APPLIED]) == (made_then == [1])
    assert verdicts == [APPLIED] or isinstance(verdicts[0], NoReply | Failed)


async def test_below_the_floor_a_clients_mutation_is_refused(store: PostgresqlStore) -> None:  # T13
    async with client(store, "one") as rows:
        assert await rows.apply([below(5)]) == [APPLIED]
        await store.store.raise_floor(7, wait=False)
        assert await rows.apply([below(6), below(7, b"b"), put(b"c")]) == [Refused(0, -1), APPLIED, APPLIED]
        await store.store.raise_floor(3, wait=True)
        assert await rows.apply([below(6)]) == [Refused(0, -1)], "the floor never sinks"


async def test_the_floor_waits_for_what_a_client_has_sent(store: PostgresqlStore) -> None:  # T13
    async with client(store, "one") as rows, trio.open_nursery() as nursery:
        made_then: list[int] = []

        async def raise_floor() -> None:
            await store.store.raise_floor(7, wait=True)
            made_then.append(cells_of(store))

        async with holding(store, rows, below(5)) as verdicts:
            nursery.start_soon(raise_floor)
            await until(waited_for)
            assert not made_then
            assert store.store.floor == 0, "the owner gives up on nothing that a client may still prewrite"
    assert made_then == [cells_of(store)]
    assert (verdicts == [APPLIED]) == (made_then == [1])


async def test_the_next_owner_lets_no_client_of_the_last_one_write(store: PostgresqlStore) -> None:  # O1
    url = postgresql.fresh()
    async with opened(url) as first, client(first, "one") as rows:
        assert await rows.apply([put(b"a")]) == [APPLIED]
        assert first._lease is not None
        await trio.to_thread.run_sync(first._lease.end)
        async with opened(url) as second:
            [verdict] = await rows.apply([put(b"b")])
            assert isinstance(verdict, Failed), "the first owner can admit nobody any more"
            assert cells_of(second, "b") == 0
            async with client(second, "one") as again:
                assert await again.apply([put(b"b")]) == [APPLIED]


async def test_a_connection_that_is_lost_costs_other_clients_nothing(store: PostgresqlStore) -> None:  # T4
    async with client(store, "one") as one, client(store, "two") as two:
        for rows in (one, two):
            assert await rows.apply([put(b"b")]) == [APPLIED]
        terms = one.fence.term, two.fence.term, store.rows.fence.term
        async with holding(store, one, put(b"a", b"late")) as verdicts:
            postgresql.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE wait_event = 'transactionid'"
            )
        assert isinstance(verdicts[0], NoReply)
        assert cells_of(store) == 0
        assert one.fence.term > terms[0], "nothing that it has sent can take effect any more"
        assert await two.apply([put(b"c")]) == [APPLIED]
        assert (two.fence.term, store.rows.fence.term) == terms[1:]


async def test_a_ticket_that_the_server_has_forgotten_is_asked_for_again(store: PostgresqlStore) -> None:
    """After a failover to a standby that lacks it."""
    async with client(store, "one") as rows:
        assert await rows.apply([put(b"a")]) == [APPLIED]
        postgresql.execute(f"DELETE FROM {store.rows.statements.prefix}_sessions")
        assert await rows.apply([put(b"b")]) == [APPLIED]
        assert rows.session.asked == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("settled", [False, True])
async def test_a_ticket_that_ends_while_it_is_asked_for_is_never_good(store: PostgresqlStore, settled: bool) -> None:
    """F3"""
    tickets = store.let_clients_in()
    known = tickets._all.setdefault("one", _Ticket())
    errors: list[BaseException] = []

    async def admit() -> None:
        try:
            await tickets.admit("one")
        except SessionEnded as error:
            errors.append(error)

    async with trio.open_nursery() as nursery, known.lock:
        if settled:  # it is removed before it is admitted
            tickets.end("one")
            nursery.start_soon(tickets.settle)
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(admit)
        await trio.testing.wait_all_tasks_blocked()
        tickets.end("one")
    await tickets.settle()
    assert len(errors) == 1
    assert postgresql.execute(f"SELECT count(*) FROM {store.rows.statements.prefix}_sessions") == [(b"0",)]


async def test_counts_are_of_one_moment_and_never_kept(store: PostgresqlStore) -> None:  # N7
    async with client(store, "one") as rows:
        for expected in (0, 1, 2):
            await store.store.look([TABLE], ["data", "notify"])
            assert store.store.count(TABLE, "data") == expected
            assert await rows.apply([put(b"%d" % expected)]) == [APPLIED]


async def test_of_clients_that_exclude_each_other_one_writes(store: PostgresqlStore) -> None:  # S1
    """They take the same locks of rows as the owner does: without them, each would see the row empty."""
    async with client(store, "one") as one, client(store, "two") as two:
        for at in range(40):
            row, verdicts = b"%d" % at, []

            async def write(rows: PostgresqlRows, row: bytes = row, verdicts: list[object] = verdicts) -> None:
                check = (ABSENT, "data", 1, 0, 1 << 50)
                ts = 1 + len(verdicts)
                verdicts += await rows.apply([Mutation(TABLE, [(row, [check], [("data", 1, ts, b"")])])])

            async with trio.open_nursery() as nursery:
                for rows in (one, two, store.rows):
                    nursery.start_soon(write, rows)
            assert verdicts.count(APPLIED) == 1


async def test_whoever_waits_for_the_standby_is_not_ended(store: PostgresqlStore) -> None:  # T4
    """Else others would read a commit that the standby lacks."""
    sql = Statements("x").end_holders.sql
    assert "SyncRep" in sql.partition("pid NOT IN")[2]


async def test_a_store_that_was_served_to_clients_stays_so(store: PostgresqlStore) -> None:
    """Until a process owns it that says so: any program that opens the address could take it from the standby."""
    url = postgresql.fresh()
    first = await PostgresqlStore.open(url, QUICK, durable=False, direct=True)
    await first.serve_at("unix:/run/x")
    await first.aclose()
    place = Place(url)
    assert await address_of(place) == "unix:/run/x"
    wire = WireOptions(patience_s=0.3, connect_s=0.1)
    with pytest.raises(Unavailable, match=r"serve .* --direct"):
        async with perco.open(url, perco.Schema(), options=perco.Options(wire=wire)):
            pass
    own = perco.Options(postgresql=PostgresqlOptions(own=True))
    async with perco.open(url, perco.Schema(), options=own):
        assert await address_of(place) == ""
    async with perco.open(url, perco.Schema()):
        pass


async def test_there_is_no_server_of_a_store_that_does_not_exist() -> None:
    assert await address_of(Place(postgresql.fresh())) == ""


async def test_cells_that_were_read_before_the_ticket_was_asked_for_count_alone(store: PostgresqlStore) -> None:
    """F3: a read that waits in the server, while the owner removes the ticket and then old versions, is refused."""
    async with client(store, "one") as rows:
        assert await rows.apply([put(b"a", b"x", 3)]) == [APPLIED]
        assert await value(rows) == [(3, b"x")]  # now its statements are prepared
        prefix = store.rows.statements.prefix
        link = libpq().PGconn.connect(store.rows.pool.place.conninfo.encode())
        link.exec_(f"BEGIN; LOCK TABLE {prefix}_cells IN ACCESS EXCLUSIVE MODE".encode())
        rows.session.ended = True  # type: ignore[attr-defined]

        async def read() -> None:
            with pytest.raises(SessionEnded):
                await value(rows)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await until(lambda: waits("relation"))
            postgresql.execute(f"DELETE FROM {prefix}_sessions")
            link.exec_(b"ROLLBACK")
            link.finish()


async def test_a_mutation_that_waited_for_a_connection_keeps_to_its_session(store: PostgresqlStore) -> None:  # R7
    """The next session has a term by then."""
    only = PostgresqlOptions(connections=1, call_s=20.0, lease_s=1.0)
    async with client(store, "one", only) as rows, trio.open_nursery() as nursery:
        assert await rows.apply([put(b"c")]) == [APPLIED]
        verdicts: list[Verdict] = []

        async def apply() -> None:
            verdicts.extend(await rows.apply([put(b"b")]))

        async with holding(store, rows, put(b"a")):
            nursery.start_soon(apply)
            await trio.testing.wait_all_tasks_blocked()
            rows.session_ended()
            rows.session.ticket = "two"  # type: ignore[attr-defined]
            rows.greeted("two")
            assert await value(rows, b"c") == [(1, b"")]
            assert rows.fence.term
    assert isinstance(verdicts[0], Failed)
    assert isinstance(verdicts[0].error, SessionEnded)
    assert cells_of(store, "b") == 0


async def test_the_next_owner_waits_for_a_ticket_that_is_being_recorded(store: PostgresqlStore) -> None:  # O1
    """It removes all tickets of the last owner, so none may come later."""
    prefix = store.rows.statements.prefix
    link = libpq().PGconn.connect(store.rows.pool.place.conninfo.encode())
    link.exec_(f"BEGIN; INSERT INTO {prefix}_sessions VALUES ('one', 1)".encode())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.let_clients_in().admit, "one")
        await until(lambda: waits("transactionid"))
        store.rows.fence.term = 0
        nursery.start_soon(store.rows.renew)
        await until(waited_for)
        link.exec_(b"ROLLBACK")
        link.finish()
    assert postgresql.execute(f"SELECT token FROM {prefix}_sessions") == [(b"one",)]


async def test_one_that_does_not_own_the_store_admits_nobody(store: PostgresqlStore) -> None:  # O1
    prefix = store.rows.statements.prefix
    postgresql.execute(f"UPDATE {prefix}_owner SET token = 'another'")
    with pytest.raises(StoreLocked):
        await store.let_clients_in().admit("one")
    assert postgresql.execute(f"SELECT count(*) FROM {prefix}_sessions") == [(b"0",)]


async def test_the_ticket_of_another_server_is_asked_for(store: PostgresqlStore) -> None:  # F3
    async with client(store, "one") as rows:
        assert await rows.apply([put(b"a")]) == [APPLIED]
        rows.greeted("one")
        assert await rows.apply([put(b"b")]) == [APPLIED]
        assert rows.session.asked == 1  # type: ignore[attr-defined]
        rows.greeted("two")
        assert await rows.apply([put(b"c")]) == [APPLIED]
        assert rows.session.asked == 2  # type: ignore[attr-defined]


async def test_no_reply_is_told_once_a_former_ticket_can_do_nothing(
    store: PostgresqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:  # T4
    """The connection breaks, but PostgreSQL goes on with the mutation; and the client has a new ticket by then."""
    run, used = Connection.run, []

    async def noting(self: Connection, statements: Any) -> Any:
        used.append(self)
        return await run(self, statements)

    options = PostgresqlOptions(connections=1, call_s=30.0, lease_s=1.0)
    async with client(store, "one", options) as rows:
        assert await rows.apply([put(b"b")]) == [APPLIED]
        monkeypatch.setattr(Connection, "run", noting)
        async with holding(store, rows, put(b"a", b"late")) as verdicts:
            [broken] = used
            rows.session.ticket = "two"  # type: ignore[attr-defined]
            rows.greeted("two")
            assert await value(rows, b"b") == [(1, b"")]
            with socket.socket(fileno=os.dup(broken._link.socket)) as end:
                end.shutdown(socket.SHUT_RDWR)
            await until(lambda: bool(verdicts))
            assert isinstance(verdicts[0], NoReply)
        await until(lambda: not waits("transactionid"))
        assert cells_of(store) == 0
