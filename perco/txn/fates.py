"""Which transactions of this process are alive, and the outcomes of the others.

L1  In one process a transaction is alive if and only if its start_ts is in the live set: from before its first
    prewrite until its fate is settled. When a store is opened the set is empty, so all its locks are dead.

A transaction that meets a live one's lock waits here, without polling. Fates of the last transactions are remembered,
so that a reader that meets a lock which is about to be cleared need not ask.

L2  If several processes share a store, a process cannot know whether another's transaction lives: `exact` is False, and
    `lives_elsewhere` asks. Then a transaction may be taken for dead and commit nevertheless, unless it is rolled back.
"""

from __future__ import annotations

import trio

from perco.txn.records import Lock

_REMEMBERED = 1 << 15  # of the newest; as many of the generation before


class Fates:
    """Loop thread only."""

    __slots__ = ("_alone", "_known", "_live", "_older", "doubtful", "observed")

    exact = True  # a transaction that is not alive here will surely not commit any more

    def __init__(self) -> None:
        self._alone = True
        self._live: dict[int, trio.Event | None] = {}
        self._known: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self.doubtful: set[int] = set()  # ended as CommitUnknown: a commit that was sent may still arrive (T4)
        # N7: transactions that have written observed cells, or are removing notify cells, and are not yet done with
        # it: while this is 0, no notify cell can appear.
        self.observed = 0

    @property
    def alone(self) -> bool:
        """Whether all who read the store's rows ask this process: so what commits in one step is known to them (C2)."""
        return self._alone

    def not_alone(self) -> None:
        """Others read rows in other processes."""
        self._alone = False

    def begin(self, start_ts: int) -> None:
        self._live[start_ts] = None

    def alive(self, start_ts: int) -> bool:
        return start_ts in self._live

    def live(self) -> int:
        return len(self._live)

    async def lives_elsewhere(self, start_ts: int, lock: Lock) -> bool:
        """Where this is not `exact`: whether it lives in another process, to judge by its lock, the primary's if it
        has one (L1)."""
        return False

    def settle(self, start_ts: int, fate: int | None) -> None:
        """`fate`: commit_ts, 0 for aborted, None for unknown. Wakes whoever waits."""
        event = self._live.pop(start_ts, None)
        if fate is None:
            self.doubtful.add(start_ts)
        else:
            self.learn(start_ts, fate)
        if event is not None:
            event.set()

    def end(self, start_ts: int) -> None:
        """A transaction that runs in another process is over, however that went."""
        event = self._live.pop(start_ts, None)
        if event is not None:
            event.set()

    def learn(self, start_ts: int, fate: int) -> None:
        """A decided fate never changes; the oldest are forgotten."""
        known = self._known
        before = known.get(start_ts, self._older.get(start_ts))
        assert before is None or before == fate, f"T1: {start_ts} has two fates: {before} and {fate}"
        known[start_ts] = fate
        self.doubtful.discard(start_ts)
        if len(known) > _REMEMBERED:
            self._older, self._known = known, {}

    def known(self, start_ts: int) -> int | None:
        found = self._known.get(start_ts)
        return self._older.get(start_ts) if found is None else found

    async def wait(self, start_ts: int) -> None:
        """Until the transaction is no longer alive."""
        if start_ts not in self._live:
            await trio.lowlevel.checkpoint()
            return
        event = self._live[start_ts]
        if event is None:
            event = self._live[start_ts] = trio.Event()
        await event.wait()
