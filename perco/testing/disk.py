"""A disk in memory that outlives processes, and the tablets that processes open on it.

The tablets are perco's own (`LmdbTablet`: its queue, its batches, the mutations that it holds back at the end of a
split). They run on an engine in memory that behaves like an LMDB environment: a batch is written as a whole or not at
all; a shared view does not see later batches; an epoch fences off the previous writer (F1). Tasks, in virtual time, do
the work of production code's threads. If a process dies in the middle of a batch, the next process finds either the
whole batch or none of it.
"""

from __future__ import annotations

import threading
from _thread import LockType
from collections import deque
from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeVar

import trio
import trio.lowlevel

from perco.errors import StoreError, StoreFull, TabletSplit
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import (
    LOG,
    BatchOptions,
    Failed,
    LmdbOptions,
    LmdbTablet,
    Mutation,
    NoReply,
    RowCells,
    ScanPage,
    ScanRequest,
    Tablet,
    Verdict,
    fencing,
)
from perco.storage.engine import MemoryBatch, MemoryEngine
from perco.storage.handover import Handover, Written
from perco.storage.row import NOWHERE, check_and_write, read_row, scan_rows
from perco.storage.tablet import Resubmit
from perco.tablets.local import LocalStore, Placed
from perco.testing.processes import Process

T = TypeVar("T")
_PAGE = 20  # cells that are copied at a time
Cells = Sequence[tuple[str, bytes, "bytes | None"]]


class Environment:
    """A tablet on the disk. `cells`: all of its cells; `epoch`: see F1; `stop`: the mark of P5, the first row that has
    been removed; `writer`: the environment through which the tablet was last opened for writing, None if it never
    was."""

    cells: MemoryEngine

    def __init__(self) -> None:
        self.cells = MemoryEngine()
        self.epoch = b""
        self.stop: bytes | None = None
        self.writer: MemoryEnvironment | None = None


class Disk:
    """Environments by name. `problems`: writes to these environments that should not have happened."""

    def __init__(self) -> None:
        self.environments: dict[str, Environment] = {}
        self.problems: list[str] = []

    def open(self, name: str) -> Environment:
        return self.environments.setdefault(name, Environment())

    def place(self, name: str) -> None:
        """Give a finished copy its name (P4)."""
        self.environments[name] = self.environments.pop(f"{name}.new")


