"""The owner's side: answers the calls of clients, over its own store, oracle and memory.

Reads are answered at once, from the loop; mutations of all connections go to the tablets' queues as those of the
owner's own tasks do, so one commit of LMDB serves them all.

C1  A commit in one step is made here: the timestamp is drawn, and the cells are entered, in one step of the loop (C2).
C4  A client cannot look into this memory, so the server does before it reads for the client.
R7  The server does nothing that an ended session asks for.
R10 A client's pulse speaks for it while its loop is held; it is heard, and not answered.
N8  Clients that run observers are woken when notify cells have become visible, whichever process put them.
N10 Every drawn timestamp tells the catalogue's version; a newer one is also announced at once.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import astuple
from functools import partial
from typing import Any, Final

import trio

from perco.errors import SessionEnded, Unavailable, UsageError
from perco.notify.database import Database
from perco.rpc.addresses import Address
from perco.rpc.channel import Channel, WireOptions
from perco.rpc.crossing import pack_error
from perco.rpc.framing import Message, WireError
from perco.rpc.link import BACK_S
from perco.rpc.peer import Peer
from perco.serve import tasks
from perco.serve.door import Door
from perco.serve.messages import (
    ANNOUNCED,
    CLAIMS_MAX,
    DRAWS_MAX,
    MET,
    MOVED,
    PULSE,
    STALE,
    TASKS_ASKED,
    TOLD,
    FileOf,
    FolderIs,
    Method,
    TabletIs,
    TabletsOf,
    pack_vacuum,
    pack_verdict,
    read_all,
    read_commit,
    read_holding,
    read_mutations,
    read_scan,
    read_typed,
    welcome,
)
from perco.serve.processes import TabletServers, on_news
from perco.serve.sessions import Session, Sessions, Stuck
from perco.serve.tasks import ProcessTasks
from perco.storage import NOTIFY, PROTOCOL_GROUPS, WRITE, Mutation, Verdict, owner
from perco.storage.call import Call
from perco.storage.folder import unsynced
from perco.txn.commit import Commit, State
from perco.txn.entered import Entry, Where
from perco.txn.loopwatch import Held

log = logging.getLogger("perco.serve")

_OUTLIVE_S: Final = 5.0  # how long somebody waits for another's transaction, before asking again
_IDLE_S: Final = 1.0
_HELD_S: Final = 1.0  # if an owner's loop was held for longer while others waited, it logs a warning
_LOOKS_APART_S: Final = 0.02
_EXPIRE_EVERY: Final = 4  # looks for dead sessions within a lease
_TASKS_S: Final = 1.0  # how long clients may take to say what their tasks wait for


class Server(Door[Session]):
    """Serves one opened store. Loop thread only."""

    def __init__(self, db: Database, options: WireOptions, servers: TabletServers | None = None) -> None:
        super().__init__(db.background, options)
        self._db, self._servers = db, servers
        driver = db.driver
        self.sessions = Sessions(db.oracle.holds, db.fates, options.lease_s, driver.leave_orphans)
        self.sessions.on_wake = self._woken
        if servers is not None:
            self.sessions.on_begin, self.sessions.on_end = servers.session_began, servers.session_ended
            self.sessions.on_held = servers.session_held
            servers.told = on_news(driver.notified, driver.quiet)
            servers.on_moved = self._moved
        db.splitting.on_split.append(self._moved)
        self._pulses_of: dict[str, Channel] = {}  # by session (R10)
        self._waits: set[trio.CancelScope] = set()
        self._by: Session | None = None  # whose commit makes the notify cells that are just being announced
        self._watching = False
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
            Method.OUTLIVE: self._later(self._outlive, _timestamp),
            Method.TABLETS: self._tablets,
            Method.ADOPT: self._later(self._adopt),
            Method.HOLD: self._hold,
            Method.RELEASE: self._untold(lambda session, number: self.sessions.release(session, number)),
            Method.AT: self._later(lambda session, wall_s: db.oracle.at(wall_s), _wall_time),
            Method.OLDEST: lambda session, peer, id, _: peer.reply(id, db.oracle.holds.oldest()),
            Method.PIN: self._later(lambda session, pin: db.oracle.pins.put(*pin), _pin),
            Method.DROP_PIN: self._later(
                lambda session, pin: db.oracle.pins.drop(*pin), lambda pin: read_typed(pin, (str,), (str,))
            ),
            Method.CLAIM: self._claim,
            Method.UNCLAIM: self._untold(self._unclaim),
            Method.HOLDING: self._untold(self._holding),
            Method.WORKS: self._works,
            Method.LOOKED: self._untold(self._looked),
            Method.IDLE: self._later(self._idle),
            Method.UP_TO: self._later(self._up_to, _timestamp),
            Method.NOW: self._now,
            Method.FOLDER: lambda session, peer, id, _: peer.reply(id, self._folder()),
            Method.VACUUM: self._later(self._vacuum),
            Method.BACKFILL: self._later(self._backfill),
            Method.LAST: lambda session, peer, id, _: peer.reply(id, db.oracle.last),
            Method.ORPHANED: self._untold(lambda session, _: self.sessions.orphans(session)),
            Method.TASKS: self._later(self._tasks),
            Method.TASKS_ARE: self._untold(self._tasks_are),
            Method.SERVERS: self._later(self._servers_are),
            Method.SPLIT: self._later(self._split, lambda where: read_typed(where, (str,), (bytes, type(None)))),
            Method.COMPACT: self._later(self._compact, lambda table: read_typed((table,), (str, type(None)))),
            Method.BYE: self._bye,
            Method.READS: self._reads,
            Method.COMMITS: self._commits,
            Method.CLAIMS: self._claims,
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
        """A client waits for something, at most this long; it is answered when serving ends."""
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
        """Do the server's background work while the block lasts; at its end every session ends."""
        db = self._db
        db.driver.on_notified.append(self._notified)
        db.oracle.on_announced.append(self._announced)
        db.watch_elsewhere = self.sessions.watch
        db.busy_elsewhere = self._busy
        db.heartbeat.on_held = self._held_up
        db.works_elsewhere = partial(self._works_elsewhere, -math.inf if db.made_here else trio.current_time())
        stops = [db.background.start(self._expire, "sessions"), db.background.start(self._flusher.run, "flusher")]
        try:
            yield
        finally:
            for stop in stops:
                stop()
            self._end_waits()
            db.driver.on_notified.remove(self._notified)
            db.oracle.on_announced.remove(self._announced)
            db.watch_elsewhere = db.busy_elsewhere = db.works_elsewhere = db.heartbeat.on_held = None
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

    def _let_in_pulse(self, name: str, channel: Channel) -> tuple[Callable[[list[Message]], None], Message]:
        session = self.sessions.all.get(name)
        if session is None:
            raise Unavailable("the session of that pulse has ended, or has not begun here yet")
        former = self._pulses_of.get(name)
        if former is not None:
            former.close_soon()
        self._pulses_of[name] = channel

        def hear(messages: list[Message]) -> None:
            if session.ended:
                channel.close_soon()
                return
            for message in messages:
                self._beat(session, message)

        return hear, welcome(False, True, {})

    def _pulse_ended(self, name: str, channel: Channel) -> None:
        if self._pulses_of.get(name) is channel:
            del self._pulses_of[name]

    def _beat(self, session: Session, message: Message) -> None:
        """R10: take a message of a client's pulse. Raises: WireError."""
        try:
            _, what, (pid, seconds, where) = message
            if what != PULSE or type(pid) is not int or type(seconds) is not float or not 0 <= seconds < math.inf:
                raise ValueError(f"{what}")
            where = tasks.text(where)
        except (TypeError, ValueError) as error:
            raise WireError(f"a pulse that does not read: {error}") from error
        now, before, silence_s = trio.current_time(), session.stuck, self._options.silence_s
        self.sessions.beat(session, now, Stuck(pid, seconds, where, now) if seconds else None)
        if seconds > silence_s and (before is None or before.seconds <= silence_s):
            log.warning(
                "the loop of client %s (process %d) has been held for %.1f s, at %s; the client keeps its session",
                *(session.name, pid, seconds, where),
            )

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
            raise SessionEnded("the server has ended this client's session")
        handler = self._handlers.get(method)
        if handler is None:
            raise WireError(f"there is no method {method}")
        self.served += 1
        try:
            handler(session, peer, id, arguments)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise WireError(f"method {method}: arguments that do not read: {error}") from error

    def _later(
        self, answer: Callable[[Session, Any], Awaitable[Any]], check: Callable[[Any], object] = lambda arguments: None
    ) -> Callable[[Session, Peer, int, Any], None]:
        """A handler that takes a task of its own. `check` raises TypeError for arguments that do not read."""

        def handle(session: Session, peer: Peer, id: int, arguments: Any) -> None:
            check(arguments)

            async def run() -> None:
                try:
                    peer.reply(id, await answer(session, arguments))
                except Exception as error:
                    peer.fail(id, error)

            self._db.background.spawn(run)

        return handle

    @staticmethod
    def _untold(hear: Callable[[Session, Any], None]) -> Callable[[Session, Peer, int, Any], None]:
        """A handler of a message that needs no answer; a caller that asks for one still gets it."""

        def handle(session: Session, peer: Peer, id: int, told: Any) -> None:
            hear(session, told)
            peer.reply(id, None)

        return handle

    def _reads(self, session: Session, peer: Peer, id: int, asked: Any) -> None:
        """Reads of several callers; None for a part that would have to wait (C4), or makes the answer too long (D8)."""
        db = self._db
        meets = bool(db.driver.entered.cells)
        free = [i for i, requests in enumerate(asked) if not (meets and self._entered(session, requests))]
        found = db.local.store.find_first([request for i in free for request in asked[i]], self._options.part_bytes)
        answers: list[Any] = [None] * len(asked)
        at = 0
        for i in free:
            answers[i] = found[at : at + len(asked[i])]
            at += len(asked[i])
            if at > len(found):
                answers[i] = None
        peer.reply(id, answers)

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
                await peer.room()
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
                await peer.room()
                page = db.local.store.find_page(request)
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
                self._by = session
                self._db.driver.notified()
                self._by = None
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
        self._in_one_step(session, peer, id, *read_commit(packed, self._db.oracle.last))

    def _in_one_step(self, session: Session, peer: Peer, id: int, commit: Commit, version: int) -> None:
        if (ended := self._ends_commits(session, [commit])) is not None:
            peer.fail(id, ended)
            return
        met = self._db.driver.entered.in_the_way(commit)
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

    def _commits(self, session: Session, peer: Peer, id: int, asked: Any) -> None:
        """Commits of several transactions, in one call to the tablets; the answer to one that would have to wait is
        None (D8)."""
        commits = [read_commit(each, self._db.oracle.last) for each in asked]
        if len({commit.header.start_ts for commit, _ in commits}) != len(commits):
            raise ValueError("a transaction twice")
        if (ended := self._ends_commits(session, [commit for commit, _ in commits])) is not None:
            peer.fail(id, ended)
            return
        answers: list[Any] = [None] * len(commits)
        entered: list[int] = []
        try:
            for i, (commit, version) in enumerate(commits):
                if self._db.driver.entered.in_the_way(commit) is None:
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

    def _leave(self, commits: Iterable[Commit]) -> None:
        """C3: commits that were entered, and never queued."""
        driver = self._db.driver
        for commit in commits:
            driver.entered.leave(commit)
            driver.written(commit.commit_ts)

    def _ends_commits(self, session: Session, commits: Sequence[Commit]) -> SessionEnded | None:
        """The reason why this session cannot make these commits in one step; None: it can."""
        if self._servers is not None:  # readers of tablet servers do not ask this memory (C4)
            return SessionEnded("the store's rows are with tablet servers now")
        if session.ended:  # R7: while it waited
            return SessionEnded("the server has ended this client's session")
        started = {commit.header.start_ts for commit in commits} - session.open
        if any(map(self._db.fates.alive, started)):  # L1: nobody else's, nor of this client's former session
            return SessionEnded("a transaction of another session is under way")
        return None

    def _enter(self, commit: Commit, version: int) -> tuple[int, ...] | None:
        """C2: no await between the look, the draw, and the entry. Returns (); or, if nothing was entered, the answer;
        None: no timestamp is available at once."""
        driver, oracle = self._db.driver, self._db.oracle
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
        """Queue commits that were entered; `answer` gets the answer to each."""

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
            self._submit(session, [commit.primary_commit() for commit in commits], told)
        except BaseException:
            self._leave(commits)
            raise

    def _written(self, commit: Commit, verdict: Verdict) -> None:
        """C3: the write transaction of a commit in one step has ended, or its outcome is unknown."""
        driver, fates, start_ts = self._db.driver, self._db.fates, commit.header.start_ts
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
        if type(starts) is not int or type(others) is not int or min(starts, others) < 0:
            raise TypeError("two numbers of timestamps")
        if not 0 < starts + others <= DRAWS_MAX:
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
            peer.fail(id, SessionEnded("the server has ended this client's session"))
            return
        for ts in drawn[:starts]:
            self.sessions.begin(session, ts)
        oracle = self._db.oracle
        peer.reply(id, (drawn, oracle.catalogue_version, oracle.wall_ms(), oracle.last))

    def _done(self, session: Session, start_ts: Any) -> None:
        self.sessions.done(session, read_all(start_ts, int))

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
        number, ts = read_typed(wanted, (int,), (int,))
        peer.reply(id, (self.sessions.hold(session, number, ts), self._db.oracle.holds.oldest()))

    # ------------------------------------------------------------ observers

    def _notified(self) -> None:
        """N8: notify cells have become visible, perhaps by a commit of `_by`."""
        self.sessions.wake(self.sessions.wakes.notified(trio.current_time(), self._by))

    def _woken(self) -> None:
        """Watch processes that were woken: they may not answer."""
        if not self._watching and self.sessions.wakes.deadline < math.inf:
            self._watching = True
            self._db.background.start(self._watch, "watch")  # not short: nobody may answer while the store closes

    async def _watch(self) -> None:
        """While woken processes have not answered: wake others instead of those that take too long."""
        wakes = self.sessions.wakes
        try:
            while wakes.deadline < math.inf:
                await trio.sleep_until(wakes.deadline)
                self.sessions.wake(wakes.overdue(trio.current_time()))
        finally:
            self._watching = False

    def _looked(self, session: Session, full: Any) -> None:
        self.sessions.wake(self.sessions.wakes.looked(session, trio.current_time(), full=bool(full)))

    def _announced(self, version: int) -> None:
        for peer in self._serving:
            peer.push(ANNOUNCED, version)

    def _works(self, session: Session, peer: Peer, id: int, told: Any) -> None:
        ids, runs = told
        self.sessions.works(session, read_all(ids, str), read_all(runs, str))
        peer.reply(id, None)

    def _works_elsewhere(self, began: float) -> Collection[str] | None:
        """Observers that clients run; None: those of a former owner may be about to find this one."""
        return self.sessions.workers() or (None if trio.current_time() < began + BACK_S else ())

    def _claim(self, session: Session, peer: Peer, id: int, asked: Any) -> None:
        peer.reply(id, self._claimed(session, asked))

    def _claims(self, session: Session, peer: Peer, id: int, asked: Any) -> None:
        peer.reply(id, [self._claimed(session, each) for each in asked])

    def _claimed(self, session: Session, asked: Any) -> tuple[bytes, list[tuple[bytes, int]]]:
        table, wanted, most, halts = asked
        if (type(table), type(most), type(halts)) != (str, int, bool) or len(wanted) > CLAIMS_MAX:
            raise TypeError("a table, rows, and how many of them")
        if any((type(row), type(newest), type(root)) != (bytes, int, int) for row, newest, root in wanted):
            raise TypeError("rows and timestamps")
        self.sessions.wakes.heard(session)
        return self.sessions.claim(session, table, wanted, most, halts=halts)

    def _unclaim(self, session: Session, where: Any) -> None:
        self.sessions.unclaim(session, where)
        self._db.driver.quiet()  # N7: tasks that wait look again

    def _holding(self, session: Session, all_of_it: Any) -> None:
        self.sessions.holding(session, *read_holding(all_of_it))
        self._db.driver.quiet()

    async def _idle(self, session: Session, _: Any) -> tuple[bool, int, dict[str, int] | None, Any]:
        """(whether the store is idle, changes on the failed list, workers of each observer, a lock that cannot be
        read), as soon as it is idle, or after a while (N7)."""
        db = self._db
        with self._waiting(_IDLE_S):
            if not db.idle_now():
                db.sweep_pending()  # once a call, and so once a second for each client that waits
            while not db.idle_now():
                await db.changed()
        stuck = db.unreadable_now()
        return db.idle_now(), db.failed_now(), self._workers(), None if stuck is None else pack_error(stuck)

    def _now(self, session: Session, peer: Peer, id: int, _: Any) -> None:
        peer.reply(id, (self._db.idle_now(), self._db.pending_now(), self._db.failed_now()))

    async def _up_to(self, session: Session, ts: int) -> tuple[bool, int, dict[str, int] | None]:
        db, done = self._db, False
        with self._waiting(_IDLE_S):
            if not (done := await db.none_up_to(ts)):
                db.sweep_pending()  # not in the loop: the end of a sweep is a change
            while not done:
                with trio.move_on_after(_LOOKS_APART_S):
                    await db.changed()
                done = await db.none_up_to(ts)
        return done, 0, self._workers()

    def _workers(self) -> dict[str, int] | None:
        """How many processes run each observer; None: those of a former owner may be about to find this one."""
        if self._db.works_elsewhere is not None and self._db.works_elsewhere() is None:
            return None
        counts = self.sessions.workers()
        for id in self._db.works():
            counts[id] = counts.get(id, 0) + 1
        return counts

    def _folder(self) -> FolderIs:
        clients = [session for session in self.sessions.all.values() if session.peer is not None]
        workers = sum(bool(session.works) for session in clients) + (self._db._worker is not None)
        return folder_of(self._db)._replace(clients=len(clients) - 1, workers=workers)

    def _held_up(self, held: Held) -> None:
        """The loop was held, so no client was answered. Called in the thread that watches it."""
        if held.seconds >= _HELD_S and self.sessions.all:
            log.warning(
                "this process owns the store, and its loop was held for %.1f s (%s): all other processes that have the "
                "store open waited. In production, run `perco serve`: an owner that does nothing else",
                *(held.seconds, held.where),
            )

    def _busy(self) -> bool:
        """N7: whether a client is at a row, or may be committing an observed write."""
        if not self.sessions.all:
            return False
        return bool(self.sessions.claims or self._db.driver.entered.cells) or self._db.locked_observed()

    # ------------------------------------------------------------ upkeep

    async def _vacuum(self, session: Session, _: Any) -> dict[str, Any]:
        return pack_vacuum(await self._db.vacuum())

    async def _split(self, session: Session, where: Any) -> tuple[Any, ...]:
        table, row = where
        return astuple(await self._db.splitting.split(table, row))

    async def _compact(self, session: Session, table: Any) -> list[Any]:
        return [astuple(each) for each in await self._db.compact(table)]

    async def _backfill(self, session: Session, _: Any) -> list[Any]:
        return [astuple(each) for each in await self._db.backfill()]

    # ------------------------------------------------------------ what everybody waits for

    async def _tasks(self, session: Session, _: Any) -> list[ProcessTasks]:
        """Tasks of this process, and of its clients except the one that asks. Clients that do not answer soon are left
        out. Calls that come while clients are being asked share the result."""
        if self._told_tasks is not None:
            return await self._told_tasks.shared()
        self._asked_tasks += 1
        since = trio.current_time() - self._options.silence_s
        stuck = [other.stuck for other in self.sessions.all.values() if other.stuck and other.stuck.told >= since]
        asked = [peer for peer, other in self._serving.items() if other is not session and other.stuck not in stuck]
        told = self._told_tasks = _ToldTasks(self._asked_tasks, len(asked))
        try:
            for peer in asked:
                peer.push(TASKS_ASKED, told.number)
            if asked:
                with self._waiting(_TASKS_S):
                    await told.all.wait()
        finally:
            self._told_tasks = None
            held = [tasks.held(each.pid, each.seconds, each.where) for each in stuck]
            told.found = [tasks.here("owner"), *told.answers.values(), *held]
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


