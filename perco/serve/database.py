"""`perco.open` of a served store: the same database, whose rows, timestamps and memory lie in another process.

This process runs its own transactions and observers. The server does what a store needs only once: sweeping,
collecting old versions, telling new observers of what is there.

R5  When the server has let go of the session, what was begun in it reads no more (`SessionEnded`, which `db.run` runs
    again), and everything goes on in a new one.
R8  A new owner holds what it was greeted with, but no past snapshots. A client that has any gives up all that it has,
    and says so.
N7  The server knows whether the store is idle: it sees every lock and notify cell, and which worker has which row.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import trio

from perco.errors import ReadOnly, SchemaMismatch, UsedAfterFork, WriteUnknown
from perco.naming import told_as
from perco.notify.database import Database
from perco.rpc.channel import WireOptions
from perco.rpc.framing import GREETING_BYTES_MAX, Message, packed
from perco.rpc.link import BACK_S, Link, LostError
from perco.serve import tasks
from perco.serve.elsewhere import Elsewhere
from perco.serve.messages import (
    ANNOUNCED,
    MOVED,
    NOTIFIED,
    RELEASED,
    TASKS_ASKED,
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
from perco.serve.remote import LostRowStore, RemoteDriver, RemoteFates, RemoteOracle, RemoteRowStore
from perco.serve.tasks import ProcessTasks
from perco.serve.together import Together
from perco.txn import catalogue as catalogues
from perco.txn.backfill import BackfillProgress
from perco.txn.background import Background
from perco.txn.catalogue import Catalogue
from perco.txn.client import Options
from perco.txn.compactor import Compacted, what_to_compact
from perco.txn.loopwatch import Held, LoopWatch
from perco.txn.schema import Schema, Table
from perco.txn.splitter import Split, where_to_split
from perco.txn.transaction import Snapshot
from perco.txn.vacuum import VacuumResult

log = logging.getLogger("perco.serve")

_BYE_S = 1.0
_locals: weakref.WeakSet[RemoteLocal] = weakref.WeakSet()


class RemoteLocal:
    """In place of `LocalStore`: a client of a served store has no folder."""

    readonly = False
    threaded = False
    owner_alive = True
    term = b""
    path: Path | None = None

    def __init__(self, link: Link, store: RemoteRowStore) -> None:
        self.link, self.store = link, store
        self.version = -1  # of the catalogue that the server has taken over
        self.forked = False
        _locals.add(self)

    async def adapt(self, catalogue: Catalogue) -> None:
        """Let the server open, or make, what a catalogue names."""
        if catalogue.version > self.version:
            self.version = await self.link.call(Method.ADOPT, None, again=True)
            await self.store.refresh()

    async def raise_floor(self, ts: int) -> None:
        """The server's affair (T13)."""

    def check(self) -> None:
        """Raises UsedAfterFork in a child of the process that opened this."""
        if self.forked:
            raise UsedAfterFork(self.link.name)


def _after_fork() -> None:
    """In a child: the connections are its parent's."""
    for local in _locals:
        local.forked = True


os.register_at_fork(after_in_child=_after_fork)


