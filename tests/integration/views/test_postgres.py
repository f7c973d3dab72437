"""The sink in a PostgreSQL table."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

import perco
from perco.views import Delivered, PostgresTable
from tests.integration.views import sinks
from tests.integration.views.sinks import KEY, OTHER, VALUES
from tests.support import postgresql

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs

_numbers = itertools.count()


def conninfo() -> str:
    return f"postgresql://bench@/postgres?host={postgresql.running().socket}"


def asked(statement: str) -> list[Any]:
    with psycopg.connect(conninfo(), autocommit=True) as db:
        cursor = db.execute(statement)  # type: ignore[call-overload]
        return cursor.fetchall() if cursor.description else []


class Things(sinks.Things[PostgresTable]):
    def __init__(self, name: str = "", **how: Any) -> None:
        self.name = name or f"things_{os.getpid()}_{next(_numbers)}"
        super().__init__(PostgresTable(conninfo(), self.name, **how))


async def test_values_of_each_kind_come_back_as_they_were(tmp_path: Path) -> None:
    things = Things(key=["word", "number", "raw"])

    def look() -> None:
        found = asked(f"SELECT word, number, t, i, f, b, o, j ->> 'a' FROM {things.name} ORDER BY word")
        assert found == [
            ("a", 1, VALUES["t"], -(2**63), 1e300, b"\x00\xff", False, '[1, null, "ü"]'),
            ("b", -5, "", None, None, None, None, None),
        ]

    await sinks.values_come_back(things, tmp_path, look)
    things.to.close()


def test_a_row_is_replaced_by_newer_ones_only() -> None:  # V11
    sinks.only_newer_rows_are_taken(Things().to, {})


def test_a_connection_that_is_lost_is_opened_again() -> None:
    to = Things().to
    to.deliver([Delivered(KEY, {"i": 1}, 1)])
    asked(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname IS NOT NULL"
    )
    with pytest.raises(perco.StoreError, match="the sink things_"):
        to.deliver([Delivered(KEY, {"i": 2}, 2)])
    to.deliver([Delivered(KEY, {"i": 2}, 2)])
    assert [row.values for row in to.rows()] == [{"i": 2}]
    to.close()


def test_a_row_that_cannot_be_stored_fails_and_no_other_of_the_list_is_stored() -> None:
    to = Things().to
    with pytest.raises(perco.StoreError, match="NUL"):
        to.deliver([Delivered(OTHER, {"i": 1}, 1), Delivered(KEY, {"t": "a\x00b"}, 1)])
    assert to.count() == 0
    to.close()


def test_processes_may_deliver_side_by_side() -> None:
    name = Things().name
    errors: list[BaseException] = []

    def deliver(rows: Sequence[Delivered]) -> None:
        to = Things(name).to
        try:
            for _ in range(10):
                to.deliver(list(rows))
        except BaseException as error:
            errors.append(error)
        finally:
            to.close()

    rows = [Delivered((str(number), number, b""), {"i": number}, number + 1) for number in range(100)]
    threads = [threading.Thread(target=deliver, args=[each]) for each in (rows, rows[::-1], rows[50:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    to = Things(name).to
    assert (errors, sorted(to.rows()) == sorted(rows)) == ([], True)
    to.close()


def test_other_columns_in_a_table_of_this_name_are_told() -> None:
    things = Things()
    asked(f"CREATE TABLE {things.name}_rows (key1 text)")
    with pytest.raises(perco.StoreError, match="has no column 'key2'"):
        things.to.deliver([])


def test_arguments_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(perco.UsageError, match="takes a connection string"):
        PostgresTable("")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(perco.UsageError, match=r"needs psycopg: pip install 'perco\[postgresql\]'"):
        Things().to.deliver([])
