"""Operations that a client has the owner of a served store carry out (C9)."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import trio

from perco.errors import PercoError, Unavailable
from perco.protocol.records import Cellref
from perco.protocol.snapshot import Value, look
from perco.storage import WRITE, RowStore


class Shipped(NamedTuple):
    """An operation on its way to the owner.

    Attributes:
        observers: the numbers of the column's observers; `version`: of the catalogue that says so (N10).
        group: the column's group for long values; `codec`: the name of its codec.
        what, argument, expected: see `Operation`; the values are encoded.
    """

    cell: tuple[str, bytes, int]
    observers: tuple[int, ...]
    version: int
    group: str
    codec: str
    what: str
    argument: bytes | None
    expected: bytes | None


class Shipping(Protocol):
    async def ship(self, shipped: Shipped, token: str) -> tuple[int, Any] | None:
        """Have the owner carry out an operation. Returns commit_ts (0: the cell stays as it is), and the sum if numbers
        were added; None: nothing was done. Raises: CommitUnknown, RolledBack, SessionEnded, Unavailable."""
        ...


LOST: Final = object()  # in place of the new value: the operation has committed, but the answer was lost


async def value_at(store: RowStore, cell: Cellref, commit_ts: int, timeout_s: float) -> bytes:
    """The value that a commit in one step has put into a cell. No cancellation ends this: the commit is known (T10).

    Raises: Unavailable, with commit_ts, if the value is gone, or the store does not answer.
    """
    table, row, column = cell
    failure: Exception | None = None
    with trio.move_on_after(timeout_s, shield=True):
        try:
            [[writes]] = await store.read([(table, row, ((WRITE, column, commit_ts, commit_ts, 1),))])
            if writes and isinstance(seen := look((), writes), Value):
                return seen.value
        except PercoError as error:
            failure = error
    raise Unavailable("the answer to an operation was lost, and the value cannot be read", commit_ts) from failure
