"""Faults in waits for views, and in drops of observers and views, each with the component test that must find it."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import pytest

from perco.database.database import Database
from perco.notify import concerned, dropping, observers, waiting, worker
from perco.notify.concerned import Concerned
from perco.notify.waiting import Waiting
from perco.notify.worker import Worker
from perco.schema.catalogue import Catalogue
from perco.views import dropping as views_dropping
from tests.testing.mutants_components import by, nothing

_FRESH: Final = "tests/component/notify/test_views_fresh.py"
_DROPPING: Final = "tests/component/notify/test_dropping.py"
_VIEWS: Final = "tests/component/notify/test_views_dropping.py"


def _concerned(patch: pytest.MonkeyPatch, fault: Any) -> None:
    right = concerned.concerned_with

    def concerned_with(catalogue: Catalogue, schema: Any, views: Any) -> Concerned:
        return fault(right, catalogue, schema, views)  # type: ignore[no-any-return]

    patch.setattr(waiting, "concerned_with", concerned_with)


def _none_up_to(patch: pytest.MonkeyPatch, fault: Any) -> None:
    right = Waiting.none_up_to

    async def none_up_to(self: Any, ts: int, without: Any = None) -> Any:
        return await fault(right, self, ts, without)

    patch.setattr(Waiting, "none_up_to", none_up_to)


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
    async def fault(right: Any, waiting: Any, ts: int, without: Any) -> Any:
        return None if await right(waiting, ts, without) is None else {}

    _none_up_to(patch, fault)


@by(
    f"{_FRESH}::test_the_backfill_of_a_view_of_a_view_is_waited_for_though_its_causes_are_later",
    "V14 a wait does not include changes that reach a new view under a later cause",
)
def early(patch: pytest.MonkeyPatch) -> None:
    async def fault(right: Any, waiting: Any, ts: int, without: Any) -> Any:
        catalogue = waiting._engine.known.catalogue
        if without is None or not concerned.all_but(catalogue, without).ids.isdisjoint(catalogue.unready()):
            return await right(waiting, ts, without)
        return await right(waiting, ts)

    _none_up_to(patch, fault)


@by(
    f"{_FRESH}::test_a_view_that_is_new_reflects_no_change_before_it_has_seen_all_older_data",
    "V14 a view is fresh though it has not been notified of existing data",
)
def unready(patch: pytest.MonkeyPatch) -> None:
    async def fault(right: Any, waiting: Any, ts: int, without: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Catalogue, "unready", lambda self: [])
            return await right(waiting, ts, without)

    _none_up_to(patch, fault)


@by(
    f"{_FRESH}::test_a_fresh_snapshot_has_all_that_was_committed_before",
    "V14 a snapshot is taken before the views are fresh",
)
def stale_snapshot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Database, "_until_fresh", nothing)


# ------------------------------------------------------------ observers and views that are dropped


@by(
    f"{_DROPPING}::test_an_observer_that_is_registered_again_begins_as_a_new_one",
    "N12 the number of a dropped observer is given again",
)
def number_again(patch: pytest.MonkeyPatch) -> None:
    right = Catalogue._with_observers

    def merge(self: Any, schema: Any, before: Any) -> Any:
        merged = right(dataclasses.replace(self, dropped={}), schema, before)
        return dataclasses.replace(merged, dropped=self.dropped)

    patch.setattr(Catalogue, "_with_observers", merge)


@by(
    f"{_DROPPING}::test_what_a_dead_client_left_locked_notifies_no_dropped_observer",
    "N12 a drop does not settle locks that list the observer",
)
def unsettled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dropping, "_lists", lambda *_: False)


@by(f"{_DROPPING}::test_failed_changes_go_too", "N12 a drop leaves the failed changes")
def failed_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dropping, "FAILED_LIST", dropping.LOCK)


@by(
    f"{_DROPPING}::test_a_transaction_that_began_before_a_drop_does_not_commit_after_it",
    "N12 writers need not know that an observer was dropped",
)
def unbound(patch: pytest.MonkeyPatch) -> None:
    right = observers._without

    def without(catalogue: Catalogue, ids: Any) -> Catalogue:
        return dataclasses.replace(right(catalogue, ids), binds=catalogue.binds)

    patch.setattr(observers, "_without", without)


@by(f"{_DROPPING}::test_an_observer_that_a_worker_has_is_not_dropped", "N12 an observer that a worker has is dropped")
def dropped_under_way(patch: pytest.MonkeyPatch) -> None:
    right = observers.ObserverStates.drop

    async def drop(self: Any, ids: Any, running: Any) -> Any:
        return await right(self, ids, {})

    patch.setattr(observers.ObserverStates, "drop", drop)


@by(
    f"{_VIEWS}::test_whoever_dies_nothing_is_left_of_views_that_are_dropped",
    "V15 rows and memory go in two transactions",
)
def memory_first(patch: pytest.MonkeyPatch) -> None:
    right = views_dropping._retract_all

    async def retract_all(db: Any, plan: Any, memory: Any, *rest: Any) -> None:
        owners = []
        async with db.snapshot() as snap:
            owners = [(row.key, row[memory]) async for row in snap.scan(memory.table, columns=[memory])]
        for key, stored in owners:
            await db.run(_forget, memory, key)
            await db.run(_remember, memory, key, stored)
            await right(db, plan, memory, *rest)

    async def _forget(txn: Any, memory: Any, key: Any) -> None:
        txn.delete(memory, key)

    async def _remember(txn: Any, memory: Any, key: Any, stored: bytes) -> None:
        txn.set(memory, key, stored)

    patch.setattr(views_dropping, "_retract_all", retract_all)


@by(f"{_VIEWS}::test_a_column_that_another_view_writes_now_is_left", "V15 what another view writes now is deleted")
def not_spared(patch: pytest.MonkeyPatch) -> None:
    right = views_dropping._plan

    def plan(*arguments: Any) -> Any:
        found = right(*arguments)
        found.spared = set()
        return found

    patch.setattr(views_dropping, "_plan", plan)


@by(
    f"{_VIEWS}::test_a_view_that_is_not_declared_any_more_is_dropped_beside_its_readers",
    "V15 observers are not dropped with their view",
)
def observers_stay(patch: pytest.MonkeyPatch) -> None:
    async def drop_observer(self: Any, ids: Any) -> dict[str, int]:
        return {}

    patch.setattr(Database, "drop_observer", drop_observer)


@by(
    f"{_VIEWS}::test_an_owner_of_many_rows_is_retracted_in_transactions_of_a_bounded_size",
    "V15 only the first rows of an owner are retracted",
)
def first_rows(patch: pytest.MonkeyPatch) -> None:
    right = views_dropping._retract

    async def retract(*arguments: Any) -> Any:
        counts, _ = await right(*arguments)
        return counts, False

    patch.setattr(views_dropping, "_retract", retract)


@by(
    f"{_VIEWS}::test_a_dropped_view_that_is_declared_again_is_built_again",
    "V15 what perco keeps for a view stays when it is dropped",
)
def kept_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(views_dropping, "_remove", nothing)
