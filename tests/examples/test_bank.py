from __future__ import annotations

import random
from pathlib import Path

import perco
from examples import bank
from tests.examples.running import run


async def read(folder: Path) -> tuple[dict[int, int], dict[int, list[int]]]:
    async with perco.open(folder, bank.schema) as db, db.snapshot() as snap:
        balances = {row.key: row.get(bank.balance, 0) async for row in snap.scan(bank.accounts)}
        return balances, {row.key: row.get(bank.entry, []) async for row in snap.scan(bank.ledger)}


def replayed(ledger: dict[int, list[int]]) -> dict[int, int]:
    """Balances as the ledger has them. Sums of transfers: their order is of no account."""
    balances = dict.fromkeys(range(bank.ACCOUNTS), bank.OPENING)
    for source, target, amount, paid in ledger.values():
        if paid:
            balances[source] -= amount
            balances[target] += amount
    return balances


async def test_killed_again_and_again_it_makes_every_transfer_once(tmp_path: Path) -> None:
    rng = random.Random(1)
    for _ in range(2):
        run("bank", tmp_path / "store", killed_at=("commit", rng.randrange(20, 300)))
        balances, ledger = await read(tmp_path / "store")
        assert balances == replayed(ledger)
        assert 0 < len(ledger) < bank.TRANSFERS
    printed = run("bank", tmp_path / "store")
    assert f"sums that the auditor saw meanwhile: [{bank.ACCOUNTS * bank.OPENING}]" in printed
    balances, ledger = await read(tmp_path / "store")
    assert balances == replayed(ledger)
    assert min(balances.values()) >= 0
    assert {number: tuple(entry[:3]) for number, entry in ledger.items()} == {
        number: bank.order(number) for number in range(bank.TRANSFERS)
    }


async def test_a_transfer_that_is_asked_for_again_moves_nothing() -> None:
    async with perco.open("memory:", bank.schema) as db:
        await db.run(bank.open_accounts)
        for _ in range(2):
            assert await db.run(bank.transfer, 1, 0, 1, 60)
            assert not await db.run(bank.transfer, 2, 0, 1, 60)
        await db.run(bank.transfer, 3, 1, 0, 60)
        assert not await db.run(bank.transfer, 2, 0, 1, 60)  # refused is refused, though it could be paid by now
        async with db.snapshot() as snap:
            assert await snap.get_many(bank.balance, [0, 1]) == {0: 100, 1: 100}
