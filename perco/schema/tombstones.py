"""Tombstones: what the catalogue keeps of observers that were dropped. Pure.

N12 The number of a dropped observer is never given again: cells of its acknowledgements stay, and a late notify cell of
    it may appear. An observer that is registered later under the same id gets a number of its own, and so begins as a
    new one.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Tombstone(NamedTuple):
    """The catalogue's record of a dropped observer.

    Attributes:
        clean: whether the changes that waited for it have been removed.
    """

    id: str
    table: str
    column: str
    clean: bool


def pack_tombstones(dropped: dict[int, Tombstone]) -> list[Any]:
    """As the catalogue stores them; nothing if there are none."""
    return [[[number, *tombstone] for number, tombstone in dropped.items()]] if dropped else []


def unpack_tombstones(packed: list[Any]) -> dict[int, Tombstone]:
    """As they were packed. Raises: TypeError, ValueError."""
    found = {number: Tombstone(*fields) for number, *fields in (packed[0] if packed else ())}
    for number, tombstone in found.items():
        if [type(part) for part in (number, *tombstone)] != [int, str, str, str, bool]:
            raise ValueError("not a tombstone")
    return found
