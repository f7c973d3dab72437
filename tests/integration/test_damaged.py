"""A folder with a damaged cell: it opens, it works, and `perco` says which cell it is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import trio

import perco
from perco.database.inside import inside, local_owner
from perco.protocol.records import PUT_DATA, Cellref, Lock, ack_of, pack_lock, pack_record
from perco.storage import LOCK, NOTIFY, WRITE, Mutation, Write
from tests.acceptance.cli.stores import run
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT)
body = docs.column("body", perco.TEXT, group="raw")
schema = perco.Schema(docs)
seen: list[str] = []


@schema.observe(body, id="see")
async def see(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
    seen.append(change.key)


async def damage(path: Path, group: str) -> None:
    async with perco.open(path, schema) as db:
        bound = inside(db).known.bind(body)
        ts = await inside(db).oracle.draw()
        await inside(db).oracle.draw()
        absent = Cellref("docs", b"absent", bound.column)
        cell: Write = {
            "lock": (LOCK, bound.column, ts, b"junk"),
            "lock of no group": (
                LOCK,
                bound.column,
                ts,
                pack_lock(Lock(PUT_DATA, absent, b"data:gone", (), (), 0, 0, "")),
            ),
            "notify": (NOTIFY, ack_of(bound.column, bound.observers[0]), ts, b"junk"),
            "record of no group": (WRITE, bound.column, ts, pack_record(PUT_DATA, 1, b"data:gone")),
        }[group]
        [verdict] = await local_of(db).store.apply([Mutation("docs", ((b"a", (), (cell,)),))])
        assert verdict


@pytest.mark.parametrize("group", ["lock", "lock of no group", "record of no group"])
async def test_a_store_with_a_damaged_cell_opens_and_works(
    tmp_path: Path, group: str, caplog: pytest.LogCaptureFixture
) -> None:  # L1, T9, G2
    await damage(tmp_path / "store", group)
    for value in ("hello", "again"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            async with perco.open(tmp_path / "store", schema) as db:
                async with db.transaction() as txn:
                    txn.set(body, "b", value)
                with trio.fail_after(60):
                    while not local_owner(db).sweeper.clean:  # noqa: ASYNC110
                        await trio.sleep(0.01)
                async with db.snapshot() as snap:
                    if group == "lock of no group":  # it did not commit, so nothing has to be made of it
                        assert await snap.get(body, "a") is None
                    else:
                        with pytest.raises(perco.errors.Corruption, match=r"^docs\['a'\]\.body.* Run `perco check`"):
                            await snap.get(body, "a")
                    assert await snap.get(body, "b") == value
                await db.vacuum()
                damaged = db.statistics().damaged
        if group != "record of no group":  # only a reader of that one can tell
            assert [place[:14] for place in damaged] == ["docs['a'].body"]
            assert len(caplog.records) == 1


async def test_others_say_which_cell_it_is(tmp_path: Path) -> None:  # N7
    store = tmp_path / "store"
    await damage(store, "lock")
    done = await run("status", store)
    assert done.code == 0
    assert "damaged docs['a'].body, lock group: run perco check" in " ".join(done.out.split())
    done = await run("wait", store, "--timeout", "60")
    assert done.code == 1
    assert "docs['a'].body, lock group cannot be read: run perco check" in " ".join(done.err.split())
    done = await run("check", store)
    assert done.code == 1
    assert "docs['a'].body" in done.out


async def test_a_damaged_notification_is_told_by_wait(tmp_path: Path) -> None:  # N7
    store = tmp_path / "store"
    await damage(store, "notify")
    done = await run("wait", store, "--timeout", "60")
    assert done.code == 1
    assert "docs['a'].body@see, notify group cannot be read" in " ".join(done.err.split())
