"""`perco check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import perco
from perco.storage import NOTIFY, Mutation, Write
from perco.txn.records import ack_of
from tests.acceptance.cli.stores import contents, owned, run, schema


async def damage(path: Path, *, severity: str) -> None:
    """Lose a notification, or leave a long value to nobody."""
    async with perco.open(path, schema) as db:
        bound = db.bind(contents)
        async with db.transaction() as txn:
            txn.set(contents, "lost", b"1")
        write: Write = (NOTIFY, ack_of(bound.column, bound.observers[0]), txn.commit_ts, None)
        if severity == "warning":
            write = ("data:raw", bound.column, txn.start_ts, b"left behind")
        await db.driver.store.apply([Mutation("docs", ((b"lost", (), (write,)),))])


async def test_a_healthy_store_is_clean(store: Path) -> None:
    done = await run("check", store)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("clean: 4 tables, ")


async def test_findings_are_exit_code_1(store: Path) -> None:
    await damage(store, severity="error")
    done = await run("check", store)
    assert done.code == 1
    first, last = done.out.splitlines()
    assert first.startswith("error    N1   docs['lost'].contents: lost notification: observer 'measure'")
    assert last.startswith("1 errors, 0 warnings: ")


async def test_check_as_json(store: Path) -> None:
    await damage(store, severity="error")
    found = json.loads((await run("check", store, "--json")).out)
    assert (found["clean"], found["errors"], found["warnings"]) == (False, 1, 0)
    [finding] = found["findings"]
    assert (finding["severity"], finding["invariant"]) == ("error", "N1")
    assert found["rows"] > 5
    assert found["ts"] > 0


async def test_check_beside_a_busy_owner_reports_nothing(store: Path) -> None:
    async with owned(store) as owner:
        await owner.tell("work")
        await owner.tell("write")
        before = int(await owner.tell("commits"))
        for _ in range(3):
            found = json.loads((await run("check", store, "--json")).out)
            assert [f for f in found["findings"] if f["severity"] != "note"] == []
            assert found["clean"]
        assert int(await owner.tell("commits")) > before


# ------------------------------------------------------------------ after a loss (S2)


def mark(path: Path) -> Path:
    """As if the machine had restarted while the store was open with durability="process"."""
    file = path / "unsynced"
    file.write_text("another boot\n")
    return file


async def test_a_store_in_doubt_is_checked_and_accepted(store: Path) -> None:
    file = mark(store)
    with pytest.raises(perco.NeedsCheck):
        await perco.open(store, schema).__aenter__()
    assert "run perco check" in (await run("status", store)).out
    looked = await run("check", store)
    assert looked.code == 0
    assert f"perco check --accept {store}" in looked.out
    assert file.exists(), "a look changes nothing"
    accepted = await run("check", store, "--accept")
    assert accepted.code == 0
    assert "accepted" in accepted.out
    assert not file.exists()
    async with perco.open(store, schema) as db:
        assert db.catalogue.tables


async def test_a_file_that_cannot_be_read_is_said_in_a_line(store: Path) -> None:
    [data] = (store / "tablets").glob("numbers-0/data.mdb")
    torn = data.read_bytes()
    data.write_bytes(torn[:8192] + b"\xff" * (len(torn) - 8192))
    for args in (("check", store), ("scan", store, "numbers"), ("check", store, "--accept")):
        done = await run(*args)
        assert done.code == 2
        assert len(done.err.splitlines()) == 1
    with pytest.raises(perco.Corruption, match="numbers-0"):
        async with perco.open(store, schema):
            pass


async def test_a_damaged_store_is_not_accepted(store: Path) -> None:
    await damage(store, severity="error")
    file = mark(store)
    done = await run("check", store, "--accept")
    assert done.code == 1
    assert "not accepted" in done.out
    assert file.exists()


async def test_warnings_do_not_keep_a_store_from_being_accepted(store: Path) -> None:
    await damage(store, severity="warning")
    file = mark(store)
    found = json.loads((await run("check", store, "--accept", "--json")).out)
    assert (found["warnings"], found["accepted"], found["clean"]) == (1, True, False)
    assert not file.exists()


async def test_where_nothing_is_in_doubt_there_is_nothing_to_accept(store: Path) -> None:
    done = await run("check", store, "--accept")
    assert done.code == 0
    assert "nothing to accept" in done.out


async def test_a_store_that_somebody_has_open_cannot_be_accepted(store: Path) -> None:
    async with owned(store, "process") as owner:
        done = await run("check", store, "--accept")
        assert done.code == 2
        assert f"in use by process {owner.pid}" in done.err
        assert (store / "unsynced").exists()
