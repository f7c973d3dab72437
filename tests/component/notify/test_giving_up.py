"""A change whose runs fail too often is given up: it moves to the failed list, once, and leaves it by one way only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio

import perco
from perco.check.check import CheckOptions, check
from perco.database.database import Database
from perco.database.inside import inside
from perco.notify import working
from perco.protocol import claim, failed as failing
from perco.storage import FAILED_LIST, NOTIFY, Mutation, NoReply, Refused, Verdict
from tests.component.notify.kit import (
    OPTIONS,
    ByHand,
    HoldingStore,
    Web,
    client,
    get,
    memory,
    notified,
    put,
    settle,
    tablets_cells,
    until,
)
from tests.support.places import local_of

Txn = perco.Transaction
Change = perco.Change[Any, Any]
FEW = perco.WorkerOptions(attempts=3, breaker=perco.options.BreakerOptions(failures=0))


class Picky:
    """An observer that fails while `bad` has the key, and writes what it saw otherwise."""

    def __init__(self, web: Web, *, id: str = "picky") -> None:
        self.bad: set[str] = set()
        self.attempts: list[int] = []
        self.error: Exception = ZeroDivisionError("no such thing")
        self.web = web

        @web.observe(web.body, id=id)
        async def observe(txn: Txn, change: Change) -> None:
            self.attempts.append(change.attempt)
            if change.key in self.bad:
                raise type(self.error)(*self.error.args)
            txn.set(web.note, change.key, change.value or "deleted")
            await web.add(txn, f"runs/{change.key}")


@pytest.fixture
def picky(web: Web) -> Picky:
    return Picky(web)


def on_the_list(db: Database) -> list[tuple[bytes, int]]:
    return [(row, ts) for _, row, _, ts, _ in tablets_cells(local_of(db).store, FAILED_LIST)]


async def is_whole(db: Database) -> None:
    result = await check(inside(db).driver.store, options=CheckOptions(pause_s=0.0))
    assert result.findings == ()
    assert result.failed == len(on_the_list(db)) == await db.failed_count()


async def give_up(db: Database, picky: Picky, *keys: str) -> list[int]:
    """Write these, and let them fail; returns when they were committed."""
    picky.bad |= set(keys)
    stamps = [await put(db, picky.web.body, key, "bad") for key in keys]
    async with db.worker(options=FEW):
        await settle(db)
    return stamps


async def test_after_so_many_attempts_it_is_on_the_list_and_nobody_waits_for_it(web: Web, picky: Picky) -> None:  # N6
    picky.bad = {"a"}
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=FEW) as worker:
        commit_ts = await put(db, web.body, "a", "hello")
        assert await db.wait_idle(timeout=1000) == 1
        assert await db.is_idle()
        await db.wait_for(commit_ts, timeout=1000)
        assert picky.attempts == [1, 2, 3]
        assert notified(db) == []
        assert on_the_list(db) == [(b"a", commit_ts)]
        [failed] = await db.failed()
        assert (failed.observer, failed.table, failed.column, failed.key) == ("picky", "docs", "body", "a")
        assert (failed.commit_ts, failed.attempts, failed.cause, failed.chain) == (commit_ts, 3, commit_ts, ())
        assert failed.error == "ZeroDivisionError: no such thing"
        assert "in observe\n" in failed.traceback
        assert abs(failed.wall - OPTIONS.wall()) < 3600
        counted = worker.statistics()["picky"]
        assert (counted.failures, counted.given_up, counted.commits) == (3, 1, 0)
        await is_whole(db)


async def test_attempts_are_counted_across_restarts(web: Web, picky: Picky) -> None:  # N6
    picky.bad = {"a"}
    one = perco.WorkerOptions(attempts=3, backoff=perco.options.BackoffOptions(first_s=1e6, max_s=1e6))
    async with client(memory(), web.schema) as db:
        await put(db, web.body, "a", "hello")
        for runs in (1, 2):
            async with db.worker(options=one):
                await until(lambda: len(picky.attempts) == runs)  # noqa: B023
                await until(lambda: not inside(db).fates.live())
                await trio.sleep(1.0)
            assert on_the_list(db) == []
        async with client(local_of(db), web.schema) as later, later.worker(options=one):
            assert await later.wait_idle(timeout=1000) == 1
        assert picky.attempts == [1, 2, 3]


async def test_no_number_of_attempts_is_a_reason_to_give_up_if_none_is_asked_for(web: Web, picky: Picky) -> None:
    picky.bad = {"a"}
    for_ever = perco.WorkerOptions(attempts=0, backoff=perco.options.BackoffOptions(first_s=0.01, max_s=0.01))
    async with perco.open("memory:", web.schema, options=OPTIONS) as db, db.worker(options=for_ever):
        await put(db, web.body, "a", "hello")
        await until(lambda: len(picky.attempts) > 100)
        assert await db.failed_count() == 0
        picky.bad.clear()
        assert await db.wait_idle(timeout=1000) == 0


async def test_a_newer_change_runs_it_again_and_takes_it_off_the_list(web: Web, picky: Picky) -> None:  # N6
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await give_up(db, picky, "a", "z")
        picky.bad = {"z"}
        async with db.worker(options=FEW):
            await put(db, web.body, "a", "good")
            assert await db.wait_idle(timeout=1000) == 1
        assert [failed.key for failed in await db.failed()] == ["z"]
        assert await get(db, web.note, "a") == "good"
        await is_whole(db)


@pytest.mark.parametrize("one_step", [True, False])
async def test_what_fails_again_takes_over_its_place(web: Web, picky: Picky, one_step: bool) -> None:  # N6
    async with client(memory(), web.schema, one_step=one_step) as db:
        [old] = await give_up(db, picky, "a")
        [new] = await give_up(db, picky, "a")
        assert on_the_list(db) == [(b"a", new)]
        [failed] = await db.failed()
        assert failed.cause == old, "of both the older"
        assert picky.attempts == [1, 2, 3, 1, 2, 3]
        await is_whole(db)
        picky.bad.clear()
        assert await db.replay_failed() == 1
        assert notified(db) == [(b"a", new)]
        async with db.worker():
            assert await db.wait_idle(timeout=1000) == 0
        await is_whole(db)


async def test_several_changes_are_given_up_as_one(web: Web, picky: Picky) -> None:  # N4, N6
    picky.bad = {"a"}
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        stamps = [await put(db, web.body, "a", str(n)) for n in range(5)]
        async with db.worker(options=FEW):
            assert await db.wait_idle(timeout=1000) == 1
        assert on_the_list(db) == [(b"a", stamps[-1])]
        [failed] = await db.failed()
        assert (failed.commit_ts, failed.cause) == (stamps[-1], stamps[0])
        await is_whole(db)


async def test_more_changes_than_one_run_sees_are_given_up_all(  # N4, N6
    web: Web, picky: Picky, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is older than what is on the list by then."""
    from perco.protocol import claim

    monkeypatch.setattr(claim, "COVERS_MAX", 4)
    monkeypatch.setattr(working, "COVERS_MAX", 4)
    picky.bad = {"a"}
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        stamps = [await put(db, web.body, "a", str(n)) for n in range(10)]
        async with db.worker(options=FEW):
            assert await db.wait_idle(timeout=1000) == 1
        assert on_the_list(db) == [(b"a", stamps[-1])]
        assert (await db.failed())[0].cause == stamps[0]
        await is_whole(db)
        picky.bad.clear()
        await db.replay_failed()
        async with db.worker(options=FEW):
            assert await db.wait_idle(timeout=1000) == 0
        assert await get(db, web.note, "a") == "9"
        await is_whole(db)


