"""Acts for the page of `perco ui`: pauses and resumes observers, replays and drops failed changes, drops pins."""

from __future__ import annotations

import logging
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import perco
from perco.cli.ui.bounds import bounded
from perco.cli.ui.shelf import Shelf
from perco.database.inside import inside
from perco.errors import UsageError

log: logging.Logger = logging.getLogger("perco.store")

_ACTION_S: Final = 60.0


class Acting:
    """Each action opens the store to write, as a client of its owner, and closes it again. Loop thread only."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def act(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Do it. Returns what was done. Raises: UsageError, and the errors of the store."""
        action = _ACTIONS.get(name)
        if action is None:
            raise UsageError(f"there is no action {name!r}; there are: {', '.join(_ACTIONS)}")
        call, takes = action
        if unknown := arguments.keys() - takes.keys():
            raise UsageError(f"{name} takes {', '.join(takes)}, not {', '.join(sorted(unknown))}")
        for key, value in arguments.items():
            if type(value) is not takes[key]:
                raise UsageError(f"{name}: {key} is of type {takes[key].__name__}")
        async with self._shelf.writing() as db, bounded(_ACTION_S, "do it again for the rest"):
            done = await call(db, arguments)
        log.info("%s through the page: %s", name, done, extra={"perco": {"action": name, **arguments}})
        return done


def _required(arguments: Mapping[str, Any], key: str) -> Any:
    if not arguments.get(key):
        raise UsageError(f"{key} is missing")
    return arguments[key]


async def _pause(db: perco.Database, arguments: Mapping[str, Any]) -> dict[str, Any]:
    await db.pause(_required(arguments, "observer"))
    return {"paused": arguments["observer"]}


async def _resume(db: perco.Database, arguments: Mapping[str, Any]) -> dict[str, Any]:
    await db.resume(_required(arguments, "observer"))
    return {"resumed": arguments["observer"]}


async def _replay(db: perco.Database, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The failed changes of a row (`ref`), or all of an observer (`all`)."""
    observer = _required(arguments, "observer")
    return {"replayed": await db.replay_failed(observer, key=_key(db, observer, arguments))}


async def _drop(db: perco.Database, arguments: Mapping[str, Any]) -> dict[str, Any]:
    observer = _required(arguments, "observer")
    return {"dropped": await db.drop_failed(observer, key=_key(db, observer, arguments))}


async def _drop_pin(db: perco.Database, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"dropped": int(await db.drop_pin(_required(arguments, "pin")))}


def _key(db: perco.Database, observer: str, arguments: Mapping[str, Any]) -> Any:
    if ("ref" in arguments) == bool(arguments.get("all")):
        raise UsageError("give ref, the row whose changes are meant, or all: true for all of the observer's")
    entry = inside(db).catalogue.observers.get(observer)
    if "ref" not in arguments or entry is None:
        return None  # the store says that there is no such observer
    try:
        return db.schema.tables[entry.table].key.decode(bytes.fromhex(arguments["ref"]))
    except (ValueError, struct.error):
        raise UsageError(f"ref={arguments['ref']!r} is no row") from None


_Act = Callable[[perco.Database, Mapping[str, Any]], Awaitable[dict[str, Any]]]
_ACTIONS: Final[dict[str, tuple[_Act, dict[str, type]]]] = {
    "pause": (_pause, {"observer": str}),
    "resume": (_resume, {"observer": str}),
    "replay": (_replay, {"observer": str, "ref": str, "all": bool}),
    "drop": (_drop, {"observer": str, "ref": str, "all": bool}),
    "drop-pin": (_drop_pin, {"pin": str}),
}
