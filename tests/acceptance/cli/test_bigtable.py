"""`perco bigtable init|check`, and a store on Bigtable that is served: by one process after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

import perco as library
from perco.bigtable.address import Place
from perco.bigtable.calls import channel
from perco.bigtable.wire import admin_types
from tests.support import bigtable

docs = library.Table("docs", key=library.TEXT)
body = docs.column("body", library.TEXT)
words = docs.column("words", library.INT64)
schema = library.Schema(docs)


@schema.observe(body, id="count words")
async def count(txn: library.Transaction, change: library.Change[str, str]) -> None:
    txn.set(words, change.key, len((change.value or "").split()))


def perco(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "perco", *arguments], capture_output=True, text=True, check=False)


@contextmanager
def serving(url: str, address: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "perco", "serve", url, "--listen", address, *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def says(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert word in line, line
    return line


@pytest.fixture
def url() -> str:
    return bigtable.fresh()


def test_the_table_is_made_once(url: str) -> None:
    other = f"{url}_other"
    found = perco("bigtable", "check", other)
    assert (found.returncode, "perco bigtable init makes it" in found.stdout) == (1, True), found
    made = perco("bigtable", "init", other)
    assert (made.returncode, "made" in made.stdout) == (0, True), made
    again = perco("bigtable", "init", other)
    assert (again.returncode, "it exists already" in again.stdout) == (0, True), again
    fine = perco("bigtable", "check", other)
    assert (fine.returncode, "nothing is wrong" in fine.stdout) == (0, True), fine


def test_families_that_would_lose_cells_are_found(url: str) -> None:
    place, t = Place(f"{url}_wrong"), admin_types()
    made = channel(place).unary_unary(
        "/google.bigtable.admin.v2.BigtableTableAdmin/CreateTable",
        request_serializer=t.CreateTable.SerializeToString,
        response_deserializer=t.Table.FromString,
    )
    families = {"p": {"gc_rule": {"max_num_versions": 1}}}
    made(t.CreateTable(parent=place.instance, table_id=place.prefix, table={"column_families": families}))
    found = perco("bigtable", "check", place.url, "--json")
    assert found.returncode == 1
    told = " ".join(json.loads(found.stdout)["findings"])
    assert "column family d is missing" in told
    assert "garbage-collection rule" in told


def test_without_the_table_a_program_is_told_to_make_it(url: str, tmp_path: Path) -> None:
    refused = perco("serve", f"{url}_none", "--listen", f"unix:{tmp_path / 's'}")
    assert (refused.returncode, "perco bigtable init" in refused.stderr) == (2, True), refused


def test_it_is_served_looked_at_and_checked(url: str, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'socket'}"
    with serving(url, address) as process:
        says(process, "serving bigtable://test/test?prefix=")
        status = perco("status", address)
        assert (status.returncode, "bigtable://" in status.stdout) == (0, True), status
        checked = perco("check", address)
        assert (checked.returncode, "clean" in checked.stdout) == (0, True), checked
        second = perco("serve", url, "--listen", f"unix:{tmp_path / 'other'}")
        assert (second.returncode, f"process {process.pid} on " in second.stderr) == (2, True), second
        owned = perco("bigtable", "check", url)
        assert f"process {process.pid} on " in owned.stdout


def test_a_standby_goes_on_where_a_killed_server_was(url: str, tmp_path: Path) -> None:
    """All acknowledged writes are there, and each change is counted once."""
    first, second = (f"unix:{tmp_path / name}" for name in ("first", "second"))

    async def write(address: str, *keys: str) -> None:
        async with library.open(address, schema) as db:
            for key in keys:
                async with db.transaction() as txn:
                    txn.set(body, key, "two words")

    async def counted(address: str) -> dict[str, int | None]:
        async with library.open(address, schema) as db, db.worker():
            await db.wait_idle()
            async with db.snapshot() as snap:
                return {row.key: row[words] async for row in snap.scan(docs)}

    with serving(url, first) as leader:
        says(leader, "serving")
        with serving(url, second, "--standby") as standby:
            says(standby, "standing by")
            trio.run(write, first, "a", "b")
            leader.kill()
            says(standby, "serving")
            trio.run(write, second, "c")
            assert trio.run(counted, second) == {"a": 2, "b": 2, "c": 2}


def test_workers_and_commands_reach_the_rows_of_a_store_that_is_served_directly(url: str, tmp_path: Path) -> None:
    """At the address of the database; the server's own address does as well."""
    with serving(url, f"unix:{tmp_path / 'socket'}", "--direct") as process:
        says(process, "serving bigtable://test/test?prefix=")

        async def write() -> None:
            async with library.open(url, schema) as db, db.transaction() as txn:
                txn.set(body, "a", "two words")

        trio.run(write)
        worked = perco("worker", "tests.acceptance.cli.test_bigtable:schema", "--store", url, "--until-idle")
        assert worked.returncode == 0, worked
        for address in (url, f"unix:{tmp_path / 'socket'}"):
            got = perco("get", address, "docs", "a", "--json")
            assert json.loads(got.stdout)["columns"]["words"]["value"] == 2, got
            status = perco("status", address)
            assert (status.returncode, "bigtable://" in status.stdout) == (0, True), status


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "URL"], "say where to listen"),
        (["serve", "URL", "--listen", "unix:s", "--advertise", "tcp://db:1"], "--advertise needs --direct"),
        (["serve", "URL", "--listen", "unix:s", "--processes", "2"], "a database has no tablet servers"),
        (["status", "URL"], "perco serve URL --direct"),
    ],
)
def test_what_makes_no_sense_is_refused(url: str, arguments: list[str], said: str) -> None:
    refused = perco(*(url if each == "URL" else each for each in arguments))
    assert (refused.returncode, said in " ".join(refused.stderr.split())) == (2, True), refused


def test_nobody_reads_it_beside_its_owner(url: str) -> None:
    async def main() -> None:
        async with library.open(url, readonly=True):
            raise AssertionError("it must not be opened")

    with pytest.raises(library.Unavailable, match="perco serve URL --direct"):
        trio.run(main)
