"""Errors: copies of them, for each of several tasks or for another process, say the same."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any, Final

import pytest

import perco.errors
from perco.errors import PercoError

_SAMPLES: Final[dict[str, Any]] = {
    "str": "a text",
    "int": 7,
    "bool": True,
    "float": 0.5,
    "float | str": 1_700_000_000.0,
    "Sequence[tuple[str, object, str]]": [("docs", "a", "body")],
    "Sequence[tuple[str, object, object]]": [("docs", "a", None)],
    "Sequence[str]": ("first", "second"),
    "dict[str, int]": {"count words": 3},
    "dict[str, tuple[int, str, BaseException]]": {"count words": (1, "a cell", ValueError("no"))},
}


def _classes() -> Iterator[type[PercoError]]:
    for value in vars(perco.errors).values():
        if isinstance(value, type) and issubclass(value, PercoError):
            yield value


def _one_of(kind: type[PercoError]) -> PercoError:
    if kind.__init__ is Exception.__init__:
        return kind("what it says")
    arguments = {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            arguments[name] = _SAMPLES[str(parameter.annotation).removesuffix(" | None")]
    return kind(**arguments)


@pytest.mark.parametrize("kind", list(_classes()))
def test_a_copy_says_the_same(kind: type[PercoError]) -> None:  # D6
    error = _one_of(kind)
    error.add_note("a note")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is kind
        assert str(other) == str(error)
        assert str(vars(other)) == str(vars(error))


def test_a_copy_has_an_identity_of_its_own() -> None:
    error = PercoError("once")
    other = copy.copy(error)
    other.add_note("only here")
    assert not hasattr(error, "__notes__")
