from __future__ import annotations

import random
from pathlib import Path

import trio

import perco
from examples import unique
from tests.examples.running import run


async def test_killed_again_and_again_no_address_has_two_owners_and_the_towns_catch_up(tmp_path: Path) -> None:
    rng = random.Random(2)
    for event in "commit", "ack":
        run("unique", tmp_path / "store", killed_at=(event, rng.randrange(10, 25)))
        async with perco.open(tmp_path / "store", unique.schema) as db:
            async with db.snapshot() as snap:
                known, wrong, _ = await unique.compare(snap)
            assert known > 0
            assert wrong == 0  # though no observer has run since
            async with db.worker():
                await db.wait_idle()
            async with db.snapshot() as snap:
                assert await unique.compare(snap) == (known, 0, 0)
    assert run("unique", tmp_path / "store").endswith("caught up: 0 wrong entries for addresses, 0 for towns\n")


async def test_of_many_who_want_one_address_at_once_one_gets_it() -> None:
    async with perco.open("memory:", unique.schema) as db:
        got: list[int] = []
        refused: list[int] = []
        saw_it_free: list[int] = []
        all_did = trio.Event()

        async def register(txn: perco.Transaction, person: int) -> None:
            await unique.register(txn, person, "a@mail.example", "Bath")
            saw_it_free.append(person)
            if len(saw_it_free) == 20:
                all_did.set()
            await all_did.wait()

        async def want(person: int) -> None:
            try:
                await db.run(register, person)
                got.append(person)
            except unique.EmailTakenError:
                refused.append(person)

        async with trio.open_nursery() as nursery:
            for person in range(20):
                nursery.start_soon(want, person)
        assert (len(got), len(refused)) == (1, 19)
        assert set(saw_it_free) == set(range(20))
        await db.run(unique.register, got[0], "b@mail.example", "Cork")
        await db.run(unique.register, refused[0], "a@mail.example", "Bath")
        await db.run(unique.leave, got[0])
        await db.run(unique.register, refused[1], "b@mail.example", "Bath")
        async with db.worker():
            await db.wait_idle()
        async with db.snapshot() as snap:
            assert await unique.compare(snap) == (2, 0, 0)
            assert await unique.inhabitants(snap, "Bath") == sorted(refused[:2])
            assert await unique.inhabitants(snap, "Cork") == []


async def test_a_wrong_entry_of_either_index_is_seen() -> None:
    async with perco.open("memory:", unique.schema) as db:
        await db.run(unique.register, 1, "a@mail.example", "Bath")
        async with db.transaction() as txn:
            txn.set(unique.holder, "b@mail.example", 1)
            txn.set(unique.since, ("Cork", 1), 1)
        async with db.snapshot() as snap:
            assert await unique.compare(snap) == (1, 1, 2)  # Cork too much, Bath not yet there
