"""`perco worker`: observers of a program, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

import perco

APP = """
import perco

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
twice = docs.column("twice", perco.INT64)
schema = perco.Schema(docs)
empty = perco.Schema(perco.Table("x"))
other = 1


@schema.observe(n, id="double")
async def double(txn, change):
    if change.value == 13:
        raise ValueError("thirteen")
    txn.set(twice, change.key, 2 * (change.value or 0))
"""
docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
twice = docs.column("twice", perco.INT64)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "program.py").write_text(f"import trio\n{APP}\nasync def main(): pass\n\ntrio.run(main)\n")
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "perco", "worker", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(perco.__file__).parent.parent)])}


def run(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=place, env=environment(), capture_output=True, text=True, check=False
    )


async def _load(place: Path, count: int) -> None:
    async with perco.open(place / "store", perco.Schema(docs), options=perco.Options(durability="process")) as db:

        async def put(txn: perco.Transaction, i: int) -> None:
            txn.set(n, f"k{i}", i)

        for i in range(count):
            await db.run(put, 100 + i)


async def _doubled(place: Path) -> int:
    async with perco.open(place / "store", perco.Schema(docs)) as db, db.snapshot() as snap:
        return sum([row[twice] == 2 * (row[n] or 0) async for row in snap.scan(docs)])


def test_it_says_that_it_has_made_the_store(place: Path) -> None:
    made = run(place, "app:schema", "--store", "typo", "--until-idle")
    again = run(place, "app:schema", "--store", "typo", "--until-idle")
    assert "there was no store at typo: a new, empty one was made\n" in made.stderr
    assert "new store" not in again.stderr
    assert (made.returncode, again.returncode) == (0, 0)


def test_it_runs_what_waits_and_ends(place: Path) -> None:
    first = run(place, "app:schema", "--store", "store", "--until-idle")  # so that the store knows the observer
    assert first.returncode == 0, first.stderr
    trio.run(_load, place, 20)
    done = run(place, "app:schema", "--store", "store", "--until-idle", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"double": {"commits": 20, "failures": 0}}
    assert "running double on store" in done.stderr
    assert trio.run(_doubled, place) == 20


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("app", "write MODULE:SCHEMA"),
        ("app.py:schema", "'app.py:schema' names a file: write app:schema"),
        ("./parts/app.py:schema", "write parts.app:schema"),
        ("nowhere:schema", "no module 'nowhere'"),
        ("app:nothing", "no attribute 'nothing'"),
        ("app:other", "app:other is int"),
        ("app:empty", "declares no observers"),
        ("program:schema", 'if __name__ == "__main__":'),
    ],
)
def test_what_is_no_schema_is_told(place: Path, what: str, told: str) -> None:
    done = run(place, what, "--store", "store")
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (place / "store").exists()


@pytest.mark.parametrize(
    ("program", "first", "last"),
    [
        (
            "def declare():\n    return {}['docs']\n\n\nschema = declare()\n",
            'broken.py", line 5, in <module>',
            "KeyError: 'docs'",
        ),
        ("import nowhere\n", 'broken.py", line 1, in <module>', "ModuleNotFoundError: No module named 'nowhere'"),
        ("schema = (\n", 'broken.py", line 1', "SyntaxError: '(' was never closed"),
    ],
)
def test_what_a_module_raises_is_shown_from_its_own_code_on(place: Path, program: str, first: str, last: str) -> None:
    (place / "broken.py").write_text(program)
    done = run(place, "broken:schema", "--store", "store")
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    files = [line for line in lines if line.startswith("  File ")]
    assert first in files[0]
    assert all("broken.py" in file for file in files)
    assert lines[-2:] == [last, "perco: broken:schema: the module cannot be imported; its error is printed above"]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_of_several_one_that_is_killed_is_followed_by_another(
    place: Path, started: list[subprocess.Popen[str]]
) -> None:
    trio.run(_load, place, 0)  # so that it is there
    arguments = command("app:schema", "--store", "store", "--processes", "2")
    process = subprocess.Popen(
        arguments, cwd=place, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    started.append(process)
    assert process.stderr is not None
    pids = [_pid(process.stderr.readline()) for _ in range(2)]
    os.kill(pids[0], signal.SIGKILL)
    told = process.stderr.readline()
    assert f"process {pids[0]} of the worker was killed by signal 9 (Killed); another one starts in " in told
    assert _pid(process.stderr.readline()) not in pids
    trio.run(_load, place, 5)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0
    rest = run(place, "app:schema", "--store", "store", "--until-idle")
    assert rest.returncode == 0, rest.stderr
    assert trio.run(_doubled, place) == 5


def _pid(line: str) -> int:
    assert "running double" in line, line
    return int(line.rpartition("process ")[2].rstrip(")\n"))


def test_observers_made_for_asyncio_are_refused_before_an_attempt_is_burnt(place: Path) -> None:
    text = APP.replace("import perco\n", "import perco, perco.aio\n", 1)
    (place / "app.py").write_text(text.replace("async def double", "@perco.aio.observer\nasync def double"))
    trio.run(_load, place, 1)
    done = run(place, "app:schema", "--store", "store", "--until-idle")
    assert done.returncode == 2
    assert "observer 'double' cannot run here" in done.stderr
    assert "perco.aio.open" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_observer_that_awaits_asyncio_without_saying_so_burns_no_attempt(place: Path) -> None:
    text = APP.replace("import perco\n", "import asyncio, perco\n", 1)
    (place / "app.py").write_text(
        text.replace("    if change.value", "    await asyncio.sleep(0)\n    if change.value")
    )
    trio.run(_load, place, 1)
    done = run(place, "app:schema", "--store", "store", "--until-idle")
    assert done.returncode == 2
    assert "perco: observer 'double' awaits asyncio, but runs on trio" in done.stderr
    assert "perco.aio.observer" in done.stderr
    (place / "app.py").write_text(APP)
    done = run(place, "app:schema", "--store", "store", "--until-idle", "--json")
    assert json.loads(done.stdout) == {"double": {"commits": 1, "failures": 0}}, "it waits for a program that is right"
