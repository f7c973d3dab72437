"""`perco set` and `perco wait`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import perco
from tests.acceptance.cli.stores import Lines, command, contents, docs, make, owned, run, schema, started


@pytest.mark.parametrize(
    ("where", "text", "shown"),
    [
        (("docs", "a", "title"), "Größe", "Größe"),
        (("docs", "a", "rank"), "1e3", "1000.0"),
        (("docs", "a", "tags"), '["x", {"y": null}]', '["x", {"y": null}]'),
        (("docs", "a", "contents"), "hex:00ff", "hex:00ff"),
        (("links", '["u", 5]', "seen"), "true", "true"),
        (("blobs", "k", "blob"), '{"a": 1}', '{"a": 1}'),
        (("numbers", "-3", "square"), "-9", "-9"),
        (("docs", "a", "rank"), "-.5", "-0.5"),
    ],
)
async def test_what_is_set_is_got(store: Path, where: tuple[str, ...], text: str, shown: str) -> None:
    done = await run("set", store, *where, text)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("committed at ")
    assert (await run("get", store, *where)).out == shown + "\n"


async def test_dates_times_and_decimals_are_keys_and_values(tmp_path: Path) -> None:
    trades = perco.Table("trades", key=perco.Tuple(perco.DATE, perco.DECIMAL(9, 2)))
    trades.column("at", perco.TIMESTAMP)
    trades.column("price", perco.DECIMAL(30, 4))
    store = tmp_path / "store"
    async with perco.open(store, perco.Schema(trades)):
        pass
    for key, at in (
        ('["2026-03-02", "9.5"]', "2026-03-02T01:00+01:00"),
        ('["2026-03-02", "-10"]', "2026-03-02T00:00Z"),
    ):
        assert (await run("set", store, "trades", key, "at", at)).code == 0
    assert (await run("set", store, "trades", '["1969-07-20", "0"]', "price", "12.5")).code == 0
    assert (await run("get", store, "trades", '["1969-07-20", "0.00"]', "price")).out == "12.5000\n"
    lines = (await run("scan", store, "trades", "--json")).out.splitlines()
    assert [(row["key"], row["values"]) for row in map(json.loads, lines)] == [
        (["1969-07-20", "0.00"], {"price": "12.5000"}),
        (["2026-03-02", "-10.00"], {"at": "2026-03-02T00:00:00Z"}),
        (["2026-03-02", "9.50"], {"at": "2026-03-02T00:00:00Z"}),
    ]
    assert len((await run("scan", store, "trades", "--prefix", '["2026-03-02"]', "--json")).out.splitlines()) == 2


async def test_observers_are_notified_because_the_store_knows_them(store: Path) -> None:  # N10
    done = await run("set", store, "docs", "new", "contents", "12345")
    assert "notified: measure" in done.out
    assert (await run("check", store)).code == 0
    async with perco.open(store, schema) as db:
        assert await db.pending() == 1
        async with db.worker():
            await db.wait_idle()
        async with db.snapshot() as snap:
            assert (await snap.row(docs, "new")).values() == {"contents": b"12345", "size": 5}


async def test_set_as_json(store: Path) -> None:
    found = json.loads((await run("set", store, "docs", "new", "contents", "x", "--json")).out)
    assert found["commit_ts"] > 0
    assert found["observers"] == ["measure"]
    assert (found["table"], found["key"], found["column"]) == ("docs", "new", "contents")


async def test_set_beside_an_owner_goes_through_it(store: Path) -> None:
    async with owned(store):
        done = await run("set", store, "docs", "a", "title", "x")
        assert done.code == 0, done.err
        assert "committed at" in done.out
        # Through the owner: beside it one reads what is up to a second old.
        async with perco.open(f"unix:{store / 'socket'}", readonly=True) as db, db.snapshot() as snap:
            assert await snap.get(db.schema.tables["docs"].columns["title"], "a") == "x"


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("docs", "a", "rank", "much"), "the value 'much' is not a number"),
        (("docs", "a", "nothing", "x"), "no column 'nothing'; it has: contents, rank, size, title, tags"),
        (("nowhere", "a", "rank", "x"), "no table 'nowhere'; the store has: docs, links, blobs, numbers"),
        (("numbers", "x", "square", "1"), "the key 'x' is not a whole number"),
        (("docs", "a", "tags", "null"), "perco delete STORE TABLE KEY COLUMN"),
        (("blobs", "k", "blob", "null"), "perco delete STORE TABLE KEY COLUMN"),
        (("docs", "k" * 401, "title", "x"), "over the limit of 400 bytes"),
    ],
)
async def test_what_cannot_be_written_is_said_in_a_line(store: Path, args: tuple[str, ...], complaint: str) -> None:
    done = await run("set", store, *args)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.err
    assert len(done.err.splitlines()) == 1


# ------------------------------------------------------------------ delete


async def test_delete_empties_a_row_or_some_of_its_cells(tmp_path: Path) -> None:
    store = tmp_path / "store"
    ts = await make(store)
    done = await run("delete", store, "docs", "a", "rank", "tags")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("deleted rank, tags\ncommitted at ")
    assert "notified" not in done.out
    assert [(await run("get", store, "docs", "a", column)).code for column in ("rank", "tags", "title")] == [1, 1, 0]
    assert (await run("get", store, "docs", "a", "rank", "--ts", ts)).out == "0.25\n", "older versions stay"
    rest = await run("delete", store, "docs", "a")
    assert "deleted contents, size, title\n" in rest.out
    assert "notified: measure" in rest.out
    assert (await run("get", store, "docs", "a")).code == 1
    assert (await run("check", store)).code == 0


async def test_delete_of_nothing_writes_nothing(store: Path) -> None:
    for args, complaint in (
        (("nobody",), "docs['nobody'] has no value\n"),
        (("b", "title"), "has no value in title\n"),
    ):
        done = await run("delete", store, "docs", *args)
        assert (done.code, done.out) == (1, "")
        assert done.err.endswith(complaint)
    found = json.loads((await run("delete", store, "docs", "nobody", "--json")).out)
    assert (found["deleted"], found["commit_ts"]) == ([], None)
    wrong = await run("delete", store, "docs", "a", "titel")
    assert (wrong.code, wrong.out) == (2, "")
    assert "no column 'titel'; it has: contents" in wrong.err


# ------------------------------------------------------------------ wait


async def test_a_signal_is_raised_and_waits_for_its_observers(tmp_path: Path) -> None:  # N5
    store = tmp_path / "store"
    clusters = perco.Table("clusters", key=perco.TEXT)
    runs = clusters.column("runs", perco.INT64)
    grown, shrunk = clusters.signal("grown"), clusters.signal("shrunk")
    own = perco.Schema(clusters)

    @own.observe(grown, id="count")
    async def count(txn: perco.Transaction, change: perco.Change[str, None]) -> None:
        txn.set(runs, change.key, (await txn.get(runs, change.key) or 0) + 1)

    async with perco.open(store, own):
        pass
    done = await run("signal", store, "clusters", "k", "grown")
    assert (done.code, done.err) == (0, "")
    assert "notified: count" in done.out
    found = json.loads((await run("signal", store, "clusters", "k", "grown", "--json")).out)
    assert found["commit_ts"] > 0
    assert (found["key"], found["signal"], found["observers"]) == ("k", "grown", ["count"])
    told = json.loads((await run("status", store, "--json")).out)
    assert told["observers"][0]["waiting"] == 2
    assert [c["codec"] for c in told["tables"][0]["columns"]] == ["int64", "signal", "signal"]
    assert (await run("check", store)).code == 0
    done = await run("signal", store, "clusters", "k", shrunk.name)
    assert (done.code, done.out) == (1, "")
    assert "clusters.shrunk has no observer: nothing was raised" in done.err
    async with perco.open(store, own) as db, db.worker():
        await db.wait_idle()
        async with db.snapshot() as snap:
            assert await snap.get(runs, "k") == 1
    for args, complaint in (
        (("signal", store, "clusters", "k", "runs"), "no signal 'runs'; it has: grown, shrunk"),
        (("get", store, "clusters", "k", "grown"), "clusters.grown is a signal: it has no value"),
        (("set", store, "clusters", "k", "grown", "1"), "clusters.grown is a signal: it has no value"),
    ):
        done = await run(*args)
        assert done.code == 2
        assert complaint in done.err
        assert len(done.err.splitlines()) == 1


async def test_an_idle_store_is_idle_with_or_without_an_owner(store: Path) -> None:
    assert (await run("wait", store)).out == "idle\n"
    async with owned(store):
        assert (await run("wait", store)).out == "idle\n"


async def test_wait_lasts_until_the_owner_has_run_its_observers(store: Path) -> None:
    async with owned(store) as owner:
        await owner.tell("put new")
        async with started(command("wait", store, "--json")) as process:
            assert "1 change waits (1 for measure)" in await Lines(process.stderr).next()
            await owner.tell("work")
            found = json.loads(await Lines(process.stdout).next())
            assert await process.wait() == 0
        assert (found["idle"], found["waiting"], found["locks"]) == (True, {"measure": 0}, 0)
        done = await run("get", store, "docs", "new", "size", "--json")
        assert done.code in (0, 1), "the owner notes its clock once a second"


async def test_wait_gives_up_after_its_timeout(store: Path) -> None:
    async with owned(store) as owner:
        await owner.tell("put new")
        done = await run("wait", store, "--timeout", "0.3")
    assert done.code == 1
    assert "perco worker MODULE:SCHEMA" in done.err
    assert "not idle within the time allowed: 1 change waits" in done.err


async def test_wait_does_not_wait_for_nobody(store: Path) -> None:
    await run("set", store, "docs", "new", "contents", "x")
    done = await run("wait", store, "--json")
    assert done.code == 1
    assert "no process has the store open" in done.err
    assert json.loads(done.out)["waiting"] == {"measure": 1}


async def test_wait_until_a_timestamp_passes_by_what_came_later(store: Path) -> None:
    async with owned(store) as owner:
        ts = int(await owner.tell("put new"))
        assert (await run("wait", store, "--until-ts", ts - 1)).code == 0
        assert (await run("wait", store, "--until-ts", ts, "--timeout", "0.3")).code == 1
        await owner.tell("work")
        assert (await run("wait", store, "--until-ts", ts)).code == 0


async def test_wait_until_a_timestamp_that_was_never_given_out_is_refused(store: Path) -> None:
    done = await run("wait", store, "--until-ts", 10**9)
    assert (done.code, done.out) == (2, "")
    assert "no timestamp above 100000 has been issued yet" in done.err


async def test_wait_until_a_timestamp_while_others_go_on_writing(store: Path) -> None:
    async with owned(store) as owner:
        await owner.tell("work")
        ts = int(await owner.tell("put new"))
        await owner.tell("write")
        assert (await run("wait", store, "--until-ts", ts)).code == 0


def test_the_column_of_these_tests_is_observed() -> None:
    assert schema.observers["measure"].column is contents
