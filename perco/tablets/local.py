"""Opens the row store behind a URL: `memory:` or a folder of LMDB tablets.

P4  A split proceeds in this order: the whole copy is on disk; the new tablet is recorded; it takes over the rows;
    they are removed from the old tablet. If the process dies before the record is made, it leaves a folder that is
    never read, and that the next split with the same number removes. If it dies afterwards, it leaves rows in the old
    tablet that are never read.
    The first tablets of a table are made after the table has been recorded. Then a note in the system table says that
    they have been made. If a tablet that was added by a split, or that such a note covers, is missing, it has been
    lost, and the store is not opened.
P6  A compaction copies a whole tablet in the same way as a split copies a part of one. Writes wait while the folder is
    renamed and the copy is opened. There is no record: the names of the folders alone tell which files are valid.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

import trio

from perco.errors import (
    Corruption,
    PercoError,
    StoreError,
    TransactionClosed,
    Unavailable,
    UnsuitableFolder,
    UsageError,
    UsedAfterFork,
)
from perco.schema.catalogue import SYSTEM_TABLE, Catalogue
from perco.storage import (
    DATA,
    LOG,
    PROTOCOL_GROUPS,
    BatchOptions,
    Folder,
    LmdbEngine,
    LmdbOptions,
    LmdbTablet,
    LocalRowStore,
    MemoryTablet,
    Mutation,
    Tablet,
)
from perco.storage.damaged import DamagedTablet
from perco.storage.folder import doubt_of, tablet_path
from perco.storage.tablet import Resubmit


class Elsewhere(Protocol):
    """The other processes that have this store's tablets open. They have all of them, except the system table's."""

    def tablet(
        self,
        table: str,
        number: int,
        start: bytes,
        stop: bytes | None,
        groups: Sequence[str],
        resubmit: Resubmit,
    ) -> Tablet:
        """A tablet that is on disk already. `resubmit`: submits a call's next mutations."""
        ...

    def begin(self, tablet: Tablet) -> None:
        """Allow writes to a tablet that has been recorded."""
        ...

    def begin_after(self, tablet: Tablet, other: Tablet) -> None:
        """Like `begin`, but for `other`, and only once `tablet`, which had these rows before, answers no more requests
        for them (P1)."""
        ...

    def abandon(self, tablet: Tablet) -> None:
        """Close a tablet for which `begin` has not been called."""
        ...

    async def aclose(self) -> None: ...


Placed = tuple[int, bytes, "bytes | None"]  # number, first row, first row of the next one

RESTORE: Final = "restore the whole folder from one copy"
_MADE: Final = b"made/"  # followed by a table's name: its first tablets have been made
_ADDRESS: Final = re.compile(r"([^:/]+|\[[0-9A-Fa-f:.]+\]):[0-9]+$")
_LOOKS = 10  # attempts to open files that are being renamed

_stores: weakref.WeakSet[LocalStore] = weakref.WeakSet()


