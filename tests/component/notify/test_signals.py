"""Signals: raised by many at once, run for at least once, and never a conflict (N5)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import trio

import perco
from perco.cli.looks import look
from perco.database.inside import inside
from perco.notify import working
from perco.protocol import claim
from perco.protocol.claim import COVERS_MAX
from perco.protocol.records import bare_column, is_bare, pack_cause, unpack_lock
from perco.storage import NOTIFY, PENDING, TRACE, WRITE, Mutation
from perco.testing.faults import kind_of
from tests.component.notify.kit import (
    LONG_S,
    OPTIONS,
    ByHand,
    HoldingStore,
    StoppedError,
    StoppingStore,
    client,
    get,
    locks,
    memory,
    notified,
    put,
    settle,
    tablets_cells,
    until,
)
from tests.support.everywhere import owning
from tests.support.places import local_of

Txn = perco.Transaction
Change = perco.Change[Any, Any]


class Hot:
    """Documents, and clusters that grow; a run that grows one raises a signal there."""

    def __init__(self) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
        self.body = self.docs.column("body", perco.TEXT)
        self.clusters = perco.Table("clusters", key=perco.TEXT, splits=["m"])
        self.size = self.clusters.column("size", perco.INT64)
        self.grown = self.clusters.signal("grown")
        self.schema = perco.Schema(self.docs, self.clusters)
        self.seen: list[Change] = []

    def observe(self, id: str = "count") -> None:
        """An observer that counts its runs."""

        @self.schema.observe(self.grown, id=id)
        async def count(txn: Txn, change: perco.Change[str, None]) -> None:
            self.seen.append(change)
            txn.set(self.size, change.key, (await txn.get(self.size, change.key) or 0) + 1)


@pytest.fixture
def hot() -> Hot:
    return Hot()


async def raise_signal(db: perco.Database, hot: Hot, key: str, doc: str | None = None) -> int:
    """In a transaction of its own, perhaps with a write; returns its commit_ts."""
    async with db.transaction() as txn:
        txn.signal(hot.grown, key)
        if doc is not None:
            txn.set(hot.body, doc, "words")
    return txn.commit_ts


def cells(db: perco.Database, group: str) -> list[tuple[bytes, int, int]]:
    """(row, column, ts) of all cells of a group."""
    found = tablets_cells(local_of(db).store, group)
    return [(row, column, ts) for table, row, column, ts, _ in found if table != "_perco"]


# ------------------------------------------------------------------ what a run is told


@pytest.mark.parametrize("one_step", [True, False])
@pytest.mark.parametrize("doc", [None, "a"])
async def test_an_observer_runs_for_a_signal(hot: Hot, doc: str | None, *, one_step: bool) -> None:  # N5
    hot.observe()
    async with client(memory(), hot.schema, one_step=one_step) as db, db.worker():
        commit_ts = await raise_signal(db, hot, "k", doc)
        await settle(db)
        assert hot.seen == [perco.Change("k", None, commit_ts, 1, commit_ts)]
        assert await get(db, hot.size, "k") == 1
        assert not cells(db, PENDING)
        assert not notified(db)
        assert not locks(db)


async def test_an_aborted_transaction_raises_nothing(hot: Hot) -> None:  # N5
    hot.observe()
    async with perco.open("memory:", hot.schema, options=OPTIONS) as db, db.worker():
        txn = await db.begin()
        txn.signal(hot.grown, "k")
        txn.discard()
        await put(db, hot.body, "a", "old")
        txn = await db.begin()
        txn.signal(hot.grown, "k")
        txn.set(hot.body, "a", "new")
        await put(db, hot.body, "a", "newer")
        with pytest.raises(perco.WriteConflict):
            await txn.commit()
        await settle(db)
        assert not hot.seen
        assert not cells(db, PENDING)


@pytest.mark.parametrize("one_step", [True, False])
async def test_many_raise_a_signal_at_once_without_a_conflict(hot: Hot, *, one_step: bool) -> None:  # N5, N4
    hot.observe()
    async with client(memory(), hot.schema, one_step=one_step) as db:

        async def one(number: int) -> None:
            async with db.transaction() as txn:  # one try
                txn.signal(hot.grown, "k")
                if number % 2:
                    txn.set(hot.body, f"d{number}", "words")

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(one, number)
        await until(lambda: not inside(db).fates.observed)
        assert db.statistics().counters.conflicts == 0
        assert len(notified(db)) == 50
        async with db.worker() as worker:
            await settle(db)
            assert worker.statistics()["count"].runs == 1
            assert worker.statistics()["count"].collapsed == 49
    assert len(hot.seen) == 1


async def test_each_observer_of_a_signal_has_a_cell_of_its_own(hot: Hot) -> None:  # N11
    hot.observe("one")
    done = []

    @hot.schema.observe(hot.grown, id="two")
    async def two(txn: Txn, change: Change) -> None:
        done.append(change.key)

    async with perco.open("memory:", hot.schema, options=OPTIONS) as db:
        await raise_signal(db, hot, "k")
        assert await db.waiting() == {"one": 1, "two": 1}
        async with db.worker():
            await settle(db)
    assert (len(hot.seen), done) == (1, ["k"])


async def test_what_caused_a_signal_travels_with_it(hot: Hot) -> None:  # N9
    @hot.schema.observe(hot.body, id="parse")
    async def parse(txn: Txn, change: Change) -> None:
        txn.signal(hot.grown, "k")

    hot.observe()
    async with perco.open("memory:", hot.schema, options=OPTIONS) as db, db.worker():
        commit_ts = await put(db, hot.body, "a", "words")
        await db.wait_for(commit_ts, timeout=LONG_S)
        [change] = hot.seen
        assert change.cause == commit_ts
        assert change.commit_ts > commit_ts


@pytest.mark.parametrize("one_step", [True, False])
async def test_a_run_may_raise_the_signal_that_it_runs_for(hot: Hot, *, one_step: bool) -> None:  # N2, N5
    runs = []

    @hot.schema.observe(hot.grown, id="again")
    async def again(txn: Txn, change: Change) -> None:
        runs.append(change)
        if len(runs) < 4:
            txn.signal(hot.grown, change.key)

    async with client(memory(), hot.schema, one_step=one_step) as db, db.worker():
        commit_ts = await raise_signal(db, hot, "k")
        await settle(db)
        assert len(runs) == 4
        assert {change.cause for change in runs} == {commit_ts}
        assert not cells(db, PENDING)


async def test_a_signal_raised_during_a_run_is_run_for_again(hot: Hot) -> None:  # N2
    begun, go_on = trio.Event(), trio.Event()
    runs = []

    @hot.schema.observe(hot.grown, id="slow")
    async def slow(txn: Txn, change: Change) -> None:
        runs.append(change.commit_ts)
        begun.set()
        await go_on.wait()

    async with perco.open("memory:", hot.schema, options=OPTIONS) as db, db.worker():
        first = await raise_signal(db, hot, "k")
        await begun.wait()
        second = await raise_signal(db, hot, "k")
        assert not await db.is_idle()
        go_on.set()
        await settle(db)
    assert runs == [first, second]


async def test_a_run_that_writes_nothing_leaves_nothing(hot: Hot) -> None:  # N5
    @hot.schema.observe(hot.grown, id="look")
    async def look(txn: Txn, change: Change) -> None:
        hot.seen.append(change)

    async with perco.open("memory:", hot.schema, options=OPTIONS) as db, db.worker():
        await raise_signal(db, hot, "k")
        await settle(db)
        assert len(hot.seen) == 1
        assert not cells(db, WRITE)
        [(row, column, _)] = cells(db, TRACE)
        assert (row, is_bare(column)) == (b"k", True)


async def test_more_signals_than_one_run_takes_along(hot: Hot) -> None:  # N2
    hot.observe()
    async with perco.open("memory:", hot.schema, options=OPTIONS) as db:
        for _ in range(COVERS_MAX + 3):
            await raise_signal(db, hot, "k")
        async with db.worker() as worker:
            await settle(db)
            assert worker.statistics()["count"].collapsed == COVERS_MAX + 3 - len(hot.seen)
    assert len(hot.seen) == 2


async def test_a_failing_run_keeps_its_signal(hot: Hot) -> None:  # N6
    @hot.schema.observe(hot.grown, id="fails")
    async def fails(txn: Txn, change: Change) -> None:
        hot.seen.append(change)
        if change.attempt < 3:
            raise ValueError("asked to fail")

    async with perco.open("memory:", hot.schema, options=OPTIONS) as db, db.worker():
        await raise_signal(db, hot, "k")
        await settle(db)
    assert [change.attempt for change in hot.seen] == [1, 2, 3]


# ------------------------------------------------------------------ the commit point


@pytest.mark.parametrize("one_step", [True, False])
async def test_a_transaction_that_only_signals_can_be_asked_for(hot: Hot, *, one_step: bool) -> None:  # T1, T4
    hot.observe()
    store = memory()
    async with client(store, hot.schema, one_step=one_step) as db:
        async with db.transaction() as txn:
            txn.signal(hot.grown, "k")
            txn.signal(hot.grown, "z")  # in another tablet
        assert txn.commit_ts
        assert await db.outcome(txn.token) == txn.commit_ts
    async with client(store, hot.schema) as db:  # another process: it has only what is stored
        assert await db.outcome(txn.token) == txn.commit_ts
        assert {row for row, _ in notified(db)} == {b"k", b"z"}


async def test_what_a_transaction_that_only_signals_leaves_is_collected(hot: Hot) -> None:  # G4
    hot.observe()
    hot.schema.keep = perco.Keep(seconds=0)
    async with perco.open("memory:", hot.schema, options=OPTIONS) as db, db.worker():
        for _ in range(20):
            await raise_signal(db, hot, "k")
        await settle(db)
        assert len(cells(db, TRACE)) == 20
        result = await db.vacuum()
        assert result.removed.traces == 20
        assert not cells(db, TRACE)


@pytest.mark.parametrize("doc", [None, "a"])
async def test_a_signal_stays_pending_until_its_transaction_commits(hot: Hot, doc: str | None) -> None:  # N5, N7
    hot.observe()
    local = memory()
    store = HoldingStore(local.store, lambda mutation: kind_of(mutation) == "commit")
    async with client(local, hot.schema, store=store) as db, db.worker(), trio.open_nursery() as nursery:
        nursery.start_soon(raise_signal, db, hot, "k", doc)
        await store.held.wait()
        [(row, _, _)] = [cell for cell in cells(db, PENDING) if not is_bare(cell[1])]
        assert row == b"k"
        assert not notified(db)
        assert not await db.is_idle()
        store.let_go()
        await settle(db)
    assert len(hot.seen) == 1


@pytest.mark.parametrize("doc", [None, "a"])
async def test_wherever_a_process_dies_its_signal_is_raised_if_it_committed(hot: Hot, doc: str | None) -> None:
    """N5: the dead one's pending entry is made final, or removed once it can never commit."""
    hot.observe()
    ends = []
    for steps in range(7):
        hot.seen.clear()
        local = memory()
        store = StoppingStore(local.store)
        token = ""
        with contextlib.suppress(StoppedError, perco.errors.BackgroundFailure):
            async with client(local, hot.schema, store=store, sweeping=False) as db:
                txn = await db.begin()
                txn.signal(hot.grown, "k")
                txn.signal(hot.grown, "z")
                if doc is not None:
                    txn.set(hot.body, doc, "words")
                store.left = steps
                try:
                    await txn.commit()
                finally:
                    token = txn.token
                while inside(db).fates.observed and not store.stopped.is_set():  # phase two  # noqa: ASYNC110
                    await trio.sleep(0.05)
        assert store.stopped.is_set() == (steps < (4 if doc is None else 6))
        async with client(local, hot.schema) as db, db.worker():
            await settle(db)
            commit_ts = await db.outcome(token)
            assert sorted(change.key for change in hot.seen) == (["k", "z"] if commit_ts else [])
            assert {change.commit_ts for change in hot.seen} <= {commit_ts}
            assert not cells(db, PENDING)
            ends.append(bool(commit_ts))
    assert ends == sorted(ends), "committed from some step on"
    assert len(set(ends)) == 2


