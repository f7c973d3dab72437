"""A client gives up timestamps after a change of owner, which the new owner holds; time is virtual."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.database import Database
from perco.database.inside import close, inside
from perco.serve.client import remote_owner
from tests.component.serve.kit import Place
from tests.component.serve.test_hostile import SCHEMA, back, n, put, read, session_of, stuck_commit


@pytest.fixture
def place() -> Place:
    place = Place(SCHEMA)
    place.prefetch = perco.options.PrefetchOptions(cache=False, predict=False)  # every read is to ask
    return place


@asynccontextmanager
async def next_owner(place: Place) -> AsyncIterator[tuple[Database, AsyncExitStack]]:
    """A client of an owner, which is gone; the caller lets another one begin."""
    async with AsyncExitStack() as clients, AsyncExitStack() as owner:
        await owner.enter_async_context(place.served())
        db = await clients.enter_async_context(place.client())
        await db.run(put, "a", 1)
        yield db, owner


async def test_what_a_client_gives_up_beside_a_past_snapshot_is_let_go_of(place: Place) -> None:  # G1 L1 R8
    async with next_owner(place) as (db, former):
        snap, past = await db.snapshot_at(), await db.snapshot_at(ts=inside(db).oracle.last)
        await former.aclose()
        async with place.served() as owner:
            await back(db)
            assert not inside(owner).oracle.holds.open
            assert not inside(owner).fates.alive(snap.start_ts)
            assert not session_of(place).held
            assert inside(owner).oracle.holds.lowest(inside(owner).oracle.last, 0).kind == "retention"
            for lost in (snap, past):
                with pytest.raises(perco.errors.SessionEnded):
                    await lost.get(n, "a")
                lost.end()
            assert await db.run(read, "a") == 1
            await close(db)


async def test_nobody_waits_for_a_lock_that_a_client_gave_up_beside_a_past_snapshot(place: Place) -> None:  # L1 T7
    async with next_owner(place) as (db, former):
        past = await db.snapshot_at(ts=inside(db).oracle.last)
        async with stuck_commit(place, db) as scope:
            await former.aclose()
            async with place.served(sweeper=False) as owner:
                await back(db)
                with trio.fail_after(60):
                    assert await owner.run(read, "z") is None
                past.end()
                scope.cancel()
                await close(db)


async def test_a_client_whose_greeting_was_lost_learns_that_its_past_snapshots_are_not_held(  # R8 T15 G1
    place: Place,
) -> None:
    async with next_owner(place) as (db, former):
        snap, past = await db.snapshot_at(), await db.snapshot_at(ts=inside(db).oracle.last)
        welcomed = remote_owner(db).link._welcomed

        def lost(message: Any) -> bool:
            remote_owner(db).link._welcomed = welcomed
            raise trio.BrokenResourceError

        remote_owner(db).link._welcomed = lost
        await former.aclose()
        async with place.served() as owner:
            await back(db)
            for given_up in (snap, past):
                with pytest.raises(perco.errors.SessionEnded):
                    await given_up.get(n, "a")
            assert not inside(owner).oracle.holds.open
            await close(db)


async def test_a_past_snapshot_that_is_asked_for_meanwhile_is_let_go_of(place: Place) -> None:  # T15 G1
    async with next_owner(place) as (db, former):
        await former.aclose()
        got: list[perco.Snapshot] = []

        async def asks() -> None:
            got.append(await db.snapshot_at(ts=1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(asks)
            await trio.testing.wait_all_tasks_blocked()
            async with place.served() as owner:
                await back(db)
                await trio.testing.wait_all_tasks_blocked()
                assert inside(db).oracle.holds.numbers == set(session_of(place).held) != set()  # type: ignore[attr-defined]
                got[0].end()
                await inside(db).oracle.newest()
                assert not session_of(place).held
                assert inside(owner).oracle.holds.lowest(inside(owner).oracle.last, 0).kind == "retention"
                await close(db)


async def test_what_is_too_much_for_a_greeting_is_let_go_of_with_all_else(place: Place) -> None:  # R1 G1
    async with next_owner(place) as (db, former):
        snap, _ = await db.snapshot_at(), await db.snapshot_at(ts=inside(db).oracle.last)
        inside(db).oracle.holds.open.update(range(1 << 40, (1 << 40) + 10_000))
        await former.aclose()
        async with place.served() as owner:
            await back(db)
            with pytest.raises(perco.errors.SessionEnded):
                await snap.get(n, "a")
            assert not inside(owner).oracle.holds.open
            assert not session_of(place).held
            await close(db)
