"""Faults in the runs of views, each with the component test that must find it."""

from __future__ import annotations

import dataclasses
from contextlib import aclosing
from typing import Any, Final

import pytest

from perco.txn.inside import engine_of, size_of
from perco.txn.running import run
from perco.views import cached, components, folding, joining, memory, rebuilding, running, sinking, sqlite
from perco.views.tops import Delta, Top
from tests.testing.mutants_components import by, nothing

_RULES: Final = "tests/component/notify/test_views.py"
_INPLACE: Final = "tests/component/notify/test_views_in_place.py"
_TOPS: Final = "tests/core/views/test_tops.py"
_REBUILDS: Final = "tests/component/notify/test_views_rebuild.py"
_CACHED: Final = "tests/component/notify/test_views_cached.py"
_SINKS: Final = "tests/component/notify/test_views_sink.py"
_SQLITE: Final = "tests/integration/views/test_sqlite.py"
_EQUAL: Final = "tests/component/notify/test_views_equal.py"
_COMPONENTS: Final = "tests/component/notify/test_views_components.py"


class Unlocking:
    """A transaction that reads rows without locking them."""

    def __init__(self, txn: Any) -> None:
        self._txn = txn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    async def row(self, table: Any, key: Any, columns: Any, *, lock: bool = False) -> Any:
        return await self._txn.row(table, key, columns)


@by(f"{_RULES}::test_rows_follow_their_source", "V1 a run does not retract what it no longer gives")
def no_retraction(patch: pytest.MonkeyPatch) -> None:
    right = running.write

    async def write(view: Any, txn: Any, owner: Any, before: Any, *rest: Any) -> None:
        before.rows = {where: digest for where, digest in before.rows.items() if where in rest[0]}
        await right(view, txn, owner, before, *rest)

    patch.setattr(running, "write", write)


@by(f"{_RULES}::test_rows_follow_their_source", "V1 an owner's memory is written only once")
def memory_stays(patch: pytest.MonkeyPatch) -> None:
    right = running.remember

    def remember(view: Any, txn: Any, key: Any, stored: Any, *rest: Any) -> None:
        if stored is None:
            right(view, txn, key, stored, *rest)

    patch.setattr(running, "remember", remember)


@by(
    f"{_EQUAL}::test_whoever_dies_the_store_equals_the_build",
    "V1 an owner's memory is written in a transaction of its own",
)
def memory_apart(patch: pytest.MonkeyPatch) -> None:
    right = running.write

    async def note(txn: Any, view: Any, owner: bytes, after: Any) -> None:
        txn.set(view.memory, view.table.key.decode(owner), running.packed_memory(view, after, 0))

    async def write(view: Any, txn: Any, owner: bytes, before: Any, after: Any, attempt: int) -> None:
        await right(view, txn, owner, before, after, attempt)
        engine = engine_of(txn)
        await run(engine, engine.retry, False, note, (view, owner, after), {})

    patch.setattr(running, "write", write)
    patch.setattr(running, "remember", lambda *_: None)


def _memory_only_if_changed(patch: pytest.MonkeyPatch) -> None:
    right = running.remember

    def remember(view: Any, txn: Any, key: Any, stored: Any, after: Any, seen_ts: int = 0) -> None:
        right(dataclasses.replace(view, several=False), txn, key, stored, after)

    patch.setattr(running, "remember", remember)


@by(
    f"{_RULES}::test_runs_of_one_row_for_two_columns_cannot_overlap",
    "V2 a run for one of several columns does not write the memory",
)
def rows_overlap(patch: pytest.MonkeyPatch) -> None:
    _memory_only_if_changed(patch)


@by(f"{_RULES}::test_runs_of_one_group_cannot_overlap", "V2 a run for a group does not write the memory")
def groups_overlap(patch: pytest.MonkeyPatch) -> None:
    _memory_only_if_changed(patch)


class _OneSide:
    """A transaction that raises no signal for groups that a member leaves."""

    def __init__(self, txn: Any, groups: set[Any]) -> None:
        self._txn, self._groups = txn, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def signal(self, signal: Any, key: Any) -> None:
        if key in self._groups:
            self._txn.signal(signal, key)


@by(f"{_RULES}::test_a_member_moves_from_group_to_group", "V3 a group that a member leaves is not signalled")
def one_side(patch: pytest.MonkeyPatch) -> None:
    right = folding.Told.write

    async def write(self: Any, txn: Any, attempt: int) -> None:
        entered = {self.view.members.split(key)[0] for key, values in self._changes if values is not None}
        await right(self, _OneSide(txn, entered), attempt)

    patch.setattr(folding.Told, "write", write)


