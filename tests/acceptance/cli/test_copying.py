"""`perco copy`, as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
from tests.acceptance.cli.stores import make, owned, run, schema, size, title
from tests.support import postgresql


async def test_a_copy_is_a_store_of_its_own(store: Path, tmp_path: Path) -> None:
    done = await run("copy", store, tmp_path / "t")
    assert done.code == 0, done.err
    assert "4 tables: the digests are equal in both stores" in done.out
    assert f"{store} can still be opened" in done.out
    for each in (store, tmp_path / "t"):
        assert (await run("get", each, "docs", "a", "title")).out == "second\n"
    again = await run("copy", store, tmp_path / "t")
    assert again.code == 2
    assert "there is a store at" in again.err


async def test_of_a_store_in_use_it_makes_a_pass_and_says_what_to_do(tmp_path: Path) -> None:
    path, target = tmp_path / "s", tmp_path / "t"
    await make(path)
    async with owned(path) as owner:
        first = await run("copy", path, target)
        assert first.code == 1
        assert "is in use by" in first.out
        assert "--wait" in first.out
        refused = await run("get", target, "docs", "a", "title")
        assert (refused.code, refused.out) == (2, "")
        await owner.tell("put new")
        told = json.loads((await run("copy", path, target, "--json")).out)
        assert told["complete"] is False
        assert 0 < told["sums"]["written"] < 10
    done = json.loads((await run("copy", path, target, "--json", "--switch")).out)
    assert (done["complete"], done["moved"], done["used_by"]) == (True, True, None)
    assert set(done["digests"]) == {"docs", "links", "blobs", "numbers", "_perco"}
    assert (await run("get", target, "docs", "new", "contents")).out == "new\n"
    assert (await run("get", path, "docs", "new", "contents")).code == 2


@contextmanager
def serving(store: object, address: str) -> Iterator[None]:
    command = [sys.executable, "-m", "perco", "serve", str(store), "--listen", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "serving" in process.stdout.readline()
            yield
        finally:
            process.terminate()


async def _add(txn: perco.Transaction, key: str) -> None:
    txn.set(size, key, (await txn.get(size, key) or 0) + 1)


async def test_clients_go_on_in_the_new_store(tmp_path: Path) -> None:  # M3
    path, address, target = tmp_path / "s", f"unix:{tmp_path / 'at'}", postgresql.fresh()
    await make(path)
    with serving(path, address):
        db_block: Any = perco.open(address, schema)
        db: perco.Database = await db_block.__aenter__()
        await db.run(_add, "counted")
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(db.run, _add, "counted")  # no server is there
            moved = await run("copy", path, target, "--switch")
            assert moved.code == 0, moved.err
            server = serving(target, address)
            await trio.to_thread.run_sync(server.__enter__)
        try:
            assert await db.run(_read, "counted") == (2, "second")
        finally:
            await trio.to_thread.run_sync(server.__exit__, None, None, None)
    finally:
        await db_block.__aexit__(None, None, None)
    assert (await run("status", path)).code == 2


async def _read(txn: perco.Transaction, key: str) -> tuple[int | None, str | None]:
    return await txn.get(size, key), await txn.get(title, "a")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("nowhere", "t"), "there is no store at nowhere"),
        (("tcp://127.0.0.1:1", "t"), "a served store"),
        (("s", "s"), "cannot be copied to itself"),
    ],
)
async def test_wrong_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, str], told: str) -> None:
    (tmp_path / "s").mkdir()
    places = [str(tmp_path / each) if each == "s" else each for each in args]
    done = await run("copy", *places)
    assert done.code == 2
    assert told in done.err
