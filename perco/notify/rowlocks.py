"""Advisory row locks: which task runs observers on which row.

N8  A scanner takes a row's lock before it runs observers there, and jumps elsewhere when it finds a row that another
    scanner has locked, in this process or in another (`Elsewhere`). The locks only save work: correctness depends on
    the acknowledgement alone (N3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from perco.errors import Corruption
from perco.protocol.records import unpack_cause
from perco.storage import ScanCell


class RowLocks:
    """(table, row) -> the scanner that holds the row's lock. There are at most as many locks as runs in flight."""

    __slots__ = ("_held", "_passed")

    def __init__(self) -> None:
        self._held: dict[tuple[str, bytes], int] = {}
        self._passed: set[tuple[str, bytes]] = set()  # locked rows that a scanner has passed since

    def take(self, table: str, row: bytes, scanner: int) -> bool:
        """Lock a row for a scanner. Returns False if it is held."""
        where = (table, row)
        if where in self._held:
            self._passed.add(where)
            return False
        self._held[where] = scanner
        return True

    def holder(self, table: str, row: bytes) -> int | None:
        return self._held.get((table, row))

    def passed(self, table: str, row: bytes) -> None:
        """Note that a scanner has found work in a locked row, and passes it."""
        assert (table, row) in self._held
        self._passed.add((table, row))

    def release(self, table: str, row: bytes) -> bool:
        """Returns whether a scanner has passed the row since it was locked."""
        where = (table, row)
        del self._held[where]
        if where not in self._passed:
            return False
        self._passed.remove(where)
        return True

    def __len__(self) -> int:
        return len(self._held)


CELLS_PER_ROW: Final = 4096  # notify cells that a scanner reads from a row

# The result of a claim on a row. FREE: no other process has it, but it was not granted. CLAIMED: this process has it.
# HELD: another process has it. DONE: another process had it a moment ago, for the same change.
FREE: Final = 0
CLAIMED: Final = 1
HELD: Final = 2
DONE: Final = 3


class Dirty(NamedTuple):
    """A row that waits for observers. `acks`: their acknowledgement columns; `newest`: the commit timestamp of the
    newest waiting change; `root`: the oldest cause of the waiting changes (N9); `failing`: whether the row counts among
    those that have failed before (N6)."""

    row: bytes
    acks: list[int]
    newest: int
    root: int
    failing: bool = False


def columns_of(cells: list[ScanCell]) -> Iterable[int]:
    """The acknowledgement columns of these notify cells of a row, each once."""
    return (cells[0][0],) if len(cells) == 1 else dict.fromkeys([column for column, _, _ in cells])


def newest_of(cells: list[ScanCell]) -> int:
    """The commit timestamp of the newest change in these notify cells."""
    return max(ts for _, ts, _ in cells)


def oldest_root(cells: list[ScanCell], acks: list[int]) -> int:
    """The oldest cause of the notify cells of these observers (N9); 0 if one of them cannot be read. If there are more
    cells than these, the runs themselves announce an older cause (`Elsewhere.carries`)."""
    try:
        return min((unpack_cause(value)[0] for column, _, value in cells if column in acks), default=newest_of(cells))
    except Corruption:
        return 0


class Elsewhere(Protocol):
    """Row locks among processes that run observers on one store."""

    def waits(self, where: tuple[str, bytes], newest: int, now: float) -> float:
        """The time until which this process should leave a row alone; 0: it need not wait. It should wait if another
        process has already seen the row's newest waiting change (`newest`), and will look at the row again by
        itself."""
        ...

    async def take(self, table: str, wanted: Sequence[Dirty], most: int, *, halts: bool) -> bytes:
        """Claim up to `most` rows of a table, in order; returns the result for each.

        Args:
            halts: once a row has been claimed, stop at the first row that another process has.

        Raises: Unavailable, SessionEnded.
        """
        ...

    async def carries(self, where: tuple[str, bytes], root: int) -> bool:
        """Announce, before a run on a claimed row changes anything, the oldest cause that it carries: an older one may
        have come to the row after the claim (N7). Returns False if another process has the row now.

        Raises: Unavailable, SessionEnded.
        """
        ...

    def release(self, where: tuple[str, bytes]) -> None: ...

    def let_go(self, where: tuple[str, bytes]) -> None:
        """Release this process's claim on a row, if it has one, because none of its tasks works on the row. (A task may
        have claimed the row, and then found it locked by another task of this process.)"""
        ...

    def full(self) -> None:
        """Announce that there is more to do than this process may run, so that another process looks for work."""
        ...

    def sleeps(self) -> None:
        """Announce that a scanner has found nothing that it may run, and goes to sleep."""
        ...

    def wants_hints(self, on: bool) -> None:
        """Announce whether this process wants to be told on which rows there may be work (N8)."""
        ...

    def works(self, ids: Iterable[str], runs: Iterable[str]) -> None:
        """Announce which observers this process has, and which of them it may run."""
        ...