async def test_a_deleted_cell_keeps_its_marker_while_its_change_is_on_the_list(web: Web, picky: Picky) -> None:  # G3
    now = 1_700_000_000.0
    options = perco.Options(
        seed=1, wall=lambda: now + trio.current_time(), vacuum=perco.options.VacuumOptions(on=False)
    )
    web.schema.keep = perco.Keep(seconds=0)
    async with perco.open("memory:", web.schema, options=options) as db:
        await put(db, web.body, "a", "hello")
        async with db.worker(options=FEW):
            await settle(db)
        picky.bad = {"a"}
        await put(db, web.body, "a", None)
        async with db.worker(options=FEW):
            assert await db.wait_idle(timeout=1000) == 1
        await trio.sleep(5.0)
        result = await db.vacuum()
        assert result.blocked == 1
        await is_whole(db)
        picky.bad.clear()
        assert await db.replay_failed("picky") == 1
        async with db.worker(options=FEW):
            assert await db.wait_idle(timeout=1000) == 0
        assert await get(db, web.note, "a") == "deleted"
        await trio.sleep(5.0)
        assert (await db.vacuum()).blocked == 0
        await is_whole(db)


# ---------------------------------------------------------------- replay, drop


async def test_replayed_it_waits_at_its_old_timestamp_and_begins_to_count_anew(web: Web, picky: Picky) -> None:  # N6
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        [at, _, _] = await give_up(db, picky, "a", "b", "z")
        picky.attempts.clear()
        assert await db.replay_failed("picky", key="a") == 1
        assert notified(db) == [(b"a", at)]
        assert await db.failed_count() == 2
        await is_whole(db)
        picky.bad = {"b", "z"}
        async with db.worker(options=FEW):
            assert await db.wait_idle(timeout=1000) == 2
            assert picky.attempts == [1]
            assert await db.replay_failed("picky") == 2
            assert await db.wait_idle(timeout=1000) == 2, "they fail again"
            picky.bad.clear()
            assert await db.replay_failed() == 2, "at once, whatever the back-off was"
            assert await db.wait_idle(timeout=1000) == 0
        assert [await get(db, web.count, f"runs/{key}") for key in "abz"] == [1, 1, 1]
        await is_whole(db)


