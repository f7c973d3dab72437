"""Faults in the code of served stores, switched on one at a time: `perco/serve`, `perco/rpc`, the real batcher."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from perco.protocol import commit, mutations
from perco.rpc import channel, framing, link, peer
from perco.serve import (
    client,
    operating,
    processes,
    remote,
    remote_rows,
    rows,
    sessions,
    starting,
    tablets,
)
from perco.serve.messages import Method, pack_verdict, read_mutations
from perco.storage import (
    APPLIED,
    LOCK,
    WRITE,
    Applied,
    LocalRowStore,
    Mutation,
    Refused,
    batching,
    fencing,
    lmdb_tablet,
    splitting,
)
from perco.tablets import splitter
from perco.testing import served as simulated
from perco.txn import operations
from perco.txn.entered import Entered
from perco.txn.shipping import LOST
from tests.testing.mutants import Mutant

SERVED: dict[str, Mutant] = {}
_SPARE = 4


def served(name: str) -> Any:
    def note(function: Mutant) -> Mutant:
        SERVED[name] = function
        return function

    return note


# ------------------------------------------------------------ timestamps


@served("O2 a caller that arrives while a draw is in flight gets a timestamp from it")
def shared_call(patch: pytest.MonkeyPatch) -> None:
    async def ask(self: remote.RemoteOracle) -> None:
        try:
            while self._waiting:
                waiters, self._waiting = sorted(self._waiting, key=lambda waiter: not waiter.starts), []
                starts = sum(waiter.starts for waiter in waiters)
                drawn: list[int] = []
                error: Exception | None = None
                try:
                    arguments = starts + _SPARE, len(waiters) - starts
                    found, version, wall_ms, last = await self._link.call(Method.DRAW, arguments, again=True)
                    self.told(version, wall_ms, last)
                    drawn = list(found)
                except Exception as failure:
                    error = failure
                spare = drawn[starts : starts + _SPARE]
                del drawn[starts : starts + _SPARE]
                self._hand_out(waiters, drawn, error)
                early = [waiter for waiter in self._waiting if waiter.starts][: len(spare)]
                self._waiting = [waiter for waiter in self._waiting if waiter not in early]
                self._hand_out(early, spare, None)
        finally:
            self._asking = False

    patch.setattr(remote.RemoteOracle, "_ask", ask)


@served("O2 the batcher gives two waiting callers the same timestamp")
def same_for_two(patch: pytest.MonkeyPatch) -> None:
    right = remote.RemoteOracle._hand_out

    def hand_out(self: remote.RemoteOracle, waiters: Any, drawn: Any, error: Any) -> None:
        right(self, waiters, list(drawn[:1]) * len(drawn), error)

    patch.setattr(remote.RemoteOracle, "_hand_out", hand_out)


@served("N10 a client ignores the catalogue version that comes with a timestamp")
def stale_catalogue(patch: pytest.MonkeyPatch) -> None:
    forgetful = property(lambda self: 0, lambda self, version: None)
    patch.setattr(remote.RemoteOracle, "catalogue_version", forgetful, raising=False)


@served("O1 a new owner starts while the previous one still serves")
def two_owners(patch: pytest.MonkeyPatch) -> None:
    """The kernel's lock on the folder prevents this."""
    right = simulated.Served._ended

    async def ended(self: Any, actor: Any) -> None:
        with trio.move_on_after(1.0 if actor.name.startswith("o.") else 1e9):
            await right(self, actor)

    patch.setattr(simulated.Served, "_ended", ended)


# ------------------------------------------------------------ batches


@served("S1 callers in a batch get each other's verdicts")
def another_verdict(patch: pytest.MonkeyPatch) -> None:
    right = lmdb_tablet.LmdbTablet._answer
    patch.setattr(
        lmdb_tablet.LmdbTablet,
        "_answer",
        lambda self, batch, verdicts: right(self, batch, [*verdicts[1:], *verdicts[:1]]),
    )


@served("T2 a reader's view is older than its timestamp")
def old_view(patch: pytest.MonkeyPatch) -> None:
    """The view that reads share stays open after the batch has been answered."""
    right = lmdb_tablet.LmdbTablet._finish

    def finish(self: Any, *how: Any) -> None:
        self.engine.end_shared = lambda: None
        try:
            right(self, *how)
        finally:
            del self.engine.end_shared

    patch.setattr(lmdb_tablet.LmdbTablet, "_finish", finish)


