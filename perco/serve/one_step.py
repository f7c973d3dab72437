"""One-step commits that the owner makes for its clients.

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
from perco.rpc.peer import Peer
from perco.serve.messages import (
    MET,
    STALE,
    TOLD,
    pack_verdict,
    read_commit,
)
from perco.serve.rows import Rows
from perco.serve.sessions import Session
from perco.storage import Verdict
from perco.txn.entered import Entry, Where


class OneStep:
    """Loop thread only. `refusal`: why commits cannot be made in one step; "": they can."""

    def __init__(self, parts: Parts, rows: Rows, refusal: str) -> None:
        self._parts, self._rows, self._refusal = parts, rows, refusal

    def commit(self, session: Session, peer: Peer, id: int, packed: Any) -> None:
        self._in_one_step(session, peer, id, *read_commit(packed, self._parts.oracle.last))

    def commits(self, session: Session, peer: Peer, id: int, asked: Any) -> None:
        """Make the commits of several transactions in one call to the tablets; a commit that would have to wait is
        answered with None (D8)."""
        commits = [read_commit(each, self._parts.oracle.last) for each in asked]
        if len({commit.header.start_ts for commit, _ in commits}) != len(commits):
            raise ValueError("the same transaction twice")
        for commit, _ in commits:
            if (ended := self._ends_commit(session, commit)) is not None:
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

    def decided(self, session: Session, commit: Commit, version: int, answer: Callable[[int, Any], None]) -> bool:
        """Make a commit whose value was decided in this step of the loop; `answer` is called with its commit_ts and the
        packed verdict. Returns False if nothing was done, because the commit would have to wait, or is refused."""
        if self._ends_commit(session, commit) is not None or self._parts.driver.entered.in_the_way(commit):
            return False
        if self._enter(commit, version) != ():
            return False
        self._write_one(session, commit, answer)
        return True

    def _in_one_step(self, session: Session, peer: Peer, id: int, commit: Commit, version: int) -> None:
        if (ended := self._ends_commit(session, commit)) is not None:
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
            self._write_one(session, commit, lambda commit_ts, told: peer.reply(id, (TOLD, told, commit_ts)))

    def _leave(self, commits: Iterable[Commit]) -> None:
        """C3: remove the entries of commits that were never queued."""
        driver = self._parts.driver
        for commit in commits:
            driver.entered.leave(commit)
            driver.written(commit.commit_ts)

    def _ends_commit(self, session: Session, commit: Commit) -> SessionEnded | None:
        """The reason why this session cannot make this commit in one step; None: it can."""
        if self._refusal:
            return SessionEnded(self._refusal)
        if session.ended:  # R7: it has ended while the call waited
            return SessionEnded()
        start_ts = commit.header.start_ts
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

    def _write(self, session: Session, commits: Sequence[Commit], answer: Callable[[list[Any]], None]) -> None:
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

    def _write_one(self, session: Session, commit: Commit, answer: Callable[[int, Any], None]) -> None:
        """Queue a commit that was entered; `answer` is called with its commit_ts and the packed verdict."""

        def told(verdicts: Sequence[Verdict]) -> None:
            verdict = verdicts[0]
            self._written(commit, verdict)
            answer(commit.commit_ts, pack_verdict(verdict))

        try:
            self._rows.submit(session, (commit.primary_commit(),), told)
        except BaseException:
            self._leave((commit,))
            raise

    def _written(self, commit: Commit, verdict: Verdict) -> None:
        """C3: note that the write transaction of a one-step commit has ended, or that its outcome is unknown."""
        driver, fates, start_ts = self._parts.driver, self._parts.fates, commit.header.start_ts
        commit_ts = commit.commit_ts
        commit.primary_told(verdict)
        if commit.state is State.ASK:
            driver.entered.leave_behind(commit)
            driver.leave_orphans()
        else:
            driver.entered.leave(commit)
        if commit.state is State.COMMITTED and fates.known(start_ts) is None:
            fates.settle(start_ts, commit_ts)
        driver.written(commit_ts)

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
