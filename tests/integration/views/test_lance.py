"""The sink in a LanceDB table."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

import perco
import perco.sync
from perco import views
from perco.views import Delivered, LanceTable
from tests.support.graphs import write

lancedb = pytest.importorskip("lancedb")

pytestmark = [
    pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning"),  # the temporary folder may lie on tmpfs
]

VECTOR = array("f", [1.0, 0.1, -3.0]).tobytes()
VALUES: dict[str, Any] = {
    "t": "tëxt'\"\x00",
    "i": -(2**63),
    "f": 1e300,
    "b": b"\x00\xff",
    "o": False,
    "j": {"a": [1, None, "ü"]},
    "m": {1: b"x"},
    "v": VECTOR,
}


class Things:
    """A table with a column of each kind, and a sink."""

    def __init__(self, path: Path, **how: Any) -> None:
        self.table = perco.Table("things", key=perco.Tuple(perco.TEXT, perco.INT64, perco.BYTES))
        kinds = [
            perco.TEXT,
            perco.INT64,
            perco.FLOAT64,
            perco.BYTES,
            perco.BOOL,
            perco.JSON,
            perco.MSGPACK,
            perco.BYTES,
        ]
        self.columns = [self.table.column(name, codec) for name, codec in zip(VALUES, kinds, strict=True)]
        self.views = views.Views(perco.Schema(self.table))
        self.to = LanceTable(path, **{"vector": "v", "size": 3, **how})
        self.views.sink(*self.columns, id="out", to=self.to)


KEY, OTHER = ("a", 1, b"\x01"), ("b", -5, b"")


async def test_values_of_each_kind_come_back_as_they_were(tmp_path: Path) -> None:
    things = Things(tmp_path / "out", key=["word's", "the number", "raw"])
    async with perco.open(tmp_path / "s", things.views.schema) as db, db.worker():
        await write(db, [(column, KEY, VALUES[column.name]) for column in things.columns])
        await write(db, [(things.columns[0], OTHER, "")])
        await db.wait_idle(timeout=60)
        assert [(row.key, row.values) for row in things.to.rows()] == [(KEY, VALUES), (OTHER, {"t": ""})]
        async with db.snapshot() as snap:
            assert (await views.check(things.views, snap)).rows == {"out": 2}
        table = lancedb.connect(tmp_path / "out").open_table("things")
        (found,) = table.search([1.0, 0.0, -3.0]).where("NOT perco_gone", prefilter=True).limit(5).to_list()
        assert (found["word's"], found["the number"], found["raw"]) == KEY
        assert {name: found[name] for name in "tifbo"} == {name: VALUES[name] for name in "tifbo"}
        assert found["j"] == '{"a": [1, null, "ü"]}'
        await write(db, [(column, KEY, None) for column in things.columns])
        await db.wait_idle(timeout=60)
        assert [row.key for row in things.to.rows()] == [OTHER]


def test_a_row_is_replaced_by_newer_ones_only(tmp_path: Path) -> None:  # V11
    to = Things(tmp_path / "out").to
    to.deliver([Delivered(KEY, {"i": 2, "v": VECTOR}, 20), Delivered(KEY, {"i": 1}, 15)])
    to.deliver([Delivered(KEY, {"i": 1}, 10), Delivered(OTHER, None, 10)])
    to.deliver([Delivered(KEY, {"i": 1}, 20)])
    assert list(to.rows()) == [Delivered(KEY, {"i": 2, "v": VECTOR}, 20)]
    to.deliver([Delivered(KEY, None, 30), Delivered(OTHER, {"i": 9, "v": VECTOR}, 5)])  # it was gone later than this
    assert (list(to.rows()), to.count()) == ([], 0)
    to.deliver([Delivered(KEY, {"i": 1}, 25)])
    assert (list(to.rows()), to.forget(30), to.forget(30)) == ([], 1, 0)
    to.deliver([Delivered(OTHER, {"i": 9}, 5), Delivered(KEY, {"i": 1}, 31)])
    to.close()
    assert list(to.rows()) == [Delivered(KEY, {"i": 1}, 31), Delivered(OTHER, {"i": 9}, 5)]
    assert to.count() == 2


def test_a_sink_that_has_not_seen_the_newest_version_takes_no_older_row(tmp_path: Path) -> None:  # V11
    first, second = Things(tmp_path / "out").to, Things(tmp_path / "out").to
    assert (first.count(), second.count()) == (0, 0)
    first.deliver([Delivered(KEY, {"i": 2}, 20)])
    second.deliver([Delivered(KEY, {"i": 1}, 10)])
    first.deliver([Delivered(KEY, {"i": 3}, 30)])
    assert list(second.rows()) == list(first.rows()) == [Delivered(KEY, {"i": 3}, 30)]


def test_deliveries_of_two_processes_do_not_mix(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.integration.views.test_lance import Things, Delivered\n"
        "to = Things(Path(sys.argv[1])).to\n"
        "for version in range(int(sys.argv[2]), 60, 2):\n"
        "    to.deliver([Delivered(('k', key, b''), {'i': version}, version) for key in range(3)])\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", program, tmp_path / "out", str(first)]) for first in (0, 1)]
    assert [process.wait(300) for process in started] == [0, 0]
    assert list(Things(tmp_path / "out").to.rows()) == [Delivered(("k", key, b""), {"i": 59}, 59) for key in range(3)]


def test_a_delivery_waits_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = Things(tmp_path / "out").to
    assert to.count() == 0
    real = fcntl.flock
    with open(tmp_path / "out/.things.lock") as other:
        real(other, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", lambda file, how: real(file, how | fcntl.LOCK_NB))
        with pytest.raises(perco.StoreError, match="temporarily unavailable"):  # where it would wait
            to.deliver([Delivered(KEY, {"i": 1}, 1)])
    to.deliver([Delivered(KEY, {"i": 1}, 1)])
    assert to.count() == 1


def test_many_deliveries_are_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perco.views.lance._COMPACTED_AFTER", 10)
    to = Things(tmp_path / "out").to
    for version in range(9):
        to.deliver([Delivered(("k", version, b""), {"i": version}, version)])

    def fragments() -> int:
        found: int = lancedb.connect(tmp_path / "out").open_table("things").stats()["fragment_stats"]["num_fragments"]
        return found

    assert fragments() == 9
    to.deliver([Delivered(KEY, {"i": 9}, 9)])
    assert fragments() == 1
    assert to.count() == 10


def test_new_files_are_durable_when_a_delivery_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    to = Things(tmp_path / "out").to
    for version in range(3):
        to.deliver([Delivered(KEY, {"i": version}, version)])
        there = {str(path) for path in (tmp_path / "out/things.lance").rglob("*")}
        assert there <= synced
        assert {str(tmp_path / "out"), str(tmp_path)} <= synced


def test_what_is_no_vector_fails_alone(tmp_path: Path) -> None:
    to = Things(tmp_path / "out").to
    nan = array("f", [1.0, float("nan"), 1.0]).tobytes()
    for data, message in (
        (b"abc", "no 32-bit numbers"),
        (VECTOR[4:], "has 2 numbers, and should have 3"),
        (nan, "finite"),
    ):
        with pytest.raises(perco.StoreError, match=message):
            to.deliver([Delivered(KEY, {"v": data}, 1)])
    assert to.count() == 0


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    for how, message in (
        ({"vector": "t"}, "vector= names a column of BYTES, not 't'"),
        ({"vector": None}, "vector= and size= together"),
        ({"size": 0}, "at least 1"),
        ({"name": "a/b"}, "cannot be the name of a folder"),
        ({"key": "word"}, "has 3 parts; name each"),
    ):
        with pytest.raises(perco.UsageError, match=message):
            Things(tmp_path / "out", **how)
    with pytest.raises(perco.UsageError, match="a folder on a disk of this machine"):
        LanceTable("s3://bucket/folder")
    Things(tmp_path / "out").to.deliver([Delivered(KEY, {"i": 1}, 1)])
    with pytest.raises(perco.StoreError, match="has no column 'v' of type"):
        Things(tmp_path / "out", size=4).to.deliver([Delivered(KEY, {"i": 1}, 1)])
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(perco.StoreError, match=r"the sink .*file"):
        list(Things(tmp_path / "file").to.rows())


PROGRAM = """
import sys
import trio
import perco
from pathlib import Path
from tests.integration.views.test_lance import Things

async def main(folder):
    things = Things(folder / "out")
    async with perco.open(folder / "s", things.views.schema) as db, db.worker():
        number = 0
        while True:
            number += 1
            async with db.transaction() as txn:
                txn.set(things.columns[1], ("a", number % 50, b""), number)
            if number == 100:
                print("running", flush=True)

trio.run(main, Path(sys.argv[1]))
"""


def test_a_program_that_is_killed_leaves_a_table_that_ends_right(tmp_path: Path) -> None:  # V11
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", PROGRAM, tmp_path], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            process.kill()
    things = Things(tmp_path / "out")
    with perco.sync.open(tmp_path / "s", things.views.schema) as db, db.worker():
        db.wait_idle(timeout=60)
        with db.snapshot() as snap:
            checked = views.check_blocking(things.views, snap)
        assert (checked.equal, checked.rows["out"]) == (True, 50)
