"""The delay window in the process that has the store open; time is virtual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.errors import StoreError
from perco.storage import Batching, BatchOptions, LocalRowStore

WINDOW_S = 0.2
FIXED = perco.Options(batch=BatchOptions(window_s=WINDOW_S, adaptive=False))

docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)


async def add(txn: perco.Transaction, *keys: str) -> None:
    for key in keys:
        txn.set(n, key, (await txn.get(n, key) or 0) + 1)


async def value(db: perco.Database, key: str) -> int | None:
    async with db.snapshot() as snap:
        return await snap.get(n, key)


@pytest.mark.parametrize("batch", [BatchOptions(), BatchOptions(window_s=WINDOW_S)])
async def test_without_a_fixed_window_nothing_stands_between(batch: BatchOptions) -> None:  # D3
    async with perco.open("memory:", SCHEMA, options=perco.Options(batch=batch)) as db:
        assert type(inside(db).driver.store) is LocalRowStore
        began = trio.current_time()
        await db.run(add, "a")
        assert trio.current_time() == began


async def test_transactions_pass_a_window_for_their_reads_and_one_for_their_commits() -> None:  # D1, D2
    async with perco.open("memory:", SCHEMA, options=FIXED) as db:
        applied: list[int] = []
        store = inside(db).driver.store
        assert isinstance(store, Batching)
        apply = store.inner.apply

        async def counted(mutations: Sequence[Any]) -> Any:
            if mutations[0].table == "docs":
                applied.append(len(mutations))
            return await apply(mutations)

        store.inner.apply = counted  # type: ignore[method-assign]
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for i in range(50):
                nursery.start_soon(db.run, add, f"a{i}")
        assert trio.current_time() - began == pytest.approx(2 * WINDOW_S)
        assert applied == [50]
        store.inner.apply = apply  # type: ignore[method-assign]
        assert [await value(db, f"a{i}") for i in range(50)] == [1] * 50


async def test_cells_are_entered_when_the_window_of_their_commit_has_ended() -> None:  # C2, C4
    async with perco.open("memory:", SCHEMA, options=FIXED) as db, trio.open_nursery() as nursery:
        nursery.start_soon(db.run, add, "a")
        await trio.sleep(1.5 * WINDOW_S)  # it waits for its commit
        began, last = trio.current_time(), inside(db).oracle.last
        assert not inside(db).driver.entered.cells
        assert await value(db, "a") is None
        assert trio.current_time() - began == pytest.approx(WINDOW_S)  # its own, and no more
        assert last < inside(db).oracle.last
        assert await value(db, "a") == 1
        assert not inside(db).driver.entered.cells


@pytest.mark.parametrize("keys", [("a",), ("a", "z")])
async def test_those_who_change_one_cell_at_a_time_all_succeed(keys: tuple[str, ...]) -> None:  # T7, C7
    async with perco.open("memory:", SCHEMA, options=FIXED) as db:
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(db.run, add, *keys)
        assert [await value(db, key) for key in keys] == [10] * len(keys)
        assert not inside(db).driver.entered.cells


async def test_a_commit_that_is_cancelled_in_its_window_did_not_happen() -> None:  # D4, T10
    async with perco.open("memory:", SCHEMA, options=FIXED) as db:
        with trio.move_on_after(1.5 * WINDOW_S) as scope:
            await db.run(add, "a")
        assert scope.cancelled_caught
        assert await value(db, "a") is None
        assert not inside(db).driver.entered.cells


async def test_what_was_entered_and_could_not_be_sent_leaves() -> None:  # C3
    async with perco.open("memory:", SCHEMA, options=FIXED) as db:
        store = inside(db).driver.store
        assert isinstance(store, Batching)
        apply, failed = store.inner.apply, 0

        async def fail(mutations: Sequence[Any]) -> Any:
            nonlocal failed
            if mutations[0].table != "docs":
                return await apply(mutations)
            failed += 1
            assert inside(db).driver.entered.cells
            raise StoreError("it could not be sent")

        store.inner.apply = fail  # type: ignore[method-assign]
        with pytest.raises(StoreError, match="could not be sent"):
            await db.run(add, "a")
        store.inner.apply = apply  # type: ignore[method-assign]
        assert failed >= 1
        assert not inside(db).driver.entered.cells
        assert await value(db, "a") is None
