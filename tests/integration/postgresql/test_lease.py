"""One process owns a store on PostgreSQL, and no other; the next one takes over when it is dead, or silent (O1)."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.errors import StoreLocked
from perco.storage.lease import now
from tests.integration.postgresql.owner import SCHEMA, last
from tests.support import postgresql

LEASE_S = perco.options.PostgresqlOptions().lease_s


class Owner:
    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "tests.integration.postgresql.owner", url]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.says() == "open"

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def commits(self, number: int) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return self.says()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def url() -> str:
    return postgresql.fresh()


@pytest.fixture
def owner(url: str) -> Iterator[Owner]:
    made = Owner(url)
    yield made
    made.kill()


async def _last(db: perco.Database) -> int | None:
    async with db.snapshot() as snap:
        return await snap.get(last, "n")


async def test_a_second_owner_is_refused_and_told_who_has_it(owner: Owner, url: str) -> None:  # O1
    with pytest.raises(StoreLocked, match=rf"in use by process {owner.process.pid} on .*owner.py.*perco serve"):
        async with perco.open(url, SCHEMA):
            pass
    assert owner.commits(1) == "committed"


async def test_the_next_owner_of_one_that_ended_does_not_wait(url: str) -> None:  # O1
    for number in range(3):
        before = now()
        async with perco.open(url, SCHEMA) as db:
            assert await _last(db) == (number - 1 if number else None)
            async with db.transaction() as txn:
                txn.set(last, "n", number)
        took = now() - before
    assert inside(db).place.rows.fence.term == 3  # type: ignore[attr-defined]
    assert took < LEASE_S, "a released store is claimed at once"


async def test_one_that_was_killed_is_followed_when_its_lease_is_over(owner: Owner, url: str) -> None:  # O1
    assert owner.commits(1) == "committed"
    owner.kill()
    async with perco.open(url, SCHEMA) as db:
        assert await _last(db) == 1
        async with db.transaction() as txn:
            txn.set(last, "n", 2)


async def test_one_that_was_stopped_writes_and_begins_nothing_any_more(owner: Owner, url: str) -> None:  # O1
    assert owner.commits(1) == "committed"
    owner.process.send_signal(signal.SIGSTOP)
    async with perco.open(url, SCHEMA) as db:
        async with db.transaction() as txn:
            txn.set(last, "n", 2)
        owner.process.send_signal(signal.SIGCONT)
        said = await trio.to_thread.run_sync(owner.commits, 3)
        # The last one: the task that watches the lease has noticed it before the transaction did.
        lost = "StoreLocked", "Unavailable", "BackgroundFailure this process has lost the store"
        assert said.startswith(lost) or not said, said
        assert await trio.to_thread.run_sync(owner.process.wait, 60) != 0, "it has ended: nothing that it does counts"
        assert await _last(db) == 2


async def test_what_a_former_owner_has_sent_writes_nothing(url: str) -> None:  # O1 T4
    async with perco.open(url, SCHEMA) as db:
        rows = inside(db).place.rows  # type: ignore[attr-defined]
        postgresql.execute(f"UPDATE {rows.statements.prefix}_owner SET term = term + 1, token = 'another'")
        with pytest.raises(StoreLocked):
            async with db.transaction() as txn:
                txn.set(last, "n", 1)
        with pytest.raises(StoreLocked):
            await _last(db)
    assert postgresql.execute(f"SELECT count(*) FROM {rows.statements.prefix}_owner WHERE token = 'another'") == [
        (b"1",)
    ]


async def test_a_term_that_was_begun_and_not_answered_is_not_anothers(url: str) -> None:  # T4
    async with perco.open(url, SCHEMA) as db:
        rows = inside(db).place.rows  # type: ignore[attr-defined]
        postgresql.execute(f"UPDATE {rows.statements.prefix}_owner SET term = term + 1")
        async with db.transaction() as txn:
            txn.set(last, "n", 1)
        assert await _last(db) == 1
        assert rows.fence.term == 3
