"""Operations on single cells (C9, T11): what clients of the simulation do with them, and what must hold afterwards.

    count   clients add 1: no two of them get the same sum, and the sums are as many as the counter says
    turn    clients replace an expected number by one of their own (`put_if`): no number is replaced twice
    log     clients append numbers: each is there once, or not at all if the operation has failed
    flag    clients put and delete: the last operation, by commit_ts, decides

An operation whose outcome is not known may have been carried out, but only once. An observer follows the counters.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Final

from perco.database.database import Database
from perco.errors import TransientError
from perco.testing.world import World
from perco.txn.snapshot import Snapshot

COUNTERS: Final = ("c0", "c1")
_UNDECIDED_MAX: Final = 64  # operations on flags whose outcome is not known, for each flag


class Counting:
    """Shared by all clients of a run.

    Attributes: `done`: how many operations were carried out, by name.
    """

    done: Counter[str]

    def __init__(self, problem: Callable[[str], None]) -> None:
        self._problem = problem
        self.done = Counter()
        self._number = 0
        self._sums: dict[str, set[int]] = {key: set() for key in COUNTERS}  # that clients got
        self._replaced: dict[str, set[int | None]] = {key: set() for key in COUNTERS}  # numbers that had their turn
        self._appended: dict[str, set[int]] = {key: set() for key in COUNTERS}
        self._flags: dict[str, dict[int, int | None]] = {key: {} for key in COUNTERS}  # what was put, by commit_ts
        # Operations whose outcome is not known: how many, or with which numbers.
        self._maybe_added: Counter[str] = Counter()
        self._maybe_appended: dict[str, set[int]] = {key: set() for key in COUNTERS}
        self._maybe_flagged: dict[str, list[int | None]] = {key: [] for key in COUNTERS}

    async def act(self, db: Database, world: World, rng: random.Random) -> None:
        """One operation. Raises: as `Database.run`."""
        key = rng.choice(COUNTERS)
        act = rng.choice((self._add, self._add, self._turn, self._append, self._flag))
        await act(db, world, key, rng)
        self.done[act.__name__] += 1

    async def _add(self, db: Database, world: World, key: str, _: random.Random) -> None:
        self._maybe_added[key] += 1
        try:
            found = await db.add(world.count, key, 1)
        except TransientError:
            self._maybe_added[key] -= 1
            raise
        self._maybe_added[key] -= 1
        if found in self._sums[key]:
            self._problem(f"T1, C9: two additions to {key} have given {found}")
        self._sums[key].add(found)

    async def _turn(self, db: Database, world: World, key: str, rng: random.Random) -> None:
        async with db.snapshot() as snap:
            seen = await snap.get(world.turn, key)
        self._number += 1
        expected = seen if rng.random() < 0.8 else -self._number  # which is never put
        if await db.put_if(world.turn, key, self._number, expected=expected):
            if expected in self._replaced[key] or expected != seen:
                self._problem(f"T1, C9: {expected} in {key} was replaced by {self._number}, and had been before")
            self._replaced[key].add(expected)

    async def _append(self, db: Database, world: World, key: str, _: random.Random) -> None:
        self._number += 1
        number = self._number
        self._maybe_appended[key].add(number)
        try:
            await db.append(world.log, key, [number])
        except TransientError:
            self._maybe_appended[key].discard(number)
            raise
        self._maybe_appended[key].discard(number)
        self._appended[key].add(number)

    async def _flag(self, db: Database, world: World, key: str, rng: random.Random) -> None:
        self._number += 1
        value = self._number if rng.random() < 0.7 else None
        maybe = self._maybe_flagged[key]
        if len(maybe) >= _UNDECIDED_MAX:
            return
        maybe.append(value)
        try:
            at = await (db.put(world.flag, key, value) if value is not None else db.delete(world.flag, key))
        except TransientError:
            maybe.remove(value)
            raise
        maybe.remove(value)
        if at in self._flags[key]:
            self._problem(f"O1: two operations on {key} have committed at {at}")
        self._flags[key][at] = value

    async def verify(self, snap: Snapshot, world: World) -> None:
        """Check, once the run has come to rest, what the operations have left."""
        for key in COUNTERS:
            count = await snap.get(world.count, key) or 0
            sums, maybe = self._sums[key], self._maybe_added[key]
            if not len(sums) <= count <= len(sums) + maybe or max(sums, default=0) > count:
                self._problem(
                    f"T1, C9: {key} is {count}, after {len(sums)} additions and {maybe} that may have been made"
                )
            doubled = await snap.get(world.doubled, key) or 0
            if doubled != 2 * count:
                self._problem(f"N1, C9: {key} is {count}, and doubled by its observer {doubled}")
            found = Counter(await snap.get(world.log, key) or ())
            missing, strange = self._appended[key] - found.keys(), found.keys() - self._appended[key]
            if missing or strange - self._maybe_appended[key] or max(found.values(), default=1) > 1:
                self._problem(f"T1, C9: the log of {key} is {found}; missing are {missing}, and {strange} too many")
            flags = self._flags[key]
            last = flags[max(flags)] if flags else None
            flag = await snap.get(world.flag, key)
            if flag != last and flag not in self._maybe_flagged[key]:
                self._problem(f"T1, C9: the flag {key} is {flag}, and should be {last}")
