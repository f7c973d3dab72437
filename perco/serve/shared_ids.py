"""The ids by which processes speak of observers to each other (N18).

Each process may declare another id for an observer that was renamed. On the wire, an observer has its oldest id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from perco.notify.concerned import Concerned
from perco.schema.known import Known

T = TypeVar("T")
W = TypeVar("W")


class SharedIds:
    """Loop thread only. `known`: of this process."""

    def __init__(self, known: Known) -> None:
        self._known = known

    def shared(self, id: str) -> str:
        """The oldest id of an observer that has this id here."""
        return self._known.catalogue.shared_id(id)

    def told(self, here: Mapping[str, T]) -> dict[str, T]:
        """Facts about observers, by their ids here, with the oldest ids instead: as others are told."""
        return {self.shared(id): value for id, value in here.items()}

    def here(self, told: Mapping[str, T]) -> dict[str, T]:
        """Facts about observers that another process has told, by their ids here."""
        own = self._known.catalogue.own_id
        return {own(id): value for id, value in told.items()}

    def watching(self, watch: Callable[[Concerned], W]) -> Callable[[Concerned], W]:
        """`watch`, which knows observers by their oldest ids, for observers as they are called here."""
        return lambda concerned: watch(replace(concerned, ids=frozenset(map(self.shared, concerned.ids))))
