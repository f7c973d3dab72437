"""Calls of Bigtable that hang, and servers that lose the store while a client opens it. Time is virtual."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from perco.bigtable.calls import CallFailed
from perco.bigtable.options import BigtableOptions
from perco.bigtable.owner_row import Holder
from perco.bigtable.rows import FORMAT
from perco.bigtable.store import BigtableStore
from perco.bigtable.wire import types
from perco.database.options import Options
from perco.errors import SchemaMismatch, StoreError, StoreLocked, Unavailable
from perco.rpc.channel import WireOptions
from perco.schema.schema import Schema
from perco.serve.databases import remote_store
from perco.serve.opening import open as opening
from perco.storage import APPLIED
from tests.component.storage.test_bigtable import NOTIFY, TABLE, notifying
from tests.support.bigtable import modelled


@asynccontextmanager
async def hanging(options: BigtableOptions) -> AsyncIterator[tuple[BigtableStore, list[float]]]:
    """A store in the simulation's table. The list says for how many seconds each call that hung might have lasted; a 0
    at its end lets the next call hang, and is replaced."""
    with modelled():
        store = await BigtableStore.open("bigtable://test/test", options)
        left: list[float] = []
        plain = store.rows.calls.ask

        async def ask(requests: Any, deadline: float) -> Any:
            if left and not left[-1]:
                left[-1] = deadline - trio.current_time()
                await trio.sleep_until(deadline)
                return [CallFailed("DEADLINE_EXCEEDED", "it hung") for _ in requests]
            return await plain(requests, deadline)

        store.rows.calls.ask = ask  # type: ignore[method-assign]
        try:
            yield store, left
        finally:
            await store.aclose()


async def test_a_read_that_hangs_leaves_time_for_another(autojump_clock: Any) -> None:
    async with hanging(BigtableOptions(call_s=20.0)) as (store, left):
        left.append(0.0)
        assert await store.rows.format() == FORMAT
        assert left == [5.0]


async def test_a_read_that_is_slow_has_more_time_the_next_time(autojump_clock: Any) -> None:
    async with hanging(BigtableOptions(call_s=20.0)) as (store, left):
        plain, times = store.rows.calls.ask, list[float]()

        async def ask(requests: Any, deadline: float) -> Any:
            times.append(deadline - trio.current_time())
            if times[-1] < 8.0:
                left.append(0.0)
            return await plain(requests, deadline)

        store.rows.calls.ask = ask  # type: ignore[method-assign]
        assert await store.rows.format() == FORMAT
        assert times == [5.0, 10.0]


async def test_a_hint_that_hangs_leaves_time_for_another(autojump_clock: Any) -> None:  # N7
    async with hanging(BigtableOptions(call_s=20.0)) as (store, left):
        store.rows.add(TABLE, (NOTIFY,))
        left.append(0.0)
        assert await store.rows.apply([notifying(b"a")]) == [APPLIED]
        assert left == [pytest.approx(2.5, abs=0.01)]


async def test_a_look_at_the_owner_that_hangs_costs_a_part_of_a_lease(autojump_clock: Any) -> None:  # O1
    async with hanging(BigtableOptions(call_s=20.0, lease_s=3.0)) as (store, left):
        left.append(0.0)
        assert (await store._notice()).holder.token == store._ours.token
        assert left == [1.0]


async def test_a_claim_that_was_lost_is_not_taken_for_an_earlier_one(autojump_clock: Any) -> None:  # O1
    """The earlier claim of the same process arrives late. Else two processes would own the store."""
    with modelled():
        store = await BigtableStore.open("bigtable://test/test", BigtableOptions())
        plain = store.rows.calls.ask

        async def ask(requests: Any, deadline: float) -> Any:
            if isinstance(requests[0], types().CheckAndMutateRow):
                return [CallFailed("DEADLINE_EXCEEDED", "it is lost")]
            return await plain(requests, deadline)

        store.rows.calls.ask = ask  # type: ignore[method-assign]
        held = store._ours
        assert await store._take(held)
        assert not await store._take(held._replace(number=held.number + 1))
        assert not await store._take(held._replace(token="another"))
        await store.aclose()


async def test_each_claim_has_a_token_of_its_own(autojump_clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # O1
    claims: list[Holder] = []
    plain = BigtableStore._take

    async def take(self: BigtableStore, ours: Holder) -> bool:
        claims.append(ours)
        return len(claims) > 1 and await plain(self, ours)

    monkeypatch.setattr(BigtableStore, "_take", take)
    with modelled():
        store = await BigtableStore.open("bigtable://test/test", BigtableOptions())
        assert [claim.number for claim in claims] == [1, 1]
        assert len({claim.token for claim in claims}) == 2
        await store.aclose()


class _Served:
    """A store that a server at `at` serves for direct clients."""

    shown, own = "bigtable://test/test", False

    async def address(self) -> str:
        await trio.lowlevel.checkpoint()
        return "unix:/at"


class _Opening(opening):
    """Joins a server that answers with these errors first."""

    def __init__(self, errors: list[StoreError]) -> None:
        wire = WireOptions(patience_s=10.0)
        super().__init__("bigtable://test/test", Schema(), options=Options(wire=wire))
        self.errors = errors

    async def _join_remote(self, remote: Any, at: str) -> Any:
        await trio.sleep(1.0)
        if self.errors:
            raise self.errors.pop(0)
        return at


async def test_a_client_tries_again_if_the_server_has_just_lost_the_store(autojump_clock: Any) -> None:
    lost: list[StoreError] = [Unavailable("it has not renewed its lease"), StoreLocked("a store", None, "another")]
    assert await _Opening(lost)._open_remote(_Served()) == "unix:/at"  # type: ignore[arg-type, comparison-overlap]


async def test_a_client_does_not_try_for_ever(autojump_clock: Any) -> None:
    errors: list[StoreError] = [Unavailable(f"try {number}") for number in range(100)]
    with pytest.raises(Unavailable):
        await _Opening(errors)._open_remote(_Served())  # type: ignore[arg-type]
    assert trio.current_time() < 12.0


async def test_an_error_that_stays_is_raised_at_once(autojump_clock: Any) -> None:
    with pytest.raises(SchemaMismatch):
        await _Opening([SchemaMismatch("another schema")])._open_remote(_Served())  # type: ignore[arg-type]
    assert trio.current_time() == 1.0


async def test_a_client_that_could_not_be_opened_does_not_keep_the_next_from_its_address(autojump_clock: Any) -> None:
    async def ticket() -> str:
        raise AssertionError("no call needs one")

    with modelled():
        remote = remote_store("bigtable://test/test", Options())
        assert remote is not None
        remote.rows(ticket).close()
        assert await remote.address() == ""
