"""The owner's side: answers the calls of clients, over its own store, oracle and memory.

Reads are answered at once, from the loop; mutations of all connections go to the tablets' queues as those of the
owner's own tasks do, so one commit of LMDB serves them all.

C1  A commit in one step is made here: the timestamp is drawn, and the cells are entered, in one step of the loop (C2).
C4  Readers elsewhere cannot look into this memory: what they read is looked up in it before it is read.
R7  What an ended session asks for is not done.
N8  Clients that run observers are woken when notify cells have become visible, whoever put them.
N10 Every drawn timestamp tells the catalogue's version; a newer one is also announced at once.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import astuple
from functools import partial
from typing import Any, Final

import trio

from perco.errors import SessionEnded
from perco.notify.database import Database
from perco.rpc.addresses import Address
from perco.rpc.channel import WireOptions
from perco.rpc.framing import Message, WireError
from perco.rpc.link import BACK_S
from perco.rpc.peer import Peer
from perco.serve import tasks
from perco.serve.door import Door
from perco.serve.messages import (
    ANNOUNCED,
    MET,
    MOVED,
    NOTIFIED,
    STALE,
    TASKS_ASKED,
    TOLD,
    Method,
    TabletIs,
    TabletsOf,
    pack_vacuum,
    pack_verdict,
    read_header,
    read_mutations,
    read_part,
    read_scan,
    welcome,
)
from perco.serve.processes import TabletServers, on_news
from perco.serve.sessions import Session, Sessions
from perco.serve.tasks import ProcessTasks
from perco.storage import NOTIFY, WRITE, Mutation, Verdict
from perco.storage.call import Call
from perco.txn.commit import Commit, State
from perco.txn.entered import Entry, Where

log = logging.getLogger("perco.serve")

_OUTLIVE_S: Final = 5.0  # how long somebody waits for another's transaction, before asking again
_IDLE_S: Final = 1.0
_LOOKS_APART_S: Final = 0.02
_EXPIRE_EVERY: Final = 4  # looks for dead sessions within a lease
_TASKS_S: Final = 1.0  # how long clients may take to say what their tasks wait for
_DRAWS_MAX: Final = 1 << 16  # timestamps in one call


class Server(Door[Session]):
    """Serves one opened store. Loop thread only."""

    def __init__(self, db: Database, options: WireOptions, servers: TabletServers | None = None) -> None:
        super().__init__(db.background, options)
        self._db, self._servers = db, servers
        driver = db.driver
        self.sessions = Sessions(db.oracle.holds, db.fates, options.lease_s, driver.leave_orphans)
        if servers is not None:
            self.sessions.on_begin, self.sessions.on_end = servers.session_began, servers.session_ended
            servers.told = on_news(driver.notified, driver.quiet)
            servers.on_moved = self._moved
        db.splitting.on_split.append(self._moved)
        self._waits: set[trio.CancelScope] = set()
        self.served = 0  # calls, in all
        self._told_tasks: _ToldTasks | None = None  # while they are asked for
        self._asked_tasks = 0
        handlers: dict[Method, Callable[[Session, Peer, int, Any], None]] = {
            Method.READ: self._read,
            Method.SCAN: self._scan,
            Method.APPLY: self._apply,
            Method.COMMIT: self._commit,
            Method.DRAW: self._draw,
            Method.DONE: self._untold(self._done),
            Method.ALIVE: lambda session, peer, id, start_ts: peer.reply(id, db.fates.alive(start_ts)),
            Method.OUTLIVE: self._later(self._outlive),
            Method.TABLETS: self._tablets,
            Method.ADOPT: self._later(self._adopt),
            Method.HOLD: self._hold,
            Method.RELEASE: self._untold(lambda session, number: self.sessions.release(session, number)),
            Method.AT: self._later(lambda session, wall_s: db.oracle.at(wall_s)),
            Method.OLDEST: lambda session, peer, id, _: peer.reply(id, db.oracle.holds.oldest()),
            Method.PIN: self._later(lambda session, pin: db.oracle.pins.put(*pin)),
            Method.DROP_PIN: self._later(lambda session, name: db.oracle.pins.drop(name)),
            Method.CLAIM: self._claim,
            Method.UNCLAIM: self._untold(self._unclaim),
            Method.HOLDING: self._untold(self._holding),
            Method.WORKS: self._works,
            Method.IDLE: self._later(self._idle),
            Method.UP_TO: self._later(self._up_to),
            Method.VACUUM: self._later(self._vacuum),
            Method.BACKFILL: self._later(self._backfill),
            Method.LAST: lambda session, peer, id, _: peer.reply(id, db.oracle.last),
            Method.ORPHANED: self._untold(lambda session, _: self.sessions.orphans(session)),
            Method.TASKS: self._later(self._tasks),
            Method.TASKS_ARE: self._untold(self._tasks_are),
            Method.SERVERS: self._later(self._servers_are),
            Method.SPLIT: self._later(self._split),
            Method.BYE: self._bye,
        }
        self._handlers = {int(method): handler for method, handler in handlers.items()}

    # ------------------------------------------------------------ connections

    @asynccontextmanager
    async def listening(
        self,
        address: Address,
        token: bytes | None = None,
        tls: tuple[str, str] | None = None,
        *,
        ours: bool = False,
    ) -> AsyncIterator[Address]:
        """As `Door.listening`; tablet servers listen beside it."""
        async with super().listening(address, token, tls, ours=ours) as bound:
            if self._servers is not None:
                await self._servers.listen(bound, token, *(tls or ("", "")))
            yield bound

    @contextmanager
    def _waiting(self, seconds: float) -> Iterator[None]:
        """A client waits for something, for so long at most; whoever waits is answered when serving ends."""
        with trio.CancelScope(deadline=-math.inf if self._draining else trio.current_time() + seconds) as scope:
            self._waits.add(scope)
            try:
                yield
            finally:
                self._waits.discard(scope)

    def _end_waits(self) -> None:
        for scope in list(self._waits):
            scope.cancel()

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """What goes on beside connections, while the block lasts; at its end every session ends."""
        db = self._db
        db.driver.on_notified.append(self._notified)
        db.oracle.on_announced.append(self._announced)
        db.watch_elsewhere = self.sessions.watch
        db.busy_elsewhere = lambda: bool(self.sessions.claims)
        db.works_elsewhere = partial(self._works_elsewhere, trio.current_time())
        stops = [db.background.start(self._expire, "sessions"), db.background.start(self._flusher.run, "flusher")]
        try:
            yield
        finally:
            for stop in stops:
                stop()
            self._end_waits()
            db.driver.on_notified.remove(self._notified)
            db.oracle.on_announced.remove(self._announced)
            db.watch_elsewhere = db.busy_elsewhere = db.works_elsewhere = None
            for session in list(self.sessions.all.values()):
                self.sessions.end(session)

    def _let_in(self, name: str, held: Sequence[int]) -> tuple[Session, Message]:
        before = self.sessions.all.get(name)
        if before is not None and before.peer is not None:
            # R4: what its former connection still brings is not read any more.
            self._serving.pop(before.peer, None)
            before.peer.channel.close_soon()
            before.peer.ended = True
            before.peer = None
        session, new, kept = self.sessions.greet(name, held, trio.current_time())
        return session, welcome(new, kept, {**self._info(), "ticket": session.ticket})

    def _begun(self, peer: Peer, session: Session) -> None:
        session.peer = peer

    def _ended(self, peer: Peer, session: Session) -> None:
        if session.peer is peer:
            session.peer = None
            session.last_heard = trio.current_time()

    def _replaces(self, name: str) -> bool:
        before = self.sessions.all.get(name)
        return before is not None and before.peer is not None

    def _info(self) -> dict[str, Any]:
        db = self._db
        return {
            "version": db.oracle.catalogue_version,
            "wall_ms": db.oracle.wall_ms(),
            "last": db.oracle.last,
            "groups": db.local.store.groups,
            "lease_s": self._options.lease_s,
            "spread": self._servers is not None,
        }

    async def _expire(self) -> None:
        """End sessions whose clients are gone (R7)."""
        while True:
            await trio.sleep(self._options.lease_s / _EXPIRE_EVERY)
            for session in self.sessions.expire(trio.current_time()):
                log.info(
                    "client %s was not heard of for %g s: its session has ended", session.name, self._options.lease_s
                )

    # ------------------------------------------------------------ calls

    def _handle(self, peer: Peer, id: int, method: int, arguments: Any) -> None:
        session = self._serving.get(peer)
        if session is None or session.ended:
            raise SessionEnded("the server has let go of what this client held")
        handler = self._handlers.get(method)
        if handler is None:
            raise WireError(f"there is no method {method}")
        self.served += 1
        try:
            handler(session, peer, id, arguments)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise WireError(f"method {method}: arguments that do not read: {error}") from error

    def _later(self, answer: Callable[[Session, Any], Awaitable[Any]]) -> Callable[[Session, Peer, int, Any], None]:
        """A handler that takes a task of its own."""

        def handle(session: Session, peer: Peer, id: int, arguments: Any) -> None:
            async def run() -> None:
                try:
                    peer.reply(id, await answer(session, arguments))
                except Exception as error:
                    peer.fail(id, error)

            self._db.background.spawn(run)

        return handle

    @staticmethod
    def _untold(hear: Callable[[Session, Any], None]) -> Callable[[Session, Peer, int, Any], None]:
        """A handler of what wants no answer; who asks for one all the same gets one."""

        def handle(session: Session, peer: Peer, id: int, told: Any) -> None:
            hear(session, told)
            peer.reply(id, None)

        return handle

    def _read(self, session: Session, peer: Peer, id: int, requests: Any) -> None:
        db = self._db
        if db.driver.entered.cells and (entries := self._entered(session, requests)):
            self._after(entries, peer, id, lambda: self._read(session, peer, id, requests))
            return
        peer.reply(id, db.local.store.find_first(requests, self._options.part_bytes))

    def _entered(self, session: Session, requests: Any) -> list[Entry]:
        """C4: entries for what is to be read, at or below what it is read at. Not those of which the client itself asks
        how its commit went (T4): nobody else would tell it."""
        cells, left = self._db.driver.entered.cells, self._db.driver.entered.left
        found = []
        for table, row, queries in requests:
            for group, column, _, to_ts, _ in queries:
                if group == WRITE:
                    entry = cells.get((table, row, column))
                    if entry is None or entry.commit_ts > to_ts:
                        continue
                    if entry.start_ts not in left or entry.start_ts not in session.open:
                        found.append(entry)
        return list(dict.fromkeys(found))

    def _after(self, entries: Sequence[Entry], peer: Peer, id: int, go_on: Callable[[], None]) -> None:
        """C4: go on once these entries have left."""

        async def run() -> None:
            try:
                for entry in entries:
                    await self._db.driver.past(entry)
                go_on()
            except Exception as error:
                peer.fail(id, error)

        self._db.background.spawn(run)

    def _scan(self, session: Session, peer: Peer, id: int, packed: Any) -> None:
        request = read_scan(packed)
        db = self._db

        async def run() -> None:
            try:
                for query in request.queries:
                    if query.group == WRITE and db.driver.entered.cells:
                        columns = query.columns if query.columns is not None else _Every()
                        for entry in db.driver.entered.within(
                            request.table, request.start, request.stop, columns, query.to_ts
                        ):
                            await db.driver.past(entry)
                page = await db.local.store.scan(request)
                peer.reply(id, (page.rows, page.next))
            except Exception as error:
                peer.fail(id, error)

        db.background.spawn(run)

    def _apply(self, session: Session, peer: Peer, id: int, packed: Any) -> None:
        mutations = read_mutations(packed)
        self._submit(
            session,
            mutations,
            lambda verdicts: peer.reply(id, [pack_verdict(verdict) for verdict in verdicts]),
        )

    def _submit(
        self, session: Session, mutations: Sequence[Mutation], answer: Callable[[Sequence[Verdict]], None]
    ) -> None:
        """Queue mutations; `answer` is told the verdicts, on the loop."""
        notifies = _notifies(mutations)

        def told(verdicts: Sequence[Verdict]) -> None:
            answer(verdicts)
            self.sessions.applied(session)
            if notifies:
                self._db.driver.notified()
            elif notifies is not None:
                self._db.driver.quiet()

        store = self._db.local.store
        call = Call(None, len(mutations), told)
        store.submit(mutations, call)
        session.applying += 1
        if not call.waiting:  # memory answers at once
            told(call.verdicts)  # type: ignore[arg-type]

    # ------------------------------------------------------------ commits in one step

    def _commit(self, session: Session, peer: Peer, id: int, packed: Any) -> None:
        header, part, version = packed
        commit = Commit(read_header(header), [read_part(part)], one_step=True)
        if len(commit.cells) > 1 and len(set(commit.cells)) != len(commit.cells):
            raise ValueError("a cell twice")  # it would be entered once, and leave twice (C3)
        self._in_one_step(session, peer, id, commit, version)

    def _in_one_step(self, session: Session, peer: Peer, id: int, commit: Commit, version: int) -> None:
        driver, oracle = self._db.driver, self._db.oracle
        if self._servers is not None:  # who reads elsewhere does not ask this memory (C4)
            peer.fail(id, SessionEnded("the store's rows are with tablet servers now"))
            return
        if session.ended:  # R7: while it waited
            peer.fail(id, SessionEnded("the server has let go of what this client held"))
            return
        met = driver.entered.in_the_way(commit)
        if met is not None:
            self._meet(session, peer, id, commit, version, met)
            return
        # C2: no await between the look, the draw, and the entry.
        commit_ts = oracle.draw_nowait()
        if not commit_ts:
            self._extend(session, peer, id, commit, version)
            return
        if oracle.catalogue_version > version:  # N10
            peer.reply(id, (STALE, oracle.catalogue_version))
            return
        commit.drawn(commit_ts)
        driver.entered.enter(commit)
        driver.writing[commit_ts] = None

        def told(verdicts: Sequence[Verdict]) -> None:
            [verdict] = verdicts
            commit.primary_told(verdict)
            if commit.state is State.ASK:
                driver.entered.leave_behind(commit)  # C3
                driver.leave_orphans()
            else:
                driver.entered.leave(commit)
            if commit.state is State.COMMITTED and self._db.fates.known(commit.header.start_ts) is None:
                self._db.fates.settle(commit.header.start_ts, commit_ts)
            driver.written(commit_ts)
            peer.reply(id, (TOLD, pack_verdict(verdict), commit_ts))

        try:
            self._submit(session, (commit.primary_commit(),), told)
        except BaseException:
            driver.entered.leave(commit)  # C3: it was never queued
            driver.written(commit_ts)
            raise

    def _meet(
        self, session: Session, peer: Peer, id: int, commit: Commit, version: int, met: tuple[Where, Entry]
    ) -> None:
        """Another's entry stands for a cell: nothing waits while it commits, so it is waited for here."""
        where, entry = met

        async def run() -> None:
            try:
                fate = await self._db.driver.past(entry)
                if fate >= commit.header.start_ts:
                    peer.reply(id, (MET, where, entry.commit_ts))
                    return
                self._in_one_step(session, peer, id, commit, version)
            except Exception as error:
                peer.fail(id, error)

        self._db.background.spawn(run)

    def _extend(self, session: Session, peer: Peer, id: int, commit: Commit, version: int) -> None:
        async def run() -> None:
            try:
                await self._db.oracle.extend()
                self._in_one_step(session, peer, id, commit, version)
            except Exception as error:
                peer.fail(id, error)

        self._db.background.spawn(run)

    # ------------------------------------------------------------ timestamps, liveness

    def _draw(self, session: Session, peer: Peer, id: int, wanted: Any) -> None:
        starts, others = wanted
        if not (type(starts) is int and type(others) is int and 0 < starts + others <= _DRAWS_MAX):
            raise ValueError("a number of timestamps")
        draw = self._db.oracle.draw_nowait
        drawn = [draw() for _ in range(starts + others)]
        if not drawn[-1]:  # and so all from some point on
            self._draw_rest(session, peer, id, starts, others, [ts for ts in drawn if ts])
            return
        self._drawn(session, peer, id, starts, drawn)

    def _draw_rest(self, session: Session, peer: Peer, id: int, starts: int, others: int, drawn: list[int]) -> None:
        async def run() -> None:
            try:
                while len(drawn) < starts + others:
                    drawn.append(await self._db.oracle.draw())
                self._drawn(session, peer, id, starts, drawn)
            except Exception as error:
                peer.fail(id, error)

        self._db.background.spawn(run)

    def _drawn(self, session: Session, peer: Peer, id: int, starts: int, drawn: list[int]) -> None:
        if session.ended or peer.ended:  # the answer goes nowhere; drawn for it, they would be held for ever
            peer.fail(id, SessionEnded("the server has let go of what this client held"))
            return
        for ts in drawn[:starts]:
            self.sessions.begin(session, ts)
        oracle = self._db.oracle
        peer.reply(id, (drawn, oracle.catalogue_version, oracle.wall_ms(), oracle.last))

    def _done(self, session: Session, start_ts: Any) -> None:
        self.sessions.done(session, start_ts)

    async def _outlive(self, session: Session, start_ts: int) -> None:
        """When a transaction has ended, or after a while."""
        with self._waiting(_OUTLIVE_S):
            await self._db.fates.wait(start_ts)

    # ------------------------------------------------------------ the catalogue, the past

    def _tablets(self, session: Session, peer: Peer, id: int, _: Any) -> None:
        store, servers = self._db.local.store, self._servers
        placed: dict[str, list[tuple[bytes, int]]] = {
            table: [(start, 0) for start in store.bounds(table)] for table in store.tables()
        }
        ports: dict[int, int] = {}
        if servers is not None:
            placed.update(servers.placement())
            ports = servers.ports(peer.at)
        peer.reply(id, (placed, ports))

    async def _servers_are(self, session: Session, _: Any) -> list[TabletsOf]:
        if self._servers is not None:
            return await self._servers.servers()
        store = self._db.local.store
        tablets = []
        for table in store.tables():
            entry = self._db.catalogue.tables.get(table)
            for number, start, stop in entry.tablets() if entry is not None else [(0, b"", None)]:
                told = store.tablet(table, start).statistics()
                numbers = told.batches, told.mutations, told.queued, told.used_bytes
                tablets.append(TabletIs(table, number, start, stop, 0, *numbers))
        return [TabletsOf(0, os.getpid(), [], tablets)]

    def _moved(self) -> None:
        for peer in self._serving:
            peer.push(MOVED, None)

    async def _adopt(self, session: Session, _: Any) -> int:
        """N10: a client has changed the catalogue."""
        db = self._db
        before = db.catalogue.version
        await db.reload()
        if db.catalogue.version != before:  # T13: of new tables
            await db.local.raise_floor(db.oracle.holds.watermark)
        await db.oracle.announce(db.catalogue.binds)
        return db.catalogue.version

    def _hold(self, session: Session, peer: Peer, id: int, wanted: Any) -> None:
        number, ts = wanted
        peer.reply(id, (self.sessions.hold(session, number, ts), self._db.oracle.holds.oldest()))

    # ------------------------------------------------------------ observers

    def _notified(self) -> None:
        """N8: notify cells have become visible."""
        for peer, session in self._serving.items():
            if session.works:
                peer.push(NOTIFIED, None)

    def _announced(self, version: int) -> None:
        for peer in self._serving:
            peer.push(ANNOUNCED, version)

    def _works(self, session: Session, peer: Peer, id: int, ids: Any) -> None:
        session.works = frozenset(ids)
        peer.reply(id, None)

    def _works_elsewhere(self, began: float) -> Collection[str] | None:
        """Observers that clients run; None: those of a former owner may be about to find this one."""
        return self.sessions.workers() or (None if trio.current_time() < began + BACK_S else ())

    def _claim(self, session: Session, peer: Peer, id: int, asked: Any) -> None:
        (table, row), root = asked
        if type(table) is not str or type(row) is not bytes or type(root) is not int:
            raise TypeError("a table, a row and a timestamp")
        peer.reply(id, self.sessions.claim(session, (table, row), root))

    def _unclaim(self, session: Session, where: Any) -> None:
        self.sessions.unclaim(session, where)
        self._db.driver.quiet()  # N7: whoever waits shall look

    def _holding(self, session: Session, all_of_it: Any) -> None:
        numbers, claims = all_of_it
        self.sessions.holding(session, numbers, claims)
        self._db.driver.quiet()

    async def _idle(self, session: Session, _: Any) -> tuple[bool, int, dict[str, int]]:
        """(whether the store is idle, changes on the failed list, who runs which observers), as soon as it is, or after
        a while (N7)."""
        db = self._db
        with self._waiting(_IDLE_S):
            while not self.is_idle():
                await db.changed()
        return self.is_idle(), db.failed_count(), self._workers()

    async def _up_to(self, session: Session, ts: int) -> tuple[bool, int, dict[str, int]]:
        done = False
        with self._waiting(_IDLE_S):
            while not (done := self.is_idle() or await self._db.none_up_to(ts)):
                with trio.move_on_after(_LOOKS_APART_S):
                    await self._db.changed()
        return done, 0, self._workers()

    def _workers(self) -> dict[str, int]:
        """How many processes run each observer."""
        counts = self.sessions.workers()
        for id in self._db.works():
            counts[id] = counts.get(id, 0) + 1
        return counts

    def is_idle(self) -> bool:
        """N7: here nobody works, nothing waits, and no client is at a row, or is committing.

        Locks are looked for first: they become notify cells, while other threads and processes write, and never the
        other way.
        """
        db = self._db
        return not db.driver.entered.cells and not db.locked_observed() and db.is_idle()

    # ------------------------------------------------------------ upkeep

    async def _vacuum(self, session: Session, _: Any) -> dict[str, Any]:
        return pack_vacuum(await self._db.vacuum())

    async def _split(self, session: Session, where: Any) -> tuple[Any, ...]:
        table, row = where
        return astuple(await self._db.splitting.split(table, row))

    async def _backfill(self, session: Session, _: Any) -> list[Any]:
        return [astuple(each) for each in await self._db.backfill()]

    # ------------------------------------------------------------ what everybody waits for

    async def _tasks(self, session: Session, _: Any) -> list[ProcessTasks]:
        """Of this process, and of its clients but the one that asks; who does not answer soon is left out. Whoever asks
        while others are being asked shares what they get."""
        if self._told_tasks is not None:
            return await self._told_tasks.shared()
        self._asked_tasks += 1
        asked = [peer for peer, other in self._serving.items() if other is not session]
        told = self._told_tasks = _ToldTasks(self._asked_tasks, len(asked))
        try:
            for peer in asked:
                peer.push(TASKS_ASKED, told.number)
            if asked:
                with self._waiting(_TASKS_S):
                    await told.all.wait()
        finally:
            self._told_tasks = None
            told.found = [tasks.here("owner"), *told.answers.values()]
            told.over.set()
        return told.found

    def _tasks_are(self, session: Session, answer: Any) -> None:
        number, packed = answer
        told = self._told_tasks
        if told is not None and told.number == number:
            told.answers[session.name] = tasks.read(packed)
            if len(told.answers) == told.asked:
                told.all.set()

    # ------------------------------------------------------------ the end

    def _bye(self, session: Session, peer: Peer, id: int, _: Any) -> None:
        self.sessions.end(session)
        peer.reply(id, None)
        peer.channel.close_soon()


def _notifies(mutations: Sequence[Mutation]) -> bool | None:
    """Whether they put notify cells; None: they do not remove any, either."""
    found = None
    for mutation in mutations:
        for _, _, writes in mutation.rows:
            for group, _, _, value in writes:
                if group == NOTIFY:
                    if value is not None:
                        return True
                    found = False
    return found


class _ToldTasks:
    """What clients answer, by session."""

    def __init__(self, number: int, asked: int) -> None:
        self.number, self.asked = number, asked
        self.answers: dict[str, ProcessTasks] = {}
        self.all, self.over = trio.Event(), trio.Event()
        self.found: list[ProcessTasks] = []

    async def shared(self) -> list[ProcessTasks]:
        await self.over.wait()
        return self.found


class _Every:
    """All columns."""

    def __contains__(self, column: object) -> bool:
        return True
