"""The work of a task: loads a partition's rows, a group of them in each transaction, with many transactions in flight.

    Spark's iterator -> a few rows at a time, in a thread -> as many groups as may run at once -> the store

This module uses trio, but not Spark. Rows are read while other rows are loaded: two large groups ahead, or some
hundreds of rows. So loaders do not wait for rows, but the reader waits for a slow store.

A row that fails costs no other row. If a loader raises an error, perco discards its transaction, and tries three
transactions instead: for the rows before this row, for this row alone, and for the rows after it. If a group's
transaction fails as a whole, as after many conflicts, perco tries two halves. So only a row that is alone in its
transaction can fail; the other rows are loaded, until there are too many failures.

If chunks have marks, a chunk is what one transaction takes. Before a chunk without a mark is taken, all rows up to the
next mark are read and compared with that mark: so if the partition has changed, nothing of the changed part is loaded.

If the store is unavailable for too long, its error ends the task, and Spark runs the task again; the ledger says which
inputs are left.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import trio

import perco
from perco.errors import CommitUnknown, StoreError
from perco.settings import check_options
from perco.spark.chunks import Chunk, ChunkMark, FrameChanged, changed, must_be_same
from perco.spark.ledger import (
    Group,
    JobClosed,
    Ledger,
    Mark,
    chunks_taken,
    surely,
    take_all,
    take_of_chunk,
)

_REASON_MAX: Final = 500  # characters of a failed row, and of the reason
_FAILURES_KEPT: Final = 100
_AT_ONCE: Final = 64  # rows read at once, if fewer share a transaction
_AT_ONCE_MOST: Final = 8  # rows read at once for each transaction in flight, if each row has its own transaction
_AT_ONCE_BYTES: Final = 4 << 20  # fewer rows are read at once if these have so many bytes
_AT_ONCE_S: Final = 0.05  # or if they take so long
_AHEAD: Final = 2  # larger groups that are read before a loader takes them
_GROUPS: Final = 16  # transactions in flight in a partition, by default
_SINGLE: Final = 64  # the same, if each row has a transaction of its own
_TRIES: Final = 4  # how often a group that conflicts is tried as a whole

Loader = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """Attributes:
    group: how many rows share a transaction, at most; 1: each row has a transaction of its own. The loader runs for the
        rows of a group one after another, and sees its own writes for the earlier rows.
    concurrency: transactions in flight in each partition; by default 16, or 64 if each row has its own.
    attempts: how often a transaction that conflicts is tried.
    failures_max: how many inputs may fail without failing the job. Inputs that were loaded stay in any case.
    """

    group: int = 100
    concurrency: int | None = None
    attempts: int = 50
    failures_max: int = 0

    def __post_init__(self) -> None:
        check_options(self, zero=("failures_max",))


@dataclass(frozen=True, slots=True)
class Failure:
    """An input that has not been loaded: the beginning of its row as text, and the error."""

    row: str
    reason: str


@dataclass(slots=True)
class PartitionResult:
    """The result of a task.

    Attributes:
        partition, attempt: Spark's numbers; the attempt is the one whose result Spark used.
        committed, skipped, failed: numbers of inputs: those whose transaction has committed, those that were loaded
            before, and those that failed.
        stopped: whether the task stopped early, because there were too many failures.
        seconds: how long the task took.
        failures: the first failures.
    """

    partition: int
    attempt: int = 0
    committed: int = 0
    skipped: int = 0
    failed: int = 0
    stopped: bool = False
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rows that come in lists. Each list has the rows for a transaction."""

    lists: Iterator[list[Any]]


@dataclass(frozen=True, slots=True)
class Chunked:
    """Rows that come in chunks, which have marks (`perco.spark.chunks.cut`)."""

    chunks: Iterator[Chunk]


