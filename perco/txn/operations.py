"""Operations: whole transactions on one cell, each in one call.

`Operation.of` is a pure function of the cell's value, so any process that has the codec can carry out an operation.

T2, T11 An operation is a transaction: it is isolated from others, notifies observers, and runs again after a conflict.
C10 Operations of this process on one cell take turns, and may share a commit (`combining.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from decimal import Context, Decimal, Inexact, InvalidOperation, Overflow
from typing import Any, Final, NamedTuple, TypeVar

import trio

from perco.errors import CommitUnknown, TransientError
from perco.protocol.records import Cellref
from perco.schema.catalogue import Bound
from perco.schema.codecs import decoded, encoded, is_own
from perco.schema.schema import Column
from perco.storage import VALUE_BYTES_MAX
from perco.txn.attempts import late
from perco.txn.combining import Asked, Combining
from perco.txn.engine import Engine
from perco.txn.running import attempts
from perco.txn.runs import bytes_of
from perco.txn.shipping import LOST, Shipped, Shipping, value_at
from perco.txn.transaction import Transaction

K = TypeVar("K")
V = TypeVar("V")


# The thread's own context may round; perco's decimals have up to 38 digits.
_EXACT: Final = Context(prec=1000, traps=[Inexact, InvalidOperation, Overflow])


class _Unchanged:
    """What `Operation.of` returns if the cell stays as it is."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged()


OPERATIONS: Final = frozenset({"put", "put_if", "add", "append", "delete"})
BLIND: Final = frozenset({"put", "delete"})  # those that do the same whatever the cell holds


class Operation(NamedTuple):
    """One of `OPERATIONS`: "put" a value into a cell, "put_if" it has an expected one, "add" a number, "append" to it,
    or "delete" it."""

    what: str
    argument: Any = None
    expected: Any = None

    @property
    def reads(self) -> bool:
        """Whether what it does depends on the cell's value."""
        return self.what not in BLIND

    @property
    def adds(self) -> bool:
        """Whether what the cell held stays in it, as a summand or as the beginning."""
        return self.what in ("add", "append")

    def of(self, value: Any) -> Any:
        """The cell's new value, given its value; None: none. UNCHANGED: leave it alone.

        Raises: TypeError, ValueError.
        """
        if self.what == "put_if":
            return self.argument if bool(value == self.expected) else UNCHANGED
        if value is None or not self.reads:
            return self.argument
        (_must_be_number if self.what == "add" else _must_have_parts)(value, "the cell holds")
        if self.what == "append" and type(value) is not type(self.argument):
            raise TypeError(f"the cell holds {type(value).__name__}, to which no {type(self.argument).__name__} fits")
        if isinstance(value, Decimal) or isinstance(self.argument, Decimal):
            return _EXACT.add(value, self.argument)
        try:
            return value + self.argument
        except OverflowError as error:  # an int that no float can hold, and a float
            raise ValueError(
                f"the sum of {value!r:.40} and {self.argument!r:.40} cannot be computed: {error}"
            ) from None


def adding(n: Any) -> Operation:
    """Raises: TypeError for anything but a number."""
    _must_be_number(n, "add takes a number, not")
    return Operation("add", n)


def appending(more: Any) -> Operation:
    """Raises: TypeError for anything but bytes, text or a list."""
    if not isinstance(more, bytearray | memoryview):  # which become bytes
        _must_have_parts(more, "append takes")
    return Operation("append", more)