@pytest.mark.parametrize("waits", ["wait_idle", "wait_for"])
async def test_a_pending_entry_that_nobody_settles_is_not_waited_for(hot: Hot, waits: str) -> None:  # N5, N7
    """A late copy of a prewrite, after its transaction is over: no reader will ever meet it."""
    hot.observe()
    local = memory()
    store = HoldingStore(local.store, lambda mutation: False)
    sent: list[Mutation] = []
    right = store.apply

    async def apply(mutations: Any) -> Any:
        sent.extend(mutations)
        return await right(mutations)

    store.apply = apply  # type: ignore[method-assign]
    async with client(local, hot.schema, store=store) as db, db.worker():
        commit_ts = await raise_signal(db, hot, "k")
        await settle(db)
        await local.store.apply([mutation for mutation in sent if kind_of(mutation) == "prewrite"])
        assert cells(db, PENDING)
        if waits == "wait_for":
            await db.wait_for(commit_ts, timeout=LONG_S)
        else:
            await settle(db)
        assert not cells(db, PENDING)
    assert len(hot.seen) == 2, "once too often, which is allowed"


async def test_a_pending_removal_is_waited_for(hot: Hot) -> None:  # N5
    """No run starts again for the signals that a committed run has seen, while its phase two is under way."""

    @hot.schema.observe(hot.grown, id="apart")
    async def apart(txn: Txn, change: perco.Change[str, None]) -> None:
        hot.seen.append(change)
        txn.set(hot.body, "a", change.key)  # the run's primary: the entries that it has seen go in phase two

    local = memory()

    def removes(mutation: Mutation) -> bool:
        return any(
            g == PENDING and column & 0xFFFF and value is None
            for _, _, ws in mutation.rows
            for g, column, _, value in ws
        )

    store = HoldingStore(local.store, removes)
    async with client(local, hot.schema, store=store) as db, trio.open_nursery() as nursery:
        await raise_signal(db, hot, "k")
        await ByHand(db).run(hot.grown, "k")
        await store.held.wait()
        assert len(hot.seen) == 1
        assert await get(db, hot.body, "a") == "k", "it has committed"
        assert len(notified(db)) == 1, "which is not to be seen yet"
        nursery.start_soon(ByHand(db).run, hot.grown, "k")
        await trio.sleep(1)
        store.let_go()
        await settle(db)
    assert len(hot.seen) == 1