class _NoDelete:
    """A transaction that deletes nothing of a column."""

    def __init__(self, txn: Any, column: Any) -> None:
        self._txn, self._column = txn, column

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def delete(self, column: Any, key: Any) -> None:
        if column is not self._column:
            self._txn.delete(column, key)


@by(f"{_RULES}::test_a_group_follows_its_members", "V4 a delta is folded twice")
def folded_twice(patch: pytest.MonkeyPatch) -> None:
    right = running.fold

    async def fold(view: Any, txn: Any, group: Any, stored: Any, **how: Any) -> Any:
        return await right(view, _NoDelete(txn, view.deltas), group, stored)

    patch.setattr(running, "fold", fold)


@by(
    f"{_RULES}::test_a_delta_that_comes_while_another_is_folded_is_not_lost",
    "V4 a delta goes to another slot than was read",
)
def lost_beside(patch: pytest.MonkeyPatch) -> None:
    async def add(view: Any, txn: Any, group: Any, delta: Any, attempt: int) -> None:
        head = folding.parts_of(view.table.key, group)
        stored = await txn.get(view.deltas, (*head, 0))
        if stored is not None:
            delta.merge(Delta.unpack(stored))
        txn.set(view.deltas, (*head, 1), delta.pack())

    patch.setattr(folding, "_add", add)


@by(f"{_RULES}::test_a_row_has_one_owner_and_may_change_it", "V5 a run does not look whether a row has an owner")
def many_owners(patch: pytest.MonkeyPatch) -> None:
    async def claim(view: Any, txn: Any, owner: Any, new: Any) -> set[Any]:
        return set()

    patch.setattr(running, "_claim", claim)


@by(f"{_RULES}::test_what_has_not_changed_is_not_written_and_nobody_is_told", "V6 all rows are written again")
def no_cut_off(patch: pytest.MonkeyPatch) -> None:
    right = running.write

    async def write(view: Any, txn: Any, owner: Any, before: Any, *rest: Any) -> None:
        before.rows = dict.fromkeys(before.rows, b"")
        await right(view, txn, owner, before, *rest)

    patch.setattr(running, "write", write)


@by(f"{_EQUAL}::test_a_store_equals_the_build", "V6 the cut-off cuts a change")
def cuts_too_much(patch: pytest.MonkeyPatch) -> None:
    right = memory.given

    def given(view: str, puts: Any, outputs: Any) -> Any:
        found = right(view, puts, outputs)
        return {where: dataclasses.replace(each, digest=b"") for where, each in found.items()}

    patch.setattr(running, "given", given)


@by(f"{_EQUAL}::test_a_store_equals_the_build", "V4 an order keeps members that have left")
def order_stays(patch: pytest.MonkeyPatch) -> None:
    right = folding._move

    def move(view: Any, txn: Any, member: Any, before: Any, after: Any) -> bool:
        return right(view, txn, member, None, after)

    patch.setattr(folding, "_move", move)


@by(f"{_TOPS}::test_it_is_filled_seldom", "V4 a list that has become too short is not filled again")
def stays_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Top, "is_short", property(lambda self: False))


@by(
    f"{_RULES}::test_a_run_and_a_change_of_the_other_side_do_not_miss_each_other",
    "V8 a left row's run does not lock the key",
)
def no_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(joining, "lock", lambda txn, column, key: None)


@by(f"{_INPLACE}::test_left_and_right_rows_may_come_at_once", "V8 a change of a right row is not noted at its key")
def not_noted(patch: pytest.MonkeyPatch) -> None:
    right = folding.turn

    async def turn(view: Any, txn: Any, key: Any) -> None:
        await right(view, _NoDelete(txn, view.turned), key)

    patch.setattr(folding, "turn", turn)


@by(f"{_INPLACE}::test_a_run_tells_the_readers_itself", "V12 a run keeps the observers from running, and does not tell")
def tells_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(running, "_tell", nothing)


@by(f"{_INPLACE}::test_a_reader_of_another_version_is_notified", "V12 a reader is told by another version of itself")
def any_version(patch: pytest.MonkeyPatch) -> None:
    def numbers(teller: Any, catalogue: Any) -> list[int]:
        return [catalogue.observers[teller.observer(column)].number for column in teller.columns]

    patch.setattr(running, "_numbers", numbers)


@by(f"{_INPLACE}::test_a_row_with_copies_to_remove_is_left_to_the_observer", "V12 copies of an earlier version stay")
def copies_stay(patch: pytest.MonkeyPatch) -> None:
    right = running.read_encoded

    async def read_encoded(snap: Any, table: Any, rows: Any, columns: Any) -> Any:
        found = await right(snap, table, rows, columns)
        return [[None] for _ in found] if columns[0].name.startswith("_view") else found

    patch.setattr(running, "read_encoded", read_encoded)


