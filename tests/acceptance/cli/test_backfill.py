"""`perco backfill`: how far observers have been told of what was there, and telling them of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import perco
from perco.database.inside import local_owner
from tests.acceptance.cli.stores import owned, run

docs = perco.Table("docs", key=perco.TEXT)
body = docs.column("body", perco.TEXT)
size = docs.column("size", perco.INT64)
BARE = perco.Schema(docs)
FULL = perco.Schema(docs)
BY_HAND = perco.Options(backfill=perco.options.BackfillOptions(on=False, page_rows=2))


@FULL.observe(body, id="measure")
async def measure(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
    txn.set(size, change.key, len(change.value or ""))


@FULL.observe(body, id="from now on", backfill=False)
async def nothing(txn: perco.Transaction, change: perco.Change[str, str]) -> None: ...


@pytest.fixture
async def grown(tmp_path: Path) -> Path:
    """Five rows, and an observer that has not been told of them."""
    path = tmp_path / "grown"
    async with perco.open(path, BARE) as db, db.transaction() as txn:
        for number in range(5):
            txn.set(body, f"k{number}", "text")
    async with perco.open(path, FULL, options=BY_HAND) as db:
        assert local_owner(db).backfilling.left
    return path


async def test_it_shows_who_is_still_to_be_told(grown: Path) -> None:
    done = await run("backfill", grown)
    assert (done.code, done.err) == (0, "")
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[1] == ["measure", "1", "docs", "not", "yet", "0", "0"]
    assert lines[2] == ["from", "now", "on", "1", "docs", "yes"]
    [one, other] = json.loads((await run("backfill", grown, "--json")).out)
    assert one == {
        **{"observer": "measure", "version": 1, "table": "docs", "state": "not begun"},
        **{"rows": 0, "notified": 0},
    }
    assert (other["state"], other["rows"]) == ("done", None)


async def test_it_tells_the_rest_and_then_there_is_none(grown: Path) -> None:
    done = await run("backfill", grown, "--run")
    assert (done.code, done.err) == (0, "")
    assert "observer measure, version 1, was notified of 5 changes; looked at 5 rows of docs" in done.out
    assert "yes" in (await run("backfill", grown)).out.splitlines()[1]
    again = await run("backfill", grown, "--run")
    assert again.out == (
        "all observers have been notified of existing data; they run when a program that has them opens the store\n"
    )
    assert (await run("check", grown)).code == 0
    async with perco.open(grown, FULL, options=BY_HAND) as db, db.worker():
        await db.wait_idle()
        async with db.snapshot() as snap:
            assert await snap.get(size, "k4") == 4


async def test_it_tells_as_json(grown: Path) -> None:
    [done] = json.loads((await run("backfill", grown, "--run", "--json")).out)
    assert (done["observer"], done["rows"], done["notified"], done["state"]) == ("measure", 5, 5, "done")


async def test_wait_waits_for_what_is_still_to_be_told(grown: Path) -> None:
    done = await run("wait", grown, "--timeout", "20")
    assert done.code == 1
    assert "observers not yet notified of all existing data: measure" in done.err
    assert "no process has the store open" in done.err


async def test_running_beside_an_owner_lets_that_do_it(store: Path) -> None:
    async with owned(store):
        assert (await run("backfill", store)).code == 0
        done = await run("backfill", store, "--run")
        assert done.code == 0, done.err
        assert "all observers have been notified" in done.out


async def test_a_store_without_observers(tmp_path: Path) -> None:
    async with perco.open(tmp_path / "s", BARE):
        pass
    assert (await run("backfill", tmp_path / "s")).out == "no observers\n"
    assert (await run("backfill", tmp_path / "s", "--json")).out == "[]\n"
