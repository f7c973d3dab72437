"""How the objects of `perco.sync` call the objects behind them, on the store's loop.

R9  A public method gives the same result, or raises the same error, in the owner of a folder and in its clients: each
    call is forwarded by method name to the object behind, in both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from perco.fronts.portal import Portal
from perco.fronts.tries import operated, tell_of
from perco.sync.threads import Port, Threads
from perco.txn.scan import Scan

T = TypeVar("T")


class Calling:
    """Base class: passes calls of threads to an object on the store's loop."""

    def __init__(self, port: Port, of: Any) -> None:
        self._port, self._of = port, of

    def _ask(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a method, called on the loop."""
        return self._port.ask(call, (self._of, name, args, kwargs), {})

    def _operate(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operation on one cell."""
        told: list[str] = []
        try:
            return self._port.ask(operated, (self._of, name, args, kwargs, told), {}, True)
        except BaseException as error:
            tell_of(error, told)
            raise

    def _settle(self) -> None:
        """Pass the noted writes to the loop, so that reads see them."""

    def _scan_from(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Scan[Any]:
        """A scan whose first page has been fetched."""
        return self._port.ask(first_page, (self._of, name, args, kwargs), {})

    def _fetch(self, scan: Scan[Any]) -> None:
        self._port.ask(scan.fetch, (), {})


def behind(front: Calling) -> Any:
    """The object behind one of these. For other packages."""
    return front._of


def portal_behind(front: Calling) -> Portal:
    """The portal through which an open store is called. For other packages."""
    assert isinstance(front._port, Threads), "only transactions of observers are called from their own threads"
    return front._port


def ask_for(front: Calling, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """The result of `function(OBJECT, *args)`, for the object behind one of these. For other packages."""
    return front._port.ask(function, (front._of, *args), {})


async def call(of: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """On the loop: the result of a method, awaited if it is a coroutine."""
    given = getattr(of, name)(*args, **kwargs)
    return await given if inspect.iscoroutine(given) else given


async def first_page(of: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Scan[Any]:
    """On the loop: begin a scan, and fetch its first page."""
    scan: Scan[Any] = getattr(of, name)(*args, **kwargs)
    if not scan.ended:
        await scan.fetch()
    return scan
