"""How a front calls a method of the engine: by its name, on the object at hand.

The fronts take names, types and docstrings from the classes of the engine. What they call is what the object has: an
object of a subclass, as a client's database is, may do it in another way.

R9  A public method gives the owner of a folder and its clients the same result, or the same error. So no front calls a
    function of an engine's class: that would pass by what a subclass overrides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def by_name(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A function that calls whatever its first argument has by the method's name (R9)."""
    name = method.__name__

    def call(of: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = getattr(of, name)(*args, **kwargs)
        return result

    return call