@by(
    f"{_INPLACE}::test_a_run_that_has_conflicted_leaves_the_telling_to_the_observer",
    "V12 a run tells its readers at every attempt",
)
def tells_again(patch: pytest.MonkeyPatch) -> None:
    right = running.write

    async def write(view: Any, txn: Any, owner: Any, before: Any, after: Any, attempt: int) -> None:
        await right(view, txn, owner, before, after, 1)

    patch.setattr(running, "write", write)


@by(
    f"{_INPLACE}::test_members_that_were_read_in_place_are_copied_under_a_lock",
    "V2 members that were read in place are copied without a lock",
)
def copies_unlocked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(running, "lock", lambda txn, column, key: None)


@by(f"{_INPLACE}::test_a_prefix_becomes_a_function", "V3 the group of an earlier version is not signalled")
def earlier_group_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(running, "_tell_earlier_group", lambda view, txn, key: None)


@by(f"{_RULES}::test_a_join_follows_both_sides", "V8 a change of a right row does not signal its key")
def not_turned(patch: pytest.MonkeyPatch) -> None:
    async def turn(view: Any, txn: Any, key: Any) -> None:
        txn.delete(view.turned, key)

    patch.setattr(folding, "turn", turn)


@by(
    f"{_RULES}::test_a_change_on_the_way_begins_with_the_first_left_row_again",
    "V8 a change of a right row leaves how far an earlier one has come",
)
def goes_on(patch: pytest.MonkeyPatch) -> None:
    async def turn(view: Any, txn: Any, key: Any) -> None:
        txn.delete(view.turned, key)
        txn.signal(view.lefts.changed, key)

    patch.setattr(folding, "turn", turn)


@by(
    f"{_RULES}::test_an_owner_that_gives_a_row_again_meanwhile_keeps_it",
    "V5 the inputs of the owner that loses a row are not locked",
)
def taken_unlocked(patch: pytest.MonkeyPatch) -> None:
    right = running._release

    async def release(view: Any, txn: Any, *rest: Any) -> None:
        await right(view, Unlocking(txn), *rest)

    patch.setattr(running, "_release", release)


@by(
    f"{_RULES}::test_a_group_that_begins_to_keep_aggregates_is_counted",
    "V4 a group without stored aggregates counts as new",
)
def counts_as_new(patch: pytest.MonkeyPatch) -> None:
    right = folding.fold

    async def fold(view: Any, txn: Any, group: Any, stored: Any, **how: Any) -> Any:
        return await right(view, txn, group, None if stored == folding.NOTHING_KEPT else stored, **how)

    patch.setattr(running, "fold", fold)


@by(
    f"{_REBUILDS}::test_a_rebuild_conflicts_with_a_change_of_what_it_has_read",
    "V2 a rebuild reads a source row without a lock",
)
def rebuilt_unlocked(patch: pytest.MonkeyPatch) -> None:
    right = rebuilding._mend

    async def mend(txn: Any, view: Any, owner: Any) -> bool:
        patch.setattr(rebuilding, "size_of", lambda txn: size_of(txn._txn))
        return await right(Unlocking(txn), view, owner)  # type: ignore[arg-type]

    patch.setattr(rebuilding, "_mend", mend)


@by(
    f"{_REBUILDS}::test_a_rebuild_mends_whatever_was_broken",
    "V1 a rebuild mends rows, but not their owner's memory",
)
def rebuilt_without_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rebuilding, "remember", lambda *_: None)


@by(
    f"{_REBUILDS}::test_a_rebuild_mends_whatever_was_broken",
    "V4 a rebuild does not count a group again",
)
def rebuilt_uncounted(patch: pytest.MonkeyPatch) -> None:
    right = rebuilding.group_now

    async def group_now(view: Any, txn: Any, group: Any, stored: Any, *, recount: bool) -> Any:
        return await right(view, txn, group, stored)

    patch.setattr(rebuilding, "group_now", group_now)


@by(
    f"{_CACHED}::test_a_function_that_gives_another_value_each_time_gives_one_for_an_argument",
    "V10 a stored value of a cached function is replaced",
)
def replaced(patch: pytest.MonkeyPatch) -> None:
    async def store(txn: Any, results: Any, values: dict[bytes, Any]) -> dict[bytes, Any]:
        for key, value in values.items():
            txn.set(results, key, value)
        return values

    patch.setattr(cached, "_store", store)


