"""A bank over LMDB, used by many threads, and by many tasks of asyncio's: the total stays, and each read sees a single
moment."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from time import perf_counter

import pytest

import perco
import perco.aio
import perco.sync
from perco.testing import check, record
from perco.testing.history import OK, Ops, Recorder
from tests.testing.serializable_runs import KEYS, lists, values

accounts = perco.Table("accounts", key=perco.INT64, splits=[8])
balance = accounts.column("balance", perco.INT64)
SCHEMA = perco.Schema(accounts)
ACCOUNTS, OPENING, CLIENTS, TRANSFERS = 16, 100, 16, 12
OPTIONS = perco.Options(durability="process")

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs


def transfer(txn: perco.sync.Transaction, source: int, target: int, amount: int) -> int:
    found = txn.get_many(balance, [source, target])
    have, other = found[source] or 0, found[target] or 0
    amount = min(amount, have)
    txn.set(balance, source, have - amount)
    txn.set(balance, target, other + amount)
    return amount


def test_transfers_of_sixteen_threads_keep_the_total(tmp_path: Path) -> None:
    sums: list[int] = []

    def client(db: perco.sync.Database, number: int) -> int:
        rng, moved = random.Random(number), 0
        for i in range(TRANSFERS):
            source, target = rng.sample(range(ACCOUNTS), 2)
            moved += db.run(transfer, source, target, rng.randint(1, 60))
            if i % 4 == 0:
                with db.snapshot() as snap:
                    sums.append(sum(row[balance] or 0 for row in snap.scan(accounts)))
        return moved

    with perco.sync.open(tmp_path / "store", SCHEMA, options=OPTIONS) as db:
        with db.transaction() as txn:
            for i in range(ACCOUNTS):
                txn.set(balance, i, OPENING)
        with ThreadPoolExecutor(CLIENTS) as pool:
            moved = sum(pool.map(lambda number: client(db, number), range(CLIENTS)))
        statistics = db.statistics()
    assert moved > 0
    assert set(sums) == {ACCOUNTS * OPENING}
    assert statistics.live_transactions == 0
    with perco.sync.open(tmp_path / "store", SCHEMA, readonly=True) as db, db.snapshot() as snap:
        assert sum(row[balance] or 0 for row in snap.scan(accounts)) == ACCOUNTS * OPENING
        with pytest.raises(perco.errors.ReadOnly):
            db.run(transfer, 1, 2, 3)


async def transfer_async(txn: perco.aio.Transaction, source: int, target: int, amount: int) -> int:
    found = await txn.get_many(balance, [source, target])
    have, other = found[source] or 0, found[target] or 0
    amount = min(amount, have)
    txn.set(balance, source, have - amount)
    txn.set(balance, target, other + amount)
    return amount


def test_transfers_of_many_tasks_keep_the_total_though_some_are_cancelled(tmp_path: Path) -> None:
    sums: list[int] = []

    async def client(db: perco.aio.Database, number: int) -> int:
        rng, moved = random.Random(number), 0
        for i in range(TRANSFERS):
            source, target = rng.sample(range(ACCOUNTS), 2)
            task = asyncio.create_task(db.run(transfer_async, source, target, rng.randint(1, 60)))
            if i % 3 == 0:
                await asyncio.sleep(0)
                task.cancel()
            [found] = await asyncio.gather(task, return_exceptions=True)
            moved += found if isinstance(found, int) else 0
            assert isinstance(found, int | asyncio.CancelledError)
            if i % 4 == 0:
                async with db.snapshot() as snap:
                    sums.append(sum([row[balance] or 0 async for row in snap.scan(accounts)]))
        return moved

    async def main() -> int:
        async with perco.aio.open(tmp_path / "store", SCHEMA, options=OPTIONS) as db:
            async with db.transaction() as txn:
                for i in range(ACCOUNTS):
                    txn.set(balance, i, OPENING)
            moved = await asyncio.gather(*[client(db, number) for number in range(2 * CLIENTS)])
            assert db.statistics().live_transactions == 0
            return sum(moved)

    assert asyncio.run(main()) > 0
    assert set(sums) == {ACCOUNTS * OPENING}


# ------------------------------------------------------------------ a history, and its verdict


def append(db: perco.sync.Database, recorder: Recorder, client: str, rng: random.Random, number: int) -> None:
    """One recorded transaction: reads two lists, appends to one."""
    ops, begin = Ops(), perf_counter()
    txn = db.begin()
    try:
        for key, seen in txn.get_many(values, rng.sample(KEYS, 2)).items():
            ops.read(key, seen or [])
        key = rng.choice(KEYS)
        seen = txn.get(values, key) or []
        ops.append(key, f"{client}.{number}")
        txn.set(values, key, [*seen, f"{client}.{number}"])
        txn.commit()
    except perco.TransientError:
        pass
    finally:
        txn.discard()
        status = {"committed": OK, "aborted": "fail", "unknown": "unknown"}[txn.outcome]
        recorder.add(client, begin, perf_counter(), status, ops.made)


def test_what_threads_did_and_saw_was_snapshot_isolation(tmp_path: Path) -> None:
    def client(name: str) -> None:
        rng = random.Random(name)
        for number in range(15):
            append(db, recorder, name, rng, number)

    with record() as recorder, perco.sync.open(tmp_path / "store", perco.Schema(lists), options=OPTIONS) as db:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(client, [f"c{i}" for i in range(8)]))
        ops, begin = Ops(), perf_counter()
        with db.snapshot() as snap:
            for key, seen in snap.get_many(values, KEYS).items():
                ops.read(key, seen or [])
        recorder.add("end", begin, perf_counter(), OK, ops.made)
    report = check(recorder.transactions)
    assert report.ok, report.anomalies
    assert report.transactions == 8 * 15 + 1
    assert sum(one.status == OK for one in recorder.transactions) > 8


@pytest.mark.parametrize("where", ["owner", "client"])
def test_additions_of_threads_and_of_tasks_share_commits_and_count_once(tmp_path: Path, where: str) -> None:  # C10
    path = tmp_path / "store"

    async def by_tasks(url: str) -> int:
        async with perco.aio.open(url, SCHEMA, options=OPTIONS) as db:

            async def client() -> list[int]:
                return [await db.add(balance, 2, 1) for _ in range(TRANSFERS)]

            sums = await asyncio.gather(*(client() for _ in range(CLIENTS)))
            assert sorted(chain.from_iterable(sums)) == [*range(1, CLIENTS * TRANSFERS + 1)]
            return db.statistics().combined

    with perco.sync.open(path, SCHEMA, options=OPTIONS) as owner:
        url = f"unix:{path}/socket"
        with perco.sync.open(url, SCHEMA, options=OPTIONS) if where == "client" else nullcontext(owner) as db:

            def client(_: int) -> list[int]:
                return [db.add(balance, 1, 1) for _ in range(TRANSFERS)]

            with ThreadPoolExecutor(CLIENTS) as pool:
                sums = [*chain.from_iterable(pool.map(client, range(CLIENTS)))]
            assert sorted(sums) == [*range(1, CLIENTS * TRANSFERS + 1)]
            assert db.statistics().combined > 0
        if where == "client":
            assert asyncio.run(by_tasks(url)) > 0
    if where == "owner":
        assert asyncio.run(by_tasks(str(path))) > 0
