"""Programs over a folder: that end without closing it, that fork, that are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import perco
import perco.sync

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs

HEAD = """
import asyncio, os, sys, threading, perco, perco.aio, perco.sync
docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
schema = perco.Schema(docs)

def bump(txn, key):
    txn.set(n, key, (txn.get(n, key) or 0) + 1)

async def abump(txn, key):
    txn.set(n, key, (await txn.get(n, key) or 0) + 1)

def at_the_end():  # registered first, so called last
    print(sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("perco")))

import atexit
atexit.register(at_the_end)
"""


def program(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(HEAD + body)
    return [sys.executable, str(path), str(tmp_path / "store")]


def value(tmp_path: Path, key: str) -> int | None:
    with perco.sync.open(tmp_path / "store", SCHEMA) as db, db.transaction() as txn:
        return txn.get(n, key)


LEFT_OPEN = {
    "sync": """
db = perco.sync.open(sys.argv[1], schema).__enter__()
db.run(bump, "a")
print("ends", flush=True)
""",
    "sync, in a call": """
import trio
db = perco.sync.open(sys.argv[1], schema).__enter__()
db.run(bump, "a")
begun = threading.Event()

async def forever(_):
    begun.set()
    await trio.sleep_forever()

def waits():
    try:
        db._port.ask(forever, (db._of,), {})
    except perco.errors.TransactionClosed:
        pass

threading.Thread(target=waits, daemon=True).start()
begun.wait()
print("ends", flush=True)
""",
    "aio": """
async def main():
    db = await perco.aio.open(sys.argv[1], schema).__aenter__()
    await db.run(abump, "a")
    print("ends", flush=True)

asyncio.run(main())
""",
    "aio, its loop never run to an end": """
async def main():
    global db
    db = await perco.aio.open(sys.argv[1], schema).__aenter__()
    await db.run(abump, "a")
    print("ends", flush=True)

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
loop.close()
""",
}


@pytest.mark.parametrize("case", LEFT_OPEN)
def test_a_program_that_leaves_a_store_open_ends_and_loses_nothing(tmp_path: Path, case: str) -> None:
    done = subprocess.run(program(tmp_path, LEFT_OPEN[case]), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ends\n[]\n"), done.stderr
    assert "Fatal" not in done.stderr
    assert "Traceback" not in done.stderr
    assert value(tmp_path, "a") == 1


INTERRUPTED = {
    "sync": """
with perco.sync.open(sys.argv[1], schema) as db:
    db.run(bump, "a")
    print("busy", flush=True)
    while True:
        db.run(bump, "b")
""",
    "sync, waiting": """
import trio

async def forever(_):
    print("busy", flush=True)
    await trio.sleep_forever()

with perco.sync.open(sys.argv[1], schema) as db:
    db.run(bump, "a")
    db._port.ask(forever, (db._of,), {})
""",
    "aio": """
async def main():
    async with perco.aio.open(sys.argv[1], schema) as db:
        await db.run(abump, "a")
        print("busy", flush=True)
        while True:
            await db.run(abump, "b")

asyncio.run(main())
""",
    "aio, on a loop that leaves Ctrl-C alone": """
async def main():
    async with perco.aio.open(sys.argv[1], schema) as db:
        await db.run(abump, "a")
        print("busy", flush=True)
        while True:
            await db.run(abump, "b")

loop = asyncio.new_event_loop()
task = loop.create_task(main())
try:
    loop.run_until_complete(task)
finally:
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
""",
}


@pytest.mark.parametrize("case", INTERRUPTED)
def test_an_interrupted_program_ends_with_keyboard_interrupt_and_the_store_is_whole(tmp_path: Path, case: str) -> None:
    process = subprocess.Popen(
        program(tmp_path, INTERRUPTED[case]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert "TrioInternalError" not in errors
    assert process.returncode == -signal.SIGINT
    assert value(tmp_path, "a") == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's own, of forks beside threads
def test_a_forked_child_is_told_and_does_not_hang(tmp_path: Path) -> None:  # S5
    with perco.sync.open(tmp_path / "store", SCHEMA, options=perco.Options(durability="process")) as db:
        with db.transaction() as txn:
            txn.set(n, "a", 1)
        snap = db.snapshot_at()
        child = os.fork()
        if child == 0:
            told = 0
            for use in (lambda: snap.get(n, "a"), lambda: db.run(lambda txn: txn.set(n, "a", 2)), lambda: db.pins()):
                try:
                    use()
                except perco.errors.UsedAfterFork:
                    told += 1
            os._exit(told)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 3
        assert snap.get(n, "a") == 1
        snap.end()
        with db.transaction() as txn:
            txn.set(n, "a", 3)
    assert value(tmp_path, "a") == 3


def test_killed_in_the_middle_what_was_acknowledged_is_there(tmp_path: Path) -> None:
    body = """
def work(number):
    while True:
        db.run(bump, f"{number}")
        os.write(1, f"{number}\\n".encode())  # at once: print's newline is another write

with perco.sync.open(sys.argv[1], schema) as db:
    for number in range(8):
        threading.Thread(target=work, args=(number,)).start()
"""
    process = subprocess.Popen(program(tmp_path, body), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(100)]
    process.kill()
    lines += process.communicate(timeout=60)[0].splitlines(keepends=True)
    acknowledged = [line.strip() for line in lines if line.endswith("\n")]
    with perco.sync.open(tmp_path / "store", SCHEMA) as db, db.snapshot() as snap:
        for number in range(8):
            have = snap.get(n, f"{number}") or 0
            assert have - acknowledged.count(f"{number}") in (0, 1)


def test_both_fronts_work_in_a_second_process_while_the_owner_goes_on(tmp_path: Path) -> None:
    body = """
async def main():
    async with perco.aio.open(sys.argv[1], schema) as db:
        await asyncio.gather(*[db.run(abump, "a") for _ in range(5)])
        async with db.snapshot() as snap:
            print([(row.key, row[n]) async for row in snap.scan(docs)])

with perco.sync.open(sys.argv[1], schema) as db:
    db.run(bump, "a")
    with db.transaction() as txn:
        print(txn.get(n, "a"))
asyncio.run(main())
"""
    with perco.sync.open(tmp_path / "store", SCHEMA, options=perco.Options(durability="process")) as db:
        with db.transaction() as txn:
            txn.set(n, "a", 1)
        done = subprocess.run(program(tmp_path, body), capture_output=True, text=True, timeout=60)
        assert done.stdout == "2\n[('a', 7)]\n[]\n", done.stderr
        with db.snapshot() as snap:
            assert snap.get(n, "a") == 7
