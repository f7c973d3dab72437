"""The interface through which the owner of a store, or a reader beside it, uses the place where the rows are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import trio

from perco.errors import PercoError, StoreLocked, Unavailable
from perco.storage import Mutation, OwnerStore
from perco.tablets.local import LocalStore
from perco.txn.engine import Place

_AGAIN_S: Final = 0.05


async def sure(check: Callable[[], None], seconds: float) -> None:
    """Wait until `check`, the method of a place, no longer raises Unavailable. Raises: Unavailable, if it still does
    after `seconds`; whatever else `check` raises."""
    with trio.move_on_after(seconds):
        while True:
            try:
                check()
                return
            except Unavailable:
                await trio.sleep(_AGAIN_S)
    check()


async def lost(check: Callable[[], None], seconds: float) -> bool:
    """Whether another process owns the place now. While this is not known, wait, for at most `seconds`."""
    try:
        await sure(check, seconds)
    except StoreLocked:
        return True
    except PercoError:  # it is still not known, or this process has closed the store
        pass
    return False


class Tickets(Protocol):
    """Lets clients read and write a store directly, each with a ticket."""

    on_gone: list[Callable[[], None]]

    async def admit(self, ticket: str) -> None:
        """Let the client with this ticket in. Raises: SessionEnded, if `end` was called before; StoreError."""
        ...

    def end(self, ticket: str) -> None:
        """End the ticket, because its session has ended. The floor is not raised again until nothing that was sent
        with the ticket can still take effect (F3). At that point, the functions in `on_gone` are called."""
        ...


class Backend(Place, Protocol):
    """A place that this process owns, or reads beside its owner.

    Attributes:
        threaded: whether writers run on threads, and other processes can look at the files: only for a folder.
        remote: whether each call of the store is a round trip to another process.
        local: its tablets, if this process splits and compacts them; None: it does not.
    """

    @property
    def store(self) -> OwnerStore: ...

    @property
    def threaded(self) -> bool: ...

    @property
    def remote(self) -> bool: ...

    @property
    def local(self) -> LocalStore | None: ...

    def where(self) -> tuple[str, str]:
        """The store's path or address; and the mark of its durability, "" or "since this boot" (S2)."""
        ...

    def write_from_thread(self, mutation: Mutation) -> None:
        """Write without the loop, and do not wait for it. Only if `threaded`."""
        ...

    def clear_dead_readers(self) -> None:
        """Release what readers that were killed still hold."""
        ...

    def expire(self, after_s: float) -> None:
        """Fail mutations that have waited for a disk for this long (T10)."""
        ...

    async def aclose(self) -> None: ...
