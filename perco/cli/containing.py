"""Runs a command's work in a process of its own, because a damaged file may kill the process that reads it.

LMDB trusts its files. An impossible page kills the process that reads it: by an assertion of LMDB (SIGABRT), or by a
read outside the file (SIGBUS, SIGSEGV). So the child records in shared memory which tablet it is about to touch, and
counts its steps there. If the child dies, or stops counting, the command sets that tablet aside, and starts another
child that leaves the tablet out. A tablet kills at most one child, which bounds the number of children.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, TextIO

import typer

from perco.cli.screen import FAILED, FINE, complain
from perco.errors import Corruption
from perco.serve.children import die_with

SILENCE_S: Final = 60.0  # how long a child may go without a step; a page of a scan takes milliseconds
_OF_LMDB: Final = {signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL}
_HEAD: Final = struct.Struct("=QH")  # steps, and the length of the path that follows
_SHARED_BYTES: Final = 8192
_SAID_MAX: Final = 300  # characters of what LMDB said


class Watch:
    """Shared memory through which the child reports to the command.

    Attributes:
        damaged: folders of tablets that must not be opened, and why.
        terminal: where the child may draw; None: there is no terminal.
    """

    def __init__(self) -> None:
        self.damaged: dict[Path, Corruption] = {}
        self.terminal: TextIO | None = None
        self._shared = mmap.mmap(-1, _SHARED_BYTES)
        self._steps = 0
        self._path = b""

    def at(self, path: Path | None) -> None:
        """Record that the child is about to read the tablet in this folder; None: it reads nothing that may kill it."""
        self._path = b"" if path is None else os.fsencode(path)[: _SHARED_BYTES - _HEAD.size]
        self._shared[_HEAD.size : _HEAD.size + len(self._path)] = self._path
        self.step()

    def step(self) -> None:
        """Count a step of the child."""
        self._steps += 1
        _HEAD.pack_into(self._shared, 0, self._steps, len(self._path))

    def seen(self) -> tuple[int, Path | None]:
        """For the command: how many steps the child has made, and which tablet it reads."""
        steps, length = _HEAD.unpack_from(self._shared)
        path = self._shared[_HEAD.size : _HEAD.size + length]
        return steps, Path(os.fsdecode(path)) if path else None

    def forget(self) -> None:
        """Prepare for the next child."""
        self._shared[:] = bytes(_SHARED_BYTES)


def contained(act: Callable[[Watch], object], *, silence_s: float = SILENCE_S) -> int:
    """Run a command's work in a child; if the child dies on a tablet, run another child without that tablet. The output
    of the last child is printed when it has ended. Returns the exit code of that child.

    Args:
        act: the work; it ends in typer.Exit, as `perform` does.
        silence_s: a child that counts no step for this long is killed.
    """
    watch = Watch()
    while True:
        watch.forget()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = _Child(act, watch, out, err)
            ending = child.wait(silence_s)
            _, at = watch.seen()
            said = _read(err)
            if ending >= 0:
                sys.stdout.write(_read(out))
                sys.stdout.flush()
                sys.stderr.write(said)
                return ending
        why = signal.Signals(-ending)
        told = " ".join(said.split())[:_SAID_MAX] or "no message"
        if child.silent:
            told = f"no answer in {silence_s:g} s"
        elif why not in _OF_LMDB:
            complain(f"the check was ended by {why.name}; its results are lost")
            return FAILED
        if at is None or at in watch.damaged:
            complain(f"LMDB gave up on the store: {told} ({why.name}). Restore the folder from a copy.")
            return FAILED
        watch.damaged[at] = Corruption(
            str(at), f"LMDB gave up on it: {told} ({why.name}); the other tablets were checked"
        )


def _to(file: IO[bytes], descriptor: int) -> TextIO:
    """Redirect a descriptor to a file, so that LMDB's own messages go there, too."""
    os.dup2(file.fileno(), descriptor)
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


class _Child:
    """A forked child at work. `wait` watches its steps."""

    silent = False  # whether it was killed because it stopped counting

    def __init__(self, act: Callable[[Watch], object], watch: Watch, out: IO[bytes], err: IO[bytes]) -> None:
        self._watch = watch
        self._ended, ends = os.pipe()  # the pipe reaches its end when the child is gone
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid:
            os.close(ends)
            return
        code = FAILED
        try:
            os.setpgid(0, 0)  # Ctrl-C reaches only the command, which forwards it
            die_with(parent)
            if sys.stderr.isatty():
                watch.terminal = os.fdopen(os.dup(2), "w")
            sys.stdout, sys.stderr = _to(out, 1), _to(err, 2)
            code = _code_of(act, watch)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait(self, silence_s: float) -> int:
        """Wait for the child; returns its exit code, or minus the signal that killed it."""
        with _handing_on(self._pid):
            steps, _ = self._watch.seen()
            while not select.select([self._ended], [], [], silence_s)[0]:
                before, (steps, _) = steps, self._watch.seen()
                if steps == before:
                    self.silent = True
                    os.kill(self._pid, signal.SIGKILL)
                    break
            os.close(self._ended)
            _, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status)


@contextmanager
def _handing_on(pid: int) -> Iterator[None]:
    """Forward Ctrl-C and SIGTERM to the child, which ends as the command would."""

    def hand_on(number: int, _: Any) -> None:
        os.kill(pid, number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _code_of(act: Callable[[Watch], object], watch: Watch) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        act(watch)
    except typer.Exit as ending:
        return ending.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except Exception as error:  # a damaged store can cause any error: the user gets a message, and no traceback
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
        complain(
            f"the check failed while it read {watch.seen()[1] or 'the store'}: {type(error).__name__}: {error} "
            f"({place}). The store is damaged, and perco should have reported that instead: restore the "
            "folder from a copy, and report this as a bug in perco."
        )
        return FAILED
    return FINE