async def test_serializable_transactions_and_read_locks_may_signal(hot: Hot) -> None:  # T14
    hot.observe()
    async with perco.open("memory:", hot.schema, options=OPTIONS) as db, db.worker():
        await put(db, hot.body, "a", "old")
        for how in ({"isolation": "serializable"}, {}):
            async with db.transaction(**how) as txn:  # type: ignore[arg-type]
                await txn.get(hot.body, "a", lock=not how)
                txn.signal(hot.grown, "k")
            assert txn.commit_ts
        for isolation, error in (("serializable", perco.errors.ReadConflict), ("snapshot", perco.WriteConflict)):
            txn = await db.begin(isolation=isolation)  # type: ignore[arg-type]
            await txn.get(hot.body, "a", lock=isolation == "snapshot")
            txn.signal(hot.grown, "k")
            await put(db, hot.body, "a", "new")
            with pytest.raises(error):
                await txn.commit()
        await settle(db)


async def test_a_run_that_only_locks_what_it_reads_keeps_older_ones_from_writing(hot: Hot) -> None:  # T14, N5
    """Two runs of one row overlap; the later finds all well, and the earlier would undo that."""
    begun, go_on = trio.Event(), trio.Event()
    told: list[Any] = []

    @hot.schema.observe(hot.grown, id="copy")
    async def copy(txn: Txn, change: Change) -> None:
        value = len(await txn.get(hot.body, "a") or "")
        first = not told
        told.append(value)
        if first:
            begun.set()
            await go_on.wait()
        if await txn.get(hot.size, "k", lock=True) != value:
            txn.set(hot.size, "k", value)

    both = memory()
    async with client(both, hot.schema) as db, client(both, hot.schema, beside=db) as other:
        earlier, later = ByHand(db), ByHand(other)
        await put(db, hot.size, "k", 5)
        async with trio.open_nursery() as nursery:
            await raise_signal(db, hot, "k")  # seen by a run that finds nothing in "a", and takes its time
            nursery.start_soon(earlier.run, hot.grown, "k")
            await begun.wait()
            await put(db, hot.body, "a", "words")
            await raise_signal(db, hot, "k")
            await later.run(hot.grown, "k")
            assert told == [0, 5]
            go_on.set()
        await settle(db)
        assert await get(db, hot.size, "k") == 5
        assert earlier.counted("copy").conflicts == 1
    assert told == [0, 5], "the second run also handled the first one's signals"


