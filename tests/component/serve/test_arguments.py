"""Arguments that do not read: nothing of them is acted on, and nobody else notices (R1)."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import perco
from perco.database.database import Database
from perco.database.inside import inside
from perco.rpc.link import LostError
from perco.serve.client import remote_owner
from perco.serve.messages import Method
from tests.component.serve.kit import Place
from tests.component.serve.test_hostile import SCHEMA, n, put, read, twice
from tests.support.places import local_of

CELL = "docs", b"a", 1 << 16
HUGE = (1 << 62) + 1


@pytest.fixture
def place() -> Place:
    return Place(SCHEMA)


def commit(start_ts: Any, cell: Any = CELL, *, primary: Any = None, kind: Any = 1, version: Any = 99) -> Any:
    """The arguments of a commit in one step."""
    return (start_ts, primary or cell, 0, 0, "t", b""), ((*cell, kind, b"\x01"),), version


async def refused(db: Database, method: Method, arguments: Any) -> None:
    """The call ends its connection."""
    with pytest.raises((LostError, perco.Unavailable)):
        await remote_owner(db).link.call(method, arguments, again=False)


BAD_COMMITS: dict[str, Any] = {
    "a timestamp that was never issued": lambda ts: commit(HUGE),
    "a start timestamp of 0": lambda ts: commit(0),
    "a start timestamp that is none": lambda ts: commit(None),
    "a version that is none": lambda ts: commit(ts, version="1"),
    "a table that is none": lambda ts: commit(ts, (5, b"a", 1)),
    "a row that cannot be looked up": lambda ts: commit(ts, ("docs", {}, 1), primary=("docs", {}, 1)),
    "a column that is none": lambda ts: commit(ts, ("docs", b"a", "n")),
    "a kind that is none": lambda ts: commit(ts, kind=b""),
    "another primary": lambda ts: commit(ts, primary=("docs", b"b", 1)),
    "a primary that is only read": lambda ts: commit(ts, kind=5),
    "an unknown table": lambda ts: commit(ts, ("none", b"a", 1)),
    "the same cell twice": lambda ts: twice_over(*commit(ts)),
}


def twice_over(header: Any, part: Any, version: Any) -> Any:
    """A commit that writes its cell twice."""
    return header, (*part, *part), version


@pytest.mark.parametrize("bad", BAD_COMMITS.values(), ids=BAD_COMMITS)
async def test_a_commit_that_does_not_read_leaves_nothing_entered(place: Place, bad: Any) -> None:  # R1 C2 C3
    async with place.served() as owner, place.client() as db, place.client() as other:
        await other.run(put, "a", 1)
        good, wrong = await db.begin(), await db.begin()
        for method, arguments in (
            (Method.COMMITS, (commit(good.start_ts, ("docs", b"a", 1 << 16)), bad(wrong.start_ts))),
            (Method.COMMITS, (bad(wrong.start_ts), commit(good.start_ts, ("docs", b"a", 1 << 16)))),
            (Method.COMMIT, bad(wrong.start_ts)),
        ):
            with pytest.raises((LostError, perco.PercoError)):
                await remote_owner(db).link.call(method, arguments, again=False)
            assert not inside(owner).driver.entered.cells
            assert not inside(owner).driver.writing
        with trio.fail_after(10):
            assert await other.run(read, "a") == 1
            await other.run(put, "a", 2)


async def test_a_transaction_twice_in_one_call_is_not_taken(place: Place) -> None:  # R1 C3
    async with place.served() as owner, place.client() as db:
        txn = await db.begin()
        commits = tuple(commit(txn.start_ts, ("docs", row, 1 << 16)) for row in (b"a", b"b"))
        await refused(db, Method.COMMITS, commits)
        assert not inside(owner).driver.entered.cells


async def test_a_mistake_among_commits_leaves_none_of_them_entered(place: Place, monkeypatch: Any) -> None:  # C3
    async with place.served() as owner, place.client() as db, place.client() as other:
        one, two = await db.begin(), await db.begin()
        enter = place.server.one_step._enter  # type: ignore[union-attr]

        def fails(commit: Any, version: int) -> Any:
            if commit.header.start_ts == two.start_ts:
                raise AssertionError
            return enter(commit, version)

        monkeypatch.setattr(place.server.one_step, "_enter", fails)
        commits = tuple(commit(txn.start_ts, ("docs", row, 1 << 16)) for txn, row in ((one, b"a"), (two, b"b")))
        with pytest.raises(perco.errors.BackgroundFailure):
            await remote_owner(db).link.call(Method.COMMITS, commits, again=False)
        monkeypatch.undo()
        assert not inside(owner).driver.entered.cells
        assert not inside(owner).driver.writing
        with trio.fail_after(10):
            assert await other.run(read, "a") is None


async def test_nobody_commits_a_transaction_of_another_session(place: Place) -> None:  # L1 T1
    async with place.served() as owner, place.client() as db, place.client() as other:
        txn = await db.begin()
        txn.set(n, "a", 1)
        with pytest.raises(perco.errors.SessionEnded):
            await remote_owner(other).link.call(
                Method.COMMIT, commit(txn.start_ts, ("docs", b"b", 1 << 16)), again=False
            )
        assert not inside(owner).driver.entered.cells
        assert await txn.commit() > txn.start_ts
        assert await other.run(read, "a") == 1


async def test_a_transaction_whose_session_has_ended_may_commit(place: Place) -> None:  # R5 T13
    async with place.served(), place.client() as db:
        txn = await db.begin()
        txn.set(n, "a", 1)
        [session] = place.server.sessions.all.values()  # type: ignore[union-attr]
        place.server.sessions.end(session)  # type: ignore[union-attr]
        await place.break_connections()
        await db.run(read, "a")
        await txn.commit()
        assert await db.run(read, "a") == 1


WRITE = "data", 1 << 16, 5, b"x"
BAD_MUTATIONS = [
    ("docs", ()),
    ("docs", (("a", (), (WRITE,)),)),
    ("docs", ((b"a", (), (("data", 1 << 16, 5, "x"),)),)),
    ("docs", ((b"a", (), (({}, 1 << 16, 5, b"x"),)),)),
    ("docs", ((b"a", (), (WRITE[:3],)),)),
    ("docs", ((b"a", (), (WRITE,)),), "0"),
    (5, ((b"a", (), (WRITE,)),)),
]


@pytest.mark.parametrize("bad", BAD_MUTATIONS)
async def test_of_mutations_of_which_one_does_not_read_none_is_made(place: Place, bad: Any) -> None:  # R1
    async with place.served() as owner, place.client() as db:
        await refused(db, Method.APPLY, (("docs", ((b"a", (), (WRITE,)),)), bad))
        assert all(not tablet.entries("data") for tablet in local_of(owner).store.tablets() if tablet.table == "docs")
        await db.run(put, "a", 1)


POISON: list[tuple[Method, Any]] = [
    (Method.HOLDING, ((), ((("docs", 5), (1, 1)),))),
    (Method.HOLDING, ((), ((("docs", b"x"), (1, 1)), (("docs", b"y"), ("1", 1))))),
    (Method.HOLDING, ((), (((5, b"x"), (1, 1)),))),
    (Method.HOLDING, (("1",), ())),
    (Method.HOLDING, ((), ((("docs", b"x"), (1,)),))),
    (Method.READ, (("docs", b"a", (("write", "n", 0, 1, 1),)),)),
    (Method.START, 5),
    (Method.START, (("docs", b"a"),)),
    (Method.START, (("docs", b"a", (("write", 1 << 16, 0, 0),)),)),
    (Method.START, (("docs", b"a", (("write", 1 << 16, 0, "0", 1),)),)),
    (Method.START, (("docs", b"a", (("write", "n", 0, 0, 1),)),)),
    (Method.START, (("docs", "a", (("write", 1 << 16, 0, 0, 1),)),)),
    (Method.DRAW, (-1, 3)),
    (Method.DRAW, (3, -1)),
    (Method.HOLD, (1, "1")),
    (Method.HOLD, (1, float("nan"))),
    (Method.WORKS, ((5,), (5,))),
    (Method.WORKS, (("double",), 5)),
    (Method.UP_TO, "1"),
    (Method.OUTLIVE, {}),
    (Method.AT, "now"),
    (Method.AT, float("inf")),
    (Method.PIN, ("p", "me", "1", 5.0, "id", None)),
    (Method.PIN, ("p", 5, 1, 5.0, "id", None)),
    (Method.DROP_PIN, ("p", {})),
    (Method.SPLIT, ("docs", "m")),
    (Method.COMPACT, 5),
]


@pytest.mark.parametrize(("method", "arguments"), POISON)
async def test_what_does_not_read_changes_nothing(  # R1 N8 N7 G1
    place: Place, method: Method, arguments: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with place.served() as owner, place.client() as db, place.client() as evil:
        await db.run(put, "a", 1)
        sessions = place.server.sessions  # type: ignore[union-attr]
        await refused(evil, method, arguments)
        assert not sessions.claims
        assert not any(session.held or session.works or session.claims for session in sessions.all.values())
        assert not sessions._watches
        assert not inside(owner).oracle.holds.open
        assert inside(owner).oracle.holds.lowest(inside(owner).oracle.last, 0).kind == "retention"
        async with db.worker():
            await db.wait_idle(timeout=10)
        async with db.snapshot() as snap:
            assert await snap.get(twice, "a") == 2
    assert "a bug in perco" not in caplog.text


@pytest.mark.parametrize("ended", [(5, {}), ("5",), 5])
async def test_a_list_of_ends_that_does_not_read_ends_nothing(place: Place, ended: Any) -> None:  # R1 G1
    async with place.served() as owner, place.client() as db:
        txn = await db.begin()
        arguments = (txn.start_ts, *ended) if isinstance(ended, tuple) else ended
        await refused(db, Method.DONE, arguments)
        assert txn.start_ts in inside(owner).oracle.holds.open
        txn.discard()
