"""`perco doctor`: whether this machine suits a store: its file system, disk, limits, clock and permissions."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import stat
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import perco
from perco.cli.screen import FINE, FOUND, is_elsewhere, show_json, size
from perco.clock.oracle import newest_note
from perco.database.inside import inside
from perco.errors import FormatUnknown, PercoError, UsageError
from perco.storage import REMOTE, VOLATILE, file_system, native_why_not

OK, WARNING, WRONG = "ok", "warning", "wrong"
_SIGNS: Final = {OK: "ok     ", WARNING: "warning", WRONG: "WRONG  "}

_SYNCS: Final = 40
_FAST_S, _SLOW_S = 20e-6, 20e-3  # of an fsync: a disk that is faster may not write; one that is slower limits commits
_FREE_BYTES: Final = 1 << 30
_FILES: Final = 4096
_CLOCK_S: Final = 60.0
_LAYERED: Final = {"overlay", "overlayfs", "aufs"}  # what goes with a container


class Finding(NamedTuple):
    """`level`: OK, WARNING or WRONG. `what` was looked at; `told`: what was found, and what to do."""

    level: str
    what: str
    told: str


async def doctor(store: str, *, json: bool) -> int:
    """Look at the machine, and at the folder of a store or where one is to be."""
    if is_elsewhere(store) or store == "memory:":
        raise UsageError("perco doctor looks at the machine of a store: run it there, on the store's folder")
    folder, found, is_store = _machine(store)
    if is_store:
        found += await _store(folder)
    if json:
        show_json([each._asdict() for each in found])
    else:
        for each in found:
            print(f"{_SIGNS[each.level]}  {each.what}: {each.told}")
    return FOUND if any(each.level == WRONG for each in found) else FINE


def _machine(store: str) -> tuple[Path, list[Finding], bool]:
    """The folder, what is found without opening a store there, and whether there may be one."""
    folder = Path(store).expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    found = [*_packages(), *_folder(folder, there), *_limits()]
    return folder, found, folder.is_dir() and os.access(folder, os.R_OK | os.X_OK) and any(folder.iterdir())


def _packages() -> Iterator[Finding]:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("trio", "msgpack", "lmdb"))
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    told = f"{python}; perco {perco.__version__}, {versions}"
    yield Finding(OK if sys.version_info >= (3, 11) else WRONG, "Python", told)
    reason = native_why_not()
    told = f"not used, so transactions are slower: {reason}" if reason else "used for the store's files"
    yield Finding(WARNING if reason else OK, "C extension", told)


def _folder(folder: Path, there: Path) -> Iterator[Finding]:
    yield _kind(folder, there)
    yield _permissions(folder, there)
    if there.is_dir():
        yield _space(folder, there)
        yield _syncs(there)


def _kind(folder: Path, there: Path) -> Finding:
    kind = file_system(there) or "unknown"
    if kind in REMOTE:
        told = f"{kind}, on which neither locks nor maps can be trusted: put the store on a local disk"
        return Finding(WRONG, "file system", told)
    if kind in VOLATILE:
        return Finding(WARNING, "file system", f"{folder} is in memory ({kind}): a restart of the machine loses it")
    if kind in _LAYERED:
        told = f"{folder} is in a layer of a container ({kind}), and goes with it: mount a volume"
        return Finding(WARNING, "file system", told)
    return Finding(OK, "file system", f"{kind} at {there}")


def _permissions(folder: Path, there: Path) -> Finding:
    if not there.is_dir():
        return Finding(WRONG, "permissions", f"{there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        told = f"this user (uid {os.getuid()}) may not write to {there}"
        return Finding(WRONG, "permissions", told)
    mode = there.stat()
    if there == folder and mode.st_uid != os.getuid():
        told = f"{folder} belongs to uid {mode.st_uid}, and this is uid {os.getuid()}: run perco as its owner"
        return Finding(WARNING, "permissions", told)
    if there == folder and mode.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        told = f"others may write to {folder}: chmod 700, or 750 if others shall read"
        return Finding(WARNING, "permissions", told)
    return Finding(OK, "permissions", f"{there} can be written to")


def _space(folder: Path, there: Path) -> Finding:
    usage = shutil.disk_usage(there)
    used = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file()) if there == folder else 0
    told = f"{size(usage.free)} are free of {size(usage.total)}; the store takes {size(used)}"
    if usage.free < max(_FREE_BYTES, used // 4):
        return Finding(WARNING, "space", f"{told}: compacting, and a growing table, need room for a copy of a table")
    return Finding(OK, "space", told)


def _syncs(there: Path) -> Finding:
    """Write a page, and sync it, several times."""
    took = []
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            for _ in range(_SYNCS):
                os.pwrite(file.fileno(), os.urandom(4096), 0)
                began = time.perf_counter()
                os.fsync(file.fileno())
                took.append(time.perf_counter() - began)
    except OSError as error:
        return Finding(WRONG, "fsync", f"a file in {there} cannot be written: {error.strerror or error}")
    median = statistics.median(took)
    told = f"{1000 * median:.3f} ms in the median, {1000 * max(took):.3f} ms at most"
    if median < _FAST_S:
        return Finding(
            WARNING,
            "fsync",
            f"{told}: no disk writes as fast as that. Acknowledged writes survive power loss only if a protected cache "
            "takes them",
        )
    if median > _SLOW_S:
        told += ": commits wait for it. Use a local SSD, several tasks at a time, or durability='process'"
        return Finding(WARNING, "fsync", told)
    return Finding(OK, "fsync", told)


def _limits() -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _FILES:
        told = f"{files} (ulimit -n; at most {most}): each client and tablet needs one. LimitNOFILE=65536 in a unit"
        yield Finding(WARNING, "open files", told)
    else:
        yield Finding(OK, "open files", "unlimited" if files == resource.RLIM_INFINITY else str(files))
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    if memory != resource.RLIM_INFINITY:
        told = f"{size(memory)} (ulimit -v): perco maps its files, and needs more address space than memory"
        yield Finding(WARNING, "address space", told)


async def _store(folder: Path) -> list[Finding]:
    """Look at the store itself, without changing it."""
    try:
        async with perco.open(folder, readonly=True) as db:
            note = await newest_note(inside(db).driver.store)
            alive = inside(db).place.owner_alive
    except FormatUnknown as error:
        return [Finding(WRONG, "store", f"{error} A store needs a folder of its own, such as {folder / 'store'}")]
    except PercoError as error:
        return [Finding(WRONG, "store", f"{error} To see more: perco check {folder}")]
    found = [Finding(OK, "store", f"it can be read; {'its owner is alive' if alive else 'no process has it open'}")]
    if note is not None:
        ahead = note[1] - time.time()
        if ahead > _CLOCK_S:
            told = f"the store has seen a wall time {ahead:.0f} s ahead of this machine's: was the clock set back?"
            found.append(Finding(WARNING, "clock", told))
        else:
            found.append(Finding(OK, "clock", "not behind what the store has seen"))
    return found
