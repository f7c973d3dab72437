"""One durable read-modify-write of a row on PostgreSQL, at repeatable read: in four round trips, and in one statement.

The same rows as `embedded`'s: a counter, padded to 100 bytes. Statements are prepared, connections are kept, tables
leave room for updates in place. Retries are counted; none should be needed where one statement does it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.against.embedded import KEYS
from bench.against.load import Load, Measured
from bench.against.postgres import Server
from bench.against.transfers import BEGIN, connected, run_asyncio

_SELECT = "SELECT n FROM rows WHERE key = $1 FOR UPDATE"
_UPDATE = "UPDATE rows SET n = $2 WHERE key = $1"
_ADD = "UPDATE rows SET n = n + 1 WHERE key = $1"
_PGBENCH = f"""
\\set k random(0, {len(KEYS) - 1})
{BEGIN};
SELECT n FROM pgbench_rows WHERE key = :k FOR UPDATE \\gset
\\set m :n + 1
UPDATE pgbench_rows SET n = :m WHERE key = :k;
COMMIT;
"""


def prepare(server: Server) -> None:
    """Make the tables, with all rows in them."""
    for name, kind, keys in (("rows", "bytea", "decode(md5(k::text), 'hex')"), ("pgbench_rows", "int", "k")):
        server.psql(
            f"CREATE TABLE {name} (key {kind} PRIMARY KEY, n bigint NOT NULL, padding bytea) WITH (fillfactor = 50)",
            f"INSERT INTO {name} SELECT {keys}, 0, decode(repeat('78', 92), 'hex') "
            f"FROM generate_series(0, {len(KEYS) - 1}) k",
            f"VACUUM ANALYZE {name}",
        )
    server.psql("CHECKPOINT")


def load(server: Server, connections: int, seconds: float, *, trips: int, callers: int | None = None) -> Load:
    """Callers that call again when they have their answer: by default one for each connection; more share them."""
    return run_asyncio(_load(server, connections, seconds, trips, callers or connections))


async def _load(server: Server, count: int, seconds: float, trips: int, callers: int) -> Load:
    load = Load()
    async with connected(server, count) as connections:
        keys = [record[0] for record in await connections[0].fetch("SELECT key FROM rows")]
        before = await connections[0].fetchval("SELECT sum(n)::bigint FROM rows")
        make = _in_four_trips if trips == 4 else _in_one
        calls = [(asyncio.Lock(), await make(connection, load)) for connection in connections]

        async def caller(number: int) -> None:
            rng = random.Random(number)
            lock, call = calls[number % count]
            now = time.perf_counter()
            while now < until:
                began = now
                async with lock:  # which is fair
                    await call(rng.choice(keys))
                now = time.perf_counter()
                load.times.append(now - began)

        with Measured(load, server.cpu_s):
            until = time.perf_counter() + seconds
            await asyncio.gather(*(caller(number) for number in range(callers)))
        total = await connections[0].fetchval("SELECT sum(n)::bigint FROM rows")
    if total - before != load.calls:
        raise AssertionError(f"PostgreSQL: {load.calls} calls were answered, and the rows say {total - before}")
    return load


async def _in_four_trips(connection: Any, load: Load) -> Callable[[bytes], Awaitable[None]]:
    import asyncpg

    select, update = await connection.prepare(_SELECT), await connection.prepare(_UPDATE)

    async def call(key: bytes) -> None:
        await connection.execute(BEGIN)
        while True:
            try:
                n = await select.fetchval(key)
                await update.fetch(key, n + 1)
                await connection.execute("COMMIT")
                return
            except asyncpg.SerializationError:
                await connection.execute(f"ROLLBACK; {BEGIN}")
                load.retries += 1

    return call


async def _in_one(connection: Any, load: Load) -> Callable[[bytes], Awaitable[None]]:
    import asyncpg

    add = await connection.prepare(_ADD)

    async def call(key: bytes) -> None:
        while True:
            try:
                await add.fetch(key)
                return
            except asyncpg.SerializationError:
                load.retries += 1

    return call


def pgbench_rate(server: Server, folder: Path, connections: int, seconds: float) -> float:
    """Transactions per second of the four statements, by pgbench: what a client in C gets."""
    return server.pgbench(folder, _PGBENCH, connections, seconds)
