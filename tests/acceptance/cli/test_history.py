"""`perco vacuum` and `perco pins`, and what `perco status` says of old versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import perco
from perco.cli.history import age_of
from perco.clock.oracle import newest_note
from perco.database.inside import inside
from tests.acceptance.cli.stores import owned, run

short = perco.Table("short", key=perco.TEXT, keep=perco.Keep(seconds=0))
n = short.column("n", perco.INT64)
day = perco.Table("day", key=perco.TEXT, keep=perco.Keep(versions=3))
m = day.column("m", perco.INT64)
SCHEMA = perco.Schema(short, day)
BY_HAND = perco.Options(vacuum=perco.options.VacuumOptions(on=False))


@pytest.fixture
async def history(tmp_path: Path) -> Path:
    """Five versions of a cell in both tables; a pin at the third stands for an hour."""
    path = tmp_path / "history"
    async with perco.open(path, SCHEMA, options=BY_HAND) as db:
        for i in range(5):
            async with db.transaction() as txn:
                txn.set(n, "k", i)
                txn.set(m, "k", i)
            if i == 2:
                async with db.pin("export", lease_s=3600, owner="the nightly job", keep=True):
                    pass
    return path


async def test_vacuum_says_what_it_removed_and_who_held_it_back(history: Path) -> None:
    done = await run("vacuum", history)
    assert (done.code, done.err) == (0, "")
    assert "removed 2 versions; 8 of 10 records are left" in done.out
    assert "held back by pin 'export'" in done.out
    assert (await run("get", history, "short", "k", "n")).out == "4\n"
    assert (await run("check", history)).code == 0
    again = await run("vacuum", history)
    assert "removed nothing; 8 of 8 records are left" in again.out


async def test_vacuum_as_json(history: Path) -> None:
    assert (await run("pins", history, "--drop", "export")).code == 0
    found = json.loads((await run("vacuum", history, "--json")).out)
    assert found["removed"]["versions"] == 4
    assert found["holder"]["kind"] == "retention"
    assert found["cuts"] == {"short": found["watermark"], "day": 0}
    assert found["records"] == {"before": 10, "after": 6}


async def test_beside_an_owner_vacuum_and_pins_are_its_work(store: Path) -> None:
    async with owned(store):
        done = await run("vacuum", store)
        assert done.code == 0, done.err
        assert "looked at" in done.out
        done = await run("pins", store, "--drop", "x")
        assert done.code == 1
        assert "no pin 'x'" in done.err
        assert (await run("pins", store)).out == "no pins\n"


async def test_what_has_gone_cannot_be_read(history: Path) -> None:  # G5
    await run("vacuum", history)
    done = await run("get", history, "short", "k", "n", "--ts", "2")
    assert done.code == 2
    assert "no snapshot" in done.err
    assert "keep=perco.Keep" in done.err
    assert (await run("get", history, "day", "k", "m", "--ts", "2")).out == "0\n"


async def test_pins_are_listed_and_dropped(history: Path) -> None:
    done = await run("pins", history)
    assert [line.split()[0] for line in done.out.splitlines()] == ["pin", "export"]
    assert "the nightly job" in done.out
    [pin] = json.loads((await run("pins", history, "--json")).out)
    assert (pin["name"], pin["owner"]) == ("export", "the nightly job")
    assert 3000 < pin["lease_left_s"] <= 3600
    assert pin["age_s"] < 600
    wrong = await run("pins", history, "--drop", "exprot")
    assert wrong.code == 1
    assert "no pin 'exprot'" in wrong.err
    assert "export" in wrong.err
    assert (await run("pins", history, "--drop", "export")).out == "dropped export\n"
    assert (await run("pins", history)).out == "no pins\n"


async def test_status_says_who_holds_the_watermark_back(history: Path) -> None:
    assert "readable in all tables from its beginning" in (await run("status", history)).out
    await run("vacuum", history)
    done = await run("status", history)
    assert "held back by pin 'export' of the nightly job" in done.out
    found = json.loads((await run("status", history, "--json")).out)
    assert found["watermark"]["holder"]["name"] == "export"
    assert found["watermark"]["ts"] == found["pins"][0]["ts"]
    assert {table["name"]: table["keep"] for table in found["tables"]} == {
        "short": {"seconds": 0.0, "versions": 1},
        "day": {"seconds": 86400.0, "versions": 3},
    }
    assert "1 d, 3 versions" in done.out


async def test_status_names_the_oldest_open_transaction(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with perco.open(path, SCHEMA, options=BY_HAND) as db:
        for i in range(3):
            async with db.transaction() as txn:
                txn.set(n, "k", i)
        await inside(db).oracle.note()
        async with db.transaction() as txn:
            await db.vacuum()
            await inside(db).oracle.draw()
            await inside(db).oracle.note()
            done = await run("status", path)
            who = f"held back by an open transaction or snapshot, timestamp {txn.start_ts}"
            assert f"; {who}, begun " in done.out
            found = json.loads((await run("status", path, "--json")).out)["watermark"]["holder"]
            assert found["oldest_open"]["ts"] == txn.start_ts
            assert 0 <= found["age_s"] < 600
    done = await run("status", path)
    assert f"; was {who} when last looked at, first seen " in done.out, "nobody has it open any more"


async def test_the_age_of_a_holder_is_not_that_of_a_note_from_before_the_store_was_closed(tmp_path: Path) -> None:
    path, wall = tmp_path / "s", 1_700_000_000.0
    async with perco.open(path, SCHEMA, options=BY_HAND) as db:
        for _ in range(3):
            await inside(db).oracle.draw()
        async with db.snapshot() as snap:
            before = snap.start_ts
    async with perco.open(path, SCHEMA, options=BY_HAND) as db:
        first = await newest_note(inside(db).driver.store)
        assert first is not None
        for _ in range(5):
            ts = await inside(db).oracle.draw()
        await inside(db).oracle.note()
        note = await newest_note(inside(db).driver.store)
        assert note is not None
        assert before <= first[0] < ts <= note[0]
        assert await age_of(db, ts, note[1] + 7) == 7.0, "the note just above, not the one below"
        assert await age_of(db, first[0], first[1] + 7) == 7.0
        assert await age_of(db, note[0] + 1, wall) is None, "no note is above it"
        assert await age_of(db, 0, wall) is None
