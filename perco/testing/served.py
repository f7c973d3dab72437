"""The simulation of a served store: the production code, over a simulated network and disk, in virtual time.

A run has an owner, which serves the store (`Server`), and clients (`Database`). Each of them is in a process of its own
(`processes.py`), which is stopped, killed and started again. Between the processes is a network (`network.py`). Below
the owner is a disk (`disk.py`), to which perco's tablets write in batches. Faults hit messages on the wire and batches
on the disk; they are counted for each kind of message, and for each kind of write.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, ClassVar, Final

import trio

from perco.clock.oracle import OracleOptions
from perco.database.database import Database
from perco.database.inside import close, inside
from perco.database.options import Options
from perco.errors import SchemaMismatch, SessionEnded, StoreError
from perco.history.vacuum import VacuumOptions
from perco.notify.backfill import BackfillOptions
from perco.rpc.channel import WireOptions
from perco.schema.schema import Schema
from perco.serve.client import open_served
from perco.serve.opening import open as opening
from perco.serve.placing import ProcessOptions
from perco.serve.server import Server
from perco.storage import LOCK, PENDING, SHARED, TS_MAX, BatchOptions, Mutation, RowStore, ScanQuery, ScanRequest
from perco.testing.disk import Disk, DiskStore
from perco.testing.errands import Errand, Errands
from perco.testing.faults import kind_of, start_ts_of
from perco.testing.meters import Meters
from perco.testing.network import (
    CUT,
    LATE,
    RECEIVER_DIES,
    SENDER_DIES,
    SENDER_STOPS,
    SLOW,
    Message,
    Network,
)
from perco.testing.plan import Plan
from perco.testing.processes import EndlessError, Process, Processes
from perco.testing.runs import TICK_S, Outcome, Run, SimulationOptions
from perco.testing.spread import ADDRESS, Servers, name_at
from perco.testing.world import World
from perco.txn.driver import CommitOptions
from perco.txn.prefetch import PrefetchOptions
from perco.txn.snapshot import Snapshot

OWNER: Final = "the owner"
_SHORTER: Final = 3
_CELLS_MAX: Final = 1 << 20
_TIME_MAX_S: Final = 600.0
WIRE: Final = WireOptions(heartbeat_s=0.3, silence_s=1.0, lease_s=1.0, connect_s=0.5, patience_s=4.0)
_OFTEN: Final = {
    *("READ", "SCAN", "APPLY", "COMMIT", "DRAW", "DONE", "CLAIM", "UNCLAIM", "LOOKED", "NOTIFIED", "QUIET"),
    *("READ answer", "SCAN answer", "APPLY answer", "COMMIT answer", "DRAW answer", "CLAIM answer"),
    *("READS", "COMMITS", "CLAIMS", "READS answer", "COMMITS answer", "CLAIMS answer"),
}
_SELDOM: Final = {"APPLY marker", "APPLY give up", "APPLY replay", "APPLY catalogue"}
# The lowest rates of faults for messages that are sent rarely. The rarer a message is, the higher its rate.
_RARELY: Final = 0.06
_RATES: Final = {
    **{"HELLO": 0.01, "WELCOME": 0.01, "HOLDING": 0.01, "WORKS": 0.02, "VACUUM": 0.01, "ALIVE": 0.02},
    **{"SPLIT": 0.02, "COPY": 0.02, "CUT": 0.02, "LET_GO": 0.02, "REMOVE": 0.02},
    **{"OPEN": 0.01, "FLOOR": 0.003, "SESSIONS": 0.01, "LISTEN": 0.02, "MOVED": 0.01},
}
_CLOSES_OFTEN: Final = 0.2
_ORPHANS_S: Final = 2.0  # messages in flight to tablet servers take up to 0.7 s
_SETTLES: Final = 20
_STOPS_S: Final = (0.2, 0.6, 1.5, 3.0)
DISK_FAULTS: Final = ("FULL", "DIES_BEFORE", "DIES_AFTER", "STOPS_BEFORE")
# The steps that faults can hit: messages (calls and their answers, one-way messages, pushes), and writes.
_CALLS: Final = (
    *("READ", "READS", "SCAN", "COMMIT", "COMMITS", "CLAIM", "CLAIMS", "DRAW", "TABLETS", "ADOPT", "WORKS", "ALIVE"),
    *("OUTLIVE", "IDLE", "UP_TO", "HOLD", "AT", "OLDEST", "LAST", "PIN", "DROP_PIN", "VACUUM", "BACKFILL", "TASKS"),
    *("SERVERS", "NOW", "SPLIT", "BYE", "OPERATE", "START"),
)
_APPLIED: Final = (
    # (For a one-step commit, a client sends COMMIT to the owner.)
    *("prewrite", "commit", "marker", "rollback", "notify", "tidy", "give up", "replay", "catalogue"),
)
_ORDERS: Final = (
    *("OPEN", "CLOSE", "GROUPS", "FLOOR", "LISTEN", "STATISTICS", "STOP"),
    *("MIDDLE", "COPY", "CUT", "UNCUT", "LET_GO", "REMOVE"),
)
ORDERED: Final = (*(name for call in _ORDERS for name in (call, f"{call} answer")), "SESSIONS")
SENT: Final = (
    *("HELLO", "WELCOME", "APPLY answer"),
    *(f"APPLY {kind}" for kind in _APPLIED),
    *(name for call in _CALLS for name in (call, f"{call} answer")),
    *("DONE", "UNCLAIM", "HOLDING", "RELEASE", "ORPHANED", "TASKS_ARE", "LOOKED"),
    *("NOTIFIED", "RELEASED", "ANNOUNCED", "MOVED", "TASKS_ASKED"),
)
WRITTEN: Final = (
    *("one step", "prewrite", "commit", "marker", "rollback", "bound", "clock", "catalogue", "notify", "tidy"),
    *("vacuum", "give up", "replay"),
)


class ServedActor(Process):
    """A process of a run."""

    rng: Random
    chances: Random
    noise: Random

    def __init__(self, run: Served, name: str) -> None:
        super().__init__(name)
        self.rng, self.chances, self.noise = (
            run.plan.random(name),
            run.plan.random(name, "chances"),
            run.plan.noise(name),
        )
        self.seen: dict[str, int] = {}
        self.children: list[Process] = []

    def number(self, name: str) -> str:
        """A numbered name for something that happens repeatedly."""
        self.seen[name] = number = self.seen.get(name, 0) + 1
        return f"{name} #{number}"


class Served(Run):
    """One run of a served store."""

    rng: Random
    disk: Disk
    kernel: Processes
    network: Network
    rates: ClassVar[Mapping[str, float]] = {}
    """The lowest rates of faults for messages that are especially rare in one kind of run."""

    _metered = True

    def __init__(self, plan: Plan, options: SimulationOptions) -> None:
        # Messages over the wire cost much more CPU time. More runs find more faults than longer runs do.
        super().__init__(plan, replace(options, commits=options.commits // _SHORTER))
        self._again_s = 0.15
        rng = plan.random("served")
        self.rng = self.plan.noise("network")
        self.disk = Disk()
        self._latency = rng.choice((0.0, 0.0005, 0.004, 0.02))
        self._pieces = rng.choice((0.0, 0.05, 0.5))
        self._disk_s = rng.choice((0.0, 0.0002, 0.003, 0.02))
        self._beside_s = rng.choice((0.0, 0.05, 0.2))  # like `_disk_s`, for a step of long work (P2); the larger counts
        self._far_s = rng.choice((0.0, 0.0, 0.05, 0.1))  # added to and from processes that are far away
        self._wire_rate = rng.choice((0.0003, 0.001, 0.003))  # faults for each message that is sent often
        self._disk_rate = rng.choice((0.0002, 0.001, 0.004))
        self._servers = rng.choice((0, 0, 2, 3))  # tablet servers
        self._meters = Meters(self._clients)
        self._errands = Errands(self._clients, self._meters)
        self._stopping = False
        self._all_over = trio.Event()
        self._wire = replace(WIRE, calls_max=rng.choice((6, 4096, 4096)))

    async def run(self) -> Outcome:
        self.kernel = Processes()
        await self.kernel.run(super().run)  # type: ignore[arg-type]
        return self.outcome

    async def _processes(self) -> None:
        self.network = Network(self.kernel, self, self._pieces)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._owns)
            async with trio.open_nursery() as clients:
                for i in range(self.count):
                    clients.start_soon(self._client_process, i)
            self._stopping = True
            self._all_over.set()
            self.outcome.pins, self.outcome.splits = self._errands.pins, self._errands.splits
        await self.kernel.bury()
        for problem in self.disk.problems:
            self._problem(problem)

    @contextlib.asynccontextmanager
    async def _last(self, world: World, options: Options) -> AsyncIterator[tuple[Database, RowStore]]:
        local = DiskStore(self.disk, self.kernel.world, self, self.rng)
        options = replace(options, shared=False, vacuum=VacuumOptions(on=False))
        self._left = local.store
        async with _Opening(local, world.schema, options) as db:
            yield db, local.store

    async def _verify(self, snap: Snapshot, world: World) -> None:
        await self._meters.verify(snap, world)

    def _locks(self) -> int:
        # Locks in an abandoned copy, or in rows that now belong to another tablet, do not count (P4).
        found = 0
        for tablet in self._left.tablets():
            for group in (LOCK, SHARED, PENDING):
                queries = (ScanQuery(group, None, 0, TS_MAX, _CELLS_MAX),)
                request = ScanRequest(tablet.table, tablet.start, self._left.stop_of(tablet), queries)
                page = tablet.scan(request._replace(rows_max=_CELLS_MAX, seeks_max=_CELLS_MAX))
                found += sum(len(cells) for _, [cells] in page.rows)
        return found

    # ------------------------------------------------------------ faults

    def delay_s(self, *processes: Process) -> float:
        far = self._far_s if any(process.name.startswith("p1.") for process in processes) else 0.0
        return self.rng.random() * (self._latency + far) if self._latency or far else 0.0

    def pause_s(self, process: Process, *, beside: bool = False) -> float:
        longest = max(self._disk_s, self._beside_s) if beside else self._disk_s
        return self.rng.random() * longest if longest else 0.0

    def kill(self, process: Process) -> None:
        self.kernel.kill(process)

    def stop(self, process: Process) -> None:
        self.kernel.stop_for(process, _STOPS_S[-1])

    def connection(self, process: Process, to: str) -> str:
        assert isinstance(process, ServedActor)
        chance = lambda: process.chances.choice(("REFUSED", "HANGS")) if process.chances.random() < 0.04 else ""  # noqa: E731
        what = self.plan.choose(process.number(f"{process.name} connects"), chance, trio.current_time())
        if what:
            self.outcome.fired["connect", what] += 1
        return what

    def message(self, message: Message) -> str:
        sender, _, step, arguments, faults = message
        assert isinstance(sender, ServedActor)
        detail, kind = self._detail(step, arguments)
        name = sender.number(f"{sender.name}: {detail}")
        self.digest.update(name.encode())
        rate = self._wire_rate
        if step not in _OFTEN or kind in _SELDOM:
            rate = max(rate, _RATES.get(step.partition(" ")[0], _RARELY))
        rate = max(rate, self.rates.get(step, 0.0))
        rng = sender.chances

        def chance() -> str:
            if self._stopping or rng.random() >= rate:
                return ""
            fault = rng.choice(faults)
            if rate < _RARELY and fault in (SENDER_DIES, RECEIVER_DIES) and rng.random() < 0.7:
                fault = SLOW  # so that lives are long enough to get something done
            if fault in (LATE, SLOW):
                return f"{fault} {rng.choice((0.01, 0.1, 0.7))}"
            if fault == CUT:
                return f"{fault} {rng.random():.2f}"
            if fault == SENDER_STOPS:
                return f"{fault} {rng.choice(_STOPS_S)}"
            return fault

        what = self.plan.choose(name, chance, trio.current_time())
        if what:
            self.outcome.fired[kind, what.partition(" ")[0]] += 1
            self.digest.update(what.encode())
        return what

    def _detail(self, step: str, arguments: Any) -> tuple[str, str]:
        """The name of a message in a script (`shrink.py`), and its name in the table of faults (`simulate.py`)."""
        if step == "APPLY":
            first = Mutation(*arguments[0])
            kind = kind_of(first)
            row = first.rows[0][0].decode(errors="replace")
            return f"{kind} of {self.owner_of(start_ts_of(first))} in {first.table} {row}", f"APPLY {kind}"
        if step == "COMMIT":
            header, part, _ = arguments
            row = part[0][1].decode(errors="replace") if isinstance(part[0][1], bytes) else "?"
            return f"COMMIT of {self.owner_of(header[0])} in {part[0][0]} {row}", step
        return step, step

    def batch(self, process: Process, tablet: str, mutations: Sequence[Mutation]) -> str:
        if not isinstance(process, ServedActor):
            return ""  # no faults at the end
        rng = process.chances
        told = ""
        for mutation in mutations:
            kind = kind_of(mutation)
            row = mutation.rows[0][0].decode(errors="replace")
            whose = self.owner_of(start_ts_of(mutation))
            name = process.number(f"{process.name}: writes {kind} of {whose} in {mutation.table} {row}")
            rate = self._disk_rate if kind in ("one step", "prewrite", "commit") else max(self._disk_rate, 0.002)
            chance = lambda: rng.choice(DISK_FAULTS) if not self._stopping and rng.random() < rate else ""  # noqa: B023, E731
            what = self.plan.choose(name, chance, trio.current_time())
            self.digest.update(name.encode())
            if what and not told:
                self.outcome.fired[kind, what] += 1
                told = what
        return told

    # ------------------------------------------------------------ the owner

    async def _owns(self) -> None:
        """Run one owner after the other: the kernel's lock on a folder allows only one at a time."""
        life = 0
        while not self._stopping:
            actor = ServedActor(self, f"o.{life}")
            self._jump("o", actor.name)
            self.kernel.start(actor, partial(self._own, actor))
            await self._ended(actor)
            await self._orphans_end(actor)
            self.outcome.terms += 1
            self.outcome.servers += len(actor.children)
            life += 1
            if not self._stopping:
                await trio.sleep(self.plan.random(actor.name, "gone").choice((0.0, 0.05, 0.6)))

    async def _ended(self, actor: ServedActor) -> None:
        """Wait until a process is dead or has ended. If it was not killed, raise its error, if any."""
        await actor.gone()
        if actor.error is not None and not actor.dead:
            raise actor.error

    async def _orphans_end(self, owner: ServedActor) -> None:
        """F4: wait, before the next owner starts, until this owner's tablet servers have ended; kill those that are
        stopped."""
        with trio.move_on_after(_ORPHANS_S):
            for process in owner.children:
                await process.gone()
        for process in owner.children:
            if not (process.dead or process.ended.is_set() or process.stood_still_since(_ORPHANS_S)):
                self._problem(f"F4: {process.name} goes on, though its owner has been dead for {_ORPHANS_S} s")
            self.kernel.kill(process)

    async def _own(self, actor: ServedActor) -> None:
        rng = actor.rng
        options = Options(
            wall=self._wall("o"),
            seed=rng.getrandbits(32),
            shared=False,
            wire=self._wire,
            oracle=OracleOptions(range_size=rng.choice((40, 300, 3000))),
            backfill=BackfillOptions(share=1.0, page_rows=8),
            vacuum=VacuumOptions(on=False),
        )
        servers = None
        if self._servers:
            processes = ProcessOptions(servers=self._servers, silence_s=2.0, starts_s=WIRE.connect_s, timeout_s=6.0)
            servers = Servers(self, actor, processes, self._wire, rng.getrandbits(32))
            actor.children = servers.children
        local = DiskStore(self.disk, actor, self, actor.noise, elsewhere=servers)
        with contextlib.suppress(StoreError):  # a full disk, while it opens the store
            async with _Opening(local, Schema(), options, servers) as db:
                server = Server(db, self._wire, servers)
                async with server.keeping():
                    if servers is not None:
                        await servers.listen(ADDRESS, None, "", "")
                    stop = self.network.listen(OWNER, lambda stream: server.connection(stream, None, ADDRESS))
                    with trio.move_on_after(self._closes_after_s(actor)):
                        await self._all_over.wait()
                        await self._settled(server, db)
                    stop()

    def _closes_after_s(self, owner: ServedActor) -> float:
        """After how many seconds an owner closes the store, as it would for a deployment. Most owners never do."""
        rng = self.plan.random(owner.name, "closes")
        return rng.uniform(0.5, 5.0) if rng.random() < _CLOSES_OFTEN else math.inf

    async def _settled(self, server: Server, db: Database) -> None:
        """R7: check that nothing is kept forever for clients that are gone, however they ended."""
        left: dict[str, list[Any]] = {}
        for _ in range(_SETTLES):
            sessions, holds = server.sessions, inside(db).oracle.holds
            held: dict[str, Iterable[Any]] = {
                "sessions": sessions.all,
                "claims": sessions.claims,
                "timestamps": holds.open,
                "past": holds._past,
            }
            left = {what: [*each] for what, each in held.items() if each}
            if not left:
                return
            await trio.sleep(self._wire.lease_s / 2)
        self._problem(f"R7: no client is left, and of them there are still {left}")

    def another(self, name: str) -> ServedActor:
        """A process that another process starts."""
        return ServedActor(self, name)

    # ------------------------------------------------------------ clients

    async def _client_process(self, number: int) -> None:
        process = f"p{number}"
        for life in self._lives(process):
            name = f"{process}.{life}"
            begins = self.plan.choose(f"life {name}", self._begins, trio.current_time())
            self.outcome.lives += 1
            self._jump(process, name)
            actor = ServedActor(self, name)
            self.kernel.start(actor, partial(self._be_client, actor, late=begins == "late"))
            await self._ended(actor)
            await trio.sleep(self.plan.random(name, "gone").choice((0.0, 0.05, 0.5)))

    async def _be_client(self, actor: ServedActor, *, late: bool) -> None:
        rng, name = actor.rng, actor.name
        registered = self.growth.registered
        naps = self.plan.noise(name, "naps") if "napping" in self.kinds else None
        failures = self.plan.noise(name, "failures") if "failing" in self.kinds else None
        grown = self.growth.of(name, self.outcome.committed, trio.current_time())
        world = self._world(late=late, naps=naps, failures=failures, grown=grown)
        self._renewed |= late
        ahead = "mirrored" in self.kinds and rng.random() < 0.8
        window = self.plan.random(name, "window")
        options = Options(
            wall=self._wall(name.partition(".")[0]),
            seed=rng.getrandbits(32),
            wire=self._wire,
            batch=BatchOptions(window_s=window.choice((0.0, 0.0, 0.002, 0.02, 0.02)), adaptive=window.random() < 0.5),
            commit=CommitOptions(one_step=rng.random() < 0.6, commit_timeout_s=5.0),
            prefetch=PrefetchOptions(cache=ahead, predict=ahead),
        )

        try:
            db = await self._open_client(world.schema, options)
        except SchemaMismatch:
            if grown >= self.growth.latest:
                raise
            self.growth.refused += 1
            return
        except (StoreError, SessionEnded):
            return  # no owner serves, or the owner has just ended
        try:
            if self.growth.has_gone_back(registered, inside(db).catalogue):
                self._problem(f"N10: the catalogue went back: version {registered} had been registered")
            if self.growth.is_older(grown, inside(db).catalogue):
                self._is_left_alone(db)
                return
            self.growth.registered = max(self.growth.registered, grown)
            await self._serve_clients(db, world, actor)
        except StoreError:
            pass
        finally:
            await close(db)
            failure = inside(db).background.failure()
            if failure is not None and not actor.dead:
                raise failure

    async def _open_client(self, schema: Schema, options: Options) -> Database:
        async def connect(number: int, port: int) -> trio.abc.Stream:
            return await self.network.connect(name_at(port) if number else OWNER)

        return await open_served(OWNER, connect, schema, options, self._wire, b"")

    def _cut_off(self, actor: ServedActor, seconds: float) -> None:
        if not self._stopping:
            self.network.cut_off(actor, OWNER, seconds)
            self.outcome.fired["connect", "CUT_OFF"] += 1

    async def _serve_clients(self, db: Database, world: World, actor: ServedActor) -> None:
        worker = self._worker_options(actor.rng)
        clients = -(-self._options.clients // self.count)
        busy = [clients]
        async with db.worker(options=worker) as handle, trio.open_nursery() as nursery:
            for i in range(clients):
                nursery.start_soon(self._client, db, world, actor, f"{actor.name} c{i}", busy)
            errands = Errand(
                db,
                world,
                self.plan.random(actor.name, "errands"),
                cut_off=partial(self._cut_off, actor),
                alive=lambda: not (actor.dead or actor.ended.is_set()),
            )
            nursery.start_soon(self._errands.run, errands)
            if "failing" in self.kinds:
                nursery.start_soon(self._tend, db, actor)
            if self._vacuums and actor.name.startswith("p0."):
                nursery.start_soon(self._vacuum, db, actor)
            before = 0, 0
            while not self._over(actor, busy):
                if trio.current_time() > _TIME_MAX_S:
                    raise EndlessError(f"after {_TIME_MAX_S} s not everything has happened: {self.outcome}")
                await trio.sleep(TICK_S)
                before = self._count_runs(handle, before)
            nursery.cancel_scope.cancel()


class _Opening(opening):
    """`perco.open` as an owner, with a store that the caller has made."""

    def __init__(self, local: DiskStore, schema: Schema, options: Options, servers: Servers | None = None) -> None:
        super().__init__("memory:", schema, options=options)
        self._local, self.tablet_servers = local, servers

    async def _open(self) -> Database:
        return await self._begin(self._local, self._options)
