"""Calls to Bigtable that are repeated if they fail temporarily: reads, and mutations that may be applied twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import trio

from perco.bigtable.address import Place
from perco.bigtable.calls import CallFailed, Calls, Scan
from perco.bigtable.options import BigtableOptions
from perco.bigtable.owner_row import Notice, notice, question, ticket_of, tickets
from perco.errors import PercoError, Unavailable

_PAUSE_S: Final = 0.02  # before the first repetition of a call
_PAUSE_MAX_S: Final = 1.0
FIRST: Final = 4  # the first attempt may take this part of the time, and each later one twice as long as the one before

# Errors after which a call may succeed if it is repeated.
AGAIN: Final = frozenset(
    {"UNAVAILABLE", "ABORTED", "INTERNAL", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNKNOWN", "CANCELLED"}
)
# Errors after which it is certain that the call was not carried out.
NOT_DONE: Final = frozenset(
    {
        *("INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "FAILED_PRECONDITION"),
        *("OUT_OF_RANGE", "UNIMPLEMENTED"),
    }
)
_REMEDIES: Final = {
    "NOT_FOUND": "Run `perco bigtable init` with this address.",
    "PERMISSION_DENIED": "The program's account needs the role roles/bigtable.user on the instance.",
    "UNAUTHENTICATED": "Set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`.",
    "FAILED_PRECONDITION": "`perco bigtable check` examines the table and the app profile.",
}


class Repeating:
    """Loop thread only.

    Attributes:
        usable: set by the store. Raises PercoError if the store is closed, or was opened before a fork.
    """

    calls: Calls
    place: Place

    def __init__(self, place: Place, options: BigtableOptions) -> None:
        self.place, self._options = place, options
        self.calls = Calls(place, options)
        self.usable: Callable[[], None] = lambda: None

    def _until(self) -> float:
        return trio.current_time() + self._options.call_s

    async def put(self, requests: Sequence[Any]) -> None:
        """Make calls that do no harm if they are made twice, and repeat those that fail temporarily. Raises:
        Unavailable."""
        await self._repeat(requests, self.usable)

    async def _repeat(self, calls: Sequence[Any], check: Callable[[], None]) -> list[Any]:
        """Make calls, and repeat those that fail temporarily. Returns the answers. `check` is called after each
        attempt."""
        self.usable()
        if not calls:
            await trio.lowlevel.checkpoint()
            return []
        deadline = self._until()
        attempt_s = self._options.call_s / FIRST  # if a call hangs, there is still time for another attempt
        answers: list[Any] = [None] * len(calls)
        left = list(range(len(calls)))
        attempt = 0
        while True:
            failure: CallFailed | None = None
            until = min(deadline, trio.current_time() + attempt_s)
            for index, answer in zip(left, await self.calls.ask([calls[i] for i in left], until), strict=True):
                if isinstance(answer, CallFailed):
                    if failure is None or answer.code not in AGAIN:
                        failure = answer
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    answers[index] = answer
            check()
            if failure is None:
                return answers
            left = [index for index in left if answers[index] is None]
            pause = pause_of(attempt)
            attempt += 1
            attempt_s *= 2  # perhaps the call is only slow
            if failure.code not in AGAIN or trio.current_time() + pause > deadline:
                raise self.told(failure) from failure
            await trio.sleep(pause)

    async def notice(self, ticket: str = "") -> Notice:
        """Read the owner's row and, if a ticket is named, the ticket's row. Raises: Unavailable, Corruption."""
        [answer] = await self._repeat([Scan(question(self.place, ticket))], self.usable)
        return notice(answer.rows, ticket)

    async def tickets(self) -> list[str]:
        """The tickets that have a row. Raises: Unavailable."""
        [answer] = await self._repeat([Scan(tickets(self.place))], self.usable)
        return [ticket_of(row) for row in answer.rows]

    def told(self, error: CallFailed) -> PercoError:
        """perco's error for an error of Bigtable."""
        shown = self.place.shown
        if error.code in NOT_DONE:
            return Unavailable(
                f"{shown} refuses: {error}", remedy=_REMEDIES.get(error.code, "The message is Bigtable's.")
            )
        return Unavailable(f"{shown} does not answer: {error}")


def pause_of(attempt: int) -> float:
    """How long to wait before a call is repeated, in seconds."""
    longest = min(_PAUSE_S * 2.0 ** min(attempt, 10), _PAUSE_MAX_S)
    return random.uniform(0.5, 1.0) * longest
