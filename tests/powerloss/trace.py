"""What a process asked of the disk, read from a record of strace: pure, but for `record`, which runs strace.

A `Call` has two moments, the numbers of the lines where it began and where it returned: threads overlap. `disk.py` says
what of it may be on the disk at any moment.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

# All calls that change files or make changes durable, and those needed to tell which file it is.
CALLS: Final = (
    *("open", "openat", "creat", "close", "lseek", "dup", "dup2", "dup3"),
    *("write", "writev", "pwrite64", "pwritev", "pwritev2", "copy_file_range", "sendfile", "splice"),
    *("ftruncate", "truncate", "fallocate", "mmap"),
    *("fsync", "fdatasync", "msync", "sync", "syncfs", "sync_file_range"),
    *("mkdir", "mkdirat", "rmdir", "rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat"),
    *("unlink", "unlinkat"),
)

_LINE = re.compile(r"(\d+) +(.*)", re.DOTALL)
_UNFINISHED = re.compile(r"(.*) <unfinished \.\.\.>$", re.DOTALL)
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(.*)", re.DOTALL)
_CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+|\?|0x[0-9a-f]+)(.*)", re.DOTALL)
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')


class Call(NamedTuple):
    """`arguments` without the strings, `strings` in their order; `result` below 0: it failed."""

    began: int
    ended: int
    name: str
    arguments: str
    strings: tuple[bytes, ...]
    result: int


class TraceError(Exception):
    """The record holds what this cannot read."""


def read(lines: Iterable[str]) -> Iterator[Call]:
    """The calls of `strace -f -xx`, in the order in which they returned."""
    unfinished: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(lines):
        found = _LINE.fullmatch(line.rstrip("\n"))
        if found is None:
            raise TraceError(f"line {number + 1}: {line[:80]!r}")
        thread, text = found[1], found[2]
        if text.startswith(("---", "+++")):
            continue
        began = number
        if (cut := _UNFINISHED.fullmatch(text)) is not None:
            unfinished[thread] = (number, cut[1])
            continue
        if (rest := _RESUMED.fullmatch(text)) is not None:
            began, text = unfinished.pop(thread)
            text += rest[1]
        call = _CALL.fullmatch(text)
        if call is None:
            if "= ?" in text or text.startswith("exit"):
                continue  # killed in it
            raise TraceError(f"line {number + 1}: {text[:80]!r}")
        strings = []
        for piece, cut_short in _STRING.findall(call[2]):
            if cut_short:
                raise TraceError(f"line {number + 1}: a string is cut short; record with a larger -s")
            strings.append(bytes.fromhex(piece.replace("\\x", "")))
        result = -1 if call[3] == "?" else int(call[3], 0)
        yield Call(began, number, call[1], _STRING.sub('""', call[2]), tuple(strings), result)


def record(command: Sequence[str], to: Path, *, cwd: Path) -> None:
    """Run a command under strace.

    Raises: subprocess.CalledProcessError.
    """
    options = ["-f", "-xx", "-s", str(64 << 20), "-e", "signal=none", "-e", f"trace={','.join(map(_if_known, CALLS))}"]
    subprocess.run(["strace", *options, "-o", str(to), *command], cwd=cwd, check=True)


def _if_known(call: str) -> str:
    """Not every machine has every call."""
    return f"?{call}"
