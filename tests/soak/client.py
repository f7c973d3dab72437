"""A client process: `python -m tests.soak.client URL JOURNAL NUMBER SEED`. It appends to lists until SIGTERM.

It writes each transaction to the journal twice, as lines of `perco.testing.history`: before the commit, as "unknown",
and when the outcome is known. So the journal of a killed process holds every append that may have been committed.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any, Final

import trio

import perco
from perco.errors import CommitUnknown, PercoError, Unavailable
from perco.testing.history import FAIL, OK, UNKNOWN, Ops, Transaction

lists = perco.Table("lists", key=perco.TEXT, splits=[f"{i:02}" for i in range(20, 100, 20)])
items = lists.column("items", perco.MSGPACK)
copied = lists.column("copied", perco.MSGPACK)
marks = perco.Table("marks", key=perco.INT64)  # a row for each transaction that appends
mark = marks.column("mark", perco.INT64)
seen = marks.column("seen", perco.INT64)
SCHEMA: Final = perco.Schema(lists, marks)

CHAINS: Final = 100  # lists that are appended to at a time
LENGTH: Final = 50  # then a list is full, and another follows
TASKS: Final = 16
NUMBERS: Final = 10**7  # of one process; no two processes append the same number
_PAUSE_S: Final = 0.05


@SCHEMA.observe(items, id="copy")
async def copy(txn: perco.Transaction, change: perco.Change[str, Any]) -> None:
    """Copy the list into another column."""
    txn.set(copied, change.key, await txn.get(items, change.key))


@SCHEMA.observe(mark, id="see")
async def see(txn: perco.Transaction, change: perco.Change[int, int]) -> None:
    """Copy the mark. Nothing else is ever written to its row, so a notification that is lost is not made good."""
    txn.set(seen, change.key, change.value or 0)


class Client:
    """Attributes: `stopping`: end once the transactions in flight have ended."""

    def __init__(self, db: perco.Database, journal: IO[str], number: int, seed: str) -> None:
        self._db, self._journal, self._name = db, journal, str(number)
        self._next = number * NUMBERS
        self._full = [0] * CHAINS  # for each chain, how many of its lists are full
        self._random = random.Random(f"{seed} {number}")
        self.stopping = False

    async def run(self) -> None:
        """Run `TASKS` transactions at a time."""
        while not self.stopping:
            try:
                await self._find_lists()
                break
            except PercoError:  # there is no server for a moment
                await trio.sleep(_PAUSE_S)
        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(self._task)

    async def _find_lists(self) -> None:
        async with self._db.snapshot() as snap:
            async for row in snap.scan(lists, columns=[items]):
                chain, number = map(int, row.key.split("."))
                self._full[chain] = max(self._full[chain], number)

    async def _task(self) -> None:
        while not self.stopping:
            await self._one()

    async def _one(self) -> None:
        self._next += 1
        number, ops, begin = self._next, Ops(), time.monotonic()
        txn: Any = None
        status, token = FAIL, ""
        try:
            async with self._db.transaction() as txn:
                await self._body(txn, ops, number)
                self._note(number, begin, UNKNOWN, ops)
        except CommitUnknown as error:
            token = error.token
        except PercoError:
            await trio.sleep(_PAUSE_S)
        else:
            status = OK
        if token:
            status = await self._outcome(token)
        self._note(number, begin, status, ops)

    async def _body(self, txn: perco.Transaction, ops: Ops, number: int) -> None:
        """Read up to three lists; in two of three transactions, append to most of them."""
        appends = self._random.random() < 0.66
        for chain in self._random.sample(range(CHAINS), self._random.choice((1, 2, 2, 3))):
            key = f"{chain:02}.{self._full[chain]}"
            found = await txn.get(items, key) or []
            ops.read(key, found)
            if len(found) >= LENGTH:
                self._full[chain] = max(self._full[chain], int(key[3:]) + 1)
            elif appends and self._random.random() < 0.8:
                ops.append(key, number)
                txn.set(items, key, [*found, number])
                txn.set(mark, number, number)

    async def _outcome(self, token: str) -> str:
        while True:
            try:
                return OK if await self._db.outcome(token) else FAIL
            except CommitUnknown as error:
                if error.for_good:
                    return UNKNOWN
            except PercoError:
                pass  # there is no server for a moment
            await trio.sleep(_PAUSE_S)

    def _note(self, number: int, begin: float, status: str, ops: Ops) -> None:
        made = Transaction(number, self._name, begin, time.monotonic(), status, tuple(ops.made))
        self._journal.write(made.line() + "\n")
        self._journal.flush()


def options(call_s: float = 2.0) -> perco.Options:
    """The options of a client that owns nothing, and asks after `call_s` at the latest whether its session has
    ended."""
    return perco.Options(
        postgresql=perco.options.PostgresqlOptions(own=False),
        bigtable=perco.options.BigtableOptions(own=False, call_s=call_s),
    )


async def _append(url: str, journal: IO[str], number: int, seed: str) -> None:
    """Append until SIGTERM."""
    async with perco.open(url, SCHEMA, options=options()) as db, trio.open_nursery() as nursery:
        client = Client(db, journal, number, seed)

        async def end() -> None:
            with trio.open_signal_receiver(signal.SIGTERM) as signals:
                async for _ in signals:
                    client.stopping = True

        nursery.start_soon(end)
        await client.run()
        nursery.cancel_scope.cancel()


def main(url: str, journal: str, number: str, seed: str) -> None:
    with Path(journal).open("a", encoding="utf-8") as file:
        while True:
            try:
                trio.run(_append, url, file, int(number), seed)
            except Unavailable:
                if file.tell():
                    raise
                continue  # a call hung while it opened the store
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
