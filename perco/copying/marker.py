"""A note in a store's catalogue that keeps programs out of the store.

M2  While a store is an unfinished copy, or once another store has taken its place, its catalogue has a cell at
    `MARKER_TS`, above all versions. This cell does not hold a version of the catalogue, so no program can open the
    store. One mutation writes the catalogue of a finished copy and deletes this cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgpack

from perco.errors import Unavailable
from perco.schema.catalogue import CATALOGUE_ROW, SYSTEM_TABLE, Catalogue
from perco.schema.marker import COPYING, MARKER_TS, MARKER_WORD, refusal, unpack_marker
from perco.storage import APPLIED, DATA, TS_MAX, Failed, Mutation, RowStore, Write

_TRIES: Final = 16
_VERSIONS_MAX: Final = 1 << 20  # of a catalogue


@dataclass(frozen=True, slots=True)
class Marker:
    """`kind`: COPYING: this store is to be a copy of `other`; MOVED: `other` has taken this store's place. `catalogue`:
    if COPYING, a catalogue of every table that has been made here; if MOVED, this store's."""

    kind: str
    other: str
    catalogue: Catalogue

    def is_copy_of(self, source: str) -> bool:
        """Whether this marker marks an unfinished copy of that store."""
        return self.kind == COPYING and self.other == source

    def pack(self) -> bytes:
        return msgpack.packb([MARKER_WORD, self.kind, self.other, self.catalogue.pack()])  # type: ignore[no-any-return]

    @classmethod
    def unpack(cls, data: bytes) -> Marker:
        """Raises: Corruption."""
        kind, other, catalogue = unpack_marker(data)
        return cls(kind, other, Catalogue.unpack(catalogue))


async def marker_of(store: RowStore) -> Marker | None:
    """The marker in a store, if it has one. Raises: Corruption."""
    [[cells]] = await store.read([(SYSTEM_TABLE, CATALOGUE_ROW, [(DATA, 0, MARKER_TS, MARKER_TS, 1)])])
    return Marker.unpack(cells[0][1]) if cells else None


async def catalogue_below(store: RowStore) -> Catalogue:
    """The newest version of the catalogue, with or without a marker above it; version 0 if there is none."""
    [[cells]] = await store.read([(SYSTEM_TABLE, CATALOGUE_ROW, [(DATA, 0, 1, MARKER_TS - 1, 1)])])
    return Catalogue.unpack(cells[0][1]) if cells else Catalogue()


async def put_marker(store: RowStore, marker: Marker) -> None:
    """Keep programs out of a store. Raises: StoreError."""
    await _write(store, [(DATA, 0, MARKER_TS, marker.pack())])


async def complete(store: RowStore, catalogue: Catalogue) -> None:
    """Give a copy its catalogue, in place of all versions and the marker (M2). Raises: StoreError."""
    [[former]] = await store.read([(SYSTEM_TABLE, CATALOGUE_ROW, [(DATA, 0, 0, TS_MAX, _VERSIONS_MAX)])])
    writes: list[Write] = [(DATA, 0, ts, None) for ts, _ in former if ts != catalogue.version]
    await _write(store, [*writes, (DATA, 0, catalogue.version, catalogue.pack())])


async def _write(store: RowStore, writes: list[Write]) -> None:
    """Write to the catalogue's row; after a lost reply, repeat the write, which does no harm. Raises: StoreError."""
    verdict: Any = None
    for _ in range(_TRIES):
        [verdict] = await store.apply([Mutation(SYSTEM_TABLE, ((CATALOGUE_ROW, (), writes),))])
        if verdict is APPLIED:
            return
        if isinstance(verdict, Failed):
            raise verdict.error
    raise Unavailable(f"the catalogue cannot be written to: {verdict}")


def refused(shown: str, marker: Marker) -> str:
    """Describe a store that has a marker."""
    return f"{shown} {refusal(marker.kind, marker.other)}"
