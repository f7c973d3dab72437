"""The brokerage's books agree after any mix of its transactions, and a fault in them is seen."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio

import perco
from bench.brokerage import market
from bench.brokerage.client import Figures
from perco.database.database import Database

SMALL = {"CUSTOMERS": 10, "ACCOUNTS": 20, "SECURITIES": 40, "BROKERS": 3, "FEED": 5}


@pytest.fixture
async def db(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Database]:
    for name, value in SMALL.items():
        monkeypatch.setattr(market, name, value)
    async with perco.open("memory:", market.SCHEMA) as db:
        await market.load(db)
        yield db


async def test_books_agree_after_every_kind_of_transaction(db: Database, autojump_clock: Any) -> None:
    ask, orders = market.asking(db)
    rng = random.Random(3)
    async with db.worker():
        for kind in (*market.MIX, "trade order", "trade order"):
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(ask, kind, rng)
        await db.wait_idle()
    assert len(orders.placed) == 24
    assert await market.check(db, 24) == 24
    with pytest.raises(AssertionError, match="25 orders were acknowledged"):
        await market.check(db, 25)


async def _lose_cash(txn: perco.Transaction) -> None:
    txn.set(market.balance, 3, (await txn.get(market.balance, 3) or 0) - 1)


async def _lose_shares(txn: perco.Transaction) -> None:
    txn.delete(market.quantity, (0, market.held_by(0)[0]))


async def _lose_fees(txn: perco.Transaction) -> None:
    txn.set(market.total, 1, (await txn.get(market.total, 1) or 0) - 1)


async def _leave_fee(txn: perco.Transaction) -> None:
    txn.set(market.amount, (1, 1, 1), 5)


@pytest.mark.parametrize("harm", [_lose_cash, _lose_shares, _lose_fees, _leave_fee])
async def test_what_does_not_add_up_is_seen(db: Database, harm: Callable[..., Any], autojump_clock: Any) -> None:
    ask, _ = market.asking(db)
    async with db.worker():
        for _ in range(5):
            await ask("trade order", random.Random(1))
        await db.wait_idle()
    await market.check(db, 5)
    await db.run(harm)
    with pytest.raises(AssertionError):
        await market.check(db, 5)


async def test_a_trade_that_was_not_settled_is_seen(db: Database) -> None:
    ask, _ = market.asking(db)
    await ask("trade order", random.Random(1))  # no worker runs
    with pytest.raises(AssertionError, match="was not settled"):
        await market.check(db, 1)


def test_figures_go_through_json_unharmed() -> None:
    import json
    from dataclasses import asdict

    figures = Figures(1.0, 2.0, 3, 4, 5, 6, 7.0, {"trade order": (1.0, 2.0)})
    assert asdict(Figures(**json.loads(json.dumps(asdict(figures))))) == json.loads(json.dumps(asdict(figures)))
