"""The sink in a SQLite file."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

import perco
import perco.sync
from perco.views import Delivered, SqliteTable
from tests.integration.views import sinks
from tests.integration.views.sinks import KEY, VALUES

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs


class Things(sinks.Things[SqliteTable]):
    def __init__(self, path: Path, **how: Any) -> None:
        super().__init__(SqliteTable(path, **how))


def in_folder(folder: Path) -> Things:
    return Things(folder / "out.db")


async def test_values_of_each_kind_come_back_as_they_were(tmp_path: Path) -> None:
    def look() -> None:
        with sqlite3.connect(tmp_path / "out.db") as other:
            found = other.execute("SELECT word, number, t, i, f, b, o, j FROM things").fetchall()
        assert found == [
            ("a", 1, VALUES["t"], -(2**63), 1e300, b"\x00\xff", 0, '{"a": [1, null, "ü"]}'),
            ("b", -5, "", None, None, None, None, None),
        ]

    await sinks.values_come_back(Things(tmp_path / "out.db", key=["word", "number", "raw"]), tmp_path, look)


def test_a_row_is_replaced_by_newer_ones_only(tmp_path: Path) -> None:  # V11
    sinks.only_newer_rows_are_taken(Things(tmp_path / "out.db").to, {})


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


def test_a_program_that_is_killed_leaves_a_sink_that_ends_right(tmp_path: Path) -> None:  # V11
    sinks.kill(__name__, tmp_path)
    sinks.sink_equals_table(in_folder(tmp_path), tmp_path)
