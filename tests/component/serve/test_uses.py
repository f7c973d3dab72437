"""What each process does with a store, as its owner tells others; time is virtual."""

from __future__ import annotations

from typing import Any

import pytest

import perco
from perco.errors import WriteConflict
from perco.protocol.records import Cellref
from perco.rpc.framing import WireError
from perco.serve import uses
from perco.serve.client import remote_owner
from perco.serve.uses import ContendedCell, ProcessUse, Runs
from perco.txn.contended import Contended
from tests.component.serve.kit import Place

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
out = docs.column("out", perco.INT64)
SCHEMA = perco.Schema(docs)


@SCHEMA.observe(n, id="double", attempts=2)
async def double(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
    if change.key == "bad":
        raise ValueError("no")
    txn.set(out, change.key, 2 * (change.value or 0))


async def test_every_process_tells_its_transactions_runs_and_conflicts() -> None:
    place = Place(SCHEMA)
    async with place.served(), place.client() as db, place.client() as asking:
        async with db.worker(concurrency=2):
            for key in "a", "bad":
                async with db.transaction() as txn:
                    txn.set(n, key, 1)
            assert await db.wait_idle() == 1
            [_, client] = await remote_owner(asking).uses()
            assert client.observers == [Runs("double", 1, 2, 0)]
        first, second = await db.begin(), await db.begin()
        async with db.snapshot(ts=first.start_ts):
            for txn in first, second:
                await txn.get(n, "a")
                txn.set(n, "a", 2)
            await first.commit()
            [_, client] = await remote_owner(asking).uses()
            assert (client.open, client.oldest) == (1, second.start_ts)
            assert (client.pasts, client.oldest_past) == (1, first.start_ts)
            with pytest.raises(WriteConflict):
                await second.commit()
        [owner, client] = await remote_owner(asking).uses()
    assert (owner.role, client.role, client.observers) == ("owner", "client", [])
    assert (owner.open, client.open, client.pasts) == (0, 0, 0)
    assert client.conflicts == 1
    [cell] = owner.contended
    assert (cell.table, cell.row, cell.conflicts) == ("docs", b"a", 1)


async def test_a_conflict_that_the_server_finds_counts_for_the_client() -> None:
    place = Place(SCHEMA)
    async with place.served() as owner, place.client() as db, place.client() as asking:
        txn = await db.begin()
        await txn.get(n, "a")
        async with owner.transaction() as other:
            other.set(n, "a", 1)
        txn.set(n, "a", 2)
        with pytest.raises(WriteConflict):
            await txn.commit()
        [first, client] = await remote_owner(asking).uses()
    assert [(cell.row, cell.conflicts) for cell in first.contended] == [(b"a", 1)]
    assert client.conflicts == 1


def test_the_cells_with_the_most_conflicts_are_kept() -> None:
    contended = Contended()
    for _ in range(10):
        contended.note(Cellref("docs", b"hot", 1))
    for number in range(5000):
        contended.note(Cellref("docs", b"%d" % number, 1))
        contended.note(Cellref("docs", b"warm", 1))
    [(warm, most), (hot, fewer)] = contended.most(2)
    assert (warm.row, most, hot.row, fewer) == (b"warm", 5000, b"hot", 10)
    assert len(contended.most(10_000)) <= 512


RUNS, CELLS = [Runs("double", 1, 2, 0)], [ContendedCell("docs", b"a", 1, 3)]
GOOD = ProcessUse("id", "client", 1, "app.py", RUNS, CELLS, 1, 2, 3, 4, 5)
ODD: list[Any] = [
    None,
    (),
    GOOD[:-1],
    (*GOOD, 1),
    GOOD._replace(pid=-1),
    GOOD._replace(pid=1.5),
    GOOD._replace(pid=True),
    GOOD._replace(program=b"app.py"),
    GOOD._replace(observers={"double": (1, 2, 0)}),
    GOOD._replace(observers=[("double", 1, 2)]),
    GOOD._replace(observers=[("double", 1, 2, "3")]),
    GOOD._replace(observers=[(b"double", 1, 2, 3)]),
    GOOD._replace(observers=[("double", 0, 0, 0)] * 5000),
    GOOD._replace(contended=[("docs", "a", 1, 3)]),
    GOOD._replace(contended=[(1, b"a", 1, 3)]),
    GOOD._replace(contended=[("docs", b"a", None, 3)]),
    GOOD._replace(contended=[("docs", b"a" * 100_000, 1, 3)]),
    GOOD._replace(contended=[("docs" * 1000, b"a", 1, 3)]),
    GOOD._replace(contended=[GOOD.contended[0]] * 100),
    GOOD._replace(commits=1 << 70),
]


@pytest.mark.parametrize("odd", ODD)
def test_what_does_not_read_is_refused(odd: Any) -> None:  # R1
    with pytest.raises(WireError, match="cannot be decoded"):
        uses.read(odd)


def test_what_reads_is_as_it_was_told() -> None:
    assert uses.read(tuple(GOOD)) == GOOD


def test_what_all_do_has_a_bound() -> None:
    cells = [[ContendedCell("docs", b"%d" % (n % 40), 1, 1), ContendedCell("docs", b"hot", 1, 2)] for n in range(500)]
    found = uses.merged([GOOD._replace(id=str(n), contended=each) for n, each in enumerate(cells)])
    assert len(found) == 256
    assert found[0].contended[0] == ContendedCell("docs", b"hot", 1, 1000)
    assert len(found[0].contended) == 32
    assert not any(each.contended for each in found[1:])
