"""Bulk loads: tablets whose files other processes make, and that appear in the store in one step.

    begin                a commit timestamp is reserved, far above all others; a folder for the files is made
    SortedFile           any number of processes write all cells at that timestamp (`sorting.py`)
    publish              the files become tablets of their tables, and the oracle goes on above that timestamp

P7  Until the publication is recorded, no timestamp at or above the reserved one is handed out, so no reader sees a part
    of the load. One mutation of the system table records all tablets and the oracle's new bound, which is the reserved
    timestamp. In the step in which the tablets are in use, the oracle goes on above it: a reader sees nothing of the
    load, or all of it.
    The tables must be empty. Writes to them wait during the publication (P1), and it fails if one came before. So a
    transaction that began before finds, when it commits, the records of the load, and conflicts (T7).
    If the process ends before the record is made, it leaves folders that are never read. A load that is not published
    leaves no trace in the store.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio

from perco.clock.oracle import Oracle, Still
from perco.errors import Corruption, StoreError, Unavailable, UsageError
from perco.schema import building
from perco.schema.catalogue import CATALOGUE_ROW, SYSTEM_TABLE, Catalogue, load, raise_for
from perco.storage import (
    ABSENT,
    APPLIED,
    DATA,
    PROTOCOL_GROUPS,
    TS_MAX,
    WRITE,
    Mutation,
    NoReply,
    Refused,
    ScanQuery,
    ScanRequest,
    Tablet,
)
from perco.tablets.local import LocalStore
from perco.tablets.splitter import Splitter
from perco.txn.background import Background

log: logging.Logger = logging.getLogger("perco.load")

AHEAD: Final = 1 << 31
"""Timestamps that may be drawn while the files are made. (The oracle has 2^53 in all.)"""
UNFINISHED_MAX: Final = 16
"""Bulk loads of a store that have begun and not ended."""
FILES_MAX: Final = 10_000
"""Of one load."""
TOKEN_FILE: Final = "token"
DATA_FILE: Final = "data.mdb"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_TRIES: Final = 16
_AGAIN_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class BulkLoad:
    """A bulk load that has begun.

    Attributes:
        id: its name.
        ts: the timestamp of all its cells.
        path: the folder for its files: each file is `path/NAME/data.mdb`.
        token: the contents of the file `token` in that folder. A process that finds another one there is on another
            machine.
    """

    id: str
    ts: int
    path: str
    token: str

    def check(self) -> None:
        """Raises: UsageError if this process does not see the store's folder."""
        try:
            found = (Path(self.path) / TOKEN_FILE).read_text()
        except OSError:
            found = ""
        if found != self.token:
            raise UsageError(
                f"a bulk load writes its files into the store's folder, and this process does not find {self.path}: "
                "the load has ended, or the store is on another machine; load in transactions there"
            )


@dataclass(frozen=True, slots=True)
class Published:
    """The result of a bulk load: the timestamp of its commit, the number of its tablets, and for how many seconds
    writes to these tables waited."""

    ts: int
    tablets: int
    paused_s: float


Files = Mapping[str, Sequence[tuple[bytes, str]]]
"""By table: for each file, its first row, as stored, and its name; in the order of the rows."""


@dataclass(slots=True)
class _Begun:
    load: BulkLoad
    tables: Sequence[str]
    observers: set[tuple[str, int, str, str]]  # of these tables
    build: str  # the build of views to which it belongs (N10); "": none
    building: set[str]  # ids of the observers that are being built by it
    gone: set[tuple[str, int]]  # the columns that had been dropped from the tables

    def check(self, catalogue: Catalogue) -> None:
        """Raises: UsageError if observers are not as they were when the load began."""
        if self.observers != _observers(catalogue, self.tables):
            raise UsageError("observers of these tables were registered or dropped since the load began: begin again")
        if self.gone != _columns(catalogue, self.tables):
            raise UsageError("columns of these tables were dropped since the load began: begin again")
        if self.building != building.of(catalogue, self.build):
            raise UsageError("observers that are being built were resumed or dropped, or another build has begun")

    def after(self, catalogue: Catalogue, files: Files) -> Catalogue:
        """The next version of the catalogue, with the tablets."""
        wanted = catalogue.with_splits({table: [row for row, _ in made] for table, made in files.items()})
        return building.published(wanted, self.build, self.load.ts)


