"""Logs of commands that run for long: a line of text, or a JSON object, for each event, on stderr."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

_FIELDS: Final = "perco"  # attribute of a log record: its fields, such as the observer and the row


class Level(StrEnum):
    """From which level on events are logged."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S%z")


class _Json(logging.Formatter):
    """One object for each event: time, level, logger, message, the fields, and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            told["error"] = type(record.exc_info[1]).__name__
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)


def arguments(level: Level, *, as_json: bool) -> list[str]:
    """The options of a command that logs like this one."""
    return ["--log-level", level.value, *(["--log-json"] if as_json else [])]


def begin(level: Level, *, as_json: bool) -> None:
    """Log perco's events, from a level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if as_json else _Text())
    log = logging.getLogger("perco")
    log.handlers[:] = [handler]
    log.setLevel(level.value.upper())
    log.propagate = False  # the program may have configured handlers of its own
