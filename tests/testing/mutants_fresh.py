"""Faults in waits for views, each with the component test that must find it."""

from __future__ import annotations

from typing import Any, Final

import pytest

from perco.database.database import Database
from perco.notify import concerned, waiting, worker
from perco.notify.concerned import Concerned
from perco.notify.waiting import Waiting
from perco.notify.worker import Worker
from perco.schema.catalogue import Catalogue
from tests.testing.mutants_components import by

_FRESH: Final = "tests/component/notify/test_views_fresh.py"


def _concerned(patch: pytest.MonkeyPatch, fault: Any) -> None:
    right = concerned.concerned_with

    def concerned_with(catalogue: Catalogue, schema: Any, views: Any) -> Concerned:
        return fault(right, catalogue, schema, views)  # type: ignore[no-any-return]

    patch.setattr(waiting, "concerned_with", concerned_with)


@by(
    f"{_FRESH}::test_a_wait_for_a_view_includes_all_that_it_depends_on",
    "V14 a wait for a view does not include the views that it reads",
)
def one_link(patch: pytest.MonkeyPatch) -> None:
    def fault(right: Any, catalogue: Catalogue, schema: Any, views: Any) -> Concerned:
        mine = {id for id, o in schema.observers.items() if o.view in views or o.writes is None}
        return concerned.all_but(catalogue, [o.number for id, o in catalogue.observers.items() if id not in mine])

    _concerned(patch, fault)


@by(
    f"{_FRESH}::test_a_wait_for_a_view_leaves_out_views_that_it_does_not_depend_on",
    "V14 a wait for a view includes all views",
)
def every_view(patch: pytest.MonkeyPatch) -> None:
    _concerned(patch, lambda right, catalogue, schema, views: concerned.all_but(catalogue))


@by(
    f"{_FRESH}::test_an_observer_of_which_nothing_is_known_counts_and_one_that_says_what_it_writes_does_not",
    "V14 a wait for a view leaves out observers that are written by hand",
)
def by_hand(patch: pytest.MonkeyPatch) -> None:
    def fault(right: Any, catalogue: Catalogue, schema: Any, views: Any) -> Concerned:
        found = right(catalogue, schema, views)
        hand = {o.number for id, o in catalogue.observers.items() if not schema.observers[id].view}
        return concerned.all_but(catalogue, found.without | hand)

    _concerned(patch, fault)


@by(
    f"{_FRESH}::test_a_run_that_writes_what_its_observer_does_not_name_fails",
    "V14 a run may write what its observer does not name",
)
def unnamed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker, "must_be_declared", lambda *_: None)


@by(f"{_FRESH}::test_a_look_that_a_run_passed_does_not_count", "V14 a look does not watch runs in flight")
def unwatched(patch: pytest.MonkeyPatch) -> None:
    class Blind(concerned.Watch):
        def saw(self, root: int) -> None:
            pass

    patch.setattr(worker, "Watch", Blind)


@by(
    f"{_FRESH}::test_a_look_that_a_run_passed_does_not_count",
    "V14 a look does not count because of a run that is not concerned",
)
def watches_all(patch: pytest.MonkeyPatch) -> None:
    right = Worker.watch

    def watch(self: Any, whose: Concerned) -> Any:
        return right(self, concerned.all_but(self.engine.known.catalogue))

    patch.setattr(Worker, "watch", watch)


@by(
    f"{_FRESH}::test_a_wait_says_which_changes_have_failed_for_good_and_waits_for_all_others",
    "V14 a wait for a view does not look at the failed list",
)
def failed_is_fresh(patch: pytest.MonkeyPatch) -> None:
    right = Waiting.none_up_to

    async def none_up_to(self: Any, ts: int, without: Any = None) -> Any:
        return None if await right(self, ts, without) is None else {}

    patch.setattr(Waiting, "none_up_to", none_up_to)


@by(
    f"{_FRESH}::test_the_backfill_of_a_view_of_a_view_is_waited_for_though_its_causes_are_later",
    "V14 a wait does not include changes that reach a new view under a later cause",
)
def early(patch: pytest.MonkeyPatch) -> None:
    right = Waiting.none_up_to

    async def none_up_to(self: Any, ts: int, without: Any = None) -> Any:
        catalogue = self._engine.known.catalogue
        if without is None or not concerned.all_but(catalogue, without).ids.isdisjoint(catalogue.unready()):
            return await right(self, ts, without)
        looked = await right(self, ts)
        return looked

    patch.setattr(Waiting, "none_up_to", none_up_to)


@by(
    f"{_FRESH}::test_a_view_that_is_new_reflects_no_change_before_it_has_seen_all_older_data",
    "V14 a view is fresh though it has not been notified of existing data",
)
def unready(patch: pytest.MonkeyPatch) -> None:
    right = Waiting.none_up_to

    async def none_up_to(self: Any, ts: int, without: Any = None) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Catalogue, "unready", lambda self: [])
            return await right(self, ts, without)

    patch.setattr(Waiting, "none_up_to", none_up_to)


@by(
    f"{_FRESH}::test_a_fresh_snapshot_has_all_that_was_committed_before",
    "V14 a snapshot is taken before the views are fresh",
)
def stale_snapshot(patch: pytest.MonkeyPatch) -> None:
    async def until_fresh(self: Any, views: Any, timeout: Any) -> None:
        pass

    patch.setattr(Database, "_until_fresh", until_fresh)
