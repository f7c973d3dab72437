"""A store on PostgreSQL beyond the contract of a row store: its fence, its locks, its connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.errors import BackgroundFailure, Corruption, StoreLocked
from perco.postgresql.arrays import number
from perco.postgresql.libpq import libpq
from perco.postgresql.options import PostgresqlOptions
from perco.postgresql.store import PostgresqlStore
from perco.storage import ABSENT, APPLIED, Failed, Mutation
from tests.component.storage.stores import GROUPS, TABLE, delete, put, value_of
from tests.support import postgresql

QUICK = PostgresqlOptions(call_s=2.0)
_TABLES = SimpleNamespace(tables=(TABLE,), groups=lambda table: [GROUPS[-1]])  # stands in for a catalogue


@asynccontextmanager
async def opened(url: str, options: PostgresqlOptions = QUICK) -> AsyncIterator[PostgresqlStore]:
    store = await PostgresqlStore.open(url, options, durable=False)
    try:
        await store.adapt(_TABLES)  # type: ignore[arg-type]
        yield store
    finally:
        await store.aclose()


@pytest.fixture
async def store() -> AsyncIterator[PostgresqlStore]:
    async with opened(postgresql.fresh()) as made:
        yield made


def _prefix(store: PostgresqlStore) -> str:
    return store.rows.statements.prefix


async def test_without_the_owners_row_nothing_is_acknowledged(store: PostgresqlStore) -> None:  # O1
    postgresql.execute(f"DELETE FROM {_prefix(store)}_owner")
    [verdict] = await store.rows.apply([put(b"a")])
    assert isinstance(verdict, Failed)
    assert isinstance(verdict.error, Corruption | StoreLocked)
    assert postgresql.execute(f"SELECT count(*) FROM {_prefix(store)}_cells WHERE row = 'a'") == [(b"0",)]


async def test_a_term_that_the_server_has_forgotten_is_not_anothers(store: PostgresqlStore) -> None:  # O1
    """A standby that lacks the claim hands the same term out again; tokens differ."""
    postgresql.execute(f"UPDATE {_prefix(store)}_owner SET token = 'another'")
    [verdict] = await store.rows.apply([put(b"a")])
    assert isinstance(verdict, Failed)
    assert isinstance(verdict.error, StoreLocked)


async def test_a_mutation_of_more_rows_than_the_server_has_locks() -> None:
    rows = [(b"%06d" % i, (), (("data", 1, 1, b""),)) for i in range(30_000)]
    async with opened(postgresql.fresh(), PostgresqlOptions()) as store:
        assert await store.rows.apply([Mutation(TABLE, rows)]) == [APPLIED]
        assert await value_of(store.store, b"029999") == b""  # type: ignore[arg-type]


async def test_of_calls_at_once_that_exclude_each_other_one_is_made(store: PostgresqlStore) -> None:  # S1
    """On connections of their own: without a lock of the row, each would see it empty."""
    for at in range(40):
        row, verdicts = b"%d" % at, []

        async def write(ts: int, row: bytes = row, verdicts: list[object] = verdicts) -> None:
            check = (ABSENT, "data", 1, 0, 1 << 50)
            verdicts += await store.rows.apply([Mutation(TABLE, [(row, [check], [("data", 1, ts, b"")])])])

        async with trio.open_nursery() as nursery:
            for ts in range(1, 5):
                nursery.start_soon(write, ts)
        assert verdicts.count(APPLIED) == 1


async def test_a_mutation_that_is_held_up_is_not_made_under_the_next_term(store: PostgresqlStore) -> None:  # O1
    """It has read the term, and waits to insert: the next term must not begin beside it."""
    space, prefix = store.rows._spaces[TABLE, "data"], _prefix(store)
    link = libpq().PGconn.connect(store.rows.pool.place.conninfo.encode())
    link.exec_(f"BEGIN; INSERT INTO {prefix}_cells VALUES ({space}, 'a', 1, 1, 'other')".encode())
    verdicts: list[object] = []

    async def write() -> None:
        verdicts.extend(await store.rows.apply([put(b"a", b"late")]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'transactionid' AND query LIKE '%excluded%'"
        with trio.fail_after(30):
            while postgresql.execute(waiting) == [(b"0",)]:
                await trio.lowlevel.checkpoint()
        store.rows.fence.term = 0
        await store.rows.renew()
        assert link.exec_(b"ROLLBACK").status == libpq().ExecStatus.COMMAND_OK
    assert not isinstance(verdicts[0], type(APPLIED))
    assert postgresql.execute(f"SELECT count(*) FROM {prefix}_cells WHERE row = 'a'") == [(b"0",)]


async def test_what_is_read_after_the_lease_is_over_does_not_count(store: PostgresqlStore) -> None:  # O1 G1
    """The next owner may have removed what this one still reads."""
    assert await store.rows.apply([put(b"a", b"x")]) == [APPLIED]
    assert store._lease is not None
    store._lease.deposed = StoreLocked("here", None, "another")
    with pytest.raises(StoreLocked):
        await value_of(store.store, b"a")  # type: ignore[arg-type]


async def test_a_transaction_that_stands_still_is_ended_by_the_next_term(store: PostgresqlStore) -> None:  # O1
    """As that of an owner that was stopped, or whose host was lost, in the middle of sending it."""
    link = libpq().PGconn.connect(store.rows.pool.place.conninfo.encode())
    link.exec_(f"SELECT pg_advisory_lock_shared({number(store.rows.fence.lock)})".encode())
    before, store.rows.fence.term = store.rows.fence.term, 0
    with trio.fail_after(30):
        assert await store.rows.apply([put(b"a", b"x")]) == [APPLIED]
    assert store.rows.fence.term > before
    link.exec_(b"SELECT 1")
    assert link.status != libpq().ConnStatus.OK, "the server has ended it"


async def test_a_connection_that_was_ended_while_idle_loses_nothing(store: PostgresqlStore) -> None:  # T4
    assert await store.rows.apply([put(b"a", b"x")]) == [APPLIED]
    term = store.rows.fence.term
    postgresql.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        "WHERE application_name = 'perco' AND pid <> pg_backend_pid()"
    )
    assert await store.rows.apply([put(b"b", b"y")]) == [APPLIED]
    assert await value_of(store.store, b"b") == b"y"  # type: ignore[arg-type]
    assert store.rows.fence.term == term, "nothing was under way"


async def test_a_claim_of_a_process_that_died_at_once_is_waited_out(store: PostgresqlStore) -> None:  # O1
    url = postgresql.fresh()
    async with opened(url) as first:
        prefix = _prefix(first)
    postgresql.execute(f"UPDATE {prefix}_owner SET token = 'first'")

    async def another_claims() -> None:
        await trio.to_thread.run_sync(postgresql.execute, f"UPDATE {prefix}_owner SET token = 'second'")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(another_claims)
        async with opened(url) as last:
            assert await last.rows.apply([put(b"a")]) == [APPLIED]


async def test_a_publication_does_not_stop_deletes(store: PostgresqlStore) -> None:
    postgresql.execute(f"CREATE PUBLICATION {_prefix(store)} FOR TABLE {_prefix(store)}_cells")
    try:
        assert await store.rows.apply([put(b"a")]) == [APPLIED]
        assert await store.rows.apply([put(b"a", b"new")]) == [APPLIED]
        assert await store.rows.apply([delete(b"a")]) == [APPLIED]
    finally:
        postgresql.execute(f"DROP PUBLICATION {_prefix(store)}")
    assert await value_of(store.store, b"a") is None  # type: ignore[arg-type]


async def test_an_owner_that_is_deposed_is_told_that_it_lost_the_store() -> None:  # O1
    url = postgresql.fresh()

    async def lose() -> None:
        async with perco.open(url, perco.Schema(), options=perco.Options(postgresql=QUICK)) as db:
            prefix = inside(db).place.rows.statements.prefix  # type: ignore[attr-defined]
            postgresql.execute(f"UPDATE {prefix}_owner SET token = 'another'")
            await trio.sleep_forever()

    with pytest.raises(BackgroundFailure, match=r"this process has lost the store: .* All commits are safe"):
        await lose()
