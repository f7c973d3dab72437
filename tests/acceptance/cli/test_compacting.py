"""`perco compact`."""

from __future__ import annotations

import json
from pathlib import Path

import perco
from tests.acceptance.cli.stores import owned, run, schema, square


async def worn(store: Path) -> None:
    """A table whose file was longer once than it need be."""
    async with perco.open(store, schema) as db:
        for _ in range(30):
            async with db.transaction() as txn:
                for number in range(500):
                    txn.set(square, number, number)


def bytes_of(store: Path, tablet: str) -> int:
    return (store / "tablets" / tablet / "data.mdb").stat().st_size


async def test_space_is_given_back_and_told(store: Path) -> None:
    await worn(store)
    before = bytes_of(store, "numbers-0")
    done = await run("compact", store, "numbers")
    assert (done.code, done.err) == (0, "")
    first, last = done.out.splitlines()
    assert first.startswith("numbers: ")
    assert "writes waited for" in first
    assert last.endswith(" given back")
    assert bytes_of(store, "numbers-0") < before
    assert (await run("check", store)).out.startswith("clean")


async def test_all_tables_of_an_open_store_as_json(store: Path) -> None:
    await worn(store)
    async with owned(store):
        before = bytes_of(store, "numbers-0")
        done = await run("compact", store, "--json")
        assert (done.code, done.err) == (0, "")
        told = json.loads(done.out)
        assert [(each["table"], each["from"]) for each in told["tablets"]] == [
            ("docs", None),
            ("docs", "m"),
            ("links", None),
            ("blobs", None),
            ("numbers", None),
        ]
        assert told["tablets"][-1]["before"] == before
        assert bytes_of(store, "numbers-0") == told["tablets"][-1]["after"] < before
        found = json.loads((await run("check", store, "--json")).out)
        assert found["clean"], "a look beside the owner finds the new files"


async def test_a_table_that_is_not_there(store: Path) -> None:
    done = await run("compact", store, "nothing")
    assert done.code == 2
    assert "nothing" in done.err
