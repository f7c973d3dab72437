"""An owner that may have lost its store to another process hands out no timestamp (O1)."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.database import Database
from perco.database.inside import inside, local_owner
from perco.errors import StoreLocked, Unavailable
from perco.serve.client import remote_owner
from perco.serve.messages import Method
from perco.serve.server import Server
from perco.storage import Mutation, NoReply, Verdict
from perco.testing.machine import Machine
from tests.component.serve.kit import Place

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)
UNSURE = Unavailable("the lease was not renewed")
LOCKED = StoreLocked("postgresql://db", None, "another process", "Stop it.")


class Check:
    """In the place of that of the owner's store."""

    def __init__(self, error: perco.PercoError | None) -> None:
        self.error = error

    def __call__(self) -> None:
        if self.error is not None:
            raise self.error


class NoTickets:
    """In the place of those of a store in a database."""

    def __init__(self) -> None:
        self.on_gone: list[object] = []

    def end(self, ticket: str) -> None:
        """There is none."""


class World:
    """A server, a client, and what the owner knows of its ownership. `tickets`: of direct clients; None: there are
    none."""

    def __init__(self, error: perco.PercoError | None, tickets: NoTickets | None) -> None:
        self.check, self._tickets, self._place = Check(error), tickets, Place(SCHEMA)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Database]:
        place = self._place
        async with place.served() as self.owner, place.client() as db:
            assert place.server is not None
            self.server = place.server
            if self._tickets is not None:
                self.server._tickets = self._tickets  # type: ignore[assignment]
            await inside(self.owner).oracle.draw()  # so that it has a range to draw from
            local_owner(self.owner).backend.check = self.check  # type: ignore[method-assign]
            yield db
            self.check.error = None

    async def change(self, after_s: float, error: perco.PercoError | None) -> None:
        await trio.sleep(after_s)
        self.check.error = error

    async def go_over(self, after_s: float) -> None:
        """Clients find the next server: the same one, which is sure again."""
        await self.change(after_s, None)
        await self._place.break_connections()


@asynccontextmanager
async def direct(
    error: perco.PercoError | None = None, tickets: NoTickets | None = None
) -> AsyncIterator[tuple[World, Database]]:
    world = World(error, tickets or NoTickets())
    async with world.opened() as db:
        yield world, db


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("sure_after_s", [5.0, None])
async def test_a_client_waits_until_the_owner_is_sure(
    sure_after_s: float | None, reads: bool, autojump_clock: trio.testing.MockClock
) -> None:  # O1
    run = _read_and_write if reads else _write
    world = World(UNSURE, None)
    async with world.opened() as db, trio.open_nursery() as nursery:
        oracle = inside(world.owner).oracle
        last, began = oracle.last, trio.current_time()
        if sure_after_s is not None:

            async def become_sure(after_s: float) -> None:
                await trio.sleep(after_s)
                assert oracle.last == last, "none is drawn meanwhile"
                world.check.error = None

            nursery.start_soon(become_sure, sure_after_s)
            await db.run(run)
            assert trio.current_time() >= began + sure_after_s
        else:
            with pytest.raises(Unavailable, match="the lease was not renewed"):
                await db.run(run)


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_of_one_that_is_deposed_is_told_at_once(
    reads: bool, autojump_clock: trio.testing.MockClock
) -> None:
    run = _read_and_write if reads else _write
    world = World(LOCKED, None)
    async with world.opened() as db:
        began = trio.current_time()
        with pytest.raises(StoreLocked, match="in use by another process"):
            await db.run(run)
        assert trio.current_time() < began + 1