class _WithSecondaries(Mutation):
    """The primary's commit, sent in one call with those of the secondaries; each mutation has its own verdict."""

    more: Any = ()


@served("T3 the primary and its secondaries commit in one batch that is not a group")
def one_batch(patch: pytest.MonkeyPatch) -> None:
    right, apply = commit.Commit.primary_commit, remote_rows.RemoteRowStore.apply

    def with_secondaries(self: commit.Commit) -> Mutation:
        made = _WithSecondaries(*right(self))
        made.more = [mutations.commit(self.header, part, self.commit_ts) for part in self._parts[1:]]
        return made

    async def apply_all(self: Any, sent: Any) -> Any:
        more = getattr(sent[0], "more", ()) if sent else ()
        return (await apply(self, [*more, Mutation(*sent[0])]))[-1:] if more else await apply(self, sent)

    patch.setattr(commit.Commit, "primary_commit", with_secondaries)
    patch.setattr(remote_rows.RemoteRowStore, "apply", apply_all)


@served("T9 scans skip locks")
def scans_skip(patch: pytest.MonkeyPatch) -> None:
    right = remote_rows.RemoteRowStore.scan

    async def scan(self: Any, request: Any) -> Any:
        page = await right(self, request)
        if [query.group for query in request.queries] == [LOCK, WRITE]:
            page = page._replace(rows=[(row, [[], writes]) for row, [_, writes] in page.rows])
        return page

    patch.setattr(remote_rows.RemoteRowStore, "scan", scan)


@served("C4 the server ignores entered cells when it reads for a client")
def blind_server(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rows.Rows, "entered", lambda self, session, requests: [])


@served("T2 a first read is made before its timestamp is drawn")
def early_starts(patch: pytest.MonkeyPatch) -> None:
    def start(self: starting.Starts, session: Any, peer: Any, id: int, asked: Any) -> None:
        async def run() -> None:
            found = await self._rows.find(starting.at(asked, self._parts.oracle.last))
            await trio.sleep(0.005)
            ts = self._draws.one(session, peer) or await self._draws.one_later(session)
            self._reply(session, peer, id, ts, found)

        self._parts.background.spawn(run)

    patch.setattr(starting.Starts, "start", start)


@served("C4 the server ignores entered cells when it scans for a client")
def blind_scans(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Entered, "within", lambda self, *where: [])


# ------------------------------------------------------------ the delay window


@served("D2 a delay window never ends")
def endless_window(patch: pytest.MonkeyPatch) -> None:
    right = batching.Gathering._begin

    def begin(self: Any, key: Any, *, due: bool) -> Any:
        batch = right(self, key, due=due)
        batch.deadline = 1e9
        return batch

    patch.setattr(batching.Gathering, "_begin", begin)


@served("D6 callers in a delay window get each other's answers")
def another_answer(patch: pytest.MonkeyPatch) -> None:
    right = batching.Gathering.__init__

    def init(self: Any, options: Any, spawn: Any, ask: Any, where: Any, **how: Any) -> None:
        async def turned(items: Any) -> Any:
            answers = list(await ask(items))
            plain = all(isinstance(answer, Applied | Refused) for answer in answers)
            return [*answers[1:], *answers[:1]] if plain else answers

        right(self, options, spawn, turned, where, **how)

    patch.setattr(batching.Gathering, "__init__", init)


# ------------------------------------------------------------ the wire


@served("R2 a side that hears nothing waits for ever")
def patient(patch: pytest.MonkeyPatch) -> None:
    async def watch(self: Any) -> None:
        while True:
            await trio.sleep(self._options.heartbeat_s)
            self._wake.set()

    patch.setattr(channel.Channel, "_watch", watch)


@served("R4 a one-step commit is sent again when its connection breaks")
def again(patch: pytest.MonkeyPatch) -> None:
    right = link.Link.call

    async def call(self: Any, method: int, arguments: Any, **how: Any) -> Any:
        return await right(
            self, method, arguments, **{**how, "again": how["again"] or method in (Method.COMMIT, Method.COMMITS)}
        )

    patch.setattr(link.Link, "call", call)


