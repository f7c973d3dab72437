"""Observers whose work a job does for all the data that is there, instead of a run for each row.

N10 While the job builds, its observers are registered and paused, and no backfill notifies them. The job reads the data
    as of a timestamp that it draws after their registration was announced: later commits notify them. If the job is
    given up, resuming the observers starts their backfill. Once it has ended, the observers count as notified of all
    changes that it has seen, and of the rows that it has published itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from perco.schema.catalogue import Catalogue
from perco.schema.schema import Schema


def begin(catalogue: Catalogue, schema: Schema, ids: Collection[str]) -> Catalogue:
    """The next version, in which the schema is declared, and these observers of it are being built. It binds: their
    runs that are under way do not commit."""
    after = catalogue.declare(schema)
    observers = dict(after.observers)
    for id in ids:
        observers[id] = replace(observers[id], paused=True, building=True, ready=False, at=0)
    if observers == catalogue.observers and after is catalogue:
        return catalogue
    version = catalogue.version + 1
    return replace(after, version=version, observers=observers, binds=version)


def end(catalogue: Catalogue, ids: Collection[str], built: tuple[int, int]) -> Catalogue:
    """The next version, in which these observers run. `built`: see `ObserverEntry`; (0, 0): nothing has been built."""
    observers = dict(catalogue.observers)
    for id in ids:
        observers[id] = replace(observers[id], paused=False, building=False, ready=True, whole=True, built=built)
    version = catalogue.version + 1
    return replace(catalogue, version=version, observers=observers, binds=version)


def is_built(catalogue: Catalogue, ids: Collection[str]) -> bool:
    """Whether all of these observers are being built."""
    return all(id in catalogue.observers and catalogue.observers[id].building for id in ids)