class MemoryEnvironment:
    """An environment that a process has open; it replaces `LmdbEngine`."""

    name: str
    readonly: bool
    options: LmdbOptions
    still: LockType

    def __init__(self, disk: Disk, name: str, groups: Sequence[str] = (), *, readonly: bool = False) -> None:
        self._disk, self.name, self.readonly = disk, name, readonly
        self._at = disk.open(name)
        self._at.cells.logs = self._at.cells.logs or LOG in groups
        self._shared: MemoryEngine | None = None  # the view that several reads share
        self._epoch = b""
        self.options = LmdbOptions()
        self.still = threading.Lock()
        self.busy = False
        self.native: None = None
        self.full = False  # the disk is full, except for the reserve
        self.gone = False  # the process is dead: it must not write while its tasks are unwound
        self.map_bytes = 1 << 30

    @property
    def logs(self) -> bool:
        return self._at.cells.logs

    # ------------------------------------------------------------ reading

    def read(
        self, row: bytes, queries: Sequence[Any], empty: Container[str] = NOWHERE, *, shared: bool = False
    ) -> RowCells:
        if self._shared is not None:
            return read_row(self._shared, row, queries, empty)
        if shared:
            self._shared = self._at.cells
        elif self.readonly:
            self._check_stop(row)
        return read_row(self._at.cells, row, queries, empty)

    def end_shared(self) -> None:
        self._shared = None

    def _check_stop(self, row: bytes) -> None:
        if self._at.stop is not None and row >= self._at.stop:
            raise TabletSplit(self.name)

    def scan(self, request: ScanRequest) -> ScanPage:
        if (
            self.readonly
            and self._at.stop is not None
            and not (request.stop is not None and request.stop <= self._at.stop)
        ):
            raise TabletSplit(self.name)
        return scan_rows(self._at.cells, request)

    def entries(self, group: str) -> int:
        return self._at.cells.entries(group)

    def groups(self) -> list[str]:
        return self._at.cells.groups()

    def used_bytes(self) -> int:
        return 0

    def live_bytes(self) -> int:
        return 0

    def has_from(self, row: bytes) -> bool:
        return self._at.cells.has_from(row)

    # ------------------------------------------------------------ writing

    def take_over(self) -> int:
        self._at.epoch = self._epoch = fencing.next_epoch(self._at.epoch)
        self.is_mine()
        return int.from_bytes(self._epoch, "big")

    def is_mine(self) -> None:
        """Record that from now on, no other process may write to the tablet (F1)."""
        self._at.writer = self

    def _changing(self) -> MemoryEngine:
        """The cells to write to; readers of a shared view keep the old state."""
        if self.gone:
            raise StoreError("the process is dead")
        fencing.check_epoch(self._epoch, self._at.epoch, self.name)
        if self._at.writer not in (None, self):
            self._disk.problems.append(
                f"F1: {self.name} is written to by a process from which another has taken it over"
            )
        if self._shared is self._at.cells:
            self._shared = self._at.cells.copy_from(b"")
        return self._at.cells

    def commit(
        self,
        mutations: Sequence[Mutation],
        floor: int,
        written: Callable[[], None] | None = None,
        empty: Container[str] = NOWHERE,
    ) -> list[Verdict]:
        cells = self._changing()
        verdicts: list[Verdict] = []
        for mutation in mutations:
            batch = MemoryBatch(cells)
            verdicts.append(check_and_write(batch, mutation, floor, empty))
            batch.commit()
        return verdicts

    def put_cells(self, cells: Cells) -> None:
        into = self._changing()
        for group, key, value in cells:
            if value is None:
                into.delete(group, key)
            else:
                into.put(group, key, value)

    def remove_from(self, row: bytes, cells: int) -> bool:
        engine = self._changing()
        if engine.has_from(row):
            self._at.stop = row  # P5
            engine.remove_from(row)
        return False

    def repack(self, group: str, start: bytes, cells: int, skip: int) -> tuple[bytes | None, bool]:
        self._changing()
        return None, False

    def add_groups(self, groups: Sequence[str]) -> None:
        self._changing()

    # ------------------------------------------------------------ room

    def has_map_for(self, need_bytes: int, *, reserve: bool) -> bool:
        return True

    def make_room(self, need_bytes: int, *, reserve: bool) -> StoreFull | None:
        return StoreFull(self.name, "the simulation's disk is full") if self.full and not reserve else None

    def has_free(self, need_bytes: int, *, reserve: bool) -> bool:
        return reserve

    # ------------------------------------------------------------ splitting

    def another(self, path: Path, groups: Sequence[str], options: LmdbOptions) -> MemoryEnvironment:
        """An environment for a copy of some of this one's cells; see `LmdbEngine.another`."""
        self._disk.environments[f"{path.name}.new"] = Environment()
        return MemoryEnvironment(self._disk, f"{path.name}.new", groups)

    def cells_from(self, group: str, key: bytes, count: int, size: int) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = []
        cursor = self._at.cells.cursor(group)
        more = cursor.set_range(key)
        while more and len(found) < min(count, _PAGE):
            found.append(cursor.item())
            more = cursor.next()
        return found

    def keys_from(self, group: str, key: bytes, count: int) -> list[bytes]:
        return [at for at, _ in self.cells_from(group, key, count, 0)]

    def take_marks(self, other: MemoryEnvironment) -> None:
        """See `LmdbEngine.take_marks`."""
        self._at.epoch, self._at.stop = other._at.epoch, other._at.stop

    def clear_dead_readers(self) -> int:
        """Returns 0: readers of memory hold nothing back."""
        return 0

    def check_room_for_copy(self) -> None:
        """Raises nothing: there is always room."""

    def fill_up(self) -> None:
        """Nothing to do: there is no file."""

    def sync(self) -> None:
        """Nothing to do: the disk is memory."""

    def close(self) -> None:
        self._shared = None

    def forget(self) -> None:
        """Nothing to do: no process forks."""


class Befalls(Protocol):
    """Decides which fault hits a batch."""

    def batch(self, process: Process, tablet: str, mutations: Sequence[Mutation]) -> str:
        """Choose "", "FULL", "DIES_BEFORE", "DIES_AFTER", or "STOPS_BEFORE" (for so long that another process may take
        over)."""
        ...

    def kill(self, process: Process) -> None: ...
    def stop(self, process: Process) -> None: ...
    def pause_s(self, process: Process, *, beside: bool = False) -> float:
        """The duration, in seconds, of a step that production code does on another thread. `beside`: a background step,
        for example of a copy."""
        ...