@served("R4 a mutation is sent again when its connection breaks")
def mutation_again(patch: pytest.MonkeyPatch) -> None:
    right = link.Link.call

    async def call(self: Any, method: int, arguments: Any, **how: Any) -> Any:
        return await right(self, method, arguments, **{**how, "again": how["again"] or method == Method.APPLY})

    patch.setattr(link.Link, "call", call)


@served("R5 a client that has lost its session goes on reading")
def reads_on(patch: pytest.MonkeyPatch) -> None:
    right = client.read_welcome

    def read_welcome(message: Any) -> Any:
        _, _, info = right(message)
        return False, True, info

    patch.setattr(client, "read_welcome", read_welcome)


@served("R7 a dead client's session never expires")
def for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions.Sessions, "expire", lambda self, now: [])


@served("R7 a session's start timestamps do not hold back the watermark")
def unheld(patch: pytest.MonkeyPatch) -> None:
    def begin(self: Any, session: Any, start_ts: int) -> None:
        session.open.add(start_ts)
        self._fates.begin(start_ts)

    patch.setattr(sessions.Sessions, "begin", begin)


@served("R8 a new owner does not hold the start timestamps that clients greet it with")
def not_again(patch: pytest.MonkeyPatch) -> None:
    right = sessions.Sessions.greet

    def greet(self: Any, name: str, held: Any, now: float) -> Any:
        if name in self.all:
            return right(self, name, held, now)
        session, new, _ = right(self, name, (), now)
        session.open.update(held)
        for start_ts in held:
            self._fates.begin(start_ts)
        return session, new, True

    patch.setattr(sessions.Sessions, "greet", greet)


# ------------------------------------------------------------ tablet servers


@served("F1 a tablet gets a new server while the old one lives, and no epoch check fences the old one off")
def two_servers(patch: pytest.MonkeyPatch) -> None:
    async def live(self: Any, number: int) -> None:
        stream, process = await self._begin(number)
        try:
            await self.serve_by(number, stream, process)
        finally:
            self.died(number)

    patch.setattr(processes.TabletServers, "_live", live)
    patch.setattr(fencing, "check_epoch", lambda ours, stored, path: None)


@served("F2 a server answers reads of rows that it does not have")
def nothing_there(patch: pytest.MonkeyPatch) -> None:
    def read(self: Any, peer: Any, id: int, requests: Any) -> None:
        found = []
        for table, row, queries in requests:
            held = self._tablet_of(table, row)
            found.append(held.read(row, queries) if held is not None else [[] for _ in queries])
        peer.reply(id, found)

    patch.setattr(tablets.TabletServer, "_read", read)


@served("F2 a server reports that it has applied a mutation, although it does not have the rows")
def applied_nowhere(patch: pytest.MonkeyPatch) -> None:
    """Two similar faults have no visible effect. If a mutation that went to a dead server is sent to another one, that
    is as if the network had repeated it (T6). If it is taken for not made, the release of the primary finds its record
    (T4)."""
    right = tablets.TabletServer._apply

    def apply(self: Any, peer: Any, id: int, packed: Any) -> None:
        if None in [self._of_all_rows(mutation) for mutation in read_mutations(packed)]:
            peer.reply(id, [pack_verdict(APPLIED) for _ in packed])
        else:
            right(self, peer, id, packed)

    patch.setattr(tablets.TabletServer, "_apply", apply)


@served("F3 a tablet server still accepts the ticket of an ended session")
def ended_ticket(patch: pytest.MonkeyPatch) -> None:
    right = tablets.TabletServer._told_sessions
    patch.setattr(tablets.TabletServer, "_told_sessions", lambda self, began, ended: right(self, began, ()))


# ------------------------------------------------------------ splits


@served("P1 writes to the rows that a tablet gives away do not wait for the cut")
def uncut(patch: pytest.MonkeyPatch) -> None:
    async def cut(self: Any, row: bytes) -> None:
        copying = self._splitting
        self._cut_row = row
        await self._beside(copying.finish)
        self._splitting = self._copying = None
        self._gone = row

    patch.setattr(lmdb_tablet.LmdbTablet, "cut", cut)


