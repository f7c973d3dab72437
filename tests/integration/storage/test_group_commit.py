"""How mutations of many tasks gather in one write transaction of LMDB, and how one gets out of it again."""

from __future__ import annotations

import threading

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from perco.storage import APPLIED, PRESENT, BatchOptions, Failed, LmdbOptions, LocalRowStore, Mutation, Refused
from tests.component.storage.stores import (
    GROUPS,
    TABLE,
    lmdb_engine,
    lmdb_tablet,
    newest,
    open_lmdb,
    put,
    put_all,
    value_of,
)
from tests.integration.storage.gate import GatedEngine, held_writer, open_gated

# ------------------------------------------------------------ batches


async def test_mutations_of_many_tasks_end_in_few_batches(tmp_path):
    async with open_gated(tmp_path) as (store, tablet, engine):
        async with held_writer(store, engine, put(b"first")) as nursery:
            for i in range(500):
                nursery.start_soon(put_all, store, put(b"%d" % i))
            await wait_all_tasks_blocked()
            assert tablet.statistics().queued == 500
        found = tablet.statistics()
        assert (found.batches, found.mutations, found.queued) == (2, 501, 0)
        assert tablet.entries("data") == 501


async def test_tasks_that_begin_together_share_the_first_batch(tmp_path):
    async with open_lmdb(tmp_path) as (store, tablet):
        async with trio.open_nursery() as nursery:
            for i in range(100):
                nursery.start_soon(put_all, store, put(b"%d" % i))
        assert tablet.statistics().batches == 1


class Clocks:
    """What a tablet measures: the loop's CPU seconds, and how long the writer had a batch."""

    def __init__(self, loop_s: float, disk_s: float) -> None:
        self._loop_s, self._disk_s = loop_s, disk_s
        self._busy = 0.0
        self._loop = threading.get_ident()

    def thread_time(self) -> float:
        self._busy += self._loop_s
        return self._busy

    def perf_counter(self) -> float:
        return 0.0 if threading.get_ident() == self._loop else self._disk_s


@pytest.mark.parametrize(("loop_s", "disk_s"), [(1.0, 0.1), (0.1, 1.0)])
async def test_a_batch_closes_half_full_where_the_loop_is_slower_than_the_disk(tmp_path, monkeypatch, loop_s, disk_s):
    """Half of them, or what there is, goes to the disk while other tasks are still at work; on a slow disk all go."""

    async def three(i):
        for _ in range(3):
            await put_all(store, put(b"%d" % i))

    async with open_gated(tmp_path) as (store, _, engine):
        monkeypatch.setattr("perco.storage.lmdb_tablet.time", Clocks(loop_s, disk_s))
        async with trio.open_nursery() as nursery:
            for i in range(64):
                nursery.start_soon(three, i)
        sizes = [len(batch) for batch in engine.batches]
        assert sizes[0] == 64
        assert sizes[1] <= 32 if loop_s > disk_s else sizes[1:] == [64, 64]


