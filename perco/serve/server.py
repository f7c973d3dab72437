"""The owner's side: answers the calls of clients from its own store, oracle and memory.

Reads are answered at once, on the loop. Mutations of all connections, and of the owner's own tasks, go into the same
queues, one for each tablet, so one LMDB commit serves them all.

C1  One-step commits are made here: the timestamp is drawn, and the cells are entered, in one step of the loop (C2).
C4  A client cannot see the entries in this process's memory, so the server looks for them before it reads for a client.
R7  The server accepts no request of a session that has ended.
R10 While a client's loop is held, its pulse speaks for it; the server handles the pulse's messages, but answers none.
N8  Clients that run observers are woken when notify cells have become visible, whichever process put them.
N10 Every drawn timestamp comes with the catalogue's version; a newer version is also announced at once.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import astuple
from functools import partial
from typing import Any, Final

import trio

from perco.clock.loopwatch import Held
from perco.database.database import Database
from perco.database.inside import inside, local_owner
from perco.errors import StoreLocked, Unavailable, UsageError, WriteUnknown
from perco.rpc.addresses import Address
from perco.rpc.channel import Channel, WireOptions
from perco.rpc.crossing import pack_error
from perco.rpc.framing import Message, WireError
from perco.rpc.link import BACK_S
from perco.rpc.peer import Peer
from perco.serve import loads, messages
from perco.serve.asking import Told, about_tasks, about_uses
from perco.serve.door import Door
from perco.serve.draws import Draws
from perco.serve.folders import place_of
from perco.serve.hinting import Hinting
from perco.serve.messages import (
    ANNOUNCED,
    MOVED,
    FolderIs,
    Method,
    TabletIs,
    TabletsOf,
    pack_vacuum,
    read_all,
    read_claim,
    read_holding,
    read_pulse,
    read_typed,
    welcome,
)
from perco.serve.one_step import OneStep
from perco.serve.operating import Operating
from perco.serve.parking import Parking
from perco.serve.processes import TabletServers, on_news
from perco.serve.rows import Rows
from perco.serve.sessions import Session, Sessions, Stuck, must_go_on
from perco.serve.shared_ids import SharedIds
from perco.serve.starting import Starts
from perco.serve.tasks import ProcessTasks
from perco.serve.uses import ProcessUse
from perco.tablets.backend import Tickets, lost

log: logging.Logger = logging.getLogger("perco.serve")

_OUTLIVE_S: Final = 5.0  # how long a call waits for another client's transaction, before the caller repeats the call
_IDLE_S: Final = 1.0
_HELD_S: Final = 1.0  # an owner with clients logs a warning if its loop was held for longer than this
_LOST_S: Final = 5.0  # how long an error is held back while this process finds out whether it has lost the store
_EXPIRE_EVERY: Final = 4  # how many times per lease to look for dead sessions


class Server(Door[Session]):
    """Serves one opened store. Loop thread only."""

    sessions: Sessions
    rows: Rows
    draws: Draws
    one_step: OneStep
    loads: loads.Loads
    told_tasks: Told[ProcessTasks]
    told_uses: Told[ProcessUse]
    served: int

    def __init__(
        self,
        db: Database,
        options: WireOptions,
        servers: TabletServers | None = None,
        tickets: Tickets | None = None,
    ) -> None:
        parts = inside(db)
        super().__init__(parts.background, options)
        self._parts, self._owner, self._servers, self._tickets = parts, local_owner(db), servers, tickets
        self._ids = SharedIds(parts.known)
        driver, oracle, fates = parts.driver, parts.oracle, parts.fates
        self.sessions = Sessions(oracle.holds, fates, options.lease_s, driver.leave_orphans)
        self.sessions.on_wake = self._woken
        self.parking: Parking = Parking(self._owner.backend, parts)
        self.loads = loads.Loads(self._owner, self.sessions, parts.background)
        if servers is not None:
            self.sessions.on_begin, self.sessions.on_end = servers.session_began, servers.session_ended
            self.sessions.on_held = servers.session_held
            servers.told, servers.on_moved = on_news(driver.notified, driver.quiet), self._moved
        self._news: Callable[[int], None] = lambda what: None
        if tickets is not None:
            self.sessions.on_end = tickets.end
            # A client that is gone may not have reported its notify cells.
            tickets.on_gone += [driver.leave_orphans, driver.notified]
            self._news = on_news(driver.notified, driver.quiet)
        if self._owner.backend.local is not None:
            self._owner.splitting.on_split.append(self._moved)
        self._pulses_of: dict[str, Channel] = {}  # by session (R10)
        self._waits: set[trio.CancelScope] = set()
        self._watching, self.served = False, 0  # `served`: calls, in total
        asks = self.sessions, self._serving, options.silence_s, self._waiting
        self.told_tasks = Told(about_tasks(), *asks)
        self.told_uses = Told(about_uses(parts, self._ids, self.sessions), *asks)
        rows = self.rows = Rows(parts, self._owner.store, self.sessions, options)
        self.draws = Draws(parts, self._owner, self.sessions, self._fail)
        refusal = ""
        if servers is not None:  # their readers do not see the entries in this memory (C4)
            refusal = "tablet servers now have the store's rows"
        elif tickets is not None:
            refusal = "clients now access the store's rows directly"
        elif not self._owner.store.once:
            refusal = "the store may apply a mutation twice (C6)"
        self.one_step = OneStep(parts, rows, refusal)
        self._handlers = {int(method): handler for method, handler in self._all_handlers().items()}

    def _all_handlers(self) -> dict[Method, Callable[[Session, Peer, int, Any], None]]:
        rows, one_step, oracle, fates = self.rows, self.one_step, self._parts.oracle, self._parts.fates
        return {
            Method.READ: rows.read,
            Method.START: Starts(self._parts, self.draws, rows, self._fail).start,
            Method.SCAN: rows.scan,
            Method.LEAVES: rows.leaves,
            Method.APPLY: rows.apply,
            Method.COMMIT: one_step.commit,
            Method.OPERATE: Operating(self._parts, one_step, self.draws, self._owner.store.prompt).operate,
            Method.DRAW: self.draws.draw,
            Method.DONE: self._untold(self._done),
            Method.ALIVE: lambda session, peer, id, start_ts: peer.reply(id, fates.alive(start_ts)),
            Method.OUTLIVE: self._later(self._outlive, messages.must_be_timestamp),
            Method.TABLETS: self._tablets,
            Method.ADOPT: self._later(self._adopt),
            Method.HOLD: self._hold,
            Method.RELEASE: self._untold(lambda session, number: self.sessions.release(session, number)),
            Method.AT: self._later(lambda session, wall_s: oracle.at(wall_s), messages.must_be_wall_time),
            Method.OLDEST: lambda session, peer, id, _: peer.reply(id, oracle.holds.oldest()),
            Method.PIN: self._later(self._pin, messages.must_be_pin),
            Method.DROP_PIN: self._later(lambda session, pin: oracle.pins.drop(*pin), messages.must_be_two_texts),
            Method.CLAIM: self._claim,
            Method.UNCLAIM: self._untold(self._unclaim),
            Method.HOLDING: self._untold(self._holding),
            Method.WORKS: self._works,
            Method.LOOKED: self._untold(self._looked),
            Method.HINTS: self._untold(Hinting(self._parts.driver).wants),
            Method.IDLE: self._later(self._idle),
            Method.UP_TO: self._later(self._up_to, messages.must_be_up_to),
            Method.FRESH: self._later(self._fresh, messages.must_be_views),
            Method.LAG: self._later(self._lag),
            Method.NOW: self._later(self._now),
            Method.FOLDER: self._later(self._folder),
            Method.VACUUM: self._later(self._vacuum),
            Method.BACKFILL: self._later(self._backfill),
            Method.LAST: lambda session, peer, id, _: peer.reply(id, oracle.last),
            Method.ORPHANED: self._untold(lambda session, _: self.sessions.orphans(session)),
            Method.TASKS: self._later(self.told_tasks.ask),
            Method.TASKS_ARE: self._untold(self.told_tasks.told),
            Method.USES: self._later(self.told_uses.ask),
            Method.USES_ARE: self._untold(self.told_uses.told),
            Method.SERVERS: self._later(self._servers_are),
            Method.SPLIT: self._later(self._split, lambda where: read_typed(where, (str,), (bytes, type(None)))),
            Method.COMPACT: self._later(self._compact, lambda table: read_typed((table,), (str, type(None)))),
            Method.BEGIN_LOAD: self._later(self.loads.begin, loads.names),
            Method.PUBLISH_LOAD: self._later(self.loads.publish, loads.files),
            Method.END_LOAD: self._later(self.loads.end, loads.name),
            Method.PARK: self._later(self.parking.park),
            Method.GO_ON: self._later(self.parking.go_on),
            Method.TICKET: self._later(self._ticket),
            Method.NEWS: self._untold(lambda session, what: self._news(what)),
            Method.BYE: self._bye,
            Method.READS: rows.reads,
            Method.COMMITS: one_step.commits,
            Method.CLAIMS: self._claims,
        }

    async def _pin(self, session: Session, pin: Any) -> Any:
        """Put a pin, and note the clock: readers beside the owner can then read at the pin's timestamp at once (O3)."""
        put = await self._parts.oracle.pins.put(*pin)
        await self._owner.note_now()
        return put

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
        """Like `Door.listening`; tablet servers listen too."""
        async with super().listening(address, token, tls, ours=ours) as bound:
            if self._servers is not None:
                await self._servers.listen(bound, token, *(tls or ("", "")))
            yield bound

    @contextmanager
    def _waiting(self, seconds: float) -> Iterator[None]:
        """Let a client wait for something in the block, at most this long; when serving ends, the wait ends at once."""
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
        """Run the server's background tasks while the block lasts; at its end, end all sessions."""
        parts, owner = self._parts, self._owner
        parts.driver.on_notified.append(self._notified)
        parts.oracle.on_announced.append(self._announced)
        parts.waiting.watch_elsewhere, owner.idle.busy_elsewhere = self._ids.watching(self.sessions.watch), self._busy
        owner.heartbeat.on_held = self._held_up
        since = -math.inf if owner.made_here else trio.current_time()
        owner.idle.works_elsewhere = partial(self._works_elsewhere, since)
        if self._tickets is not None:
            owner.idle.claimed_elsewhere = lambda: self.sessions.claimed
        stops = [parts.background.start(self._expire, "sessions"), parts.background.start(self._flusher.run, "flusher")]
        try:
            yield
        finally:
            for stop in stops:
                stop()
            self._end_waits()
            parts.driver.on_notified.remove(self._notified)
            parts.oracle.on_announced.remove(self._announced)
            parts.waiting.watch_elsewhere = owner.heartbeat.on_held = None
            owner.idle.busy_elsewhere = owner.idle.works_elsewhere = owner.idle.claimed_elsewhere = None
            for session in list(self.sessions.all.values()):
                self.sessions.end(session)

    def _let_in(self, name: str, held: Sequence[int], number: int) -> tuple[Session, Message] | None:
        before = self.sessions.all.get(name)
        if before is not None and number < before.greeting:
            return None
        if before is not None and before.peer is not None:
            # R4: nothing more is read from its former connection.
            self._serving.pop(before.peer, None)
            before.peer.channel.close_soon()
            before.peer.ended = True
            before.peer = None
        session, new, kept = self.sessions.greet(name, held, trio.current_time(), number)
        return session, welcome(new, kept, {**self._info(), "ticket": session.ticket})

    def _let_in_pulse(self, name: str, channel: Channel) -> tuple[Callable[[list[Message]], None], Message]:
        session = self.sessions.all.get(name)
        if session is None:
            raise Unavailable("the session of that pulse has ended, or has not begun here yet")
        if (former := self._pulses_of.get(name)) is not None:
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
        """R10: handle a message of a client's pulse. Raises: WireError."""
        pid, seconds, where = read_pulse(message)
        now, before, silence_s = trio.current_time(), session.stuck, self._options.silence_s
        self.sessions.beat(session, now, Stuck(pid, seconds, where, now) if seconds else None)
        if seconds > silence_s and (before is None or before.seconds <= silence_s):
            log.warning(
                "the event loop of client %s (process %d) has been blocked for %.1f s, at %s; the client keeps its "
                "session",
                *(session.name, pid, seconds, where),
            )

    def _begun(self, peer: Peer, session: Session, number: int) -> bool:
        if newest := number >= session.greeting:
            session.peer = peer
        return newest

    def _ended(self, peer: Peer, session: Session) -> None:
        if session.peer is peer:
            session.peer = None
            session.last_heard = trio.current_time()

    def _replaces(self, name: str) -> bool:
        return (before := self.sessions.all.get(name)) is not None and before.peer is not None

    def _info(self) -> dict[str, Any]:
        parts = self._parts
        return {
            "version": parts.oracle.catalogue_version,
            "wall_ms": parts.oracle.wall_ms(),
            "last": parts.oracle.last,
            "groups": self._owner.store.groups,
            "once": self._owner.store.once,
            "logs": self._owner.store.logs,
            "lease_s": self._options.lease_s,
            "spread": self._servers is not None,
            "alone": self._parts.fates.alone,
        }

    async def _expire(self) -> None:
        """End sessions whose clients are gone (R7)."""
        while True:
            await trio.sleep(self._options.lease_s / _EXPIRE_EVERY)
            for session in self.sessions.expire(trio.current_time()):
                log.info("client %s sent nothing for %g s: its session has ended", session.name, self._options.lease_s)

    # ------------------------------------------------------------ calls

    def _fail(self, peer: Peer, id: int, error: Exception) -> None:
        """Answer a call with an error. If the reason may be that another process owns the store, find out. If so, a
        direct client gets no answer: it asks that process once this one ends."""
        if self._tickets is None or self._draining or not isinstance(error, StoreLocked | Unavailable | WriteUnknown):
            return peer.fail(id, error)

        async def run() -> None:
            if isinstance(error, StoreLocked) or await lost(self._owner.backend.check, _LOST_S):
                peer.leave_open(id)
            else:
                peer.fail(id, error)

        self._parts.background.spawn(run)

    def _handle(self, peer: Peer, id: int, method: int, arguments: Any) -> None:
        session = must_go_on(self._serving.get(peer))
        handler = self._handlers.get(method)
        if handler is None:
            raise WireError(f"there is no method {method}")
        self.served += 1
        try:
            handler(session, peer, id, arguments)
        except messages.UNREADABLE as error:
            raise WireError(f"method {method}: arguments that cannot be decoded: {error}") from error

    def _later(
        self, answer: Callable[[Session, Any], Awaitable[Any]], check: Callable[[Any], object] = lambda arguments: None
    ) -> Callable[[Session, Peer, int, Any], None]:
        """A handler that answers from its own task. `check` raises TypeError for invalid arguments."""

        def handle(session: Session, peer: Peer, id: int, arguments: Any) -> None:
            check(arguments)

            async def run() -> None:
                try:
                    peer.reply(id, await answer(session, arguments))
                except Exception as error:
                    self._fail(peer, id, error)

            self._parts.background.spawn(run)

        return handle

    @staticmethod
    def _untold(hear: Callable[[Session, Any], None]) -> Callable[[Session, Peer, int, Any], None]:
        """A handler of a message that needs no answer; a caller that wants one all the same gets None."""

        def handle(session: Session, peer: Peer, id: int, told: Any) -> None:
            hear(session, told)
            peer.reply(id, None)

        return handle

    # ------------------------------------------------------------ liveness

    def _done(self, session: Session, start_ts: Any) -> None:
        self.sessions.done(session, read_all(start_ts, int))

    async def _outlive(self, session: Session, start_ts: int) -> None:
        """Return when a transaction has ended, or after a while."""
        with self._waiting(_OUTLIVE_S):
            await self._parts.fates.wait(start_ts)

    # ------------------------------------------------------------ the catalogue, the past

    def _tablets(self, session: Session, peer: Peer, id: int, _: Any) -> None:
        store, servers = self._owner.store, self._servers
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
        here = {(tablet.table, tablet.start): tablet.statistics() for tablet in self._owner.store.tablets_here()}
        tablets = []
        for table in self._owner.store.tables():
            entry = self._parts.catalogue.tables.get(table)
            for number, start, stop in entry.tablets() if entry is not None else [(0, b"", None)]:
                if (told := here.get((table, start))) is not None:
                    numbers = told.batches, told.mutations, told.queued, told.used_bytes
                    tablets.append(TabletIs(table, number, start, stop, 0, *numbers))
        return [TabletsOf(0, os.getpid(), [], tablets)]

    def _moved(self) -> None:
        for peer in self._serving:
            peer.push(MOVED, None)

    async def _adopt(self, session: Session, _: Any) -> int:
        """N10: adopt a catalogue that a client has changed."""
        parts = self._parts
        before = parts.catalogue.version
        await parts.keeper.renew()
        if parts.catalogue.version != before:  # T13: for new tables
            await self._owner.store.raise_floor(parts.oracle.holds.watermark, wait=False)
        await parts.oracle.announce(parts.catalogue.binds)
        return parts.catalogue.version

    def _hold(self, session: Session, peer: Peer, id: int, wanted: Any) -> None:
        number, ts = read_typed(wanted, (int,), (int,))
        peer.reply(id, (self.sessions.hold(session, number, ts), self._parts.oracle.holds.oldest()))

    # ------------------------------------------------------------ observers

    def _notified(self, where: object) -> None:
        """N8: wake workers, because notify cells have become visible, perhaps through a commit of the session
        `rows.by`."""
        self.sessions.wake(self.sessions.wakes.notified(trio.current_time(), self.rows.by))

    def _woken(self) -> None:
        """Watch the processes that were woken, because they may not answer."""
        if not self._watching and self.sessions.wakes.deadline < math.inf:
            self._watching = True
            # Not `spawn`, because the store waits for spawned tasks when it closes: an answer may never come.
            self._parts.background.start(self._watch, "watch")

    async def _watch(self) -> None:
        """As long as woken processes have not answered, wake others in place of those that take too long."""
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
        """Observers that clients run; None: workers of a former owner may be about to connect to this one."""
        return self._ids.here(self.sessions.workers()) or (None if trio.current_time() < began + BACK_S else ())

    def _claim(self, session: Session, peer: Peer, id: int, asked: Any) -> None:
        peer.reply(id, self._claimed(session, asked))

    def _claims(self, session: Session, peer: Peer, id: int, asked: Any) -> None:
        peer.reply(id, [self._claimed(session, each) for each in asked])

    def _claimed(self, session: Session, asked: Any) -> tuple[bytes, list[tuple[bytes, int]]]:
        table, wanted, most, halts = read_claim(asked)
        self.sessions.wakes.heard(session)
        return self.sessions.claim(session, table, wanted, most, halts=halts)

    def _unclaim(self, session: Session, where: Any) -> None:
        self.sessions.unclaim(session, where)
        self._parts.driver.quiet()  # N7: tasks that wait for the store to become idle look again

    def _holding(self, session: Session, all_of_it: Any) -> None:
        self.sessions.holding(session, *read_holding(all_of_it))
        self._parts.driver.quiet()

    async def _idle(self, session: Session, _: Any) -> tuple[bool, int, dict[str, int] | None, Any]:
        """Wait until the store is idle, or for a while (N7). Returns (whether it is idle, changes on the failed list,
        workers of each observer, a lock that cannot be read)."""
        idle, until = self._owner.idle, trio.current_time() + _IDLE_S
        with self._waiting(math.inf):  # a look that has to search the store may take longer
            changed = idle.watch()
            if not await idle.look():
                idle.sweep_pending()  # once per call, and so once a second for each client that waits
            while not idle.now():
                with trio.move_on_at(until):
                    await changed.wait()
                if trio.current_time() >= until:
                    break
                changed = idle.watch()
                await idle.look()
        stuck = idle.unreadable()
        return idle.now(), idle.failed(), self._workers(), None if stuck is None else pack_error(stuck)

    async def _now(self, session: Session, _: Any) -> tuple[bool, int, int]:
        return await self._owner.now()

    async def _up_to(
        self, session: Session, asked: tuple[int, Sequence[int] | None]
    ) -> tuple[dict[str, int] | None, dict[str, int] | None]:
        idle, until, failed = self._owner.idle, trio.current_time() + _IDLE_S, None
        with self._waiting(math.inf):  # a look may take longer
            if (failed := await idle.none_up_to(*asked)) is None:
                idle.sweep_pending()  # not inside `while`: the end of a sweep is itself a change
            while failed is None and trio.current_time() < until:
                with trio.move_on_at(min(until, trio.current_time() + idle.looks_apart_s)):
                    await idle.changed()
                failed = await idle.none_up_to(*asked)
        return failed and self._ids.told(failed), self._workers()

    async def _fresh(self, session: Session, withouts: Sequence[Sequence[int]]) -> list[Any]:
        return [astuple(each) for each in await self._owner.freshness(withouts)]

    async def _lag(self, session: Session, _: Any) -> list[Any]:
        return [(id, astuple(each)) for id, each in self._ids.told(await self._owner.lag()).items()]

    def _workers(self) -> dict[str, int] | None:
        """How many processes run each observer; None: workers of a former owner may be about to connect to this one."""
        if self._owner.idle.works_elsewhere is not None and self._owner.idle.works_elsewhere() is None:
            return None
        return dict(Counter(self.sessions.workers()) + Counter(map(self._ids.shared, self._owner.idle.works())))

    async def _folder(self, caller: Session, _: Any) -> FolderIs:
        clients = [session for session in self.sessions.all.values() if session.peer is not None]
        workers = sum(bool(session.works) for session in clients) + (self._parts.workers.worker is not None)
        return await place_of(self._owner.backend, self._parts.catalogue, len(clients) - 1, workers)

    def _held_up(self, held: Held) -> None:
        """Log that the loop was held, and so no client was answered. Called in the thread that watches the loop."""
        if held.seconds >= _HELD_S and self.sessions.all:
            log.warning(
                "this process owns the store, and its event loop was blocked for %.1f s (%s): all other processes that "
                "have the store open waited. In production, run `perco serve`: an owner that does nothing else",
                *(held.seconds, held.where),
            )

    def _busy(self) -> bool:
        """N7: whether a client runs observers, or may be committing an observed write."""
        if not self.sessions.all:
            return False
        return bool(self.sessions.claims or self._parts.driver.entered.cells) or self._owner.idle.locked_observed()

    # ------------------------------------------------------------ direct clients, upkeep

    async def _ticket(self, session: Session, _: Any) -> str:
        if self._tickets is None:
            raise UsageError("this server does not let clients access the rows directly: open its address instead")
        must_go_on(session)
        ticket = session.ticket
        await self._tickets.admit(ticket)
        return ticket

    async def _vacuum(self, session: Session, _: Any) -> dict[str, Any]:
        return pack_vacuum(await self._owner.vacuum(None))

    async def _split(self, session: Session, where: Any) -> tuple[Any, ...]:
        return astuple(await self._owner.split(*where))

    async def _compact(self, session: Session, table: Any) -> list[Any]:
        return [astuple(each) for each in await self._owner.compact(table)]

    async def _backfill(self, session: Session, _: Any) -> list[Any]:
        return [astuple(each) for each in await self._owner.backfill(None)]

    # ------------------------------------------------------------ the end

    def _bye(self, session: Session, peer: Peer, id: int, _: Any) -> None:
        self.sessions.end(session)
        peer.reply(id, None)
        peer.channel.close_soon()
