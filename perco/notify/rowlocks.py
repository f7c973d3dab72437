"""Advisory row locks: who is running observers on which row.

N8  A scanner takes a row's lock before it runs observers there, and jumps elsewhere when it meets a row that another
    scanner holds, of its own process or of another (`Elsewhere`). The locks save work and nothing else: correctness
    rests on the ack alone (N3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol


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


# What has become of a row that was asked for: it was free, and not given; it is this process's; it is another's; it was
# another's a moment ago, for the same change.
FREE: Final = 0
CLAIMED: Final = 1
HELD: Final = 2
DONE: Final = 3


class Dirty(NamedTuple):
    """A row that waits for observers. `acks`: which; `newest`: when the newest change was committed that waits there;
    `root`: the oldest cause of what does (N9)."""

    row: bytes
    acks: list[int]
    newest: int
    root: int


class Elsewhere(Protocol):
    """The same among processes that run observers on one store."""

    def waits(self, where: tuple[str, bytes], newest: int, now: float) -> float:
        """Until when a row is left alone, of which `newest` is the newest change that waits: another process has been
        there for that, and looks itself whether something is left to do; 0: it need not be left alone."""
        ...

    async def take(self, table: str, wanted: Sequence[Dirty], most: int, *, halts: bool) -> bytes:
        """Claim up to so many rows of a table, in order; what has become of each.

        Args:
            halts: once one has been claimed, no more are from the first one on that another process has.

        Raises: Unavailable, SessionEnded.
        """
        ...

    def release(self, where: tuple[str, bytes]) -> None: ...

    def let_go(self, where: tuple[str, bytes]) -> None:
        """Of a row on which no task of this process works: should it have been claimed for another task, which found
        it taken here, it is released."""
        ...

    def full(self) -> None:
        """There is more to do than this process may run: another one is to look."""
        ...

    def sleeps(self) -> None:
        """A scanner has found nothing that it may run, and sleeps."""
        ...

    def works(self, ids: Iterable[str], runs: Iterable[str]) -> None:
        """Which observers this process has, and which of them it may run."""
        ...