@pytest.mark.parametrize("leased", ["all along", "until the draw"])
async def test_a_first_read_whose_draw_outlasts_the_lease_gets_no_timestamp(
    leased: str, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # O1 G1
    world = World(None, None)
    async with world.opened() as db:
        await db.run(_read_and_write)
        await trio.sleep(1)
        oracle = inside(world.owner).oracle
        plain = oracle.draw

        async def slow() -> int:
            ts = await plain()
            world.check.error = None if leased == "all along" else LOCKED
            return ts

        with monkeypatch.context() as patch:
            patch.setattr(oracle, "draw_nowait", lambda: 0)
            patch.setattr(oracle, "draw", slow)
            if leased == "all along":
                await db.run(_read)
            else:
                with pytest.raises(StoreLocked):
                    await db.run(_read)
        await trio.sleep(1)
        assert not oracle.holds.open


@pytest.mark.parametrize("unsure_s", [0.0, 1.0])
async def test_a_direct_client_of_one_that_is_deposed_follows(
    unsure_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    """`unsure_s`: for how long the owner does not know that it is deposed."""
    async with direct(UNSURE) as (world, db), trio.open_nursery() as nursery:
        connections = remote_owner(db).link.connections
        nursery.start_soon(world.change, unsure_s, LOCKED)
        nursery.start_soon(world.go_over, unsure_s + 2)
        await db.run(_write)
        assert remote_owner(db).link.connections > connections


async def test_a_timestamp_whose_draw_outlasts_the_lease_is_not_handed_out(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # O1
    """Another process owns the store by then, and has committed above it."""
    async with direct() as (world, db):
        oracle, drawn = inside(world.owner).oracle, list[int]()
        plain = oracle.draw

        async def slow() -> int:
            drawn.append(await plain())
            world.check.error = LOCKED
            return drawn[-1]

        with monkeypatch.context() as patch:
            patch.setattr(oracle, "draw_nowait", lambda: 0)
            patch.setattr(oracle, "draw", slow)
            with trio.move_on_after(5) as waiting:
                await remote_owner(db).link.call(Method.DRAW, (1, 0), again=True)
            assert drawn
            assert waiting.cancelled_caught
        await world.go_over(0)


class Losing:
    """A store that another process owns by now. Its first mutation of a row that begins with `prefix` gets no answer,
    and the owner learns `error` by it."""

    def __init__(self, world: World, store: Any, prefix: bytes, error: perco.PercoError) -> None:
        self._world, self._store, self._prefix, self._error = world, store, prefix, error
        self.failed: Mutation | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        if self.failed is not None or not mutations[0].rows[0][0].startswith(self._prefix):
            verdicts: list[Verdict] = await self._store.apply(mutations)
            return verdicts
        self.failed, self._world.check.error = mutations[0], self._error
        return [NoReply("applied, but perhaps too late for the next owner")]


async def test_a_draw_that_fails_while_the_owner_is_not_sure_is_left_to_the_next_one(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with direct() as (world, db), trio.open_nursery() as nursery:
        oracle = inside(world.owner).oracle
        losing = Losing(world, oracle._store, b"oracle", UNSURE)
        monkeypatch.setattr(oracle, "_store", losing)
        while oracle.draw_nowait():  # the rest of the range
            pass
        connections = remote_owner(db).link.connections
        nursery.start_soon(world.change, 1, LOCKED)
        nursery.start_soon(world.go_over, 2)
        await db.run(_write)
        assert losing.failed
        assert remote_owner(db).link.connections > connections


async def test_a_pin_whose_fate_is_unknown_to_a_deposed_owner_is_left_to_the_next_one(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with direct() as (world, db), trio.open_nursery() as nursery:
        pins = inside(world.owner).oracle.pins
        losing = Losing(world, pins._store, b"pin/", LOCKED)
        monkeypatch.setattr(pins, "_store", losing)
        nursery.start_soon(world.go_over, 1)
        async with db.pin("export", lease_s=60):
            pass
        assert losing.failed


async def _ask_for_a_ticket(db: Database) -> str:
    ticket: str = await remote_owner(db).link.call(Method.TICKET, None, again=True, held=True)
    return ticket


async def test_a_ticket_that_a_deposed_owner_cannot_give_is_left_to_the_next_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Unsure(NoTickets):
        asked = 0

        async def admit(self, ticket: str) -> None:
            self.asked += 1
            world.check()

    tickets = Unsure()
    async with direct(UNSURE, tickets) as (world, db), trio.open_nursery() as nursery:
        nursery.start_soon(world.change, 0.2, LOCKED)
        nursery.start_soon(world.go_over, 1.2)
        assert isinstance(await _ask_for_a_ticket(db), str)
        assert tickets.asked == 2


@pytest.mark.parametrize(("sure_after_s", "told_after_s"), [(1.0, 1.0), (60.0, 5.0)])
async def test_an_error_of_an_owner_that_may_have_lost_nothing_is_told(
    sure_after_s: float, told_after_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    """It waits until the owner is sure, but not for long."""

    class Failing(NoTickets):
        async def admit(self, ticket: str) -> None:
            raise Unavailable("Bigtable does not answer")

    async with direct(UNSURE, Failing()) as (world, db), trio.open_nursery() as nursery:
        nursery.start_soon(world.change, sure_after_s, None)
        began = trio.current_time()
        with pytest.raises(Unavailable, match="Bigtable does not answer"):
            await _ask_for_a_ticket(db)
        assert told_after_s <= trio.current_time() - began < told_after_s + 1
        nursery.cancel_scope.cancel()


async def test_a_call_that_is_left_to_the_next_server_does_not_hold_up_the_end_of_this_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with direct(LOCKED) as (world, db), trio.open_nursery() as nursery:
        nursery.start_soon(db.run, _write)
        await trio.sleep(0.5)
        [peer] = world.server._serving
        with trio.move_on_after(1) as waiting:
            await peer.answered()
        await world.go_over(0)
        assert not waiting.cancelled_caught


async def _write(txn: perco.Transaction) -> None:
    txn.set(n, "a", 1)


async def _read(txn: perco.Transaction) -> int | None:
    return await txn.get(n, "a")


async def _read_and_write(txn: perco.Transaction) -> None:
    await _read(txn)
    txn.set(n, "a", 1)


async def test_a_direct_client_that_is_gone_may_have_left_work(autojump_clock: trio.testing.MockClock) -> None:
    """T5 N8: locks; and notify cells that it has not told the server of."""
    place, tickets = Place(SCHEMA), NoTickets()
    async with place.served(sweeper=False) as owner:
        driver = inside(owner).driver
        Server(owner, place.wire, None, tickets)  # type: ignore[arg-type]
        notified: list[bool] = []
        driver.on_notified.append(lambda where: notified.append(True))
        driver.orphaned = trio.Event()
        for act in tickets.on_gone:
            act()  # type: ignore[operator]
        assert notified
        assert driver.orphaned.is_set()


@pytest.mark.parametrize("claims", [0, 1])
async def test_a_look_during_which_rows_were_claimed_proves_nothing(
    claims: int, autojump_clock: trio.testing.MockClock
) -> None:
    """N7: a run that it did not see may have ended since, and left notify cells."""
    async with Machine(SCHEMA, bare_s=0.0).opened(sweeper=True) as owner:
        idle, claimed = local_owner(owner).idle, itertools.count(0, claims)
        await owner.wait_idle()
        idle.claimed_elsewhere, idle.busy_elsewhere = lambda: next(claimed), lambda: False
        assert await idle.look() == (not claims)
