"""Which transactions of this process are alive, and the outcomes of recent ones.

L1  In one process a transaction is alive if and only if its start_ts is in the live set: from before its first
    prewrite until its outcome is settled. When a store is opened, the set is empty, so all its locks are dead.

A transaction that encounters the lock of a live one waits here, without polling. The fates (outcomes) of recent
transactions are remembered, so that a reader does not have to look up the outcome for a lock that is about to go.

L2  If several processes share a store, the live set does not show whether another process's transaction is alive.
    `exact` is then False, and `lives_elsewhere` finds out. In that case, a transaction that is presumed dead may still
    commit, unless it is rolled back.
"""

from __future__ import annotations

import trio

from perco.protocol.records import Lock

_REMEMBERED = 1 << 15  # fates in the newest generation; the generation before it has as many


class Fates:
    """Loop thread only."""

    observed: int

    __slots__ = ("_alone", "_known", "_live", "_older", "doubtful", "observed")

    exact = True  # a transaction that is not alive here can never commit

    def __init__(self) -> None:
        self._alone = True
        self._live: dict[int, trio.Event | None] = {}
        self._known: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self.doubtful: set[int] = set()  # ended as CommitUnknown: their commits may still arrive (T4)
        # N7: how many transactions are writing observed cells, or removing notify cells. While this is 0, no notify
        # cell can appear.
        self.observed = 0

    @property
    def alone(self) -> bool:
        """Whether all readers of the store's rows read through this process, and so see its one-step commits (C2)."""
        return self._alone

    def not_alone(self) -> None:
        """Record that other processes read rows themselves."""
        self._alone = False

    def begin(self, start_ts: int) -> None:
        self._live[start_ts] = None

    def alive(self, start_ts: int) -> bool:
        return start_ts in self._live

    def live(self) -> int:
        return len(self._live)

    async def lives_elsewhere(self, start_ts: int, lock: Lock) -> bool:
        """If `exact` is False: whether a transaction is alive in another process, judged by one of the transaction's
        locks. `lock`: the primary's lock if there is one, else another lock of the transaction (L1)."""
        return False

    def settle(self, start_ts: int, fate: int | None) -> None:
        """End a transaction, and wake the tasks that wait for it. `fate`: commit_ts; 0: aborted; None: unknown."""
        event = self._live.pop(start_ts, None)
        if fate is None:
            self.doubtful.add(start_ts)
        else:
            self.learn(start_ts, fate)
        if event is not None:
            event.set()

    def end(self, start_ts: int) -> None:
        """End a transaction that ran in another process, whatever its outcome."""
        event = self._live.pop(start_ts, None)
        if event is not None:
            event.set()

    def learn(self, start_ts: int, fate: int) -> None:
        """Remember a decided fate, which never changes; the oldest fates are forgotten."""
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
        """Wait until a transaction is no longer alive."""
        if start_ts not in self._live:
            await trio.lowlevel.checkpoint()
            return
        event = self._live[start_ts]
        if event is None:
            event = self._live[start_ts] = trio.Event()
        await event.wait()