@by(
    f"{_CACHED}::test_a_row_follows_the_argument_of_its_value",
    "V9 a row is the same whatever the argument of its cached function",
)
def same_for_all(patch: pytest.MonkeyPatch) -> None:
    right = memory.given

    def given(view: str, puts: Any, outputs: Any) -> Any:
        found = right(view, puts, outputs)
        return {where: dataclasses.replace(each, digest=b"") if each.later else each for where, each in found.items()}

    patch.setattr(running, "given", given)


@by(
    f"{_CACHED}::test_a_value_is_computed_once_whoever_needs_it",
    "V10 a value of a cached function is not stored",
)
def not_stored(patch: pytest.MonkeyPatch) -> None:
    async def store(txn: Any, results: Any, values: dict[bytes, Any]) -> dict[bytes, Any]:
        return values

    patch.setattr(cached, "_store", store)


@by(f"{_SINKS}::test_a_sink_follows_its_table", "V11 a row that is gone is not delivered")
def not_told(patch: pytest.MonkeyPatch) -> None:
    right = sinking.Sinking.deliver

    async def deliver(self: Any, engine: Any, row: Any) -> None:
        if row.values is not None:
            await right(self, engine, row)

    patch.setattr(sinking.Sinking, "deliver", deliver)


@by(
    f"{_SINKS}::test_an_old_delivery_that_arrives_late_changes_nothing",
    "V11 the version of a delivery is drawn when it is made",
)
def later_version(patch: pytest.MonkeyPatch) -> None:
    right = sinking.Sinking.deliver
    drawn = iter(range(1 << 40, 1 << 41))

    async def deliver(self: Any, engine: Any, row: Any) -> None:
        await right(self, engine, row._replace(version=next(drawn)))

    patch.setattr(sinking.Sinking, "deliver", deliver)


@by(f"{_SQLITE}::test_a_row_is_replaced_by_newer_ones_only", "V11 a sink takes older rows, too")
def takes_all(patch: pytest.MonkeyPatch) -> None:
    right = sqlite.SqliteTable._stored
    drawn = iter(range(1 << 40, 1 << 41))
    patch.setattr(sqlite.SqliteTable, "_stored", lambda self, row: right(self, row._replace(version=next(drawn))))


@by(
    f"{_COMPONENTS}::test_two_links_of_a_circle_do_not_end_at_once",
    "V13 the end of a link is not noted at the component's label",
)
def ends_apart(patch: pytest.MonkeyPatch) -> None:
    right = components._cut

    async def cut(linked: Any, txn: Any, place: Any, attempt: int) -> None:
        await right(linked, _NoDelete(txn, linked.view.turned), place, attempt)  # type: ignore[arg-type]

    patch.setattr(components, "_cut", cut)


@by(
    f"{_COMPONENTS}::test_the_ends_of_a_link_do_not_get_other_labels_meanwhile",
    "V13 a run does not lock the labels of a link's ends",
)
def unlocked_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(components, "lock", lambda *_: None)


@by(
    f"{_COMPONENTS}::test_a_rebuild_and_a_run_do_not_give_other_labels_at_once",
    "V13 a rebuild does not lock the labels of a component",
)
def unlocked_labels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rebuilding, "lock", lambda *_: None)


@by(f"{_COMPONENTS}::test_labels_follow_the_links", "V13 a part that a link has left keeps its label")
def never_parted(patch: pytest.MonkeyPatch) -> None:
    async def pieces(view: Any, txn: Any, ends: Any) -> list[Any]:
        return []

    patch.setattr(components, "_pieces", pieces)


@by(f"{_COMPONENTS}::test_another_way_keeps_nodes_connected", "V13 a search does not look for another way")
def one_way(patch: pytest.MonkeyPatch) -> None:
    right = components._walk

    async def walk(view: Any, snap: Any, node: Any, without: Any = None) -> Any:
        async with aclosing(right(view, snap, node, without)) as found:
            yield await anext(found)
            if without is not None:
                async for each in found:
                    yield each

    patch.setattr(components, "_walk", walk)


@by(
    f"{_COMPONENTS}::test_labels_follow_the_links",
    "V13 a node without links keeps its label if it is the component's",
)
def alone_with_label(patch: pytest.MonkeyPatch) -> None:
    right = components.neighbours

    async def neighbours(view: Any, snap: Any, node: Any, *, limit: int | None = None) -> list[Any]:
        found: list[Any] = await right(view, snap, node, limit=limit)
        return found or [node]

    patch.setattr(components, "neighbours", neighbours)


@by(
    f"{_COMPONENTS}::test_a_new_version_may_write_another_column",
    "V13 a new version trusts the labels of an earlier one",
)
def old_labels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(components, "_take_over", nothing)