class BulkLoads:
    """One per opened store. `adopt`: adopts a version of the catalogue; `notified`: observers may have work."""

    def __init__(
        self,
        local: LocalStore,
        splitter: Splitter,
        background: Background,
        oracle: Oracle,
        adopt: Callable[[Catalogue], Awaitable[None]],
        notified: Callable[[], None],
    ) -> None:
        self._local, self._splitter, self._background, self._oracle = local, splitter, background, oracle
        self._adopt, self._notified = adopt, notified
        self._begun: dict[str, _Begun] = {}

    async def begin(self, tables: Sequence[str], build: str = "") -> BulkLoad:
        """Begin a load into these tables, which must be empty. `build`: the build of views to which it belongs.

        Raises: UsageError if they are not, or the store takes no bulk loads; StoreFull.
        """
        self._local.must_take_files()
        catalogue = await load(self._local.store)
        for table in tables:
            self._empty_tablet(catalogue, table)
        if len(self._begun) >= UNFINISHED_MAX:
            raise UsageError(
                f"{UNFINISHED_MAX} bulk loads of this store have begun and not ended: end them, or close the store"
            )
        ts = max([self._oracle.last, *(each.load.ts for each in self._begun.values())]) + AHEAD
        if ts >= TS_MAX:
            raise StoreError("the store has used up its timestamps")
        id, token = secrets.token_hex(8), secrets.token_hex(16)
        begun = self._begun[id] = _Begun(
            *(BulkLoad(id, ts, "", token), tables, _observers(catalogue, tables), build),
            *(building.of(catalogue, build), _columns(catalogue, tables)),
        )
        try:
            path = await trio.to_thread.run_sync(partial(self._local.begin_load, id, token))
        except BaseException:
            del self._begun[id]
            raise
        begun.load = BulkLoad(id, ts, str(path), token)
        return begun.load

    async def end(self, id: str) -> None:
        """Remove what a load has left; nothing, if it has ended."""
        if self._begun.pop(id, None) is not None:
            await trio.to_thread.run_sync(self._local.end_load, id)

    async def publish(self, id: str, files: Files) -> Published:
        """Make files tablets of their tables, all in one step. The load has then ended, even if this raises.

        Raises: UsageError if a table is no longer empty, a file is not what it should be, or the load took too long;
        StoreFull, Unavailable. Nothing has then been published.
        """
        begun = self._begun.get(id)
        if begun is None:
            raise UsageError("this bulk load has ended, or the store was opened again since it began: begin again")
        _check_files(files, begun.tables)
        del self._begun[id]

        async def act() -> Published:
            async with self._splitter.alone():
                return await self._publish(begun, files)

        try:
            if not any(files.values()):
                return Published(self._oracle.last, 0, 0.0)
            return await self._background.apart(act, "bulk load")
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._local.end_load, id)

    def _empty_tablet(self, catalogue: Catalogue, table: str) -> Tablet:
        entry = catalogue.tables.get(table)
        if entry is None:
            known = ", ".join(sorted(catalogue.tables)) or "none"
            raise UsageError(f"there is no table {table!r} in this store; there are: {known}")
        store = self._local.store
        if any(store.tablet(table, row).has_from(row) for row in store.bounds(table)):
            raise UsageError(
                f"a bulk load takes a table without any rows, and {table!r} has some (or old versions of some): load "
                "in transactions"
            )
        if entry.splits:
            raise UsageError(f"a bulk load takes a table with one tablet, and {table!r} has been split already")
        return store.tablet(table, b"")

    # ------------------------------------------------------------ publishing

    async def _publish(self, begun: _Begun, files: Files) -> Published:
        local, store = self._local, self._local.store
        files = {table: made for table, made in files.items() if made}
        newest = await load(store)
        begun.check(newest)
        wanted = begun.after(newest, files)
        cut: list[Tablet] = []
        placed: list[tuple[str, int]] = []
        new: list[tuple[Tablet, list[Tablet]]] = []
        recording = recorded = False
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(local.changing)
                opened = stack.enter_context(ExitStack())
                for table, made in files.items():
                    tablets: list[Tablet] = []
                    for (row, name), (_, stop) in zip(made, _bounds(made), strict=True):
                        number = wanted.tables[table].added[row]
                        placed.append((table, number))
                        file = Path(begun.load.path) / name / DATA_FILE
                        tablets.append(await local.open_loaded(file, table, (number, row, stop), opened))
                        _check_rows(tablets[-1], name, row, stop)
                    new.append((store.tablet(table, b""), tablets))
                paused = trio.current_time()
                for tablet, tablets in new:
                    cut.append(tablet)
                    await self._cut(tablet, tablets[0].start, Path(begun.load.path) / f"cut {len(cut)}")
                    self._empty_tablet(newest, tablet.table)
                still = await stack.enter_async_context(self._oracle.still())
                if still.bound >= begun.load.ts - 1:
                    raise UsageError(
                        "another bulk load was published since this one began, or too many timestamps were drawn: "
                        "begin again"
                    )
                recording = True
                with trio.CancelScope(shield=True):
                    catalogue = await self._recorded(wanted, begun, files, still)
                recorded = True
                opened.pop_all()
                # P7: no await from the record on, so no timestamp is handed out before the tablets are in use.
                still.jump(begun.load.ts)
                for tablet, tablets in new:
                    for each in reversed(tablets):
                        each.floor = tablet.floor
                        store.add_split(tablet, each)
                    store.submit_held(tablet.let_go())
        except BaseException as error:
            if recorded or (recording and not isinstance(error, StoreError | UsageError)):
                raise AssertionError("P7: it is unknown whether the load is published") from error
            with trio.CancelScope(shield=True):
                for tablet in cut:
                    await tablet.uncut()
                await local.drop_loaded(placed)
            raise
        paused_s = trio.current_time() - paused
        log.info("a bulk load of %d tablets was published; writes waited for %.0f ms", len(placed), 1000 * paused_s)
        for tell in self._splitter.on_split:
            tell()
        await self._adopt(catalogue)
        self._notified()
        return Published(begun.load.ts, len(placed), paused_s)

    async def _cut(self, tablet: Tablet, row: bytes, scratch: Path) -> None:
        """Hold the writes to a tablet from a row on (P1). The tablet is empty, so there are no rows to copy."""
        await trio.to_thread.run_sync(scratch.mkdir)
        await tablet.copy_from(row, None, scratch, PROTOCOL_GROUPS)
        await tablet.cut(row)

    async def _recorded(self, wanted: Catalogue, begun: _Begun, files: Files, still: Still) -> Catalogue:
        """Record the tablets and the oracle's bound. Returns the catalogue with the tablets. Raises: StoreError,
        UsageError, if they are certainly not recorded."""
        store, ts = self._local.store, begun.load.ts
        table, made = next(iter(files.items()))
        for _ in range(_TRIES):
            put = (DATA, 0, wanted.version, wanted.pack())
            row = (CATALOGUE_ROW, ((ABSENT, DATA, 0, wanted.version, TS_MAX),), (put,))
            [verdict] = await store.apply([Mutation(SYSTEM_TABLE, (row, still.row(ts)), None, True)])
            if verdict is APPLIED:
                return wanted
            while True:  # another process has changed the catalogue, or it is not known whether this was written
                try:
                    newest = await load(store)
                    break
                except Unavailable:
                    await trio.sleep(_AGAIN_S)
            if made[0][0] in newest.tables[table].splits:
                return newest
            if not isinstance(verdict, Refused | NoReply):
                raise_for(verdict, "a bulk load")
            begun.check(newest)
            after = begun.after(newest, files)
            assert all(after.tables[name].added == wanted.tables[name].added for name in files), "P4"
            wanted = after
            await trio.sleep(_AGAIN_S)
        raise Unavailable("the catalogue, or the oracle's bound, kept changing, so the bulk load was not published")


