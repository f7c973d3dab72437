"""A folder that was copied or restored in part: a tablet that has been made and is not there is told, and not made
anew."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import perco
from perco.database.inside import inside
from perco.schema import catalogue as catalogues
from perco.serve.opening import offline
from perco.storage import BatchOptions, LmdbOptions
from perco.tablets.local import LocalStore
from tests.acceptance.cli.stores import run
from tests.support.places import local_of

ledger = perco.Table("ledger", key=perco.TEXT, splits=["m"])
amount = ledger.column("amount", perco.INT64)
notes = perco.Table("notes", key=perco.TEXT)
note = notes.column("note", perco.TEXT)
schema = perco.Schema(ledger, notes)


async def fill(txn: perco.Transaction) -> None:
    for key in ("a", "z"):
        txn.set(amount, key, 1)
        txn.set(note, key, "paid")


@pytest.fixture
async def store(tmp_path: Path) -> Path:
    async with perco.open(tmp_path / "store", schema) as db:
        await db.run(fill)
    return tmp_path / "store"


def owned(path: Path) -> AbstractAsyncContextManager[Any]:
    return perco.open(path, schema)


def unshared(path: Path) -> AbstractAsyncContextManager[Any]:
    return perco.open(path, schema, options=perco.Options(shared=False))


def beside(path: Path) -> AbstractAsyncContextManager[Any]:
    return perco.open(path, readonly=True)


@asynccontextmanager
async def bare(path: Path) -> AsyncIterator[LocalStore]:
    """Its owner, before it has looked at the catalogue."""
    local = LocalStore(path, durable=True, readonly=False, accept_loss=False, lmdb=LmdbOptions(), batch=BatchOptions())
    try:
        yield local
    finally:
        await local.aclose()


@pytest.mark.parametrize("opening", [owned, unshared, beside, offline])
@pytest.mark.parametrize("lost", ["ledger-0", "ledger-1", "notes-0"])
async def test_a_tablet_that_was_made_and_is_missing_is_told(
    store: Path, lost: str, opening: Callable[[Path], AbstractAsyncContextManager[Any]]
) -> None:  # P4
    shutil.rmtree(store / "tablets" / lost)
    table = lost.partition("-")[0]
    told = f"tablets/{lost}: it is missing, and the catalogue has table '{table}': restore the whole folder from one"
    with pytest.raises(perco.errors.Corruption, match=told):
        async with opening(store):
            pass
    assert not (store / "tablets" / lost).exists()


@pytest.mark.parametrize("opening", [owned, beside, offline])
@pytest.mark.parametrize("empty", [False, True])
async def test_so_is_one_whose_file_is_missing(
    store: Path, empty: bool, opening: Callable[[Path], AbstractAsyncContextManager[Any]]
) -> None:  # P4
    file = store / "tablets" / "notes-0" / "data.mdb"
    file.unlink()
    if empty:
        file.touch()
    with pytest.raises(
        perco.errors.Corruption, match=r"tablets/notes-0: its data.mdb is missing, or empty, and .*'notes'"
    ):
        async with opening(store):
            pass


@pytest.mark.parametrize("opening", [owned, beside, offline])
async def test_so_is_the_system_table(
    store: Path, opening: Callable[[Path], AbstractAsyncContextManager[Any]]
) -> None:  # P4
    shutil.rmtree(store / "tablets" / "_perco-0")
    with pytest.raises(
        perco.errors.Corruption, match="tablets/_perco-0: it is missing, and there are tablets beside it"
    ):
        async with opening(store):
            pass
    assert not (store / "tablets" / "_perco-0").exists()


@pytest.mark.parametrize("command", ["check", "status", "compact"])
async def test_no_command_goes_on(store: Path, command: str) -> None:
    shutil.rmtree(store / "tablets" / "ledger-0")
    done = await run(command, store)
    assert done.code == (1 if command == "check" else 2)
    assert "it is missing, and the catalogue has table 'ledger'" in " ".join((done.out + done.err).split())
    assert not (store / "tablets" / "ledger-0").exists()


async def test_check_reads_the_other_tablets(store: Path) -> None:
    shutil.rmtree(store / "tablets" / "ledger-1")
    shutil.rmtree(store / "tablets" / "notes-0")
    done = await run("check", store, "--repair")
    assert done.code == 1
    assert "tablet ledger-1: it is missing, and the catalogue has table 'ledger'\n" in done.out
    assert "tablet notes-0: it is missing, and the catalogue has table 'notes'\n" in done.out
    assert done.out.count("restore the whole folder from one copy") == 2
    assert "2 errors, 0 warnings: 2 tables, 1 row, " in done.out
    assert "nothing is repaired while a tablet cannot be read" in done.err


async def test_check_without_the_system_table_does_not_speak_of_a_schema(store: Path) -> None:
    shutil.rmtree(store / "tablets" / "_perco-0")
    done = await run("check", store)
    assert done.code == 1
    assert "tablet _perco-0: it is missing, and there are tablets beside it\n" in done.out
    assert "schema" not in done.out + done.err


async def test_who_only_reads_is_told_that_there_are_no_tablets(store: Path) -> None:
    shutil.rmtree(store / "tablets")
    (store / "tablets").mkdir()
    with pytest.raises(perco.errors.UnsuitableFolder, match=r"there are no tablets in it: .* restore the whole folder"):
        async with beside(store):
            pass
    async with owned(store):  # its maker may have been stopped
        pass


# ------------------------------------------------------------ what is no damage


async def test_a_maker_that_was_stopped_after_the_record_of_a_table(tmp_path: Path) -> None:  # P4 N10
    async with bare(tmp_path / "store") as local:
        await catalogues.declare(local.store, schema)
    async with beside(tmp_path / "store") as db:
        assert inside(db).catalogue.tables.keys() == {"ledger", "notes"}
    async with owned(tmp_path / "store") as db:
        await db.run(fill)


async def test_a_maker_that_was_stopped_between_two_tablets_of_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # P4
    path = tmp_path / "store"
    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "_note_made", _stopped)
        with pytest.raises(InterruptedError):
            async with owned(path):
                pass
    shutil.rmtree(path / "tablets" / "ledger-1")
    async with owned(path) as db:
        await db.run(fill)
    shutil.rmtree(path / "tablets" / "ledger-1")  # by now that it was made is noted
    with pytest.raises(perco.errors.Corruption, match="ledger-1: it is missing"):
        async with owned(path):
            pass


async def _stopped(*_: object) -> None:
    raise InterruptedError


async def test_a_table_that_was_never_written_to_is_made_as_well(tmp_path: Path) -> None:
    for _ in range(2):
        async with owned(tmp_path / "store") as db:
            assert local_of(db).store.tables() == ["_perco", "ledger", "notes"]
    assert {path.name for path in (tmp_path / "store" / "tablets").iterdir()} == {
        "_perco-0",
        "ledger-0",
        "ledger-1",
        "notes-0",
    }


async def test_a_table_that_is_declared_later(store: Path) -> None:
    more = perco.Table("more", key=perco.TEXT)
    more.column("more", perco.TEXT)
    async with perco.open(store, perco.Schema(more)):
        pass
    shutil.rmtree(store / "tablets" / "more-0")
    with pytest.raises(perco.errors.Corruption, match="more-0: it is missing"):
        async with owned(store):
            pass