async def test_dropped_it_is_acknowledged_without_a_run(web: Web, picky: Picky) -> None:  # N3, N6
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await give_up(db, picky, "a", "b", "z")
        runs = len(picky.attempts)
        assert await db.drop_failed("picky", key="b") == 1
        assert await db.drop_failed("picky", key="b") == 0
        await is_whole(db)
        assert await db.drop_failed("picky") == 2
        picky.bad.clear()
        async with db.worker(options=FEW):
            assert await db.wait_idle(timeout=1000) == 0
            assert len(picky.attempts) == runs
            await put(db, web.body, "a", "good")
            await settle(db)
        assert await get(db, web.note, "a") == "good"
        assert await get(db, web.note, "b") is None
        await is_whole(db)


async def test_a_drop_takes_nothing_from_a_newer_change(web: Web, picky: Picky) -> None:  # N3
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await give_up(db, picky, "a")
        new = await put(db, web.body, "a", "newer")
        assert await db.drop_failed("picky") == 1
        assert notified(db) == [(b"a", new)]
        await is_whole(db)
        picky.bad.clear()
        async with db.worker(options=FEW):
            assert await db.wait_idle(timeout=1000) == 0
        assert await get(db, web.note, "a") == "newer"
        await is_whole(db)


async def test_a_drop_takes_what_is_older_along(web: Web, picky: Picky) -> None:  # N3
    """A change of before the failed one may be notified late, where a run sees no more than so many at once."""
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        [at] = await give_up(db, picky, "a")
        [number] = inside(db).known.bind(web.body).acks
        older = (NOTIFY, number, at - 1, failing.pack_cause(at - 1, 0))
        await inside(db).driver.store.apply([Mutation("docs", ((b"a", (), (older,)),))])
        assert await db.drop_failed("picky") == 1
        assert notified(db) == []
        assert await db.is_idle()
        await is_whole(db)


@pytest.mark.parametrize("step", ["replay", "drop"])
async def test_the_list_is_left_while_a_run_is_about_to_commit(web: Web, picky: Picky, step: str) -> None:  # N6
    """The ack of a newer change's run is locked: a command that comes then waits for it, and finds that nothing is
    left."""
    async with client(memory(), web.schema) as db:
        await give_up(db, picky, "a")
        picky.bad.clear()

        def is_ack(mutation: Mutation) -> bool:
            return any(w[0] == "write" and w[1] & 0xFFFF for _, _, writes in mutation.rows for w in writes)

        store = HoldingStore(local_of(db).store, is_ack)
        async with client(local_of(db), web.schema, store=store, beside=db) as runs, runs.worker(options=FEW):
            await put(db, web.body, "a", "newer")
            inside(runs).driver.notified()
            await store.held.wait()
            async with trio.open_nursery() as nursery:
                done: list[int] = []

                async def leave() -> None:
                    act = runs.replay_failed if step == "replay" else runs.drop_failed
                    done.append(await act("picky"))

                nursery.start_soon(leave)
                await trio.sleep(1.0)
                assert done == []
                store.let_go()
            assert done == [0]
            await settle(runs)
        assert on_the_list(db) == []
        assert await get(db, web.count, "runs/a") == 1
        await is_whole(db)


