"""One LMDB environment: a tablet's cells on disk.

S2  By default a committed batch has been synced; what is not synced is not visible (LMDB's own order).
S3  Views are short: they end before the next await, or with the batch under way at the latest (they pin the pages that
    it frees); LMDB's readers never wait for its writer.
S4  Room is made before a batch is written: the file is allocated ahead, with a reserve on top that only mutations
    marked `reserve` (rollback, roll-forward, collection) may go into. So a full disk is noticed before anything is
    written, fails the ordinary mutations of that batch, and leaves room for those that let others go on.
S5  Write transactions begin and end on one thread (the tablet's writer).
S6  The map grows between transactions, on the thread that reads (`grow`).
P4  A tablet that was split is marked, in the transaction that removes the first of the rows that it has no more: a
    reader beside, which may know nothing of that, finds the mark or the rows.
F1  Whoever takes over an environment raises its epoch; every batch compares it, in the same write transaction. So a
    process that was given up for dead writes nothing any more.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb

from perco.errors import Corruption, PercoError, StoreFull, TabletSplit, Unavailable, UnsuitableFolder, UsageError
from perco.options import check_options
from perco.storage.cells import (
    DATA,
    GROUPS_MAX,
    PROTOCOL_GROUPS,
    WRITE,
    Applied,
    Mutation,
    NoReply,
    RowCells,
    ScanPage,
    ScanRequest,
    Verdict,
)
from perco.storage.engine import Cursor
from perco.storage.keys import escape
from perco.storage.pages import PageDamaged, Pages, survey
from perco.storage.row import NOWHERE, check_and_write, read_row, scan_rows

_META_PAGES = 2
_NODE_BYTES = 10  # of a page, for a cell besides its key and value
_WORTH = 0.5  # pages saved for each page that is written again
_MAP_BYTES_MIN = 256 << 10  # the named databases of every group, made one by one
_EPOCH = b"\0epoch"  # a key beside the names of the groups
_STOP = b"\0stop"  # another one: the first row that is with another tablet by now
_SURVEYS_MAX = 100
_NAMES_MAX = 1000  # more groups than any environment has
# LMDB's errors for impossible pages, and for a transaction that has met one.
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.BadTxnError,
)
_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


@dataclass(frozen=True, kw_only=True, slots=True)
class LmdbOptions:
    """How a tablet's environment is opened.

    Attributes:
        sync: fsync every commit (S2). False survives the death of the process only.
        map_bytes: the map to begin with; it grows by itself.
        map_bytes_max: where growth ends and StoreFull begins.
        reserve_bytes: kept allocated for rollback, roll-forward and collection when the disk is full (S4).
        ahead_bytes: how far ahead of what is used the file is allocated.
        readers_max: reader slots, over all processes.
    """

    sync: bool = True
    map_bytes: int = 64 << 20
    map_bytes_max: int = 1 << 40
    reserve_bytes: int = 256 << 10
    ahead_bytes: int = 1 << 20
    readers_max: int = 256

    def __post_init__(self) -> None:
        check_options(self, zero=("reserve_bytes", "ahead_bytes"))


def _is_full(error: lmdb.Error) -> bool:
    """LMDB gives an errno as text only."""
    return isinstance(error, lmdb.DiskError) or any(os.strerror(code) in str(error) for code in _FULL)


def _goes_on(request: ScanRequest, next: bytes) -> bool:
    if request.reverse:
        return request.stop is None or next < request.stop
    return next > request.start


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


_parents: list[LmdbEngine] = []  # of forked children, kept for good: see `forget`


class NotHere(Unavailable):
    """The rows are with another process; nothing was written."""


class Fenced(NotHere):
    """Another process has taken over the tablet; nothing was written (F1)."""


def next_epoch(stored: bytes | None) -> bytes:
    """Of whoever takes over an environment that has this one (F1)."""
    return (int.from_bytes(stored or b"", "big") + 1).to_bytes(8, "big")


def check_epoch(ours: bytes, stored: bytes | None, path: object) -> None:
    """`ours`: empty if nobody else may have it. Raises: Fenced (F1)."""
    if ours and stored != ours:
        raise Fenced(f"{path}: another process has taken the tablet over")


class MapTooSmall(Exception):
    """A batch needed more of the map than was foreseen; nothing was written. Grow it and write again (S6)."""


class _Cursors(dict[str, Any]):
    """The cursors of one transaction, by group, each opened when it is first asked for."""

    __slots__ = ("_dbs", "_txn")

    def __init__(self, txn: Any, dbs: dict[str, Any]) -> None:
        self._txn, self._dbs = txn, dbs

    def __missing__(self, group: str) -> Any:
        cursor = self[group] = self._txn.cursor(self._dbs[group])
        return cursor


class _Groups(dict[str, Any]):
    """LMDB's databases by locality group. A group that was never made can only have been named by damaged cells."""

    __slots__ = ()

    def __missing__(self, group: str) -> Any:
        raise Corruption("", f"there is no locality group {group!r}")


