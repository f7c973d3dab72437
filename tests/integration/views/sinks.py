"""Cases that each sink in a table must pass: in SQLite, PostgreSQL and LanceDB.

    python -m tests.integration.views.sinks MODULE FOLDER

changes rows without end, in a store in FOLDER, with the views and the sink of `MODULE.in_folder(FOLDER)`.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import trio

import perco
import perco.sync
from perco import views
from perco.views import Delivered
from tests.support.graphs import write

VALUES: dict[str, Any] = {
    "t": "tëxt'\"",
    "i": -(2**63),
    "f": 1e300,
    "b": b"\x00\xff",
    "o": False,
    "j": {"a": [1, None, "ü"]},
    "m": {1: b"x"},
}
CODECS: dict[str, perco.Codec[Any]] = {
    "t": perco.TEXT,
    "i": perco.INT64,
    "f": perco.FLOAT64,
    "b": perco.BYTES,
    "o": perco.BOOL,
    "j": perco.JSON,
    "m": perco.MSGPACK,
}
KEY, OTHER = ("a", 1, b"\x01"), ("b", -5, b"")


class TableSink(Protocol):
    """The methods that perco's sinks in a table share."""

    def deliver(self, rows: list[Delivered]) -> None: ...
    def rows(self) -> Iterator[Delivered]: ...
    def count(self) -> int: ...
    def forget(self, before: int) -> int: ...
    def close(self) -> None: ...


To = TypeVar("To", bound=TableSink)


class Things(Generic[To]):
    """A table with a column of each kind, and a sink."""

    def __init__(self, to: To, codecs: Mapping[str, perco.Codec[Any]] = CODECS) -> None:
        self.table = perco.Table("things", key=perco.Tuple(perco.TEXT, perco.INT64, perco.BYTES))
        self.columns = [self.table.column(name, codec) for name, codec in codecs.items()]
        self.views = views.Views(perco.Schema(self.table))
        self.to = to
        self.views.sink(*self.columns, id="out", to=to)

    def change(self, txn: perco.Transaction, number: int) -> None:
        txn.set(self.columns[1], ("a", number % 50, b""), number)


async def values_come_back(
    things: Things[Any], folder: Path, look: Callable[[], None], values: Mapping[str, Any] = VALUES
) -> None:
    """Values of each kind are read from the sink as they were written. `look` reads the table by other means."""
    async with perco.open(folder / "s", things.views.schema) as db, db.worker():
        await write(db, [(column, KEY, values[column.name]) for column in things.columns])
        await write(db, [(things.columns[0], OTHER, "")])
        await db.wait_idle(timeout=60)
        assert [(row.key, row.values) for row in things.to.rows()] == [(KEY, values), (OTHER, {"t": ""})]
        async with db.snapshot() as snap:
            assert (await views.check(things.views, snap)).rows == {"out": 2}
        look()
        await write(db, [(column, KEY, None) for column in things.columns])
        await db.wait_idle(timeout=60)
        assert ([row.key for row in things.to.rows()], things.to.count()) == ([OTHER], 1)
        assert things.to.forget(await db.watermark()) in (0, 1)  # as far as no run can deliver it any more


def only_newer_rows_are_taken(to: TableSink, more: Mapping[str, Any]) -> None:
    """V11: a row is replaced by newer ones only, even if the newer one says that it is gone. `more`: further values."""
    to.deliver([Delivered(KEY, {"i": 2, **more}, 20), Delivered(KEY, {"i": 1}, 15)])
    to.deliver([Delivered(KEY, {"i": 1}, 10), Delivered(OTHER, None, 10)])
    to.deliver([Delivered(KEY, {"i": 1}, 20)])
    assert list(to.rows()) == [Delivered(KEY, {"i": 2, **more}, 20)]
    to.deliver([Delivered(KEY, None, 30), Delivered(OTHER, {"i": 9, **more}, 5)])  # it was gone later than this
    assert (list(to.rows()), to.count()) == ([], 0)
    to.deliver([Delivered(KEY, {"i": 1}, 25)])
    assert (list(to.rows()), to.forget(30), to.forget(30)) == ([], 1, 0)
    to.deliver([Delivered(OTHER, {"i": 9}, 5), Delivered(KEY, {"i": 1}, 25)])
    assert list(to.rows()) == [Delivered(OTHER, {"i": 9}, 5)]
    to.close()
    assert list(to.rows()) == [Delivered(OTHER, {"i": 9}, 5)]
    to.deliver([Delivered(KEY, {"i": 1}, 31)])
    assert list(to.rows()) == [Delivered(KEY, {"i": 1}, 31), Delivered(OTHER, {"i": 9}, 5)]
    assert to.count() == 2
    to.close()


def kill(module: str, folder: Path) -> None:
    """Run the program of this module three times, and kill it each time among its changes."""
    program = [sys.executable, "-m", "tests.integration.views.sinks", module, str(folder)]
    for _ in range(3):
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            process.kill()


def sink_equals_table(things: Things[Any], folder: Path) -> None:
    with perco.sync.open(folder / "s", things.views.schema) as db, db.worker():
        db.wait_idle(timeout=60)
        with db.snapshot() as snap:
            checked = views.check_blocking(things.views, snap)
        assert (checked.equal, checked.rows["out"]) == (True, 50)


async def _main(module: str, folder: Path) -> None:
    made = importlib.import_module(module).in_folder(folder)
    async with perco.open(folder / "s", made.views.schema) as db, db.worker():
        number = 0
        while True:
            number += 1
            async with db.transaction() as txn:
                made.change(txn, number)
            if number == 100:
                print("running", flush=True)


if __name__ == "__main__":
    trio.run(_main, sys.argv[1], Path(sys.argv[2]))
