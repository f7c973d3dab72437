"""How the objects of `perco.sync` call the objects that they stand for.

R9  A public method gives the owner of a folder and its clients the same result, or the same error: calls are
    forwarded by name to the object at hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from perco.sync.threads import Port
from perco.txn.scan import Scan


class Calling:
    """An object of the store's loop, for threads."""

    def __init__(self, port: Port, of: Any) -> None:
        self._port, self._of = port, of

    def _ask(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a method, called on the loop."""
        return self._port.ask(call, (self._of, name, args, kwargs), {})

    def _settle(self) -> None:
        """Let reads see the writes that were noted."""

    def _scan_from(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Scan[Any]:
        """A scan with its first page."""
        return self._port.ask(first_page, (self._of, name, args, kwargs), {})

    def _fetch(self, scan: Scan[Any]) -> None:
        self._port.ask(scan.fetch, (), {})


async def call(of: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """On the loop: the result of a method, awaited if it is a coroutine."""
    given = getattr(of, name)(*args, **kwargs)
    return await given if inspect.iscoroutine(given) else given


async def first_page(of: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Scan[Any]:
    """On the loop: a scan, and its first page with it."""
    scan: Scan[Any] = getattr(of, name)(*args, **kwargs)
    if not scan.ended:
        await scan.fetch()
    return scan
