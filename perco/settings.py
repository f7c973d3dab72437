"""Checks options when they are created, so that an error names the bad option instead of appearing where its value is
first used."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from perco.errors import UsageError, must_be_number


def check_options(options: Any, *, zero: Collection[str] = (), free: Collection[str] = ()) -> None:
    """Check each field of a dataclass of options by its annotation: an int must be at least 1, or at
    least 0 if `zero` names the field; a float must not be negative, and if the field's name ends in "share", it must be
    above 0 and at most 1. The fields that `free` names may have any value.

    Raises: UsageError.
    """
    for name, (kinds, optional) in _kinds(options.__class__).items():
        value = getattr(options, name)
        if name in free or (optional and value is None):
            continue
        try:
            wrong = _wrong(name, value, kinds, least=0 if name in zero else 1)
        except UsageError as error:
            wrong = str(error)
        if wrong:
            raise UsageError(f"{type(options).__name__}: {wrong}")


def _wrong(name: str, value: Any, kinds: tuple[Any, ...], *, least: int) -> str:
    """The error in a value; "" if there is none."""
    [kind] = kinds if len(kinds) == 1 else (None,)
    if kind is int:
        right = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return "" if right else f"{name} is {value!r}; it must be an int of at least {least}"
    if kind is float:
        if name.endswith("_s"):
            must_be_number(name, value)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            return f"{name} is a number, not {value!r}"
        if name.endswith("share"):
            return "" if 0 < value <= 1 else f"{name} is {value}; it is a share: above 0, and at most 1"
        return "" if value >= 0 else f"{name} is {value}; it must be a number of at least 0"
    if kind is Callable:
        return "" if callable(value) else f"{name} is a function, not {value!r}"
    if isinstance(kind, type) and not isinstance(value, kind):
        return f"{name} is a {kind.__name__}, not {value!r}"
    return ""


@cache
def _kinds(made: type) -> dict[str, tuple[tuple[Any, ...], bool]]:
    """For each field, the types that its value may have, and whether the value may be None."""
    hints = get_type_hints(made)
    out = {}
    for field in fields(made):
        hint = hints[field.name]
        members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        kinds = tuple(get_origin(member) or member for member in members if member is not type(None))
        out[field.name] = kinds, type(None) in members
    return out
