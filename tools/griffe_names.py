"""An extension of griffe, which reads docstrings for the site: `start, stop: rows` are two parameters with one text."""

from __future__ import annotations

import re
from typing import Any, Final

import griffe

_SEVERAL: Final = re.compile(r"^(?P<indent> +)(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)+): (?P<text>.*)$", re.MULTILINE)


class Names(griffe.Extension):  # type: ignore[misc, unused-ignore]
    """Gives each of several parameters, or attributes, a line of its own, so that each is shown with its type."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = split(obj.docstring.value)


def split(docstring: str) -> str:
    """A docstring, with the parameters and attributes that share a line."""
    head, found, sections = docstring.partition("Args:\n")
    if not found:
        head, found, sections = docstring.partition("Attributes:\n")
    return head + found + _SEVERAL.sub(_each, sections)


def _each(line: re.Match[str]) -> str:
    *others, last = line["names"].split(", ")
    lines = [*(f"{name}: see `{last}`." for name in others), f"{last}: {line['text']}"]  # more lines of the text follow
    return "\n".join(line["indent"] + each for each in lines)
