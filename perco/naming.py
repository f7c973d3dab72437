"""Looks up objects by name (commands and jobs take names like MODULE:NAME), and sets the names that Python's own
messages use for perco's methods."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from perco.errors import UsageError

T = TypeVar("T")


def named(text: str, form: str, where: str) -> Any:
    """The object that a text of the form MODULE:NAME names. Imports its module.

    Args:
        form: what to write, with an example; part of the error message.
        where: where modules are searched for; part of the error message.

    Raises: UsageError; any error that the import of the module raises.
    """
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise UsageError(f"{text!r}: write {form}")
    if module.endswith(".py"):
        file = Path(module).with_suffix("")
        parts = (file.name,) if file.is_absolute() or ".." in file.parts else file.parts
        raise UsageError(f"{text!r} names a file: write {'.'.join(parts)}:{name}")
    try:
        return pkgutil.resolve_name(text)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but a module that it imports does not
        raise UsageError(f"there is no module {error.name!r} {where}") from error
    except AttributeError as error:
        raise UsageError(f"{text}: {error}") from error
    except ValueError as error:
        raise UsageError(f"{text!r}: write {form}") from error


def told_as(owner: str) -> Callable[[type[T]], type[T]]:
    """Decorate a class that has another name for users, so that Python's warnings use that name ("coroutine
    'Database.vacuum' was never awaited").
    """

    def named(kind: type[T]) -> type[T]:
        for name, method in vars(kind).items():
            if inspect.iscoroutinefunction(method) and not name.startswith("_"):
                method.__qualname__ = f"{owner}.{name}"
        return kind

    return named
