"""Copies a tablet's rows, beginning at a key, into an environment of their own, while the tablet is being written to.

The groups are copied page by page, each page from a view of its own. Meanwhile, the tablet's commits are noted, and the
notes are applied to the copy, in order: however old a copied page is, later writes to its cells are applied after it.
So the copy may lag behind, and it never keeps the pages of the tablet's file from being reused.

P6  A compaction copies a whole tablet in the same way, and the copy replaces the tablet's files.
P2  The writer's thread notes a commit before the commit is answered. At the end, the tablet is *cut*: from then on, it
    holds back writes to the copied rows (P1). So when all notes have been applied, the copy holds the same cells as the
    tablet.
S2  The copy is complete and on disk before it is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from perco.errors import Unavailable
from perco.storage.cells import APPLIED, LOG, PROTOCOL_GROUPS, WRITE, Mutation, NoReply, Verdict, is_logged
from perco.storage.keys import TAIL_BYTES, cell_key, escape, log_key, split_log_key, unescape
from perco.storage.lmdb_engine import LmdbEngine, MapTooSmall
from perco.storage.lmdb_options import LmdbOptions

_CELLS: Final = 5_000  # in a page
_PAGE_BYTES: Final = 4 << 20
_SYNCED_BYTES: Final = 16 << 20  # copied between two syncs
_CELL_BYTES: Final = 64  # of a cell, besides its value
_KEYS: Final = 20_000  # read at a time, in the search for the middle
_NOTED_BYTES_MAX: Final = 64 << 20  # bytes of noted writes that have not been applied to the copy yet
_FEW: Final = 1_000  # noted writes that may be left for the cut, while writes to these rows wait
_ROUNDS: Final = 200


class Copying:
    """An unfinished copy. Call `note` on the writer's thread, and the rest on one thread at a time, not the loop's.

    Args:
        row, stop: the first row of the copy, and the first one after it (None: to the end).
        path: the empty folder of the copy's environment.
        whole: the copy replaces the source (P6), so it gets the marks in the source's environment too: its epoch (F1),
            and the first row that has moved to another tablet (P4).
    """

    row: bytes
    stop: bytes | None
    cells: int

    def __init__(
        self,
        source: LmdbEngine,
        row: bytes,
        stop: bytes | None,
        path: Path,
        groups: Sequence[str],
        options: LmdbOptions,
        *,
        whole: bool = False,
    ) -> None:
        self.row, self.stop, self._whole = row, stop, whole
        self._source = source
        self._groups = list(dict.fromkeys([*PROTOCOL_GROUPS, *groups, *source.groups()]))
        self._logs = LOG in self._groups  # E1
        self._copy = source.another(path, self._groups, replace(options, sync=False))
        self._noted: deque[tuple[str, bytes, bytes | None]] = deque()
        self._noted_bytes = self._applied_bytes = 0  # in total
        self._failure: Unavailable | None = None
        self._pages = self._all_pages()
        self._rounds = self._unsynced = 0
        self.cells = 0  # copied

    # ------------------------------------------------------------ the writer's thread

    def note(self, mutations: Sequence[Mutation], verdicts: Sequence[Verdict]) -> None:
        """Note the writes of a batch."""
        if self._failure is not None:
            return
        size = 0
        for mutation, verdict in zip(mutations, verdicts, strict=True):
            if isinstance(verdict, NoReply):
                self._failure = Unavailable(f"it is not known what was written meanwhile ({verdict.reason})")
            if verdict is not APPLIED:
                continue
            for row, _, writes in mutation.rows:
                if row < self.row or (self.stop is not None and row >= self.stop):
                    continue
                prefix = escape(row)
                for group, column, ts, value in writes:
                    if self._logs and group in (WRITE, LOG) and is_logged(column):
                        self._noted.append((LOG, log_key(prefix, column, ts), None if value is None else b""))
                    if group != LOG:
                        self._noted.append((group, cell_key(prefix, column, ts), value))
                    size += _CELL_BYTES + len(value or b"")
        self._noted_bytes += size
        if self._noted_bytes - self._applied_bytes > _NOTED_BYTES_MAX:
            self._failure = Unavailable(
                "rows were written faster than they could be copied", remedy="Try again when less is written."
            )

    # ------------------------------------------------------------ the copying thread

    def step(self) -> bool:
        """Copy a page. Returns whether the copy is complete, except for a few of the latest writes.

        Raises: Unavailable, StoreFull.
        """
        page = next(self._pages, None)
        if page is not None:
            self._put(page)
        self._apply_noted()
        if page is not None:
            self._unsynced += _size(page)
            if self._unsynced >= _SYNCED_BYTES:
                self._sync()
            return False
        if not self._rounds:
            self._sync()
        self._rounds += 1
        if self._rounds > _ROUNDS:
            raise Unavailable(
                "rows are written faster than they can be copied", remedy="Try again when less is written."
            )
        return len(self._noted) <= _FEW

    def _sync(self) -> None:
        """Sync the cells copied so far: one large sync at the end would hold up others that use the disk."""
        self._copy.sync()
        self._unsynced = 0

    def _put(self, cells: Sequence[tuple[str, bytes, bytes | None]]) -> None:
        try:
            self._copy.put_cells(cells)
        except MapTooSmall:
            full = self._copy.grow(2 * _size(cells), reserve=True)
            if full is not None:
                raise full from None
            self._put(cells)

    def _all_pages(self) -> Iterator[Sequence[tuple[str, bytes, bytes | None]]]:
        stop = None if self.stop is None else escape(self.stop)
        for group in list(self._groups):  # a group created meanwhile needs no page: its writes are noted
            if group == LOG:
                yield from self._log_pages(stop)
                continue
            key = escape(self.row)
            while True:
                with self._source.still:
                    found = self._source.cells_from(group, key, _CELLS, _PAGE_BYTES)
                page = [(group, at, value) for at, value in found if stop is None or at < stop]
                if not page:
                    break
                self.cells += len(page)
                yield page
                key = page[-1][1] + b"\0"

    def _log_pages(self, stop: bytes | None) -> Iterator[Sequence[tuple[str, bytes, bytes | None]]]:
        """The log's entries of the rows that are copied: the log is in the order of time, so all of it is read."""
        start, key = escape(self.row), b""
        while True:
            with self._source.still:
                found = self._source.keys_from(LOG, key, _CELLS)
            if not found:
                return
            page: list[tuple[str, bytes, bytes | None]] = []
            for at in found:
                prefix = split_log_key(at)[0]
                if prefix >= start and (stop is None or prefix < stop):
                    page.append((LOG, at, b""))
            self.cells += len(page)
            yield page
            key = found[-1] + b"\0"

    def _apply_noted(self) -> None:
        if self._failure is not None:
            raise self._failure
        cells = [self._noted.popleft() for _ in range(len(self._noted))]
        if cells:
            made = sorted({group for group, _, _ in cells}.difference(self._groups))
            self._copy.add_groups(made)
            self._groups += made
            self._put(cells)
            self._applied_bytes += _size(cells)

    def finish(self) -> None:
        """After the cut: apply the last notes, and sync the whole copy (S2)."""
        self._apply_noted()
        assert not self._noted, "P2: nothing is noted after the cut"
        if self._whole:
            self._copy.take_marks(self._source)
        self._copy.sync()
        self._copy.fill_up()

    def close(self) -> None:
        self._copy.close()

    def forget(self) -> None:
        """In a forked child: drop the copy, which is the parent's (S5)."""
        self._copy.forget()


def _size(cells: Sequence[tuple[str, bytes, bytes | None]]) -> int:
    return sum(len(value or b"") + _CELL_BYTES for _, _, value in cells)


def middle(engine: LmdbEngine, stop: bytes | None) -> Iterator[bytes | None]:
    """Search for a row before `stop` at which to split, in the middle of the cells. Yields None while the search goes
    on, and then the row; no row if all cells are in one row. Do not call this on the loop's thread."""
    left = engine.entries(WRITE) // 2
    key = b""
    first: bytes | None = None
    while True:
        with engine.still:
            keys = engine.keys_from(WRITE, key, min(_KEYS, left + 1) if left > 0 else _KEYS)
        if not keys or (stop is not None and keys[0] >= escape(stop)):
            return
        left -= len(keys)
        if first is None:
            first = unescape(keys[0][:-TAIL_BYTES])
        row = unescape(keys[-1][:-TAIL_BYTES])
        if left < 0 and row > first and (stop is None or row < stop):
            yield row
            return
        key = keys[-1] + b"\0"
        yield None
