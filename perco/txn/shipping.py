"""Operations that a client has the owner of a served store carry out (C9)."""

from __future__ import annotations

from typing import Final, NamedTuple

from perco.errors import Unavailable
from perco.protocol.records import Cellref
from perco.protocol.snapshot import Value, look
from perco.storage import WRITE
from perco.txn.resolver import Resolver


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


LOST: Final = object()  # in place of the new value: the operation has committed, but the answer was lost


async def value_at(driver: Resolver, cell: Cellref, commit_ts: int) -> bytes | None:
    """The value that a commit has put into a cell. Raises: Unavailable, with commit_ts, if it is gone."""
    table, row, column = cell
    [[writes]] = await driver.reads.read([(table, row, ((WRITE, column, commit_ts, commit_ts, 1),))])
    if not writes:
        raise Unavailable("the answer to a commit was lost, and its value has been overwritten since", commit_ts)
    seen = await driver.finish(table, row, column, commit_ts, look((), writes))
    return seen.value if isinstance(seen, Value) else None
