"""The client's side of `perco.open`: a database whose rows, timestamps and shared state are in another process.

This process runs its own transactions and observers. The server does the work that must run only once per store:
sweeping, garbage collection, backfills for new observers.

R5  Once the server has ended a session, the session's transactions and snapshots can read no more: they raise
    `SessionEnded`, after which `db.run` runs the transaction again. Everything else continues in a new session.
R8  A new owner holds the timestamps that a client's greeting lists, but no past snapshots. A client that has past
    snapshots abandons everything that it holds, and reports the timestamps of its greeting as done.
N7  The server knows whether the store is idle: it sees every lock and notify cell, and which worker has which row.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import trio

from perco.clock.holds import Holder
from perco.clock.loopwatch import Held, LoopStatistics, LoopWatch
from perco.database.database import Database
from perco.database.inside import close, inside
from perco.database.making import gathered
from perco.database.options import Options
from perco.database.owner import Now
from perco.errors import NOTHING_WRITTEN, SchemaMismatch, Unavailable, UsedAfterFork, WriteUnknown
from perco.history.vacuumed import VacuumResult, VacuumStatistics
from perco.notify.backfill import BackfillProgress
from perco.notify.concerned import Freshness
from perco.notify.lagging import Lag
from perco.notify.waiting import Waiting
from perco.notify.workers import Workers
from perco.protocol.retention import Removed
from perco.rpc.channel import WireOptions
from perco.rpc.framing import GREETING_BYTES_MAX, Message, packed
from perco.rpc.link import BACK_S, Link, LostError
from perco.schema import catalogue as catalogues, codes
from perco.schema.catalogue import Catalogue
from perco.schema.known import Known
from perco.schema.schema import Schema
from perco.serve import tasks, uses
from perco.serve.direct import DirectRowStore, TicketRows
from perco.serve.elsewhere import Elsewhere
from perco.serve.messages import (
    ANNOUNCED,
    HINTED,
    MOVED,
    NOTIFIED,
    RELEASED,
    TASKS_ASKED,
    USES_ASKED,
    FolderIs,
    Method,
    TabletsOf,
    hello,
    read_folder,
    read_servers,
    read_stuck,
    read_vacuum,
    read_welcome,
)
from perco.serve.pulse import Pulse
from perco.serve.remote import RemoteDriver, RemoteFates, RemoteOracle
from perco.serve.remote_rows import LostRowStore, RemoteRowStore
from perco.serve.shared_ids import SharedIds
from perco.serve.tasks import ProcessTasks
from perco.serve.together import Together
from perco.serve.uses import ProcessUse
from perco.storage import Tablet
from perco.tablets.compactor import Compacted
from perco.tablets.loading import BulkLoad, Files, Published
from perco.tablets.splitter import Split
from perco.txn.background import Background
from perco.txn.engine import Engine
from perco.txn.fates import Fates
from perco.txn.keeping import Keeper
from perco.txn.prefetch import Predictor

log: logging.Logger = logging.getLogger("perco.serve")

Reach: TypeAlias = Callable[[Callable[[], Awaitable[str]]], TicketRows]

_BYE_S = 1.0
_WORKERS_APART_S = 0.1  # between two questions which workers there are
_TELLS_S = 1.0  # how long to spend, after a deadline has passed, on finding out what waits
_locals: weakref.WeakSet[RemoteLocal] = weakref.WeakSet()


class RemoteLocal:
    """Takes the place of `LocalStore`, because a client of a served store has no folder."""

    link: Link
    store: RemoteRowStore
    version: int

    readonly = False
    threaded = False
    owner_alive = True
    term = b""
    path: Path | None = None

    def __init__(self, link: Link, store: RemoteRowStore) -> None:
        self.link, self.store = link, store
        self.version = -1  # of the catalogue that the server has adopted
        self.forked = False
        _locals.add(self)

    async def adapt(self, catalogue: Catalogue) -> None:
        """Have the server adopt the catalogue, and open, or make, what it names."""
        if catalogue.version > self.version:
            version = await self.link.call(Method.ADOPT, None, again=True)
            await self.store.refresh()
            self.version = version

    def check(self) -> None:
        """Raise UsedAfterFork in a forked child of the process that opened the store."""
        if self.forked:
            raise UsedAfterFork(self.link.name)


def _after_fork() -> None:
    """In a forked child: note that the connections belong to its parent."""
    for local in _locals:
        local.forked = True


os.register_at_fork(after_in_child=_after_fork)


class RemoteOwner:
    """A client's connection to the store's owner, and the calls over it. Loop thread only.

    Attributes: `engine`, `keeper`, `workers`, `waiting`: the client's own; `make_client` makes a database of them.
    """

    store: RemoteRowStore
    local: RemoteLocal
    heartbeat: LoopWatch
    engine: Engine
    keeper: Keeper
    waiting: Waiting

    link: Link
    workers: Workers

    is_here = False

    def __init__(
        self,
        schema: Schema,
        options: Options,
        wire: WireOptions,
        name: str,
        connect: Callable[[int, int], Any],
        token: bytes | Callable[[], bytes],
        pulsing: Callable[[Pulse], LoopWatch] | None = None,
        reach: Reach | None = None,
    ) -> None:
        rng = random.Random(options.seed)
        self._token, self._options = token if callable(token) else lambda: token, options
        self._connections = Background()  # ended last: tasks in flight still call the server
        self._session = secrets.token_hex(16)  # not from the seed: other clients may have the same seed
        self._ticket = ""  # presented to tablet servers
        self._too_much = False  # this client holds more than fits in a greeting
        self._greetings = 0  # how many it has sent
        self._wire, self._connect, self._rng = wire, connect, rng
        unmet = f"if this server uses TLS, open {name.replace('tcp:', 'tls:', 1)}" if name.startswith("tcp:") else ""
        self.link = Link(name, partial(connect, 0, 0), self._hello, self._welcomed, self._pushed, wire, rng, unmet)
        self.store = (
            RemoteRowStore(self.link, self._reach, wire.patience_s, rng)
            if reach is None
            else DirectRowStore(self.link, reach, wire.patience_s, rng)
        )
        self.local = RemoteLocal(self.link, self.store)
        background = Background()
        self._together: Together | None = None
        batch = options.batch if reach is None else gathered(options.batch)
        if batch.window_s:
            self._together = Together(self.link, self.store, batch, wire, background.spawn)
        token_of_locks = self._session[:16]
        fates = RemoteFates(self.link, self.store, token_of_locks)
        self._oracle = RemoteOracle(self.store, self.link, background)
        self._pulses = pulsing is not None
        watch = LoopWatch(options.heartbeat)
        self.heartbeat = (
            watch if pulsing is None else pulsing(Pulse(self._token, self._session, wire, random.Random(rng.random())))
        )
        driver = self._driver(fates, background)
        prefetch = Predictor(options.prefetch, served=True)
        self.engine = Engine(
            *(self.local, Known(schema), self._oracle, fates, driver, background, prefetch),
            *(options.transaction, options.retry, random.Random(options.seed), token_of_locks, options.on_event),
        )
        self._ids = SharedIds(self.engine.known)
        driver.name = self.engine.known.name_of
        self.keeper = Keeper(self.engine, self.local.adapt, is_told=False)
        self.workers = Workers(self.engine)
        self.workers.on_begin, self.workers.on_end = self._worker_begins, self._worker_ended
        self.waiting = Waiting(self.engine, self.keeper, self.workers.running_here, dict, tells_s=_TELLS_S)

    def _driver(self, fates: Fates, background: Background) -> RemoteDriver:
        store = self.store if self._together is None else self._together.store
        return RemoteDriver(
            *(self.link, self._together, self._oracle.drawn_elsewhere, self.store.catch_up),
            *(store, self._oracle, fates, self._options.commit, background, self._options.on_event),
        )

    def _begin_session(self) -> None:
        engine = self.engine
        before = engine.driver
        assert isinstance(before, RemoteDriver)
        driver = engine.driver = self._driver(engine.fates, engine.background)
        driver.name, driver.quiet = before.name, before.quiet
        driver.counters, driver.on_notified, driver.hints = before.counters, before.on_notified, before.hints
        driver.damaged, driver.contended = before.damaged, before.contended
        if before.timings is not None:
            driver.measure(before.timings)
        driver.orphaned = before.orphaned

    # ------------------------------------------------------------ the link

    def _hello(self) -> Message:
        self._greetings += 1
        greeting = hello(self._token(), self._session, sorted(self._oracle.holds.open), number=self._greetings)
        self._too_much = (
            len(packed(greeting)) > GREETING_BYTES_MAX or len(packed(self._holding())) > self._wire.message_bytes_max
        )
        return hello(self._token(), self._session, (), number=self._greetings) if self._too_much else greeting

    def _holding(self) -> Message:
        """The holds and claims that this client has (R7)."""
        elsewhere = worker.elsewhere if (worker := self.workers.worker) is not None else None
        claims = tuple(elsewhere.claims.items()) if isinstance(elsewhere, Elsewhere) else ()
        return tuple(self._oracle.holds.numbers), claims

    def _reach(self, number: int, port: int) -> Link:
        """Start a link to a tablet server. When the link connects again, it needs no new session, because the owner
        keeps track of what this client holds (F3)."""

        def welcomed(message: Message) -> bool:
            read_welcome(message)
            return True

        def hello_again() -> Message:
            return hello(self._token(), self._ticket, ())

        name, connect = f"{self.link.name} ({number})", partial(self._connect, number, port)
        link = Link(name, connect, hello_again, welcomed, lambda what, value: None, self._wire, self._rng)
        link.end = self._connections.start(link.run, f"link-{number}")
        return link

    def _welcomed(self, message: Message) -> bool:
        new, kept, info = read_welcome(message)
        self._oracle.told(info["version"], info["wall_ms"], info["last"])
        holds = self._oracle.holds
        greeted = tuple(holds.open) if kept and not self._too_much else ()  # the server holds these
        kept = kept and not self._too_much and not (new and holds.numbers)
        self.store.greeted(info)
        self._ticket = info["ticket"]
        held = self.heartbeat.take_longest()  # since the last greeting
        if (new or not kept) and self.link.connections:
            self._say_that_it_ended(held)
        if not kept:
            self.store.lost()
            # R5: reads through the former driver raise SessionEnded.
            self.engine.driver.reads = LostRowStore()
            if self._together is not None:
                self._together.store.end_reads()
            set.clear(holds.open)
            self.link.tell(Method.DONE, greeted)  # G1, L1: `set.clear` has not notified the server
            holds.numbers.clear()
            self._begin_session()
        self.link.tell(Method.HOLDING, self._holding())
        self.link.tell(Method.WORKS, self._observers())
        if self.engine.driver.orphaned.is_set():
            self.link.tell(Method.ORPHANED, None)
        elsewhere = worker.elsewhere if (worker := self.workers.worker) is not None else None
        if isinstance(elsewhere, Elsewhere):
            elsewhere.forget()
            if worker is not None and elsewhere.told_of_hints:  # that message may be lost
                elsewhere.wants_hints(worker.hints.on)
        self.engine.driver.notified()  # N8: messages that the server pushed meanwhile are lost
        return kept

    def _say_that_it_ended(self, held: Held) -> None:
        """Log that the session has ended, and why. An observer whose every run ends the session (R7) would run again
        forever; the log then gives the reason."""
        if held.seconds < self._wire.silence_s:
            log.info("the server at %s has begun a new session for this client", self.link.name)
            return
        log.warning(
            "the server at %s has ended this client's session: open transactions fail, and observers run again. "
            "The event loop was blocked for %.1f s (%s): run code that keeps the GIL for so long in a process of its "
            "own",
            *(self.link.name, held.seconds, held.where),
        )

    def _pushed(self, what: int, value: Any) -> None:
        if self.engine.background.ended:
            return  # this client is closed, or has failed: it starts no more tasks
        if what in (NOTIFIED, RELEASED):
            elsewhere = worker.elsewhere if (worker := self.workers.worker) is not None else None
            if isinstance(elsewhere, Elsewhere) and what == NOTIFIED:
                elsewhere.woken()
            elif isinstance(elsewhere, Elsewhere):
                elsewhere.released()
            self.engine.driver.notified()
        elif what == HINTED:
            self.engine.driver.hint(value)
        elif what == ANNOUNCED:
            self._oracle.catalogue_version = max(self._oracle.catalogue_version, value)
            self.engine.driver.notified()  # N10: a scanner looks at the catalogue when it begins a tour
        elif what == MOVED:
            self.store.moved()
            if not self.store.spread:  # otherwise, a server that no longer has the tablet says so (F2)
                self.engine.background.spawn(self.store.catch_up)
        elif what == TASKS_ASKED:
            try:
                self.link.tell(Method.TASKS_ARE, (value, tasks.here("client")))
            except Exception:  # a question about tasks must not end this client's connection
                log.exception("failed to report what the tasks wait for")
        elif what == USES_ASKED:
            try:
                found = uses.here("client", self.engine, self.workers, self._ids)
                self.link.tell(Method.USES_ARE, (value, found))
            except Exception:  # likewise
                log.exception("failed to report what this process does with the store")

    # ------------------------------------------------------------ what the server does

    async def tasks(self) -> list[ProcessTasks]:
        """The tasks of the owner and of its other clients, with what they wait for."""
        return [tasks.read(each) for each in await self.link.call(Method.TASKS, None, again=True)]

    @property
    def session(self) -> str:
        """The name of this client's session, a secret."""
        return self._session

    async def uses(self) -> list[ProcessUse]:
        """How the owner and its other clients use the store."""
        found = [uses.read(each) for each in await self.link.call(Method.USES, None, again=True)]
        own = self.engine.known.catalogue.own_id
        return [each._replace(observers=[run._replace(id=own(run.id)) for run in each.observers]) for each in found]

    async def servers(self) -> list[TabletsOf]:
        """Which process has which tablets open."""
        return read_servers(await self.link.call(Method.SERVERS, None, again=True))

    async def folder(self) -> FolderIs:
        """The store's folder, as its owner sees it."""
        return read_folder(await self.link.call(Method.FOLDER, None, again=True))

    async def folder_and_id(self) -> tuple[str, str]:
        found = await self.folder()
        return found.path, found.id

    async def vacuum(self, progress: Callable[[VacuumResult], None] | None) -> VacuumResult:
        """Have the owner run the vacuum. `progress` is called once, with the result."""
        result = read_vacuum(await self.link.call(Method.VACUUM, None, again=True, writes=True))
        if progress is not None:
            progress(result)
        return result

    async def backfill(self, progress: Callable[[BackfillProgress], None] | None) -> list[BackfillProgress]:
        """Have the owner run its backfills. `progress` is called at the end, with each result."""
        found = await self.link.call(Method.BACKFILL, None, again=True, writes=True)
        done = [BackfillProgress(*each) for each in found]
        await self.keeper.renew()  # which observers are ready now
        for each in done:
            if progress is not None:
                progress(each)
        return done

    async def split(self, table: str, row: bytes | None) -> Split:
        """Have the owner split a tablet. Raises: also WriteUnknown, if the answer is lost."""
        try:
            return Split(*await self.link.call(Method.SPLIT, (table, row), again=False))
        except LostError as error:
            raise WriteUnknown(
                "splitting a tablet", str(error), "`perco tablets` shows which tablets there are."
            ) from error

    async def compact(self, table: str | None) -> list[Compacted]:
        """Have the owner compact tablets. Raises: also WriteUnknown, if the answer is lost."""
        try:
            done = await self.link.call(Method.COMPACT, table, again=False)
        except LostError as error:
            raise WriteUnknown("compacting tablets", str(error)) from error
        return [Compacted(*each) for each in done]

    async def begin_load(self, tables: Sequence[str], build: str = "") -> BulkLoad:
        """Have the owner begin a bulk load. If this client's session ends, so does the load."""
        try:
            begun = BulkLoad(*await self.link.call(Method.BEGIN_LOAD, (list(tables), build), again=False))
        except LostError as error:
            raise Unavailable("beginning a bulk load", remedy=f"{NOTHING_WRITTEN} ({error})") from error
        await self.keeper.renew()
        return begun

    async def publish_load(self, id: str, files: Files) -> Published:
        """Have the owner publish a bulk load. Raises: also WriteUnknown, if the answer is lost."""
        try:
            done = Published(*await self.link.call(Method.PUBLISH_LOAD, (id, list(files.items())), again=False))
        except LostError as error:
            raise WriteUnknown("publishing a bulk load", str(error)) from error
        await self.keeper.renew()
        return done

    async def end_load(self, id: str) -> None:
        await self.link.call(Method.END_LOAD, id, again=True)

    async def now(self) -> Now:
        return Now(*await self.link.call(Method.NOW, None, again=True))

    def tablets(self) -> Sequence[Tablet]:
        return self.store.tablets_here()

    def statistics(self) -> tuple[LoopStatistics, VacuumStatistics]:
        return self.heartbeat.statistics(), VacuumStatistics(0, Holder("retention", 0), 0, Removed(), None)

    # ------------------------------------------------------------ observers

    def _observers(self) -> tuple[Sequence[str], Sequence[str]]:
        """Ids of the observers that this process has, and of those that it may run; the oldest ones (N18)."""
        worker = self.workers.worker
        has, runs = worker.works() if worker is not None else ((), ())
        return [*map(self._ids.shared, has)], [*map(self._ids.shared, runs)]

    async def _worker_begins(self) -> None:
        worker = self.workers.worker
        assert worker is not None
        worker.elsewhere = Elsewhere(self.link, self._together, self._ids.shared)
        await self.link.call(Method.WORKS, self._observers(), again=True)

    async def _worker_ended(self) -> None:
        self.link.tell(Method.WORKS, ((), ()))

    async def wait_idle(self) -> int:
        while True:
            self.engine.background.check()
            idle, failed, workers, stuck = await self.link.call(Method.IDLE, None, again=True)
            if idle:
                return int(failed)
            if not self.engine.fates.observed:
                await self.waiting.must_be_readable(None if stuck is None else read_stuck(stuck))
            await self._check_workers(workers)

    async def wait_for(self, ts: int, without: Sequence[int] | None) -> dict[str, int]:
        while True:
            self.engine.background.check()
            asked = ts, None if without is None else tuple(without)
            failed, workers = await self.link.call(Method.UP_TO, asked, again=True)
            if failed is not None:
                return self._ids.here(dict(failed))
            worker = self.workers.worker
            if worker is not None and worker.unrunnable:  # raises, if it can run for none of the changes that are left
                await self.waiting.none_up_to(ts, without)
            await self._check_workers(workers, (ts, without))

    async def freshness(self, withouts: Sequence[Sequence[int]]) -> list[Freshness]:
        found = await self.link.call(Method.FRESH, tuple(map(tuple, withouts)), again=True)
        return [Freshness(*each) for each in found]

    async def lag(self) -> dict[str, Lag]:
        return self._ids.here({id: Lag(*told) for id, told in await self.link.call(Method.LAG, None, again=True)})

    async def workers_now(self) -> dict[str, int]:
        while True:
            workers: dict[str, int] | None
            _, _, workers, _ = await self.link.call(Method.IDLE, None, again=True)
            if workers is not None:
                return self._ids.here(workers)
            await trio.sleep(_WORKERS_APART_S)  # those of a former owner may be about to reconnect

    async def _check_workers(
        self, workers: dict[str, int] | None, up_to: tuple[int, Sequence[int] | None] | None = None
    ) -> None:
        """Raise an error if no process runs the observers, because the wait would never end. After the server has been
        away, workers get time to reconnect.

        Args:
            workers: None, if the server says that some may be about to reconnect.
            up_to: as for `Waiting.must_be_run`.
        """
        if workers is not None and trio.current_time() >= self.link.back_since + BACK_S:
            await self.waiting.must_be_run(self._ids.here(workers), up_to)

    # ------------------------------------------------------------ the beginning and the end

    async def begin_link(self, *, known: bool = False, readonly: bool = False) -> None:
        """Connect, and add to the store's catalogue what the schema declares; `known`: use the store's own schema
        instead.

        Raises: WrongToken, VersionMismatch, Unavailable, SchemaMismatch.
        """
        self._connections.start(self.link.run, "link")
        await self.store.refresh()
        if self._pulses:
            self.heartbeat.start()
        engine = self.engine
        if not known and not readonly:
            declared = await catalogues.declare(engine.driver.store, engine.known.schema, lambda version: None)
            await self.keeper.adopt(declared)
            codes.tell_changed(declared, engine.known.schema)
            await self.keeper.announce()
            return
        engine.readonly = readonly
        catalogue = (await catalogues.load(self.store)).seen_by(engine.known.schema)
        if known:
            engine.known.borrow(catalogues.schema_of(catalogue))
        elif catalogue.declare(engine.known.schema) is not catalogue:
            raise SchemaMismatch(
                "the store does not have all that the schema declares (`perco schema STORE app:schema` shows what is "
                "missing); open it once without readonly=True"
            )
        await self.keeper.adopt(catalogue)
        await self.keeper.announce()

    async def aclose(self) -> None:
        """Stop the tasks, end the session, close the connections."""
        with trio.CancelScope(shield=True):
            await self.engine.background.aclose()
            await self.heartbeat.aclose()
            with suppress(Exception), trio.move_on_after(_BYE_S):
                if self.link.connected.is_set():
                    await self.link.call(Method.BYE, None, again=True)
            await self._connections.aclose()
            self.store.close()


