"""`perco views`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import perco
from examples.views import author, shelf, text, total
from tests.acceptance.cli.stores import command, run
from tests.acceptance.cli.test_worker import environment

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


async def test_how_fresh_views_are_is_listed_with_an_owner_and_without(tmp_path: Path) -> None:  # V14
    store = tmp_path / "store"
    await make(store)
    async with perco.open(store, shelf.schema) as db, db.transaction() as txn:
        txn.set(author, "b", "ann")
    assert txn.commit_ts
    for _ in range(2):
        found = json.loads((await run("views", "list", NAME, "--store", store, "--json")).out)
        fresh = {each["id"]: each["fresh"] for each in found}
        assert fresh["by author"]["ts"] == txn.commit_ts - 1
        assert (fresh["by author"]["waiting"], fresh["by author"]["failed"]) == (1, 0)
        assert (fresh["totals"]["waiting"], fresh["totals"]["lag_s"]) == (0, 0.0)
        assert fresh["totals"]["ts"] >= txn.commit_ts
    async with perco.open(store, shelf.schema) as db, db.worker():
        await db.wait_idle(timeout=60)
        done = await run("views", "list", NAME, "--store", store)
        head, *lines = [line.split() for line in done.out.splitlines()]
        assert head == ["view", "fresh", "to", "waiting", "failed", "lag"]
        assert [line[-2:] for line in lines] == [["0", "0"]] * 3
    other = await run("views", "list", NAME, "--store", tmp_path / "none")
    assert other.code != 0


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


async def test_what_would_change_is_shown_and_rebuilt(tmp_path: Path) -> None:
    store = tmp_path / "store"
    await make(store)
    same = await run("views", "diff", NAME, "--store", store)
    assert (same.code, same.out.splitlines()[0].split()) == (
        0,
        ["view", "owners", "same", "added", "changed", "removed", "strays", "failed"],
    )
    async with perco.open(store, shelf.schema) as db, db.transaction() as txn:
        txn.set(total, "sea", 3)
        txn.set(total, "none", 1)
    done = await run("views", "diff", NAME, "totals", "--store", store)
    assert done.code == 1
    assert "totals: words[sea] (given by sea)\n  new  most=" in done.out
    assert "totals: words[none]\n  new  no row\n  now  total=1\n" in done.out
    few = await run("views", "diff", NAME, "--store", store, "--limit", 1)
    assert "... and 1 more row of totals" in few.out
    [found] = json.loads((await run("views", "diff", NAME, "totals", "--store", store, "--json")).out)
    assert {name: found[name] for name in ("owners", "changed", "removed", "strays", "equal")} == {
        "owners": 3,
        "changed": 1,
        "removed": 0,
        "strays": 1,
        "equal": False,
    }
    wrong = await run("views", "diff", NAME, "no", "--store", store)
    assert wrong.code == 2
    assert "view 'no' is not declared" in wrong.err
    done = await run("views", "rebuild", NAME, "--store", store, "--json")
    assert (done.code, json.loads(done.out)[1]) == (0, {"view": "totals", "owners": 3, "mended": 1, "strays": 1})
    assert (await run("views", "check", NAME, "--store", store)).code == 0


async def test_the_reasons_of_a_row_are_drawn(tmp_path: Path) -> None:
    store = tmp_path / "store"
    await make(store)
    done = await run("why", NAME, "words", "sea", "--store", store)
    lines = [line.strip("│├└─ ") for line in done.out.splitlines()]
    assert done.code == 0
    assert lines[0] == "words[sea]"
    assert lines[1].startswith('most=[["a", 2]], total=2  totals, version 1, for sea')
    assert lines[1].endswith("made again, byte by byte")
    assert lines[2].startswith('postings[["sea", "a"]]  times=2  written at ')
    assert lines[3].startswith("times=2  index, version 1, for a")
    assert lines[4].startswith("pages[a]  text=sea and sea  written at ")
    assert len((await run("why", NAME, "words", "sea", "--store", store, "--depth", 1)).out.splitlines()) == 3
    found = json.loads((await run("why", NAME, "words", "and", "--store", store, "--json", "--inputs", 1)).out)
    [reason] = found["reasons"]
    assert (reason["same"], reason["more_inputs"], reason["owner"]) == (True, 1, "and")
    assert found["inputs"][0]["table"] == "postings"
    async with perco.open(store, shelf.schema) as db, db.transaction() as txn:
        txn.set(total, "sea", 3)
    done = await run("why", NAME, "words", "sea", "--store", store)
    assert done.code == 1
    assert 'made again, it is most=[["a", 2]], total=2' in done.out
    past = await run(
        "why", NAME, "words", "sea", "--store", store, "--ts", max(reason["inputs"][0]["commit_ts"].values())
    )
    assert past.code == 1  # the index was there, and the totals not yet
    assert "words['sea'] has no value that a view could have given" in past.err
    for args, message in {
        ("words", "none"): "words['none'] has no value",
        ("pages", "a"): "no view writes table 'pages'",
        ("nothing", "a"): "has no table 'nothing'; its views write: authors, postings, words",
    }.items():
        done = await run("why", NAME, *args, "--store", store)
        assert done.code in (1, 2)
        assert message in done.err


async def test_changed_code_is_accepted(tmp_path: Path) -> None:
    store = tmp_path / "store"
    await make(store)
    assert (await run("views", "accept", NAME, "--store", store)).out == "no code had changed\n"


def run_in(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder that has a program."""
    argv = command(*arguments)
    return subprocess.run(argv, cwd=place, env=environment(), capture_output=True, text=True, check=False)


