"""Cuts a table into pieces of about the same size, at keys that Bigtable samples. Pure.

Bigtable's answer is a few keys in ascending order, each with the approximate number of bytes before it. The last key is
empty; it stands for the end of all rows.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Final

from perco.bigtable.keys import row_key, row_of, table_end

PIECE_BYTES: Final = 256 << 20  # no piece is much larger


def cuts(table: str, samples: Sequence[tuple[bytes, int]], pieces: int) -> list[bytes]:
    """The first rows of at least `pieces` pieces of a perco table, or of fewer if there are too few samples. The first
    is b"".

    Args:
        samples: keys, and how many bytes come before each.
    """
    start, stop = row_key(table, b""), table_end(table)
    before = max((size for key, size in samples if key and key <= start), default=0)
    last = max((size for _, size in samples), default=before)  # the emulator's last key is that of the last row instead
    after = min((size for key, size in samples if not key or key >= stop), default=last)
    inside = [(key, size) for key, size in samples if start < key < stop]
    sizes = [size for _, size in inside]
    wanted = max(pieces, -(-(after - before) // PIECE_BYTES))
    out = [b""]
    for number in range(1, wanted):
        least = before + (after - before) * number / wanted
        at = bisect.bisect_left(sizes, least)
        if at < len(inside) and (row := row_of(table, inside[at][0])) > out[-1]:
            out.append(row)
    return out
