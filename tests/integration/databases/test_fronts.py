"""A store in a database from trio, asyncio and blocking code: by its owner, by a client of `perco serve`, and by a
client that reads and writes by itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
import perco.aio
import perco.sync
from tests.support import bigtable, postgresql

docs = perco.Table("docs", key=perco.TEXT)
body = docs.column("body", perco.TEXT)
words = docs.column("words", perco.INT64)
OBSERVER = "count words"
FOUND = ([("a", 2), ("b", 3)], {"a": "one two", "b": "one two three"}, 3)


def declared(observer: Any) -> perco.Schema:
    """The schema, with an observer of a front's own."""
    schema = perco.Schema(docs)
    schema.observe(body, id=OBSERVER)(observer)
    return schema


def count(txn: Any, change: Any) -> None:
    txn.set(words, change.key, len((change.value or "").split()))


async def counting(txn: Any, change: Any) -> None:
    count(txn, change)


async def on_trio(url: str) -> object:
    async with perco.open(url, declared(counting)) as db, db.worker():
        return await _steps(db)


async def on_asyncio(url: str) -> object:
    async with perco.aio.open(url, declared(perco.aio.observer(counting))) as db, db.worker():
        return await _steps(db)


async def _steps(db: Any) -> object:
    async with db.transaction() as txn:
        txn.set(body, "a", "one two")

    async def longer(txn: Any) -> None:
        txn.set(body, "b", f"{await txn.get(body, 'a')} three")

    await db.run(longer)
    await db.wait_idle()
    with pytest.raises(perco.UsageError, match="perco backs up stores in folders"):
        await db.backup("backups")
    async with db.snapshot() as snap:
        rows = [(row.key, row[words]) async for row in snap.scan(docs)]
        batches = [batch async for batch in snap.scan(docs, columns=[words]).to_batches()]
        assert [tuple(row.values()) for batch in batches for row in batch.to_pylist()] == rows
        return rows, await snap.get_many(body, ["a", "b"]), await snap.get(words, "b")


def blocking(url: str) -> object:
    with perco.sync.open(url, declared(perco.sync.observer(count))) as db, db.worker():
        with db.transaction() as txn:
            txn.set(body, "a", "one two")
        db.run(lambda txn: txn.set(body, "b", f"{txn.get(body, 'a')} three"))
        db.wait_idle()
        with pytest.raises(perco.UsageError, match="perco backs up stores in folders"):
            db.backup("backups")
        with db.snapshot() as snap:
            rows = [(row.key, row[words]) for row in snap.scan(docs)]
            table = snap.scan(docs, columns=[words]).to_arrow().read_all()
            assert [tuple(row.values()) for row in table.to_pylist()] == rows
            return rows, snap.get_many(body, ["a", "b"]), snap.get(words, "b")


FRONTS = {
    "trio": lambda url: trio.run(on_trio, url),
    "asyncio": lambda url: asyncio.run(on_asyncio(url)),
    "blocking": blocking,
}


@pytest.fixture(params=["postgresql", "bigtable"])
def store(request: pytest.FixtureRequest) -> str:
    return {"postgresql": postgresql.fresh, "bigtable": bigtable.fresh}[request.param]()


@pytest.fixture(params=["owner", "client", "direct"])
def url(request: pytest.FixtureRequest, store: str, tmp_path: Path) -> Iterator[str]:
    """Where the store is opened: by its owner, at the address of `perco serve`, or beside it."""
    if request.param == "owner":
        yield store
        return
    address = f"unix:{tmp_path / 'socket'}"
    command = [sys.executable, "-m", "perco", "serve", store, "--listen", address]
    if request.param == "direct":
        command.append("--direct")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        assert "serving" in serving.stdout.readline()
        yield store if request.param == "direct" else address
        serving.terminate()
        serving.communicate()
    assert serving.returncode == 0


@pytest.mark.parametrize("front", FRONTS)
def test_the_same_everywhere(front: str, url: str) -> None:
    assert FRONTS[front](url) == FOUND
