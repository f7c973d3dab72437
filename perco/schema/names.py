"""The names of tables, columns and observers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

from perco.errors import UsageError

T = TypeVar("T")

_NAME_MAX: Final = 64


class HasNames:
    """A column or a signal: its name, and those that it had before, the oldest first (N18)."""

    name: str
    was: tuple[str, ...]

    __slots__ = ()

    @property
    def first_name(self) -> str:
        """The oldest of its names, by which views know it."""
        return self.was[0] if self.was else self.name


class Named(dict[str, T]):
    """Tables or columns by name; the error for an unknown name lists the names that exist."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __missing__(self, name: str) -> T:
        known = ", ".join(map(repr, self)) or "none"
        raise UsageError(f"there is no {self._kind} {name!r}; there are: {known}")


class Tables(Named[Any]):
    """Tables by their newest names; a lookup also finds a table by its oldest one, which is its name in the store."""

    def __missing__(self, name: str) -> Any:
        found = self.get(name)
        return super().__missing__(name) if found is None else found

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or any(name == table.name for table in self.values())

    def get(self, name: str, default: Any = None) -> Any:
        """The table, or the default."""
        found = super().get(name)
        return next((each for each in self.values() if each.name == name), default) if found is None else found


def must_be_name(kind: str, name: str) -> str:
    """The name. Raises: UsageError."""
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_MAX or name.startswith("_"):
        what = f"an {kind}'s" if kind[0] in "aeiou" else f"a {kind}'s"
        raise UsageError(f"{what} name is a str of 1 to {_NAME_MAX} characters that does not begin with '_'")
    return name


def earlier_names(what: str, name: str, was: str | Sequence[str]) -> tuple[str, ...]:
    """The earlier names that a declaration gives. Raises: UsageError."""
    names = (was,) if isinstance(was, str) else tuple(was) if isinstance(was, Sequence) else was
    if not isinstance(names, tuple) or not all(isinstance(each, str) and 0 < len(each) <= _NAME_MAX for each in names):
        raise UsageError(f"{what}: was= takes its earlier name, or a list of them, not {was!r}")
    if names and set(names) == {name}:
        raise UsageError(f"{what}: was= names {name!r} itself")
    return names