def _timestamp(ts: Any) -> None:
    """Raises: TypeError."""
    read_typed((ts,), (int,))


def _wall_time(wall_s: Any) -> None:
    """Raises: TypeError, ValueError."""
    read_typed((wall_s,), (float, int))
    if not math.isfinite(wall_s):
        raise ValueError("a time")


def _pin(pin: Any) -> None:
    """What `Pins.put` takes. Raises: TypeError."""
    read_typed(pin, (str,), (str,), (int,), (float, int), (str,), (str, type(None)))


def folder_of(db: Database) -> FolderIs:
    """The folder of a store that is open here, or is read beside its owner."""
    path = db.local.path
    if path is None:
        raise UsageError("this store is in memory: it has no folder")
    process, command = owner(path)
    files, catalogue = [], db.catalogue
    for tablet in db.local.store.tablets():
        groups = [*PROTOCOL_GROUPS, *(catalogue.groups(tablet.table) if tablet.table in catalogue.tables else ())]
        entries = {group: tablet.entries(group) for group in groups}
        files.append(FileOf(tablet.table, tablet.start, tablet.statistics().used_bytes, entries, tablet.groups()))
    return FolderIs(str(path.absolute()), process or 0, command, unsynced(path), files)


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
    """The clients' answers, by session."""

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
