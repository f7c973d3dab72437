"""Faults of bulk loads (P7), and of observers that are being built (N10)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import pytest

from perco.check import check, examine
from perco.clock import oracle
from perco.clock.timestamps import Timestamps
from perco.schema import building
from perco.schema.catalogue import Catalogue
from perco.tablets import loading, sorting
from tests.testing.mutants_components import by

_LOADS: Final = "tests/integration/storage/test_bulk_load.py"
_BUILDING: Final = "tests/component/notify/test_building.py"


@by(f"{_LOADS}::test_what_readers_see_meanwhile", "P7 the oracle's bound moves while a load is recorded")
def bound_moves(patch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def still(self: Any) -> AsyncIterator[Any]:
        yield oracle.Still(self._timestamps)

    patch.setattr(oracle.Oracle, "still", still)


@by(f"{_LOADS}::test_rows_values_history_and_observers", "P7 the oracle does not go on above the load")
def no_jump(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Timestamps, "jump", lambda self, bound: setattr(self, "bound", self.bound + 1000))


@by(f"{_LOADS}::test_a_table_that_is_not_empty", "P7 a table that has rows is published into")
def not_empty(patch: pytest.MonkeyPatch) -> None:
    begin = loading.BulkLoads._empty_tablet
    looked = 0

    def once(self: Any, catalogue: Catalogue, table: str) -> Any:
        nonlocal looked
        looked += 1
        return begin(self, catalogue, table) if looked <= 2 else self._local.store.tablet(table, b"")

    patch.setattr(loading.BulkLoads, "_empty_tablet", once)


@by(f"{_LOADS}::test_of_two_loads_at_once_the_later_may_be_published_first", "P7 the reserved timestamp has passed")
def too_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(oracle.Still, "bound", property(lambda self: 0, lambda self, bound: None), raising=False)
    patch.setattr(oracle.Still, "jump", lambda self, bound: None)
    patch.setattr(oracle.Still, "row", lambda self, bound: (b"other", (), ()))


@by(
    f"{_LOADS}::test_an_observer_that_is_registered_meanwhile[publish]",
    "P7 observers may change while the files are made",
)
def any_observers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loading, "_observers", lambda catalogue, tables: set())


@by(f"{_LOADS}::test_rows_values_history_and_observers", "P7 the files have no notifications")
def unnotified(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sorting, "observers_of", lambda catalogue, table, column: ())


@by(
    f"{_BUILDING}::test_nothing_runs_meanwhile_and_later_changes_wait",
    "N10 an observer that is being built is backfilled",
)
def backfilled(patch: pytest.MonkeyPatch) -> None:
    def unready(self: Catalogue) -> list[str]:
        return [id for id, entry in self.observers.items() if not entry.ready]

    patch.setattr(Catalogue, "unready", unready)


@by(f"{_BUILDING}::test_a_job_that_is_given_up", "N10 a build that is given up leaves no backfill")
def given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Catalogue, "unready", lambda self: [])


@by(f"{_BUILDING}::test_changes_that_the_job_has_seen_count_as_seen", "N10 what a build has seen counts as lost")
def lost(patch: pytest.MonkeyPatch) -> None:
    unnotified = examine.unnotified

    def all_of_them(image: Any, book: Any) -> Any:
        known = {n: (id, replace(entry, built=(0, 0))) for n, (id, entry) in book.observers.items()}
        patch.setattr(book, "observers", known)
        return unnotified(image, book)

    patch.setattr(check, "unnotified", all_of_them)


@by(f"{_LOADS}::test_an_observer_that_is_registered_meanwhile[_cut]", "P7 observers are compared only once")
def compared_once(patch: pytest.MonkeyPatch) -> None:
    check, checked = loading._Begun.check, 0

    def once(self: Any, catalogue: Catalogue) -> None:
        nonlocal checked
        checked += 1
        if checked == 1:
            check(self, catalogue)

    patch.setattr(loading._Begun, "check", once)


@by(
    f"{_BUILDING}::test_a_build_ends_when_another_begins_or_an_observer_is_resumed",
    "N10 a build that has ended goes on",
)
def goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(building, "must_go_on", lambda catalogue, ids, build: None)


@by(
    f"{_BUILDING}::test_a_build_that_has_published_rows_has_to_be_completed",
    "N10 observers without their memories are resumed",
)
def resumed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(building, "publish", lambda catalogue, build, ts: catalogue)
    patch.setattr(building, "must_be_completed", lambda catalogue, ids: True)
