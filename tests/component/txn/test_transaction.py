"""What a transaction sends: which mutations, to where, in which order."""

from __future__ import annotations

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.protocol.records import Cellref
from tests.support.faults import FaultyRowStore, faulty, gated, use
from tests.support.machines import Machine

docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
n = docs.column("n", perco.INT64)
text = docs.column("text", perco.TEXT)
more = docs.column("more", perco.INT64)
others = perco.Table("others", key=perco.TEXT)
m = others.column("m", perco.INT64)
SCHEMA = perco.Schema(docs, others)


async def primary_of(machine: Machine, cells: list[tuple[perco.Column[str, int], str]]) -> Cellref:
    async with machine.opened() as db:
        gate = await gated(db, "commit")
        txn = await db.begin()
        for column, key in cells:
            txn.set(column, key, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(txn.commit)
            await gate.reached()
            primaries = {lock.primary for _, _, lock in machine.rows.locks()}
            gate.open()
        [primary] = primaries
        return primary


async def test_the_primary_lies_in_the_tablet_with_most_cells() -> None:  # T12
    cells = [(n, "a"), (m, "x"), (n, "i"), (n, "q"), (n, "j"), (m, "y"), (n, "k")]
    primary = await primary_of(Machine(SCHEMA), cells)
    assert (primary.table, primary.row) == ("docs", b"i")


async def test_without_groups_it_lies_in_the_row_with_most_cells() -> None:  # T12 S1
    machine = Machine(SCHEMA, groups=False)
    primary = await primary_of(machine, [(n, "a"), (m, "x"), (n, "q"), (more, "q")])
    assert (primary.table, primary.row) == ("docs", b"q")


async def test_among_equals_it_is_the_first_that_was_written() -> None:  # T12
    primary = await primary_of(Machine(SCHEMA), [(m, "x"), (n, "a"), (n, "q")])
    assert (primary.table, primary.row) == ("others", b"x")


@pytest.mark.parametrize(("groups", "expected"), [(True, 2), (False, 3)])
@pytest.mark.parametrize("one_step", [False, True])
async def test_the_cells_of_a_tablet_go_together_where_the_store_has_groups(
    groups: bool, expected: int, one_step: bool
) -> None:  # S1 C7
    machine = Machine(SCHEMA, groups=groups, one_step=one_step)
    async with machine.opened() as db:
        store = faulty(db)
        async with db.transaction() as txn:
            for key in ("a", "b", "q"):
                txn.set(n, key, 1)
                txn.set(text, key, "")
        await trio.testing.wait_all_tasks_blocked()
        if one_step:  # the primary's part is the last agent: neither locked nor committed afterwards
            others = expected - 1
            assert store.log == ["prewrite"] * others + ["one step"] + ["commit"] * others
        else:
            assert store.log == ["prewrite"] * expected + ["commit"] * expected


async def test_what_wrote_nothing_sends_nothing() -> None:
    machine = Machine(SCHEMA)
    async with machine.opened() as db:
        store = faulty(db)
        async with db.transaction() as txn:
            assert await txn.get(n, "a") is None
        assert store.log == []


async def test_the_steps_are_told_in_their_order() -> None:
    """`on_event`: for tests that stop the store anywhere."""
    events: list[str] = []
    machine = Machine(SCHEMA)
    async with machine.opened(perco.Options(on_event=events.append)) as db:
        async with db.transaction() as txn:
            txn.set(n, "a", 1)
            txn.set(n, "q", 1)
        await trio.testing.wait_all_tasks_blocked()
    assert events == ["prewrite", "commit", "secondaries"]


async def test_the_call_returns_when_the_primary_has_committed() -> None:  # T3 S2
    """Phase two is nobody's business any more."""
    machine = Machine(SCHEMA)
    async with machine.opened() as db:
        gate = await gated(db, "commit", skip=1)
        async with db.transaction() as txn:
            txn.set(n, "a", 1)
            txn.set(n, "q", 1)
        assert txn.outcome == "committed"
        assert machine.locks() == 1
        gate.open()
    assert machine.locks() == 0


async def test_counts() -> None:
    machine = Machine(SCHEMA)
    async with machine.opened() as db:
        async with db.transaction() as txn:
            txn.set(n, "a", 1)
        late = await db.begin()
        async with db.transaction() as txn:
            txn.set(n, "a", 2)
        late.set(n, "a", 3)
        with pytest.raises(perco.WriteConflict):
            await late.commit()
        statistics = db.statistics()
        counters = statistics.counters
        assert (counters.commits, counters.aborts, counters.conflicts, counters.unknown) == (2, 1, 1, 0)
        assert statistics.last_ts == inside(db).oracle.last
        assert sum(tablet.mutations for tablet in statistics.tablets) > 4
        await trio.testing.wait_all_tasks_blocked()
        assert db.statistics().live_transactions == 0


@pytest.mark.parametrize("one_step", [False, True])
async def test_a_transaction_lives_from_its_first_step_until_its_end(one_step: bool) -> None:  # L1
    machine = Machine(SCHEMA, one_step=one_step)
    async with machine.opened() as db:
        lives: list[tuple[str, bool]] = []

        async def look(mutation: object) -> None:
            lives.append(("made", inside(db).fates.alive(txn.start_ts)))

        use(db, FaultyRowStore(inside(db).driver.store, before=look))
        txn = await db.begin()
        txn.set(n, "a", 1)
        assert not inside(db).fates.alive(txn.start_ts)
        await txn.commit()
        assert lives == [("made", True)] * (2 - one_step)
        assert not inside(db).fates.alive(txn.start_ts)
