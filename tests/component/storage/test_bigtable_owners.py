"""Changes of owner, and sessions that end, while calls are slow or late.

Whole databases, with direct clients, in the table of the simulation; time is virtual."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.bigtable.address import Place
from perco.bigtable.calls import CallFailed
from perco.bigtable.client import ClientRows
from perco.bigtable.options import BigtableOptions
from perco.bigtable.store import BigtableStore
from perco.database.inside import close, inside, local_owner
from perco.errors import SessionEnded, StoreLocked, Unavailable
from perco.rpc.channel import WireOptions
from perco.serve.client import open_served, remote_owner
from perco.serve.opening import open as opening
from tests.component.storage.test_bigtable_clients import set_clock
from tests.support import bigtable
from tests.support.realtime import held, waited_for

docs = perco.Table("docs", key=perco.TEXT, keep=perco.Keep(seconds=1))
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)
WIRE = WireOptions()
BIGTABLE = BigtableOptions(lease_s=60.0)  # the lease's thread runs in real time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, autojump_clock: Any) -> Iterator[Any]:
    set_clock(monkeypatch, trio.current_time)
    monkeypatch.setattr(trio.to_thread, "run_sync", held(trio.to_thread.run_sync))
    with bigtable.modelled(), waited_for():
        yield autojump_clock


def options() -> perco.Options:
    vacuum = perco.options.VacuumOptions(on=False)
    return perco.Options(bigtable=BIGTABLE, wire=WIRE, wall=lambda: 1e9 + trio.current_time(), seed=1, vacuum=vacuum)


class Owners:
    """Owners of one store, one after the other, and the connections of clients to the present one."""

    def __init__(self) -> None:
        self.url, self.cut, self.rows = bigtable.fresh(), set[str](), dict[str, ClientRows]()
        self._streams: dict[str, list[trio.abc.Stream]] = {}

    @asynccontextmanager
    async def lead(self) -> AsyncIterator[perco.Database]:
        self.opened: Any = opening(self.url, SCHEMA, options=options())
        self.opened.leads = self.opened.direct = True
        async with self.opened as self.owner:
            yield self.owner

    async def client(self, name: str) -> perco.Database:
        async def connect(number: int, port: int) -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            if name in self.cut:
                raise ConnectionRefusedError("cut off")
            ours, theirs = trio.testing.memory_stream_pair()
            self._streams.setdefault(name, []).extend([ours, theirs])
            server = self.opened.server
            inside(self.owner).background.start(lambda: server.connection(theirs, None), "connection")
            return ours

        def reach(ask: Any) -> ClientRows:
            self.rows[name] = ClientRows(Place(self.url), BIGTABLE, ticket=ask)
            return self.rows[name]

        return await open_served(name, connect, SCHEMA, options(), WIRE, b"", reach=reach)

    async def cut_off(self, name: str) -> None:
        """A client cannot reach the owner any more; it still reaches Bigtable."""
        self.cut.add(name)
        for stream in self._streams[name]:
            await trio.aclose_forcefully(stream)

    async def age(self, times: int = 5) -> None:
        """Let older timestamps fall out of the retention."""
        for value in range(times):
            await self.owner.run(lambda txn, value=value: write(txn, ("x",), value))
            await trio.sleep(1.5)

    async def ended(self, left: int) -> None:
        while len(self.opened.server.sessions.all) > left:  # noqa: ASYNC110
            await trio.sleep(0.5)


async def write(txn: perco.Transaction, keys: tuple[str, ...], value: int) -> None:
    for key in keys:
        txn.set(n, key, value)


async def read(txn: perco.Transaction, *keys: str) -> list[int | None]:
    return [await txn.get(n, key) for key in keys]


async def test_a_transaction_of_an_ended_session_does_not_commit_by_halves(clock: Any) -> None:  # T1 T5 T13 R5
    """A client is cut off from its owner, but not from Bigtable, and its prewrites are slow. Meanwhile its session ends
    and the floor rises. Another client rolls one lock back without a marker, because its floor is the new one; the
    other lock arrives after that."""
    owners = Owners()
    async with owners.lead() as owner:
        one, other = await owners.client("one"), await owners.client("other")
        await one.run(lambda txn: read(txn, "w"))  # so it has a permit, with the old floor
        plain = owners.rows["one"].calls.ask
        slow, first, landed, go = trio.Event(), trio.Event(), trio.Event(), trio.Event()

        async def ask(requests: Any, deadline: float) -> Any:
            late = [each for each in requests if getattr(each, "row_key", b"") == b"docs\x00a" and not slow.is_set()]
            if not late:
                return await plain(requests, deadline)
            early = [each for each in requests if each not in late]
            assert early
            slow.set()
            await first.wait()
            answers = dict(zip(map(id, early), await plain(early, deadline), strict=True))
            landed.set()
            await go.wait()
            assert trio.current_time() < deadline
            answers |= dict(zip(map(id, late), await plain(late, deadline), strict=True))
            return [answers[id(each)] for each in requests]

        owners.rows["one"].calls.ask = ask  # type: ignore[method-assign]
        begun = trio.Event()

        async def transaction() -> None:
            with pytest.raises(SessionEnded):  # noqa: PT012 - it is raised at the block's end
                async with one.transaction() as txn:
                    await write(txn, ("a", "b"), 1)
                    begun.set()
                    await trio.sleep(12)  # the session lasts for 10 s

        async with trio.open_nursery() as nursery:
            nursery.start_soon(transaction)
            await begun.wait()
            await owners.cut_off("one")
            await owners.age(4)
            await owners.ended(left=1)
            nursery.start_soon(local_owner(owner).vacuum, None)
            await trio.sleep(1)
            first.set()
            await landed.wait()
            assert await other.run(lambda txn: read(txn, "b")) == [None]
            assert owners.rows["other"]._permit.floor > owners.rows["one"]._permit.floor
            owners.cut.clear()
            await trio.sleep(1)
            assert remote_owner(one).link.connected.is_set()
            go.set()
        assert await owner.run(lambda txn: read(txn, "a", "b")) == [None, None]
        await close(one)
        await close(other)


async def test_a_former_owners_late_watermark_does_not_count(clock: Any) -> None:  # G1 R8
    """The next owner holds a timestamp for a client below it."""
    owners = Owners()
    async with owners.lead() as owner:
        client = await owners.client("one")
        await owner.run(lambda txn: write(txn, ("x", "z"), 1))
        await trio.sleep(5)
        snapshot = client.snapshot()
        snap = await snapshot.__aenter__()
        await owners.cut_off("one")
        await owner.run(lambda txn: write(txn, ("x", "z"), 2))
        await owners.age()
        await owners.ended(left=0)
        rows, late = owners.opened.owned.rows, list[Any]()
        plain = rows.calls.ask

        async def ask(requests: Any, deadline: float) -> Any:
            if any(b"watermark" in getattr(each, "row_key", b"") for each in requests):
                late.extend(requests)
                return [CallFailed("UNAVAILABLE", "there was no answer") for _ in requests]
            return await plain(requests, deadline)

        rows.calls.ask = ask
        with pytest.raises(Unavailable):
            await local_owner(owner).vacuum(None)
        rows.calls.ask = plain
        assert late
    async with owners.lead() as owner:
        owners.cut.clear()
        await remote_owner(client).link.connected.wait()
        assert inside(owner).oracle.holds.open, "the next owner holds the client's timestamp"
        await owners.opened.owned.rows.calls.ask(late[:1], trio.current_time() + 5)  # it takes effect now
        await trio.sleep(30)
        await local_owner(owner).vacuum(None)
        assert await snap.get(n, "z") == 1
        await snapshot.__aexit__(None, None, None)
        await close(client)


async def test_the_next_owner_waits_for_the_lease_of_the_last_one() -> None:  # O1
    """However short its own is."""
    plain = replace(BIGTABLE, call_s=2.0, late_s=0.0)
    with bigtable.modelled():
        url = bigtable.fresh()
        store = await BigtableStore.open(url, replace(plain, lease_s=3.0))
        with pytest.raises(StoreLocked):
            await BigtableStore.open(url, replace(plain, lease_s=0.3))
        store.check()
        await store.aclose()


async def test_a_store_that_was_claimed_and_released_between_two_looks_is_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = replace(BIGTABLE, call_s=4.0, late_s=0.0, lease_s=1.0)
    plain, claims = BigtableStore._take, list[bool]()

    async def take(self: BigtableStore, ours: Any) -> bool:
        if not claims:
            claims.append(True)
            other = await BigtableStore.open(url, quick)
            await other.aclose()
        claims.append(await plain(self, ours))
        return claims[-1]

    monkeypatch.setattr(BigtableStore, "_take", take)
    with bigtable.modelled(), trio.fail_after(60):
        url = bigtable.fresh()
        store = await BigtableStore.open(url, quick)
        await store.aclose()
    assert claims == [True, True, False, True], "the other's; refused once"
