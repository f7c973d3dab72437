"""One LMDB environment: a tablet's cells on disk.

S2  By default a committed batch is synced, and nothing is visible before it is synced (LMDB's own order).
S3  Views are short, because they pin the pages that a batch frees: they end before the next await, or at the latest
    with the batch in flight. LMDB's readers never wait for its writer.
S4  Room is made before a batch is written: the file is allocated ahead, with a reserve on top that only mutations
    marked `reserve` (rollback, roll-forward, collection) may use. So a full disk is noticed before anything is written.
    Then only the ordinary mutations of the batch fail, and there is room for those that unblock others.
S5  Write transactions begin and end on one thread (the tablet's writer).
S6  The map grows between transactions, on the thread that reads (`grow`).
P4  After a split, the transaction that removes the first of the moved rows from the old tablet also marks the tablet.
    So a reader beside the owner finds either the rows or the mark, even with an old map of the tablets.
F1  A process that takes over an environment raises the environment's epoch. Every batch checks, in its own write
    transaction, that the epoch is still that of its process. So a process that was presumed dead can no longer write.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
from _thread import LockType
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb

from perco.errors import Corruption, PercoError, StoreFull, TabletSplit, Unavailable, UnsuitableFolder, UsageError
from perco.storage.cells import (
    DATA,
    GROUPS_MAX,
    LOG,
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
from perco.storage.fencing import check_epoch, next_epoch
from perco.storage.keys import escape, split_log_key
from perco.storage.lmdb_native import environment, error_of
from perco.storage.lmdb_options import LmdbOptions
from perco.storage.lmdb_view import Groups, LmdbView, goes_on
from perco.storage.pages import PageDamaged, Pages, survey
from perco.storage.row import NOWHERE, check_and_write, read_row, scan_rows

_META_PAGES = 2
_NODE_BYTES = 10  # bytes of a page that a cell takes besides its key and value
_WORTH = 0.5  # pages that a repack must save for each page that it writes
_MAP_BYTES_MIN = 256 << 10  # room for the named databases of all groups, which are made one by one
_EPOCH = b"\0epoch"  # a key beside the names of the groups
_STOP = b"\0stop"  # another such key; its value: the first row that now belongs to another tablet
_SURVEYS_MAX = 100
_VISITED = 10  # entries of the log that are examined, for each cell that is removed
_ANY_ROOM = -(1 << 62)  # LMDB itself says whether there is room
_NAMES_MAX = 1000  # more groups than any environment has
# LMDB's errors for impossible pages, and for a transaction that has read one.
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


def _is_full(error: lmdb.Error) -> bool:
    """Whether the error means a full disk; LMDB gives an errno as text only."""
    return isinstance(error, lmdb.DiskError) or any(os.strerror(code) in str(error) for code in _FULL)


class PidTaken(UnsuitableFolder):
    """A process in another PID namespace, such as a container, has the file open, and has this process's PID. LMDB
    identifies processes by their PIDs."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            str(path),
            f"a process in another container (PID namespace) has it open and has the same PID, {os.getpid()}, by which "
            "LMDB identifies processes. Run this in that container, or have readers open the address of the store's "
            "socket",
        )


def is_pid_taken(error: lmdb.Error) -> bool:
    """Whether LMDB's error means that the PID is taken: see `PidTaken`."""
    return os.strerror(errno.EAGAIN) in str(error)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


_parents: list[LmdbEngine] = []  # in a forked child: engines of its parent, kept for good; see `forget`


class MapTooSmall(Exception):
    """A batch needed more of the map than expected; nothing was written. Grow it and write again (S6)."""