def test_sinks_are_listed_and_checked(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import perco\nfrom perco import views\n"
        "t = perco.Table('t', key=perco.TEXT)\nn = t.column('n', perco.INT64)\nv = views.Views(perco.Schema(t))\n"
        "v.sink(n, id='out', to=views.SqliteTable('out.db'))\n"
        "def take(rows):\n    pass\nv.sink(n, id='more', to=take)\n"
    )
    lines = run_in(tmp_path, "views", "list", "app:v").stdout.splitlines()
    assert lines[1].split() == ["out", "rows,", "for", "a", "sink", "t.n", "out.db:", "t"]
    assert "app.py:7, take" in lines[2]
    found = json.loads(run_in(tmp_path, "views", "list", "app:v", "--json").stdout)
    assert found[0] == {"id": "out", "kind": "sink", "reads": ["t.n"], "writes": ["out.db: t"]}
    assert "delivers to out.db: t" in run_in(tmp_path, "views", "explain", "app:v", "out").stdout
    assert run_in(tmp_path, "worker", "app:v", "--store", "s", "--until-idle").returncode == 0
    assert run_in(tmp_path, "set", "s", "t", "a", "n", "1").returncode == 0
    wrong = run_in(tmp_path, "views", "check", "app:v", "--store", "s")
    assert (wrong.returncode, "out: t[a]\n  expected  n=1\n  found     no row" in wrong.stdout) == (1, True)
    assert run_in(tmp_path, "worker", "app:v", "--store", "s", "--until-idle").returncode == 0
    assert run_in(tmp_path, "views", "check", "app:v", "--store", "s").returncode == 0
    done = run_in(tmp_path, "views", "rebuild", "app:v", "out", "--store", "s", "--json")
    assert json.loads(done.stdout) == [{"view": "out", "owners": 1, "mended": 0, "strays": 0}]


def test_near_duplicates_are_listed_and_explained(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import perco\nfrom perco import views\n"
        "t = perco.Table('t', key=perco.TEXT)\n"
        "text, like = t.column('text', perco.TEXT), t.column('like', perco.TEXT)\n"
        "v = views.Views(perco.Schema(t))\nviews.near_duplicates(v, text, id='near', into=like)\n"
    )
    lines = run_in(tmp_path, "views", "list", "app:v").stdout.splitlines()
    assert lines[-1].split() == ["near", "connected", "nodes", "near.links.near,", "near.links.alone", "t.like"]
    assert json.loads(run_in(tmp_path, "views", "list", "app:v", "--json").stdout)[-1]["kind"] == "components"
    assert "in 'near.sides'" in run_in(tmp_path, "views", "explain", "app:v", "near").stdout
    assert run_in(tmp_path, "worker", "app:v", "--store", "s", "--until-idle").returncode == 0
    for key in ("a", "b"):
        run_in(tmp_path, "set", "s", "t", key, "text", "one two three four")
    assert run_in(tmp_path, "worker", "app:v", "--store", "s", "--until-idle").returncode == 0
    assert run_in(tmp_path, "views", "check", "app:v", "--store", "s").returncode == 0
    why = run_in(tmp_path, "why", "app:v", "t", "b", "--store", "s").stdout
    assert "like=a  near, version 1, for b  (perco)  made again, byte by byte" in why
    assert 'near.links[["a", "b", ' in why or 'near.links[["b", "a", ' in why


async def test_a_view_is_dropped_once_it_is_said_twice(tmp_path: Path) -> None:  # V15
    store = tmp_path / "store"
    await make(store)
    async with perco.open(store, shelf.schema) as db, db.worker():
        refused = await run("views", "drop", NAME, "totals", "--store", store, "--yes")
        assert refused.code == 2
        assert "a process runs observer 'totals.members: times'" in refused.err
    shown = await run("views", "drop", NAME, "totals", "--store", store)
    assert shown.code == 1
    assert "observers: totals.members: times, totals\nrows of words: 3\n" in shown.out
    assert "nothing was deleted: add --yes to drop it" in shown.out
    assert (await run("views", "check", NAME, "--store", store)).code == 0
    done = await run("views", "drop", NAME, "totals", "--store", store, "--yes", "--json")
    found = json.loads(done.out)
    assert (done.code, found["rows"], found["owners"]) == (0, {"words": 3}, 3)
    assert (await run("check", store)).code == 0
    again = await run("views", "drop", NAME, "totals", "--store", store, "--yes")
    assert "examples.views:shelf still declares it" in again.out
    async with perco.open(store, readonly=True) as db, db.snapshot() as snap:
        assert {state.id for state in await db.observers()} == {"index: text", "by author.members: author", "by author"}
        assert [row.key async for row in snap.scan(db.schema.tables["words"])] == []
    wrong = await run("views", "drop", NAME, "none", "--store", store)
    assert (wrong.code, "the store does not have view 'none'" in wrong.err) == (2, True)
    done = await run("worker", NAME, "--store", store, "--until-idle")
    assert done.code == 0, done.err
    assert (await run("views", "check", NAME, "--store", store)).code == 0