async def load_partition(
    db: perco.Database,
    rows: Iterator[Any] | Grouped | Chunked,
    key: Callable[[Any], Any] | None,
    loader: Loader,
    ledger: Ledger,
    options: LoadOptions,
    result: PartitionResult,
) -> None:
    """Load what `rows` yields: rows or, if `key` is None, pairs (key, row); or chunks. The counts go into `result`.
    Keys are of the kind that `ledger.mark` takes.

    Raises: the error that ends the task.
    """
    began = time.perf_counter()
    concurrency = options.concurrency or (_SINGLE if options.group == 1 else _GROUPS)
    at_once = least = max(1, _AT_ONCE // options.group)  # groups
    most = max(least, _AT_ONCE_MOST * concurrency) if options.group == 1 else least
    send, receive = trio.open_memory_channel[Sequence[list[Any] | Chunk]](_AHEAD if at_once == 1 else 0)
    task = _Task(db, key, loader, ledger, options, result)
    # Loaders whose calls were answered together take their next groups together: so their next calls share a frame.
    ready: deque[list[Any] | Chunk] = deque()
    turn = trio.Lock()

    async def read() -> None:
        nonlocal at_once
        async with send:
            if isinstance(rows, Chunked):
                comparing = _Comparing(db, ledger, result)
                while chunk := await trio.to_thread.run_sync(next, rows.chunks, None):
                    for compared in await comparing.ready(chunk):
                        await send.send([compared])
                await comparing.end()
                return
            lists = rows.lists if isinstance(rows, Grouped) else _grouped(rows, options.group)
            while groups := await trio.to_thread.run_sync(_some, lists, at_once):
                await send.send(groups)
                at_once = min(2 * at_once, most) if len(groups) == at_once else least

    async def take() -> None:
        while True:
            while not ready:
                async with turn:
                    if not ready:
                        try:
                            ready.extend(await receive.receive())
                        except trio.EndOfChannel:
                            return
            await task.take(ready.popleft())
            if result.stopped:
                nursery.cancel_scope.cancel()

    try:
        with one_error():
            async with receive, trio.open_nursery() as nursery:
                nursery.start_soon(read)
                for _ in range(concurrency):
                    nursery.start_soon(take)
    finally:
        result.seconds = time.perf_counter() - began


class _Task:
    """Takes the groups of a task."""

    def __init__(
        self,
        db: perco.Database,
        key: Callable[[Any], Any] | None,
        loader: Loader,
        ledger: Ledger,
        options: LoadOptions,
        result: PartitionResult,
    ) -> None:
        self._db, self._key, self._loader, self._ledger = db, key, loader, ledger
        self._options, self._result = options, result
        self._single = db.options(attempts=options.attempts)
        self._whole = db.options(attempts=min(options.attempts, _TRIES))

    async def take(self, given: list[Any] | Chunk) -> None:
        """Take the rows of a group or a chunk, or what `load_partition` is given for them."""
        if not isinstance(given, Chunk):
            await self._take(Group(self._inputs(given)), take_all)
            return
        marked = await self._take(Group([*enumerate(given.rows)], given), take_of_chunk)
        if not marked:
            # All rows have failed. Later attempts hold rows back until the next mark, so no chunk is left without one.
            await surely(self._single, take_of_chunk, self._ledger, Group([], given), self._loader)

    async def _take(self, whole: Group, takes: Callable[..., Awaitable[None]]) -> bool:
        """Returns whether a transaction has taken inputs of the group, or has found that they had been taken."""
        result = self._result
        some = False
        left = [whole]
        while left and not result.stopped:
            group = left.pop()
            if not group.inputs:
                continue
            retrying = self._single if len(group.inputs) == 1 else self._whole
            try:
                await surely(retrying, takes, self._ledger, group, self._loader)
            except Exception as error:
                met = first_of(error)  # a loader may have tasks of its own
                ends = isinstance(met, CommitUnknown | JobClosed | FrameChanged | StoreError)
                if ends or not isinstance(met, Exception):
                    raise
                if len(group.inputs) == 1:
                    self._failed(group.inputs[0][1], met)
                else:
                    left += reversed(group.parts())
            else:
                result.committed += group.taken
                result.skipped += group.done - group.taken
                left.append(group.rest())
                some = True
        return some

    def _inputs(self, given: list[Any]) -> list[tuple[Mark, Any]]:
        """The mark and the row of each input that has a key; the others have failed."""
        inputs = []
        for each in given:
            row = each if self._key is not None else each[1]
            try:
                mark = self._ledger.mark(self._db, self._key(each) if self._key is not None else each[0])
            except Exception as error:
                self._failed(row, error)
            else:
                inputs.append((mark, row))
        return inputs

    def _failed(self, row: Any, error: Exception) -> None:
        result = self._result
        result.failed += 1
        result.stopped = result.stopped or result.failed > self._options.failures_max
        if len(result.failures) < _FAILURES_KEPT:
            text = short(f"{type(error).__name__}: {error}")
            result.failures.append(Failure(short(str(row)), text))


class _Comparing:
    """Compares the chunks of a partition, as they are read, with the marks that were there before, and holds a chunk
    without a mark back until the next mark has been compared: its digest includes the rows of the chunk.

    An attempt has at most `concurrency` chunks in flight, and leaves no other chunk without a mark before a chunk with
    a mark. So no more chunks than that are held back.
    """

    def __init__(self, db: perco.Database, ledger: Ledger, result: PartitionResult) -> None:
        self._db, self._ledger, self._result = db, ledger, result
        self._marks: deque[tuple[int, ChunkMark]] = deque()
        self._further: int | None = 0  # where to read marks on
        self._held: list[Chunk] = []

    async def ready(self, chunk: Chunk) -> list[Chunk]:
        """The chunks to take now that this one has been read. Raises: FrameChanged."""
        self._held.append(chunk)
        found = await self._next()
        if found is None:
            return self._release()
        first, mark = found
        if first > chunk.first:
            return []
        if first < chunk.first:
            raise self._changed(f"before row {chunk.first}")
        must_be_same(self._ledger.job, chunk, mark)
        self._marks.popleft()
        if mark.rows == len(chunk.rows):
            self._held.pop()
            self._result.skipped += mark.rows
        return self._release()

    async def end(self) -> None:
        """All chunks have been read. Raises: FrameChanged if there are further marks."""
        if (found := await self._next()) is not None:
            raise self._changed(f"and ends before row {found[0]}")

    async def _next(self) -> tuple[int, ChunkMark] | None:
        """The next mark to compare."""
        while not self._marks and self._further is not None:
            marks, self._further = await chunks_taken(self._db, self._ledger, self._result.partition, self._further)
            self._marks += marks
        return self._marks[0] if self._marks else None

    def _release(self) -> list[Chunk]:
        held, self._held = self._held, []
        return held

    def _changed(self, where: str) -> FrameChanged:
        return changed(self._ledger.job, self._result.partition, where)


def first_of(group: BaseException) -> BaseException:
    """The first error of a group, with its own traceback, so that Spark can show it."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


@contextmanager
def one_error() -> Iterator[None]:
    """If a nursery inside the block raises several errors, raise only the first."""
    try:
        yield
    except ExceptionGroup as group:
        raise first_of(group) from None


def _grouped(rows: Iterator[Any], count: int) -> Iterator[list[Any]]:
    group = []
    for row in rows:
        trio.from_thread.check_cancelled()  # a task that fails waits for one more row at most
        group.append(row)
        if len(group) == count:
            yield group
            group = []
    if group:
        yield group


def _some(groups: Iterator[list[Any]], count: int) -> list[list[Any]]:
    """The next groups: `count` or, if their rows are large or come slowly, fewer."""
    some: list[list[Any]] = []
    size, until = 0, time.perf_counter() + _AT_ONCE_S
    for group in itertools.islice(groups, count):
        trio.from_thread.check_cancelled()
        some.append(group)
        if count > 1:
            size += sum(map(size_of, group))
        if size >= _AT_ONCE_BYTES or time.perf_counter() >= until:
            break
    return some


def size_of(value: Any) -> int:
    """The length of the texts, byte strings and lists of numbers in a value."""
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    elif isinstance(value, list):
        if not value or not isinstance(value[0], bytes | bytearray | str | list | tuple | dict):
            return 8 * len(value)
    elif not isinstance(value, tuple):
        return 0
    return sum(map(size_of, value))


def short(text: str) -> str:
    """The text, cut to the length that a failure keeps."""
    return text if len(text) <= _REASON_MAX else text[:_REASON_MAX] + "..."