class LocalStore:
    """The row store of this process, and its folder, if any.

    Attributes: `store`, the row store; `readonly`; `path`, None for memory; `changing`, held while a table is changed.
    """

    store: LocalRowStore
    changing: trio.Lock
    forked: bool
    id: str
    remote = False

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        durable: bool,
        readonly: bool,
        accept_loss: bool,
        lmdb: LmdbOptions,
        batch: BatchOptions,
        shared: bool = False,
        elsewhere: Elsewhere | None = None,
        damaged: Mapping[Path, Corruption] = MappingProxyType({}),
    ) -> None:
        self.store = LocalRowStore()
        self._damaged = damaged  # folders of tablets that must not be opened, and why
        self._elsewhere = elsewhere
        self.readonly = readonly
        self._batch = batch
        self._lmdb = replace(lmdb, sync=durable)
        self._folder: Folder | None = None
        self.id = ""  # of the store in the folder (I1)
        self._groups: dict[str, set[str]] = {}
        self._numbers: dict[str, dict[int, bytes]] = {}  # by table and number, the first rows of the open tablets
        self.changing = trio.Lock()
        self.forked, self._thread = False, threading.get_ident()
        self.path: Path | None = None
        text = os.fspath(url)
        if text == "memory:":
            if readonly:
                raise UsageError("a memory: store begins empty; there is nothing to read in it with readonly=True")
        else:
            self.path = _path_of(text)
            if readonly:
                self._folder = Folder.beside(self.path, accept_loss=accept_loss)
            else:
                _refuse_address(text, self.path)
                self._folder = Folder.claim(self.path, durable=durable, accept_loss=accept_loss, shared=shared)
            self.id = self._folder.id
        _stores.add(self)
        try:
            # The system tablet is made before all others: if there are others, but not this one, it has been lost.
            lost = self._folder is not None and bool(self._folder.tablet_paths())
            self._add(SYSTEM_TABLE, [(0, b"", None)], (), there=(0,) if lost else (), sync=True)
            if SYSTEM_TABLE not in self._groups:
                raise UnsuitableFolder(
                    str(self.path),
                    "there are no tablets in it: the process that makes it was stopped or is still at work, or they "
                    f"were removed. Open it for writing to begin with an empty store, or {RESTORE}",
                )
        except BaseException:
            self.abandon()
            raise

    @property
    def threaded(self) -> bool:
        """Whether writers run on threads: only if there is a folder."""
        return self._folder is not None

    @property
    def owner_alive(self) -> bool:
        """For a store opened beside its owner: whether a process is writing to it now."""
        return self._folder is not None and self.readonly and self._folder.owned_by_another()

    @property
    def term(self) -> bytes:
        """For a store opened beside its owner: the term of the current or last owner; else empty."""
        return self._folder.term() if self._folder is not None and self.readonly else b""

    def _add(
        self,
        table: str,
        placed: Sequence[Placed],
        groups: Sequence[str],
        *,
        there: Collection[int] = (),
        sync: bool | None = None,
    ) -> None:
        """Open a table's tablets, or make them. `there`: numbers of the tablets that have already been made; if one of
        them is missing, it has been lost (P4)."""
        every = [*PROTOCOL_GROUPS, *groups]
        if self._folder is not None:
            for number in there:
                self._must_be_there(table, number)
            options = self._lmdb if sync is None else replace(self._lmdb, sync=sync)
            paths = [
                self._folder.make_tablet_folder(table, number, lambda making: LmdbEngine.make(making, every, options))
                for number, _, _ in placed
            ]
            if self.readonly and not all(path.exists() or path in self._damaged for path in paths):
                return  # the owner has declared the table, but not made its tablets yet
        tablets: list[Tablet] = []
        with ExitStack() as opened:  # closes all after a failure: LMDB cannot open a file twice in a process
            for each in placed:
                tablets.append(self._opened(table, each, every, opened, sync=sync))
            opened.pop_all()
        if self._elsewhere is not None and table != SYSTEM_TABLE:
            for tablet in tablets:
                self._elsewhere.begin(tablet)
        self.store.add_table(table, tablets)
        self._groups[table] = set(groups)

    def _must_be_there(self, table: str, number: int) -> None:
        """Raise Corruption if a tablet that has been made is missing (P4)."""
        assert self._folder is not None
        for _ in range(_LOOKS):  # its owner may be compacting it (P6)
            path = tablet_path(self._folder.path, table, number)
            if path in self._damaged or _bytes_of(path / "data.mdb"):
                return
        known = "there are tablets beside it" if table == SYSTEM_TABLE else f"the catalogue has table {table!r}"
        what = "its data.mdb is missing, or empty" if path.exists() else "it is missing"
        raise Corruption(str(path), f"{what}, and {known}: {RESTORE}")

    def _opened(
        self,
        table: str,
        placed: Placed,
        every: Sequence[str],
        opened: ExitStack,
        *,
        sync: bool | None = None,
    ) -> Tablet:
        """Open an existing tablet."""
        number, start, stop = placed
        numbers = self._numbers.setdefault(table, {})
        tablet: Tablet
        if self._elsewhere is not None and table != SYSTEM_TABLE:
            tablet = self._elsewhere.tablet(table, number, start, stop, every, self.store.submit)
            opened.callback(self._elsewhere.abandon, tablet)
            numbers[number] = start
            return tablet
        if self._folder is None:
            numbers[number] = start
            memory = MemoryTablet(table, start)
            memory.engine.logs = LOG in every
            return memory
        options = self._lmdb if sync is None else replace(self._lmdb, sync=sync)
        path = tablet_path(self._folder.path, table, number)
        if path in self._damaged:
            numbers[number] = start
            return DamagedTablet(table, start, self._damaged[path])
        engine = self._engine_at(table, number, every, options)
        opened.callback(engine.close)
        if not self.readonly:
            engine.clear_dead_readers()
        tablet = LmdbTablet(table, start, engine, self._batch, self.store.submit, self.store.handover)
        numbers[number] = start
        return tablet

    def _engine_at(self, table: str, number: int, every: Sequence[str], options: LmdbOptions) -> LmdbEngine:
        """Open a tablet's environment, even if its files are being replaced."""
        assert self._folder is not None
        lock = not self._folder.without_lock
        for _ in range(_LOOKS):
            path = tablet_path(self._folder.path, table, number)
            try:
                return LmdbEngine(path, every, options, readonly=self.readonly, lock=lock)
            except UnsuitableFolder:
                if tablet_path(self._folder.path, table, number) == path and path.exists():
                    raise  # else its owner has just compacted it (P6)
        raise Unavailable(f"{path} is being compacted")

    async def adapt(self, catalogue: Catalogue) -> None:
        """Open, or make, the tablets and groups that a catalogue names.

        Raises: Corruption, if a tablet that has been made is missing.
        """
        new = [name for name in catalogue.tables if name not in self._groups]
        made = await self._made(new)
        for name, entry in catalogue.tables.items():
            groups = catalogue.all_groups(name)
            if name not in self._groups:
                numbers = [number for number, _, _ in entry.tablets()] if name in made else entry.added.values()
                self._add(name, entry.tablets(), groups, there=numbers)
                continue
            if set(groups) - self._groups[name]:
                async with self.changing:
                    missing = set(groups) - self._groups[name]
                    for tablet in self.store.tablets():
                        if tablet.table == name:
                            await tablet.add_groups(sorted(missing))
                    self._groups[name] |= missing
            for placed in entry.tablets():
                if placed[0] not in self._numbers[name]:  # the owner has split a tablet
                    assert self.readonly, "a writer splits by `split`"
                    with ExitStack() as opened:
                        added = self._opened(name, placed, [*PROTOCOL_GROUPS, *groups], opened)
                        opened.pop_all()
                    self.store.add_split(self.store.tablet(name, placed[1]), added)
        await self._note_made([name for name in new if name not in made])

    async def _made(self, tables: Sequence[str]) -> set[str]:
        """Of these tables, those whose first tablets are noted as made (P4)."""
        if self._folder is None or not tables:
            return set()
        found = await self.store.read([(SYSTEM_TABLE, _made_row(table), [(DATA, 0, 1, 1, 1)]) for table in tables])
        return {table for table, [cells] in zip(tables, found, strict=True) if cells}

    async def _note_made(self, tables: Sequence[str]) -> None:
        """Record that the first tablets of these tables have been made. If this fails, the next process that opens the
        store notes it."""
        if self._folder is not None and tables and not self.readonly:
            rows = [(_made_row(table), (), ((DATA, 0, 1, b""),)) for table in tables]
            await self.store.apply([Mutation(SYSTEM_TABLE, rows, None, True)])

    # ------------------------------------------------------------ splitting

    async def split(
        self, table: str, row: bytes, number: int, record: Callable[[], Awaitable[None]]
    ) -> tuple[int, float]:
        """Split a tablet at a row (P1 - P4); one split at a time. Returns how many cells the new tablet has, and for
        how many seconds writes to its rows waited.

        Args:
            record: records the split, durably. If it raises StoreError, the split is certainly not recorded; any other
                error leaves the tablet cut until the store is opened again.

        Raises: StoreFull, Unavailable; what `record` raises.
        """
        tablet, folder, groups = self.store.tablet(table, row), self._folder, set(self._groups[table])
        stop = self.store.stop_of(tablet)
        every = [*PROTOCOL_GROUPS, *sorted(groups)]
        assert tablet.start < row
        assert number not in self._numbers[table], "P4: a number is used once"
        recording = recorded = False
        try:
            async with AsyncExitStack() as stack:
                path = Path(f"{table}-{number}")
                if folder is not None:
                    path = await trio.to_thread.run_sync(folder.begin_tablet, table, number)
                cells = await tablet.copy_from(row, stop, path, every)
                paused = trio.current_time()
                await tablet.cut(row)
                if folder is not None:
                    await trio.to_thread.run_sync(folder.place_tablet, table, number)
                await stack.enter_async_context(self.changing)
                opened = stack.enter_context(ExitStack())
                new = self._opened(table, (number, row, stop), every, opened)
                if missing := self._groups[table] - groups:  # added meanwhile
                    await new.add_groups(sorted(missing))
                recording = True
                with trio.CancelScope(shield=True):
                    await record()
                recorded = True
                opened.pop_all()
                # P1: no await between these, so no reader finds a row in both tablets, or in none.
                new.floor = tablet.floor
                self.store.add_split(tablet, new)
                if isinstance(tablet, MemoryTablet) and isinstance(new, MemoryTablet):
                    new.engine = tablet.engine.copy_from(row)
                    tablet.engine.remove_from(row)
                    cells = sum(map(new.entries, new.groups()))
                self.store.submit_held(tablet.let_go())
                if self._elsewhere is not None:
                    self._elsewhere.begin_after(tablet, new)
        except BaseException as error:
            if recorded or (recording and not isinstance(error, StoreError)):
                raise AssertionError("P4: it is unknown whether the split is recorded") from error
            with trio.CancelScope(shield=True):
                self._numbers[table].pop(number, None)
                await tablet.uncut()
                if folder is not None:
                    await trio.to_thread.run_sync(folder.remove_tablet, table, number)
            raise
        return cells, trio.current_time() - paused

    # ------------------------------------------------------------ bulk loads (`loading.py`)

    def must_take_files(self) -> None:
        """Raises: UsageError unless files that other processes have made can become tablets of this store."""
        if self._folder is None:
            raise UsageError("a memory: store has no files, so it takes no bulk loads; load in transactions")
        if self.readonly:
            raise UsageError("this store is open for reading only")
        if self._elsewhere is not None:
            raise UsageError(
                "the store's tablets are open in tablet servers (perco serve --processes), which take no bulk loads: "
                "serve the store without --processes for the load"
            )

    def begin_load(self, id: str, token: str) -> Path:
        """Make the folder of a bulk load, with a token. On any thread."""
        assert self._folder is not None
        return self._folder.begin_load(id, token)

    def end_load(self, id: str) -> None:
        """Remove what is left of a bulk load. On any thread."""
        assert self._folder is not None
        self._folder.end_load(id)

    async def open_loaded(self, file: Path, table: str, placed: Placed, opened: ExitStack) -> Tablet:
        """Make a file the one of a new tablet, and open it; nothing refers to it yet. Call this under `changing`.

        Raises: UsageError if there is no such file; StoreFull, Unavailable.
        """
        assert self._folder is not None
        await trio.to_thread.run_sync(self._folder.place_loaded, file, table, placed[0])
        return self._opened(table, placed, [*PROTOCOL_GROUPS, *sorted(self._groups[table])], opened)

    async def drop_loaded(self, placed: Sequence[tuple[str, int]]) -> None:
        """Remove tablets that were not recorded."""
        assert self._folder is not None
        for table, number in placed:
            self._numbers[table].pop(number, None)
            await trio.to_thread.run_sync(self._folder.remove_tablet, table, number)

    # ------------------------------------------------------------ compacting

    async def compact(self, tablet: Tablet) -> tuple[int, int, float]:
        """Rewrite a tablet's files without their free pages, while reads and writes go on (P6). Returns the bytes of
        its file before and after, and how many seconds writes waited.

        Raises: UsageError if there is no file, or another process writes to it; StoreFull, Unavailable: nothing has
        changed.
        """
        folder, table = self._folder, tablet.table
        if folder is None:
            raise UsageError("a memory: store has no files; there is nothing to compact")
        if not isinstance(tablet, LmdbTablet):
            raise UsageError(
                f"the tablets of {table!r} are open in tablet servers (perco serve --processes), which do not compact. "
                "To compact, serve the store without --processes"
            )
        [number] = [number for number, start in self._numbers[table].items() if start == tablet.start]
        before = tablet.engine.file_bytes()
        if before < tablet.engine.options.ahead_bytes:  # hardly written to: a new file would be larger
            return before, before, 0.0
        tablet.engine.check_room_for_copy()
        try:
            path = await trio.to_thread.run_sync(folder.begin_next, table, number)
            every = [*PROTOCOL_GROUPS, *sorted(self._groups[table])]
            await tablet.copy_from(tablet.start, self.store.stop_of(tablet), path, every)
            async with self.changing:
                paused = trio.current_time()
                await tablet.cut(tablet.start)
                with trio.CancelScope(shield=True):
                    path = await trio.to_thread.run_sync(folder.place_next, table, number)
                    every = [*PROTOCOL_GROUPS, *sorted(self._groups[table])]  # some may have been added
                    engine = LmdbEngine(path, every, tablet.engine.options, readonly=False, lock=True)
                    old = await tablet.replace(engine)
                    await tablet.uncut()
                    paused_s = trio.current_time() - paused
        except BaseException as error:
            lost = folder.has_next(table, number)
            if lost:  # nothing may be written to the old files: held and later mutations fail
                tablet.refuse()
            with trio.CancelScope(shield=True):
                await tablet.uncut()
                if lost:
                    raise AssertionError("P6: the new files are the valid ones, and could not be opened") from error
                await trio.to_thread.run_sync(folder.drop_next, table, number)
            raise
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(old.close)
            engine.path = await trio.to_thread.run_sync(folder.settle_next, table, number)
        return before, engine.file_bytes(), paused_s

    def find_moved(self) -> None:
        """P6, for a reader beside the owner: open the new files of tablets that the owner has compacted."""
        if self._folder is None or not self.readonly:
            return
        for tablet in self.store.tablets():
            if not isinstance(tablet, LmdbTablet):
                continue
            numbers = self._numbers[tablet.table]
            [number] = [number for number, start in numbers.items() if start == tablet.start]
            path = tablet_path(self._folder.path, tablet.table, number)
            if tablet.engine.moved(path):
                every = [*PROTOCOL_GROUPS, *sorted(self._groups.get(tablet.table, ()))]
                tablet.end_views()
                tablet.engine.close()  # first: the new files may have the path of the old ones
                tablet.engine = self._engine_at(tablet.table, number, every, tablet.engine.options)

    @property
    def local(self) -> LocalStore:
        return self

    def where(self) -> tuple[str, str]:
        """The folder, and whether its newest writes may be in memory only, as `doubt_of` says (S2)."""
        return ("memory:", "") if self.path is None else (str(self.path.absolute()), doubt_of(self.path))

    def write_from_thread(self, mutation: Mutation) -> None:
        """Write without the loop, on the thread of the tablet's writer, and do not wait for it."""
        tablet = self.store.tablet(mutation.table, mutation.rows[0][0])
        tablet.submit_from_thread([mutation], lambda _: None)

    def expire(self, after_s: float) -> None:
        """Fail mutations that have waited for a disk for this long (T10)."""
        for tablet in self.store.tablets():
            tablet.expire(after_s)

    def clear_dead_readers(self) -> None:
        """Release the reader slots of killed processes. Otherwise, the pages that these processes read would never be
        reused."""
        for tablet in self.store.tablets():
            if isinstance(tablet, LmdbTablet):
                tablet.engine.clear_dead_readers()

    def lock_file(self) -> int:
        """See `Folder.lock_file`; -1: there is no folder."""
        return self._folder.lock_file() if self._folder is not None else -1

    def check(self) -> None:
        """Raise UsedAfterFork in a child of the process that opened this."""
        if self.forked:
            raise UsedAfterFork(str(self.path))

    def _refuse(self, error: type[PercoError], text: str) -> None:
        """Make snapshots and transactions that were left open raise this error when they read or write."""

        def refused(*_: object) -> None:
            raise error(text)

        for tablet in self.store.tablets():
            for name in ("read", "scan", "submit"):
                setattr(tablet, name, refused)

    async def aclose(self) -> None:
        await self.store.aclose()
        self._refuse(TransactionClosed, "the store that this belongs to has been closed")
        if self._elsewhere is not None:
            await self._elsewhere.aclose()
        if self._folder is not None:
            self._folder.release(clean=True)
        _stores.discard(self)

    def end_views(self) -> None:
        """Close this process's views before a fork, so that the child has none to release (S5)."""
        if self._folder is not None and threading.get_ident() == self._thread:  # else the loop may be reading
            for tablet in self.store.tablets():
                tablet.end_views()

    def forget(self) -> None:
        """Drop the store in a forked child (S5), so that the folder is free as soon as the parent ends."""
        if self._folder is not None:
            self.forked = True
            self._folder.forget()
            for tablet in self.store.tablets():
                tablet.forget()
            self._refuse(UsedAfterFork, str(self.path))

    def abandon(self) -> None:
        """Release the folder after a failed opening."""
        if self._folder is not None:
            self._folder.release(clean=False)
        _stores.discard(self)


def _bytes_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _made_row(table: str) -> bytes:
    return _MADE + table.encode()


def _path_of(text: str) -> Path:
    scheme, colon, _ = text.partition("://")
    if colon and scheme.isascii() and scheme.isalnum():
        raise UsageError(
            f"{text!r}: perco opens a folder, memory:, unix:PATH, tcp://HOST:PORT or tls://HOST:PORT, not {scheme}://"
        )
    if not text:
        raise UsageError("the path of the store is empty")
    return Path(text).expanduser()


def _refuse_address(text: str, path: Path) -> None:
    """Raise UsageError for an address without its scheme, which would make a store in a folder of that name."""
    if _ADDRESS.match(text) and not path.exists():
        raise UsageError(
            f"there is no folder {text!r}. If a store is served there, write tcp://{text}; to make one in a folder of "
            f"that name, write ./{text}"
        )


def _before_fork() -> None:
    for store in _stores:
        store.end_views()


def _after_fork() -> None:
    for store in _stores:
        store.forget()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
