"""How the objects of `perco.aio` call the objects behind them, on the store's loop.

R9  A public method gives the same result, or raises the same error, in the owner of a folder and in its clients: each
    call is forwarded by method name to the object behind, in both.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import trio

from perco.aio.guest import Guests
from perco.fronts.portal import Portal
from perco.fronts.tries import operated, tell_of

T = TypeVar("T")


class Calling:
    """Base class: passes calls of asyncio tasks to an object of the guest run."""

    def __init__(self, port: Guests, of: Any) -> None:
        self._port, self._of = port, of

    def _ask(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Coroutine[Any, Any, Any]:
        """The result of a method that may wait."""
        return self._named(name, self._port.ask(getattr(self._of, name), args, kwargs))

    def _operate(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Coroutine[Any, Any, Any]:
        """The result of an operation on one cell."""
        return self._named(name, self._operated(name, args, kwargs))

    def _named(self, name: str, asked: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        asked.__qualname__ = f"{type(self).__name__}.{name}"  # type: ignore[attr-defined]  # "was never awaited"
        return asked

    async def _operated(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        told: list[str] = []
        try:
            return await self._port.ask(operated, (self._of, name, args, kwargs, told), {}, True)
        except BaseException as error:
            tell_of(error, told)
            raise

    def _ask_for(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Coroutine[Any, Any, Any]:
        return self._port.ask(function, (), {})

    @trio.lowlevel.enable_ki_protection
    def _now(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a method that never waits. It is called at once, because both loops share a thread."""
        self._port.must_be_here()
        return getattr(self._of, name)(*args, **kwargs)


def behind(front: Calling) -> Any:
    """The object behind one of these. For other packages."""
    return front._of


def portal_behind(front: Calling) -> Portal:
    """The portal through which it calls. For other packages."""
    return front._port


def ask_for(front: Calling, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> Coroutine[Any, Any, T]:
    """The result of `function(OBJECT, *args)`, for the object behind one of these. For other packages."""
    return front._port.ask(function, (front._of, *args), {})
