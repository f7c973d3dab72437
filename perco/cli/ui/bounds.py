"""Bounds of what the page asks for, and does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from perco.errors import StoreError


class TooLong(StoreError):
    """A question, or an action, has taken too long."""


class Busy(StoreError):
    """Something else is in progress."""


@asynccontextmanager
async def bounded(seconds: float, remedy: str = "") -> AsyncIterator[None]:
    """Raises: TooLong past that time, with a remedy."""
    with trio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        told = f"; {remedy}" if remedy else ""
        raise TooLong(f"this took longer than {seconds:g} s, the limit of this page{told}")
