"""Writes that are repeated when a reply is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from perco.errors import SessionEnded, Unavailable, WriteUnknown


@dataclass(slots=True)
class Lost:
    """The reason why the last reply to a write was lost; "": none was lost."""

    reason: str = ""


@contextmanager
def unknown_if_lost(what: str) -> Iterator[Lost]:
    """For a block that makes a write, and repeats it if necessary. The block sets `reason` when a reply is lost. If the
    store cannot be reached afterwards, it is unknown whether the write was made (T4).

    Raises: WriteUnknown of `what`, in place of Unavailable and SessionEnded, if a reply was lost before.
    """
    lost = Lost()
    try:
        yield lost
    except (Unavailable, SessionEnded) as error:
        if not lost.reason:
            raise
        raise WriteUnknown(what, lost.reason) from error