def make_client(
    schema: Schema,
    options: Options,
    wire: WireOptions,
    name: str,
    connect: Callable[[int, int], Any],
    token: bytes | Callable[[], bytes],
    pulsing: Callable[[Pulse], LoopWatch] | None = None,
    reach: Reach | None = None,
) -> Database:
    """Make a client's database, which is not connected yet. The arguments are those of `open_served`."""
    owner = RemoteOwner(schema, options, wire, name, connect, token, pulsing, reach)
    return Database(owner.engine, owner.keeper, owner.workers, owner.waiting, owner, options)


async def open_served(
    name: str,
    connect: Callable[[int, int], Any],
    schema: Schema | None,
    options: Options,
    wire: WireOptions,
    token: bytes | Callable[[], bytes],
    *,
    readonly: bool = False,
    pulsing: Callable[[Pulse], LoopWatch] | None = None,
    remedy: str = "",
    reach: Reach | None = None,
) -> Database:
    """Open a database over a server. Raises: as `RemoteOwner.begin_link`; SessionEnded, if the owner ends meanwhile.

    Args:
        connect: connects to the tablet server with the given number and port; 0 and 0: to the owner.
        pulsing: makes the object that watches the loop and sends pulses while it is held (R10); None: no pulses.
        remedy: the advice in the error when the server is away for too long; "": try again.
        reach: makes the rows of a direct client; its argument is a function that asks the owner for the ticket. None:
            this client is not a direct one.
    """
    db = make_client(schema or Schema(), options, wire, name, connect, token, pulsing, reach)
    owner = remote_owner(db)
    owner.link.remedy = remedy
    try:
        await owner.begin_link(known=schema is None, readonly=readonly)
    except BaseException:
        with trio.CancelScope(shield=True):
            await close(db)
        raise
    return db


def remote_owner(db: Database) -> RemoteOwner:
    """A client's connection to the owner of its store."""
    owner = inside(db).owner
    assert isinstance(owner, RemoteOwner), "this process has the store open itself"
    return owner


def is_client(db: Database) -> bool:
    """Whether another process owns the database's store."""
    return not inside(db).owner.is_here
