"""Cuts a table into parts with about equally many cells, so that all cores of a session read it.

The driver takes the cuts from the branches of the trees in the tablets' files, beside the store's owner: a hundredth of
the pages, or fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perco.database.inside import inside
from perco.serve.opening import open
from perco.spark.direct import Beside
from perco.spark.ranges import Range, cut

CELLS_MIN: Final = 50_000  # in a part; for fewer, another task costs more than it saves
_FINE: Final = 32  # how many times as many places as are needed are looked for


async def even(place: Beside, table: str, parts: Sequence[Range], wanted: int) -> list[Range] | None:
    """Up to `wanted` parts, or one for each of `parts`, with about equally many cells; at least `CELLS_MIN`, unless the
    tablets have fewer. None: the table is not in files.

    Args: `parts`: ranges, each within a tablet.

    Raises: the errors of `perco.open`; TabletSplit; Corruption.
    """
    async with open(place.folder, readonly=True) as db:
        prompt = inside(db).store.prompt
        assert prompt is not None, "the folder is open in this process"
        found = [prompt.find_parts(table, part.low, part.high, _FINE * wanted) for part in parts]
    places = [each for each in found if each is not None]
    if len(places) < len(parts):
        return None
    cells = [each.cells * (len(each.rows) + 1) for each in places]
    total = max(1, sum(cells))
    out: list[Range] = []
    for part, each, here in zip(parts, places, cells, strict=True):
        pieces = max(1, min(round(wanted * here / total), here // CELLS_MIN, len(each.rows) + 1))
        out += cut(part, [each.rows[len(each.rows) * n // pieces] for n in range(1, pieces)])
    return out
