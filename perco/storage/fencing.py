"""Fencing: a process that opens a tablet for writing shuts out its earlier writers (F1)."""

from __future__ import annotations

from perco.errors import Unavailable


class NotHere(Unavailable):
    """Another process has the rows; nothing was written."""


class Fenced(NotHere):
    """Another process has taken over the tablet; nothing was written (F1)."""


def next_epoch(stored: bytes | None) -> bytes:
    """The epoch of a process that takes over an environment whose epoch is `stored` (F1)."""
    return (int.from_bytes(stored or b"", "big") + 1).to_bytes(8, "big")


def check_epoch(ours: bytes, stored: bytes | None, path: object) -> None:
    """Compare epochs; `ours` is empty if no other process may have the tablet. Raises: Fenced (F1)."""
    if ours and stored != ours:
        raise Fenced(f"{path}: another process has taken the tablet over")