# ------------------------------------------------------------------ waiting


@pytest.mark.parametrize("what", ["signal", "removal", "primary"])
async def test_who_waits_is_told_of_a_pending_entry_that_cannot_be_read(hot: Hot, what: str) -> None:  # N7
    hot.observe()
    async with perco.open("memory:", hot.schema, options=OPTIONS) as db, db.worker():
        bound = inside(db).known.bind_signal(hot.grown)
        column = {"signal": bound.column, "removal": bound.acks[0], "primary": bare_column(bound.column)}[what]
        ts = await inside(owning(db)).oracle.draw()  # no transaction of a client's, which would live
        await inside(db).driver.store.apply([Mutation("clusters", ((b"k", (), ((PENDING, column, ts, b"junk"),)),))])
        with pytest.raises(perco.errors.Corruption, match=r"clusters\['k'\]\.grown"):
            await settle(db)
        await raise_signal(db, hot, "z")
        await until(lambda: hot.seen)
        assert not await db.is_idle()


async def test_the_cause_of_one_among_a_great_many_cells_of_a_row_is_found(hot: Hot) -> None:  # N7, N9
    """However many wait in a row, the oldest cause is not overlooked, and counting them all is no error."""
    hot.observe()
    async with perco.open("memory:", hot.schema, options=OPTIONS) as db:
        first = await raise_signal(db, hot, "k")
        ack = inside(db).known.bind_signal(hot.grown).acks[0]
        later = 10_000_000
        puts = [(NOTIFY, ack, later + i, pack_cause(later + i, 0)) for i in range((1 << 16) + 5)]
        await inside(db).driver.store.apply([Mutation("clusters", ((b"k", (), puts),))])
        assert await db.waiting() == {"count": (1 << 16) + 6}
        assert await inside(db).waiting.none_up_to(first) is None
        assert await inside(db).waiting.none_up_to(first - 1) == {}