class LmdbEngine:
    """One open environment. Reads on the loop's thread, `commit` on the writer's."""

    path: Path
    options: LmdbOptions
    readonly: bool
    still: LockType
    map_bytes: int
    page_bytes: int

    def __init__(self, path: Path, groups: Sequence[str], options: LmdbOptions, *, readonly: bool, lock: bool) -> None:
        self.path, self.options, self.readonly = path, options, readonly
        data = path / "data.mdb"
        try:
            there = data.stat()
            used, identity = there.st_size, (there.st_dev, there.st_ino)
        except FileNotFoundError:  # the file is yet to be made, or its owner has just replaced it (P6)
            used, identity = 0, (0, 0)
        self._identity = identity if readonly and used else (0, 0)  # taken before the file is opened; see `moved`
        try:
            self._env = lmdb.open(
                str(path),
                map_size=max(min(max(options.map_bytes, 2 * used), options.map_bytes_max), _MAP_BYTES_MIN),
                readonly=readonly,
                sync=options.sync,
                metasync=options.sync,
                lock=lock,
                max_dbs=len(PROTOCOL_GROUPS) + 1 + GROUPS_MAX,
                max_readers=options.readers_max,
                readahead=False,
                create=not readonly,
            )
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError) as error:
            raise Corruption(str(data), f"not a readable LMDB file: {error}") from error
        except lmdb.Error as error:
            if is_pid_taken(error):
                raise PidTaken(path) from error
            raise UnsuitableFolder(str(path), f"LMDB cannot open it: {error}") from error
        self.map_bytes = int(self._env.info()["map_size"])  # LMDB maps more if more is used
        self._dbs = Groups()
        self.native: Any | None = None
        self._shared: tuple[Any, LmdbView] | None = None
        self.busy = False  # the writer's thread is using it
        self.still = threading.Lock()  # held while a thread other than the loop's reads: the map does not grow (S6)
        self._epoch = b""  # F1; empty: this process has the whole folder
        self._data = -1
        self._log_at = b"\0"  # where the search for entries of rows that have moved goes on
        try:
            self.page_bytes = int(self._env.stat()["psize"])
            self._check_size(data)
            self._open_groups(groups)
            self._register()
            self._allocated = 0 if readonly else data.stat().st_size
            self._data = -1 if readonly else os.open(data, os.O_RDWR | os.O_CLOEXEC)
            if not readonly:
                self.native = environment(self._env, path, self._dbs)
                self._set_limit()
        except OSError as error:
            self._env.close()
            raise UnsuitableFolder(str(path), f"it cannot be opened: {error.strerror or error}") from error
        except BaseException:
            self._env.close()
            raise

    def _check_size(self, data: Path) -> None:
        """Refuse a truncated file: a read beyond its end would kill the process (SIGBUS). Raises: Corruption."""
        used = self.used_bytes()
        if (size := data.stat().st_size) < used:  # read after `used`: the file only grows
            raise Corruption(str(data), f"the file is cut short: it has {size} bytes, and {used} are in use")

    @staticmethod
    def make(path: Path, groups: Sequence[str], options: LmdbOptions) -> None:
        """Make an environment with these groups, durably; until this returns it may be incomplete."""
        engine = LmdbEngine(path, groups, replace(options, sync=False), readonly=False, lock=True)
        try:
            engine.sync()
        finally:
            engine.close()

    def _open_groups(self, groups: Sequence[str]) -> None:
        for group in groups:
            try:
                found = self._open_group(group)
                if self.native is not None:
                    self.native.add(group)
                self._dbs[group] = found  # last: if anything fails, all of it is tried again
            except lmdb.NotFoundError:
                continue  # a reader beside an owner that has not made this group yet: no cells there
            except lmdb.DbsFullError as error:
                raise UsageError(
                    f"{self.path}: a table can have at most {GROUPS_MAX} locality groups of its own"
                ) from error
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

    @property
    def logs(self) -> bool:
        """Whether it keeps a log (E1)."""
        return LOG in self._dbs

    # ------------------------------------------------------------ reading

    def _register(self) -> None:
        """Register this process with LMDB, which it would otherwise do with the first read. Raises: PidTaken."""
        try:
            with self._begin():
                pass
        except lmdb.Error as error:
            if is_pid_taken(error):
                raise PidTaken(self.path) from error
            raise

    def _begin(self) -> AbstractContextManager[Any]:
        try:
            return self._env.begin()
        except lmdb.MapResizedError:
            self._adopt_map()
            return self._env.begin()

    def _adopt_map(self) -> None:
        """Adopt the map's new size, after another process, the owner, has grown it (S6)."""
        self._env.set_mapsize(0)
        self.map_bytes = int(self._env.info()["map_size"])

    def read(
        self, row: bytes, queries: Sequence[Any], empty: Container[str] = NOWHERE, *, shared: bool = False
    ) -> RowCells:
        """Read cells of a row from a new view; with `shared`, from a view that was opened after the last `end_shared`.

        Reads share a view only while a batch is in flight (S3); the caller calls `end_shared` when the batch has ended
        (T2).
        """
        if self.native is not None and (made := self.native.read(row, queries, empty, shared)) is not None:
            return made  # type: ignore[no-any-return]
        try:
            if self._shared is not None:
                return read_row(self._shared[1], row, queries, empty)
            if shared:
                txn = self._env.begin()
                self._shared = txn, LmdbView(txn, self._dbs)
                return read_row(self._shared[1], row, queries, empty)
            if not self.readonly:  # the owner: no other process grows its map
                with self._env.begin() as txn:
                    return read_row(LmdbView(txn, self._dbs), row, queries, empty)
            self._open_groups([query[0] for query in queries if query[0] not in self._dbs])
            here = [query for query in queries if query[0] in self._dbs]
            with self._begin() as txn:
                self._check_stop(txn, row)
                found = iter(read_row(LmdbView(txn, self._dbs), row, here))
        except lmdb.Error as error:
            raise self._unreadable(error) from error
        return [next(found) if query[0] in self._dbs else [] for query in queries]

    def end_shared(self) -> None:
        """End the shared view: later reads use a newer one."""
        if self.native is not None:
            self.native.end_shared()
        if self._shared is not None:
            txn, self._shared = self._shared[0], None
            txn.abort()

    def _unreadable(self, error: lmdb.Error) -> PercoError:
        if isinstance(error, lmdb.ReadersFullError):
            what = f"{self.path}: all {self.options.readers_max} reader slots are taken"
            remedy = "Close some readers. LmdbOptions.readers_max counts in the process that opens the store first."
            return Unavailable(what, remedy=remedy)
        return Corruption(str(self.path), f"LMDB cannot read it ({error})")

    def scan(self, request: ScanRequest) -> ScanPage:
        """Read a page; see `ScanRequest`. Raises: Corruption if the next page would not be further on."""
        try:
            page = self._scan(request)
            if page.next is not None and not goes_on(request, page.next):
                raise Corruption(str(self.path), f"rows are out of order at {page.next!r:.100}")
            return page
        except lmdb.Error as error:
            raise self._unreadable(error) from error

    def _scan(self, request: ScanRequest) -> ScanPage:
        if self.native is not None and not request.reverse:
            _, start, stop, queries, _, rows_max, bytes_max, seeks_max, after = request
            if after is not None:
                [(_, _, from_ts, to_ts, n, _)] = queries
                if (rows := self.native.scan_log(after, from_ts, to_ts, n, rows_max, bytes_max)) is not None:
                    return ScanPage(rows, None)
            elif (made := self.native.scan(start, stop, queries, rows_max, bytes_max, seeks_max)) is not None:
                return ScanPage(*made)
        logs = () if request.log is None else (LOG,)
        missing = [group for group in (*logs, *(query.group for query in request.queries)) if group not in self._dbs]
        if missing and self.readonly:
            self._open_groups(missing)
            missing = [group for group in missing if group not in self._dbs]
        if missing:
            present = tuple(query for query in request.queries if query.group in self._dbs)
            with self._begin() as txn:
                self._check_stop(txn, request.start, request.stop, whole=True)
                if not present or LOG in missing:
                    return ScanPage([], None)
                page = scan_rows(LmdbView(txn, self._dbs), request._replace(queries=present))
            rows = []
            for row, cells in page.rows:
                found = iter(cells)
                rows.append((row, [next(found) if query.group in self._dbs else [] for query in request.queries]))
            return ScanPage(rows, page.next)
        with self._begin() as txn:
            if self.readonly:
                self._check_stop(txn, request.start, request.stop, whole=True)
            return scan_rows(LmdbView(txn, self._dbs), request)

    def _check_stop(self, txn: Any, start: bytes, stop: bytes | None = None, *, whole: bool = False) -> None:
        """Raise TabletSplit if another tablet now has the row, or a part of the `whole` range (P4)."""
        mark = txn.get(_STOP)
        if mark is not None and (start >= mark or (whole and (stop is None or stop > mark))):
            raise TabletSplit(self.path.name.rpartition("-")[0])

    def entries(self, group: str) -> int:
        """How many cells the group holds; reads one page."""
        if group not in self._dbs:
            return 0
        try:
            with self._begin() as txn:
                return int(txn.stat(self._dbs[group])["entries"])
        except lmdb.Error as error:
            raise self._unreadable(error) from error

    def groups(self) -> list[str]:
        """The names of all groups in the file, including those that this engine has not opened."""
        try:
            with self._begin() as txn:
                names = [bytes(name) for name in islice(txn.cursor().iternext(values=False), _NAMES_MAX + 1)]
                if len(names) > _NAMES_MAX or names != sorted(set(names)):
                    raise Corruption(str(self.path), "the list of its locality groups is damaged")
                return [name.decode(errors="replace") for name in names if name not in (_EPOCH, _STOP)]
        except lmdb.Error as error:
            raise self._unreadable(error) from error

    def survey(self) -> Iterator[Pages]:
        """Go through all pages of the file, without LMDB (see `pages.survey`). A view pins the pages meanwhile. Raises:
        Corruption."""
        file = os.open(self.path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for _ in range(_SURVEYS_MAX):
                with self._begin() as txn:
                    try:
                        yield from survey(file, self.page_bytes, txn.id())
                        return
                    except LookupError:  # another process has committed twice since
                        continue
            raise Unavailable(f"{self.path}: it is written to faster than it can be read through")
        except PageDamaged as error:
            raise Corruption(str(self.path), str(error)) from error
        except lmdb.Error as error:
            raise self._unreadable(error) from error
        finally:
            os.close(file)

    def verify_from(self, group: str, key: bytes, count: int, size: int) -> bytes | None:
        """Read cells of a group, up to a number of cells or bytes: each in order, and then again by a search. A search
        descends from the root, so if inner pages are damaged, it misses cells, as reads and writes would.

        Returns: the key at which to continue; None: there are no more cells. Raises: Corruption.
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
        """The bytes of the file that have ever been written; freed pages are reused. (A damaged file: any number.)"""
        return min(int(self._env.info()["last_pgno"] + 1) * self.page_bytes, sys.maxsize)

    def live_bytes(self) -> int:
        """The bytes that cells take: the pages of all groups. The rest of `used_bytes` is free, or LMDB's free list."""
        try:
            with self._begin() as txn:
                stats = [self._env.stat(), *(txn.stat(db) for db in list(self._dbs.values()))]
        except lmdb.Error as error:
            raise self._unreadable(error) from error
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return int(_META_PAGES + pages) * self.page_bytes

    # ------------------------------------------------------------ writing (the writer's thread)

    def take_over(self) -> int:
        """Fence off every process that had the environment open for writing before (F1). Returns the new epoch. Call
        this before the writer's thread begins. Raises: StoreFull."""
        try:
            with self._env.begin(write=True) as txn:
                self._epoch = next_epoch(txn.get(_EPOCH))
                txn.put(_EPOCH, self._epoch)
            if self.native is not None:
                self.native.fence(self._epoch)
        except lmdb.Error as error:
            if _is_full(error) or isinstance(error, lmdb.MapFullError):
                raise StoreFull(str(self.path), str(error)) from error
            raise self._disk_failed(error) from error
        return int.from_bytes(self._epoch, "big")

    def epoch(self) -> int:
        """How often the environment has been taken over."""
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
        """Check and write a batch in one write transaction; each mutation gets its own verdict (S1, S4).

        `empty`: groups that hold no cell, and into which this batch puts none. If this raises, nothing was written; the
        caller may try a smaller batch.
        """
        if self.native is not None:
            made = self.native.apply(mutations, _ANY_ROOM, floor, empty)
            if isinstance(made, tuple):
                return self.after_failure(made, len(mutations))
            if made is not None:
                if written is not None:
                    written()
                return made  # type: ignore[no-any-return]
        committing = 0
        try:
            with self._env.begin(write=True) as txn:
                self._check_epoch(txn)
                batch = LmdbView(txn, self._dbs)
                verdicts: list[Verdict] = [check_and_write(batch, mutation, floor, empty) for mutation in mutations]
                committing = txn.id()
                if not any(isinstance(verdict, Applied) for verdict in verdicts):
                    txn.abort()
                if written is not None:
                    written()
            return verdicts
        except lmdb.Error as error:
            if isinstance(error, lmdb.MapFullError) or _is_full(error) or committing:
                return self._failed(error, committing, len(mutations))
            if isinstance(error, _DAMAGE):
                raise self._unreadable(error) from error
            raise

    def after_failure(self, failure: tuple[int, str, int], mutations: int) -> list[Verdict]:
        """The verdicts of a batch whose commit failed in the extension; raises as `commit` does."""
        return self._failed(error_of(failure), failure[2], mutations)

    def _failed(self, error: lmdb.Error, committing: int, mutations: int) -> list[Verdict]:
        if isinstance(error, lmdb.MapFullError):
            raise MapTooSmall from error
        if _is_full(error):
            raise StoreFull(str(self.path), str(error)) from error
        if self._surely_not(committing):
            raise self._disk_failed(error) from error
        return [NoReply(f"LMDB: {error}")] * mutations

    def _surely_not(self, txn_id: int) -> bool:
        """Whether a failed commit has certainly left nothing behind: its meta page, which is written last, was not
        written."""
        try:
            with self._env.begin():  # raises if LMDB could not restore the meta page
                return int(self._env.info()["last_txnid"]) < txn_id
        except lmdb.Error:
            return False  # the environment is broken: it is not known what is on disk

    def _disk_failed(self, error: lmdb.Error) -> StoreFull | Unavailable:
        """The error for a failed write. LMDB reports a short write as an I/O error; usually the disk is full."""
        free = os.statvfs(self.path)
        if free.f_bavail * free.f_frsize < self.options.ahead_bytes:
            return StoreFull(str(self.path), str(error))
        return Unavailable(f"{self.path}: the disk failed ({error})")

    def repack(self, group: str, start: bytes, cells: int, skip: int) -> tuple[bytes | None, bool]:
        """Rewrite some cells in order, so that they fill their pages. Removals leave pages half empty, because LMDB
        itself merges a page only when less than a quarter of it is used.

        Args:
            start: the key to begin at.
            cells, skip: how many cells to rewrite, and how many to skip first.

        Returns: the key at which to continue (None: there are no more cells), and whether the rewrite was worth it; if
        not, nothing was written.
        Raises: MapTooSmall; StoreFull, if LMDB could not use the free pages; Unavailable.
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
        if any(len(value) > self.page_bytes // 3 for _, value in found):
            return after, False  # long values have pages of their own
        for key, _ in found:
            txn.delete(key, b"", db)
        for key, value in found:
            txn.put(key, value, True, True, False, db)
        saved = before - txn.stat(db)["leaf_pages"]
        return after, saved * self.page_bytes > size * _WORTH

    # ------------------------------------------------------------ splitting

    def another(self, path: Path, groups: Sequence[str], options: LmdbOptions) -> LmdbEngine:
        """Make an environment for a copy of this one's cells, in an existing empty folder."""
        return LmdbEngine(path, groups, options, readonly=False, lock=True)

    def cells_from(self, group: str, key: bytes, count: int, size: int) -> list[tuple[bytes, bytes]]:
        """The cells of a group, in order, from a key on: at most `count` cells, and no further ones once their values
        have `size` bytes in total. On any thread that holds `still`."""
        found: list[tuple[bytes, bytes]] = []
        with self._from(group, key, values=True) as cells:
            for cell in islice(cells, count):
                found.append(cell)
                size -= len(cell[1])
                if size <= 0:
                    break
        return found

    def keys_from(self, group: str, key: bytes, count: int) -> list[bytes]:
        """At most `count` keys of a group, in order, from a key on. On any thread that holds `still`."""
        with self._from(group, key, values=False) as keys:
            return list(islice(keys, count))

    @contextmanager
    def _from(self, group: str, key: bytes, *, values: bool) -> Iterator[Iterator[Any]]:
        """All cells of a group from a key on; without `values`, their keys."""
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
        """Put or remove cells, in this order, without checks.

        Raises: MapTooSmall; StoreFull, Unavailable.
        """
        with self._beside_batches() as txn:
            for group, key, value in cells:
                if value is None:
                    txn.delete(key, b"", self._dbs[group])
                else:
                    txn.put(key, value, True, True, False, self._dbs[group])

    def append(self, cells: Mapping[str, Sequence[tuple[bytes, bytes]]]) -> None:
        """Put cells behind all others of their groups, in order (P7). Raises: StoreFull, Unavailable; UsageError if
        they are not in order."""
        with self._beside_batches() as txn:
            for group, some in cells.items():
                with txn.cursor(self._dbs[group]) as cursor:
                    if cursor.putmulti(some, True, True, True)[1] != len(some):
                        raise UsageError(f"{self.path}: the cells of group {group!r} are not in order")

    def take_marks(self, other: LmdbEngine) -> None:
        """Copy the marks (F1, P4) of another environment, which this one replaces (P6)."""
        with other.still, other._env.begin() as txn:
            marks = [(name, txn.get(name)) for name in (_EPOCH, _STOP)]
        with self._beside_batches() as txn:
            for name, mark in marks:
                if mark is not None:
                    txn.put(name, mark)

    def fill_up(self) -> None:
        """Extend the file to the length that its pages require: LMDB does not write the last page if it is freed before
        the commit."""
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
                f"compacting it needs {need >> 20} MiB for a while, but only {free >> 20} MiB are free",
            )

    def file_bytes(self) -> int:
        """The length of the file."""
        return os.fstat(self._data).st_size

    def file_of_view(self) -> int:
        """A descriptor of the file, for pages that a view pins. Close it. Raises: Unavailable if another file is just
        taking the place of this one (P6), which a process beside the owner still has open."""
        if not self.readonly:
            return os.dup(self._data)
        try:
            file = os.open(self.path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"{self.path}: {error.strerror or error}") from error
        found = os.fstat(file)
        if (found.st_dev, found.st_ino) != self._identity:
            os.close(file)
            raise Unavailable(f"{self.path}: another file has replaced the one that is open")
        return file

    def moved(self, path: Path) -> bool:
        """Whether another file has replaced the one that is open (P6)."""
        try:
            return _identity(path / "data.mdb") != self._identity
        except OSError:
            return True

    def remove_from(self, row: bytes, cells: int) -> bool:
        """Remove at most `cells` cells of this row and of the rows after it; another tablet has them (P4). On the
        writer's thread, between batches.

        Returns whether there may be more. Raises: MapTooSmall; StoreFull; Unavailable.
        """
        prefix = escape(row)
        removed = 0
        with self._beside_batches() as txn:
            self._check_epoch(txn)
            txn.put(_STOP, row)
            # DATA and WRITE last: the waiting changes and the locks are counted in other groups (`entries`), and until
            # their moved cells are removed here, both tablets count them.
            for group in sorted(self._dbs, key=lambda group: group in (DATA, WRITE)):
                if group == LOG:
                    continue
                with txn.cursor(self._dbs[group]) as cursor:
                    if not cursor.set_range(prefix):
                        continue
                    while removed < cells and cursor.delete():
                        removed += 1
            more = removed >= cells or self._remove_logged(txn, prefix, _VISITED * cells)
            if not removed and LOG not in self._dbs:
                txn.abort()
        return more

    def _remove_logged(self, txn: Any, prefix: bytes, entries: int) -> bool:
        """Go through at most `entries` entries of the log, and remove those of these rows. Returns whether there may be
        more. (If the process ends before that, readers skip the rest, and a compaction leaves it out.)"""
        if LOG not in self._dbs:
            return False
        with txn.cursor(self._dbs[LOG]) as cursor:
            more = cursor.set_range(self._log_at)
            for _ in range(entries):
                if not more:
                    break
                self._log_at = cursor.key()
                gone = split_log_key(self._log_at)[0] >= prefix
                more = cursor.delete() and bool(cursor.key()) if gone else cursor.next()
        self._log_at = self._log_at if more else b"\0"
        return bool(more)

    def has_from(self, row: bytes) -> bool:
        """Whether there is any cell from a row on."""
        prefix = escape(row)
        with self.still:
            return any(self.keys_from(group, prefix, 1) for group in list(self._dbs) if group != LOG)

    def make_room(self, need_bytes: int, *, reserve: bool) -> StoreFull | None:
        """Allocate space in the file before a batch that may need `need_bytes` is written; None: there is room (S4)."""
        wanted = self._wanted(need_bytes, reserve=reserve)
        if wanted <= self._allocated:
            return None
        size = wanted + max(self.options.ahead_bytes, wanted // 16)
        for target in (size, wanted):
            try:
                os.posix_fallocate(self._data, self._allocated, target - self._allocated)
            except OSError as error:
                if error.errno not in _FULL:
                    return None  # the file system cannot allocate ahead: a commit fails if there is no room
                full = StoreFull(str(self.path), error.strerror or str(error))
                continue
            self._allocated = target
            self._set_limit()
            return None
        return full

    def stay_slow(self) -> None:
        """Do without the extension from now on."""
        if self.native is not None:
            self.native.close()
            self.native = None

    def _set_limit(self) -> None:
        """Tell the extension for how many bytes there is room; it hands larger batches back (S4)."""
        if self.native is not None:
            self.native.limit = min(self._allocated, self.map_bytes)

    def has_free(self, need_bytes: int, *, reserve: bool) -> bool:
        """Whether `need_bytes` fit into free pages, although the file cannot grow: this may be so after old versions
        were removed on a full disk (S4). Some of these pages may have been freed too recently to be reused, or be too
        scattered for a long value; then the commit itself fails."""
        wanted = self.live_bytes() + need_bytes + (0 if reserve else self.options.reserve_bytes)
        return wanted <= min(self._allocated, self.map_bytes)

    def has_map_for(self, need_bytes: int, *, reserve: bool) -> bool:
        """Whether the map has room for `need_bytes` and, unless `reserve` is True, for the reserve on top (S4)."""
        return self._wanted(need_bytes, reserve=reserve) <= self.map_bytes

    def _wanted(self, need_bytes: int, *, reserve: bool) -> int:
        return self.used_bytes() + need_bytes + (0 if reserve else self.options.reserve_bytes)

    def grow(self, need_bytes: int, *, reserve: bool) -> StoreFull | None:
        """At least double the map, up to its limit. Call this only while no transaction is open in this process
        (S6)."""
        self.end_shared()
        wanted = self._wanted(need_bytes, reserve=reserve)
        size = 2 * self.map_bytes
        while size < wanted:
            size *= 2
        size = min(size, self.options.map_bytes_max)
        if size < wanted or size <= self.map_bytes:
            return StoreFull(str(self.path), f"the map would grow over map_bytes_max={self.options.map_bytes_max}")
        try:
            # LMDB gives up the old map before it makes the new one, and is lost without one: look first.
            with mmap.mmap(-1, size - self.map_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ):
                pass
        except OSError as error:
            return StoreFull(str(self.path), f"the map cannot grow to {size >> 20} MiB: {error}")
        try:
            with self.still:
                self._env.set_mapsize(size)
        except lmdb.Error as error:
            if self.native is not None:
                self.native.lose()
                self.native = None
            return StoreFull(str(self.path), f"the map is lost: {error}")
        self.map_bytes = size
        self._set_limit()
        return None

    def add_groups(self, groups: Sequence[str]) -> None:
        """Make groups that the environment lacks. On the writer's thread, between batches."""
        self._open_groups([group for group in groups if group not in self._dbs])

    def clear_dead_readers(self) -> int:
        """Free the reader slots of processes that died, which would pin pages for good."""
        return int(self._env.reader_check())

    def sync(self) -> None:
        self._env.sync(True)

    def forget(self) -> None:
        """In a forked child: drop the environment without touching what the parent has open (S5)."""
        self.native = None  # its view is the parent's
        if self._shared is None and not self.busy and not self.still.locked():
            self.close()  # otherwise LMDB would not open it again in this process
        else:
            # Ending the view would free the parent's reader slot, and so the pages that the parent reads. And if the
            # writer's thread was at work, it held locks of LMDB that no thread of this process will ever release.
            _parents.append(self)

    def close(self) -> None:
        self.end_shared()
        self.stay_slow()
        if self._data >= 0:
            os.close(self._data)
            self._data = -1
        with self.still:
            self._env.close()
