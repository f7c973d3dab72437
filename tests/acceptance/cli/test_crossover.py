"""`perco crossover`."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import perco
from perco.cli.crossing import parse_rate, parse_span
from perco.cli.values import from_plain, plain
from perco.errors import UsageError
from tests.acceptance.cli.stores import Done, command, run
from tests.acceptance.cli.test_worker import environment

NAME = "tests.acceptance.cli.crossover_app:shop"
SOME = ["--seconds", 2, "--sample", 150]


def lines(count: int = 150) -> str:
    rng = random.Random(1)
    rows: list[dict[str, Any]] = [
        {"table": "orders", "key": [f"c{n % 20}", n], "values": {"item": f"item {rng.randrange(9)}"}}
        for n in range(count - 20)
    ]
    rows += [{"table": "customers", "key": f"c{n}", "values": {"name": f"name {n}"}} for n in range(20)]
    return "".join(json.dumps(row) + "\n" for row in rows)


async def crossover(*args: object, folder: Path) -> Done:
    return await run("crossover", *args, "--folder", folder)


def names_in(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


async def made(store: Path) -> None:
    """A store with the rows, whose views no worker has made."""
    from tests.acceptance.cli.crossover_app import item, name, shop

    async with perco.open(store, shop.schema) as db, db.transaction() as txn:
        for line in map(json.loads, lines().splitlines()):
            if line["table"] == "orders":
                txn.set(item, tuple(line["key"]), line["values"]["item"])
            else:
                txn.set(name, line["key"], line["values"]["name"])


async def test_both_ways_are_measured_and_give_the_same_views(tmp_path: Path) -> None:
    file, folder = tmp_path / "rows.jsonl", tmp_path / "there"
    folder.mkdir()
    file.write_text(lines())
    done = await crossover(NAME, "--rows", file, *SOME, "--rows-total", 100_000, "--json", folder=folder)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["equal"] is True
    assert (found["rows"], found["per_s"]) == (100_000, pytest.approx(100_000 * 0.05 / 3600))
    assert found["perco"]["points"][0] == [0.0, found["perco"]["idle_cores"]]
    assert found["perco"]["saturation_per_s"] == found["perco"]["points"][-1][0] > 0
    assert {len(found["perco"]["loads"][name]) for name in ("quiet", "judged")} == {3}
    sizes = [[each["rows"] for each in round] for round in found["batch"]["runs"]]
    assert len(sizes) == 3
    assert sizes[0] == sizes[1] == sizes[2]
    assert sizes[0][0] < sizes[0][1] < sizes[0][2] <= found["measured_rows"] <= 150
    assert found["chosen"]["back_to_back"] is True
    assert [each["every_s"] for each in found["comparisons"]] == sorted({e["every_s"] for e in found["comparisons"]})
    assert not names_in(folder)


async def test_the_result_is_told(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(lines())
    plot = tmp_path / "picture.png"
    args = ["--rate", "1/s", "--every", "1h", "--plot", plot]
    done = await crossover(NAME, "--rows", file, *SOME, *args, folder=tmp_path)
    assert done.code == 0, done.err
    assert "a change with perco  " in done.out
    assert "\nbatch, every 1 h " in done.out
    assert " of a batch that runs every 1 h, and shows a change after " in done.out
    assert "- sinks did not run, and are not in the figures: export\n" in done.out
    assert "- observers that do not belong to views did not run: mail\n" in done.out
    assert "- shout was called for 9 arguments, before both ways were measured" in done.out
    assert names_in(tmp_path) == {"rows.jsonl", "picture.png"}
    assert plot.read_bytes().startswith(b"\x89PNG")


async def test_a_store_is_only_read_and_its_values_of_cached_functions_are_used(tmp_path: Path) -> None:
    from tests.acceptance.cli.crossover_app import shop, shout

    store, folder = tmp_path / "store", tmp_path / "there"
    folder.mkdir()
    await made(store)
    async with perco.open(store, shop.schema) as db, db.transaction() as txn:
        for n in range(7):
            txn.set(shout.results, shout(f"item {n}").key, f"KNOWN {n}")
    before = await run("scan", store, "orders", "--json")
    done = await run("crossover", NAME, "--store", store, *SOME, "--delay", "1d")
    assert done.code == 0, done.err
    assert "- shout was called for 2 arguments, " in done.out
    assert (await run("scan", store, "orders", "--json")).out == before.out
    assert (await run("scan", store, "totals", "--json")).out == ""
    assert names_in(tmp_path) == {"store", "there"}


async def test_a_store_need_not_know_the_views(tmp_path: Path) -> None:
    customers = perco.Table("customers", key=perco.TEXT)
    name = customers.column("name", perco.TEXT)
    async with perco.open(tmp_path / "store", perco.Schema(customers)) as db, db.transaction() as txn:
        for n in range(120):
            txn.set(name, f"c{n}", f"name {n}")
    done = await run("crossover", NAME, "--store", tmp_path / "store", *SOME, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["measured_rows"] <= 120


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--every", "1s"], "A batch cannot run every 1 s: over 9000000000 rows, a run takes "),
        (["--delay", "1s"], "A batch cannot show each change within 1 s: over 9000000000 rows, a run takes "),
        (["--delay", "1d", "--rate", "1000000/s"], "One worker does not sustain "),
    ],
)
async def test_what_cannot_be_done_is_told(tmp_path: Path, args: list[str], told: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(lines())
    done = await crossover(NAME, "--rows", file, *SOME, "--rows-total", 9_000_000_000, *args, folder=tmp_path)
    assert done.code == 0, done.err
    assert told in done.out
    assert "- more than 100 times is too far for good figures" in done.out


async def test_a_store_whose_table_has_other_keys_is_refused(tmp_path: Path) -> None:
    customers = perco.Table("customers", key=perco.INT64)
    name = customers.column("name", perco.TEXT)
    async with perco.open(tmp_path / "store", perco.Schema(customers)) as db, db.transaction() as txn:
        txn.set(name, 1, "name")
    done = await run("crossover", NAME, "--store", tmp_path / "store", *SOME)
    assert done.code == 2
    assert done.err == "perco: table 'customers' has int64 in the store, where the program has text\n"


async def test_a_function_that_fails_is_told(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(lines().replace('"name 1', '"wrong 1'))
    done = await crossover(NAME, "--rows", file, *SOME, folder=tmp_path)
    assert done.code == 2
    [told] = done.err.splitlines()
    assert told.startswith("perco: observer 'cards' fails on cards['c1")
    assert "]: ValueError: a wrong name (File " in told
    assert told.endswith(", in carded)")
    assert names_in(tmp_path) == {"rows.jsonl"}


async def test_views_that_differ_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"key": "c{n}", "values": {{"name": "name {n}"}}}}\n' for n in range(120)))
    done = await crossover(NAME.replace("shop", "impure"), "--rows", file, *SOME, "--json", folder=tmp_path)
    assert (done.code, json.loads(done.out)["equal"]) == (1, False)
    told = r"perco: of the observers' rows, \d+ differ from what the views' definition makes of the sources, such as "
    assert re.search(told + r"cards\['c\d+'\]: \{'card': \d+\} instead of \{'card': \d+\}\n$", done.err)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["no.such:app", "--rows", "rows"], "there is no module 'no'"),
        (["tests.acceptance.cli.crossover_app:customers", "--rows", "rows"], "is Table, not a perco.views.Views"),
        ([NAME], "give one of them"),
        ([NAME, "--rows", "rows", "--store", "store"], "give one of them"),
        ([NAME, "--rows", "rows", "--every", "1h", "--delay", "1h"], "give one of them"),
        ([NAME, "--rows", "none"], "cannot be read"),
        ([NAME, "--store", "none"], "none"),
        ([NAME, "--rows", "rows", "--rate", "5"], "'5' is not a rate: write 5%/h"),
        ([NAME, "--rows", "rows", "--rate", "0%/h"], "is not a rate"),
        ([NAME, "--rows", "rows", "--every", "often"], "'often' is not a time: write 90s"),
        ([NAME, "--rows", "rows", "--folder", "none"], "there is no such folder"),
        ([NAME, "--rows", "rows", "--plot", "picture"], "the name of a picture ends with .png"),
        ([NAME, "--rows", "rows", "--plot", "none/picture.png"], "there is no such folder"),
        ([NAME, "--rows", "rows", "--batch", "dask"], '--batch is "python" or "spark"'),
        ([NAME, "--rows", "few"], "99 source rows are too few"),
        ([NAME, "--rows", "empty"], "there are no source rows: the views read tables customers, orders"),
        ([NAME, "--rows", "other"], "other, line 1: \"table\" is 'pages'; the views read customers, orders"),
        ([NAME, "--rows", "broken"], "broken, line 1: "),
    ],
)
async def test_what_cannot_be_measured_is_told(tmp_path: Path, args: list[str], told: str) -> None:
    (tmp_path / "rows").write_text(lines())
    (tmp_path / "few").write_text(lines(99))
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "other").write_text('{"table": "pages", "key": "a", "values": {}}\n')
    (tmp_path / "broken").write_text('{"table": "orders", "key": ["a"], "values": {"item": "x"}}\n')
    paths = {"--rows", "--store", "--folder", "--plot"}
    given = [tmp_path / arg if before in paths else arg for before, arg in zip(["", *args], args, strict=False)]
    done = await run("crossover", *given, *SOME)
    assert done.code == 2, done.out
    assert told in done.err
    assert "Traceback" not in done.err
    assert names_in(tmp_path) == {"rows", "few", "empty", "other", "broken"}


def test_it_can_be_interrupted_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(line for line in lines(2000).splitlines(keepends=True) if "orders" in line))
    args = command("crossover", NAME.replace("shop", "busy"), "--rows", file, "--folder", tmp_path)
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    assert len(names_in(tmp_path)) == 2
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "perco: interrupted; the scratch store is removed"
    assert names_in(tmp_path) == {"rows.jsonl"}


def test_rates_and_times() -> None:
    assert parse_rate("5%/h").per_s(7200) == pytest.approx(0.1)
    assert parse_rate(" .5 % / min ").per_s(12_000) == pytest.approx(1.0)
    assert parse_rate("600/min").per_s(1) == pytest.approx(10.0)
    assert (parse_span("90s"), parse_span("1.5h"), parse_span("2m"), parse_span("1d")) == (90, 5400, 120, 86400)
    for wrong in ("", "5%", "-1/s", "5/y", "h"):
        with pytest.raises(UsageError):
            parse_rate(wrong)


@pytest.mark.parametrize(
    ("codec", "value"),
    [
        (perco.TEXT, "a"),
        (perco.BYTES, b"\x00\xff"),
        (perco.FLOAT64, float("inf")),
        (perco.BOOL, True),
        (perco.JSON, {"hex": "00"}),
        (perco.MSGPACK, {1: [b"\x00", {"a": None}]}),
        (perco.Tuple(perco.TEXT, perco.BYTES, perco.INT64), ("a", b"b", 3)),
    ],
)
def test_values_come_back_from_json(codec: perco.Codec[Any], value: Any) -> None:
    assert from_plain(codec, json.loads(json.dumps(plain(value)))) == value


def test_values_of_another_kind_are_refused() -> None:
    for codec, value in ((perco.TEXT, 1), (perco.INT64, "1"), (perco.Tuple(perco.TEXT, perco.TEXT), ["a"])):
        with pytest.raises(UsageError, match=re.escape(f"is not {codec.name}")):
            from_plain(codec, value)
