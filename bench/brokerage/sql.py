"""The same brokerage, written by hand for PostgreSQL: a statement for each transaction, and workers that settle.

Written to win: one round trip for each transaction, prepared statements over asyncpg, READ COMMITTED with the locks
that the statements take. A placed trade is also a row of a queue; workers take rows with FOR UPDATE SKIP LOCKED and
settle each in the same statement. Fees go to a side table, too, and are added up five times a second.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from bench.against.postgres import Server
from bench.brokerage.market import (
    ACCOUNTS,
    BROKERS,
    CASH,
    CUSTOMERS,
    HELD,
    LOOKED_UP,
    RECENT,
    SECURITIES,
    Orders,
    Trade,
    held_by,
    ticks,
)

_TABLES: Final = """
DROP TABLE IF EXISTS customers, accounts, holdings, securities, trades, pending, fees, brokers;
CREATE TABLE customers (id bigint PRIMARY KEY, name text, tier bigint);
CREATE TABLE accounts (id bigint PRIMARY KEY, owner bigint, broker bigint, balance bigint) WITH (fillfactor = 50);
CREATE TABLE holdings (account bigint, security bigint, quantity bigint, PRIMARY KEY (account, security))
  WITH (fillfactor = 50);
CREATE TABLE securities (id bigint PRIMARY KEY, symbol text, opened bigint, price bigint, volume bigint, news text)
  WITH (fillfactor = 50);
CREATE TABLE trades (account bigint, number bigint, security bigint, quantity bigint, price bigint, fee bigint,
  broker bigint, settled bigint, note text, PRIMARY KEY (account, number)) WITH (fillfactor = 70);
CREATE TABLE pending (account bigint, number bigint, PRIMARY KEY (account, number));
CREATE TABLE fees (broker bigint, amount bigint);
CREATE TABLE brokers (id bigint PRIMARY KEY, total bigint)
"""

_STATEMENTS: Final = {
    "trade order": """
      WITH a AS (SELECT a.id, a.broker, 10 + 5 * c.tier AS fee FROM accounts a JOIN customers c ON c.id = a.owner
                 WHERE a.id = $1),
           t AS (INSERT INTO trades (account, number, security, quantity, price, fee, broker)
                 SELECT a.id, $2, s.id, $4, s.price, a.fee, a.broker FROM a, securities s WHERE s.id = $3
                 RETURNING account, number)
      INSERT INTO pending SELECT account, number FROM t""",
    "trade status": """
      SELECT c.name, t.number, t.security, t.quantity, t.price, t.settled
      FROM accounts a JOIN customers c ON c.id = a.owner
      LEFT JOIN LATERAL (SELECT * FROM trades WHERE account = a.id ORDER BY number LIMIT 20) t ON true
      WHERE a.id = $1""",
    "trade look-up": """
      SELECT t.* FROM unnest($1::bigint[], $2::bigint[]) AS w (account, number)
      JOIN trades t USING (account, number)""",
    "trade update": "UPDATE trades SET note = $3 WHERE account = $1 AND number = $2",
    "market feed": """
      UPDATE securities s SET price = t.price, volume = volume + 100
      FROM (SELECT * FROM unnest($1::bigint[], $2::bigint[]) AS t (id, price) ORDER BY id) t WHERE s.id = t.id""",
    "market watch": """
      SELECT avg(s.price::float / s.opened) FROM holdings h JOIN securities s ON s.id = h.security
      WHERE h.account = $1""",
    "security detail": "SELECT symbol, price, volume, news FROM securities WHERE id = $1",
    "customer position": """
      SELECT c.name, a.id, a.balance, (SELECT sum(h.quantity * s.price) FROM holdings h JOIN securities s
      ON s.id = h.security WHERE h.account = a.id) FROM customers c JOIN accounts a ON a.id IN (2 * c.id, 2 * c.id + 1)
      WHERE c.id = $1""",
    "broker volume": """
      SELECT total + coalesce((SELECT sum(amount) FROM fees WHERE broker = id), 0) FROM brokers WHERE id = $1""",
}

_SETTLE: Final = """
WITH job AS (DELETE FROM pending WHERE (account, number) = (SELECT account, number FROM pending
               FOR UPDATE SKIP LOCKED LIMIT 1) RETURNING account, number),
     t AS (UPDATE trades SET settled = price FROM job
           WHERE trades.account = job.account AND trades.number = job.number RETURNING trades.*),
     h AS (INSERT INTO holdings AS h SELECT account, security, quantity FROM t
           ON CONFLICT (account, security) DO UPDATE SET quantity = h.quantity + excluded.quantity),
     a AS (UPDATE accounts SET balance = balance - t.quantity * t.price - t.fee FROM t WHERE accounts.id = t.account),
     f AS (INSERT INTO fees SELECT broker, fee FROM t)
