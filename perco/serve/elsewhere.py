"""A worker process's view of the other worker processes: the rows on which they run observers. It also reports the rows
of its own process, and whether this process has room for more (N8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import trio

from perco.notify.rowlocks import CLAIMED, DONE, FREE, HELD, Dirty
from perco.rpc.link import Link
from perco.serve.messages import CLAIMS_MAX, Method
from perco.serve.together import Together

_HELD_S: Final = 1.0  # how long to leave a row to the process that has it; not longer, because that process may die
_HELD_MAX: Final = 4096  # how many such rows are remembered


class Elsewhere:
    """See `perco.notify.rowlocks.Elsewhere`."""

    told_of_hints: bool

    def __init__(self, link: Link, together: Together | None, shared: Callable[[str], str] = str) -> None:
        """
        Args:
            shared: of an observer's id, the one by which processes speak of it to each other (N18).
        """
        self._link, self._together, self._shared = link, together, shared
        if together is not None:
            together.dropped = self._dropped
        # Rows that other processes had: the newest change that they saw there, and until when to leave the row alone.
        self._held: dict[tuple[str, bytes], tuple[int, float]] = {}
        # Rows that this process has: the newest change and the oldest cause that wait there. A row that is still being
        # claimed is not among them, because the claiming call is repeated after a lost connection.
        self.claims: dict[tuple[str, bytes], tuple[int, int]] = {}
        self._asking = 0  # calls that claim rows and are under way
        self._freed = False  # rows were released during these calls, so the answers may name former holders
        self._woken = self._full = False
        self.told_of_hints = False  # whether the owner has been told whether this process wants hints

    def waits(self, where: tuple[str, bytes], newest: int, now: float) -> float:
        found = self._held.get(where)
        if found is None:
            return 0
        if found[0] < newest or found[1] <= now:
            del self._held[where]
            return 0
        return found[1]

    async def take(self, table: str, wanted: Sequence[Dirty], most: int, *, halts: bool) -> bytes:
        states = b""
        held: list[tuple[bytes, int]] = []  # rows that others have
        taken: list[tuple[str, bytes]] = []
        left = most
        self._asking += 1
        try:
            while len(states) < len(wanted):
                if not left or (halts and states.rfind(HELD) > states.find(CLAIMED) >= 0):
                    states += bytes([FREE]) * (len(wanted) - len(states))
                    break
                part = wanted[len(states) : len(states) + CLAIMS_MAX]
                told, others = await self._claim(table, part, left, halts=halts)
                for dirty, state in zip(part, told, strict=True):
                    if state == CLAIMED:
                        left -= 1
                        if (table, dirty.row) not in self.claims:
                            taken.append((table, dirty.row))
                        self.claims[table, dirty.row] = dirty.newest, dirty.root
                states += told
                held += others
        except BaseException:
            for where in taken:
                self.claims.pop(where, None)
            for dirty in wanted:
                if (table, dirty.row) not in self.claims:
                    self.release((table, dirty.row))  # the claim may have arrived
            raise
        finally:
            self._asking -= 1
            freed = self._freed
            self._freed = freed and self._asking > 0
        until = trio.current_time() + _HELD_S
        for row, newest in () if freed else held:
            self._held[table, row] = newest, until
        for dirty, state in zip(wanted, states, strict=True):
            if state in (HELD, DONE) and not freed:
                self._held[table, dirty.row] = dirty.newest, until
        while len(self._held) > _HELD_MAX:
            del self._held[next(iter(self._held))]
        return states

    async def _claim(
        self, table: str, wanted: Sequence[Dirty], most: int, *, halts: bool
    ) -> tuple[bytes, Sequence[tuple[bytes, int]]]:
        """Make one call. Returns each row's state, and rows that other processes have."""
        asked = tuple([(dirty.row, dirty.newest, dirty.root) for dirty in wanted])
        states: bytes
        if self._together is not None:
            states, held = await self._together.claim(table, asked, most, halts=halts)
        else:
            states, held = await self._link.call(Method.CLAIM, (table, asked, most, halts), again=True)
        return states, held

    async def carries(self, where: tuple[str, bytes], root: int) -> bool:
        newest, known = self.claims.get(where, (0, root))
        if known <= root:
            return True
        self.claims[where] = newest, root  # so that the claim is also repeated with this cause (R8)
        [state], _ = await self._claim(where[0], [Dirty(where[1], [], newest, root)], 1, halts=False)
        return state == CLAIMED

    def release(self, where: tuple[str, bytes]) -> None:
        self.claims.pop(where, None)
        self._link.tell(Method.UNCLAIM, where)

    def let_go(self, where: tuple[str, bytes]) -> None:
        if where in self.claims:
            self.release(where)

    def _dropped(self, where: tuple[str, bytes]) -> None:
        """Release a row that was claimed for a task that has been cancelled since, unless another task of this process
        has it."""
        if where not in self.claims:
            self._link.tell(Method.UNCLAIM, where)

    def released(self) -> None:
        """Forget which rows others have: another process has released rows. It has not looked there for changes whose
        observers only this process may run."""
        self._held.clear()
        self._freed = self._asking > 0

    def forget(self) -> None:
        """Forget which rows others have."""
        self._held.clear()
        self._woken = True  # so `sleeps` notifies the server when there is nothing more to do
        self._full = False

    def woken(self) -> None:
        """Record that the server has said that there may be work, and waits for an answer."""
        self._woken = True

    def full(self) -> None:
        if not self._full:
            self._full, self._woken = True, False
            self._link.tell(Method.LOOKED, True)

    def sleeps(self) -> None:
        if self._full or self._woken:
            self._full = self._woken = False
            self._link.tell(Method.LOOKED, False)

    def wants_hints(self, on: bool) -> None:
        self.told_of_hints = True
        self._link.tell(Method.HINTS, on)

    def works(self, ids: Iterable[str], runs: Iterable[str]) -> None:
        self._link.tell(Method.WORKS, (tuple(map(self._shared, ids)), tuple(map(self._shared, runs))))
