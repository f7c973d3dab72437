"""The brokerage on perco: tables, a client's transactions, and the observers that settle trades.

It follows TPC-E in what its transactions read and write and in how often each comes; it is not TPC-E (a tenth of the
columns, no rendezvous of cash accounts, no dimension tables). Trade-Result is an observer of placed trades. As in the
paper's section 3.3, a hot aggregate has a side table: each settled trade adds a row of its own with the broker's fee,
and an observer of a signal adds these rows up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import perco
from perco.database.database import Database

CUSTOMERS: Final = 1000
ACCOUNTS: Final = 2 * CUSTOMERS  # two for each customer
SECURITIES: Final = 500
BROKERS: Final = 10
HELD: Final = 8  # securities in an account at first
CASH: Final = 1_000_000
RECENT: Final = 20  # trades that a status look-up shows
FEED: Final = 20  # securities in a tick of the market feed
LOOKED_UP: Final = 10

# Shares in percent, as in TPC-E; its Trade-Result, 10, is the observer's.
MIX: Final = {
    "trade order": 10.1,
    "trade status": 19.0,
    "trade look-up": 8.0,
    "trade update": 2.0,
    "market feed": 1.0,
    "market watch": 18.0,
    "security detail": 14.0,
    "customer position": 13.0,
    "broker volume": 4.9,
}

_TALLIED: Final = 500  # rows of the side table that one run adds up
_TALLY_S: Final = 0.2  # after the first of them; more come meanwhile
_ROWS: Final = 250  # in a transaction that loads

Trade = tuple[int, int]  # account, number; newer ones have lower numbers

customers = perco.Table("customers", key=perco.INT64)
name = customers.column("name", perco.TEXT)
tier = customers.column("tier", perco.INT64)

accounts = perco.Table("accounts", key=perco.INT64)
owner = accounts.column("owner", perco.INT64)
broker = accounts.column("broker", perco.INT64)
balance = accounts.column("balance", perco.INT64)

holdings = perco.Table("holdings", key=perco.Tuple(perco.INT64, perco.INT64))  # account, security
quantity = holdings.column("quantity", perco.INT64)

securities = perco.Table("securities", key=perco.INT64)
symbol = securities.column("symbol", perco.TEXT)
opened = securities.column("opened", perco.INT64)
price = securities.column("price", perco.INT64)
volume = securities.column("volume", perco.INT64)
news = securities.column("news", perco.TEXT)

trades = perco.Table("trades", key=perco.Tuple(perco.INT64, perco.INT64))
placed = trades.column("placed", perco.MSGPACK)  # [security, quantity, price, fee, broker]
settled = trades.column("settled", perco.INT64)  # the price
note = trades.column("note", perco.TEXT)

fees = perco.Table("fees", key=perco.Tuple(perco.INT64, perco.INT64, perco.INT64))  # broker, and the trade
amount = fees.column("amount", perco.INT64)

brokers = perco.Table("brokers", key=perco.INT64)
total = brokers.column("total", perco.INT64)
earned = brokers.signal("earned")

SCHEMA: perco.Schema = perco.Schema(customers, accounts, holdings, securities, trades, fees, brokers)


@SCHEMA.observe(placed, id="settle")
async def settle(txn: perco.Transaction, change: perco.Change[Trade, list[int]]) -> None:
    """Trade-Result: move the shares and the cash."""
    assert change.value is not None
    account, number = change.key
    security, count, at, fee, by = change.value
    held = await txn.get(quantity, (account, security)) or 0
    cash = await txn.get(balance, account) or 0
    if held + count:
        txn.set(quantity, (account, security), held + count)
    else:
        txn.delete(quantity, (account, security))
    txn.set(balance, account, cash - count * at - fee)
    txn.set(settled, change.key, at)
    txn.set(amount, (by, account, number), fee)
    txn.signal(earned, by)


@SCHEMA.observe(earned, id="tally", delay_s=_TALLY_S)
async def tally(txn: perco.Transaction, change: perco.Change[int, None]) -> None:
    """Add the side rows of a broker to its total."""
    found = [row async for row in txn.scan(fees, prefix=(change.key,), limit=_TALLIED)]
    more = sum(row[amount] or 0 for row in found)
    txn.set(total, change.key, (await txn.get(total, change.key) or 0) + more)
    for row in found:
        txn.delete(amount, row.key)
    if len(found) == _TALLIED:
        txn.signal(earned, change.key)


# ------------------------------------------------------------------ a client's transactions


async def trade_order(txn: perco.Transaction, trade: Trade, security: int, count: int) -> None:
    account, _ = trade
    by = await txn.get(broker, account)
    buyer = await txn.get(owner, account)
    assert by is not None
    assert buyer is not None
    fee = 10 + 5 * (await txn.get(tier, buyer) or 0)
    at = await txn.get(price, security)
    assert at is not None
    txn.set(placed, trade, [security, count, at, fee, by])


async def trade_status(txn: perco.Transaction, account: int) -> int:
    who = await txn.get(owner, account)
    assert who is not None
    await txn.get(name, who)
    return len([row async for row in txn.scan(trades, prefix=(account,), columns=[placed, settled], limit=RECENT)])


async def trade_look_up(txn: perco.Transaction, wanted: list[Trade]) -> None:
    await txn.get_many(placed, wanted)
    await txn.get_many(settled, wanted)


async def trade_update(txn: perco.Transaction, trade: Trade, text: str) -> None:
    if await txn.get(placed, trade) is not None:
        txn.set(note, trade, text)


async def market_feed(txn: perco.Transaction, ticks: dict[int, int]) -> None:
    sold = await txn.get_many(volume, list(ticks))
    for security, at in ticks.items():
        txn.set(price, security, at)
        txn.set(volume, security, (sold[security] or 0) + 100)


async def market_watch(txn: perco.Transaction, account: int) -> float:
    held = [row.key[1] async for row in txn.scan(holdings, prefix=(account,))]
    before = await txn.get_many(opened, held)
    now = await txn.get_many(price, held)
    return sum((now[each] or 0) / (before[each] or 1) for each in held) / max(len(held), 1)


async def security_detail(txn: perco.Transaction, security: int) -> None:
    await txn.get(symbol, security)
    await txn.get(price, security)
    await txn.get(volume, security)
    await txn.get(news, security)


async def customer_position(txn: perco.Transaction, customer: int) -> int:
    await txn.get(name, customer)
    worth = 0
    for account in (2 * customer, 2 * customer + 1):
        worth += await txn.get(balance, account) or 0
        held = {row.key[1]: row[quantity] async for row in txn.scan(holdings, prefix=(account,))}
        now = await txn.get_many(price, list(held))
        worth += sum((count or 0) * (now[security] or 0) for security, count in held.items())
    return worth


async def broker_volume(txn: perco.Transaction, by: int) -> int:
    waiting = sum([row[amount] or 0 async for row in txn.scan(fees, prefix=(by,), limit=_TALLIED)])
    return (await txn.get(total, by) or 0) + waiting


@dataclass(slots=True)
class Orders:
    """Orders that a client has placed. `next`: a number that no other of its trades has."""

    placed: list[Trade] = field(default_factory=list)

    def new(self, rng: random.Random) -> Trade:
        return rng.randrange(ACCOUNTS), (1 << 62) - time.time_ns()


Ask = Callable[[str, random.Random], Awaitable[None]]


def asking(db: Database) -> tuple[Ask, Orders]:
    """A function that runs one transaction of a kind, and the orders that were acknowledged."""
    orders = Orders()

    def some(rng: random.Random, count: int) -> list[Trade]:
        return rng.sample(orders.placed, min(count, len(orders.placed)))

    async def ask(kind: str, rng: random.Random) -> None:
        account, security = rng.randrange(ACCOUNTS), rng.randrange(SECURITIES)
        match kind:
            case "trade order":
                trade = orders.new(rng)
                await db.run(trade_order, trade, security, rng.choice((-10, 10, 20)))
                orders.placed.append(trade)
            case "trade status":
                await db.run(trade_status, account)
            case "trade look-up":
                await db.run(trade_look_up, some(rng, LOOKED_UP))
            case "trade update":
                for trade in some(rng, 1):
                    await db.run(trade_update, trade, f"seen {rng.random()}")
            case "market feed":
                await db.run(market_feed, ticks(rng))
            case "market watch":
                await db.run(market_watch, account)
            case "security detail":
                await db.run(security_detail, security)
            case "customer position":
                await db.run(customer_position, rng.randrange(CUSTOMERS))
            case _:
                assert kind == "broker volume"
                await db.run(broker_volume, rng.randrange(BROKERS))

    return ask, orders


def ticks(rng: random.Random) -> dict[int, int]:
    return {security: rng.randrange(1000, 9000) for security in rng.sample(range(SECURITIES), FEED)}


# ------------------------------------------------------------------ the beginning and the end


async def load(db: Database) -> None:
    """All customers, accounts, holdings and securities; in 20 transactions or so at a time."""
    rng = random.Random(1)
    puts: list[tuple[perco.Column[Any, Any], object, object]] = []
    for customer in range(CUSTOMERS):
        puts += [(name, customer, f"customer {customer}"), (tier, customer, customer % 3)]
    for account in range(ACCOUNTS):
        puts += [(owner, account, account // 2), (broker, account, account % BROKERS), (balance, account, CASH)]
        puts += [(quantity, (account, security), 100) for security in held_by(account)]
    for security in range(SECURITIES):
        at = rng.randrange(1000, 9000)
        puts += [(symbol, security, f"S{security}"), (opened, security, at), (price, security, at)]
        puts += [(volume, security, 0), (news, security, "news " * 40)]
    puts += [(total, by, 0) for by in range(BROKERS)]
    for start in range(0, len(puts), _ROWS):
        async with db.transaction() as txn:
            for column, key, value in puts[start : start + _ROWS]:
                txn.set(column, key, value)


def held_by(account: int) -> list[int]:
    """The securities in an account at first."""
    return [(account * 7 + 61 * each) % SECURITIES for each in range(HELD)]


async def check(db: Database, orders: int) -> int:
    """Once the observers are done: each acknowledged order was settled once, and shares, cash and fees add up.

    Returns: the number of trades. Raises: AssertionError.
    """
    cash = dict.fromkeys(range(ACCOUNTS), CASH)
    shares = {(account, security): 100 for account in range(ACCOUNTS) for security in held_by(account)}
    paid = dict.fromkeys(range(BROKERS), 0)
    count = 0
    async with db.snapshot() as snap:
        async for row in snap.scan(trades):
            order = row[placed]
            assert order is not None
            account, (security, bought, at, fee, by) = row.key[0], order
            assert row[settled] == at, f"trade {row.key} was not settled"
            cash[account] -= bought * at + fee
            shares[account, security] = shares.get((account, security), 0) + bought
            paid[by] += fee
            count += 1
        assert count >= orders, f"{orders} orders were acknowledged, and there are {count}"
        assert cash == {row.key: row[balance] async for row in snap.scan(accounts, columns=[balance])}
        found = {row.key: row[quantity] async for row in snap.scan(holdings)}
        assert {key: each for key, each in shares.items() if each} == found
        assert paid == {row.key: row[total] async for row in snap.scan(brokers)}
        assert not [row.key async for row in snap.scan(fees)], "all fees were added up"
    return count
