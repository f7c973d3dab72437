"""Sinks: the rows of a table, kept up to date outside the store.

V11 A delivery carries the timestamp of the run's snapshot as its version, and a sink takes a row only if its version
    is newer than the one that it has. So a delivery that is repeated, or that arrives after a newer one, changes
    nothing, and the sink ends with the newest row. A row that is gone is delivered, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import msgpack
import trio

from perco.errors import UsageError
from perco.schema.schema import Change, Column, Table
from perco.txn.engine import Engine
from perco.txn.inside import engine_of
from perco.txn.transaction import Transaction
from perco.views.batching import Batcher, in_halves

BATCH_MAX: Final = 100_000


class Delivered(NamedTuple):
    """The state of a row, from a version on.

    Attributes:
        key: of the row.
        values: by column name; a column without a value is missing. None: the row is gone.
        version: grows with each change of the row.
    """

    key: Any
    values: dict[str, Any] | None
    version: int


@runtime_checkable
class Sink(Protocol):
    """Where rows go. Its methods are called in a thread, by several threads at a time only if `Views.sink` says so."""

    def deliver(self, rows: list[Delivered]) -> None:
        """Take rows, each only if its version is newer than the one that the sink has; return when they are durable.

        Raises: any error: the rows are delivered again later.
        """
        ...


@runtime_checkable
class Readable(Protocol):
    """A sink that `perco views check` can compare with its table."""

    def rows(self) -> Iterable[Delivered]:
        """All rows that the sink has."""
        ...


class Calling:
    """The sink that a plain function is."""

    def __init__(self, function: Callable[[list[Delivered]], object]) -> None:
        self.function = function

    def deliver(self, rows: list[Delivered]) -> None:
        """Call the function."""
        self.function(rows)


@dataclass(eq=False, slots=True)
class Sinking:
    """A declared sink.

    Attributes:
        columns: of one table, whose rows are delivered.
        seen: the hidden column that says what was delivered last: (version of the sink, timestamp); None if one column
            is observed.
        to: where the rows go.
    """

    id: str
    version: int
    table: Table[Any]
    columns: tuple[Column[Any, Any], ...]
    seen: Column[Any, bytes] | None
    to: Sink
    batch: int
    threads: int

    async def deliver(self, engine: Engine, row: Delivered) -> None:
        """Deliver a row; returns when the sink has it. Raises: the sink's error."""
        batcher: Batcher[Delivered, None] | None = engine.kept.get(self)
        if batcher is None:
            limiter = trio.CapacityLimiter(self.threads) if self.threads else None

            async def settle(rows: list[Delivered]) -> Sequence[BaseException | None]:
                return await in_halves(self._deliver, rows, limiter)

            name = f"deliveries of {self.id}"
            batcher = engine.kept[self] = Batcher(
                engine.background, name, settle, batch=self.batch, tasks=max(self.threads, 1)
            )
        item = batcher.add(row)
        await item.done.wait()
        if item.error is not None:
            raise item.error

    def _deliver(self, rows: list[Delivered]) -> list[None]:
        self.to.deliver(rows)
        return [None] * len(rows)


async def run_sink(sinking: Sinking, txn: Transaction, change: Change[Any, Any]) -> None:
    """Deliver the row that has changed (V11)."""
    key, seen = change.key, sinking.seen
    row = await txn.row(sinking.table, key, [*sinking.columns, *([seen] if seen is not None else [])])
    if seen is not None and row[seen] is not None:
        version, ts = msgpack.unpackb(row[seen])
        if version == sinking.version and ts >= change.commit_ts:
            return  # the run for another column of the row has delivered this change
    values = {column.name: row[column] for column in sinking.columns if row[column] is not None}
    await sinking.deliver(engine_of(txn), Delivered(key, values or None, txn.start_ts))
    if seen is not None and values:
        txn.set(seen, key, msgpack.packb([sinking.version, txn.start_ts]))
    elif seen is not None:
        txn.delete(seen, key)


def must_be_sink(id: str, to: object) -> Sink:
    """Where rows go. Raises: UsageError for what is neither a sink nor a function."""
    if isinstance(to, Sink):
        return to
    if callable(to):
        return Calling(to)
    raise UsageError(
        f"sink {id!r}: to= takes a function of a list of rows, or an object with a method deliver(rows), not {to!r}"
    )


def readable(sinking: Sinking) -> Iterator[Delivered] | None:
    """The rows that a sink has; None if it cannot tell."""
    return iter(sinking.to.rows()) if isinstance(sinking.to, Readable) else None
