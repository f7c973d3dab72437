"""How a front calls a method of the engine: by its name, on the object at hand.

The fronts take names, types and docstrings from the classes of the engine, but call the method of the object: a
subclass, such as a client's database, may override it.

R9  A public method gives the owner of a folder and its clients the same result, or the same error. So no front calls a
    function of an engine's class: that would bypass the override.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def by_name(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A function that calls the method of that name on its first argument (R9)."""
    name = method.__name__

    def call(of: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = getattr(of, name)(*args, **kwargs)
        return result

    return call
