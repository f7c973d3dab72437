"""A cell by which `perco copy` keeps programs out of a store (M2)."""

from __future__ import annotations

from typing import Final

import msgpack

from perco.errors import Corruption

MARKER_TS: Final = (1 << 47) - 1  # Bigtable takes no timestamp after the year 9999
MARKER_WORD: Final = "perco copy"
COPYING: Final = "copying"
MOVED: Final = "moved"


def unpack_marker(data: bytes) -> tuple[str, str, bytes]:
    """The kind of a marker, the address of the other store, and the packed catalogue. Raises: Corruption."""
    try:
        word, kind, other, catalogue = msgpack.unpackb(data)
        if word != MARKER_WORD or kind not in {COPYING, MOVED} or not isinstance(other, str):
            raise ValueError("not a marker of perco copy")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Corruption("catalogue", f"its cell at {MARKER_TS} cannot be decoded: {error}") from error
    return kind, other, catalogue


def refusal(kind: str, other: str) -> str:
    """Say why a store that has a marker cannot be opened."""
    if kind == MOVED:
        return f"has moved to {other}"
    return f"is an unfinished copy of {other}"
