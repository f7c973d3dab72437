"""Advisory row locks: who is running observers on which row.

N8  A scanner takes a row's lock before it runs observers there, and jumps elsewhere when it meets a row that another
    scanner holds. The locks save work and nothing else: correctness rests on the ack alone (N3).
"""

from __future__ import annotations

from typing import Protocol


class RowLocks:
    """(table, row) -> the scanner that holds it. Bounded by the runs in flight."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[tuple[str, bytes], int] = {}

    def take(self, table: str, row: bytes, scanner: int) -> bool:
        """Whether nobody had it, and the scanner has it now."""
        where = (table, row)
        if where in self._held:
            return False
        self._held[where] = scanner
        return True

    def holder(self, table: str, row: bytes) -> int | None:
        return self._held.get((table, row))

    def release(self, table: str, row: bytes) -> None:
        del self._held[table, row]

    def __len__(self) -> int:
        return len(self._held)


class Elsewhere(Protocol):
    """The same among processes that run observers on one store."""

    def waits(self, where: tuple[str, bytes], now: float) -> float:
        """Until when a row is left alone, for another process had it; 0: it need not be."""
        ...

    async def take(self, where: tuple[str, bytes], root: int) -> bool:
        """Whether no other process has it, and this one does now; `root`: the oldest cause of what waits there (N9)."""
        ...

    def release(self, where: tuple[str, bytes]) -> None: ...

    def woken(self) -> None:
        """Some row has been let go of."""
        ...
