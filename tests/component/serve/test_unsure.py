"""An owner that may have lost its store to another process hands out no timestamp (O1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio
import trio.testing

import perco
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
LOCKED = StoreLocked("postgresql://db", None, "another process", "Stop it.")


class Check:
    """In the place of that of the owner's store."""

    def __init__(self) -> None:
        self.error: perco.PercoError | None = Unavailable("the lease was not renewed")

    def __call__(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("sure_after_s", [5.0, None])
async def test_a_client_waits_until_the_owner_is_sure(
    sure_after_s: float | None, autojump_clock: trio.testing.MockClock
) -> None:
    place = Place(SCHEMA)
    async with place.served() as owner, place.client() as db:
        check, last = Check(), local_owner(owner)._engine.oracle.last
        local_owner(owner).backend.check = check  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:

            async def become_sure(after_s: float) -> None:
                await trio.sleep(after_s)
                assert local_owner(owner)._engine.oracle.last == last, "none is drawn meanwhile"
                check.error = None

            if sure_after_s is not None:
                nursery.start_soon(become_sure, sure_after_s)
                began = trio.current_time()
                await db.run(_write)
                assert trio.current_time() >= began + sure_after_s
            else:
                with pytest.raises(Unavailable, match="the lease was not renewed"):
                    await db.run(_write)
        check.error = None


async def test_a_client_of_one_that_is_deposed_is_told_at_once(autojump_clock: trio.testing.MockClock) -> None:
    place = Place(SCHEMA)
    async with place.served() as owner, place.client() as db:
        check = Check()
        check.error = LOCKED
        local_owner(owner).backend.check = check  # type: ignore[method-assign]
        began = trio.current_time()
        with pytest.raises(StoreLocked, match="in use by another process"):
            await db.run(_write)
        assert trio.current_time() < began + 1
        check.error = None


class NoTickets:
    """In the place of those of a store on PostgreSQL."""

    def __init__(self) -> None:
        self.on_gone: list[object] = []

    def end(self, ticket: str) -> None:
        """There is none."""


@pytest.mark.parametrize("unsure_s", [0.0, 1.0])
async def test_a_direct_client_of_one_that_is_deposed_follows(
    unsure_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    """It asks the next one, in place of which here the same one is sure again. `unsure_s`: for how long the owner does
    not know that it is deposed."""
    place = Place(SCHEMA)
    async with place.served() as owner, place.client() as db:
        assert place.server is not None
        check, place.server._tickets = Check(), NoTickets()  # type: ignore[assignment]
        local_owner(owner).backend.check = check  # type: ignore[method-assign]
        connections = remote_owner(db).link.connections
        async with trio.open_nursery() as nursery:

            async def end() -> None:
                await trio.sleep(unsure_s)
                check.error = LOCKED
                await trio.sleep(2)
                check.error = None
                await place.break_connections()

            nursery.start_soon(end)
            await db.run(_write)
        assert remote_owner(db).link.connections > connections


async def test_a_timestamp_whose_draw_outlasts_the_lease_is_not_handed_out(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:  # O1
    """Another process owns the store by then, and has committed above it."""
    place = Place(SCHEMA)
    async with place.served() as owner, place.client() as db:
        assert place.server is not None
        check, place.server._tickets = Check(), NoTickets()  # type: ignore[assignment]
        check.error = None
        local_owner(owner).backend.check = check  # type: ignore[method-assign]
        oracle, drawn = local_owner(owner)._engine.oracle, list[int]()
        plain = oracle.draw

        async def slow() -> int:
            drawn.append(await plain())
            check.error = LOCKED
            return drawn[-1]

        with monkeypatch.context() as patch:
            patch.setattr(oracle, "draw_nowait", lambda: 0)
            patch.setattr(oracle, "draw", slow)
            with trio.move_on_after(5) as waiting:
                await remote_owner(db).link.call(Method.DRAW, (1, 0), again=True)
            assert drawn
            assert waiting.cancelled_caught
        check.error = None
        await place.break_connections()


class Losing:
    """A store that another process owns by now. `fails`: the answers to a call that shows it."""

    def __init__(self, store: Any, fails: Callable[[Sequence[Mutation]], list[Verdict] | None]) -> None:
        self._store, self._fails = store, fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        return self._fails(mutations) or await self._store.apply(mutations)


LATE = "applied, but perhaps too late for the next owner"


async def test_a_draw_that_fails_while_the_owner_is_not_sure_is_left_to_the_next_one(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(SCHEMA)
    async with place.served() as owner, place.client() as db:
        assert place.server is not None
        check, place.server._tickets = Check(), NoTickets()  # type: ignore[assignment]
        check.error = None
        local_owner(owner).backend.check = check  # type: ignore[method-assign]
        oracle, failed = inside(owner).oracle, list[Mutation]()

        def fails(mutations: Sequence[Mutation]) -> list[Verdict] | None:
            if mutations[0].rows[0][0] != b"oracle" or failed:
                return None
            failed.append(mutations[0])
            check.error = Unavailable("the lease was not renewed")
            return [NoReply(LATE)]

        monkeypatch.setattr(oracle, "_store", Losing(oracle._store, fails))
        while oracle.draw_nowait():  # the rest of the range
            pass
        connections = remote_owner(db).link.connections
        async with trio.open_nursery() as nursery:
            nursery.start_soon(db.run, _write)
            await trio.sleep(1)
            check.error = LOCKED
            await trio.sleep(1)
            check.error = None
            await place.break_connections()
        assert failed
        assert remote_owner(db).link.connections > connections


async def test_a_pin_whose_fate_is_unknown_to_a_deposed_owner_is_left_to_the_next_one(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(SCHEMA)
    async with place.served() as owner, place.client() as db:
        assert place.server is not None
        check, place.server._tickets = Check(), NoTickets()  # type: ignore[assignment]
        check.error = None
        local_owner(owner).backend.check = check  # type: ignore[method-assign]
        pins, failed = inside(owner).oracle.pins, list[Mutation]()

        def fails(mutations: Sequence[Mutation]) -> list[Verdict] | None:
            if failed:
                return None
            failed.append(mutations[0])
            check.error = LOCKED
            return [NoReply(LATE)]

        monkeypatch.setattr(pins, "_store", Losing(pins._store, fails))
        async with trio.open_nursery() as nursery:

            async def end() -> None:
                await trio.sleep(1)
                check.error = None
                await place.break_connections()

            nursery.start_soon(end)
            async with db.pin("export", lease_s=60):
                pass
        assert failed


async def test_a_ticket_that_a_deposed_owner_cannot_give_is_left_to_the_next_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    place = Place(SCHEMA)
    async with place.served() as owner, place.client() as db:
        assert place.server is not None
        check, asked = Check(), list[str]()

        class Unsure(NoTickets):
            async def admit(self, ticket: str) -> None:
                asked.append(ticket)
                check()

        place.server._tickets = Unsure()  # type: ignore[assignment]
        local_owner(owner).backend.check = check  # type: ignore[method-assign]
        got: list[str] = []

        async def ask() -> None:
            got.append(await remote_owner(db).link.call(Method.TICKET, None, again=True, held=True))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.2)
            check.error = LOCKED
            await trio.sleep(1)
            check.error = None
            await place.break_connections()
        assert len(got) == 1
        assert len(asked) == 2


async def test_an_error_of_an_owner_that_turns_out_to_be_sure_is_told(
    autojump_clock: trio.testing.MockClock,
) -> None:
    place = Place(SCHEMA)
    async with place.served() as owner, place.client() as db:
        assert place.server is not None
        check = Check()

        class Failing(NoTickets):
            async def admit(self, ticket: str) -> None:
                raise Unavailable("Bigtable does not answer")

        place.server._tickets = Failing()  # type: ignore[assignment]
        local_owner(owner).backend.check = check  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:

            async def become_sure() -> None:
                await trio.sleep(1)
                check.error = None

            nursery.start_soon(become_sure)
            began = trio.current_time()
            with pytest.raises(Unavailable, match="Bigtable does not answer"):
                await remote_owner(db).link.call(Method.TICKET, None, again=True, held=True)
            assert trio.current_time() >= began + 1


async def test_a_call_that_is_left_to_the_next_server_does_not_hold_up_the_end_of_this_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    place = Place(SCHEMA)
    async with place.served() as owner, place.client() as db:
        assert place.server is not None
        check, place.server._tickets = Check(), NoTickets()  # type: ignore[assignment]
        check.error = LOCKED
        local_owner(owner).backend.check = check  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(db.run, _write)
            await trio.sleep(0.5)
            [peer] = place.server._serving
            with trio.move_on_after(1) as waiting:
                await peer.answered()
            check.error = None
            await place.break_connections()
        assert not waiting.cancelled_caught


async def _write(txn: perco.Transaction) -> None:
    txn.set(n, "a", 1)


async def test_a_direct_client_that_is_gone_may_have_left_work(autojump_clock: trio.testing.MockClock) -> None:
    """T5 N8: locks; and notify cells that it has not told the server of."""
    place, tickets = Place(SCHEMA), NoTickets()
    async with place.served(sweeper=False) as owner:
        driver = inside(owner).driver
        Server(owner, place.wire, None, tickets)  # type: ignore[arg-type]
        notified: list[bool] = []
        driver.on_notified.append(lambda: notified.append(True))
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
