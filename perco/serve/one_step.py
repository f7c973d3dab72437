"""One-step commits that the owner makes for its clients.

As long as all goes as usual, a commit takes a lane, as in `perco/txn/lane.py`, without a `Commit`.

C2  Check, draw and enter without an await in between.
C3  An entry leaves when its write transaction has ended, or when the commit's outcome has been read from the store.
D8  The commits of several transactions go to the tablets in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from perco.database.parts import Parts
from perco.errors import SessionEnded
from perco.protocol.commit import Commit, State
from perco.protocol.mutations import Header, Intent, one_step
from perco.protocol.records import BARE, READ
from perco.rpc.peer import Peer
from perco.serve.messages import (
    MET,
    STALE,
    TOLD,
    pack_verdict,
    read_commit,
    read_part,
)
from perco.serve.rows import Rows
from perco.serve.sessions import Session
from perco.storage import APPLIED, Verdict
from perco.txn.entered import Entry, Where
from perco.txn.lane import in_the_way, leave


class OneStep:
    """Loop thread only. `refusal`: why commits cannot be made in one step; "": they can."""

    def __init__(self, parts: Parts, rows: Rows, refusal: str) -> None:
        self._parts, self._rows, self._refusal = parts, rows, refusal

    def commit(self, session: Session, peer: Peer, id: int, packed: Any) -> None:
        header, part, version = read_part(packed, self._parts.oracle.last)
        if not self.lane(
            session, header, part, version, lambda commit_ts, told: peer.reply(id, (TOLD, told, commit_ts))
        ):
            self._in_one_step(session, peer, id, Commit(header, [part], one_step=True), version)

    def commits(self, session: Session, peer: Peer, id: int, asked: Any) -> None:
        """Make the commits of several transactions in one call to the tablets; a commit that would have to wait is
        answered with None (D8)."""
        commits = [read_commit(each, self._parts.oracle.last) for each in asked]
        if len({commit.header.start_ts for commit, _ in commits}) != len(commits):
            raise ValueError("the same transaction twice")
        for commit, _ in commits:
            if (ended := self._ends_commit(session, commit.header.start_ts)) is not None:
                peer.fail(id, ended)
                return
        answers: list[Any] = [None] * len(commits)
        entered: list[int] = []
        try:
            for i, (commit, version) in enumerate(commits):
                if self._parts.driver.entered.in_the_way(commit) is None:
                    answers[i] = self._enter(commit, version)
                    if answers[i] == ():
                        entered.append(i)
        except BaseException:
            self._leave(commits[i][0] for i in entered)
            raise

        def told(verdicts: Sequence[Any]) -> None:
            for i, answer in zip(entered, verdicts, strict=True):
                answers[i] = answer
            peer.reply(id, answers)

        if entered:
            self._write(session, [commits[i][0] for i in entered], told)
        else:
            peer.reply(id, answers)

    def lane(
        self,
        session: Session,
        header: Header,
        part: Sequence[Intent],
        version: int,
        answer: Callable[[int, Any], object],
    ) -> bool:
        """Make a commit; `answer` is called with its commit_ts and the packed verdict. Returns False if nothing was
        done, because the commit would have to wait, is refused, or writes no cell (N5)."""
        driver, oracle, start_ts = self._parts.driver, self._parts.oracle, header.start_ts
        entered, cells = driver.entered.cells, [intent[:3] for intent in part if intent.kind < READ]
        if part[0].kind == BARE or oracle.catalogue_version > version:
            return False
        if in_the_way(entered, cells) or self._ends_commit(session, start_ts) is not None:
            return False
        commit_ts = oracle.draw_nowait()
        if not commit_ts:
            return False
        entry = Entry(commit_ts, start_ts, header.primary)
        for where in cells:
            entered[where] = entry
        driver.writing[commit_ts] = None

        def told(verdicts: Sequence[Verdict]) -> None:
            verdict = verdicts[0]
            if verdict is not APPLIED:
                commit = Commit(header, [part], one_step=True)
                commit.drawn(commit_ts)
                self._written(commit, verdict)
            else:
                leave(entered, cells, entry)
                self._settle(start_ts, commit_ts)
            answer(commit_ts, pack_verdict(verdict))

        try:
            self._rows.submit(session, (one_step(header, part, commit_ts),), told)
        except BaseException:
            leave(entered, cells, entry)
            driver.written(commit_ts)
            raise
        return True

    def _in_one_step(self, session: Session, peer: Peer, id: int, commit: Commit, version: int) -> None:
        if (ended := self._ends_commit(session, commit.header.start_ts)) is not None:
            peer.fail(id, ended)
            return
        met = self._parts.driver.entered.in_the_way(commit)
        if met is not None:
            self._meet(session, peer, id, commit, version, met)
            return
        answer = self._enter(commit, version)
        if answer is None:
            self._extend(session, peer, id, commit, version)
        elif answer:
            peer.reply(id, answer)
        else:
            self._write(session, [commit], lambda answers: peer.reply(id, answers[0]))

    def _leave(self, commits: Iterable[Commit]) -> None:
        """C3: remove the entries of commits that were never queued."""
        driver = self._parts.driver
        for commit in commits:
            driver.entered.leave(commit)
            driver.written(commit.commit_ts)

    def _ends_commit(self, session: Session, start_ts: int) -> SessionEnded | None:
        """The reason why this session cannot make this transaction's commit in one step; None: it can."""
        if self._refusal:
            return SessionEnded(self._refusal)
        if session.ended:  # R7: it has ended while the call waited
            return SessionEnded()
        if start_ts not in session.open and self._parts.fates.alive(start_ts):
            # L1: another client's transaction, or one of a former session
            return SessionEnded("a transaction of another session is under way")
        return None

    def _enter(self, commit: Commit, version: int) -> tuple[int, ...] | None:
        """C2: check, draw and enter, without an await in between. Returns () if the commit was entered. If not, returns
        the answer, or None if no timestamp is available at once."""
        driver, oracle = self._parts.driver, self._parts.oracle
        commit_ts = oracle.draw_nowait()
        if not commit_ts:
            return None
        if oracle.catalogue_version > version:  # N10
            return STALE, oracle.catalogue_version
        commit.drawn(commit_ts)
        driver.entered.enter(commit)
        driver.writing[commit_ts] = None
        return ()

    def _write(self, session: Session, commits: Sequence[Commit], answer: Callable[[list[Any]], object]) -> None:
        """Queue commits that were entered; `answer` is called with the answers."""

        def told(verdicts: Sequence[Verdict]) -> None:
            for commit, verdict in zip(commits, verdicts, strict=True):
                self._written(commit, verdict)
            answer(
                [
                    (TOLD, pack_verdict(verdict), commit.commit_ts)
                    for commit, verdict in zip(commits, verdicts, strict=True)
                ]
            )

        try:
            self._rows.submit(session, [commit.primary_commit() for commit in commits], told)
        except BaseException:
            self._leave(commits)
            raise

    def _written(self, commit: Commit, verdict: Verdict) -> None:
        """C3: note that the write transaction of a one-step commit has ended, or that its outcome is unknown."""
        driver = self._parts.driver
        commit.primary_told(verdict)
        if commit.state is State.ASK:
            driver.entered.leave_behind(commit)
            driver.leave_orphans()
        else:
            driver.entered.leave(commit)
        if commit.state is State.COMMITTED:
            self._settle(commit.header.start_ts, commit.commit_ts)
        else:
            driver.written(commit.commit_ts)

    def _settle(self, start_ts: int, commit_ts: int) -> None:
        """Note that a transaction has committed, and that its commit is visible."""
        fates = self._parts.fates
        if fates.known(start_ts) is None:
            fates.settle(start_ts, commit_ts)
        self._parts.driver.written(commit_ts)

    def _meet(
        self, session: Session, peer: Peer, id: int, commit: Commit, version: int, met: tuple[Where, Entry]
    ) -> None:
        """Another transaction's commit has an entry for one of the cells: wait for that commit here, while this one has
        no entries (T7)."""
        where, entry = met

        async def run() -> None:
            try:
                fate = await self._parts.driver.past(entry)
                if fate >= commit.header.start_ts:
                    peer.reply(id, (MET, where, entry.commit_ts))
                    return
                self._in_one_step(session, peer, id, commit, version)
            except Exception as error:
                peer.fail(id, error)

        self._parts.background.spawn(run)

    def _extend(self, session: Session, peer: Peer, id: int, commit: Commit, version: int) -> None:
        async def run() -> None:
            try:
                await self._parts.oracle.extend()
                self._in_one_step(session, peer, id, commit, version)
            except Exception as error:
                peer.fail(id, error)

        self._parts.background.spawn(run)
