"""Ctrl-C: in one's own program an ordinary KeyboardInterrupt, in a command one line; and the store is whole."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BUSY = """
import sys, perco, trio
table = perco.Table("t", key=perco.INT64)
put, seen = table.column("put", perco.INT64), table.column("seen", perco.INT64)
schema = perco.Schema(table)
runs = 0

@schema.observe(put, id="compute")
async def compute(txn, change):
    global runs
    runs += 1
    txn.set(seen, change.key, sum(range(200_000)))
    if runs == 20:
        print("busy", flush=True)

async def main():
    async with perco.open(sys.argv[1], schema) as db, db.worker():
        for at in range(1_000_000):
            async with db.transaction() as txn:
                for i in range(50):
                    txn.set(put, i, at)

trio.run(main)
"""

MADE = """
import sys, perco, trio
table = perco.Table("t", key=perco.INT64)
put = table.column("put", perco.INT64)
schema = perco.Schema(table)

@schema.observe(put, id="compute")
async def compute(txn, change):
    pass

async def main():
    async with perco.open(sys.argv[1], schema) as db:
        async with db.transaction() as txn:
            txn.set(put, len(sys.argv), 1)
        if "stay" in sys.argv:
            print("open", flush=True)
            await trio.to_thread.run_sync(sys.stdin.readline)

trio.run(main)
"""


@pytest.mark.parametrize("number", range(3))
def test_it_reaches_the_main_task_of_a_program_whose_observers_compute(tmp_path: Path, number: int) -> None:
    program = tmp_path / "busy.py"
    program.write_text(BUSY)
    process = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path / "store")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert "TrioInternalError" not in errors
    checked = subprocess.run([sys.executable, "-m", "perco", "check", str(tmp_path / "store")], check=False)
    assert checked.returncode == 0


def test_a_load_that_is_interrupted_says_so_in_a_line_and_goes_on_from_there(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    for i in range(300):
        (pages / f"{i}.html").write_text(f"<title>{i}</title>page {i} <a href={i + 1}.html>next</a>")
    command = [sys.executable, "-m", "perco", "web", "load", str(tmp_path / "store"), "--html", str(pages), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(errors.splitlines()) == 1
    assert errors.endswith("interrupted; all commits so far are kept, and the same command continues from there\n")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    found = [sys.executable, "-m", "perco", "web", "search", str(tmp_path / "store"), "299", "--json"]
    assert subprocess.run(found, capture_output=True, check=False).returncode == 0


def test_a_command_that_only_looks_says_no_more_than_that_it_was_interrupted(tmp_path: Path) -> None:
    program = tmp_path / "made.py"
    program.write_text(MADE)
    store = tmp_path / "store"
    subprocess.run([sys.executable, str(program), str(store)], check=True)
    owner = subprocess.Popen([sys.executable, str(program), str(store), "stay"], stdin=-1, stdout=-1, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "open\n"
    command = [sys.executable, "-m", "perco", "wait", str(store)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "2 changes wait" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, "", "perco: interrupted\n")
    owner.communicate("\n", timeout=60)


def test_the_simulation_is_interrupted_without_a_traceback() -> None:
    command = [sys.executable, "-m", "perco.testing.simulate", "--seeds", "1000000", "--processes", "1"]
    terminal, side = pty.openpty()
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=side, start_new_session=True)
        shown = b""
        while b" of 1000000" not in shown:
            shown += os.read(terminal, 1 << 10)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: its children are told as well
        out, _ = process.communicate(timeout=120)
        shown += os.read(terminal, 1 << 10)
    finally:
        os.close(terminal)
        os.close(side)
    assert (process.returncode, out) == (130, b"")
    assert shown.endswith(b"interrupted\r\n")
    assert b"Traceback" not in shown