class TwinStore(HoldingStore):
    """Loses replies to what moves a change to the list, or from it."""

    def __init__(self, inner: Any, *, made: bool) -> None:
        super().__init__(inner, lambda _: False)
        self.lost, self._made = 0, made

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        [mutation, *_] = mutations
        if not self.lost and any(w[0] == FAILED_LIST for _, _, writes in mutation.rows for w in writes):
            self.lost += 1
            if self._made:
                await self._inner.apply(mutations)
            return [NoReply("lost")] * len(mutations)
        return await self._inner.apply(mutations)


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("step", ["give up", "replay", "drop"])
async def test_a_lost_reply_neither_loses_nor_doubles_it(web: Web, picky: Picky, step: str, made: bool) -> None:  # T4
    async with client(memory(), web.schema) as first:
        if step != "give up":
            await give_up(first, picky, "a")
        store = TwinStore(local_of(first).store, made=made)
        async with client(local_of(first), web.schema, store=store) as db:
            if step == "give up":
                await give_up(db, picky, "a")
                assert await db.failed_count() == 1
            elif step == "replay":
                assert await db.replay_failed() == 1
                assert len(notified(db)) == 1
            else:
                await put(db, web.body, "a", "newer")
                assert await db.drop_failed("picky") == 1
                assert len(notified(db)) == 1
            assert store.lost == 1
            await is_whole(db)


@pytest.mark.parametrize("one_step", [True, False])
async def test_a_run_commits_nothing_for_what_was_given_up_meanwhile(web: Web, one_step: bool) -> None:  # N6
    """Two workers have the same change: one gives it up while the other's run is under way, which then must not be."""
    gates = [trio.Event(), trio.Event()]
    runs = 0

    @web.observe(web.body, id="slow")
    async def slow(txn: Txn, change: Change) -> None:
        nonlocal runs
        runs += 1
        mine = runs
        if mine <= 2:
            await gates[mine - 1].wait()
        if mine == 2:
            raise ZeroDivisionError
        txn.set(web.note, change.key, "seen")
        if not one_step:
            await web.add(txn, "z")

    once = perco.WorkerOptions(attempts=1)
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(client(memory(), web.schema, one_step=one_step))
        two = one if one_step else await stack.enter_async_context(client(local_of(one), web.schema, beside=one))
        await put(one, web.body, "a", "hello")
        first, second = ByHand(one, once), ByHand(two, once)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.run, web.body, "a")
            await until(lambda: runs == 1)
            nursery.start_soon(second.run, web.body, "a")
            await until(lambda: runs == 2)
            gates[1].set()
            await until(lambda: on_the_list(one))
            gates[0].set()
        await settle(one)
        assert runs == 2
        assert (await get(one, web.note, "a"), await get(one, web.count, "z")) == (None, None)
        assert (first.counted("slow").conflicts, second.counted("slow").given_up) == (1, 1)
        assert await one.failed_count() == 1
        await is_whole(one)


async def test_who_gives_up_what_another_run_has_acknowledged_is_refused(web: Web) -> None:  # N6
    gate = trio.Event()
    runs = 0

    @web.observe(web.body, id="slow")
    async def slow(txn: Txn, change: Change) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            await gate.wait()
            raise ZeroDivisionError
        await web.add(txn, "runs")

    once = perco.WorkerOptions(attempts=1)
    async with client(memory(), web.schema) as one, client(local_of(one), web.schema, beside=one) as two:
        await put(one, web.body, "a", "hello")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ByHand(one, once).run, web.body, "a")
            await until(lambda: runs == 1)
            await ByHand(two, once).run(web.body, "a")
            gate.set()
        assert await one.wait_idle(timeout=1000) == 0
        assert await get(one, web.count, "runs") == 1
        await is_whole(one)