async def test_who_looks_from_outside_sees_what_is_pending(hot: Hot) -> None:  # N7
    hot.observe()
    local = memory()
    store = HoldingStore(local.store, lambda mutation: kind_of(mutation) == "commit")
    async with client(local, hot.schema, store=store) as db, trio.open_nursery() as nursery:
        empty = await look(db)
        assert empty.empty
        nursery.start_soon(raise_signal, db, hot, "k", "a")
        await store.held.wait()
        pending = await look(db)
        assert (pending.changes, pending.locks, pending.empty) == (0, 1, False)
        assert (await look(db, until_ts=0)).empty
        store.let_go()
        await until(lambda: not inside(db).fates.observed)
        assert (await look(db)).waiting == {"count": 1}
        async with db.worker():
            await settle(db)
        done = await look(db)
        assert done.empty
        assert done.marks != empty.marks, "something has been there in between"


async def test_what_only_signals_leaves_a_mark_for_who_looks_from_outside(hot: Hot) -> None:  # N7
    @hot.schema.observe(hot.grown, id="nothing")
    async def nothing(txn: Txn, change: Change) -> None:
        hot.seen.append(change)

    async with perco.open("memory:", hot.schema, options=OPTIONS) as db, db.worker():
        before = await look(db)
        await raise_signal(db, hot, "k")
        await settle(db)
        after = await look(db)
        assert (before.empty, after.empty, len(hot.seen)) == (True, True, 1)
        assert before.marks != after.marks


# ------------------------------------------------------------------ the catalogue


