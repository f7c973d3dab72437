"""The work of a task: loads a partition's rows, a group of them in each transaction, with many transactions in flight.

    Spark's iterator -> a few rows at a time, in a thread -> as many groups as may run at once -> the store

This module uses trio, but not Spark. Rows are read while other rows are loaded, at most two groups ahead. So loaders do
not wait for rows, but the reader waits for a slow store.

A row that fails costs no other row. If a loader raises an error, perco discards its transaction, and tries three
transactions instead: for the rows before this row, for this row alone, and for the rows after it. If a group's
transaction fails as a whole, as after many conflicts, perco tries two halves. So only a row that is alone in its
transaction can fail; the other rows are loaded, until there are too many failures. If the store is unavailable for too
long, its error ends the task, and Spark runs the task again; the ledger says which inputs are left.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import trio

import perco
from perco.errors import CommitUnknown, StoreError
from perco.settings import check_options
from perco.spark.ledger import Group, JobClosed, Ledger, Mark, Watch, surely, take_all

_REASON_MAX: Final = 500  # characters of a failed row, and of the reason
_FAILURES_KEPT: Final = 100
_AT_ONCE: Final = 64  # rows read at once, if each has a transaction of its own
_AHEAD: Final = 2  # groups that are read before a loader takes them
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


async def load_partition(
    db: perco.Database,
    rows: Iterator[Any] | Grouped,
    key: Callable[[Any], Any] | None,
    loader: Loader,
    ledger: Ledger,
    options: LoadOptions,
    result: PartitionResult,
) -> None:
    """Load what `rows` yields: rows or, if `key` is None, pairs (key, row). The counts go into `result`. Keys are of
    the kind that `ledger.mark` takes.

    Raises: the error that ends the task.
    """
    began = time.perf_counter()
    concurrency = options.concurrency or (_SINGLE if options.group == 1 else _GROUPS)
    send, receive = trio.open_memory_channel[list[Any]](_AHEAD)
    task = _Task(db, key, loader, ledger, options, result)

    async def read() -> None:
        async with send:
            if isinstance(rows, Grouped):
                while group := await trio.to_thread.run_sync(next, rows.lists, None):
                    await send.send(group)
                return
            at_once = min(concurrency, _AT_ONCE) if options.group == 1 else options.group
            while some := await trio.to_thread.run_sync(_some, rows, at_once):
                for at in range(0, len(some), options.group):
                    await send.send(some[at : at + options.group])

    async def take() -> None:
        async for some in receive:
            await task.take(some)
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
        self._watch = Watch(db, ledger)
        self._single = db.options(attempts=options.attempts)
        self._whole = db.options(attempts=min(options.attempts, _TRIES))

    async def take(self, given: list[Any]) -> None:
        """Take the rows of a group, or what `load_partition` is given for them."""
        result = self._result
        left = [Group(self._inputs(given))]
        while left and not result.stopped:
            group = left.pop()
            if not group.inputs:
                continue
            retrying = self._single if len(group.inputs) == 1 else self._whole
            try:
                await surely(retrying, take_all, self._ledger, self._watch, group, self._loader)
            except Exception as error:
                met = first_of(error)  # a loader may have tasks of its own
                if isinstance(met, CommitUnknown | JobClosed | StoreError) or not isinstance(met, Exception):
                    raise
                if len(group.inputs) == 1:
                    self._failed(group.inputs[0][1], met)
                else:
                    left += reversed(group.parts())
            else:
                result.committed += group.taken
                result.skipped += group.done - group.taken
                left.append(Group(group.inputs[group.done :]))

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


def _some(rows: Iterator[Any], count: int) -> list[Any]:
    some = []
    for row in itertools.islice(rows, count):
        trio.from_thread.check_cancelled()  # a task that fails waits for one more row at most
        some.append(row)
    return some


def short(text: str) -> str:
    """The text, cut to the length that a failure keeps."""
    return text if len(text) <= _REASON_MAX else text[:_REASON_MAX] + "..."