@pytest.mark.parametrize("mutations_max", [1, 10])
async def test_a_batch_has_at_most_so_many_mutations(tmp_path, mutations_max):
    async with open_gated(tmp_path, BatchOptions(mutations_max=mutations_max)) as (store, _, engine):
        async with held_writer(store, engine, put(b"first")) as nursery:
            for i in range(100):
                nursery.start_soon(put_all, store, put(b"%d" % i))
            await wait_all_tasks_blocked()
        assert [len(batch) for batch in engine.batches] == [1] + [mutations_max] * (100 // mutations_max)


async def test_a_batch_has_at_most_so_many_bytes_unless_one_mutation_has_more(tmp_path):
    small, large = b"v" * (1 << 20), b"v" * (5 << 20)
    async with open_gated(tmp_path, BatchOptions(bytes_max=3 << 20)) as (store, _, engine):
        async with held_writer(store, engine, put(b"first")) as nursery:
            nursery.start_soon(
                put_all, store, put(b"1", small), put(b"2", large), *[put(b"%d" % i, small) for i in (3, 4, 5)]
            )
            await wait_all_tasks_blocked()
        sizes = [[len(mutation.rows[0][2][0][3]) for mutation in batch] for batch in engine.batches]
        assert sizes == [[0], [1 << 20], [5 << 20], [1 << 20] * 2, [1 << 20]]


async def test_mutations_are_made_in_the_order_they_came(tmp_path):
    async with open_gated(tmp_path, BatchOptions(mutations_max=3)) as (store, _, engine):
        async with held_writer(store, engine, put(b"a", b"first")) as nursery:
            for i in range(10):
                nursery.start_soon(put_all, store, put(b"a", b"%d" % i))
                await wait_all_tasks_blocked()
        values = [mutation.rows[0][2][0][3] for batch in engine.batches for mutation in batch]
        assert values == [b"first"] + [b"%d" % i for i in range(10)]
        assert await value_of(store, b"a") == b"9"


async def test_write_transactions_begin_and_end_on_one_thread_that_is_not_the_loops(tmp_path):  # S5
    async with open_gated(tmp_path, BatchOptions(mutations_max=1)) as (store, tablet, engine):
        for i in range(10):
            await put_all(store, put(b"%d" % i), put(b"x%d" % i))
        await tablet.add_groups(["data:late"])
        await put_all(store, put(b"last"))
        assert len(set(engine.threads)) == 1
        assert threading.get_ident() not in engine.threads


async def test_many_threads_that_are_first_start_one_writer(tmp_path):  # S5
    async with open_gated(tmp_path) as (_, tablet, engine):
        barrier, made = threading.Barrier(8), threading.Semaphore(0)

        def submit(i):
            barrier.wait()
            tablet.submit_from_thread([put(b"%d" % i)], lambda _: made.release())

        threads = [threading.Thread(target=submit, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
            made.acquire()
        assert tablet.entries("data") == 8
        assert len(set(engine.threads)) == 1


async def test_a_thread_gets_its_mutations_through_while_the_loop_is_held(tmp_path):  # L1
    async with open_lmdb(tmp_path) as (store, tablet):
        done = threading.Event()
        verdicts = []

        def receive(found):
            verdicts.extend(found)
            done.set()

        tablet.submit_from_thread(
            [put(b"a", b"x"), Mutation(TABLE, [(b"a", [(PRESENT, "lock", 1, 1, 1)], [])])], receive
        )
        done.wait()  # the loop does not turn until then
        assert verdicts == [APPLIED, Refused(0, 0)]
        assert await value_of(store, b"a") == b"x"


# ------------------------------------------------------------ neighbours


async def test_one_that_raises_or_is_refused_does_not_hurt_its_neighbours(tmp_path):  # S4
    odd = [
        put(b"r" * 600),  # LMDB takes no key of that length
        Mutation(TABLE, [(b"b", [], [("data", 1, 1, b"half"), ("no such group", 1, 1, b"")])]),
        Mutation(TABLE, [(b"c", [], [("data", 1, 1, b"half"), ("data", 1, -1, b"")])]),
        Mutation(TABLE, [(b"d", [], [("data", 1, 1, b"half"), ("data", 1, 2, "text")])]),
    ]
    refused = Mutation(TABLE, [(b"e", [(PRESENT, "data", 1, 1, 1)], [("data", 1, 1, b"")])])
    async with open_gated(tmp_path) as (store, tablet, engine):
        async with held_writer(store, engine, put(b"first")) as nursery:
            for i in range(50):
                nursery.start_soon(put_all, store, put(b"n%d" % i))
            found = []

            async def misbehave(mutation):
                found.extend(await store.apply([mutation]))

            for mutation in [*odd, refused]:
                nursery.start_soon(misbehave, mutation)
            await wait_all_tasks_blocked()
        assert len(engine.batches[1]) == 55  # they were neighbours indeed
        assert [type(verdict) for verdict in found].count(Failed) == len(odd)
        assert found.count(Refused(0, 0)) == 1
        assert tablet.entries("data") == 51
        assert [await value_of(store, row) for row in (b"b", b"c", b"d", b"e")] == [None] * 4
        found = tablet.statistics()
        assert (found.mutations, found.refused, found.failed) == (56, 1, 4)


async def test_a_writer_that_meets_what_it_did_not_foresee_answers_and_goes_on(tmp_path):  # S4
    class Surprising(GatedEngine):
        surprised = False

        def make_room(self, need_bytes, *, reserve):
            if not self.surprised:
                self.surprised = True
                raise RuntimeError("surprise")
            return super().make_room(need_bytes, reserve=reserve)

    async with open_lmdb(tmp_path, engine=Surprising) as (store, _):
        [verdict] = await store.apply([put(b"a")])
        assert "surprise" in repr(verdict)
        await put_all(store, put(b"b", b"x"))
        assert await value_of(store, b"b") == b"x"


# ------------------------------------------------------------ cancellation


async def test_who_is_cancelled_while_queued_was_never_sent(tmp_path):  # T10
    async with open_gated(tmp_path) as (store, tablet, engine):
        async with held_writer(store, engine, put(b"first")) as nursery:
            with trio.CancelScope() as scope:
                nursery.start_soon(put_all, store, put(b"neighbour"))
                async with trio.open_nursery() as inner:
                    inner.start_soon(store.apply, [put(b"a"), put(b"b")])
                    await wait_all_tasks_blocked()
                    scope.cancel()
            assert scope.cancelled_caught
        assert [await value_of(store, row) for row in (b"a", b"b", b"neighbour")] == [None, None, b""]
        assert tablet.statistics().mutations == 2
        assert sum(map(len, engine.batches)) == 2


async def test_who_is_cancelled_once_taken_waits_and_sees_the_verdict(tmp_path):  # T10
    seen = []

    async def write(scope):
        with scope:
            seen.extend(await store.apply([put(b"a", b"x")]))
            seen.append("went on")
            await trio.lowlevel.checkpoint()
            seen.append("too far")

    async with open_gated(tmp_path) as (store, _, engine):
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            with engine.held():
                nursery.start_soon(write, scope)
                await engine.wait_for(begun=1)
                scope.cancel()
                await wait_all_tasks_blocked()
                assert seen == []
        assert seen == [APPLIED, "went on"]
        assert scope.cancelled_caught
        assert await value_of(store, b"a") == b"x"


async def test_of_a_call_that_is_partly_taken_everything_is_sent(tmp_path):  # T10
    verdicts = []

    async def write(scope):
        with scope:
            verdicts.extend(await store.apply([put(b"a"), put(b"b"), put(b"c")]))

    async with open_gated(tmp_path, BatchOptions(mutations_max=1)) as (store, _, engine):
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            with engine.held():
                nursery.start_soon(write, scope)
                await engine.wait_for(begun=1)
                assert len(engine.batches) == 1
                scope.cancel()
        assert verdicts == [APPLIED] * 3
        assert [await value_of(store, row) for row in (b"a", b"b", b"c")] == [b""] * 3


async def test_of_a_call_over_two_tablets_one_of_which_has_taken_its_part_everything_is_sent(tmp_path):  # T10
    store, verdicts = LocalRowStore(), []
    engines = [lmdb_engine(tmp_path / name, engine=GatedEngine) for name in "ab"]
    store.add_table(TABLE, [lmdb_tablet(store, engines[0]), lmdb_tablet(store, engines[1], start=b"b")])

    async def write(scope):
        with scope:
            verdicts.extend(await store.apply([put(b"a"), put(b"b")]))

    scope = trio.CancelScope()
    async with held_writer(store, engines[1], put(b"bb")) as nursery:
        nursery.start_soon(write, scope)
        await engines[0].wait_for(made=1)
        assert await value_of(store, b"a") == b""  # made, while b has to wait
        scope.cancel()
    assert verdicts == [APPLIED, APPLIED]
    assert await value_of(store, b"b") == b""
    await store.aclose()


# ------------------------------------------------------------ going on without waking the task


async def test_a_call_may_send_more_once_its_verdicts_are_in(tmp_path):
    steps = []

    def then(verdicts):
        steps.append(list(verdicts))
        return [put(b"c"), put(b"d")] if len(steps) == 1 else None

    refused = Mutation(TABLE, [(b"b", [(PRESENT, "data", 1, 1, 1)], [])])
    async with open_lmdb(tmp_path) as (store, tablet):
        assert await store.apply_then([put(b"a"), refused], then) == [APPLIED, APPLIED]
        assert steps == [[APPLIED, Refused(0, 0)], [APPLIED, APPLIED]]
        assert tablet.statistics().batches == 2


async def test_who_is_cancelled_once_taken_sends_no_more(tmp_path):  # T10
    verdicts, steps = [], []

    async def write(scope):
        with scope:
            verdicts.extend(await store.apply_then([put(b"a")], steps.append))

    async with open_gated(tmp_path) as (store, tablet, engine):
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            with engine.held():
                nursery.start_soon(write, scope)
                await engine.wait_for(begun=1)
                scope.cancel()
                await wait_all_tasks_blocked()
        assert (verdicts, steps) == ([APPLIED], [])
        assert tablet.statistics().mutations == 1


# ------------------------------------------------------------ life of a tablet


async def test_closing_commits_what_is_queued_and_answers_it(tmp_path):
    verdicts = []

    async def write(i):
        verdicts.extend(await store.apply([put(b"%d" % i)]))

    async with trio.open_nursery() as nursery, open_gated(tmp_path) as (store, _, engine):
        with engine.held():
            nursery.start_soon(store.apply, [put(b"first")])
            await engine.wait_for(begun=1)
            for i in range(20):
                nursery.start_soon(write, i)
            await wait_all_tasks_blocked()
            assert verdicts == []
    assert verdicts == [APPLIED] * 20
    async with open_lmdb(tmp_path) as (store, tablet):
        assert tablet.entries("data") == 21


async def test_a_tablet_without_writes_has_no_thread_and_closes_twice(tmp_path):
    before = threading.active_count()
    async with open_lmdb(tmp_path) as (store, tablet):
        assert await value_of(store, b"a") is None
        assert threading.active_count() == before
        await tablet.aclose()


async def test_a_new_group_is_there_for_the_next_batch_and_after_reopening(tmp_path):
    late = Mutation(TABLE, [(b"a", [], [("data:late", 1, 1, b"x")])])
    request = (TABLE, b"a", [("data:late", 1, 0, 9, 1)])
    async with open_lmdb(tmp_path) as (store, tablet):
        [verdict] = await store.apply([late])
        assert isinstance(verdict, Failed)
        await tablet.add_groups(["data:late", "data"])
        assert await store.apply([late]) == [APPLIED]
        assert await store.read([request]) == [[[(1, b"x")]]]
    engine = lmdb_engine(tmp_path, LmdbOptions(sync=False), groups=[*GROUPS, "data:late"])
    assert engine.read(*request[1:]) == [[(1, b"x")]]
    engine.close()


def test_every_commit_is_synced_unless_one_asks_for_less(tmp_path):  # S2
    for options, synced in ((LmdbOptions(), True), (LmdbOptions(sync=False), False)):
        engine = lmdb_engine(tmp_path, options)
        flags = engine._env.flags()
        assert (flags["sync"], flags["metasync"]) == (synced, synced)
        assert not flags["writemap"]
        engine.close()


async def test_an_acknowledged_batch_is_there_after_reopening(tmp_path):  # S2
    async with open_lmdb(tmp_path, LmdbOptions()) as (store, _):
        await put_all(store, *[put(b"%d" % i, b"%d" % i) for i in range(100)])
    async with open_lmdb(tmp_path) as (store, _):
        assert await store.read([newest(b"%d" % i) for i in range(100)]) == [[[(1, b"%d" % i)]] for i in range(100)]
