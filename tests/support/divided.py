"""Rows in a database that are in tablets as the catalogue says; each can be looked into, as a store's tablets are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from perco.storage import MemoryTablet, Mutation

Stored = tuple[bytes, str, int, int, bytes]  # row, group, column, timestamp, value


class Divided:
    """For a class of rows. `stored` gives all cells of a table at this moment."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._starts: dict[str, list[bytes]] = {}

    def stored(self, table: str) -> Iterator[Stored]:
        raise NotImplementedError

    def divide(self, catalogue: Any) -> None:
        self._starts = {name: [start for _, start, _ in entry.tablets()] for name, entry in catalogue.tables.items()}

    def locate(self, table: str, row: bytes) -> int:
        number: int = super().locate(table, row)  # type: ignore[misc]
        return 1000 * number + bisect_right(self._starts.get(table, [b""]), row)

    def bounds(self, table: str) -> list[bytes]:
        super().locate(table, b"")  # type: ignore[misc]
        return self._starts.get(table, [b""])

    def tablets(self) -> list[Any]:
        """In the place of a store's tablets."""
        found = []
        for table in self.tables():  # type: ignore[attr-defined]
            starts = self._starts.get(table, [b""])
            found += [_Look(self, table, *part) for part in zip(starts, [*starts[1:], None], strict=True)]
        return found

    def tablet(self, table: str, row: bytes) -> Any:
        return [tablet for tablet in self.tablets() if tablet.table == table and tablet.start <= row][-1]


class _Look:
    """A tablet: each call looks at what is stored at that moment."""

    def __init__(self, rows: Divided, table: str, start: bytes, stop: bytes | None) -> None:
        self.table, self.start, self._stop, self._rows = table, start, stop, rows
        self.queues = False

    def _now(self) -> MemoryTablet:
        tablet = MemoryTablet(self.table, self.start)
        for row, *write in self._rows.stored(self.table):
            if row >= self.start and (self._stop is None or row < self._stop):
                tablet.submit(Mutation(self.table, ((row, (), (tuple(write),)),)), _Ignored(), 0)  # type: ignore
        return tablet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)


class _Ignored:
    def answer(self, index: int, verdict: object) -> None:
        """The verdict of a write into a copy."""
