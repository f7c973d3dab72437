"""A client that reads and writes the rows by itself: what it tells the server, and when it leaves it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import trio
import trio.testing

from perco.errors import Unavailable
from perco.serve.direct import DirectRowStore
from perco.serve.messages import NOTIFIED, QUIET, Method
from perco.storage import APPLIED, Failed, Mutation, NoReply, Refused, Verdict


class FakeLink:
    """Notes what is told; `stalled`: for how long the server has said nothing."""

    def __init__(self) -> None:
        self.told: list[tuple[Method, Any]] = []
        self.stalled, self.left = 0.0, 0

    def tell(self, method: Method, what: Any) -> None:
        self.told.append((method, what))

    def stalled_s(self) -> float:
        return self.stalled

    def leave(self) -> None:
        self.left += 1


class FakeRows:
    """Answers with the verdicts that are set; `at`: where the server is by now."""

    groups = once = logs = True

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.at, self.looks, self.ticket, self.ended = "unix:/a", 0, "", 0

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        await trio.lowlevel.checkpoint()
        return self.verdicts

    async def served_at(self) -> str:
        await trio.lowlevel.checkpoint()
        self.looks += 1
        if self.at == "away":
            raise Unavailable("no reply")
        return self.at

    def greeted(self, ticket: str) -> None:
        self.ticket = ticket

    def session_ended(self) -> None:
        self.ended += 1

    async def sample(self, table: str, pieces: int) -> list[bytes]:
        await trio.lowlevel.checkpoint()
        return [b"", table.encode()][:pieces]


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def rows() -> FakeRows:
    return FakeRows()


@pytest.fixture
def store(link: FakeLink, rows: FakeRows) -> DirectRowStore:
    def reach(ticket: Callable[[], Awaitable[str]]) -> Any:
        return rows

    return DirectRowStore(link, reach, 30.0, random.Random(1))  # type: ignore[arg-type]


def notify(value: bytes | None) -> Mutation:
    return Mutation("t", [(b"a", [], [("notify", 1, 1, value)])])


@pytest.mark.parametrize(
    ("mutations", "verdicts", "told"),
    [
        ([notify(b"x")], [APPLIED], [NOTIFIED]),
        ([notify(b"x")], [NoReply("it may have been made")], [NOTIFIED]),
        ([notify(None)], [APPLIED], [QUIET]),
        ([notify(None), notify(b"x")], [APPLIED, APPLIED], [NOTIFIED]),
        ([notify(b"x")], [Refused(0, 0)], []),
        ([notify(b"x")], [Failed(Unavailable("not sent"))], []),
        ([Mutation("t", [(b"a", [], [("data", 1, 1, b"x")])])], [APPLIED], []),
    ],
)
async def test_the_server_is_told_of_notify_cells(
    store: DirectRowStore,
    rows: FakeRows,
    link: FakeLink,
    mutations: list[Mutation],
    verdicts: list[Verdict],
    told: list[int],
) -> None:  # N7 N8
    rows.verdicts = verdicts
    assert await store.apply(mutations) == verdicts
    assert link.told == [(Method.NEWS, what) for what in told]


def test_after_a_greeting_it_tells_again_and_takes_the_new_ticket(
    store: DirectRowStore, rows: FakeRows, link: FakeLink
) -> None:  # N8 F3
    """A broken connection may have lost its messages; and it cannot use another server's ticket."""
    store.greeted({"ticket": "new", "groups": False, "once": False, "spread": False, "alone": True})
    assert link.told == [(Method.NEWS, NOTIFIED)]
    assert rows.ticket == "new"
    assert (store.groups, store.once, store.spread, store.alone) == (True, True, True, False)


def test_an_ended_session_ends_for_the_rows_too(store: DirectRowStore, rows: FakeRows) -> None:  # R5 R7
    store.lost()
    assert (store.losses, rows.ended) == (1, 1)


async def follow(store: DirectRowStore, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await store.follow(lambda found: found == "unix:/a")


async def test_it_leaves_a_server_that_is_no_longer_the_one(
    store: DirectRowStore, rows: FakeRows, link: FakeLink, autojump_clock: trio.testing.MockClock
) -> None:
    """Even one that answers, because it does not know that it has lost the store."""
    await follow(store, 10)
    assert link.left == 0
    quiet = rows.looks
    assert 1 <= quiet <= 4
    rows.at = "unix:/b"
    await follow(store, 5)
    assert link.left >= 1


@pytest.mark.parametrize("at", ["", "away", "unix:/a"])
async def test_it_stays_while_no_other_one_leads(
    store: DirectRowStore, rows: FakeRows, link: FakeLink, at: str, autojump_clock: trio.testing.MockClock
) -> None:
    rows.at, link.stalled = at, 2.0
    await follow(store, 10)
    assert link.left == 0
    assert rows.looks >= 8, "while calls wait in vain, it looks more often"


async def test_its_rows_say_where_a_table_may_be_cut(store: DirectRowStore) -> None:
    assert await store.sample("t", 2) == [b"", b"t"]
