"""Operations of one process on one cell: they take turns, and those that add to the cell share a commit (C10)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.errors import CommitUnknown, WriteConflict
from perco.txn.combining import Combining
from perco.txn.transaction import Transaction

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
log = docs.column("log", perco.MSGPACK)
body = docs.column("body", perco.BYTES)
SCHEMA = perco.Schema(docs)
MANY = 20


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Commits:
    held = Commits()
    monkeypatch.setattr(Transaction, "commit", held.of(Transaction.commit))
    return held


class Commits:
    """Counts the commits; each of the first ones waits at the gate, and then raises an error, if there is one."""

    def __init__(self) -> None:
        self.made, self.gate, self.errors = 0, trio.Event(), list[BaseException | None]()

    def of(self, right: Callable[[Transaction], Awaitable[int]]) -> Any:
        async def commit(txn: Transaction) -> int:
            if self.errors:
                error = self.errors.pop(0)
                await self.gate.wait()
                if error is not None:
                    raise error
            self.made += 1
            return await right(txn)

        return commit


async def value(db: perco.Database, column: perco.Column[str, Any] = n) -> Any:
    async with db.snapshot() as snap:
        return await snap.get(column, "a")


def conflict() -> WriteConflict:
    return WriteConflict([("docs", "a", "n")], 7, 5)


async def test_those_that_wait_share_a_commit(autojump_clock: trio.testing.MockClock, commits: Commits) -> None:
    async with perco.open("memory:", SCHEMA) as db:
        sums: list[int] = []

        async def add(by: int) -> None:
            sums.append(await db.add(n, "a", by))

        async with trio.open_nursery() as nursery:
            for i in range(MANY):
                nursery.start_soon(add, 2**i)
        assert await value(db) == 2**MANY - 1
        assert len(set(sums)) == MANY
        assert sorted(b - a for a, b in zip([0, *sorted(sums)], sorted(sums), strict=False)) == [
            2**i for i in range(MANY)
        ], "each sum is another one's sum and its own summand"
        assert commits.made <= 2
        assert db.statistics().combined >= MANY - 2
        assert len(inside(db).engine.combining) == 0


async def test_they_are_carried_out_in_their_order(autojump_clock: trio.testing.MockClock, commits: Commits) -> None:
    commits.errors = [None]
    async with perco.open("memory:", SCHEMA) as db, trio.open_nursery() as nursery:
        for i in range(MANY):
            nursery.start_soon(db.append, log, "a", [i])
            await trio.testing.wait_all_tasks_blocked()
        commits.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert await value(db, log) == tuple(range(MANY))
        assert commits.made == 2, "one that had begun when the others came, and one for all others"


async def test_only_those_that_add_share_a_commit(autojump_clock: trio.testing.MockClock, commits: Commits) -> None:
    commits.errors = [None]
    done: list[tuple[str, int]] = []

    async def note(name: str, call: Awaitable[int]) -> None:
        done.append((name, await call))

    async with perco.open("memory:", SCHEMA) as db, trio.open_nursery() as nursery:
        for name, call in (
            ("first", db.add(n, "a", 1)),
            ("second", db.add(n, "a", 2)),
            ("third", db.add(n, "a", 3)),
            ("put", db.put(n, "a", 100)),
            ("put more", db.put(n, "a", 200)),
            ("fourth", db.add(n, "a", 4)),
            ("if", db.put_if(n, "a", 300, expected=204)),
            ("fifth", db.add(n, "a", 5)),
            ("delete", db.delete(n, "a")),
        ):
            nursery.start_soon(note, name, call)
            await trio.testing.wait_all_tasks_blocked()
        commits.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert [name for name, _ in done] == [
            *("first", "second", "third", "put", "put more", "fourth", "if", "fifth", "delete"),
        ]
        told = dict(done)
        assert [told[each] for each in ("first", "second", "third", "fourth", "fifth")] == [1, 3, 6, 204, 305]
        assert commits.made == 8, "of the second and the third, one"
        for name, there in (("put", 100), ("put more", 200), ("if", 300), ("delete", None)):
            async with db.snapshot(ts=told[name]) as snap:
                assert await snap.get(n, "a") == there, "the version with its commit_ts is its own"


async def test_one_that_does_not_fit_fails_alone(autojump_clock: trio.testing.MockClock, commits: Commits) -> None:
    commits.errors = [None]
    async with perco.open("memory:", SCHEMA) as db, trio.open_nursery() as nursery:
        failed: list[BaseException] = []

        async def fails(kind: type[Exception], match: str, call: Awaitable[Any]) -> None:
            with pytest.raises(kind, match=match) as found:
                await call
            failed.append(found.value)

        nursery.start_soon(db.add, n, "a", 1)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(db.add, n, "a", 2)
        nursery.start_soon(fails, ValueError, r"value of docs\.n", db.add(n, "a", 2**63 - 1))
        nursery.start_soon(db.add, n, "a", 4)
        await db.append(log, "a", [1])
        nursery.start_soon(fails, TypeError, "to which no str fits", db.append(log, "a", "text"))
        nursery.start_soon(db.append, log, "a", [2])
        await trio.testing.wait_all_tasks_blocked()
        commits.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert (await value(db), await value(db, log)) == (7, (1, 2))
        assert len(failed) == 2


async def test_after_a_conflict_each_is_carried_out_once(
    autojump_clock: trio.testing.MockClock, commits: Commits
) -> None:
    commits.errors = [None, conflict(), conflict()]
    async with perco.open("memory:", SCHEMA) as db, trio.open_nursery() as nursery:
        sums: list[int] = []

        async def add(by: int) -> None:
            sums.append(await db.add(n, "a", by))

        for i in range(4):
            nursery.start_soon(add, 1)
            await trio.testing.wait_all_tasks_blocked()
            if i == 2:
                commits.gate.set()
        await trio.sleep(10)
        assert sorted(sums) == [1, 2, 3, 4]
        assert await value(db) == 4
        assert not commits.errors


async def test_if_the_outcome_is_unknown_it_is_for_all_that_shared_the_commit(
    autojump_clock: trio.testing.MockClock, commits: Commits
) -> None:
    commits.errors = [None, CommitUnknown("1:token", "no answer")]
    async with perco.open("memory:", SCHEMA) as db, trio.open_nursery() as nursery:
        failed: list[CommitUnknown] = []
        done: list[int] = []
        too_large = 0

        async def add(by: int) -> None:
            try:
                done.append(await db.add(n, "a", by))
            except CommitUnknown as error:
                failed.append(error)
            except ValueError:
                nonlocal too_large
                too_large += 1

        nursery.start_soon(add, 1)
        await trio.testing.wait_all_tasks_blocked()
        for by in (1, 2**63 - 1, 1, 1):
            nursery.start_soon(add, by)
            await trio.testing.wait_all_tasks_blocked()
        commits.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert done == [1]
        assert too_large == 1, "it was carried out later, alone"
        assert [(error.token, error.reason) for error in failed] == [("1:token", "no answer")] * 3
        assert len({id(error) for error in failed}) == 3, "each its own: a traceback grows as it is raised"


async def test_one_that_waits_can_be_cancelled_and_one_that_was_taken_has_an_outcome(
    autojump_clock: trio.testing.MockClock, commits: Commits
) -> None:  # T10
    async with perco.open("memory:", SCHEMA) as db, trio.open_nursery() as nursery:
        sums: dict[str, int] = {}
        scopes = {name: trio.CancelScope() for name in ("first", "second", "third", "fourth")}

        async def add(name: str) -> None:
            with scopes[name]:
                sums[name] = await db.add(n, "a", 1)

        commits.errors = [None]
        for name in scopes:
            nursery.start_soon(add, name)
            await trio.testing.wait_all_tasks_blocked()
        scopes["third"].cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert scopes["third"].cancelled_caught
        gate, commits.gate, commits.errors = commits.gate, trio.Event(), [None, None]
        gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert sums == {"first": 1}
        scopes["fourth"].cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not scopes["fourth"].cancelled_caught, "it was taken"
        commits.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert sums == {"first": 1, "second": 2, "fourth": 3}
        assert await value(db) == 3


async def test_one_that_leads_and_is_cancelled_lets_the_next_one_lead(
    autojump_clock: trio.testing.MockClock, commits: Commits
) -> None:
    commits.errors = [None, None]
    async with perco.open("memory:", SCHEMA) as db, trio.open_nursery() as nursery:
        scope, sums = trio.CancelScope(), list[int]()

        async def add(scope: trio.CancelScope) -> None:
            with scope:
                sums.append(await db.add(n, "a", 1))

        nursery.start_soon(add, trio.CancelScope())
        await trio.testing.wait_all_tasks_blocked()
        for each in (scope, trio.CancelScope(), trio.CancelScope()):
            nursery.start_soon(add, each)
            await trio.testing.wait_all_tasks_blocked()
        gate, commits.gate = commits.gate, trio.Event()
        gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert sums == [1], "one leads now, and has taken the other two"
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert scope.cancelled_caught
        assert sorted(sums) == [1, 2, 3]
        assert len(inside(db).engine.combining) == 0


async def test_one_that_is_cancelled_while_it_was_taken_ends_if_the_commit_fails(
    autojump_clock: trio.testing.MockClock, commits: Commits
) -> None:  # T10
    commits.errors = [None, conflict(), None]
    async with perco.open("memory:", SCHEMA) as db, trio.open_nursery() as nursery:
        scope, sums = trio.CancelScope(), list[int]()

        async def add(scope: trio.CancelScope) -> None:
            with scope:
                sums.append(await db.add(n, "a", 1))

        nursery.start_soon(add, trio.CancelScope())
        await trio.testing.wait_all_tasks_blocked()
        for each in (trio.CancelScope(), scope, trio.CancelScope()):
            nursery.start_soon(add, each)
            await trio.testing.wait_all_tasks_blocked()
        second, third = trio.Event(), trio.Event()
        first, commits.gate = commits.gate, second
        first.set()
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not scope.cancelled_caught, "it was taken"
        commits.gate = third
        second.set()
        await trio.testing.wait_all_tasks_blocked()
        assert scope.cancelled_caught, "the commit that would have been its own has failed"
        third.set()
        await trio.sleep(10)
        assert sorted(sums) == [1, 2, 3]
        assert await value(db) == 3


async def test_an_error_of_a_codec_is_that_of_its_caller_alone(
    autojump_clock: trio.testing.MockClock, commits: Commits
) -> None:
    class OddError(Exception):
        pass

    def encode(text: str) -> bytes:
        if text.count("!") == 1 and len(text) > 1:
            raise OddError(text)
        return text.encode()

    marks = perco.Table("marks", key=perco.TEXT)
    mark = marks.column("mark", perco.Codec("odd", encode, bytes.decode))
    commits.errors = [None]
    done: dict[str, str] = {}

    async with perco.open("memory:", perco.Schema(marks)) as db, trio.open_nursery() as nursery:

        async def append(more: str) -> None:
            try:
                done[more] = str(await db.append(mark, "a", more) > 0)
            except OddError as error:
                done[more] = str(error)

        for more in ("a", "b", "!", "c"):
            nursery.start_soon(append, more)
            await trio.testing.wait_all_tasks_blocked()
        commits.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        async with db.snapshot() as snap:
            assert await snap.get(mark, "a") == "abc"
    assert done == {"a": "True", "b": "True", "!": "ab!", "c": "True"}


async def test_what_waits_when_the_store_is_closed_gets_an_error(autojump_clock: trio.testing.MockClock) -> None:
    errors: list[BaseException] = []

    async def add(db: perco.Database) -> None:
        try:
            await db.add(n, "a", 1)
        except perco.PercoError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        async with perco.open("memory:", SCHEMA) as db:
            leads = inside(db).engine.combining
            bound = inside(db).engine.known.bind(n)
            where = (bound.table, docs.row("a"), bound.column)
            assert leads.leads(where)
            for _ in range(3):
                nursery.start_soon(add, db)
            await trio.testing.wait_all_tasks_blocked()
        leads.pass_on(where)
    assert [type(error) for error in errors] == [perco.errors.TransactionClosed] * 3


@pytest.mark.parametrize("call", ["add", "put", "put_if"])
async def test_one_that_is_late_says_what_it_met(
    call: str, autojump_clock: trio.testing.MockClock, commits: Commits
) -> None:
    commits.errors = [conflict() for _ in range(1000)]
    commits.gate.set()
    options = perco.Options(retry=perco.options.RetryOptions(timeout_s=5.0, attempts=1000))
    async with perco.open("memory:", SCHEMA, options=options) as db:
        done = {"add": lambda: db.add(n, "a", 1), "put": lambda: db.put(n, "a", 1)}
        with pytest.raises(perco.Unavailable, match=r"in \d+ attempts that failed") as late:
            await (done[call]() if call in done else db.put_if(n, "a", 1, expected=None))
        assert isinstance(late.value.__cause__, WriteConflict)
        assert trio.current_time() == pytest.approx(5.0)


async def test_an_operation_that_leads_is_not_interrupted(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, protected = Combining.leads, list[bool]()

    def leads(self: Combining, where: Any) -> bool:
        protected.append(trio.lowlevel.currently_ki_protected())
        return right(self, where)

    monkeypatch.setattr(Combining, "leads", leads)
    async with perco.open("memory:", SCHEMA) as db:
        await db.add(n, "a", 1)
    assert protected == [True]


async def test_no_commit_copies_long_values_again_and_again(
    autojump_clock: trio.testing.MockClock, commits: Commits
) -> None:
    commits.errors = [None]
    async with perco.open("memory:", SCHEMA) as db:
        async with trio.open_nursery() as nursery:
            for i in range(MANY):
                nursery.start_soon(db.append, body, "a", bytes([i]) * 300_000)
                await trio.testing.wait_all_tasks_blocked()
            commits.gate.set()
        assert await value(db, body) == b"".join(bytes([i]) * 300_000 for i in range(MANY))
        assert MANY / 3 < commits.made < MANY
