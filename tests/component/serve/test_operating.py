"""Operations that the owner carries out for a client, each in one call; time is virtual."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings, strategies as st

import perco
from perco.database.inside import inside
from perco.errors import CommitUnknown
from perco.protocol.mutations import Header, Intent, prewrite
from perco.protocol.records import PUT, Cellref
from perco.rpc.link import Link, LostError
from perco.schema.codecs import INT64
from perco.serve import remote
from perco.serve.client import remote_owner
from perco.serve.messages import Method
from perco.storage import APPLIED
from perco.txn.transaction import Transaction
from tests.component.serve.kit import Place
from tests.component.serve.test_together import SCHEMA as OBSERVED, committing, docs, n, seen

body = docs.columns["body"]
PLAIN = perco.Schema(docs)
CELL = "docs", b"a", 1 << 16
_NAMES = {int(method): method.name for method in Method}


@pytest.fixture
def place() -> Place:
    return Place(PLAIN)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    made: Counter[str] = Counter()
    call = Link.call

    async def counted(self: Link, method: int, arguments: Any, **more: Any) -> Any:
        made[_NAMES[method]] += 1
        return await call(self, method, arguments, **more)

    monkeypatch.setattr(Link, "call", counted)
    return made


async def read(db: perco.Database, key: str = "a") -> int | None:
    async with db.snapshot() as snap:
        return await snap.get(n, key)


async def test_an_operation_takes_one_call(
    place: Place, calls: Counter[str], autojump_clock: trio.testing.MockClock
) -> None:  # C9
    async with place.served(), place.client() as db:
        calls.clear()
        await db.add(n, "a", 1)
        assert calls == {"DRAW": 1, "OPERATE": 1}
        calls.clear()
        assert await db.add(n, "a", 2) == 3
        assert await db.put(n, "b", 7)
        assert await db.put_if(n, "b", 8, expected=7)
        assert await db.put_if(n, "b", 9, expected=7) == 0
        assert await db.append(body, "a", b"x" * 300)
        assert await db.append(body, "a", b"y")
        assert await db.delete(n, "b")
        assert calls == {"OPERATE": 7}
        assert (await read(db), await read(db, "b")) == (3, None)
        async with db.snapshot() as snap:
            assert await snap.get(body, "a") == b"x" * 300 + b"y"
        assert inside(db).driver.counters.commits == 7


async def test_a_spare_timestamp_is_not_kept_for_long(
    place: Place, calls: Counter[str], autojump_clock: trio.testing.MockClock
) -> None:  # G1
    async with place.served() as owner, place.client() as db:
        await db.add(n, "a", 1)
        await trio.sleep(remote._SPARE_S / 2)
        assert len(inside(owner).oracle.holds.open) == 1
        await trio.sleep(2 * remote._SPARE_S)
        await db.add(n, "a", 1)
        assert calls["DRAW"] == 2
        await trio.sleep(2 * remote._SPARE_S + 1)
        assert not inside(owner).oracle.holds.open
        assert not inside(db).oracle.holds.open


async def test_a_cell_that_others_have_changed_since_takes_a_second_call(
    place: Place, calls: Counter[str], autojump_clock: trio.testing.MockClock
) -> None:  # C9, T7
    async with place.served(), place.client() as db, place.client() as other:
        await db.add(n, "a", 1)
        await other.add(n, "a", 10)
        calls.clear()
        assert await db.add(n, "a", 1) == 12
        assert calls == {"OPERATE": 2}


async def test_the_value_is_that_of_the_commit(place: Place, autojump_clock: trio.testing.MockClock) -> None:  # C9, T2
    """A two-phase commit that has its lock, or is in a batch, is not overtaken."""
    async with place.served(), place.client() as db, place.client() as other:
        await db.add(n, "a", 1)

        async def both(txn: Transaction) -> None:
            txn.set(n, "a", (await txn.get(n, "a") or 0) + 1)
            txn.set(n, "z", (await txn.get(n, "z") or 0) + 1)  # in another tablet

        async with trio.open_nursery() as nursery:
            for each in (db, other):
                for _ in range(10):
                    nursery.start_soon(each.add, n, "a", 1)
                    nursery.start_soon(each.run, both)
        assert (await read(db), await read(other, "z")) == (41, 20)


async def test_an_entered_cell_is_left_to_an_ordinary_transaction(
    place: Place, calls: Counter[str], autojump_clock: trio.testing.MockClock
) -> None:  # C2, C4
    async with place.served() as owner, place.client() as db:
        await db.add(n, "a", 1)
        with committing(owner, "a"):
            with trio.move_on_after(1) as scope:
                await db.add(n, "a", 1)
            assert scope.cancelled_caught
        assert calls["READ"] + calls["READS"] >= 1
        assert await db.add(n, "a", 1) == 2


async def test_a_lock_that_was_left_behind_is_left_to_an_ordinary_transaction(
    place: Place, calls: Counter[str], autojump_clock: trio.testing.MockClock
) -> None:  # T9
    async with place.served() as owner, place.client() as db:
        await db.add(n, "a", 1)
        parts = inside(owner)
        start_ts, cell = parts.oracle.draw_nowait(), Cellref("docs", b"a", parts.known.bind(n).column)
        left = prewrite(Header(start_ts, cell, 0, 0, "gone"), [Intent(*cell, PUT, INT64.encode(50))], again=False)
        assert await parts.driver.store.apply([left]) == [APPLIED]
        calls.clear()
        assert await db.add(n, "a", 1) == 2
        assert calls["OPERATE"] == 1
        assert calls["READ"] + calls["READS"] >= 1


async def test_an_operation_that_knows_an_older_catalogue_does_nothing(
    place: Place, autojump_clock: trio.testing.MockClock
) -> None:  # N10
    async with place.served() as owner, place.client() as db:
        await db.put(n, "a", 1)
        newest = inside(owner).oracle.catalogue_version
        for version, does in ((newest - 1, False), (newest, True)):
            txn = await db.begin()
            column = inside(owner).known.bind(n).column
            arguments = asked(txn.start_ts, version=version, cell=("docs", b"a", column))
            done, _ = await remote_owner(db).link.call(Method.OPERATE, arguments, again=False)
            assert (done is not None) == does
            assert not inside(owner).driver.entered.cells


async def test_observers_are_notified(autojump_clock: trio.testing.MockClock) -> None:  # N1, N8
    place = Place(OBSERVED)
    async with place.served(), place.client() as db, place.client() as other, other.worker():
        for by in (1, 2):
            total = await db.add(n, "a", by)
            await db.wait_idle()
            async with db.snapshot() as snap:
                assert await snap.get(seen, "a") == total


async def test_an_observer_that_is_registered_meanwhile_is_notified(
    autojump_clock: trio.testing.MockClock,
) -> None:  # N10
    place = Place(PLAIN)
    async with place.served(), place.client() as db:
        await db.add(n, "a", 1)
        async with place.client(OBSERVED) as other:
            assert await db.add(n, "a", 1) == 2
            async with other.worker():
                await other.wait_idle()
                async with other.snapshot() as snap:
                    assert await snap.get(seen, "a") == 2


def losing(place: Place, *, made: bool) -> Callable[[], int]:
    """The server's next answer to an operation is lost; it is carried out if `made`. Returns how many were lost."""
    assert place.server is not None
    handlers, lost = place.server._handlers, []
    right = handlers[int(Method.OPERATE)]

    def lose(session: Any, peer: Any, id: int, asked: Any) -> None:
        lost.append(id)
        handlers[int(Method.OPERATE)] = right
        peer.ended = True
        if made:
            right(session, peer, id, asked)
        peer.channel.close_soon()

    handlers[int(Method.OPERATE)] = lose
    return lambda: len(lost)


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("spare", [True, False])
async def test_an_operation_whose_answer_is_lost_is_carried_out_once(
    made: bool, spare: bool, place: Place, autojump_clock: trio.testing.MockClock
) -> None:  # T4, C6, C9
    async with place.served(), place.client() as db:
        await db.add(n, "a", 1)
        if not spare:
            await trio.sleep(2 * remote._SPARE_S)
        lost = losing(place, made=made)
        assert await db.add(n, "a", 1) == 2
        assert lost() == 1
        assert await read(db) == 2
        lost = losing(place, made=made)
        assert await db.put_if(n, "a", 5, expected=2)
        assert await db.put_if(n, "a", 6, expected=2) == 0
        lost = losing(place, made=made)
        assert await db.put_if(n, "a", 7, expected=2) == 0  # of what does nothing, too
        assert lost() == 1
        assert await read(db) == 5


