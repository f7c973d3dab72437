"""`perco views`."""

from __future__ import annotations

import json
from pathlib import Path

import perco
from examples.views import author, shelf, text, total
from tests.acceptance.cli.stores import run

NAME = "examples.views:shelf"


async def make(store: Path) -> None:
    async with perco.open(store, shelf.schema) as db:
        async with db.transaction() as txn:
            txn.set(text, "a", "sea and sea")
            txn.set(text, "b", "and night")
            txn.set(author, "a", "ann")
        async with db.worker():
            await db.wait_idle(timeout=60)


async def test_views_are_listed_and_explained() -> None:
    listed = (await run("views", "list", NAME)).out.splitlines()
    assert [line.split()[0] for line in listed] == ["view", "index", "totals", "by"]
    found = json.loads((await run("views", "list", NAME, "--json")).out)
    assert found[1] == {
        "id": "totals",
        "kind": "group",
        "reads": ["postings.times"],
        "writes": ["words.most", "words.total"],
    }
    told = (await run("views", "explain", NAME)).out
    assert "keeps count, sum of postings.times, largest 3 by postings.times" in told
    assert "a run reads all members of a group (at most 100,000)" in told
    assert (await run("views", "explain", NAME, "index")).out.startswith("index:\n  reads pages.text;")
    wrong = await run("views", "explain", NAME, "indexx")
    assert wrong.code == 2
    assert "there are: 'index', 'totals', 'by author'" in wrong.err


async def test_a_store_is_checked(tmp_path: Path) -> None:  # V7
    store = tmp_path / "store"
    await make(store)
    done = await run("views", "check", NAME, "--store", store)
    assert done.code == 0
    assert done.out.splitlines()[-1].startswith("equal, as of timestamp ")
    async with perco.open(store, shelf.schema) as db, db.transaction() as txn:
        txn.set(total, "sea", 3)
        txn.set(total, "none", 1)
    done = await run("views", "check", NAME, "--store", store, "--limit", 1)
    assert done.code == 1
    assert "totals: words[none]\n  expected  no row\n  found     total=1\n... and 1 more row\n" in done.out
    assert "\n2 rows differ, as of timestamp " in done.out
    found = json.loads((await run("views", "check", NAME, "--store", store, "--json")).out)
    assert (found["equal"], found["differing"]) == (False, 2)
    assert found["differences"][1]["owner"] == "sea"


async def test_what_is_no_view_is_told(tmp_path: Path) -> None:
    done = await run("views", "list", "examples.views:text")
    assert done.code == 2
    assert "Column, not a perco.views.Views" in done.err


async def test_a_worker_takes_views_for_a_schema(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with perco.open(store, shelf.schema) as db, db.transaction() as txn:
        txn.set(text, "a", "sea")
    done = await run("worker", NAME, "--store", store, "--until-idle")
    assert done.code == 0, done.err
    assert (await run("views", "check", NAME, "--store", store)).code == 0
