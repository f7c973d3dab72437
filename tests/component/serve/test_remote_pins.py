"""Pins of a served store whose calls are lost, sent twice, or cancelled on their way; time is virtual."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.rpc.peer import Peer
from perco.serve.messages import Method
from tests.component.serve.kit import WIRE, Place

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)


@pytest.fixture
def place() -> Place:
    return Place(SCHEMA)


async def put(txn: perco.Transaction, value: int) -> None:
    txn.set(n, "a", value)


class Lost:
    """The reply to the first call of a method is lost. `done`: the call has been made; `calls`: that came."""

    def __init__(self, place: Place, method: Method) -> None:
        server = place.server
        assert server is not None
        self.calls = self.fired = 0
        self.done = trio.Event()
        self._handler = server._handlers[int(method)]
        server._handlers[int(method)] = self._handle

    def _handle(self, session: Any, peer: Peer, id: int, arguments: Any) -> None:
        self.calls += 1
        if self.calls == 1:
            reply, fail = peer.reply, peer.fail

            def lost(replied: int, value: Any, answer: Any = reply) -> None:
                if replied != id:
                    answer(replied, value)
                    return
                self.fired += 1
                self.done.set()

            peer.reply = lost  # type: ignore[method-assign]
            peer.fail = lambda replied, error: lost(replied, error, fail)  # type: ignore[method-assign]
        self._handler(session, peer, id, arguments)


class Held:
    """Calls of a method wait at the server until `go`."""

    def __init__(self, place: Place, method: Method) -> None:
        server = place.server
        assert server is not None
        self.calls = 0
        self.came, self.go = trio.Event(), trio.Event()
        self._place, self._handler = place, server._handlers[int(method)]
        server._handlers[int(method)] = self._handle

    def _handle(self, *call: Any) -> None:
        self.calls += 1
        self.came.set()

        async def later() -> None:
            await self.go.wait()
            self._handler(*call)

        assert self._place.owner is not None
        inside(self._place.owner).background.spawn(later)


async def test_dropping_a_pin_twice_does_not_drop_what_another_has_made_in_between(place: Place) -> None:  # R4 T15
    async with place.served() as owner, place.clients(2) as (one, other), trio.open_nursery() as nursery:
        async with one.pin("export", lease_s=600, keep=True):
            pass
        lost, dropped, over = Lost(place, Method.DROP_PIN), [], trio.Event()

        async def drop() -> None:
            dropped.append(await one.drop_pin("export"))
            over.set()

        nursery.start_soon(drop)
        await lost.done.wait()
        async with other.pin("export", lease_s=600, keep=True) as pin:
            made = pin.pin
        await place.break_connections()
        await over.wait()
        assert dropped == [True], "it was there when it was dropped"
        assert (lost.fired, lost.calls) == (1, 2)
        assert await owner.pins() == [made]


async def test_a_pin_whose_making_is_cancelled_on_its_way_does_not_stay(place: Place) -> None:  # T15
    async with place.served() as owner, place.client() as db, trio.open_nursery() as nursery:
        held = Held(place, Method.PIN)
        scope = trio.CancelScope()

        async def pin() -> None:
            with scope:
                async with db.pin("export", lease_s=600):
                    pytest.fail("it has been cancelled")

        nursery.start_soon(pin)
        await held.came.wait()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        held.go.set()
        await trio.sleep(1)
        assert held.calls == 1
        assert await owner.pins() == []
        assert not inside(owner).oracle.holds.pins
        async with db.pin("export", lease_s=600):
            pass


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_pin_whose_taking_over_is_cancelled_on_its_way_stays_with_its_holder(
    place: Place, arrives: bool
) -> None:  # T15
    async with place.served() as owner, place.clients(2) as (one, other), trio.open_nursery() as nursery:
        async with one.pin("export", lease_s=600, owner="one", keep=True) as pin:
            made = pin.pin
            held = Held(place, Method.PIN)
            scope = trio.CancelScope()

            async def take_over() -> None:
                with scope:
                    async with other.pin("export", lease_s=60_000, owner="other"):
                        pytest.fail("it has been cancelled")

            nursery.start_soon(take_over)
            await held.came.wait()
            server = place.server
            assert server is not None
            server._handlers[int(Method.PIN)] = held._handler  # later calls are not held
            if arrives:
                held.go.set()
            scope.cancel()
            await trio.sleep(1)
            [standing] = await owner.pins()
            assert (standing.owner, standing.id, standing.ts) == ("one", made.id, made.ts)
            assert abs(standing.expires_ms - made.expires_ms) < 10_000, "and not of the lease that it was to have"
            await pin.renew()
            held.go.set()
            await trio.testing.wait_all_tasks_blocked()
        assert await one.drop_pin("export")
        assert await owner.pins() == []


async def test_a_pin_that_is_asked_for_twice_is_not_made_again_once_it_was_dropped(place: Place) -> None:  # R4 T15
    async with place.served() as owner, place.clients(2) as (one, other), trio.open_nursery() as nursery:
        lost, failed = Lost(place, Method.PIN), trio.Event()

        async def pin() -> None:
            with pytest.raises(perco.StoreError, match="has been dropped, so it is neither made nor renewed"):
                async with one.pin("export", lease_s=600):
                    pass
            failed.set()

        nursery.start_soon(pin)
        await lost.done.wait()
        assert await other.drop_pin("export")
        await place.break_connections()
        await failed.wait()
        assert (lost.fired, lost.calls) == (1, 2)
        assert await owner.pins() == []


async def test_a_pin_that_is_asked_for_twice_does_not_take_its_place_from_who_has_it_now(place: Place) -> None:  # R4
    async with place.served() as owner, place.clients(2) as (one, other), trio.open_nursery() as nursery:
        lost, failed = Lost(place, Method.PIN), trio.Event()

        async def pin() -> None:
            with pytest.raises(perco.UsageError, match="under the name 'export' meanwhile"):
                async with one.pin("export", lease_s=600):
                    pass
            failed.set()

        nursery.start_soon(pin)
        await lost.done.wait()
        async with other.pin("export", lease_s=600, keep=True) as taken:  # as if the first had died
            made = taken.pin
        await place.break_connections()
        await failed.wait()
        await trio.sleep(1)
        assert (lost.fired, lost.calls) == (1, 3), "one of the other"
        assert await owner.pins() == [made]


async def test_a_pin_whose_reply_was_lost_is_made_once(place: Place) -> None:  # R4
    async with place.served() as owner, place.client() as db, trio.open_nursery() as nursery:
        lost, made = Lost(place, Method.PIN), trio.Event()

        async def pin() -> None:
            async with db.pin("export", lease_s=600, keep=True) as pinned:
                assert await owner.pins() == [pinned.pin]
            made.set()

        nursery.start_soon(pin)
        await lost.done.wait()
        await place.break_connections()
        await made.wait()
        assert (lost.fired, lost.calls) == (1, 2)


async def test_who_gives_up_on_a_pin_that_was_sent_does_not_say_that_nothing_was_written(place: Place) -> None:  # R6
    async with place.served(), place.client() as db:
        async with trio.open_nursery() as nursery:
            lost, failed = Lost(place, Method.PIN), trio.Event()

            async def pin() -> None:
                with pytest.raises(perco.errors.WriteUnknown, match="it may or may not have been done"):
                    async with db.pin("export", lease_s=600):
                        pass
                failed.set()

            nursery.start_soon(pin)
            await lost.done.wait()
            server, place.server = place.server, None  # it is away
            await place.break_connections()
            await failed.wait()
            place.server = server
        await trio.sleep(2 * WIRE.patience_s)
        assert (lost.fired, lost.calls) == (1, 1)
        assert await db.pins() == [], "and then it is dropped"


async def test_a_question_and_a_call_that_was_never_sent_wrote_nothing(place: Place) -> None:  # R6
    async with place.served(), place.client() as db:
        server, place.server = place.server, None
        await place.break_connections()
        with pytest.raises(perco.Unavailable, match="Try again, or allow more time") as caught:
            await inside(db).oracle.newest()
        assert "written" not in str(caught.value)  # that is for whoever asked to say
        with pytest.raises(perco.Unavailable, match="Nothing was written"):
            await inside(db).oracle.pins.put("export", "tests", 1, 60, "id")
        place.server = server


async def test_a_pin_is_renewed_and_dropped_by_who_has_it(place: Place) -> None:  # T15
    async with place.served() as owner, place.clients(2) as (one, other):
        async with one.pin("export", lease_s=600) as pin:
            await pin.renew(900)
            assert await owner.pins() == [pin.pin]
            async with other.pin("export", lease_s=600, keep=True) as taken:  # takes it up, as after a crash
                made = taken.pin
            assert (made.ts, made.made_ms) == (pin.pin.ts, pin.pin.made_ms)
            with pytest.raises(perco.UsageError, match="another program"):
                await pin.renew()
        assert await owner.pins() == [made], "it was not its own any more"
        assert await one.drop_pin("export")
        assert not await one.drop_pin("export")
