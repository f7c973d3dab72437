"""A wait for observers knows the causes that runs of other processes carry, even those that came after their claims."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.notify.waiting import Waiting
from perco.notify.worker import Worker
from tests.component.serve.kit import Place

Txn = perco.Transaction
Change = perco.Change[Any, Any]


def numbers(name: str) -> perco.Column[int, int]:
    return perco.Table(name, key=perco.INT64).column("value", perco.INT64)


async def test_a_run_tells_the_owner_of_a_cause_that_is_older_than_those_of_its_claim(  # N7
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An older cause reaches a row after a client has claimed the row, and before its run there begins. The run carries
    the cause from a row that a look has not reached yet to one that it has looked at already."""
    start, middle, end = numbers("source"), numbers("z"), numbers("a")
    schema = perco.Schema(start.table, middle.table, end.table)
    may_start, claimed, may_run, looked, may_look = (trio.Event() for _ in range(5))

    @schema.observe(start, id="start")
    async def on_start(txn: Txn, change: Change) -> None:
        await may_start.wait()
        txn.set(middle, 1, 90)

    @schema.observe(middle, id="middle")
    async def on_middle(txn: Txn, change: Change) -> None:
        txn.set(end, 1, change.value)

    @schema.observe(end, id="end")
    async def on_end(txn: Txn, change: Change) -> None:
        raise AssertionError("it is paused")

    attempt, rows = Worker._try, Waiting._rows

    async def held(self: Worker, observer: Any, *args: Any) -> bool | None:
        if observer.id == "middle":
            claimed.set()
            await may_run.wait()
        return await attempt(self, observer, *args)

    async def halfway(self: Waiting, tables: Iterable[str]) -> AsyncGenerator[Any, None]:
        for table in tables:
            if table == "z":
                looked.set()
                await may_look.wait()
            async for row in rows(self, [table]):
                yield row

    async def value(column: perco.Column[int, int]) -> int | None:
        async with owner.snapshot() as snap:
            return await snap.get(column, 1)

    monkeypatch.setattr(Worker, "_try", held)
    place = Place(schema)
    async with place.served() as owner, place.client() as client, client.worker():
        await client.pause("end")
        async with owner.transaction() as txn:
            txn.set(start, 1, 1)
        ts = txn.commit_ts
        async with owner.transaction() as txn:
            txn.set(middle, 1, 200)
        await claimed.wait()
        may_start.set()
        while (await value(middle)) != 90:  # noqa: ASYNC110 - of another process
            await trio.sleep(0.01)
        while len(place.server.sessions.claims) != 1:  # type: ignore[union-attr] # noqa: ASYNC110
            await trio.sleep(0.01)
        monkeypatch.setattr(Waiting, "_rows", halfway)
        found: list[dict[str, int] | None] = []

        async def look() -> None:
            found.append(await inside(owner).waiting.none_up_to(ts))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await looked.wait()
            may_run.set()
            while (await value(end)) != 90:  # noqa: ASYNC110
                await trio.sleep(0.01)
            may_look.set()
        assert found == [None]
        assert (await owner.waiting())["end"] == 1


async def test_a_claim_does_not_carry_the_causes_of_observers_that_it_is_not_for() -> None:  # N7, V14
    """A change waits for a paused observer, and other programs run another observer in that row again and again: a wait
    for what the other one derives does not go on for ever."""
    value = numbers("docs")
    copy = value.table.column("copy", perco.INT64)
    schema = perco.Schema(value.table)
    began, may_end = trio.Event(), trio.Event()

    @schema.observe(value, id="paused", writes=[])
    async def on_paused(txn: Txn, change: Change) -> None:
        raise AssertionError("it is paused")

    @schema.observe(value, id="copy", writes=[copy])
    async def on_copy(txn: Txn, change: Change) -> None:
        txn.set(copy, change.key, change.value)
        if change.value == 2:
            began.set()
            await may_end.wait()

    place = Place(schema)
    async with place.served() as owner, place.client() as client, client.worker():
        await client.pause("paused")
        stamps = []
        for number in (1, 2):
            async with owner.transaction() as txn:
                txn.set(value, 1, number)
            stamps.append(txn.commit_ts)
            if number == 1:
                while (await owner.waiting())["copy"]:  # noqa: ASYNC110 - in another process
                    await trio.sleep(0.01)
        await began.wait()
        without = [inside(owner).catalogue.observers["paused"].number]
        assert await inside(owner).waiting.none_up_to(stamps[0], without) == {}
        assert await inside(owner).waiting.none_up_to(stamps[1], without) is None
        may_end.set()
