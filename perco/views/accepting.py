"""Accepts changes of code: the views give the same rows as before, so nothing has to run again."""

from __future__ import annotations

import perco.aio
import perco.aio.calling
import perco.sync
import perco.sync.calling
from perco.database.database import Database
from perco.database.inside import inside
from perco.errors import UsageError
from perco.schema.codes import with_codes
from perco.views.declaring import Views
from perco.views.rebuilding import must_be_registered


async def accept(views: Views, db: Database | perco.aio.Database, view: str | None = None) -> list[str]:
    """Record that the code of views, as this program has it, gives the same rows as the code with which their versions
    were registered. `accept_blocking` is the same for blocking code.

    Args:
        view: only this one, by its id; by default all.

    Returns the ids of the views whose code had changed.

    Raises: UsageError for an unknown view, or one that the store has in another version; ReadOnly; Unavailable;
    WriteUnknown if the store was lost meanwhile.
    """
    if isinstance(db, perco.aio.Database):
        return await perco.aio.calling.ask_for(db, _accept, views, view)
    return await _accept(db, views, view)


def accept_blocking(views: Views, db: perco.sync.Database, view: str | None = None) -> list[str]:
    """`accept` for blocking code. Raises: as `accept`."""
    return perco.sync.calling.ask_for(db, _accept, views, view)


async def _accept(db: Database, views: Views, view: str | None) -> list[str]:
    parts = inside(db)
    parts.engine.usable(writing=True)
    await parts.keeper.catch_up()
    chosen = views.chosen(view)
    known = parts.engine.known.catalogue.observers
    changed = []
    codes = {}
    for each in chosen:
        must_be_registered(views, each.id, parts.engine)
        now = views.fingerprint(each.id)
        if not now:
            raise UsageError(
                f"view {each.id!r}: the source of its code cannot be read, or is nested too deep, so it is not compared"
            )
        ids = views.observers(each.id)
        if any(known[id].code != now for id in ids):
            changed.append(each.id)
            codes.update(dict.fromkeys(ids, now))
    await parts.keeper.change(lambda catalogue: with_codes(catalogue, codes))
    return changed
