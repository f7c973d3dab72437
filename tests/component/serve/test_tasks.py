"""What the tasks of all processes of a store wait for; time is virtual."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.rpc.framing import WireError
from perco.serve import tasks
from perco.serve.client import remote_owner
from perco.serve.tasks import ProcessTasks, Waiting
from tests.component.serve.kit import Place, vanish

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)


async def slow(txn: perco.Transaction, gate: trio.Event) -> None:
    await txn.get(n, "a")
    await gate.wait()


def named(process: ProcessTasks, name: str) -> list[Waiting]:
    return [task for task in process.tasks if name in task.name]


async def test_each_task_says_where_it_waits_and_what_for() -> None:
    place, gate = Place(SCHEMA), trio.Event()
    async with place.served(), place.client() as db, place.client() as asking, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(db.run, slow, gate)
        await trio.testing.wait_all_tasks_blocked()
        owner, client = await remote_owner(asking).tasks()  # it asks itself for nothing
        gate.set()
    assert (owner.role, client.role) == ("owner", "client")
    [runs] = named(client, "Database.run")
    assert runs.alike == 3
    assert runs.wants == "Event.wait"
    assert runs.at.startswith("tests.component.serve.test_tasks:")
    assert runs.at.endswith(" slow")
    [sweeper] = named(owner, "perco-sweeper")
    assert sweeper.at.startswith("perco.notify.sweeper:")
    assert not named(owner, "<init>")  # trio's own are left out


async def test_who_does_not_answer_is_left_out() -> None:
    place = Place(SCHEMA)
    async with place.served(), place.client() as db, place.client() as asking:
        channel = remote_owner(db).link._channel
        assert channel is not None
        channel.send = lambda message, **more: None  # type: ignore[method-assign]
        began = trio.current_time()
        assert [each.role for each in await remote_owner(asking).tasks()] == ["owner"]
        assert trio.current_time() - began <= 2
        assert place.server.told_tasks.asked is None  # type: ignore[union-attr]


async def test_who_is_gone_is_not_waited_for() -> None:
    place = Place(SCHEMA)
    async with place.served(), place.client() as db, place.client() as asking:
        await vanish(db)
        assert [each.role for each in await remote_owner(asking).tasks()] == ["owner"]


async def test_more_than_are_listed_are_counted() -> None:
    async def wait(number: int) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for number in range(2000):
            nursery.start_soon(wait, number, name=f"task {number}")
        await trio.testing.wait_all_tasks_blocked()
        found = tasks.here("owner")
        nursery.cancel_scope.cancel()
    assert found.more > 1000
    assert found.more + sum(task.alike for task in found.tasks) >= 2000


async def test_who_asks_while_others_are_asked_shares_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(SCHEMA)
    looks: list[str] = []

    def here(role: str) -> ProcessTasks:
        looks.append(role)
        return ProcessTasks(role, 1, [], 0)

    monkeypatch.setattr(tasks, "here", here)
    async with place.served(), place.client(), place.client() as asking, trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(remote_owner(asking).tasks)
    assert sorted(looks) == ["client", "owner"]


GOOD = ("client", 1, [(0, 1, "task", "at", "wants")], 0)
ODD: list[Any] = [
    None,
    (),
    ("client", 1e300, [], 0),
    ("client", float("inf"), [], 0),
    ("client", -1, [], 0),
    (b"client", 1, [], 0),
    ("client", 1, [(0, 1, 7, "at", "wants")], 0),
    ("client", 1, [(1 << 60, 1, "task", "at", "wants")], 0),
    ("client", 1, [(0, 1, "task")], 0),
    ("client", 1, 5, 0),
    ("client", 1, [GOOD[2][0]] * 1000, 0),  # type: ignore[index]
]


@pytest.mark.parametrize("odd", ODD)
def test_what_does_not_read_is_refused(odd: Any) -> None:  # R1
    with pytest.raises(WireError, match="cannot be decoded"):
        tasks.read(odd)


def test_what_is_shown_is_printable_and_short() -> None:
    found = tasks.read(("client", 1, [(49, 1, "\x1b[2J\n\ud800" + "x" * 1000, "at", "wants")], 0))
    [task] = found.tasks
    assert task.name.startswith("?[2J??xxx")
    assert len(task.name) == 200
    assert tasks.read(GOOD).tasks == [Waiting(0, 1, "task", "at", "wants")]


async def test_a_client_that_cannot_tell_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(SCHEMA)
    async with place.served(), place.client() as db, place.client() as asking:

        def here(role: str) -> ProcessTasks:
            if role == "client":
                raise RuntimeError("no")
            return ProcessTasks(role, 1, [], 0)

        monkeypatch.setattr(tasks, "here", here)
        assert [each.role for each in await remote_owner(asking).tasks()] == ["owner"]
        assert await inside(db).oracle.newest() == 0  # it is asked, and answers
        assert remote_owner(db).link.connections == 1
