"""The next steps of a commit, decided on the loop from the verdicts of the previous step, without waking the commit's
task.

`Chain` leads from the last prewrite to the commit of the primary, `Settling` from a refused group to its single cells.
Each takes verdicts and returns the next mutations. A task, or the row store itself, sends these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perco.clock.oracle import Oracle
from perco.errors import TabletSplit
from perco.protocol.commit import Commit, State
from perco.storage import APPLIED, Failed, Mutation, NoReply, Verdict
from perco.txn.entered import Entered


class Chain:
    """Leads from the last prewrite's verdict straight to the primary's commit, while the commit's task still sleeps.

    T2 still holds: commit_ts is drawn only after every prewrite has been acknowledged.
    """

    entered: bool

    __slots__ = ("_commit", "_event", "_memory", "_oracle", "_sent", "_told", "_version", "entered")

    def __init__(
        self, commit: Commit, oracle: Oracle, version: int, event: Callable[[str], None] | None, memory: Entered
    ) -> None:
        self._commit, self._oracle, self._version, self._event = commit, oracle, version, event
        self._memory = memory
        self._told = self._sent = False
        self.entered = False  # C2: the primary's part is in the memory of entered cells

    def __call__(self, verdicts: Sequence[Verdict]) -> list[Mutation] | None:
        if self._sent:
            return None
        commit, oracle = self._commit, self._oracle
        self._prewritten(verdicts)
        if commit.state is not State.DRAW or commit.reads is not None or oracle.catalogue_version > self._version:
            return None
        if commit.one_step and self._memory.in_the_way(commit) is not None:
            return None
        commit_ts = oracle.draw_nowait()
        if not commit_ts:
            return None
        commit.drawn(commit_ts)
        if commit.one_step:
            self._memory.enter(commit)
            self.entered = True
        self._sent = True
        return [commit.primary_commit()]

    def ended(self, verdicts: Sequence[Verdict]) -> None:
        """Process the verdicts of the last mutations sent. Called in the commit's task, which is awake again."""
        if not self._told:
            self._prewritten(verdicts)
        if self._sent:
            self._commit.primary_told(verdicts[0])

    def _prewritten(self, verdicts: Sequence[Verdict]) -> None:
        self._told = True
        self._commit.prewrites_told(verdicts)
        if self._event is not None:
            self._event("prewrite")


class Settling:
    """Settles groups of a transaction's own cells. A group is refused if another task has settled one of its cells, or
    if a tablet split has moved some of them away (P3). Its cells are then settled one by one. Otherwise the remaining
    locks would stay, and the notifications that they stand for (N1) would not be put.

    `left`: True if some cells could not be written; later readers, or the sweeper, settle them.
    """

    groups: Sequence[Mutation]
    left: bool

    __slots__ = ("_by_cell", "groups", "left")

    def __init__(self, groups: Sequence[Mutation], by_cell: Callable[[int], list[Mutation]] | None) -> None:
        self.groups, self._by_cell = groups, by_cell
        self.left = False

    def told(self, verdicts: Sequence[Verdict]) -> list[Mutation]:
        """Process the verdicts of the last mutations sent; returns the mutations to send next."""
        by_cell, self._by_cell = self._by_cell, None
        cells: list[Mutation] = []
        for i, verdict in enumerate(verdicts):
            if verdict is APPLIED:
                continue
            split = isinstance(verdict, Failed) and isinstance(verdict.error, TabletSplit)
            if isinstance(verdict, Failed | NoReply) and not (split and by_cell is not None):
                self.left = True
            elif by_cell is not None:
                cells += by_cell(i)
        return cells
