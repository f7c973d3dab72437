"""Timestamps that a store which was restored from a backup knows to be another's.

B5  The store went on after the backup, and then it was lost, or went its own way. Its later commits are not in the
    restored store. A reader that followed it may hold one of its timestamps.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgpack

from perco.errors import Corruption
from perco.storage import DATA, TS_MAX, RowMutation, RowStore

SKIPPED: Final = 1 << 43
"""Timestamps that a restored store skips, at least: all that it hands out are above."""
LOST_ROW: Final = b"restored"
_RESTORES_MAX: Final = 1 << 16


class Lost(NamedTuple):
    """The timestamps between `after` and `before` belong to the store `store`, as it was after a backup."""

    after: int
    before: int
    store: str


def lost_row(lost: Lost) -> RowMutation:
    """The record of a restore, in the system table."""
    return LOST_ROW, (), ((DATA, 0, lost.before, msgpack.packb([lost.after, lost.store])),)


async def lost_at(store: RowStore, system_table: str, ts: int) -> Lost | None:
    """The lost timestamps to which this one belongs, if there are any. Raises: Corruption."""
    [[cells]] = await store.read([(system_table, LOST_ROW, [(DATA, 0, 0, TS_MAX, _RESTORES_MAX)])])
    for before, packed in cells:
        try:
            after, id = msgpack.unpackb(packed)
            if after < ts < before:
                return Lost(int(after), before, str(id))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise Corruption("restored", f"cannot be decoded: {error}") from error
    return None
