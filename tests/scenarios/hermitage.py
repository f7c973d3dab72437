"""The anomalies, one by one, in each mode: who can show one. The table of docs/isolation.md is what comes of it.

    python -m tests.scenarios.hermitage        writes the table into the page

The anomalies and their order are those of the Hermitage project, which runs them on other databases.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio
import trio.testing

import perco
from tests.support.faults import gated

PAGE: Final = Path(__file__).parents[2] / "docs" / "isolation.md"
BEGIN, END = "<!-- written by python -m tests.scenarios.hermitage -->\n", "<!-- end -->\n"

test = perco.Table("test", key=perco.INT64, splits=[2])
value = test.column("value", perco.INT64)
SCHEMA = perco.Schema(test)


class Mode:
    """How a transaction is begun, and how it reads. Blind writes, snapshots and scans are what they are."""

    def __init__(self, name: str, *, isolation: perco.Isolation = "snapshot", lock: bool = False) -> None:
        self.name, self._isolation, self._lock = name, isolation, lock

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[perco.Database]:
        """A store in which 1 is 10 and 2 is 20; its transactions are of this mode."""
        options = perco.Options(transaction=perco.options.TransactionOptions(isolation=self._isolation))
        async with perco.open("memory:", SCHEMA, options=options) as db:
            async with db.transaction() as txn:
                txn.set(value, 1, 10)
                txn.set(value, 2, 20)
            yield db

    async def get(self, txn: perco.Transaction, key: int) -> int | None:
        return await txn.get(value, key, lock=self._lock)


async def where(txn: perco.Snapshot, condition: Callable[[int], bool]) -> list[int]:
    """The keys of rows whose value is so: a read of a predicate."""
    return [row.key async for row in txn.scan(test) if condition(row[value] or 0)]


_TRIES = 100


async def committed(txn: perco.Transaction) -> bool:
    try:
        await txn.commit()
    except perco.TransientError:
        return False
    return True


async def state(db: perco.Database) -> list[int | None]:
    async with db.snapshot() as snap:
        return [await snap.get(value, 1), await snap.get(value, 2)]


# ------------------------------------------------------------ each returns whether the anomaly has shown


async def dirty_write(mode: Mode, db: perco.Database) -> bool:
    for _ in range(_TRIES):  # two that cross in two phases may both let go
        t1, t2 = await db.begin(), await db.begin()
        for txn, number in ((t1, 1), (t2, 2)):
            txn.set(value, 1, 10 + number)
            txn.set(value, 2, 20 + number)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(committed, t1)
            nursery.start_soon(committed, t2)
        if "committed" in (t1.outcome, t2.outcome):
            break
    assert "committed" in (t1.outcome, t2.outcome)
    return await state(db) not in ([11, 21], [12, 22])


async def aborted_read(mode: Mode, db: perco.Database) -> bool:
    """It has come as far as it could, all its locks stand, when it is aborted."""
    t1 = await db.begin()
    t1.set(value, 1, 101)
    gate = await gated(db, "commit")
    seen: list[int | None] = []

    async def read(txn: perco.Transaction) -> None:
        seen.append(await mode.get(txn, 1))

    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def commit() -> None:
            with scope:
                await t1.commit()

        nursery.start_soon(commit)
        await gate.reached()
        nursery.start_soon(read, await db.begin())
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
    assert t1.outcome == "aborted"
    await read(await db.begin())
    assert len(seen) == 2
    return 101 in seen


async def intermediate_read(mode: Mode, db: perco.Database) -> bool:
    t1, seen = await db.begin(), []
    t1.set(value, 1, 101)
    seen.append(await mode.get(await db.begin(), 1))
    t1.set(value, 1, 11)
    assert await committed(t1)
    seen.append(await mode.get(await db.begin(), 1))
    assert seen[-1] == 11
    return 101 in seen


async def circular_information_flow(mode: Mode, db: perco.Database) -> bool:
    t1, t2 = await db.begin(), await db.begin()
    t1.set(value, 1, 11)
    t2.set(value, 2, 22)
    seen = [await mode.get(t1, 2), await mode.get(t2, 1)]
    return seen == [22, 11] and [await committed(t1), await committed(t2)] == [True, True]


async def observed_transaction_vanishes(mode: Mode, db: perco.Database) -> bool:
    t1 = await db.begin()
    t1.set(value, 1, 11)
    t1.set(value, 2, 19)
    assert await committed(t1)
    t3 = await db.begin()
    seen = [await mode.get(t3, 1)]
    t2 = await db.begin()
    t2.set(value, 1, 12)
    t2.set(value, 2, 18)
    assert await committed(t2)
    seen += [await mode.get(t3, 2), await mode.get(t3, 1)]
    return await committed(t3) and seen != [11, 19, 11]


async def predicate_many_preceders(mode: Mode, db: perco.Database) -> bool:
    t1, t2 = await db.begin(), await db.begin()
    seen = [await where(t1, lambda number: number == 30)]
    t2.set(value, 3, 30)
    assert await committed(t2)
    seen.append(await where(t1, lambda number: number % 3 == 0))
    return await committed(t1) and seen != [[], []]


async def lost_update(mode: Mode, db: perco.Database) -> bool:
    t1, t2 = await db.begin(), await db.begin()
    for txn in (t1, t2):
        txn.set(value, 1, (await mode.get(txn, 1) or 0) + 1)
    both = [await committed(t1), await committed(t2)]
    assert any(both)
    return all(both)


async def read_skew(mode: Mode, db: perco.Database) -> bool:
    t1, t2 = await db.begin(), await db.begin()
    seen = [await mode.get(t1, 1)]
    t2.set(value, 1, 12)
    t2.set(value, 2, 18)
    assert await committed(t2)
    seen.append(await mode.get(t1, 2))
    return await committed(t1) and seen != [10, 20]


async def write_skew(mode: Mode, db: perco.Database) -> bool:
    t1, t2 = await db.begin(), await db.begin()
    for txn in (t1, t2):
        assert [await mode.get(txn, 1), await mode.get(txn, 2)] == [10, 20]
    t1.set(value, 1, 11)
    t2.set(value, 2, 21)
    both = [await committed(t1), await committed(t2)]
    assert any(both)
    return all(both)


async def write_skew_by_predicate(mode: Mode, db: perco.Database) -> bool:
    t1, t2 = await db.begin(), await db.begin()
    for txn in (t1, t2):
        assert await where(txn, lambda number: number % 3 == 0) == []
    t1.set(value, 3, 30)
    t2.set(value, 4, 42)
    both = [await committed(t1), await committed(t2)]
    assert any(both)
    return all(both)


async def read_only_transaction(mode: Mode, db: perco.Database) -> bool:
    """Of two that would be serializable by themselves, a third, which only reads, sees the later one alone."""
    t2 = await db.begin()
    assert [await mode.get(t2, 1), await mode.get(t2, 2)] == [10, 20]
    t1 = await db.begin()
    t1.set(value, 2, (await mode.get(t1, 2) or 0) + 5)
    assert await committed(t1)
    async with db.snapshot() as t3:
        assert [await t3.get(value, 1), await t3.get(value, 2)] == [10, 25]
    t2.set(value, 1, 0)  # it would have decided otherwise, had it come after t1
    return await committed(t2)


MODES: Final = [
    Mode("by default"),
    Mode("read locks", lock=True),
    Mode("serializable", isolation="serializable"),
]
ANOMALIES: Final[dict[str, Callable[[Mode, perco.Database], Awaitable[bool]]]] = {
    "G0 (dirty write)": dirty_write,
    "G1a (aborted read)": aborted_read,
    "G1b (intermediate read)": intermediate_read,
    "G1c (circular information flow)": circular_information_flow,
    "OTV (observed transaction vanishes)": observed_transaction_vanishes,
    "PMP (predicate-many-preceders)": predicate_many_preceders,
    "P4 (lost update)": lost_update,
    "G-single (read skew)": read_skew,
    "G2-item (write skew)": write_skew,
    "G2 (write skew by a predicate)": write_skew_by_predicate,
    "G2 (seen by a read-only transaction)": read_only_transaction,
}


async def shows(anomaly: str, mode: Mode) -> bool:
    async with mode.opened() as db:
        shown = await ANOMALIES[anomaly](mode, db)
        await trio.testing.wait_all_tasks_blocked()
    return shown


async def table() -> str:
    """As it stands in the page."""
    lines = [f"| | {' | '.join(mode.name for mode in MODES)} |", "|---|" + "---|" * len(MODES)]
    for anomaly in ANOMALIES:
        cells = ["**possible**" if await shows(anomaly, mode) else "prevented" for mode in MODES]
        lines.append(f"| {anomaly} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def written(page: str, table: str) -> str:
    """The page with this table in it."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(), trio.run(table)))


if __name__ == "__main__":
    sys.exit(main())
