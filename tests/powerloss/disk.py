"""Which files a power loss may leave: pure, from what was asked of the disk.

A trace becomes a list of *changes*: bytes written to a file, a file's length, the entries of a folder. A change is
*begun* when its call began, and *durable* when it surely is on the disk:

    bytes and length   when an fsync or fdatasync of that file has returned that began after the change had returned;
                       or when the write itself has returned, through a file opened with O_DSYNC or O_SYNC
    entries            when an fsync of that folder has returned that began after the change had returned

At a moment at which power fails, durable changes are there, those not begun are not, and of the others any subset is,
in part as well: `sectors` of 512 bytes of a write arrive or do not. No order among them is relied upon, neither between
files nor between a file and its folder: POSIX promises none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.powerloss.trace import Call, TraceError

NEVER: Final = 1 << 60
SECTOR: Final = 512
_ROOT: Final = 0


@dataclass(slots=True)
class Change:
    """To one file or folder, by number. Exactly one of `data`, `length` and `entries` says what.

    `length`: (bytes, whether it may only grow). `entries`: name -> number, None: it goes.
    """

    node: int
    began: int
    ended: int
    durable: int = NEVER
    offset: int = 0
    data: bytes | None = None
    length: tuple[int, bool] | None = None
    entries: dict[str, int | None] | None = None


@dataclass(slots=True)
class _Open:
    node: int
    synced: bool
    offset: int = 0


@dataclass(slots=True)
class Report:
    """A line that the process wrote to its reports: it knew this from `began` on."""

    began: int
    text: str


@dataclass(slots=True)
class Disk:
    """What was done below `root`, which was there before; lines written to `reports` are kept apart."""

    root: Path
    reports: Path
    changes: list[Change] = field(default_factory=list)
    reported: list[Report] = field(default_factory=list)
    syncs: int = 0
    _open: dict[int, _Open] = field(default_factory=dict)
    _reports: set[int] = field(default_factory=set)
    _folders: dict[int, dict[str, int]] = field(default_factory=lambda: {_ROOT: {}})
    _nodes: int = 1
    _waiting: dict[int, list[Change]] = field(default_factory=dict)  # not yet durable, by node

    # ------------------------------------------------------------ reading the record

    def follow(self, calls: Iterable[Call]) -> Disk:
        for call in calls:
            if call.result >= 0:
                getattr(self, f"_{call.name}", self._unknown)(call)
        return self

    def _unknown(self, call: Call) -> None:
        if call.strings and self._where(call.strings[0]) is None:
            return
        raise TraceError(f"the effect of {call.name}({call.arguments}) on a disk is not known here")

    def _change(self, call: Call, node: int, *, synced: bool = False, **what: object) -> None:
        change = Change(node, call.began, call.ended, **what)  # type: ignore[arg-type]
        self.changes.append(change)
        if synced:
            change.durable = call.ended
        else:
            self._waiting.setdefault(node, []).append(change)

    def _where(self, path: bytes) -> tuple[int, str] | None:
        """(folder, name) of a path, None for what lies elsewhere."""
        try:
            parts = Path(path.decode()).relative_to(self.root).parts
        except ValueError:
            return None
        if not parts:
            return _ROOT, ""
        folder = _ROOT
        for part in parts[:-1]:
            if part not in self._folders.get(folder, {}):
                raise TraceError(f"{path!r}: nobody has made {part!r}")
            folder = self._folders[folder][part]
        return folder, parts[-1]

    def _made(self, call: Call, folder: int, name: str) -> int:
        node = self._nodes
        self._nodes += 1
        self._folders[folder][name] = node
        self._change(call, folder, entries={name: node})
        return node

    def _openat(self, call: Call) -> None:
        [path] = call.strings
        if Path(path.decode(errors="replace")) == self.reports:
            self._reports.add(call.result)
            return
        where = self._where(path)
        if where is None:
            return
        folder, name = where
        node = self._folders[folder].get(name) if name else folder
        if node is None:
            node = self._made(call, folder, name)
        elif "O_TRUNC" in call.arguments:
            self._change(call, node, length=(0, False))
        self._open[call.result] = _Open(node, "O_DSYNC" in call.arguments or "O_SYNC" in call.arguments)

    def _close(self, call: Call) -> None:
        self._open.pop(_number(call, 0), None)
        self._reports.discard(_number(call, 0))

    def _dup(self, call: Call) -> None:
        if _number(call, 0) in self._open:
            raise TraceError("a file of the store was duplicated")

    _dup2 = _dup3 = _dup

    def _lseek(self, call: Call) -> None:
        if (file := self._open.get(_number(call, 0))) is not None:
            file.offset = call.result

    def _write(self, call: Call) -> None:
        number = _number(call, 0)
        data = b"".join(call.strings)[: call.result]
        if number in self._reports:
            self.reported += [Report(call.began, line) for line in data.decode().splitlines()]
        elif (file := self._open.get(number)) is not None:
            self._change(call, file.node, offset=file.offset, data=data, synced=file.synced)
            file.offset += len(data)

    _writev = _write

    def _pwrite64(self, call: Call) -> None:
        if (file := self._open.get(_number(call, 0))) is not None:
            offset = int(call.arguments.rsplit(",", 1)[1])
            data = b"".join(call.strings)[: call.result]
            self._change(call, file.node, offset=offset, data=data, synced=file.synced)

    _pwritev = _pwrite64

    def _ftruncate(self, call: Call) -> None:
        if (file := self._open.get(_number(call, 0))) is not None:
            self._change(call, file.node, length=(_number(call, 1), False))

    def _fallocate(self, call: Call) -> None:
        if (file := self._open.get(_number(call, 0))) is not None:
            if _number(call, 1):
                raise TraceError("fallocate with a mode")
            self._change(call, file.node, length=(_number(call, 2) + _number(call, 3), True))

    def _mmap(self, call: Call) -> None:
        """Nothing is written through maps but LMDB's lock file, whose content nobody needs after a restart."""
        _, _, protection, flags, number, _ = call.arguments.split(", ")
        file = self._open.get(int(number))
        if (
            file is not None
            and "PROT_WRITE" in protection
            and "MAP_SHARED" in flags
            and file.node not in self._lock_files()
        ):
            raise TraceError("a file is written through a map")

    def _lock_files(self) -> set[int]:
        return {node for folder in self._folders.values() for name, node in folder.items() if name == "lock.mdb"}

    def _fsync(self, call: Call) -> None:
        file = self._open.get(_number(call, 0))
        if file is None:
            return
        self.syncs += 1
        still = []
        for change in self._waiting.pop(file.node, []):
            if change.ended < call.began:
                change.durable = call.ended
            else:
                still.append(change)
        self._waiting[file.node] = still

    _fdatasync = _fsync

    def _mkdir(self, call: Call) -> None:
        if (where := self._where(call.strings[0])) is not None:
            self._folders[self._made(call, *where)] = {}

    def _rename(self, call: Call) -> None:
        source, target = map(self._where, call.strings)
        if source is None and target is None:
            return
        if source is None or target is None or source[0] != target[0]:
            raise TraceError("a file was moved from one folder to another")
        folder = self._folders[source[0]]
        folder[target[1]] = folder.pop(source[1])
        self._change(call, source[0], entries={source[1]: None, target[1]: folder[target[1]]})

    _renameat = _renameat2 = _rename

    def _unlink(self, call: Call) -> None:
        where = self._where(call.strings[0])
        if where is not None and where[1] != "socket":  # nothing of it is on the disk, nor is its making followed
            del self._folders[where[0]][where[1]]
            self._change(call, where[0], entries={where[1]: None})

    _unlinkat = _rmdir = _unlink

    # ------------------------------------------------------------ power fails

    def moments(self) -> list[int]:
        """All that differ: after a change or a report has begun, and after something has become durable."""
        found = {change.began + 1 for change in self.changes} | {change.ended + 1 for change in self.changes}
        found |= {change.durable + 1 for change in self.changes if change.durable < NEVER}
        return sorted(found | {report.began + 1 for report in self.reported})

    def unsure(self, moment: int) -> list[int]:
        """The changes that may be there or not, if power fails at a moment: their indices."""
        return [i for i, change in enumerate(self.changes) if change.began < moment <= change.durable]

    def known(self, moment: int) -> list[str]:
        """What had been reported by then."""
        return [report.text for report in self.reported if report.began < moment]

    def leave(self, target: Path, moment: int, kept: Collection[int], torn: Mapping[int, Collection[int]] = {}) -> None:
        """Make the folder that a power loss leaves; of what is unsure those of `kept`, of `torn` only some sectors."""
        contents: dict[int, bytearray] = {}
        folders: dict[int, dict[str, int]] = {node: {} for node in self._folders}
        for i, change in enumerate(self.changes):
            if change.began >= moment or (change.durable >= moment and i not in kept):
                continue
            if change.entries is not None:
                for name, node in change.entries.items():
                    folders[change.node].pop(name, None)
                    if node is not None:
                        folders[change.node][name] = node
                continue
            content = contents.setdefault(change.node, bytearray())
            if change.length is not None:
                length, grows_only = change.length
                if not grows_only:
                    del content[length:]
                content.extend(bytes(max(0, length - len(content))))
            else:
                assert change.data is not None
                _put(content, change.offset, change.data, torn.get(i))
        self._write_out(target, _ROOT, folders, contents)

    def _write_out(
        self, target: Path, node: int, folders: Mapping[int, Mapping[str, int]], contents: Mapping[int, bytearray]
    ) -> None:
        target.mkdir(exist_ok=True)
        for name, inner in folders[node].items():
            if inner in folders:
                self._write_out(target / name, inner, folders, contents)
            else:
                (target / name).write_bytes(contents.get(inner, b""))


def sectors(change: Change) -> range:
    """The sectors that a write touches."""
    assert change.data is not None
    return range(change.offset // SECTOR, -(-(change.offset + len(change.data)) // SECTOR))


def _put(content: bytearray, offset: int, data: bytes, only: Collection[int] | None) -> None:
    end = offset + len(data)
    content.extend(bytes(max(0, end - len(content))))  # a torn write may have made the file longer all the same
    if only is None:
        content[offset:end] = data
        return
    for sector in only:
        low, high = max(offset, sector * SECTOR), min(end, (sector + 1) * SECTOR)
        content[low:high] = data[low - offset : high - offset]


def _number(call: Call, at: int) -> int:
    found = re.match(r"-?\d+", call.arguments.split(", ")[at])
    if found is None:
        raise TraceError(f"{call.name}({call.arguments})")
    return int(found[0])