def test_a_move_is_refused_when_anything_is_no_longer_as_it_was_seen() -> None:  # N6
    from perco.storage.cells import LOCK, WRITE
    from perco.storage.engine import MemoryEngine
    from perco.storage.keys import cell_key, escape
    from perco.storage.row import check_and_write

    ack = failing.Cellref("t", b"r", 1 << 16 | 1)
    cell = failing.FailedCell(5, 0, b"", 3, "E", "", 0)
    mutation = failing.give_up(ack, 10, [7, 5], 3, 7, cell)

    def engine(*changed: tuple[str, int, bytes | None]) -> MemoryEngine:
        made = MemoryEngine()
        there = [(NOTIFY, 7, b""), (NOTIFY, 5, b""), (FAILED_LIST, 3, b""), (WRITE, 4, b"")]
        for group, ts, value in [*there, *changed]:
            key = cell_key(escape(b"r"), ack.column, ts)
            if value is None:
                made.delete(group, key)
            else:
                made.put(group, key, value)
        return made

    made = engine()
    assert not isinstance(check_and_write(made, mutation, 0), Refused)
    assert (made.entries(NOTIFY), made.entries(FAILED_LIST)) == (0, 1)
    for changed in (
        (NOTIFY, 7, None),
        (NOTIFY, 5, None),
        (FAILED_LIST, 3, None),
        (LOCK, 9, b""),
        (LOCK, 11, b""),
        (WRITE, 12, b""),
    ):
        assert isinstance(check_and_write(engine(changed), mutation, 0), Refused), changed


# ---------------------------------------------------------------- errors as text


class UntellableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("caf\udce9"), "ValueError: caf\\udce9"),
        (ValueError("one\ntwo"), "ValueError: one ..."),
        (ValueError(""), "ValueError"),
        (ValueError("x" * 10_000), "ValueError: " + "x" * 485 + "..."),
        (UntellableError(), "UntellableError: (its text cannot be shown: RuntimeError)"),
    ],
    ids=["lone surrogate", "two lines", "nothing", "long", "untellable"],
)
async def test_whatever_an_observer_raises_can_be_told(
    web: Web, picky: Picky, error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1, "perco.observer")  # pytest cannot print a lone surrogate either
    picky.error = error
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await give_up(db, picky, "a")
        [failed] = await db.failed()
        assert failed.error == said
        assert len(failed.error) <= failing.ERROR_CHARS
        failed.traceback.encode()


async def test_a_long_traceback_keeps_its_beginning_and_its_end(web: Web, picky: Picky) -> None:
    picky.error = ValueError("begin" + "x" * 50_000 + "end")
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await give_up(db, picky, "a")
        [failed] = await db.failed()
        assert failed.traceback.startswith("Traceback (most recent call last):")
        assert failed.traceback.rstrip().endswith("end")
        assert "characters are left out here" in failed.traceback
        assert len(failed.traceback) < failing.TRACEBACK_CHARS + 100


# ---------------------------------------------------------------- what is asked wrongly, what cannot be read


@pytest.mark.parametrize("limit", ["a", 0, -1, 2.5, True, []])
async def test_a_limit_is_a_number_of_changes(web: Web, picky: Picky, limit: Any) -> None:
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        with pytest.raises(perco.UsageError, match=r"limit is .* at least 1"):
            await db.failed(limit=limit)


@pytest.mark.parametrize("observer", ["nobody", 7, []])
async def test_an_observer_that_is_not_there_is_told_with_those_that_are(web: Web, picky: Picky, observer: Any) -> None:
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        for ask in (db.failed, db.replay_failed, db.drop_failed):
            with pytest.raises(perco.UsageError, match=r"no observer .*; there are: 'picky'"):
                await ask(observer)
        with pytest.raises(perco.UsageError, match="name the observer too"):
            await db.failed(key="a")
        with pytest.raises(perco.UsageError, match="takes the id of an observer"):
            await db.drop_failed(None)  # type: ignore[arg-type]


