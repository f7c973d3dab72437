"""`perco sql`, as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import perco
from tests.acceptance.cli.stores import make, owned, run


async def test_tables_are_joined_and_aggregated(store: Path) -> None:
    done = await run("sql", store, "select count(*) as n, sum(square) as total from numbers")
    assert (done.code, done.out) == (0, "n\ttotal\n3\t58\n"), done.err
    query = """
        with named as (select * from docs where title is not null)
        select a.key, octet_length(a.contents) bytes, a.tags->>'$.k[0]' tag, l.seen
        from named a join named b using (key) left join links l on l.key_1 = 'http://a/' and l.key_2 = 1 order by key
    """
    done = await run("sql", store, query, "--json")
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert rows == [
        {"key": "a", "bytes": 2, "tag": "1", "seen": True},
        {"key": "x", "bytes": 5000, "tag": None, "seen": True},
    ], done.err


async def test_types_that_perco_does_not_have_are_text(store: Path) -> None:
    done = await run(
        "sql", store, "select interval 1 day d, [1, null] l, {'a': 1.5::decimal(3, 1)} s, null n", "--json"
    )
    assert json.loads(done.out) == {
        "d": "MonthDayNano(months=0, days=1, nanoseconds=0)",
        "l": [1, None],
        "s": {"a": "1.5"},
        "n": None,
    }


async def test_of_the_past_and_of_a_store_in_use(tmp_path: Path) -> None:
    path = tmp_path / "s"
    await make(path)
    told = json.loads((await run("get", path, "docs", "a", "title", "--versions", "--json")).out)
    first = told["versions"]["title"][-1]["commit_ts"]
    async with owned(path):
        query = "select title from docs where key = 'a'"
        assert (await run("sql", path, query)).out == "title\nsecond\n"
        assert (await run("sql", path, query, "--ts", first)).out == "title\nfirst\n"


async def test_errors_say_what_is_wrong(store: Path) -> None:
    for query, why in (
        ("select * from dox", "the store has: blobs, docs, links, numbers"),
        ("select nothing from docs", "nothing"),
        ("delete from docs", "perco sql takes one SELECT"),
        ("selec 1", "syntax error"),
        ("select 1; select 2", "perco sql takes one SELECT"),
    ):
        done = await run("sql", store, query)
        assert (done.code, done.out) == (2, ""), query
        assert why in done.err, done.err
    assert (await run("sql", store, "select 1 where false")).out == "1\n"


async def test_columns_of_one_name_are_all_there(store: Path) -> None:
    done = await run("sql", store, "select a.key, b.key from docs a join docs b on a.key < b.key", "--json")
    assert json.loads(done.out) == {"key": "a", "key_1": "x"}


async def test_names_in_another_case(tmp_path: Path) -> None:
    tables = [perco.Table(name, key=perco.TEXT) for name in ("Docs", "other", "OTHER")]
    columns = [table.column("n", perco.INT64) for table in tables]
    async with perco.open(tmp_path / "s", perco.Schema(*tables)) as db, db.transaction() as txn:
        for column in columns:
            txn.set(column, "a", 1)
    assert (await run("sql", tmp_path / "s", "select n from dOCS")).out == "n\n1\n"
    refused = await run("sql", tmp_path / "s", "select n from other")
    assert (refused.code, "does not tell the tables" in refused.err) == (2, True)
