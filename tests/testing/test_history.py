"""Histories of perco itself: recorded, written to a file, read back, and judged."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import trio

import perco
from perco.errors import UsageError
from perco.protocol import mutations, snapshot
from perco.storage import WRITE
from perco.testing import Recorder, Transaction, check, draw, load, record
from perco.testing.__main__ import main

table = perco.Table("lists", key=perco.TEXT, splits=["k1", "k3"])
values = table.column("values", perco.MSGPACK)
SCHEMA = perco.Schema(table)
KEYS = [f"k{i}" for i in range(5)]


async def list_append(db: perco.Database, recorder: Recorder, clients: int, each: int, seed: int) -> None:
    """Clients that read and append at random; a transaction that conflicts is recorded as failed, and not retried."""
    count = 0

    async def client(name: str, rng: random.Random) -> None:
        nonlocal count
        for _ in range(each):
            try:
                async with recorder.transaction(db, name) as (txn, ops):
                    appends = rng.random() < 0.6
                    for key in rng.sample(KEYS, 3):
                        seen = await txn.get(values, key) or []
                        ops.read(key, seen)
                        await trio.sleep(rng.choice((0, 0, 0.001)))
                        if appends and rng.random() < 0.7:
                            count += 1
                            ops.append(key, count)
                            txn.set(values, key, [*seen, count])
            except perco.TransientError:
                pass

    async with trio.open_nursery() as nursery:
        for i in range(clients):
            nursery.start_soon(client, f"c{i}", random.Random(f"{seed} {i}"))
    async with recorder.transaction(db, "end") as (txn, ops):
        for key, seen in (await txn.get_many(values, KEYS)).items():
            ops.read(key, seen or [])


@pytest.mark.parametrize("seed", range(5))
async def test_lists_in_memory_are_snapshot_isolation(seed: int, autojump_clock: trio.testing.MockClock) -> None:
    with record() as recorder:
        async with perco.open("memory:", SCHEMA) as db:
            await list_append(db, recorder, clients=8, each=25, seed=seed)
    report = check(recorder.transactions)
    assert report.anomalies == ()
    statuses = [one.status for one in recorder.transactions]
    assert statuses.count("ok") > 50
    assert statuses.count("fail") > 5  # the clients did conflict
    assert report.edges["rw"] > 20


async def test_lists_on_disk_are_snapshot_isolation_and_so_says_the_command(tmp_path: Path, capsys) -> None:
    with record(tmp_path / "history.jsonl") as recorder:
        async with perco.open(tmp_path / "store", SCHEMA) as db:
            await list_append(db, recorder, clients=8, each=25, seed=1)
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [one.line() for one in load(lines)] == [one.line() for one in recorder.transactions]
    assert main([str(tmp_path / "history.jsonl")]) == 0
    assert "snapshot isolation: yes" in capsys.readouterr().out


# ------------------------------------------------------------ a wrong store is detected


async def test_without_the_check_for_newer_records_updates_are_lost(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:  # T7
    right = mutations.prewrite
    dropped = 0

    def prewrite(*args, **kwargs):
        nonlocal dropped
        mutation = right(*args, **kwargs)
        dropped += 1
        rows = [
            (row, [check for check in checks if check[1] != WRITE], writes) for row, checks, writes in mutation.rows
        ]
        return mutation._replace(rows=rows)

    monkeypatch.setattr(mutations, "prewrite", prewrite)
    with record() as recorder:
        async with perco.open("memory:", SCHEMA) as db:
            await list_append(db, recorder, clients=8, each=25, seed=1)
    assert dropped
    found = {anomaly.name for anomaly in check(recorder.transactions).anomalies}
    assert found & {"lost update", "incompatible orders"}


async def test_a_reader_that_skips_locks_is_found_out(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:  # T9
    """Between prewrite and commit a reader with a later timestamp must not return the old value."""
    skipped = 0

    def plain(locks, writes):
        nonlocal skipped
        skipped += bool(locks)
        return right((), writes)

    right = snapshot.plain
    monkeypatch.setattr("perco.txn.snapshot.plain", plain)
    monkeypatch.setattr("perco.txn.snapshot.look", lambda locks, writes: snapshot.look((), writes))
    with record() as recorder:
        async with perco.open("memory:", SCHEMA) as db:
            await list_append(db, recorder, clients=8, each=100, seed=2)
    assert skipped
    assert check(recorder.transactions).anomalies


# ------------------------------------------------------------ status


async def test_what_was_cancelled_before_its_commit_has_failed() -> None:  # T10
    with record() as recorder:
        async with perco.open("memory:", SCHEMA) as db:
            with trio.CancelScope() as scope:
                async with recorder.transaction(db, "a") as (txn, ops):
                    ops.append("k", 1)
                    txn.set(values, "k", [1])
                    scope.cancel()
                    await trio.sleep_forever()
            assert scope.cancelled_caught
            async with recorder.transaction(db, "b") as (txn, ops):
                ops.read("k", await txn.get(values, "k") or [])
    assert [(one.status, one.ops) for one in recorder.transactions] == [
        ("fail", (("a", "k", 1),)),
        ("ok", (("r", "k", []),)),
    ]


async def test_a_transaction_that_could_not_begin_has_failed(tmp_path: Path) -> None:
    with record() as recorder:
        async with perco.open("memory:", SCHEMA) as db:
            pass
        with pytest.raises(perco.PercoError):
            async with recorder.transaction(db, "a"):
                raise AssertionError("not reached")
    assert [one.status for one in recorder.transactions] == ["fail"]


# ------------------------------------------------------------ files

GOOD = {"id": 1, "client": "a", "begin": 0.0, "end": 1.0, "status": "ok", "ops": [["r", "x", []], ["a", "x", 1]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "maybe"}, "line 2: status 'maybe'; it is ok, fail or unknown"),
        ({"end": -1.0}, "line 2: it ends at -1.0, before it begins at 0.0"),
        ({"ops": [["x", "x", 1]]}, "line 2: .* is not an operation"),
        ({"ops": [["a", ["x"], 1]]}, "line 2: .* is not an operation"),
        ({"ops": [["a", "x", [1]]]}, "line 2: a value to be written"),
        ({"ops": [["a", "x"]]}, "line 2 is not a transaction"),
        ({"begin": None}, "line 2 is not a transaction"),
        ({"begin": float("nan")}, "line 2: it ends at"),
        ({"id": [1]}, "line 2: id"),
        ({"ops": [[[], "x", 1]]}, "line 2: .* is not an operation"),
        ({"ops": [["w", "x", None]]}, "line 2: a value to be written"),
        ({"ops": [["w", "x", True]]}, "line 2: a value to be written"),
        ({"ops": [["w", True, 1]]}, "line 2: .* is not an operation"),
        ({"ops": [["r", "x", {"a": 1}]]}, "line 2: .* cannot have been read"),
        ({"ops": [["r", "x", [[1]]]]}, "line 2: .* cannot have been read"),
        ({"ops": None}, "line 2 is not a transaction"),
    ],
)
def test_a_bad_line_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(load(["", json.dumps({**GOOD, **change})]))


@pytest.mark.parametrize("value", [b"bytes", None, True, 1.0, [1], {1}])
async def test_what_no_history_can_hold_fails_before_the_commit(value: object) -> None:
    with record() as recorder:
        async with perco.open("memory:", SCHEMA) as db:

            async def work() -> None:
                async with recorder.transaction(db, "a") as (txn, ops):
                    txn.set(values, "k", [1])
                    ops.write("k", value)

            with pytest.raises(UsageError):
                await work()
            async with db.snapshot() as snap:
                assert await snap.get(values, "k") is None
    assert [one.status for one in recorder.transactions] == ["fail"]


def test_a_line_that_is_too_deep_is_named() -> None:
    with pytest.raises(UsageError, match="line 1 is not a transaction of a history"):
        list(load(["[" * 100_000]))


def test_a_line_that_is_not_json_is_named() -> None:
    with pytest.raises(UsageError, match="line 1 is not a transaction of a history"):
        list(load(["{"]))


def test_the_command_names_and_draws_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skew = [
        {**GOOD, "id": 1, "ops": [["a", "x", 1], ["a", "y", 1]]},
        {**GOOD, "id": 2, "ops": [["r", "x", [1]], ["r", "y", []]]},
        {**GOOD, "id": 3, "ops": [["r", "y", [1]]]},
    ]
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in skew))
    assert main([str(path), "--mermaid"]) == 1
    assert capsys.readouterr().out.startswith("flowchart LR\n    T")
    assert main([str(path)]) == 1
    out = capsys.readouterr().out
    assert "snapshot isolation: NO" in out
    assert "G-single (read skew)" in out
    assert main([str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["anomalies"][0]["name"] == "G-single (read skew)"


def test_the_command_says_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_command_decides_nothing_about_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text("\n")
    assert main([str(path)]) == 2
    assert "no transactions" in capsys.readouterr().err


def test_a_field_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps({name: value for name, value in GOOD.items() if name != "ops"}))
    assert main([str(path)]) == 2
    assert capsys.readouterr().err == 'perco.testing: line 1: "ops" is missing\n'


def test_without_a_cycle_no_picture_is_drawn_and_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps({**GOOD, "ops": [["a", "x", 1]]}))
    assert main([str(path), "--mermaid"]) == 0
    given = capsys.readouterr()
    assert "there is no cycle to draw" in given.err
    assert "snapshot isolation: yes" in given.out


def test_the_documented_line_is_a_history(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    [line] = [line for line in page.splitlines() if line.startswith('{"id"')]
    (tmp_path / "history.jsonl").write_text(line)
    assert main([str(tmp_path / "history.jsonl")]) == 0


def test_times_are_drawn_from_the_beginning_of_the_first() -> None:
    history = [
        Transaction(1, "a", 5000.0, 5001.0, "fail", (("a", "x", 1),)),
        Transaction(2, "b", 5002.0, 5003.5, "ok", (("r", "x", [1]),)),
    ]
    [anomaly] = check(history).anomalies
    text = draw(anomaly, history)
    assert "0.000000 to 1.000000 s" in text
    assert "2.000000 to 3.500000 s" in text
