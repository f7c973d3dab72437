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
from perco.views import Delivered, LanceTable
from tests.integration.views import sinks
from tests.integration.views.sinks import KEY

lancedb = pytest.importorskip("lancedb")

pytestmark = [
    pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning"),  # the temporary folder may lie on tmpfs
]

VECTOR = array("f", [1.0, 0.1, -3.0]).tobytes()
VALUES = {**sinks.VALUES, "t": "tëxt'\"\x00", "v": VECTOR}
CODECS = {**sinks.CODECS, "v": perco.BYTES}


class Things(sinks.Things[LanceTable]):
    def __init__(self, path: Path, **how: Any) -> None:
        super().__init__(LanceTable(path, **{"vector": "v", "size": 3, **how}), CODECS)


def in_folder(folder: Path) -> Things:
    return Things(folder / "out")


async def test_values_of_each_kind_come_back_as_they_were(tmp_path: Path) -> None:
    def look() -> None:
        table = lancedb.connect(tmp_path / "out").open_table("things")
        (found,) = table.search([1.0, 0.0, -3.0]).where("NOT perco_gone", prefilter=True).limit(5).to_list()
        assert (found["word's"], found["the number"], found["raw"]) == KEY
        assert {name: found[name] for name in "tifbo"} == {name: VALUES[name] for name in "tifbo"}
        assert found["j"] == '{"a": [1, null, "ü"]}'

    things = Things(tmp_path / "out", key=["word's", "the number", "raw"])
    await sinks.values_come_back(things, tmp_path, look, VALUES)


def test_a_row_is_replaced_by_newer_ones_only(tmp_path: Path) -> None:  # V11
    sinks.only_newer_rows_are_taken(Things(tmp_path / "out").to, {"v": VECTOR})


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


def test_a_program_that_is_killed_leaves_a_table_that_ends_right(tmp_path: Path) -> None:  # V11
    sinks.kill(__name__, tmp_path)
    sinks.sink_equals_table(in_folder(tmp_path), tmp_path)
