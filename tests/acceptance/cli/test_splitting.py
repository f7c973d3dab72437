"""`perco split`, and what others say of tablets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.acceptance.cli.stores import owned, run


async def test_split_at_a_key_and_in_the_middle(store: Path) -> None:
    done = await run("split", store, "links", "--at", '["http://a/", 2]')
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith('tablet 1 of links has the rows from ["http://a/", 2] on\n2 cells copied in ')
    assert "; writes to them waited for " in done.out
    told = json.loads((await run("split", store, "numbers", "--json")).out)
    assert (told["table"], told["tablet"], told["cells"]) == ("numbers", 1, 2)
    again = json.loads((await run("split", store, "numbers", "--at", "-5", "--json")).out)
    assert (again["tablet"], again["from"]) == (2, -5)
    found = {table["name"]: table for table in json.loads((await run("status", store, "--json")).out)["tables"]}
    assert [tablet["number"] for tablet in found["numbers"]["tablets"]] == [0, 2, 1]
    assert [tablet["start"] for tablet in found["links"]["tablets"]] == [None, ["http://a/", 2]]
    assert sum(tablet["entries"]["write"] for tablet in found["numbers"]["tablets"]) == 3
    assert (await run("check", store)).code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("numbers", "--at", "x"), "not a whole number"),
        (("docs", "--at", "m"), "begins at that key already"),
        (("dogs",), "there is no table 'dogs'"),
        (("blobs",), "it holds one row, or none"),
    ],
)
async def test_what_cannot_be_split(store: Path, arguments: tuple[str, ...], said: str) -> None:
    done = await run("split", store, *arguments)
    assert done.code == 2
    assert said in done.err
    assert done.out == ""


async def test_tablets_of_what_nobody_serves_says_what_to_start(store: Path) -> None:
    done = await run("tablets", store)
    assert (done.code, done.out) == (2, "")
    assert f"Start `perco serve {store}` first." in done.err


async def test_where_another_process_has_it_open(store: Path) -> None:
    async with owned(store):
        assert "tablet 2 of docs has the rows from b on" in (await run("split", store, "docs", "--at", "b")).out
        told = json.loads((await run("tablets", store, "--json")).out)
        tablets = [tablet for tablet in told[0]["tablets"] if tablet["table"] == "docs"]
        assert [tablet["number"] for tablet in tablets] == [0, 2, 1]
    assert (await run("check", store)).code == 0
