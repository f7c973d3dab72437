"""`perco backup`, `perco restore` and `perco backups`, as a user meets them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.acceptance.cli.stores import make, owned, run


async def test_a_store_in_use_is_backed_up_and_restored(tmp_path: Path) -> None:
    path, backups = tmp_path / "s", tmp_path / "backups"
    await make(path)
    async with owned(path) as owner:
        first = await run("backup", path, backups, "--verify")
        assert (first.code, first.err) == (0, "")
        assert "(full), verified\nIt has every transaction up to timestamp " in first.out
        await owner.tell("put new")
        second = await run("backup", path, backups)
        assert "the others are in " in second.out
        await owner.tell("put newer")
    listed = json.loads((await run("backups", "list", backups, "--json")).out)
    assert [each["error"] for each in listed] == [None, None]
    assert listed[1]["base"] == listed[0]["name"]
    assert listed[0]["stored"] == listed[0]["pages"] > listed[1]["stored"]
    done = await run("restore", backups, tmp_path / "again")
    assert done.code == 0, done.err
    assert f"{tmp_path / 'again'} is what {path} was at " in done.out
    assert (await run("get", tmp_path / "again", "docs", "new", "contents")).out == "new\n"
    assert (await run("get", tmp_path / "again", "docs", "newer", "contents")).code == 1
    assert (await run("check", tmp_path / "again")).code == 0
    old = await run("restore", backups, tmp_path / "old", "--backup", listed[0]["name"], "--json")
    assert json.loads(old.out)["name"] == listed[0]["name"]
    assert (await run("get", tmp_path / "old", "docs", "new", "contents")).code == 1
    assert (await run("get", tmp_path / "old", "docs", "a", "title")).out == "second\n"


async def test_backups_are_listed_verified_and_removed(store: Path, tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    for options in ((), ("--full",), ("--full", "--keep", "2", "--json")):
        done = await run("backup", store, backups, *options)
        assert done.code == 0, done.err
    gone = json.loads(done.out)["removed"]
    listed = await run("backups", "list", backups)
    assert len(gone) == 1
    assert listed.out.count("full") == 2
    assert (await run("backups", "verify", backups)).out.endswith(" read\n")
    [pages] = backups.glob("*-3/docs-0.pages")
    data = pages.read_bytes()
    pages.write_bytes(data[:5000] + b"?" + data[5001:])
    found = await run("backups", "verify", backups)
    assert found.code == 1
    assert "is not what was written: its digest differs" in found.err
    refused = await run("restore", backups, tmp_path / "again")
    assert refused.code == 2
    assert not (tmp_path / "again").exists()
    pruned = await run("backups", "prune", backups, "--keep", "1")
    assert pruned.out == "0 backups removed, 2 kept\n", "the damaged one does not count"
    pages.write_bytes(data)
    assert (await run("backups", "verify", backups)).code == 0
    pruned = await run("backups", "prune", backups, "--keep", "1")
    assert pruned.out == "1 backup removed, 1 kept\n"


async def test_a_backup_in_a_file(store: Path, tmp_path: Path) -> None:
    done = await run("backup", store, tmp_path / "one.tar")
    assert done.code == 0, done.err
    again = await run("backup", store, tmp_path / "one.tar")
    assert again.code == 2
    assert "a file holds one backup" in again.err
    assert (await run("backups", "prune", tmp_path / "one.tar", "--keep", "1")).code == 2
    await run("restore", tmp_path / "one.tar", tmp_path / "again")
    assert (await run("get", tmp_path / "again", "docs", "a", "title")).out == "second\n"


async def test_a_plain_copy_of_a_store_in_use_is_refused_and_can_be_checked(tmp_path: Path) -> None:  # I1
    path, copy = tmp_path / "s", tmp_path / "t"
    await make(path)
    async with owned(path):
        shutil.copytree(path, copy, ignore=lambda _, names: {"socket"} & set(names))
    refused = await run("get", copy, "docs", "a", "title")
    assert refused.code == 2
    assert "Copy a store with `perco backup` and `perco restore`." in refused.err
    assert (await run("backup", copy, tmp_path / "backups")).code == 2
    checked = await run("check", copy)
    assert checked.code == 0, checked.out
