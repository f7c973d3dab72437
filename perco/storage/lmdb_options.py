"""The options of LMDB environments."""

from __future__ import annotations

from dataclasses import dataclass

from perco.settings import check_options


@dataclass(frozen=True, kw_only=True, slots=True)
class LmdbOptions:
    """How a tablet's environment is opened.

    Attributes:
        sync: fsync every commit (S2). False: commits survive the death of the process, but not power loss.
        map_bytes: the map's initial size; it grows by itself.
        map_bytes_max: the map's largest size; a write that needs more fails with StoreFull.
        reserve_bytes: kept allocated for rollback, roll-forward and collection when the disk is full (S4).
        ahead_bytes: how many bytes of the file are allocated beyond those in use.
        readers_max: reader slots, over all processes.
    """

    sync: bool = True
    map_bytes: int = 64 << 20
    map_bytes_max: int = 1 << 40
    reserve_bytes: int = 256 << 10
    ahead_bytes: int = 1 << 20
    readers_max: int = 256

    def __post_init__(self) -> None:
        check_options(self, zero=("reserve_bytes", "ahead_bytes"))
