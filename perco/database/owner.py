"""The interface of a database to the store's owner, which is this process or another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from perco.clock.loopwatch import LoopStatistics
from perco.history.vacuumed import VacuumResult, VacuumStatistics
from perco.notify.backfill import BackfillProgress
from perco.notify.concerned import Freshness
from perco.notify.lagging import Lag
from perco.storage import Tablet
from perco.tablets.compactor import Compacted
from perco.tablets.loading import BulkLoad, Files, Published
from perco.tablets.splitter import Split


class Now(NamedTuple):
    """The state of the store at one moment: whether it is idle (N7), and how many changes wait or are on the failed
    list."""

    idle: bool
    pending: int
    failed: int


class Owner(Protocol):
    """Loop thread only. The methods are like those of the same name in `Database`.

    Attributes: `is_here`, True if this process is the owner, or reads the owner's files beside it.
    """

    is_here: bool

    async def vacuum(self, progress: Callable[[VacuumResult], None] | None) -> VacuumResult: ...

    async def backfill(self, progress: Callable[[BackfillProgress], None] | None) -> list[BackfillProgress]: ...

    async def split(self, table: str, row: bytes | None) -> Split: ...

    async def compact(self, table: str | None) -> list[Compacted]: ...

    async def folder_and_id(self) -> tuple[str, str]:
        """The path of the store's folder, and its id; "": it has none. Raises: UsageError for a store in memory."""
        ...

    async def begin_load(self, tables: Sequence[str], build: str = "") -> BulkLoad: ...

    async def publish_load(self, id: str, files: Files) -> Published: ...

    async def end_load(self, id: str) -> None: ...

    async def now(self) -> Now: ...

    async def wait_idle(self) -> int: ...

    async def wait_for(self, ts: int, without: Sequence[int] | None) -> dict[str, int]:
        """
        Args:
            without: for a wait for views: numbers of observers that are not concerned.

        Returns how many of the changes are on the failed list, by observer (V14).
        """
        ...

    async def freshness(self, withouts: Sequence[Sequence[int]]) -> list[Freshness]:
        """For each of several views, given by the observers that are not concerned with it: how fresh it is (V14)."""
        ...

    async def lag(self) -> dict[str, Lag]:
        """How far each observer lags behind, by id."""
        ...

    async def workers_now(self) -> dict[str, int]:
        """How many processes with a worker have each observer, by id, as far as is known."""
        ...

    def tablets(self) -> Sequence[Tablet]:
        """The tablets that this process has open."""
        ...

    def statistics(self) -> tuple[LoopStatistics, VacuumStatistics]:
        """Statistics of this process's loop, and of the vacuum if it runs here."""
        ...

    async def aclose(self) -> None:
        """Stop background tasks, write queued mutations, release the folder or the connection."""
        ...
