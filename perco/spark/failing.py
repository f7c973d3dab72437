"""Errors of tasks, and rows that fail.

Spark passes a task's error on as text, below the stack of its JVM. `reason_first` makes an error of it that begins with
the task's own error.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from perco.errors import PercoError, PercoWarning, SchemaMismatch, UsageError
from perco.spark.chunks import FrameChanged
from perco.spark.ledger import KeyNotUnique

_BEGINS: Final = "Traceback (most recent call last):"
_ERROR: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?:: (.*))?")
_WARNED: Final = 5  # how many rows a warning names
_SHOWN: Final = 500  # characters of a row


class TaskFailed(PercoError):
    """A task has failed for good. The message begins with the task's error; `__cause__` is Spark's exception."""


@contextmanager
def reason_first() -> Iterator[None]:
    """If Spark raises an error of a task, raise the task's error instead: a UsageError, SchemaMismatch, KeyNotUnique or
    FrameChanged as such, others as TaskFailed."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        found = reason_of(str(error))
        if found is None:
            raise
        made = error_of(*found)
        for note in getattr(error, "__notes__", ()):
            made.add_note(note)
        raise made from error


def error_of(kind: str, message: str) -> PercoError:
    """The error of a task. `kind`: the name of its class."""
    match kind:
        case "KeyNotUnique":
            return KeyNotUnique(message, {})
        case "FrameChanged":
            return FrameChanged(message)
        case "UsageError":
            return UsageError(message)
        case "SchemaMismatch":
            return SchemaMismatch(message)
    return TaskFailed(f"{kind}: {message}" if message else kind)


def reason_of(text: str) -> tuple[str, str] | None:
    """The class and the message of the error that ended a task, from Spark's text; None: there is no Python error."""
    _, begun, rest = text.partition(_BEGINS)
    if not begun:
        return None
    found: list[str] = []
    for line in rest.splitlines():
        if line.startswith("\tat ") or line.lstrip().startswith("SQLSTATE"):
            break
        if line == _BEGINS or not line or line[0].isspace():
            found += [line] if found and line and line != _BEGINS else []
            found = [] if line == _BEGINS else found
        elif _ERROR.fullmatch(line) and not found:
            found = [line]
        elif found:
            found.append(line)
    if not found:
        return None
    match = _ERROR.fullmatch(found[0])
    assert match is not None
    return match[1], "\n".join([match[2] or "", *found[1:]]).strip()


class RowRefused(UsageError):
    """A row that cannot be written. Attributes: `row`, the row; `key`, its key."""

    row: dict[str, Any]
    key: Any

    def __init__(self, message: str, row: dict[str, Any], key: Any) -> None:
        super().__init__(message)
        self.row, self.key = row, key


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that could not be written, as text."""

    key: str
    reason: str
    row: str

    @classmethod
    def of(cls, error: RowRefused) -> FailedRow:
        return cls(str(error.key)[:_SHOWN], str(error), str(error.row)[:_SHOWN])


def report(table: str, failed: int, rows: list[FailedRow], allowed: int, to: str, stopped: bool) -> None:
    """Report the rows that a write could not write: in the file `to`, unless it is "", and by a warning. Raises:
    UsageError, if there are more than `allowed`."""
    if to:
        lines = (json.dumps({"key": each.key, "reason": each.reason, "row": each.row}) + "\n" for each in rows)
        Path(to).write_text("".join(lines))
    what = "row" if failed == 1 else "rows"
    if failed > allowed:
        least = "at least " if stopped else ""
        raise UsageError(
            f"{rows[0].reason} ({least}{failed} {what} failed, and failures_max is {allowed}; the rows that were "
            "written stay)"
        )
    if failed:
        named = "; ".join(f"key {each.key}: {each.reason}" for each in rows[:_WARNED])
        told = f"{failed} {what} of a frame not written to table {table!r}: {named}"
        warnings.warn(told, PercoWarning, stacklevel=2)