async def test_a_signal_that_nobody_observes_is_nothing(hot: Hot) -> None:  # N5
    async with perco.open("memory:", hot.schema, options=OPTIONS) as db:
        assert await raise_signal(db, hot, "k") == 0
        assert await raise_signal(db, hot, "k", "a")
        assert not cells(db, TRACE)
        assert not notified(db)


@pytest.mark.parametrize("existing", [True, False])
async def test_a_new_observer_runs_for_what_is_raised_from_then_on(hot: Hot, *, existing: bool) -> None:  # N10
    local = memory()
    async with client(local, hot.schema) as db:
        await raise_signal(db, hot, "before")
    later = Hot()

    @later.schema.observe(later.grown, id="late", backfill=existing)
    async def late(txn: Txn, change: Change) -> None:
        later.seen.append(change)

    async with client(local, later.schema) as db, db.worker():
        assert inside(db).catalogue.observers["late"].ready
        await raise_signal(db, later, "after")
        await settle(db)
    assert [change.key for change in later.seen] == ["after"]


@pytest.mark.parametrize("doc", [None, "a"])
async def test_who_does_not_know_a_new_observer_signals_again(hot: Hot, doc: str | None) -> None:  # N10
    local = memory()
    later = Hot()
    later.observe("late")
    async with client(local, hot.schema) as db:
        txn = await db.begin()
        txn.signal(hot.grown, "k")
        if doc is not None:
            txn.set(hot.body, doc, "words")
        async with client(local, later.schema, beside=db):
            pass
        with pytest.raises(perco.errors.CatalogueChanged):
            await txn.commit()
        assert txn.outcome == "aborted"
        await until(lambda: not locks(db))  # it lets go of them behind itself
        assert await raise_signal(db, hot, "k", doc)
        await until(lambda: not inside(db).fates.observed)
        assert await db.waiting() == {"late": 1}


async def test_a_signal_and_a_column_are_not_taken_for_each_other(hot: Hot) -> None:
    local = memory()
    async with client(local, hot.schema):
        pass
    other = perco.Table("clusters", key=perco.TEXT, splits=["m"])
    other.column("grown", perco.TEXT)
    with pytest.raises(
        perco.errors.SchemaMismatch, match="a signal in the store, and text in group 'data' in the schema"
    ):
        async with client(local, perco.Schema(other)):
            pass


async def test_a_store_knows_its_signals(hot: Hot, tmp_path: Any) -> None:
    """Read without a schema: from the catalogue."""
    from perco.schema.catalogue import schema_of

    async with client(memory(), hot.schema) as db:
        tables = schema_of(inside(db).catalogue).tables
        assert list(tables["clusters"].signals) == ["grown"]
        assert list(tables["clusters"].columns) == ["size"]
        bound = inside(db).known.bind_signal(hot.grown)
        assert inside(db).catalogue.column_name("clusters", bound.column) == "grown"
        assert inside(db).catalogue.signals("clusters") == {bound.column}


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize("wrong", [[], None, "grown", 7, {}])
async def test_what_is_no_signal_is_refused(hot: Hot, wrong: Any) -> None:
    async with perco.open("memory:", hot.schema, options=OPTIONS) as db, db.transaction() as txn:
        with pytest.raises(perco.UsageError, match=r"expected a signal, as made by Table\.signal"):
            txn.signal(wrong, "k")


async def test_a_signal_has_no_value(hot: Hot) -> None:
    hot.observe()
    async with perco.open("memory:", hot.schema, options=OPTIONS) as db, db.transaction() as txn:
        signal: Any = hot.grown
        txn.signal(signal, "k")
        for wrong in (lambda: txn.set(signal, "k", 1), lambda: txn.delete(signal, "k")):
            with pytest.raises(perco.UsageError, match=r"clusters\.grown is a signal.*txn\.signal\(grown, key\)"):
                wrong()
        with pytest.raises(perco.UsageError, match="is a signal"):
            await txn.get(signal, "k")
        with pytest.raises(perco.UsageError, match=r"a column is written with txn\.set"):
            txn.signal(hot.size, "k")  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError, perco.UsageError)):
            txn.signal(hot.grown, 7)  # type: ignore[arg-type]
        with pytest.raises(perco.errors.TooLarge):
            txn.signal(hot.grown, "k" * 500)
        assert not txn._writes


