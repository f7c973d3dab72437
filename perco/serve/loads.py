"""Bulk loads that clients begin (P7). A load ends with the session that has begun it."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from typing import Any

from perco.database.local import LocalOwner
from perco.serve.sessions import Session, Sessions, must_go_on
from perco.txn.background import Background


class Loads:
    """Answers clients' calls. Loop thread only."""

    def __init__(self, owner: LocalOwner, sessions: Sessions, background: Background) -> None:
        self._owner = owner
        sessions.on_load_left = lambda id: background.spawn(partial(owner.end_load, id))

    async def begin(self, session: Session, what: Any) -> tuple[Any, ...]:
        names, build = what
        begun = await self._owner.begin_load(names, build)
        if session.ended:  # meanwhile
            await self._owner.end_load(begun.id)
            must_go_on(session)
        session.loads.add(begun.id)
        return astuple(begun)

    async def publish(self, session: Session, what: Any) -> tuple[Any, ...]:
        id, files = what
        session.loads.discard(id)
        return astuple(await self._owner.publish_load(id, dict(files)))

    async def end(self, session: Session, id: Any) -> None:
        session.loads.discard(id)
        await self._owner.end_load(id)


def names(what: Any) -> None:
    """Raises: TypeError unless these are names of tables, and the id of a build."""
    shape = isinstance(what, tuple) and [type(part) for part in what] == [tuple, str]
    _must_be(shape and all(isinstance(each, str) for each in what[0]), "names of tables, and the id of a build")


def name(what: Any) -> None:
    """Raises: TypeError unless this is the id of a load."""
    _must_be(isinstance(what, str), "the letters of the id of a bulk load")


def files(what: Any) -> None:
    """Raises: TypeError unless this is the id of a load, and the first rows and names of files, by table."""
    shape = isinstance(what, tuple) and len(what) == 2 and isinstance(what[0], str) and isinstance(what[1], tuple)
    _must_be(shape and all(map(_is_file_list, what[1])), "the files of a bulk load")


def _is_file_list(what: Any) -> bool:
    if not isinstance(what, tuple) or [type(part) for part in what] != [str, tuple]:
        return False
    return all(isinstance(each, tuple) and [type(part) for part in each] == [bytes, str] for each in what[1])


def _must_be(right: bool, what: str) -> None:
    if not right:
        raise TypeError(f"{what} are expected")
