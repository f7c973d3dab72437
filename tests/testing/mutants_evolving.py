"""Faults in what changes a schema: drops, renames, conversions; each with the component test that must find it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

import pytest

from perco.errors import SchemaMismatch
from perco.history import dropped
from perco.history.vacuum import Vacuum
from perco.schema import catalogue, converting, entries, removing
from perco.schema.catalogue import Catalogue
from perco.schema.entries import TableEntry
from perco.schema.known import Known
from perco.schema.names import HasNames
from tests.testing.mutants_components import by, nothing

_REMOVING: Final = "tests/component/notify/test_removing.py"
_FOLDER: Final = "tests/integration/storage/test_removing.py"
_RENAMING: Final = "tests/component/notify/test_renaming.py"
_CONVERTING: Final = "tests/component/notify/test_converting.py"


@by(
    f"{_REMOVING}::test_a_column_that_is_declared_again_is_another_one",
    "N17 the number of a dropped column is given again",
)
def number_again(patch: pytest.MonkeyPatch) -> None:
    right = TableEntry.next_number
    patch.setattr(TableEntry, "next_number", lambda self: right(replace(self, gone={})))


@by(
    f"{_REMOVING}::test_a_transaction_that_began_before_a_drop_does_not_commit_after_it",
    "N17 writers need not know that a column was dropped",
)
def not_binding(patch: pytest.MonkeyPatch) -> None:
    right = removing._next
    patch.setattr(removing, "_next", lambda of, table, entry: replace(right(of, table, entry), binds=of.binds))


@by(
    f"{_REMOVING}::test_readers_that_began_before_a_drop_keep_the_values",
    "N17 the vacuum removes values that a reader may read",
)
def too_early(patch: pytest.MonkeyPatch) -> None:
    right = dropped.due
    patch.setattr(dropped, "due", lambda of, table, watermark: right(of, table, 1 << 52))


@by(
    f"{_REMOVING}::test_the_vacuum_removes_the_values_and_nothing_else",
    "N17 dropped values stay as long as old versions",
)
def retained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dropped, "needed", lambda of, table: 0)


@by(
    f"{_REMOVING}::test_what_a_dead_client_left_locked_is_settled_before_its_primary_goes[owner-text]",
    "N17 a primary is removed while other cells of its transaction are locked",
)
def primary_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Vacuum, "_settle_locks", nothing)


@by(
    f"{_REMOVING}::test_a_drop_is_refused_while_observers_need_the_column",
    "N17 acknowledgements of the column's dropped observers stay",
)
def acks_stay(patch: pytest.MonkeyPatch) -> None:
    right = dropped._queries
    patch.setattr(dropped, "_queries", lambda of, table, numbers: right(replace(of, dropped={}), table, numbers))


@by(f"{_FOLDER}::test_with_a_record_goes_its_entry_in_the_log", "N17 E1 entries of the log stay")
def logged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dropped, "is_logged", lambda column: False)


@by(
    f"{_REMOVING}::test_a_drop_is_refused_while_observers_need_the_column",
    "N17 a column that an observer observes is dropped",
)
def observed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(removing, "_must_be_unused", lambda of, table, columns: None)


@by(
    f"{_RENAMING}::test_old_and_new_programs_use_the_same_rows_at_the_same_time",
    "N18 a program sees names that it does not declare",
)
def other_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Catalogue, "seen_by", lambda self, schema: self)


@by(
    f"{_RENAMING}::test_an_old_program_that_starts_again_changes_nothing",
    "N18 the catalogue forgets earlier names",
)
def names_forgotten(patch: pytest.MonkeyPatch) -> None:
    for module in entries, catalogue:
        patch.setattr(module, "renamed", lambda name, names, to: ())


@by(f"{_RENAMING}::test_views_go_on_over_columns_that_were_renamed", "N18 views know columns by their newest names")
def newest_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HasNames, "first_name", property(lambda self: self.name))


@by(
    f"{_REMOVING}::test_a_program_that_runs_on_does_not_take_another_column_for_its_own[owner-another codec]",
    "N17 a program that runs on uses a column that another program has made",
)
def taken_for_its_own(patch: pytest.MonkeyPatch) -> None:
    def only_there(self: Known, column: Any) -> None:
        if column.name not in self.catalogue.tables[column.table.name].columns:
            raise SchemaMismatch(f"{column!r} has been dropped, and this program still declares it")

    patch.setattr(Known, "_must_be_the_same", only_there)


@by(
    f"{_REMOVING}::test_what_a_view_or_a_conversion_needs_is_not_dropped",
    "N17 a column that a view or a conversion writes is dropped",
)
def written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Catalogue, "_numbers_of", lambda self, writes: ())


@by(
    "tests/integration/notify/test_renamed.py::test_a_worker_is_known_by_its_observers_whatever_it_calls_them[old-new]",
    "N18 processes speak of an observer by the ids that they declare",
)
def ids_of_their_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Catalogue, "shared_id", lambda self, id: id)


@by(
    f"{_CONVERTING}::test_a_target_that_is_dropped_and_made_again_is_filled_again",
    "N19 the note of what was converted outlives the target",
)
def mark_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(removing, "mark_of", lambda target: "")


Run = Callable[[Any, Any], Awaitable[None]]


@by(f"{_CONVERTING}::test_a_newer_value_of_a_program_stays", "N19 a conversion replaces newer values")
def over_newer(patch: pytest.MonkeyPatch) -> None:
    def observer(target: Any, mark: Any, version: int, convert: Callable[[Any], Any]) -> Run:
        async def run(txn: Any, change: Any) -> None:
            if change.value is not None:
                txn.set(target, change.key, convert(change.value))

        return run

    patch.setattr(converting, "observer", observer)


@by(
    f"{_CONVERTING}::test_a_program_may_change_or_delete_what_was_converted",
    "N19 a conversion does not note what it has converted",
)
def unmarked(patch: pytest.MonkeyPatch) -> None:
    right = converting.observer

    def observer(target: Any, mark: Any, version: int, convert: Callable[[Any], Any]) -> Run:
        run = right(target, mark, version, convert)

        async def without(txn: Any, change: Any) -> None:
            await run(txn, change)
            txn.delete(mark, change.key)

        return without

    patch.setattr(converting, "observer", observer)