@told_as("Database")
class RemoteDatabase(Database):
    """A served store, opened. Made by `perco.open`."""

    _served = True
    _tells_s = 1.0

    def __init__(
        self,
        schema: Schema,
        options: Options,
        wire: WireOptions,
        name: str,
        connect: Callable[[int, int], Any],
        token: bytes,
        pulsing: Callable[[Pulse], LoopWatch] | None = None,
    ) -> None:
        options = replace(options, backfill=replace(options.backfill, on=False))  # the server's affair
        rng = random.Random(options.seed)
        self._token = token
        self._only_reads = False
        self._connections = Background()  # ended last: what is under way still asks the server
        self._session = secrets.token_hex(16)  # not of the seed: others may have the same
        self._ticket = ""  # for tablet servers
        self._too_much = False  # is held for a greeting
        self._wire, self._connect, self._rng = wire, connect, rng
        self.link = Link(name, partial(connect, 0, 0), self._hello, self._welcomed, self._pushed, wire, rng)
        local = RemoteLocal(self.link, RemoteRowStore(self.link, self._reach, wire.patience_s, rng))
        super().__init__(local, schema, options)  # type: ignore[arg-type]
        self._store: RemoteRowStore = local.store
        self._together: Together | None = None
        if options.batch.window_s:
            self._together = Together(self.link, local.store, options.batch, wire, self.background.spawn)
        self.lease_token = self._session[:16]
        self.fates = RemoteFates(self.link, local.store, self.lease_token)
        self.oracle = RemoteOracle(local.store, self.link, self.background.spawn)
        self._pulses = pulsing is not None
        if pulsing is not None:
            self.heartbeat = pulsing(Pulse(token, self._session, wire, random.Random(rng.random())))
        self._begin_session()

    def _begin_session(self) -> None:
        before = self.driver
        self.driver = RemoteDriver(
            self.link,
            self._together,
            self.oracle.drawn_elsewhere,  # type: ignore[attr-defined]
            self._store.catch_up,
            self._store if self._together is None else self._together.store,
            self.oracle,
            self.fates,
            self.config.commit,
            self.background,
            self.config.on_event,
        )
        self.driver.name = self.name_of
        self.driver.quiet = before.quiet
        self.driver.counters, self.driver.on_notified = before.counters, before.on_notified
        self.driver.damaged = before.damaged

    # ------------------------------------------------------------ the link

    def _hello(self) -> Message:
        greeting = hello(self._token, self._session, sorted(self.oracle.holds.open))
        self._too_much = (
            len(packed(greeting)) > GREETING_BYTES_MAX or len(packed(self._holding())) > self._wire.message_bytes_max
        )
        return hello(self._token, self._session, ()) if self._too_much else greeting

    def _holding(self) -> Message:
        """Holds and claims that this client has (R7)."""
        elsewhere = self._worker.elsewhere if self._worker is not None else None
        claims = tuple(elsewhere.claims.items()) if isinstance(elsewhere, Elsewhere) else ()
        return tuple(self.oracle.holds.numbers), claims  # type: ignore[attr-defined]

    def _reach(self, number: int, port: int) -> Link:
        """A link to a tablet server, as long as there is one. A server that comes back needs no new session: the owner
        knows what the client holds (F3)."""

        def welcomed(message: Message) -> bool:
            read_welcome(message)
            return True

        def hello_again() -> Message:
            return hello(self._token, self._ticket, ())

        name, connect = f"{self.link.name} ({number})", partial(self._connect, number, port)
        link = Link(name, connect, hello_again, welcomed, lambda what, value: None, self._wire, self._rng)
        link.end = self._connections.start(link.run, f"link-{number}")
        return link

    def _welcomed(self, message: Message) -> bool:
        new, kept, info = read_welcome(message)
        self.oracle.told(info["version"], info["wall_ms"], info["last"])  # type: ignore[attr-defined]
        holds = self.oracle.holds
        greeted = tuple(holds.open) if kept and not self._too_much else ()  # the server holds these
        kept = kept and not self._too_much and not (new and holds.numbers)  # type: ignore[attr-defined]
        self._store.spread, self._ticket = info["spread"], info["ticket"]
        held = self.heartbeat.take_longest()  # since the last greeting
        if (new or not kept) and self.link.connections:
            self._say_that_it_ended(held)
        if not kept:
            self._store.losses += 1
            # R5: whoever reads through the former driver reads nothing any more.
            self.driver.reads = LostRowStore()
            if self._together is not None:
                self._together.store.end_reads()
            set.clear(holds.open)
            self.link.tell(Method.DONE, greeted)  # G1, L1: nobody here will say so of each
            holds.numbers.clear()  # type: ignore[attr-defined]
            self._begin_session()
        self.link.tell(Method.HOLDING, self._holding())
        self.link.tell(Method.WORKS, self._observers())
        if self.driver.orphaned.is_set():
            self.link.tell(Method.ORPHANED, None)
        elsewhere = self._worker.elsewhere if self._worker is not None else None
        if isinstance(elsewhere, Elsewhere):
            elsewhere.forget()
        self.driver.notified()  # N8: what was pushed meanwhile has not come
        return kept

    def _say_that_it_ended(self, held: Held) -> None:
        """R7: if every run of an observer ends its session, it runs again for ever. The log has to say why."""
        if held.seconds < self._wire.silence_s:
            log.info("the server at %s has begun a new session for this client", self.link.name)
            return
        log.warning(
            "the server at %s has ended this client's session: open transactions fail, observers' runs begin again. "
            "The loop was held for %.1f s (%s): code that keeps the interpreter's lock for so long has to run in a "
            "process of its own",
            *(self.link.name, held.seconds, held.where),
        )

    def _pushed(self, what: int, value: Any) -> None:
        if self.background.ended:
            return  # it closes, or has failed: it starts nothing any more
        if what in (NOTIFIED, RELEASED):
            elsewhere = self._worker.elsewhere if self._worker is not None else None
            if isinstance(elsewhere, Elsewhere) and what == NOTIFIED:
                elsewhere.woken()
            elif isinstance(elsewhere, Elsewhere):
                elsewhere.released()
            self.driver.notified()
        elif what == ANNOUNCED:
            self.oracle.catalogue_version = max(self.oracle.catalogue_version, value)
            self.driver.notified()  # N10: a scanner looks at the catalogue when it begins a tour
        elif what == MOVED:
            self._store.moved()
            if not self._store.spread:  # else whoever asks where nothing is any more is told
                self.background.spawn(self._store.catch_up)
        elif what == TASKS_ASKED:
            try:
                self.link.tell(Method.TASKS_ARE, (value, tasks.here("client")))
            except Exception:  # somebody's curiosity is not to end this client's connection
                log.exception("what the tasks wait for cannot be told")

    # ------------------------------------------------------------ what the server does

    async def tasks(self) -> list[ProcessTasks]:
        """The tasks of the owner and of its other clients, with what they wait for."""
        return [tasks.read(each) for each in await self.link.call(Method.TASKS, None, again=True)]

    async def servers(self) -> list[TabletsOf]:
        """Which process has which tablets open."""
        return read_servers(await self.link.call(Method.SERVERS, None, again=True))

    async def folder(self) -> FolderIs:
        """The store's folder, as its owner sees it."""
        return read_folder(await self.link.call(Method.FOLDER, None, again=True))

    async def snapshot_at(self, *, ts: int | None = None, at: Any = None) -> Snapshot:
        """As `Client.snapshot_at`."""
        if isinstance(ts, int) and ts > self.oracle.last:
            await self.oracle.newest()  # another client may be further
        return await super().snapshot_at(ts=ts, at=at)

    async def vacuum(self, *, progress: Callable[[VacuumResult], None] | None = None) -> VacuumResult:
        """As `Client.vacuum`, in the server; `progress` is told the end."""
        self.usable(writing=True)
        result = read_vacuum(await self.link.call(Method.VACUUM, None, again=True, writes=True))
        if progress is not None:
            progress(result)
        return result

    async def backfill(self, *, progress: Callable[[BackfillProgress], None] | None = None) -> list[BackfillProgress]:
        """As `Client.backfill`, in the server; `progress` is told the end."""
        self.usable(writing=True)
        told = [
            BackfillProgress(*each) for each in await self.link.call(Method.BACKFILL, None, again=True, writes=True)
        ]
        await self.reload()  # which observers are ready now
        for each in told:
            if progress is not None:
                progress(each)
        return told

    async def split(self, table: Table[Any] | str, key: Any = None) -> Split:
        """As `Client.split`, in the server. Raises: WriteUnknown too, where the answer is lost."""
        self.usable(writing=True)
        try:
            return Split(*await self.link.call(Method.SPLIT, where_to_split(table, key), again=False))
        except LostError as error:
            raise WriteUnknown("splitting a tablet", str(error), "`perco tablets` shows which there are.") from error

    async def compact(self, table: Table[Any] | str | None = None) -> list[Compacted]:
        """As `Client.compact`, in the server. Raises: WriteUnknown too, where the answer is lost."""
        self.usable(writing=True)
        try:
            done = await self.link.call(Method.COMPACT, what_to_compact(table), again=False)
        except LostError as error:
            raise WriteUnknown("compacting tablets", str(error)) from error
        return [Compacted(*each) for each in done]

    async def _now(self) -> tuple[bool, int, int]:
        self.usable(writing=False)
        idle, pending, failed = await self.link.call(Method.NOW, None, again=True)
        return idle, pending, failed

    async def is_idle(self) -> bool:
        """As `Database.is_idle`."""
        return (await self._now())[0]

    async def pending(self) -> int:
        """As `Database.pending`."""
        return (await self._now())[1]

    async def failed_count(self) -> int:
        """As `Failures.failed_count`."""
        return (await self._now())[2]

    async def _catch_up(self) -> None:
        """As `Client._catch_up`: a client is not told of every change of the catalogue."""
        await self.reload()

    # ------------------------------------------------------------ observers

    def _observers(self) -> tuple[Sequence[str], Sequence[str]]:
        """Ids of the observers that this process has, and of those that it may run."""
        return self._worker.works() if self._worker is not None else ((), ())

    async def _worker_begins(self) -> None:
        assert self._worker is not None
        self._worker.elsewhere = Elsewhere(self.link, self._together)
        await self.link.call(Method.WORKS, self._observers(), again=True)

    async def _worker_ended(self) -> None:
        self.link.tell(Method.WORKS, ((), ()))

    async def wait_idle(self, *, timeout: float | None = None) -> int:
        """As `Database.wait_idle`."""
        self.usable(writing=False)
        async with self._deadline(timeout, "the store did not become idle"):
            while True:
                self.background.check()
                idle, failed, workers, stuck = await self.link.call(Method.IDLE, None, again=True)
                if idle:
                    return int(failed)
                if not self.fates.observed:
                    await self._must_be_readable(None if stuck is None else read_stuck(stuck))
                await self._check_workers(workers)
        raise AssertionError

    async def wait_for(self, ts: int, *, timeout: float | None = None) -> None:
        """As `Database.wait_for`."""
        async with self._deadline(timeout, f"not all that was committed up to {ts} has been observed"):
            await self._must_be_past(ts)
            while True:
                self.background.check()
                done, _, workers = await self.link.call(Method.UP_TO, ts, again=True)
                if done:
                    return
                if self._worker is not None and self._worker.damaged:
                    await self._none_up_to(ts)  # raises, if what this worker cannot run for is all that is left
                await self._check_workers(workers)

    async def _check_workers(self, workers: dict[str, int] | None) -> None:
        """Waiting without anybody who works would never end. After a server was away, its workers are given the time to
        find it again; None: the server says that some may."""
        if workers is None or trio.current_time() < self.link.back_since + BACK_S:
            return
        waiting = {id for id, count in (await self.waiting(readable=True)).items() if count}
        self._check_run(waiting, workers)

    # ------------------------------------------------------------ the beginning and the end

    async def begin_link(self, *, known: bool = False, readonly: bool = False) -> None:
        """Connect, and bring the store's catalogue up to the schema; `known`: take the store's own.

        Raises: WrongToken, VersionMismatch, Unavailable, SchemaMismatch.
        """
        self._connections.start(self.link.run, "link")
        await self._store.refresh()
        if self._pulses:
            self.heartbeat.start()
        if not known and not readonly:
            await self.declare()
            return
        self._only_reads = readonly
        catalogue = await catalogues.load(self._store)
        if known:
            self.schema, self._borrowed = catalogues.schema_of(catalogue), True
        elif catalogue.declare(self.schema) is not catalogue:
            raise SchemaMismatch(
                "the store does not have all that the schema declares; open it once without readonly=True"
            )
        await self._adopt(catalogue)
        await self._take_over()

    def usable(self, *, writing: bool) -> None:
        """As `Client.usable`."""
        super().usable(writing=writing)
        if writing and self._only_reads:
            raise ReadOnly("this store was opened with readonly=True; open it without to write")

    async def _end(self) -> None:
        with trio.CancelScope(shield=True):
            await self.background.aclose()
            await self.heartbeat.aclose()
            with suppress(Exception), trio.move_on_after(_BYE_S):
                if self.link.connected.is_set():
                    await self.link.call(Method.BYE, None, again=True)
            await self._connections.aclose()


async def open_served(
    name: str,
    connect: Callable[[int, int], Any],
    schema: Schema | None,
    options: Options,
    wire: WireOptions,
    token: bytes,
    *,
    readonly: bool = False,
    pulsing: Callable[[Pulse], LoopWatch] | None = None,
    remedy: str = "",
) -> RemoteDatabase:
    """A database over a server. Raises: as `RemoteDatabase.begin_link`.

    Args:
        connect: makes a stream to the tablet server of a number and a port; 0 and 0: to the owner.
        pulsing: makes the object that watches the loop and sends pulses while it is held (R10); None: no pulses.
        remedy: what to do when the server is away for too long; "": try again.
    """
    db = RemoteDatabase(schema or Schema(), options, wire, name, connect, token, pulsing)
    db.link.remedy = remedy
    try:
        await db.begin_link(known=schema is None, readonly=readonly)
    except BaseException:
        with trio.CancelScope(shield=True):
            await db.aclose()
        raise
    return db
