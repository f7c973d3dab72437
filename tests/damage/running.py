"""Runs commands over damaged stores, in forked children that have everything imported, and judges how they ended."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import select
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
import typer

import perco
from perco.cli import app
from perco.errors import PercoWarning
from tests.acceptance.cli import stores
from tests.damage.cases import Case, case_of
from tests.support.copies import as_itself

HUNG_S: Final = 120.0  # a command that has not ended by then is taken to hang
_KEYS: Final = 300
_COMMAND: Final = typer.main.get_command(app)  # once, not for every case
_LONG: Final = b"long " * 2000  # pages of its own


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. `code`: its exit code, or minus the signal that ended it; None: it hung."""

    code: int | None
    out: str
    err: str


async def _fill(path: Path) -> None:
    """Trees of several levels, values with pages of their own, free pages, locks left behind, in several tablets."""
    await stores.make(path)
    async with perco.open(path, stores.schema) as db:
        for start in range(0, _KEYS, 100):
            async with db.transaction() as txn:
                for number in range(start, start + 100):
                    txn.set(stores.title, f"{'ax'[number % 2]}{number:05}", f"title {number}" * 3)
                    txn.set(stores.square, number, number * number)
                    if not number % 50:
                        txn.set(stores.contents, f"ax{number}", _LONG)
                        txn.set(stores.blob, b"%d" % number, {"n": number})
        async with db.transaction() as txn:
            for number in range(0, _KEYS, 3):
                txn.delete(stores.square, number)
        await db.vacuum()


def make_store(path: Path) -> None:
    trio.run(_fill, path)


def files_of(store: Path) -> dict[str, bytes]:
    """Every file of a store by its relative name. A lock file counts: LMDB's readers look into it."""
    files = {}
    for path in sorted(store.rglob("*")):
        if path.is_file():
            files[str(path.relative_to(store))] = path.read_bytes()
    files.setdefault("token", b"secret\n")
    return files


def command(*args: object, hung_s: float = HUNG_S) -> Ended:
    """Run `perco ...` in a forked child of this process."""

    def act() -> int:
        try:
            _COMMAND.main(list(map(str, args)), prog_name="perco")
        except SystemExit as ending:
            return ending.code if isinstance(ending.code, int) else 1
        return 0

    return in_child(act, hung_s=hung_s)


def in_child(act: Callable[[], int], *, hung_s: float = HUNG_S) -> Ended:
    ended, ends = os.pipe()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if not pid:
            code = 99
            try:
                faulthandler.disable()  # a process that ends by a signal does so on purpose
                os.setpgid(0, 0)
                os.close(ended)
                for file, descriptor in ((out, 1), (err, 2)):
                    os.dup2(file.fileno(), descriptor)
                sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in (1, 2))  # noqa: SIM115
                code = act()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(ends)
        readable, _, _ = select.select([ended], [], [], hung_s)
        os.close(ended)
        if not readable:
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        out.seek(0)
        err.seek(0)
        code_or_none = os.waitstatus_to_exitcode(status) if readable else None
        return Ended(code_or_none, out.read().decode(errors="replace"), err.read().decode(errors="replace"))


class Bench:
    """A store that is damaged, looked at, and put back, again and again."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.files = files_of(store)
        _warm(store)

    def run(self, seed: int) -> tuple[Case, str, str]:
        """(the case, its class, what is wrong with it or "")."""
        case = case_of(seed, self.files)
        self._put_back()
        path = self.store / case.file
        if case.data is None:
            path.unlink()
        else:
            path.write_bytes(case.data)
        wants_json = case.reader == "check --json"
        checked = command("check", self.store, *(["--json"] if wants_json else []))
        kind, wrong = judged(checked)
        if not wrong and case.reader not in ("check", "check --json"):
            wrong = self._read(case.reader, kind)
        return case, kind, wrong

    def _read(self, reader: str, checked: str) -> str:
        match reader:
            case "status":
                ended = command("status", self.store)
            case "scan":
                ended = command("scan", self.store, "docs")
            case _:
                ended = in_child(lambda: _opened(self.store))
        if ended.code is None:
            return f"{reader} hangs"
        if ended.code < 0:  # LMDB took the process down: nothing in it could be done, but check must have told
            return f"{reader} died of signal {-ended.code}, and check saw nothing" if checked == "clean" else ""
        if "Traceback" in ended.err or ended.code not in (0, 1, 2):
            return f"{reader} ends in {ended.code}:\n{ended.err}"
        return ""

    def _put_back(self) -> None:
        shutil.rmtree(self.store)
        for name, data in self.files.items():
            path = self.store / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        as_itself(self.store)


def _warm(store: Path) -> None:
    """Have imported what the command imports when it is called: else every child would do that."""
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        _COMMAND.main(["scan", str(store), "links"], prog_name="perco")


def judged(ended: Ended) -> tuple[str, str]:
    """The class of how a check ended, and what is wrong with that."""
    if ended.code is None:
        return "hung", f"check hangs\n{ended.err}"
    if ended.code < 0:
        return "died", f"check died of signal {-ended.code}\n{ended.err}"
    if "Traceback" in ended.err or "bug in perco" in ended.out + ended.err:
        return "traceback", f"check ends in {ended.code}:\n{ended.out[-2000:]}{ended.err}"
    match ended.code:
        case 0:
            return "clean", "" if ended.out else "it says nothing"
        case 1 if "LMDB gave up on it" in ended.out:
            return "contained", ""
        case 1:
            return "reported", "" if ended.out else "it says nothing"
        case 2 if ended.err.startswith("perco: "):
            return "refused", ""
    return "strange", f"check ends in {ended.code}:\n{ended.out}{ended.err}"


def _opened(store: Path) -> int:
    """A program that opens the store, reads all of it and writes a little. It may be told that it cannot."""

    async def main() -> None:
        async with perco.open(store, stores.schema) as db:
            async with db.snapshot() as snap:
                for table in (stores.docs, stores.links, stores.blobs, stores.numbers):
                    async for _ in snap.scan(table):
                        pass
            async with db.transaction() as txn:
                txn.set(stores.title, "a00001", "new")
            await db.vacuum()

    warnings.simplefilter("ignore", PercoWarning)  # this is a child: a store whose identity is damaged is a copy
    try:
        trio.run(main)
    except perco.PercoError as error:
        print(f"{type(error).__name__}: {error}")
        return 2
    except ExceptionGroup as group:
        if group.split(perco.PercoError)[1] is not None:
            raise
        return 2
    return 0
