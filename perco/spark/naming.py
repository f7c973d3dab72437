"""What MODULE:NAME names, on the driver and on the executors."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from perco.errors import UsageError


def named(text: str, example: str) -> Any:
    """Raises: UsageError."""
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise UsageError(f"{text!r}: write MODULE:NAME, such as {example}")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise
        raise UsageError(
            f"there is no module {error.name!r} where Python looks; spark.addArtifacts sends one"
        ) from error
    except AttributeError as error:
        raise UsageError(f"{text}: {error}") from error
