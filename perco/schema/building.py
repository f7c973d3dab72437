"""Observers whose work a job does for all the data that is there, instead of a run for each row.

N10 While the job builds, its observers are registered and paused, and no backfill notifies them. The job reads the data
    as of a timestamp that it draws after their registration was announced: later commits notify them. If the job is
    given up, resuming the observers starts their backfill. Once it has ended, the observers count as notified of all
    changes that it has seen, and of the rows that it has published itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from perco.errors import UsageError
from perco.schema.catalogue import Catalogue
from perco.schema.schema import Schema


def begin(catalogue: Catalogue, schema: Schema, ids: Collection[str], build: str) -> Catalogue:
    """The next version, in which the schema is declared, and these observers of it are being built. It binds: their
    runs that are under way do not commit, and neither do transactions of an earlier build.

    Args: `build`: the id of the build.
    """
    after = catalogue.declare(schema)
    observers = dict(after.observers)
    for id in ids:
        observers[id] = replace(observers[id], paused=True, building=build, ready=False, at=0)
    version = catalogue.version + 1
    return replace(after, version=version, observers=observers, binds=version)


def of(catalogue: Catalogue, build: str) -> set[str]:
    """Ids of the observers that a build is building."""
    return {id for id, entry in catalogue.observers.items() if build and entry.building == build}


def published(catalogue: Catalogue, build: str, ts: int) -> Catalogue:
    """The same version, but with the note that a build has published rows at a timestamp, or is about to write some.
    From then on, it has to be completed: runs of its observers would not find all memories."""
    noted = {id: replace(catalogue.observers[id], built=(0, ts)) for id in of(catalogue, build)}
    return replace(catalogue, observers={**catalogue.observers, **noted}) if noted else catalogue


def publish(catalogue: Catalogue, build: str, ts: int) -> Catalogue:
    """The next version, in which that is noted; this one if it is already."""
    after = published(catalogue, build, ts)
    return catalogue if after == catalogue else replace(after, version=catalogue.version + 1)


def end(catalogue: Catalogue, ids: Collection[str], build: str, built: tuple[int, int]) -> Catalogue:
    """The next version, in which these observers run.

    Args: `built`: see `ObserverEntry`.

    Raises: UsageError if another build has begun, or one of the observers was resumed or dropped.
    """
    must_go_on(catalogue, ids, build)
    observers = dict(catalogue.observers)
    for id in ids:
        observers[id] = replace(observers[id], paused=False, building="", ready=True, whole=True, built=built)
    version = catalogue.version + 1
    return replace(catalogue, version=version, observers=observers, binds=version)


def must_go_on(catalogue: Catalogue, ids: Collection[str], build: str) -> None:
    """Raises: UsageError unless a build is still building all of these observers."""
    if of(catalogue, build) != set(ids):
        raise UsageError(
            "this build of views has ended: another one has begun, or its observers were resumed or dropped"
        )


def under_way(catalogue: Catalogue, ids: Collection[str]) -> set[str]:
    """The ids of builds that are building any of these observers."""
    entries = (catalogue.observers.get(id) for id in ids)
    return {entry.building for entry in entries if entry is not None and entry.building}


def must_be_completed(catalogue: Catalogue, ids: Collection[str]) -> bool:
    """Whether a build of these observers was interrupted after it had published rows."""
    entries = (catalogue.observers.get(id) for id in ids)
    return any(entry is not None and entry.building and entry.built[1] for entry in entries)