async def test_the_list_is_given_by_key_and_up_to_a_limit(web: Web, picky: Picky) -> None:
    async with perco.open("memory:", web.schema, options=OPTIONS) as db:
        await give_up(db, picky, *(f"{n:03}" for n in range(150)))
        assert [failed.key for failed in await db.failed(limit=None)] == [f"{n:03}" for n in range(150)]
        assert len(await db.failed(limit=7)) == 7
        assert [failed.key for failed in await db.failed("picky", key="123")] == ["123"]
        assert await db.failed("picky", key="no such row") == []
        assert await db.replay_failed() == 150


async def test_what_cannot_be_read_can_still_be_replayed(web: Web, picky: Picky) -> None:
    async with client(memory(), web.schema) as db:
        [at] = await give_up(db, picky, "a")
        [number] = inside(db).known.bind(web.body).acks
        damaged = (FAILED_LIST, number, at, b"rubbish")
        await inside(db).driver.store.apply([Mutation("docs", ((b"a", (), (damaged,)),))])
        [failed] = await db.failed()
        assert "cannot be read" in failed.error
        assert len(inside(db).driver.damaged) == 1
        picky.bad.clear()
        assert await db.replay_failed() == 1
        async with db.worker():
            assert await db.wait_idle(timeout=1000) == 0
        assert await get(db, web.note, "a") == "bad"


async def test_a_full_disk_gives_nothing_up(web: Web, picky: Picky) -> None:  # S4
    class Full(HoldingStore):
        refused = 0

        async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
            [mutation, *_] = mutations
            if self.refused < 2 and any(w[0] == FAILED_LIST for _, _, writes in mutation.rows for w in writes):
                self.refused += 1
                from perco.storage import Failed

                return [Failed(perco.errors.StoreFull("here", "no pages"))]
            return await self._inner.apply(mutations)

    async with client(memory(), web.schema) as first:
        store = Full(local_of(first).store, lambda _: False)
        async with client(local_of(first), web.schema, store=store) as db:
            await give_up(db, picky, "a")
            assert store.refused == 2
            assert await db.failed_count() == 1
            assert picky.attempts == [1, 2, 3, 4, 5]
            await is_whole(db)


# ------------------------------------------------------------------ more changes of a row than one run covers


async def test_many_changes_of_a_row_are_given_up_as_one(
    web: Web, picky: Picky, monkeypatch: pytest.MonkeyPatch
) -> None:  # N6
    for module in (claim, working):
        monkeypatch.setattr(module, "COVERS_MAX", 8)
    picky.bad = {"a"}
    async with client(memory(), web.schema) as db:
        changes = [await put(db, web.body, "a", f"number {number}") for number in range(50)]
        async with db.worker(options=FEW):
            assert await db.wait_idle(timeout=1000) == 1
            assert picky.attempts == [1, 2, 3]
            assert on_the_list(db) == [(b"a", changes[-1])]
            assert (await db.failed())[0].cause == changes[0]
            await is_whole(db)
            picky.bad = set()
            assert await db.replay_failed() == 1
            assert await db.wait_idle(timeout=1000) == 0
            assert await get(db, web.note, "a") == "number 49"


async def test_a_row_that_changes_faster_than_it_fails_is_given_up(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:  # N6
    """The run before was counted in a notify cell that this one does not cover."""
    for module in (claim, working):
        monkeypatch.setattr(module, "COVERS_MAX", 8)
    attempts: list[int] = []

    @web.observe(web.body, id="failing")
    async def failing(txn: Txn, change: Change) -> None:
        attempts.append(change.attempt)
        if len(attempts) < 3:
            for number in range(20):
                await put(db, web.body, "a", f"{len(attempts)}, {number}")
        raise ZeroDivisionError

    async with client(memory(), web.schema) as db:
        await put(db, web.body, "a", "the first")
        for _ in range(3):
            async with db.worker(options=FEW):  # which remembers nothing of earlier ones
                seen = len(attempts)
                await until(lambda: len(attempts) > seen)  # noqa: B023
                await trio.sleep(0.01)
        assert attempts == [1, 2, 3]
        assert len(on_the_list(db)) == 1