async def test_an_answer_that_is_lost_for_good_leaves_a_token(
    place: Place, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:  # T4
    async with place.served(), place.client() as db:
        await db.add(n, "a", 1)
        driver = inside(db).driver

        async def never(commit: Any) -> None:
            raise perco.Unavailable("the store is away")

        monkeypatch.setattr(driver, "_ask_primary", never)
        losing(place, made=True)
        with pytest.raises(CommitUnknown) as unknown:
            await db.add(n, "a", 1)
        monkeypatch.undo()
        assert await db.outcome(unknown.value.token) > 0
        assert await read(db) == 2


@pytest.mark.parametrize("what", ["session", "owner"])
@pytest.mark.parametrize("name", ["add", "append", "put_if"])
async def test_an_operation_whose_commit_is_known_is_never_said_to_be_worth_repeating(
    name: str, what: str, place: Place, autojump_clock: trio.testing.MockClock
) -> None:  # T4
    """The answer is lost, and the session ends before the client has connected again."""
    async with trio.open_nursery() as nursery:
        ended = trio.Event()

        async def own(*, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
            with trio.CancelScope() as scope:
                async with place.served():
                    task_status.started(scope)
                    await trio.sleep_forever()
            ended.set()

        async def replaced() -> None:
            scope.cancel()
            await ended.wait()
            await nursery.start(own)

        scope = await nursery.start(own)
        async with place.client() as db:
            await db.put(n, "a", 1)
            ts = await db.put(body, "a", b"x")
            async with db.snapshot(ts=ts):  # a new session does not hold it
                assert place.server is not None
                handlers, server = place.server._handlers, place.server
                right = handlers[int(Method.OPERATE)]

                def lose(session: Any, peer: Any, id: int, asked: Any) -> None:
                    peer.ended = True
                    right(session, peer, id, asked)
                    handlers[int(Method.OPERATE)] = right
                    if what == "session":
                        server.sessions.end(session)
                        peer.channel.close_soon()
                    else:
                        nursery.start_soon(replaced)

                handlers[int(Method.OPERATE)] = lose
                if name == "add":
                    assert await db.add(n, "a", 1) == 2
                elif name == "append":
                    assert await db.append(body, "a", b"y")
                else:
                    assert await db.put_if(n, "a", 2, expected=1)
            async with db.snapshot() as snap:
                found = await snap.get(body, "a") if name == "append" else await snap.get(n, "a")
            assert found == (b"xy" if name == "append" else 2)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("name", ["put", "add", "append", "put_if"])
async def test_a_cancellation_does_not_hide_a_commit_that_is_known(
    name: str, place: Place, autojump_clock: trio.testing.MockClock
) -> None:  # T10
    async with place.served(), place.client() as db:
        await db.put(n, "a", 1)
        done = []
        with trio.CancelScope() as scope:
            handlers = place.server._handlers  # type: ignore[union-attr]
            right = handlers[int(Method.OPERATE)]

            def lose(session: Any, peer: Any, id: int, asked: Any) -> None:
                peer.ended = True
                right(session, peer, id, asked)
                handlers[int(Method.OPERATE)] = right
                scope.cancel()
                peer.channel.close_soon()

            handlers[int(Method.OPERATE)] = lose
            if name == "put":
                done.append(await db.put(n, "a", 2))
            elif name == "add":
                done.append(await db.add(n, "a", 1))
            elif name == "append":
                done.append(await db.append(body, "a", b"y"))
            else:
                done.append(await db.put_if(n, "a", 2, expected=1))
        assert done
        assert done[0] > 0


async def test_a_client_closes_at_once_after_an_operation(place: Place, autojump_clock: trio.testing.MockClock) -> None:
    async with place.served():
        async with place.client() as db:
            await db.put(n, "a", 1)
            before = trio.current_time()
        assert trio.current_time() - before < remote._SPARE_S / 2


async def test_an_operation_obeys_the_time_for_all_attempts(autojump_clock: trio.testing.MockClock) -> None:
    place = Place(PLAIN)
    place.retry = perco.options.RetryOptions(timeout_s=1.0)
    async with place.client_after_owner() as db:
        for operation in (db.put(n, "a", 1), db.add(n, "a", 1)):
            before = trio.current_time()
            with pytest.raises(perco.Unavailable, match=r"did not finish within 1\.0 s"):
                await operation
            assert trio.current_time() - before == pytest.approx(1.0, abs=0.1)


async def test_large_values_are_neither_decoded_on_the_owners_loop_nor_sent_back(
    calls: Counter[str], monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:  # C9
    wide = perco.Table("wide", key=perco.TEXT)
    tags, raw = wide.column("tags", perco.JSON), wide.column("raw", perco.BYTES)
    place = Place(perco.Schema(wide))
    async with place.served(), place.client() as db:
        await db.put(tags, "a", ["x" * 100] * 1000)
        await db.put(raw, "a", b"x" * 1_000_000)
        answers: list[Any] = []
        call = Link.call

        async def noted(self: Link, method: int, arguments: Any, **more: Any) -> Any:
            answer = await call(self, method, arguments, **more)
            if method == Method.OPERATE:
                answers.append(answer[0])
            return answer

        monkeypatch.setattr(Link, "call", noted)
        assert await db.append(tags, "a", ["y"])
        assert await db.append(raw, "a", b"y")
        assert await db.put_if(raw, "a", b"z", expected=b"x") == 0
        assert answers[0] is None
        assert [each[2] for each in answers[1:]] == [None, None]
        async with db.snapshot() as snap:
            assert len(await snap.get(tags, "a") or ()) == 1001
            assert await snap.get(raw, "a") == b"x" * 1_000_000 + b"y"


async def test_the_result_is_within_the_limit_of_a_transaction(autojump_clock: trio.testing.MockClock) -> None:  # R9
    place = Place(PLAIN)
    place.transaction = perco.options.TransactionOptions(bytes_max=10)
    async with place.served(), place.client() as db:
        await db.append(body, "a", b"123456")
        with pytest.raises(perco.errors.TooLarge):
            await db.append(body, "a", b"123456")


async def test_operations_of_a_session_that_has_ended(
    place: Place, autojump_clock: trio.testing.MockClock
) -> None:  # R5
    async with place.served(), place.client() as db:
        await db.add(n, "a", 1)
        [session] = place.server.sessions.all.values()  # type: ignore[union-attr]
        place.server.sessions.end(session)  # type: ignore[union-attr]
        await place.break_connections()
        assert await db.add(n, "a", 1) == 2
        assert await db.add(n, "a", 1) == 3


async def cancelled_after(turns: int, scope: trio.CancelScope) -> None:
    for _ in range(turns):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_an_operation_that_is_cancelled_was_not_sent_or_is_known(
    place: Place, autojump_clock: trio.testing.MockClock
) -> None:  # T10
    async with place.served(), place.client() as db:
        await db.add(n, "a", 1)
        done = 0
        for turns in range(8):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(cancelled_after, turns, scope)
                    await db.add(n, "a", 1)
                    done += 1
            assert (await read(db) or 0) - 1 == done or scope.cancelled_caught
        await db.add(n, "a", 1)
        assert not inside(db).fates.live()


def asked(ts: Any, **other: Any) -> Any:
    """The arguments of an operation."""
    right = {
        "start_ts": ts,
        "token": "t",
        "cell": CELL,
        "observers": (),
        "version": 99,
        "group": "data",
        "codec": "int64",
        "what": "put",
        "argument": b"\x80" + b"\0" * 7,
        "expected": None,
    }
    return tuple((right | other).values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"start_ts": 1 << 62},
        {"start_ts": 0},
        {"start_ts": None},
        {"token": 5},
        {"cell": ("docs", "a", 1)},
        {"cell": ("docs", {}, 1)},
        {"observers": ("x",)},
        {"version": "1"},
        {"group": b"data"},
        {"codec": None},
        {"what": "divide"},
        {"argument": 5},
        {"expected": "x"},
    ],
    ids=str,
)
async def test_an_operation_that_does_not_read_leaves_nothing_entered(
    wrong: dict[str, Any], place: Place, autojump_clock: trio.testing.MockClock
) -> None:  # R1, C3
    async with place.served() as owner, place.client() as db:
        txn = await db.begin()
        with pytest.raises((LostError, perco.PercoError)):
            await remote_owner(db).link.call(Method.OPERATE, asked(txn.start_ts, **wrong), again=False)
        assert not inside(owner).driver.entered.cells
        assert not inside(owner).driver.writing
        assert await db.put(n, "a", 1)


@pytest.mark.parametrize(
    "odd",
    [
        {"codec": "no such codec", "what": "add"},
        {"codec": "int64", "what": "add", "argument": b"short"},
        {"codec": "int64", "what": "add", "argument": None},
        {"codec": "text", "what": "append", "argument": b"\xff"},
        {"codec": "decimal(99,1)", "what": "add"},
        {"codec": "json", "what": "add", "argument": b"[1]"},
        {"codec": "json9", "what": "append", "argument": b"[1]"},
        {"codec": "json", "what": "put_if", "argument": b"1", "expected": b"[" * 100_000},
        {"cell": ("docs", b"a", -5), "what": "put"},
    ],
    ids=str,
)
async def test_an_operation_that_cannot_be_decided_does_nothing(
    odd: dict[str, Any], place: Place, autojump_clock: trio.testing.MockClock
) -> None:  # C9
    async with place.served() as owner, place.client() as db:
        await db.put(n, "a", 1)
        txn = await db.begin()
        done, _ = await remote_owner(db).link.call(Method.OPERATE, asked(txn.start_ts, **odd), again=False)
        assert done is None
        assert not inside(owner).driver.entered.cells
        assert await read(db) == 1


async def test_nobody_carries_out_an_operation_of_another_session(
    place: Place, autojump_clock: trio.testing.MockClock
) -> None:  # L1
    async with place.served(), place.client() as db, place.client() as other:
        txn = await db.begin()
        done, _ = await remote_owner(other).link.call(Method.OPERATE, asked(txn.start_ts), again=False)
        assert done is None
        assert await read(db) is None


async def test_nothing_is_shipped_where_others_read_the_rows_themselves(
    place: Place, calls: Counter[str], autojump_clock: trio.testing.MockClock
) -> None:  # C4
    async with place.served(), place.client() as db:
        await db.add(n, "a", 1)
        inside(db).fates.not_alone()
        remote_owner(db).store.alone = False  # type: ignore[misc]
        calls.clear()
        assert await db.add(n, "a", 1) == 2
        assert not calls["OPERATE"]


STEP = st.sampled_from(["put", "add", "put_if", "delete", "transaction", "append"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), STEP, st.integers(0, 3)), max_size=25))
def test_two_clients_that_take_turns_see_what_one_process_would(history: list[tuple[int, str, int]]) -> None:  # C9
    async def played() -> None:
        place, model, text = Place(PLAIN), None, b""
        async with place.served(), place.client() as one, place.client() as other:
            for who, what, k in history:
                db = (one, other)[who]
                if what == "put":
                    await db.put(n, "a", k)
                    model = k
                elif what == "add":
                    model = (model or 0) + k
                    assert await db.add(n, "a", k) == model
                elif what == "put_if":
                    assert bool(await db.put_if(n, "a", 10 + k, expected=k)) == (model == k)
                    model = 10 + k if model == k else model
                elif what == "delete":
                    await db.delete(n, "a")
                    model = None
                elif what == "append":
                    text += b"%d" % k * 200
                    await db.append(body, "a", b"%d" % k * 200)
                else:
                    async with db.transaction() as txn:
                        assert await txn.get(n, "a") == model
                        txn.set(n, "a", k)
                    model = k
            assert await read(one) == model
            async with other.snapshot() as snap:
                assert await snap.get(body, "a") == (text or None)

    trio.run(played, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_an_operation_for_which_no_caller_waits_leaves_no_timestamp(
    place: Place, autojump_clock: trio.testing.MockClock
) -> None:  # G1
    async with place.served() as owner, place.client() as db:
        await db.put(n, "a", 1)
        await trio.sleep(5)
        txn = await db.begin()
        cell = ("docs", b"a", inside(owner).known.bind(n).column)
        version = inside(owner).oracle.catalogue_version
        remote_owner(db).link.tell(Method.OPERATE, asked(txn.start_ts, cell=cell, version=version))
        await trio.sleep(1)
        assert await read(db) != 1, "it was carried out"
        txn.discard()
        await trio.sleep(5)
        assert not inside(owner).oracle.holds.open