async def test_a_signal_of_another_schema_is_refused(hot: Hot) -> None:
    async with perco.open("memory:", hot.schema, options=OPTIONS) as db:
        async with db.transaction() as txn:
            with pytest.raises(perco.errors.SchemaMismatch, match="not in the schema"):
                txn.signal(Hot().grown, "k")
            with pytest.raises(perco.errors.SchemaMismatch, match="declared after the store was opened"):
                txn.signal(hot.clusters.signal("late"), "k")
        with pytest.raises(perco.errors.TransactionClosed):
            txn.signal(hot.grown, "k")


async def test_signals_count_among_the_cells_of_a_transaction(hot: Hot) -> None:
    hot.observe()
    options = perco.Options(seed=1, transaction=perco.options.TransactionOptions(cells_max=3))
    async with perco.open("memory:", hot.schema, options=options) as db, db.transaction() as txn:
        txn.set(hot.body, "a", "words")
        for key in ("a", "b", "a"):
            txn.signal(hot.grown, key)
        with pytest.raises(perco.errors.TooLarge, match="cells of one transaction"):
            txn.signal(hot.grown, "c")


def test_names_and_declarations(hot: Hot) -> None:
    with pytest.raises(perco.UsageError, match="two columns named 'size'"):
        hot.clusters.signal("size")
    with pytest.raises(perco.UsageError, match="two columns named 'grown'"):
        hot.clusters.column("grown", perco.TEXT)
    with pytest.raises(perco.UsageError, match="signal's name"):
        hot.clusters.signal("")
    with pytest.raises(perco.UsageError, match="no signal of table 'clusters' named 'shrunk'; there are: 'grown'"):
        hot.clusters.signals["shrunk"]
    with pytest.raises(perco.UsageError, match="takes a column or a signal"):
        hot.schema.observe([], id="x")  # type: ignore[call-overload]
    assert repr(hot.grown) == "clusters.grown"


async def test_a_pending_entry_is_a_lock_that_keeps_nobody_out(hot: Hot) -> None:  # N5
    hot.observe()
    local = memory()
    store = HoldingStore(local.store, lambda mutation: kind_of(mutation) == "commit")
    async with client(local, hot.schema, store=store) as db, trio.open_nursery() as nursery:
        nursery.start_soon(raise_signal, db, hot, "k")
        await store.held.wait()
        entries = {
            is_bare(column): unpack_lock(value) for _, _, column, _, value in tablets_cells(local.store, PENDING)
        }
        assert entries[False].primary == entries[True].primary
        assert entries[False].observers == (inside(db).catalogue.observers["count"].number,)
        async with client(local, hot.schema, beside=db) as other:
            assert await raise_signal(other, hot, "k")
        store.let_go()


async def test_a_run_carries_the_oldest_cause_of_all_the_signals_that_it_follows(
    hot: Hot, monkeypatch: pytest.MonkeyPatch
) -> None:  # N7, N9
    """Also of those that it leaves for another run, which finds nothing left to do."""
    for module in (claim, working):
        monkeypatch.setattr(module, "COVERS_MAX", 8)
    gate, followed = trio.Event(), list[int]()

    @hot.schema.observe(hot.grown, id="first")
    async def first(txn: Txn, change: perco.Change[str, None]) -> None:
        if await txn.get(hot.size, change.key) is None:
            txn.set(hot.size, change.key, 1)

    @hot.schema.observe(hot.size, id="second")
    async def second(txn: Txn, change: perco.Change[str, int]) -> None:
        followed.append(change.cause)
        await gate.wait()

    async with perco.open("memory:", hot.schema, options=OPTIONS) as db:
        raised = [await db.run(raise_it, hot) for _ in range(20)]
        async with db.worker():
            with pytest.raises(perco.NotIdle):
                await db.wait_for(raised[0], timeout=2.0)
            assert followed == [raised[0]]
            gate.set()
            await db.wait_for(raised[0], timeout=LONG_S)


async def raise_it(txn: Txn, hot: Hot) -> int:
    txn.signal(hot.grown, "c")
    return await txn.commit()
