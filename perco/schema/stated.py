"""Checks of what declarations state."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final, TypeVar

from perco.errors import UsageError
from perco.protocol.retention import Keep
from perco.schema.codecs import Codec

F = TypeVar("F", bound=Callable[..., Any])

_CODECS: Final = {
    **{str: "TEXT", bytes: "BYTES", int: "INT64", float: "FLOAT64", bool: "BOOL", dict: "JSON", list: "JSON"},
    **{date: "DATE", datetime: "TIMESTAMP", Decimal: "DECIMAL(precision, scale)"},
}


def must_be_codec(what: str, codec: object) -> None:
    """Raises: UsageError for anything but a codec."""
    if isinstance(codec, Codec):
        return
    hint = f"perco.{_CODECS[codec]}" if isinstance(codec, type) and codec in _CODECS else "perco.TEXT or another codec"
    raise UsageError(f"{what} takes {hint}, not {codec!r}")


def must_keep(what: str, keep: object) -> Keep | None:
    """How long old versions are kept; None: not stated. Raises: UsageError."""
    if keep is None or isinstance(keep, Keep):
        return keep
    raise UsageError(f"{what} takes keep=perco.Keep(seconds=...), not {keep!r}")


def must_observe(id: str, function: object) -> None:
    """Raises: UsageError if this cannot be an observer's function, as far as its signature shows."""
    inner = inspect.unwrap(function) if callable(function) else function
    plain = inspect.isroutine(inner) and not inspect.ismethod(inner) and not inspect.iscoroutinefunction(inner)
    if not callable(function) or plain:
        raise UsageError(
            f"observer {id!r} must be an `async def` function of (txn, change), or a plain one under "
            f"@perco.sync.observer, not {function!r}"
        )
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise UsageError(f"observer {id!r} is called with (txn, change); {function!r} cannot be: {error}") from None
    except ValueError:
        pass


def must_convert(id: str, function: F) -> F:
    """The function, which takes a value, and returns another one. Raises: UsageError."""
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise UsageError(f"conversion {id!r} takes a plain function of a value, not {function!r}")
    return function
