"""What MODULE:NAME names, as commands and jobs are told of it."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from perco.errors import UsageError


def named(text: str, form: str, where: str) -> Any:
    """The thing; the module is imported.

    Args:
        form: what to write, with an example.
        where: modules are looked for.

    Raises: UsageError; what the module raises.
    """
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise UsageError(f"{text!r}: write {form}")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and one that it imports is not
        raise UsageError(f"there is no module {error.name!r} {where}") from error
    except AttributeError as error:
        raise UsageError(f"{text}: {error}") from error
