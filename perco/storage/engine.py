"""The interface of a tablet's ordered store, and the engine that keeps it in memory.

An engine holds one sorted map per locality group. A `View` is one consistent state of all of them, read with cursors
that behave like LMDB's; a `Batch` is a view that can write. Views are opened and dropped without an await in between
(S3), so the memory engine keeps no versions: nothing can change while a view is open.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

from perco.storage.cells import LOG
from perco.storage.keys import TAIL_BYTES, escape, split_log_key, unescape


class Cursor(Protocol):
    """A position in one group; the part of LMDB's cursor that perco uses."""

    def set_range(self, key: bytes) -> bool: ...
    def key(self) -> bytes: ...
    def value(self) -> bytes: ...
    def item(self) -> tuple[bytes, bytes]: ...
    def next(self) -> bool: ...
    def prev(self) -> bool: ...
    def last(self) -> bool: ...


class View(Protocol):
    """One consistent state of all groups of a tablet."""

    def cursor(self, group: str) -> Cursor: ...
    def get(self, group: str, key: bytes) -> bytes | None: ...


class Batch(View, Protocol):
    """A view that sees its own writes, to be committed or dropped as a whole. `logs`: whether the tablet keeps a log
    (E1)."""

    @property
    def logs(self) -> bool: ...
    def put(self, group: str, key: bytes, value: bytes) -> None: ...
    def delete(self, group: str, key: bytes) -> None: ...


class MemoryBatch:
    """The writes of one mutation to a `MemoryEngine`, kept apart until the mutation is complete, so that all of them
    take effect or none.

    Checks come before writes (S1), so a batch need not see its own writes.
    """

    __slots__ = ("_engine", "_writes")

    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine
        self._writes: list[tuple[str, bytes, bytes | None]] = []

    @property
    def logs(self) -> bool:
        return self._engine.logs

    def cursor(self, group: str) -> Cursor:
        return self._engine.cursor(group)

    def get(self, group: str, key: bytes) -> bytes | None:
        return self._engine.get(group, key)

    def put(self, group: str, key: bytes, value: bytes) -> None:
        self._writes.append((group, key, value))

    def delete(self, group: str, key: bytes) -> None:
        self._writes.append((group, key, None))

    def commit(self) -> None:
        for group, key, value in self._writes:
            if value is None:
                self._engine.delete(group, key)
            else:
                self._engine.put(group, key, value)


class _Sorted:
    """A sorted map. Insertion takes O(n), by a memmove: fine for tests, and for caches of up to 10^5 keys."""

    __slots__ = ("keys", "values")

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.values: dict[bytes, bytes] = {}


class _MemoryCursor:
    __slots__ = ("_at", "_group")

    def __init__(self, group: _Sorted) -> None:
        self._group, self._at = group, -1

    def set_range(self, key: bytes) -> bool:
        self._at = bisect_left(self._group.keys, key)
        return self._at < len(self._group.keys)

    def key(self) -> bytes:
        return self._group.keys[self._at]

    def value(self) -> bytes:
        return self._group.values[self._group.keys[self._at]]

    def item(self) -> tuple[bytes, bytes]:
        key = self._group.keys[self._at]
        return key, self._group.values[key]

    def next(self) -> bool:
        self._at += 1
        return self._at < len(self._group.keys)

    def prev(self) -> bool:
        self._at -= 1
        return self._at >= 0

    def last(self) -> bool:
        self._at = len(self._group.keys) - 1
        return self._at >= 0


class MemoryEngine:
    """All groups of one tablet, in memory. It is its own view and batch: puts are visible at once.

    Attributes: `logs`: whether it keeps a log (E1).
    """

    logs: bool

    def __init__(self) -> None:
        self._groups: dict[str, _Sorted] = {}
        self.logs = False

    def _group(self, name: str) -> _Sorted:
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Sorted()
        return group

    def cursor(self, group: str) -> Cursor:
        return _MemoryCursor(self._group(group))

    def get(self, group: str, key: bytes) -> bytes | None:
        return self._group(group).values.get(key)

    def put(self, group: str, key: bytes, value: bytes) -> None:
        cells = self._group(group)
        if key not in cells.values:
            insort(cells.keys, key)
        cells.values[key] = value

    def delete(self, group: str, key: bytes) -> None:
        cells = self._group(group)
        if cells.values.pop(key, None) is not None:
            del cells.keys[bisect_left(cells.keys, key)]

    def middle(self, group: str, stop: bytes | None) -> bytes | None:
        """A row in the middle of a group's cells before `stop`, but not the first row; None: there is only one row, or
        none."""
        keys = self._group(group).keys
        if stop is not None:
            keys = keys[: bisect_left(keys, escape(stop))]
        for key in keys[len(keys) // 2 :]:
            if (row := unescape(key[:-TAIL_BYTES])) != unescape(keys[0][:-TAIL_BYTES]):
                return row
        return None

    def has_from(self, row: bytes) -> bool:
        """Whether there is any cell from a row on."""
        return any(group.keys and group.keys[-1] >= escape(row) for name, group in self._groups.items() if name != LOG)

    def copy_from(self, row: bytes) -> MemoryEngine:
        """A new engine with all cells from a row on."""
        other = MemoryEngine()
        other.logs = self.logs
        for name, group in self._groups.items():
            copied = other._group(name)
            if name == LOG:
                copied.keys = [key for key in group.keys if split_log_key(key)[0] >= escape(row)]
            else:
                copied.keys = group.keys[bisect_left(group.keys, escape(row)) :]
            copied.values = {key: group.values[key] for key in copied.keys}
        return other

    def remove_from(self, row: bytes) -> None:
        """Remove all cells from a row on."""
        for name, group in self._groups.items():
            if name == LOG:
                for key in [key for key in group.keys if split_log_key(key)[0] >= escape(row)]:
                    self.delete(LOG, key)
                continue
            at = bisect_left(group.keys, escape(row))
            for key in group.keys[at:]:
                del group.values[key]
            del group.keys[at:]

    def entries(self, group: str) -> int:
        return len(self._group(group).keys)

    def groups(self) -> list[str]:
        """The groups that hold any cells: in memory, an empty group does not exist."""
        return sorted(name for name, group in self._groups.items() if group.keys)
