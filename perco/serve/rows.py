"""Clients' reads and writes: the calls of a session that go to the tablets.

C4  A read at a timestamp waits for one-step commits at or below it.
D8  A part of a call that would have to wait is answered with None: its caller asks again, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from perco.database.parts import Parts
from perco.errors import StoreError
from perco.protocol.records import observer_of
from perco.rpc.channel import WireOptions
from perco.rpc.peer import Peer
from perco.serve.messages import (
    must_be_leaves,
    pack_verdict,
    read_mutations,
    read_scan,
)
from perco.serve.sessions import Session, Sessions
from perco.storage import NOTIFY, WRITE, Failed, Mutation, OwnerStore, ReadRequest, RowCells, Verdict
from perco.storage.call import Call
from perco.storage.walking import Space
from perco.txn.entered import Entry
from perco.txn.resolver import Hint

_LEAF_CELLS: Final = 10_000  # of one answer: under a megabyte, if they are short


class Rows:
    """Loop thread only.

    Attributes:
        by: the session whose commit made the notify cells that are being announced.
    """

    def __init__(self, parts: Parts, store: OwnerStore, sessions: Sessions, options: WireOptions) -> None:
        self._parts, self._store, self._sessions, self._options = parts, store, sessions, options
        self._prompt, self._space = store.prompt, Space()
        self.by: Session | None = None

    def reads(self, session: Session, peer: Peer, id: int, asked: Any) -> None:
        """Answer reads of several callers. The answer to a part is None if it would have to wait (C4), or would make
        the whole answer too long (D8)."""
        parts = self._parts
        meets = bool(parts.driver.entered.cells)
        free = [i for i, requests in enumerate(asked) if not (meets and self.entered(session, requests))]

        def answer(found: list[RowCells]) -> None:
            answers: list[Any] = [None] * len(asked)
            at = 0
            for i in free:
                answers[i] = found[at : at + len(asked[i])]
                at += len(asked[i])
                if at > len(found):
                    answers[i] = None
            peer.reply(id, answers)

        self._find(peer, id, [request for i in free for request in asked[i]], answer)

    def read(self, session: Session, peer: Peer, id: int, requests: Any) -> None:
        parts = self._parts
        if parts.driver.entered.cells and (entries := self.entered(session, requests)):
            self._after(entries, peer, id, lambda: self.read(session, peer, id, requests))
            return
        self._find(peer, id, requests, lambda found: peer.reply(id, found))

    def find_now(self, requests: Sequence[ReadRequest]) -> list[RowCells] | None:
        """Read, if the store answers without an await; otherwise returns None."""
        return None if self._prompt is None else self._prompt.find_first(requests, self._options.part_bytes)

    async def find(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        """Read as many of the rows as one message holds."""
        found = self.find_now(requests)
        return await self._store.read_first(requests, self._options.part_bytes) if found is None else found

    def _find(self, peer: Peer, id: int, requests: Any, answer: Callable[[list[RowCells]], object]) -> None:
        """Read; at once, if the store answers without an await (C4)."""
        if (found := self.find_now(requests)) is not None:
            answer(found)
            return

        async def run() -> None:
            try:
                found = await self.find(requests)
                await peer.room()
                answer(found)
            except Exception as error:
                peer.fail(id, error)

        self._parts.background.spawn(run)

    def entered(self, session: Session | None, requests: Any) -> list[Entry]:
        """C4: the entries for the cells of a read, at or below its timestamp, except those of the session's own commits
        whose outcome is unknown (T4). The read may be the one that finds out this outcome; then it would wait for
        itself. `session`: None, if it is certainly another read."""
        cells, left = self._parts.driver.entered.cells, self._parts.driver.entered.left
        found = []
        for table, row, queries in requests:
            for group, column, _, to_ts, _ in queries:
                if group == WRITE:
                    entry = cells.get((table, row, column))
                    if entry is None or entry.commit_ts > to_ts:
                        continue
                    if session is None or entry.start_ts not in left or entry.start_ts not in session.open:
                        found.append(entry)
        return list(dict.fromkeys(found))

    def _after(self, entries: Sequence[Entry], peer: Peer, id: int, go_on: Callable[[], None]) -> None:
        """C4: call `go_on` once these entries have left."""

        async def run() -> None:
            try:
                for entry in entries:
                    await self._parts.driver.past(entry)
                await peer.room()
                go_on()
            except Exception as error:
                peer.fail(id, error)

        self._parts.background.spawn(run)

    def scan(self, session: Session, peer: Peer, id: int, packed: Any) -> None:
        request = read_scan(packed)
        parts = self._parts

        async def run() -> None:
            try:
                for query in request.queries:
                    if query.group == WRITE and parts.driver.entered.cells:
                        columns = query.columns if query.columns is not None else _Every()
                        for entry in parts.driver.entered.within(
                            request.table, request.start, request.stop, columns, query.to_ts
                        ):
                            await parts.driver.past(entry)
                await peer.room()
                prompt = self._prompt
                page = await self._store.scan(request) if prompt is None else prompt.find_page(request)
                peer.reply(id, (page.rows, page.next))
            except Exception as error:
                peer.fail(id, error)

        parts.background.spawn(run)

    def leaves(self, session: Session, peer: Peer, id: int, asked: Any) -> None:
        """Answer with leaves of a tablet that have all commits up to a timestamp (C4), or with None if this process has
        no file of it."""
        table, start, stop, ts, cells = must_be_leaves(asked)

        async def run() -> None:
            try:
                for entry in self._parts.driver.entered.within(table, start, stop, _Every(), ts):
                    await self._parts.driver.past(entry)
                await peer.room()
                prompt = self._prompt
                few = min(cells, _LEAF_CELLS)
                leaves = None if prompt is None else prompt.find_leaves(table, start, stop, few, self._space)
                peer.reply(id, None if leaves is None else leaves._replace(data=bytes(leaves.data)))
            except Exception as error:
                peer.fail(id, error)

        self._parts.background.spawn(run)

    def apply(self, session: Session, peer: Peer, id: int, packed: Any) -> None:
        mutations = read_mutations(packed)
        self.submit(
            session,
            mutations,
            lambda verdicts: peer.reply(id, [pack_verdict(verdict) for verdict in verdicts]),
        )

    def submit(
        self, session: Session, mutations: Sequence[Mutation], answer: Callable[[Sequence[Verdict]], object]
    ) -> None:
        """Queue mutations; `answer` is called with the verdicts, on the loop."""
        if not self._store.groups and any(len(mutation.rows) != 1 for mutation in mutations):
            raise ValueError("a mutation of several rows, which this store does not support")
        notifies = _notifies(mutations)

        def told(verdicts: Sequence[Verdict]) -> None:
            answer(verdicts)
            self._sessions.applied(session)
            if notifies:
                self.by = session
                self._parts.driver.notified(_notified(mutations))
                self.by = None
            elif notifies is not None:
                self._parts.driver.quiet()

        if self._prompt is None:
            session.applying += 1
            self._parts.background.spawn(partial(self._apply, mutations, told))
            return
        call = Call(None, len(mutations), told)
        self._prompt.submit(mutations, call)
        session.applying += 1
        if not call.waiting:  # a store in memory answers at once
            told(call.verdicts)  # type: ignore[arg-type]

    async def _apply(self, mutations: Sequence[Mutation], told: Callable[[Sequence[Verdict]], None]) -> None:
        try:
            verdicts: Sequence[Verdict] = await self._store.apply(mutations)
        except StoreError as error:  # nothing was sent
            verdicts = [Failed(error)] * len(mutations)
        told(verdicts)


def _notifies(mutations: Sequence[Mutation]) -> bool | None:
    """Whether mutations put notify cells (True), only remove some (False), or do neither (None)."""
    found = None
    for mutation in mutations:
        for _, _, writes in mutation.rows:
            for group, _, _, value in writes:
                if group == NOTIFY:
                    if value is not None:
                        return True
                    found = False
    return found


def _notified(mutations: Sequence[Mutation]) -> list[Hint]:
    """Where mutations put notify cells."""
    found = []
    for mutation in mutations:
        for row, _, writes in mutation.rows:
            put = [observer_of(column) for group, column, _, value in writes if group == NOTIFY and value is not None]
            if put:
                found.append((mutation.table, row, tuple(put)))
    return found


class _Every:
    """All columns."""

    def __contains__(self, column: object) -> bool:
        return True
