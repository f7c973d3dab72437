"""`perco check`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.protocol.records import ack_of
from perco.storage import NOTIFY, WRITE, Mutation, Write
from tests.acceptance.cli.stores import ROOT, contents, docs, owned, run, schema, title


async def damage(path: Path, *, severity: str) -> None:
    """Lose a notification, or leave a long value to nobody."""
    async with perco.open(path, schema) as db:
        bound = inside(db).known.bind(contents)
        async with db.transaction() as txn:
            txn.set(contents, "lost", b"1")
        write: Write = (NOTIFY, ack_of(bound.column, bound.observers[0]), txn.commit_ts, None)
        if severity == "warning":
            write = ("data:raw", bound.column, txn.start_ts, b"left behind")
        await inside(db).driver.store.apply([Mutation("docs", ((b"lost", (), (write,)),))])


def files(store: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in store.glob("tablets/*/data.mdb")}


async def test_a_healthy_store_is_clean(store: Path) -> None:
    done = await run("check", store)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("clean: 4 tables, ")


async def test_findings_are_exit_code_1(store: Path) -> None:
    await damage(store, severity="error")
    done = await run("check", store)
    assert done.code == 1
    first, remedy, last = done.out.splitlines()
    assert first.startswith("error    N1   docs['lost'].contents: lost notification: observer 'measure'")
    assert remedy.strip() == "--repair: write the notification again"
    assert last.startswith("1 error, 0 warnings: ")


async def test_check_as_json(store: Path) -> None:
    await damage(store, severity="error")
    found = json.loads((await run("check", store, "--json")).out)
    assert (found["clean"], found["errors"], found["warnings"]) == (False, 1, 0)
    [finding] = found["findings"]
    assert (finding["severity"], finding["invariant"]) == ("error", "N1")
    assert found["rows"] > 5
    assert found["ts"] > 0


async def test_check_beside_a_busy_owner_reports_nothing(store: Path) -> None:
    async with perco.open(store, perco.Schema(docs, keep=perco.Keep(seconds=0))):
        pass  # the store keeps that in mind
    async with owned(store) as owner:
        await owner.tell("work")
        await owner.tell("write")
        await owner.tell("vacuum")
        before = int(await owner.tell("commits"))
        for _ in range(3):
            found = json.loads((await run("check", store, "--json")).out)
            assert [f for f in found["findings"] if f["severity"] != "note"] == []
            assert found["clean"]
        assert int(await owner.tell("commits")) > before
        assert int(await owner.tell("removed")) > 100


# ------------------------------------------------------------------ repairs


async def test_what_can_be_repaired_is(store: Path) -> None:
    await damage(store, severity="error")
    done = await run("check", store, "--repair")
    assert done.code == 0
    first, verdict, last = done.out.splitlines()
    assert first.startswith("repaired N1   docs['lost'].contents: lost notification: observer 'measure'")
    assert first.endswith("(write the notification again)")
    assert verdict.startswith("clean: ")
    assert last == "1 repaired"
    assert (await run("check", store)).code == 0
    async with perco.open(store, schema) as db, db.worker(concurrency=1, scanners=1) as worker:
        await db.wait_idle()
        assert worker.statistics()["measure"].commits == 1


async def test_a_repair_of_a_healthy_store_changes_nothing(store: Path) -> None:
    before = files(store)
    done = await run("check", store, "--repair")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == "nothing to repair"
    assert files(store) == before


async def test_what_cannot_be_repaired_stays_and_says_what_to_do(store: Path) -> None:
    async with perco.open(store, schema) as db:
        async with db.transaction() as txn:
            txn.set(contents, "gone", b"long" * 200)
        write: Write = ("data:raw", inside(db).known.bind(contents).column, txn.start_ts, None)
        await inside(db).driver.store.apply([Mutation("docs", ((b"gone", (), (write,)),))])
    before = files(store)
    found = json.loads((await run("check", store, "--repair", "--json")).out)
    assert (found["clean"], found["repaired"], found["settled"]) == (False, [], 0)
    [finding] = found["findings"]
    assert (finding["invariant"], finding["repair"]) == ("T2", None)
    assert "write the cell again" in finding["remedy"]
    assert files(store) == before
    await run("set", store, "docs", "gone", "contents", "new")
    assert (await run("get", store, "docs", "gone", "contents")).out == "new\n"


async def test_a_record_that_does_not_decode_is_told_apart_from_a_transaction_that_is_there_twice(store: Path) -> None:
    async with perco.open(store, schema) as db:
        async with db.transaction() as txn:
            txn.set(title, "torn", "x")
        write: Write = (WRITE, inside(db).known.bind(title).column, txn.commit_ts, b"")
        await inside(db).driver.store.apply([Mutation("docs", ((b"torn", (), (write,)),))])
    done = await run("check", store, "--repair")
    assert done.code == 1
    finding, remedy, verdict, last = done.out.splitlines()
    assert finding.startswith("error    T1   docs['torn'].title: the record at ")
    assert remedy.strip() == "the outcome that it recorded is lost: restore a copy, or write the cell again"
    assert verdict.startswith("1 error, 0 warnings: 4 tables")
    assert last == "0 repaired, 1 cannot be"
    assert (await run("set", store, "docs", "torn", "title", "whole")).code == 0
    assert (await run("get", store, "docs", "torn", "title")).out == "whole\n"


async def test_a_repair_settles_what_a_killed_process_left(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with trio.open_nursery() as nursery:
        argv = [sys.executable, "-m", "tests.support.owner", str(path), "killed@prewrite"]
        await nursery.start(partial(trio.run_process, argv, stdout=subprocess.DEVNULL, check=False, cwd=ROOT))
    found = json.loads((await run("check", path, "--json")).out)
    assert found["clean"]
    assert found["orphans"] == found["locks"] > 1
    done = json.loads((await run("check", path, "--repair", "--json")).out)
    assert done["settled"] >= found["orphans"] - 1, "the primary goes with the decision"
    assert (done["clean"], done["locks"], done["orphans"]) == (True, 0, 0)


async def test_a_store_that_somebody_has_open_cannot_be_repaired(store: Path) -> None:
    await damage(store, severity="error")
    async with owned(store) as owner:
        done = await run("check", store, "--repair")
        assert done.code == 2
        assert f"in use by process {owner.pid}" in done.err
    assert (await run("check", store)).code == 1


async def test_a_repair_makes_no_store(tmp_path: Path) -> None:
    done = await run("check", tmp_path / "none", "--repair")
    assert done.code == 2
    assert "there is no such folder" in done.err
    assert not (tmp_path / "none").exists()


async def test_a_store_in_doubt_is_repaired_where_it_is_accepted_too(store: Path) -> None:  # S2
    await damage(store, severity="error")
    file = mark(store)
    assert (await run("check", store, "--repair")).code == 2
    assert file.exists()
    done = await run("check", store, "--repair", "--accept")
    assert done.code == 0
    assert "accepted" in done.out
    assert not file.exists()


# ------------------------------------------------------------------ after a loss (S2)


def mark(path: Path) -> Path:
    """As if the machine had restarted while the store was open with durability="process"."""
    file = path / "unsynced"
    file.write_text("another boot\n")
    return file


async def test_a_store_in_doubt_is_checked_and_accepted(store: Path) -> None:
    file = mark(store)
    with pytest.raises(perco.errors.NeedsCheck):
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
        assert inside(db).catalogue.tables


async def test_a_file_that_cannot_be_read_is_said_in_a_line(store: Path) -> None:
    [data] = (store / "tablets").glob("numbers-0/data.mdb")
    torn = data.read_bytes()
    data.write_bytes(torn[:8192] + b"\xff" * (len(torn) - 8192))
    for args in (("check", store), ("check", store, "--accept")):
        done = await run(*args)
        assert (done.code, done.err) == (1, "")
        assert "tablet numbers-0: " in done.out.splitlines()[0]
        assert "restore" in done.out.splitlines()[1]
    for args in (("scan", store, "numbers"), ("status", store)):
        done = await run(*args)
        assert done.code == 2
        assert len(done.err.splitlines()) == 1
    with pytest.raises(perco.errors.Corruption, match="numbers-0"):
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


async def test_a_copy_of_an_open_store_is_checked_and_accepted(store: Path, tmp_path: Path) -> None:  # I1
    copy = tmp_path / "copy"
    async with owned(store):
        shutil.copytree(store, copy, ignore=lambda _, names: {"socket"} & set(names))
    refused = await run("status", copy)
    assert refused.code == 2
    assert "perco check --accept" in refused.err
    done = await run("check", copy)
    assert done.code == 0
    assert f"perco check --accept {copy}" in done.out
    done = await run("check", copy, "--accept")
    assert done.code == 0
    assert "accepted" in done.out
    assert (await run("status", copy)).code == 0
    assert "nothing to accept" in (await run("check", copy, "--accept")).out


async def test_a_store_that_somebody_has_open_cannot_be_accepted(store: Path) -> None:
    async with owned(store, "process") as owner:
        done = await run("check", store, "--accept")
        assert done.code == 2
        assert f"in use by process {owner.pid}" in done.err
        assert (store / "unsynced").exists()
