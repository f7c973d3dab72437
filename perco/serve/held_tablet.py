"""A tablet that a tablet server has open."""

from __future__ import annotations

import contextlib
import sys
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from perco.errors import Unavailable
from perco.storage import (
    Failed,
    Mutation,
    ScanRequest,
    Tablet,
)
from perco.storage.call import Call
from perco.storage.fencing import NotHere


@dataclass(eq=False, slots=True)
class Held:
    """A tablet that this server has: the rows from `tablet.start` to before `stop` (None: to the end). `cut`: rows from
    there on are no longer written, because they are about to move to another tablet (P1)."""

    tablet: Tablet
    number: int
    stop: bytes | None
    cut: bytes | None = None
    void: int = 0  # splits up to this number are void
    acting: trio.CancelScope | None = None  # the scope of the copy or cut that is under way
    alone: trio.Lock = field(default_factory=trio.Lock)  # one step of a split at a time


class Tablets:
    """The tablets of this server, by table and row."""

    def __init__(self) -> None:
        self._starts: dict[str, list[bytes]] = {}
        self._held: dict[str, list[Held]] = {}

    def add(self, held: Held) -> None:
        table = held.tablet.table
        starts, all_of_it = self._starts.setdefault(table, []), self._held.setdefault(table, [])
        at = bisect_left(starts, held.tablet.start)
        starts.insert(at, held.tablet.start)
        all_of_it.insert(at, held)

    def remove(self, held: Held) -> None:
        table = held.tablet.table
        at = self._held[table].index(held)
        del self._starts[table][at], self._held[table][at]

    def every(self) -> list[Held]:
        return [held for tablets in self._held.values() for held in tablets]

    def numbered(self, table: str, number: int) -> Held | None:
        return next((held for held in self._held.get(table, ()) if held.number == number), None)

    def of(self, table: str, row: bytes) -> Held | None:
        """The tablet that a row lies in, if this server has it."""
        starts = self._starts.get(table)
        if not starts:
            return None
        at = bisect_right(starts, row) - 1
        if at < 0:
            return None
        held = self._held[table][at]
        return held if held.stop is None or row < held.stop else None

    def scanned(self, request: ScanRequest) -> Held | None:
        """The tablet in which a scan begins, if this server has it."""
        if not request.reverse:
            return self.of(request.table, request.start)
        tablets = self._held.get(request.table, [])
        for held in reversed(tablets):
            if request.stop is None:
                return held if held.stop is None else None
            if held.tablet.start < request.stop:
                return held if held.stop is None or request.stop <= held.stop else None
        return None


class NotHereError(Exception):
    """An order for a tablet that this server does not have."""


async def act(held: Held, split: int, act: Callable[[], Awaitable[Any]]) -> Any:
    """Run a step of a split. Each order runs in its own task, so a later one may run first. Raises: Unavailable, if the
    split is void."""
    async with held.alone:
        if split > held.void:
            with trio.CancelScope() as held.acting:
                return await act()
    raise Unavailable(f"the split of a tablet of {held.tablet.table!r} was called off")


@contextlib.asynccontextmanager
async def no_more(held: Held, split: int) -> AsyncIterator[None]:
    """Make the splits up to a number void. While the block lasts, no step of a split is under way."""
    held.void = max(held.void, split)
    if held.acting is not None:
        held.acting.cancel()
    async with held.alone:
        yield


def answer_held(held: Held) -> None:
    """Answer the mutations that the cut has held back: their callers must ask elsewhere (F2)."""
    gone = Failed(NotHere(f"a tablet of {held.tablet.table!r} was split"))
    for _, call, index in held.tablet.let_go():
        call.arrived(index, gone, resubmit)


async def end_held(held: Held) -> None:
    async with no_more(held, sys.maxsize):
        if held.cut is None:
            await held.tablet.uncut()
        else:
            answer_held(held)  # P1: if the tablet wrote them now, they might be missing from the copy
    tablet = held.tablet
    await tablet.drain()
    tablet.refuse()
    await tablet.aclose()


def resubmit(mutations: Sequence[Mutation], call: Call) -> None:
    raise AssertionError("the client continues its own calls")