def _must_be_number(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise TypeError(
            f"{what} {value!r:.100}; only a number can be added to (to append to text or a list, use db.append)"
        )


def _must_have_parts(value: object, what: str) -> None:
    if not isinstance(value, bytes | str | list | tuple):
        raise TypeError(
            f"{what} {value!r:.100}; only bytes, text and lists can be appended to (to add to a number, use db.add)"
        )


Packed = tuple[bytes | None, bytes | None]  # an operation's argument and expected value, in stored form

_SHIPPED_BYTES_MAX: Final = 1 << 16  # of the encoded values
# Operations that one commit carries out for others, and bytes that are encoded for them: each value contains the last.
_COMBINED_MAX: Final = 1024
_COMBINED_BYTES_MAX: Final = 1 << 20


class Done(NamedTuple):
    """The result of an operation. `commit_ts` 0: the value was not the expected one, and nothing was done. `value`: the
    sum, if a number was added."""

    commit_ts: int
    value: Any


def _packed(column: Column[Any, Any], value: Any) -> bytes | None:
    """A value in stored form; None: there is none. Raises: TypeError, ValueError."""
    return None if value is None else encoded(column.codec, value, column, "value of ")


def operate(engine: Engine, column: Column[K, V], key: K, operation: Operation) -> Coroutine[Any, Any, Done]:
    """Carry out an operation. Raises: as `Database.run`; TypeError or ValueError for a value that does not fit."""
    how = _operate if engine.retry.timeout_s is None else _in_time
    return how(engine, column, key, operation, [])


async def _in_time(
    engine: Engine, column: Column[K, V], key: K, operation: Operation, met: list[TransientError]
) -> Done:
    assert engine.retry.timeout_s is not None
    with trio.move_on_after(engine.retry.timeout_s):
        return await _operate(engine, column, key, operation, met)
    raise late(engine.retry, met, None)


# A Ctrl-C waits for the next checkpoint: otherwise, an operation might lead for ever.
@trio.lowlevel.enable_ki_protection
async def _operate(
    engine: Engine, column: Column[K, V], key: K, operation: Operation, met: list[TransientError]
) -> Done:
    engine.usable(writing=True)
    bound = engine.known.bounds.get(column) or engine.known.bind(column)
    packed: Packed | None = None
    if operation.reads:
        what, argument, expected = operation
        packed = _packed(column, argument), _packed(column, expected)
        operation = Operation(what, *(each if each is None else column.codec.decode(each) for each in packed))
    if engine.spans is not None:  # each has a span of its own
        return await _run(engine, column, key, operation, None, met)
    combining, where = engine.combining, (bound.table, column.table.row(key), bound.column)
    if not combining.leads(where):
        done: Done | None = await combining.wait(where, Asked(operation, column if operation.adds else None))
        if done is not None:
            return done
    try:
        shipping = engine.driver.shipping
        if shipping is not None and not (operation.adds and combining.are_adding(where, column)):
            shipped = await _shipped(engine, shipping, bound, column, key, where[1], operation, packed)
            if shipped is not None:
                return shipped
        return await _run(engine, column, key, operation, where if operation.adds else None, met)
    finally:
        combining.pass_on(where)


async def _run(
    engine: Engine,
    column: Column[K, V],
    key: K,
    operation: Operation,
    where: tuple[str, bytes, int] | None,
    met: list[TransientError],
) -> Done:
    """Carry out an operation as an ordinary transaction. `where`: the cell, if it may take others. `met`: filled with
    the last failure."""
    function: Callable[..., Awaitable[Done]] = _changed if operation.reads else _written
    args: tuple[Any, ...] = (column, key, operation)
    if where is not None:
        function, args = _added, (engine.combining, where, *args)
    return await attempts(engine, engine.retry, False, function, args, {}, met)


async def _shipped(
    engine: Engine,
    shipping: Shipping,
    bound: Bound,
    column: Column[K, V],
    key: K,
    row: bytes,
    operation: Operation,
    packed: Packed | None,
) -> Done | None:
    """Have the store's owner carry out an operation (C9). None: it has done nothing. Then the operation is run as an
    ordinary transaction, which also raises the errors of unusual cases, in the same words everywhere. `packed`: the
    operation's argument and expected value, if that is known."""
    codec, what, bytes_max = column.codec, operation.what, engine.limits.bytes_max
    if operation.reads and (bytes_max < VALUE_BYTES_MAX or not is_own(codec)):
        return None
    argument, expected = packed or (_packed(column, operation.argument), None)
    if len(argument or b"") + len(expected or b"") > min(_SHIPPED_BYTES_MAX, bytes_max):
        return None
    cell, driver = Cellref(bound.table, row, bound.column), engine.driver  # another one, once the session has ended
    version = engine.known.catalogue.binds
    shipped = Shipped(cell, bound.observers, version, bound.group, codec.name, what, argument, expected)
    try:
        done = await shipping.ship(shipped, engine.lease_token)
    except TransientError:
        return None
    if done is None:
        return None
    commit_ts, data = done
    if what != "add":
        return Done(commit_ts, None)
    if data is LOST:
        data = await value_at(driver.store, cell, commit_ts, driver.options.commit_timeout_s)
    return Done(commit_ts, decoded(codec, data, column, key))


async def _written(txn: Transaction, column: Column[K, V], key: K, operation: Operation) -> Done:
    if operation.what == "delete":
        txn.delete(column, key)
    else:
        txn.set(column, key, operation.argument)
    return Done(await txn.commit(), None)


async def _changed(txn: Transaction, column: Column[K, V], key: K, operation: Operation) -> Done:
    new = operation.of(await txn.get(column, key))
    if new is UNCHANGED:
        return Done(0, None)
    if new is None:
        txn.delete(column, key)
    else:
        new = _set(txn, column, key, operation, new)
    return Done(await txn.commit(), new)


def _set(txn: Transaction, column: Column[K, V], key: K, operation: Operation, new: Any) -> Any:
    """Write a value; returns it as it will be read. Raises: as `Transaction.set`."""
    txn.set(column, key, new)
    if operation.what == "add":  # 1 added to a FLOAT64 is 1.0
        return column.codec.decode(column.codec.encode(new))
    return new


async def _added(
    txn: Transaction,
    combining: Combining,
    where: tuple[str, bytes, int],
    column: Column[K, V],
    key: K,
    operation: Operation,
) -> Done:
    """Like `_changed`, also for the operations that wait (C10)."""
    value = await txn.get(column, key)
    mine = value = _set(txn, column, key, operation, operation.of(value))
    taken: list[Asked] = []
    copied = 0
    try:
        while len(taken) < _COMBINED_MAX and copied < _COMBINED_BYTES_MAX and (each := combining.take(where, column)):
            taken.append(each)
            try:
                value = each.value = _set(txn, column, key, each.operation, each.operation.of(value))
            except Exception as error:  # of a codec, for example: only this one fails
                each.error = error
            copied += bytes_of(txn)
        commit_ts = await txn.commit()
    except CommitUnknown as error:
        combining.give_back(where, [each for each in taken if each.error is not None])  # they have done nothing
        for each in taken:
            if each.taken:
                each.error = CommitUnknown(error.token, error.reason)
                combining.done(each)
        raise
    except BaseException:
        combining.give_back(where, taken)
        raise
    for each in taken:
        each.value = Done(commit_ts, each.value)
        combining.done(each)
    return Done(commit_ts, mine)