class _LmdbView:
    """A transaction of LMDB as a `View` or `Batch`."""

    __slots__ = ("_dbs", "_txn", "cursor")

    def __init__(self, txn: Any, dbs: dict[str, Any]) -> None:
        self._txn, self._dbs = txn, dbs
        self.cursor: Callable[[str], Cursor] = _Cursors(txn, dbs).__getitem__  # no frame of ours for every seek

    def get(self, group: str, key: bytes) -> bytes | None:
        value: bytes | None = self._txn.get(key, None, self._dbs[group])
        return value

    def put(self, group: str, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, True, True, False, self._dbs[group])

    def delete(self, group: str, key: bytes) -> None:
        self._txn.delete(key, b"", self._dbs[group])


class LmdbEngine:
    """One open environment. Reads on the loop's thread, `commit` on the writer's."""

    def __init__(self, path: Path, groups: Sequence[str], options: LmdbOptions, *, readonly: bool, lock: bool) -> None:
        self.path, self.options, self.readonly = path, options, readonly
        data = path / "data.mdb"
        try:
            there = data.stat()
            used, identity = there.st_size, (there.st_dev, there.st_ino)
        except FileNotFoundError:  # it is made, or its owner has just replaced it (P6)
            used, identity = 0, (0, 0)
        self._identity = identity if readonly and used else (0, 0)  # asked before it is opened: see `moved`
        try:
            self._env = lmdb.open(
                str(path),
                map_size=max(min(max(options.map_bytes, 2 * used), options.map_bytes_max), _MAP_BYTES_MIN),
                readonly=readonly,
                sync=options.sync,
                metasync=options.sync,
                lock=lock,
                max_dbs=len(PROTOCOL_GROUPS) + GROUPS_MAX,
                max_readers=options.readers_max,
                readahead=False,
                create=not readonly,
            )
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError) as error:
            raise Corruption(str(data), f"not a readable LMDB file: {error}") from error
        except lmdb.Error as error:
            raise UnsuitableFolder(str(path), f"LMDB cannot open it: {error}") from error
        self.map_bytes = int(self._env.info()["map_size"])  # LMDB takes more if more is used
        self._dbs = _Groups()
        self._shared: tuple[Any, _LmdbView] | None = None
        self.busy = False  # the writer's thread is at work with it
        self.still = threading.Lock()  # held by who reads on a thread of its own: the map does not grow (S6)
        self._epoch = b""  # F1; empty: the whole folder is this process's
        self._data = -1
        try:
            self._page = int(self._env.stat()["psize"])
            self._check_size(data)
            self._open_groups(groups)
            self._allocated = 0 if readonly else data.stat().st_size
            self._data = -1 if readonly else os.open(data, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            self._env.close()
            raise UnsuitableFolder(str(path), f"it cannot be opened: {error.strerror or error}") from error
        except BaseException:
            self._env.close()
            raise

    def _check_size(self, data: Path) -> None:
        """A truncated file would end the process with SIGBUS at the first read beyond its end. Raises: Corruption."""
        used = self.used_bytes()
        if (size := data.stat().st_size) < used:  # looked at after `used`: meanwhile it only grows
            raise Corruption(str(data), f"the file is cut short: it has {size} bytes, and {used} are in use")

    @staticmethod
    def make(path: Path, groups: Sequence[str], options: LmdbOptions) -> None:
        """Make an environment with these groups, durably; until this returns it may be there in part."""
        engine = LmdbEngine(path, groups, replace(options, sync=False), readonly=False, lock=True)
        try:
            engine.sync()
        finally:
            engine.close()

    def _open_groups(self, groups: Sequence[str]) -> None:
        for group in groups:
            try:
                self._dbs[group] = self._open_group(group)
            except lmdb.NotFoundError:
                continue  # a reader beside an owner that has not made this group yet: no cells there
            except lmdb.DbsFullError as error:
                raise UsageError(f"{self.path}: a table may have {GROUPS_MAX} locality groups of its own") from error
            except lmdb.Error as error:
                if _is_full(error) or isinstance(error, lmdb.MapFullError):
                    raise StoreFull(str(self.path), str(error)) from error
                raise self._unreadable(error) from error

    def _open_group(self, group: str) -> Any:
        try:
            return self._env.open_db(group.encode(), create=not self.readonly)
        except lmdb.MapResizedError:
            self._adopt_map()
            return self._env.open_db(group.encode(), create=not self.readonly)

    # ------------------------------------------------------------ reading

    def _begin(self) -> AbstractContextManager[Any]:
        try:
            return self._env.begin()
        except lmdb.MapResizedError:
            self._adopt_map()
            return self._env.begin()

    def _adopt_map(self) -> None:
        """Another process, the owner, has grown the map (S6)."""
        self._env.set_mapsize(0)
        self.map_bytes = int(self._env.info()["map_size"])

    def read(
        self, row: bytes, queries: Sequence[Any], empty: Container[str] = NOWHERE, *, shared: bool = False
    ) -> RowCells:
        """Cells of a row, from a view of now; or `shared`: from one that may be as old as the last `end_shared`.

        A caller of shared reads calls `end_shared` when a batch has ended (T2), and has one under way (S3).
        """
        try:
            if self._shared is not None:
                return read_row(self._shared[1], row, queries, empty)
            if shared:
                txn = self._env.begin()
                self._shared = txn, _LmdbView(txn, self._dbs)
                return read_row(self._shared[1], row, queries, empty)
            if not self.readonly:  # the owner: nobody else grows its map
                with self._env.begin() as txn:
                    return read_row(_LmdbView(txn, self._dbs), row, queries, empty)
            self._open_groups([query[0] for query in queries if query[0] not in self._dbs])
            here = [query for query in queries if query[0] in self._dbs]
            with self._begin() as txn:
                self._check_stop(txn, row)
                found = iter(read_row(_LmdbView(txn, self._dbs), row, here))
        except lmdb.Error as error:
            raise self._unreadable(error) from error
        return [next(found) if query[0] in self._dbs else [] for query in queries]

    def end_shared(self) -> None:
        """Later reads use a newer view."""
        if self._shared is not None:
            txn, self._shared = self._shared[0], None
            txn.abort()

    def _unreadable(self, error: lmdb.Error) -> PercoError:
        if isinstance(error, lmdb.ReadersFullError):
            return Unavailable(f"{self.path}: all {self.options.readers_max} reader slots are taken (readers_max)")
        return Corruption(str(self.path), f"LMDB cannot read it ({error})")

    def scan(self, request: ScanRequest) -> ScanPage:
        """A page; see `ScanRequest`. Raises: Corruption if the next one would not be further on."""
        try:
            page = self._scan(request)
            if page.next is not None and not _goes_on(request, page.next):
                raise Corruption(str(self.path), f"rows are out of order at {page.next!r:.100}")
            return page
        except lmdb.Error as error:
            raise self._unreadable(error) from error

    def _scan(self, request: ScanRequest) -> ScanPage:
        missing = [query.group for query in request.queries if query.group not in self._dbs]
        if missing and self.readonly:
            self._open_groups(missing)
            missing = [group for group in missing if group not in self._dbs]
        if missing:
            present = tuple(query for query in request.queries if query.group in self._dbs)
            with self._begin() as txn:
                self._check_stop(txn, request.start, request.stop, whole=True)
                if not present:
                    return ScanPage([], None)
                page = scan_rows(_LmdbView(txn, self._dbs), request._replace(queries=present))
            rows = []
            for row, cells in page.rows:
                found = iter(cells)
                rows.append((row, [next(found) if query.group in self._dbs else [] for query in request.queries]))
            return ScanPage(rows, page.next)
        with self._begin() as txn:
            if self.readonly:
                self._check_stop(txn, request.start, request.stop, whole=True)
            return scan_rows(_LmdbView(txn, self._dbs), request)

    def _check_stop(self, txn: Any, start: bytes, stop: bytes | None = None, *, whole: bool = False) -> None:
        """P4: raises TabletSplit where a row, or a part of the `whole` range, is with another tablet by now."""
        mark = txn.get(_STOP)
        if mark is not None and (start >= mark or (whole and (stop is None or stop > mark))):
            raise TabletSplit(self.path.name.rpartition("-")[0])

    def entries(self, group: str) -> int:
        """How many cells the group holds: one page is read."""
        if group not in self._dbs:
            return 0
        try:
            with self._begin() as txn:
                return int(txn.stat(self._dbs[group])["entries"])
        except lmdb.Error as error:
            raise self._unreadable(error) from error

    def groups(self) -> list[str]:
        """The names of all groups in the file, whoever made them."""
        try:
            with self._begin() as txn:
                names = [bytes(name) for name in islice(txn.cursor().iternext(values=False), _NAMES_MAX + 1)]
                if len(names) > _NAMES_MAX or names != sorted(set(names)):
                    raise Corruption(str(self.path), "the list of its locality groups is damaged")
                return [name.decode(errors="replace") for name in names if name not in (_EPOCH, _STOP)]
        except lmdb.Error as error:
            raise self._unreadable(error) from error

    def survey(self) -> Iterator[Pages]:
        """Go through all pages of the file, without LMDB (see `pages.survey`); pins them. Raises: Corruption."""
        file = os.open(self.path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for _ in range(_SURVEYS_MAX):
                with self._begin() as txn:
                    try:
                        yield from survey(file, self._page, txn.id())
                        return
                    except LookupError:  # another process has committed twice since
                        continue
            raise Unavailable(f"{self.path}: it is written to too fast to be surveyed")
        except PageDamaged as error:
            raise Corruption(str(self.path), str(error)) from error
        except lmdb.Error as error:
            raise self._unreadable(error) from error
        finally:
            os.close(file)

    def verify_from(self, group: str, key: bytes, count: int, size: int) -> bytes | None:
        """Read cells of a group, up to a number of cells or bytes, each both in order and by a search for it. A search
        descends from the root; if inner pages are damaged it misses cells, and so would reads and writes.

        Returns: the key to continue at; None: that was the end. Raises: Corruption.
        """
        self._open_groups([group] if group not in self._dbs else [])
        last = b""
        try:
            with self._begin() as txn, txn.cursor(self._dbs[group]) as opened, txn.cursor(self._dbs[group]) as found:
                cursor: Any = opened
                for at, value in cursor.iternext(True, True) if cursor.set_range(key) else ():
                    if at <= last or at < key:
                        raise Corruption(str(self.path), f"group {group!r}: cells are out of order at key {at.hex()}")
                    if not found.set_key(at):
                        raise Corruption(str(self.path), f"group {group!r}: a search misses the cell at key {at.hex()}")
                    last, count, size = bytes(at), count - 1, size - len(value)
                    if count <= 0 or size <= 0:
                        return last + b"\0"
        except lmdb.Error as error:
            raise self._unreadable(error) from error
        return None

    def used_bytes(self) -> int:
        """The bytes of the file that have ever been written; freed pages are reused. (A damaged file says anything.)"""
        return min(int(self._env.info()["last_pgno"] + 1) * self._page, sys.maxsize)

    def live_bytes(self) -> int:
        """The bytes that cells take: the pages of all groups. The rest of `used_bytes` is free, or LMDB's free list."""
        try:
            with self._begin() as txn:
                stats = [self._env.stat(), *(txn.stat(db) for db in list(self._dbs.values()))]
        except lmdb.Error as error:
            raise self._unreadable(error) from error
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return int(_META_PAGES + pages) * self._page

    # ------------------------------------------------------------ writing (the writer's thread)

    def take_over(self) -> int:
        """From now on whoever had it open for writing before is fenced off (F1); returns the new epoch. Before the
        writer's thread begins. Raises: StoreFull."""
        try:
            with self._env.begin(write=True) as txn:
                self._epoch = next_epoch(txn.get(_EPOCH))
                txn.put(_EPOCH, self._epoch)
        except lmdb.Error as error:
            if _is_full(error) or isinstance(error, lmdb.MapFullError):
                raise StoreFull(str(self.path), str(error)) from error
            raise self._disk_failed(error) from error
        return int.from_bytes(self._epoch, "big")

    def epoch(self) -> int:
        """How often it has been taken over."""
        with self._begin() as txn:
            return int.from_bytes(txn.get(_EPOCH, b""), "big")

    def _check_epoch(self, txn: Any) -> None:
        check_epoch(self._epoch, txn.get(_EPOCH), self.path)

    def commit(
        self,
        mutations: Sequence[Mutation],
        floor: int,
        written: Callable[[], None] | None = None,
        empty: Container[str] = NOWHERE,
    ) -> list[Verdict]:
        """Check and write a batch in one write transaction; each mutation gets a verdict of its own (S1, S4).

        `empty`: groups that hold no cell, and to which this batch puts none. If it raises, nothing was written; the
        caller may try a smaller batch.
        """
        committing = 0
        try:
            with self._env.begin(write=True) as txn:
                self._check_epoch(txn)
                batch = _LmdbView(txn, self._dbs)
                verdicts: list[Verdict] = [check_and_write(batch, mutation, floor, empty) for mutation in mutations]
                committing = txn.id()
                if not any(isinstance(verdict, Applied) for verdict in verdicts):
                    txn.abort()
                if written is not None:
                    written()
            return verdicts
        except lmdb.MapFullError as error:
            raise MapTooSmall from error
        except lmdb.Error as error:
            if _is_full(error):
                raise StoreFull(str(self.path), str(error)) from error
            if not committing:
                if isinstance(error, _DAMAGE):
                    raise self._unreadable(error) from error
                raise
            if self._surely_not(committing):
                raise self._disk_failed(error) from error
            return [NoReply(f"LMDB: {error}")] * len(mutations)

    def _surely_not(self, txn_id: int) -> bool:
        """Whether a commit that failed has left nothing: its meta page, which comes last, was not written."""
        try:
            with self._env.begin():  # raises if LMDB could not take the meta page back
                return int(self._env.info()["last_txnid"]) < txn_id
        except lmdb.Error:
            return False  # the environment is broken: who knows what is on the disk

    def _disk_failed(self, error: lmdb.Error) -> StoreFull | Unavailable:
        """LMDB tells a write that fell short as an I/O error, which mostly is a full disk."""
        free = os.statvfs(self.path)
        if free.f_bavail * free.f_frsize < self.options.ahead_bytes:
            return StoreFull(str(self.path), str(error))
        return Unavailable(f"{self.path}: the disk failed ({error})")

    def repack(self, group: str, start: bytes, cells: int, skip: int) -> tuple[bytes | None, bool]:
        """Write some cells again, in order, where so many were removed between them that their pages are half empty:
        LMDB itself merges pages only below a quarter. Put in order they fill their pages.

        Args:
            start: the key to begin at.
            cells, skip: how many, after so many that are passed over.

        Returns: the key to go on at (None: that was the end), and whether it was worth it; else nothing was written.
        Raises: MapTooSmall; StoreFull, where LMDB could not use the free pages that there are; Unavailable.
        """
        with self._beside_batches() as txn:
            self._check_epoch(txn)
            after, packed = self._repack(txn, self._dbs[group], start, cells, skip)
            if not packed:
                txn.abort()
        return after, packed

    @contextmanager
    def _beside_batches(self) -> Iterator[Any]:
        """A write transaction for upkeep. Raises: MapTooSmall; StoreFull; Unavailable."""
        try:
            with self._env.begin(write=True) as txn:
                yield txn
        except lmdb.MapFullError as error:
            raise MapTooSmall from error
        except lmdb.Error as error:
            if _is_full(error):
                raise StoreFull(str(self.path), str(error)) from error
            if isinstance(error, _DAMAGE):
                raise self._unreadable(error) from error
            raise self._disk_failed(error) from error

    def _repack(self, txn: Any, db: Any, start: bytes, cells: int, skip: int) -> tuple[bytes | None, bool]:
        before = txn.stat(db)["leaf_pages"]
        with txn.cursor(db) as cursor:
            if not cursor.set_range(start):
                return None, False
            cells_from = cursor.iternext(True, True)
            for _ in islice(cells_from, skip):
                pass
            found: list[tuple[bytes, bytes]] = list(islice(cells_from, cells + 1))
        after = found.pop()[0] if len(found) > cells else None
        size = sum(len(key) + len(value) + _NODE_BYTES for key, value in found)
        if any(len(value) > self._page // 3 for _, value in found):
            return after, False  # long values lie in pages of their own
        for key, _ in found:
            txn.delete(key, b"", db)
        for key, value in found:
            txn.put(key, value, True, True, False, db)
        saved = before - txn.stat(db)["leaf_pages"]
        return after, saved * self._page > size * _WORTH

    # ------------------------------------------------------------ splitting

    def another(self, path: Path, groups: Sequence[str], options: LmdbOptions) -> LmdbEngine:
        """An environment for a copy of some of this one, in an existing empty folder."""
        return LmdbEngine(path, groups, options, readonly=False, lock=True)

    def cells_from(self, group: str, key: bytes, count: int, size: int) -> list[tuple[bytes, bytes]]:
        """The cells of a group, in order, from a key on: so many, or those in which so many bytes are reached. Any
        thread that holds `still`."""
        found: list[tuple[bytes, bytes]] = []
        with self._from(group, key, values=True) as cells:
            for cell in islice(cells, count):
                found.append(cell)
                size -= len(cell[1])
                if size <= 0:
                    break
        return found

    def keys_from(self, group: str, key: bytes, count: int) -> list[bytes]:
        """The same, of the keys alone."""
        with self._from(group, key, values=False) as keys:
            return list(islice(keys, count))

    @contextmanager
    def _from(self, group: str, key: bytes, *, values: bool) -> Iterator[Iterator[Any]]:
        """All that a group has from a key on."""
        if group not in self._dbs:
            yield iter(())
            return
        try:
            with self._env.begin() as txn, txn.cursor(self._dbs[group]) as opened:
                cursor: Any = opened
                yield cursor.iternext(True, values) if cursor.set_range(key) else iter(())
        except lmdb.Error as error:
            raise self._unreadable(error) from error

    def put_cells(self, cells: Sequence[tuple[str, bytes, bytes | None]]) -> None:
        """Put cells, or remove them, in this order, whatever is there.

        Raises: MapTooSmall; StoreFull, Unavailable.
        """
        with self._beside_batches() as txn:
            for group, key, value in cells:
                if value is None:
                    txn.delete(key, b"", self._dbs[group])
                else:
                    txn.put(key, value, True, True, False, self._dbs[group])

    def take_marks(self, other: LmdbEngine) -> None:
        """Copy the marks that another environment has beside its groups (F1, P4); this one replaces it (P6)."""
        with other.still, other._env.begin() as txn:
            marks = [(name, txn.get(name)) for name in (_EPOCH, _STOP)]
        with self._beside_batches() as txn:
            for name, mark in marks:
                if mark is not None:
                    txn.put(name, mark)

    def fill_up(self) -> None:
        """Make the file as long as its pages say: LMDB does not write a last page that became free at once."""
        missing = self.used_bytes() - os.fstat(self._data).st_size
        if missing > 0:
            os.truncate(self._data, self.used_bytes())
            os.fsync(self._data)

    def check_room_for_copy(self) -> None:
        """Check that the disk has room for another file with the same cells. Raises: StoreFull."""
        need = self.live_bytes() + self.live_bytes() // 8 + self.options.ahead_bytes + self.options.reserve_bytes
        disk = os.statvfs(self.path)
        if (free := disk.f_bavail * disk.f_frsize) < need:
            raise StoreFull(
                str(self.path),
                f"compacting it needs {need >> 20} MiB for a while, and {free >> 20} MiB are free",
            )

    def file_bytes(self) -> int:
        """The length of the file."""
        return os.fstat(self._data).st_size

    def moved(self, path: Path) -> bool:
        """Whether another file has replaced the one that is open (P6)."""
        try:
            return _identity(path / "data.mdb") != self._identity
        except OSError:
            return True

    def remove_from(self, row: bytes, cells: int) -> bool:
        """Remove so many of the cells from a row on, which are another tablet's (P4). Writer's thread, between batches.

        Returns whether there may be more. Raises: MapTooSmall; StoreFull; Unavailable.
        """
        prefix = escape(row)
        removed = 0
        with self._beside_batches() as txn:
            self._check_epoch(txn)
            txn.put(_STOP, row)
            # What comes and goes first: whoever counts it finds it twice until it is gone here.
            for group in sorted(self._dbs, key=lambda group: group in (DATA, WRITE)):
                with txn.cursor(self._dbs[group]) as cursor:
                    if not cursor.set_range(prefix):
                        continue
                    while removed < cells and cursor.delete():
                        removed += 1
            if not removed:
                txn.abort()
        return removed >= cells

    def has_from(self, row: bytes) -> bool:
        """Whether there is any cell from a row on."""
        prefix = escape(row)
        with self.still:
            return any(self.keys_from(group, prefix, 1) for group in list(self._dbs))

    def make_room(self, need_bytes: int, *, reserve: bool) -> StoreFull | None:
        """Allocate the file ahead of a batch that may need so many bytes; None: there is room (S4)."""
        wanted = self._wanted(need_bytes, reserve=reserve)
        if wanted <= self._allocated:
            return None
        size = wanted + max(self.options.ahead_bytes, wanted // 16)
        for target in (size, wanted):
            try:
                os.posix_fallocate(self._data, self._allocated, target - self._allocated)
            except OSError as error:
                if error.errno not in _FULL:
                    return None  # a file system that cannot allocate ahead: the commit itself will tell
                full = StoreFull(str(self.path), error.strerror or str(error))
                continue
            self._allocated = target
            return None
        return full

    def has_free(self, need_bytes: int, *, reserve: bool) -> bool:
        """Whether so many bytes fit into pages that became free, where the file cannot grow: after old versions were
        removed from a full disk (S4). Some of these pages may be too young to be used, or too scattered for a long
        value; then the commit itself will tell."""
        wanted = self.live_bytes() + need_bytes + (0 if reserve else self.options.reserve_bytes)
        return wanted <= min(self._allocated, self.map_bytes)

    def has_map_for(self, need_bytes: int, *, reserve: bool) -> bool:
        """Whether the map has room for so many bytes, and for the reserve on top of them (S4)."""
        return self._wanted(need_bytes, reserve=reserve) <= self.map_bytes

    def _wanted(self, need_bytes: int, *, reserve: bool) -> int:
        return self.used_bytes() + need_bytes + (0 if reserve else self.options.reserve_bytes)

    def grow(self, need_bytes: int, *, reserve: bool) -> StoreFull | None:
        """Grow the map, twofold at least; only while no transaction is open in this process (S6)."""
        self.end_shared()
        wanted = self._wanted(need_bytes, reserve=reserve)
        size = 2 * self.map_bytes
        while size < wanted:
            size *= 2
        size = min(size, self.options.map_bytes_max)
        if size < wanted or size <= self.map_bytes:
            return StoreFull(str(self.path), f"the map would grow over map_bytes_max={self.options.map_bytes_max}")
        with self.still:
            self._env.set_mapsize(size)
        self.map_bytes = size
        return None

    def add_groups(self, groups: Sequence[str]) -> None:
        """Make groups that the environment lacks. Writer's thread, between batches."""
        self._open_groups([group for group in groups if group not in self._dbs])

    def clear_dead_readers(self) -> int:
        """Free the reader slots of processes that died, which would pin pages for good."""
        return int(self._env.reader_check())

    def sync(self) -> None:
        self._env.sync(True)

    def forget(self) -> None:
        """In a forked child: let go of it, without a touch to what the parent has open (S5)."""
        if self._shared is None and not self.busy and not self.still.locked():
            self.close()  # or LMDB would not open it again in this process
        else:
            # To end the view would free the parent's reader slot, and the pages that it reads. And where the writer's
            # thread was at work, it holds locks of LMDB that nobody in this process will ever let go of.
            _parents.append(self)

    def close(self) -> None:
        self.end_shared()
        if self._data >= 0:
            os.close(self._data)
            self._data = -1
        with self.still:
            self._env.close()
