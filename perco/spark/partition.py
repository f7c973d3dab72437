"""The work of a task: loads a partition's rows, each in a transaction of its own, with many transactions in flight.

    Spark's iterator -> a few rows at a time, in a thread -> as many loaders as may run at once -> the store

This module uses trio, but not Spark. Rows are read in batches while other rows are loaded, at most two batches ahead. A
batch has as many rows as there are loaders, but no more than 64. So loaders do not wait for rows, but the reader waits
for a slow store. If a loader raises an error, its row has failed: the row's transaction is discarded, and the other
loaders continue until there are too many failures. If the store is unavailable for too long, its error ends the task,
and Spark runs the task again; the ledger says which inputs are left.
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
from perco.spark.ledger import JobClosed, Ledger, Watch, surely, take as take_input

_REASON_MAX: Final = 500  # characters of a failed row, and of the reason
_FAILURES_KEPT: Final = 100
_AT_ONCE: Final = 64  # rows read at once, at most

Loader = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """Attributes:
    concurrency: transactions in flight in each partition.
    attempts: how often a transaction that conflicts is tried.
    failures_max: how many inputs may fail without failing the job. Inputs that were loaded stay in any case.
    """

    concurrency: int = 64
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


async def load_partition(
    db: perco.Database,
    rows: Iterator[Any],
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
    retrying = db.options(attempts=options.attempts)
    at_once = min(options.concurrency, _AT_ONCE)
    send, receive = trio.open_memory_channel[Any](at_once)
    watch = Watch(db, ledger)

    async def read() -> None:
        async with send:
            while some := await trio.to_thread.run_sync(_some, rows, at_once):
                for row in some:
                    await send.send(row)

    async def take() -> None:
        async for given in receive:
            row = given if key is not None else given[1]
            try:
                mark = ledger.mark(db, key(given) if key is not None else given[0])
                taken = await surely(retrying, take_input, ledger, watch, mark, loader, row)
            except Exception as error:
                met = first_of(error)  # a loader may have tasks of its own
                if isinstance(met, CommitUnknown | JobClosed | StoreError) or not isinstance(met, Exception):
                    raise
                _failed(result, row, met)
                if result.failed > options.failures_max:
                    result.stopped = True
                    nursery.cancel_scope.cancel()
            else:
                if taken:
                    result.committed += 1
                else:
                    result.skipped += 1

    try:
        with one_error():
            async with receive, trio.open_nursery() as nursery:
                nursery.start_soon(read)
                for _ in range(options.concurrency):
                    nursery.start_soon(take)
    finally:
        result.seconds = time.perf_counter() - began


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


def _failed(result: PartitionResult, row: Any, error: Exception) -> None:
    result.failed += 1
    if len(result.failures) >= _FAILURES_KEPT:
        return
    text = short(f"{type(error).__name__}: {error}")
    result.failures.append(Failure(short(str(row)), text))


def short(text: str) -> str:
    """The text, cut to the length that a failure keeps."""
    return text if len(text) <= _REASON_MAX else text[:_REASON_MAX] + "..."