SELECT count(*) FROM job
"""
_TALLY: Final = """
WITH gone AS (DELETE FROM fees RETURNING broker, amount), sums AS (SELECT broker, sum(amount) AS s FROM gone GROUP BY 1)
UPDATE brokers SET total = total + s FROM sums WHERE id = broker
"""
_IDLE_S: Final = 0.005  # of a worker that has found no trade
_TALLY_S: Final = 0.2
assert "LIMIT 20" in _STATEMENTS["trade status"]
assert RECENT == 20

Ask = Callable[[str, random.Random], Awaitable[None]]


def prepare(server: Server) -> None:
    """Make and fill the tables."""
    held = [
        f"INSERT INTO holdings SELECT i, ({each * 61} + i * 7) % {SECURITIES}, 100 "
        f"FROM generate_series(0, {ACCOUNTS - 1}) i"
        for each in range(HELD)
    ]
    rng = random.Random(1)
    prices = ", ".join(
        f"({each}, 'S{each}', {at}, {at}, 0, repeat('news ', 40))"
        for each in range(SECURITIES)
        for at in [rng.randrange(1000, 9000)]
    )
    server.psql(
        *_TABLES.split(";\n"),
        f"INSERT INTO customers SELECT i, 'customer ' || i, i % 3 FROM generate_series(0, {CUSTOMERS - 1}) i",
        f"INSERT INTO accounts SELECT i, i / 2, i % {BROKERS}, {CASH} FROM generate_series(0, {ACCOUNTS - 1}) i",
        *held,
        f"INSERT INTO securities VALUES {prices}",
        f"INSERT INTO brokers SELECT i, 0 FROM generate_series(0, {BROKERS - 1}) i",
        "VACUUM ANALYZE",
    )


class Client:
    """One process: connections for its callers, and others for the workers that settle.

    Attributes: `settled`: trades that its workers have settled.
    """

    def __init__(self, dsn: dict[str, str], connections: int, workers: int) -> None:
        self._dsn, self._count, self._workers = dsn, connections, workers
        self.orders = Orders()
        self.settled = 0

    async def __aenter__(self) -> Client:
        import asyncpg

        self._free: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._all = []
        for number in range(self._count + self._workers):
            connection = await asyncpg.connect(**self._dsn)
            self._all.append(connection)
            if number < self._count:
                self._free.put_nowait({kind: await connection.prepare(text) for kind, text in _STATEMENTS.items()})
        self._ending = False
        self._tasks = [asyncio.create_task(self._settle(each)) for each in self._all[self._count :]]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        await asyncio.gather(*self._tasks)
        for connection in self._all:
            await connection.close()

    async def _settle(self, connection: Any) -> None:
        """Settle trades, until none is left at the end."""
        job = await connection.prepare(_SETTLE)
        tally = await connection.prepare(_TALLY)
        due = time.perf_counter()
        while True:
            if await job.fetchval():
                self.settled += 1
            elif self._ending:
                break
            else:
                await asyncio.sleep(_IDLE_S)
            if connection is self._all[-1] and time.perf_counter() > due:
                await tally.fetch()
                due = time.perf_counter() + _TALLY_S

    async def ask(self, kind: str, rng: random.Random) -> None:
        """Run one transaction of a kind."""
        trade: Trade | None = None
        match kind:
            case "trade order":
                trade = self.orders.new(rng)
                given: tuple[Any, ...] = (*trade, rng.randrange(SECURITIES), rng.choice((-10, 10, 20)))
            case "trade look-up":
                wanted = rng.sample(self.orders.placed, min(LOOKED_UP, len(self.orders.placed)))
                given = [each[0] for each in wanted], [each[1] for each in wanted]
            case "trade update":
                if not self.orders.placed:
                    return
                given = (*rng.choice(self.orders.placed), f"seen {rng.random()}")
            case "market feed":
                found = ticks(rng)
                given = list(found), list(found.values())
            case "trade status" | "market watch":
                given = (rng.randrange(ACCOUNTS),)
            case "security detail":
                given = (rng.randrange(SECURITIES),)
            case "customer position":
                given = (rng.randrange(CUSTOMERS),)
            case _:
                given = (rng.randrange(BROKERS),)
        statements = await self._free.get()
        try:
            await statements[kind].fetch(*given)
        finally:
            self._free.put_nowait(statements)
        if trade is not None:
            self.orders.placed.append(trade)


async def check(dsn: dict[str, str], orders: int) -> int:
    """See `market.check`."""
    import asyncpg

    connection = await asyncpg.connect(**dsn)
    await connection.execute(_TALLY)
    count, unsettled, cash, fee = await connection.fetchrow(
        "SELECT count(*), count(*) FILTER (WHERE settled IS NULL), coalesce(sum(quantity * price + fee), 0)::bigint, "
        "coalesce(sum(fee), 0)::bigint FROM trades"
    )
    assert unsettled == 0
    assert count >= orders
    assert await connection.fetchval("SELECT sum(balance)::bigint FROM accounts") == ACCOUNTS * CASH - cash
    assert await connection.fetchval("SELECT sum(total)::bigint FROM brokers") == fee
    moved = await connection.fetchval("SELECT coalesce(sum(quantity), 0)::bigint FROM trades")
    shares = await connection.fetchval("SELECT sum(quantity)::bigint FROM holdings")
    assert shares == moved + 100 * sum(len(held_by(account)) for account in range(ACCOUNTS))
    await connection.close()
    return int(count)