class DiskTablet(LmdbTablet):
    """An `LmdbTablet` whose writer is a task, not a thread."""

    def __init__(
        self,
        table: str,
        start: bytes,
        engine: MemoryEnvironment,
        batch: BatchOptions,
        resubmit: Resubmit,
        process: Process,
        befalls: Befalls,
        rng: Random,
        floor: int = 0,
    ) -> None:
        handover = Handover()
        handover._let_go = None  # there is one thread
        self._rng, self._process, self._befalls = rng, process, befalls
        self._orders: deque[Any] = deque()
        self._ordered = trio.Event()
        self._over = trio.Event()
        super().__init__(table, start, engine, batch, resubmit, handover, floor)  # type: ignore[arg-type]
        trio.lowlevel.spawn_system_task(self._write_in_virtual_time, name=f"writer-{engine.name}")

    # ------------------------------------------------------------ replacements for threads and real clocks

    def _cpu_s(self) -> float:
        return self._rng.random() / 1000

    def _now_s(self) -> float:
        return self._rng.random()

    def _hand_over(
        self,
        mutations: Sequence[Mutation],
        room: int,
        done: Callable[[Sequence[Verdict]], None],
        written: Written | None = None,
        empty: Container[str] = NOWHERE,
    ) -> None:
        if written is not None:
            written.tell()  # else the loop would wait, in real time
        self._thread = threading.current_thread()  # not None: something was written
        self._orders.append((mutations, room, done, empty))
        self._ordered.set()

    async def _beside(self, act: Callable[..., T], *args: Any) -> T:
        await trio.sleep(self._befalls.pause_s(self._process, beside=True))
        if self._process.dead:
            raise StoreError("the process is dead")
        return act(*args)

    async def _join(self) -> None:
        self._orders.append(None)
        self._ordered.set()
        await self._over.wait()

    async def _write_in_virtual_time(self) -> None:
        while True:
            while not self._orders:
                await self._ordered.wait()
                self._ordered = trio.Event()
            order = self._orders.popleft()
            if order is None:
                break
            mutations, room, done, empty = order
            await trio.sleep(self._befalls.pause_s(self._process))
            verdicts = await self._written(mutations, room, empty)
            self.engine.gone = self._process.dead  # type: ignore[attr-defined]
            done(verdicts)
        self._over.set()

    async def _written(self, mutations: Sequence[Mutation], room: int, empty: Container[str]) -> Sequence[Verdict]:
        engine: Any = self.engine
        what = self._befalls.batch(self._process, engine.name, mutations) if mutations else ""
        if what == "STOPS_BEFORE":
            self._befalls.stop(self._process)
            await trio.lowlevel.checkpoint()  # F1: when the process continues, it writes only if it still may
        if what == "DIES_BEFORE":
            self._befalls.kill(self._process)
            await trio.lowlevel.checkpoint()  # the process is dead: this wait ends at its unwinding (`bury`)
        if self._process.dead:
            return [Failed(StoreError("the process is dead"))] * len(mutations)
        engine.full = what == "FULL"
        try:
            verdicts = self._commit(mutations, room, None, empty)
        except Exception as error:
            verdicts = [NoReply(f"{type(error).__name__}: {error}")] * len(mutations)
        engine.full = False
        if what == "DIES_AFTER":
            self._befalls.kill(self._process)
        await trio.sleep(self._befalls.pause_s(self._process))
        return verdicts


class DiskStore(LocalStore):
    """The row store of a process, on the disk."""

    def __init__(self, disk: Disk, process: Process, befalls: Befalls, rng: Random, **more: Any) -> None:
        self._disk, self._process, self._befalls, self._rng = disk, process, befalls, rng
        self._placing = ""  # the tablet that is being split off
        super().__init__(
            "memory:", durable=True, readonly=False, accept_loss=False, lmdb=LmdbOptions(), batch=BatchOptions(), **more
        )

    def _opened(
        self, table: str, placed: Placed, every: Sequence[str], opened: ExitStack, *, sync: bool | None = None
    ) -> Tablet:
        if self._placing == f"{table}-{placed[0]}":
            self._disk.place(self._placing)
        if self._elsewhere is not None and table != SYSTEM_TABLE:
            return super()._opened(table, placed, every, opened, sync=sync)
        number, start, _ = placed
        self._numbers.setdefault(table, {})[number] = start
        engine = MemoryEnvironment(self._disk, f"{table}-{number}", every)
        engine.is_mine()
        return DiskTablet(table, start, engine, self._batch, self.store.submit, self._process, self._befalls, self._rng)

    async def split(
        self, table: str, row: bytes, number: int, record: Callable[[], Awaitable[None]]
    ) -> tuple[int, float]:
        self._placing = f"{table}-{number}"
        try:
            return await super().split(table, row, number, record)
        finally:
            self._placing = ""
