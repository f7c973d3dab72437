"""Serializable transactions and read locks over LMDB: batches, a writer's thread, one step and two phases (T14)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

import perco
from perco.testing import check, record
from perco.testing.history import OK, Ops
from tests.testing.serializable_runs import KEYS, lists, values

CLIENTS, TRANSACTIONS = 12, 25


async def client(db: perco.Database, recorder, name: str, *, lock: bool) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(name)
    for number in range(TRANSACTIONS):
        try:
            async with recorder.transaction(db, name) as (txn, ops):
                if lock or rng.random() < 0.5:
                    for key, seen in (await txn.get_many(values, rng.sample(KEYS, 2), lock=lock)).items():
                        ops.read(key, seen or [])
                else:
                    found = {row.key: row[values] async for row in txn.scan(lists, reverse=rng.random() < 0.5)}
                    for key in KEYS:
                        ops.read(key, found.get(key) or [])
                key = rng.choice(KEYS)
                seen = await txn.get(values, key) or []
                ops.append(key, f"{name}.{number}")
                txn.set(values, key, [*seen, f"{name}.{number}"])
        except perco.TransientError:
            pass


@pytest.mark.parametrize("mode", ["serializable", "locks"])
async def test_a_history_over_lmdb_is_serializable(tmp_path: Path, mode: str) -> None:  # T14
    isolation: perco.Isolation = "serializable" if mode == "serializable" else "snapshot"
    options = perco.Options(transaction=perco.options.TransactionOptions(isolation=isolation))
    with record() as recorder:
        async with perco.open(tmp_path / "store", perco.Schema(lists), options=options) as db:
            async with trio.open_nursery() as nursery:
                for i in range(CLIENTS):
                    nursery.start_soon(lambda name: client(db, recorder, name, lock=mode == "locks"), f"c{i}")
            ops, begin = Ops(), trio.current_time()
            async with db.snapshot() as snap:
                for key, seen in (await snap.get_many(values, KEYS)).items():
                    ops.read(key, seen or [])
            recorder.add("end", begin, trio.current_time(), OK, ops.made)
    report = check(recorder.transactions, serializable=True)
    assert report.ok, report.anomalies
    assert sum(one.status == OK for one in recorder.transactions) > CLIENTS
    assert any(one.status != OK for one in recorder.transactions), "nobody was refused: they did not meet"