def _observers(catalogue: Catalogue, tables: Sequence[str]) -> set[tuple[str, int, str, str]]:
    return {(id, e.number, e.table, e.column) for id, e in catalogue.observers.items() if e.table in tables}


def _columns(catalogue: Catalogue, tables: Sequence[str]) -> set[tuple[str, int]]:
    """The columns that were dropped from these tables (N17), by number."""
    return {(table, number) for table in tables for number in catalogue.tables[table].gone}


def _bounds(made: Sequence[tuple[bytes, str]]) -> list[tuple[bytes, bytes | None]]:
    rows = [row for row, _ in made]
    return list(zip(rows, [*rows[1:], None], strict=True))


def _check_files(files: Files, tables: Sequence[str]) -> None:
    """Raises: UsageError unless these are names of files for the tables, in the order of their rows."""
    for table, made in files.items():
        if table not in tables:
            raise UsageError(f"this bulk load did not begin with table {table!r}")
        if len(made) > FILES_MAX:
            raise UsageError(f"a bulk load has at most {FILES_MAX} files for a table, not {len(made)}")
        rows = [row for row, _ in made]
        if rows != sorted(set(rows)) or b"" in rows or not all(_NAME.fullmatch(name) for _, name in made):
            raise UsageError(f"the files of a bulk load into {table!r} are not in the order of their rows")


def _check_rows(tablet: Tablet, name: str, row: bytes, stop: bytes | None) -> None:
    """Raises: UsageError unless a file has rows from `row` on, and none from `stop` on."""
    query = ScanQuery(WRITE, None, 0, TS_MAX, 1)
    try:
        above = stop is not None and tablet.has_from(stop)
        below = tablet.scan(ScanRequest(tablet.table, b"", row, (query,), False, 1)).rows
        right = tablet.entries(WRITE) and not above and not below
    except Corruption as error:
        raise UsageError(f"the file {name!r} of this bulk load cannot be read: {error}") from error
    if not right:
        raise UsageError(f"the file {name!r} of this bulk load does not have the rows from {row!r:.100} on")
