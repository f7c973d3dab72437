"""Negative numbers among the arguments of a command: `perco set web/ docs k rank -5`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final

import typer
from typer.core import TyperCommand

_NUMBER: Final = re.compile(r"-\.?[0-9][0-9.]*(e[-+]?[0-9]+)?", re.IGNORECASE)


class App(typer.Typer):
    """A typer app whose commands take negative numbers as arguments, and not as options."""

    def command(self, *arguments: Any, **more: Any) -> Callable[[Any], Any]:
        return super().command(*arguments, **{"cls": _Command, **more})


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes = {
            name
            for option in self.params
            if option.param_type_name == "option" and not getattr(option, "is_flag", False)
            for name in option.opts
        }
        return super().parse_args(ctx, rearranged(args, takes))


def rearranged(args: Sequence[str], takes: Iterable[str]) -> list[str]:
    """The arguments of a command, with those that are no options after `--`, if one of them is a negative number.

    Args:
        takes: names of the options that take a value.
    """
    options, others, takes = list[str](), list[str](), set(takes)
    numbers = False
    rest = iter(args)
    for each in rest:
        if each == "--":
            others += rest
        elif _NUMBER.fullmatch(each):
            numbers = True
            others.append(each)
        elif each.startswith("-") and each != "-":
            options.append(each)
            if each in takes:
                options += islice(rest, 1)
        else:
            others.append(each)
    return [*options, "--", *others] if numbers else list(args)