@served("P2 writes to a tablet that is being copied are not noted")
def unnoted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(splitting.Copying, "note", lambda self, mutations, verdicts: None)


@served("D7 a waiting read is sent although its session has ended")
def sent_all_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batching.Batching, "end_reads", lambda self: None)


@served("D8 a combined read ignores entered cells instead of answering None")
def meets_nothing(patch: pytest.MonkeyPatch) -> None:
    right = rows.Rows.reads

    def reads(self: Any, session: Any, peer: Any, id: int, asked: Any) -> None:
        entered, self.entered = self.entered, lambda session, requests: []
        try:
            right(self, session, peer, id, asked)
        finally:
            self.entered = entered

    patch.setattr(rows.Rows, "reads", reads)


@served("R1 the beginning of a frame that arrives in pieces is lost")
def in_pieces(patch: pytest.MonkeyPatch) -> None:
    right = framing.FrameDecoder.feed

    def feed(self: Any, data: Any) -> Any:
        yield from right(self, data)
        if self._wanted > 0:
            self._received.clear()
            self._wanted = -1

    patch.setattr(framing.FrameDecoder, "feed", feed)


@served("R3 the server drops the calls that it cannot begin at once")
def forgotten(patch: pytest.MonkeyPatch) -> None:
    right = peer.Peer._work

    def work(self: peer.Peer) -> None:
        right(self)
        if not self._working:
            self._backlog.clear()

    patch.setattr(peer.Peer, "_work", work)


@served("R6 a client does not reconnect after its connection has broken")
def one_try(patch: pytest.MonkeyPatch) -> None:
    right = link.Link._once

    async def once(self: link.Link) -> None:
        try:
            await right(self)
        finally:
            if not self._once_only and self.connections:
                self._connect = trio.sleep_forever

    patch.setattr(link.Link, "_once", once)


@served("F4 a tablet server keeps running after its owner has died")
def goes_on(patch: pytest.MonkeyPatch) -> None:
    right = tablets.TabletServer.obey

    async def obey(self: Any, stream: Any) -> None:
        try:
            await right(self, stream)
        finally:
            await trio.sleep(5.0)

    patch.setattr(tablets.TabletServer, "obey", obey)


@served("N8 claims on rows are never released")
def kept_claims(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions.Sessions, "unclaim", lambda self, session, where: None)


@served("P3 a mutation whose rows lie in two tablets is written to one of them")
def to_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalRowStore, "_tablet_of", lambda self, mutation: self.tablet(mutation.table, mutation.rows[0][0]))


@served("P4 a split is not recorded")
def unrecorded(patch: pytest.MonkeyPatch) -> None:
    async def recorded(self: Any, table: str, row: bytes, number: int) -> Any:
        return (await splitter.load(self._local.store)).with_split(table, row)

    patch.setattr(splitter.Splitter, "_recorded", recorded)


# ------------------------------------------------------------ operations


@served("C9 an operation whose answer was lost is sent again")
def sent_again(patch: pytest.MonkeyPatch) -> None:
    right = remote.RemoteDriver._ship

    async def ship(self: Any, start_ts: int, *args: Any) -> Any:
        done = await right(self, start_ts, *args)
        lost = done is not None and done[1] is LOST
        return await right(self, await self.oracle.draw(), *args) if lost else done

    patch.setattr(remote.RemoteDriver, "_ship", ship)


@served("C9 the owner decides the new value from an older version")
def from_older(patch: pytest.MonkeyPatch) -> None:
    right, seen = operating.Operating._newest, {}

    def newest(self: Any, cell: Any) -> Any:
        before = seen.get(cell)
        seen[cell] = found = right(self, cell)
        return found if before is None else before

    patch.setattr(operating.Operating, "_newest", newest)


@served("T11 put_if puts a value whatever the cell holds")
def unconditional(patch: pytest.MonkeyPatch) -> None:
    right = operations.Operation.of

    def of(self: Any, value: Any) -> Any:
        return self.argument if self.what == "put_if" else right(self, value)

    patch.setattr(operations.Operation, "of", of)
