"""The sink in a SQLite file."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import perco
import perco.sync
from perco import views
from perco.views import Delivered, SqliteTable
from tests.support.graphs import write

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs

VALUES: dict[str, Any] = {
    "t": "tëxt'\"",
    "i": -(2**63),
    "f": 1e300,
    "b": b"\x00\xff",
    "o": False,
    "j": {"a": [1, None, "ü"]},
    "m": {1: b"x"},
}


class Things:
    """A table with a column of each kind, and a SQLite sink."""

    def __init__(self, path: Path, **how: Any) -> None:
        self.table = perco.Table("things", key=perco.Tuple(perco.TEXT, perco.INT64, perco.BYTES))
        codecs = [perco.TEXT, perco.INT64, perco.FLOAT64, perco.BYTES, perco.BOOL, perco.JSON, perco.MSGPACK]
        self.columns = [self.table.column(name, codec) for name, codec in zip(VALUES, codecs, strict=True)]
        self.views = views.Views(perco.Schema(self.table))
        self.to = SqliteTable(path, **how)
        self.views.sink(*self.columns, id="out", to=self.to)


KEY, OTHER = ("a", 1, b"\x01"), ("b", -5, b"")


async def test_values_of_each_kind_come_back_as_they_were(tmp_path: Path) -> None:
    things = Things(tmp_path / "out.db", key=["word", "number", "raw"])
    async with perco.open(tmp_path / "s", things.views.schema) as db, db.worker():
        await write(db, [(column, KEY, VALUES[column.name]) for column in things.columns])
        await write(db, [(things.columns[0], OTHER, "")])
        await db.wait_idle(timeout=60)
        assert [(row.key, row.values) for row in things.to.rows()] == [(KEY, VALUES), (OTHER, {"t": ""})]
        async with db.snapshot() as snap:
            assert (await views.check(things.views, snap)).rows == {"out": 2}
        with sqlite3.connect(tmp_path / "out.db") as other:
            found = other.execute("SELECT word, number, t, i, f, b, o, j FROM things").fetchall()
        assert found == [
            ("a", 1, VALUES["t"], -(2**63), 1e300, b"\x00\xff", 0, '{"a": [1, null, "ü"]}'),
            ("b", -5, "", None, None, None, None, None),
        ]
        await write(db, [(column, KEY, None) for column in things.columns])
        await db.wait_idle(timeout=60)
        assert [row.key for row in things.to.rows()] == [OTHER]
        assert things.to.forget(await db.watermark()) in (0, 1)  # as far as no run can deliver it any more


def test_a_row_is_replaced_by_newer_ones_only(tmp_path: Path) -> None:  # V11
    to = Things(tmp_path / "out.db").to
    to.deliver([Delivered(KEY, {"i": 2}, 20)])
    to.deliver([Delivered(KEY, {"i": 1}, 10), Delivered(OTHER, None, 10)])
    assert list(to.rows()) == [Delivered(KEY, {"i": 2}, 20)]
    to.deliver([Delivered(KEY, None, 30), Delivered(OTHER, {"i": 9}, 5)])  # it was gone later than this
    assert list(to.rows()) == []
    assert to.forget(30) == 1
    to.deliver([Delivered(OTHER, {"i": 9}, 5), Delivered(KEY, {"i": 1}, 25)])
    assert list(to.rows()) == [Delivered(OTHER, {"i": 9}, 5)]
    to.close()
    assert list(to.rows()) == [Delivered(OTHER, {"i": 9}, 5)]


def test_blocking_code_has_sinks(tmp_path: Path) -> None:
    things = Things(tmp_path / "out.db")
    with perco.sync.open(tmp_path / "s", things.views.schema) as db, db.worker():
        with db.transaction() as txn:
            txn.set(things.columns[1], KEY, 7)
        db.wait_idle(timeout=60)
        assert [row.values for row in things.to.rows()] == [{"i": 7}]


def test_a_file_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "no.db").write_bytes(b"this is no database, whatever its name says" * 100)
    with pytest.raises(perco.StoreError, match=r"the sink .*no.db: file is not a database"):
        list(Things(tmp_path / "no.db").to.rows())
    things = Things(tmp_path / "out.db")
    things.to.deliver([Delivered(KEY, {"i": 1}, 1)])
    things.to.close()
    with sqlite3.connect(tmp_path / "out.db") as other:
        other.executescript("DROP VIEW things; ALTER TABLE things_rows DROP COLUMN j;")
    with pytest.raises(perco.StoreError, match="has no column 'j'"):
        things.to.deliver([Delivered(KEY, {"i": 1}, 2)])


def test_names_that_do_not_fit_are_told(tmp_path: Path) -> None:
    for key, message in (("word", "has 3 parts; name each"), (["t", "u", "v"], "two columns named 't'")):
        with pytest.raises(perco.UsageError, match=message):
            Things(tmp_path / "out.db", key=key)
    with pytest.raises(perco.UsageError, match="synchronous is"):
        SqliteTable("x", synchronous="OFF")


PROGRAM = """
import sys
import trio
import perco
from pathlib import Path
from tests.integration.views.test_sqlite import Things

async def main(folder):
    things = Things(folder / "out.db")
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


def test_a_program_that_is_killed_leaves_a_sink_that_ends_right(tmp_path: Path) -> None:  # V11
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", PROGRAM, tmp_path], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            process.kill()
    things = Things(tmp_path / "out.db")
    with perco.sync.open(tmp_path / "s", things.views.schema) as db, db.worker():
        db.wait_idle(timeout=60)
        with db.snapshot() as snap:
            checked = views.check_blocking(things.views, snap)
        assert (checked.equal, checked.rows["out"]) == (True, 50)
