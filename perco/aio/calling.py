"""How the objects of `perco.aio` call the objects that they stand for.

R9  A public method gives the owner of a folder and its clients the same result, or the same error: calls are
    forwarded by name to the object at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import trio

from perco.aio.guest import Guests


class Calling:
    """An object of the guest run, for the tasks of asyncio."""

    def __init__(self, port: Guests, of: Any) -> None:
        self._port, self._of = port, of

    def _ask(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Coroutine[Any, Any, Any]:
        """The result of a method that may wait."""
        asked = self._port.ask(getattr(self._of, name), args, kwargs)
        asked.__qualname__ = f"{type(self).__name__}.{name}"  # type: ignore[attr-defined]  # "was never awaited"
        return asked

    def _ask_for(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Coroutine[Any, Any, Any]:
        return self._port.ask(function, (), {})

    @trio.lowlevel.enable_ki_protection
    def _now(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a method that waits for nothing: it is called at once, because both loops share a thread."""
        self._port.must_be_here()
        return getattr(self._of, name)(*args, **kwargs)
