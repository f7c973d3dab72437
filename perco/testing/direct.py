"""The simulation of a store on Bigtable: its owner, another process that stands by, and direct clients.

As in `served.py`, the production code runs in processes that are stopped, killed and started again, over connections
that break. The rows are in a `bigtable.Table`, which all processes access directly. Two processes want to own the
store: one leads, and the other waits until the leader's lease ends. Clients switch to each new leader.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, ClassVar, Final
from unittest import mock

import trio

from perco.bigtable import client, hints, lease, repeating, rows, store
from perco.bigtable.client import ClientRows
from perco.bigtable.keys import PROTOCOL_FAMILY, place_of
from perco.bigtable.lease import _CALL_S, CALLS, BigtableLease
from perco.bigtable.options import BigtableOptions
from perco.bigtable.rows import BigtableRows
from perco.bigtable.store import BigtableStore
from perco.clock.loopwatch import HeartbeatOptions, LoopWatch
from perco.clock.oracle import OracleOptions
from perco.database.database import Database
from perco.database.options import Options
from perco.errors import BackgroundFailure, StoreLocked, Unavailable
from perco.history.vacuum import VacuumOptions
from perco.notify.backfill import BackfillOptions
from perco.rpc import addresses
from perco.schema.schema import Schema
from perco.serve import opening as openings
from perco.serve.opening import open as opening
from perco.storage import LOCK, PENDING, SHARED, Mutation, RowStore, lease as leases
from perco.testing.calls import (
    CHANGING,
    DELAY,
    DIES_AFTER,
    DIES_BEFORE,
    FAIL,
    LATER,
    LOSE,
    LOSE_ANSWER,
    PART,
    READING,
    SCANNING,
    STOPS_BEFORE,
    CallPending,
    Calls,
    Channel,
    Service,
)
from perco.testing.faults import kind_of, start_ts_of
from perco.testing.plan import Plan
from perco.testing.processes import Process, current
from perco.testing.runs import Outcome, SimulationOptions
from perco.testing.served import SENT, Served, ServedActor
from perco.testing.spread import ADDRESS
from perco.testing.world import World

LATE_S: Final = 0.5  # how late the service carries out a call, after the call's end, at most; processes assume no less
_LATES_S: Final = (0.5, 0.5, 0.8)
_CALLS_S: Final = (0.5, 1.0, 1.0, 1.5)
LEASE_S: Final = 1.0
URL: Final = "bigtable://simulated/main?prefix=rows"
_STANDBY_S: Final = 0.2
_NOW: Final = 1000.0  # what the replaced `now()` of the modules for Bigtable returns at the beginning of a run
_CALLED_OFTEN: Final = frozenset({"read", "scan", "prewrite", "commit", "notify", "hint", "scan hints"})
_RATES: Final = {"renew the lease": 0.02, "look at the owner": 0.01, "rollback": 0.02, "tidy": 0.02}
_RARELY: Final = 0.06
_DEADLY: Final = frozenset({DIES_BEFORE, DIES_AFTER, STOPS_BEFORE})
_MUTATED: Final = (
    *("prewrite", "commit", "marker", "rollback", "bound", "clock", "catalogue", "notify", "tidy", "vacuum"),
    *("give up", "replay", "hint", "remove hints", "claim", "tell the address", "tell the floor"),
    *("give a ticket", "end a ticket", "remove a ticket", "renew the lease", "other"),
)
CALLED: Final = (
    *_MUTATED,
    *("read", "scan", "scan hints", "scan tickets", "look at the owner", "read the lease"),
)
_NOT_SENT: Final = (  # direct clients do these; no tablets move
    *("READ", "SCAN", "START", "APPLY", "COMMIT", "OPERATE", "MOVED"),
)
SENT_BY_DIRECT: Final = (
    *(name for name in SENT if not name.startswith(_NOT_SENT)),
    *("TICKET", "TICKET answer", "NEWS"),
)
CALL_FAULTS: Final = (LOSE, LOSE_ANSWER, LATER, FAIL, PART, DELAY, DIES_BEFORE, DIES_AFTER, STOPS_BEFORE)


def call_faults_of(step: str) -> tuple[str, ...]:
    """The faults that can hit a call."""
    if step in _MUTATED:
        return CHANGING
    if step == "scan":
        return SCANNING
    return READING


class _Random:
    """Replaces `random` and `secrets` in modules that need no seed in production."""

    def __init__(self, rng: Random) -> None:
        self.uniform = rng.uniform
        self.token_bytes = rng.randbytes
        self.token_hex = lambda count: rng.randbytes(count).hex()


class _Lease(BigtableLease):
    """Renews the lease in a task, not in a thread."""

    service: ClassVar[Service]

    def start(self) -> None:
        self._task = trio.CancelScope()
        process, kernel = current(), type(self).service.befalls.kernel
        if process is kernel.world:
            kernel.in_the_world(self._go_on)
        else:
            kernel.spawn_in(process, self._go_on)

    async def _go_on(self) -> None:
        with self._task:
            while self.deposed is None:
                await trio.sleep(leases._AGAIN_S if self.said else self._lease_s / leases._RENEWALS)
                await self._renew_in_task()

    async def _renew_in_task(self) -> None:
        answers: list[Any] = []
        if self._channel is None:
            self._connect()
        while True:
            self._channel.run_with(answers)
            holder = self._holder
            try:
                return self._renew()
            except CallPending as call:
                self._holder = holder  # the renewal runs again from its beginning
                limit_s = min(_CALL_S, self._lease_s / CALLS)
                answers.append(await self.service.ask(current(), call.step, call.request, limit_s))

    def end(self) -> None:
        self._task.cancel()
        if self._channel is not None:
            self._channel.answers = None
        if self.deposed is None:
            self.release()
        self.close()


@contextlib.contextmanager
def simulated(service: Service, rng: Random, connect: Callable[[str], Awaitable[trio.abc.Stream]]) -> Iterator[None]:
    """Make the modules for Bigtable use a simulated service and virtual time. `connect`: connects to the server at a
    path."""

    def now() -> float:
        return _NOW + trio.current_time()

    _Lease.service = service
    with contextlib.ExitStack() as stack:
        for module in (client, rows, store, leases):
            stack.enter_context(mock.patch.object(module, "now", now))
        for module, name, value in (
            (repeating, "Calls", lambda place, options: Calls(service)),
            (repeating, "random", _Random(rng)),
            (hints, "secrets", _Random(rng)),
            (store, "secrets", _Random(rng)),
            (store, "command", lambda: current().name),
            (store, "BigtableLease", _Lease),
            (store, "BigtableStore", _Store),
            (client, "ClientRows", _ClientRows),
            (lease, "channel", lambda place: Channel(service)),
            (addresses, "connect", lambda address, trust: connect(str(address.path))),
            (openings, "PulseThread", _NoPulse),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


class _Rows(BigtableRows):
    """Notes which step of the protocol each call performs."""

    whose: ClassVar[Callable[[Mutation], str]]

    def _call(self, mutation: Mutation) -> Any:
        return _named(self, mutation, super()._call(mutation))


class _ClientRows(ClientRows):
    def _call(self, mutation: Mutation) -> Any:
        return _named(self, mutation, super()._call(mutation))


def _named(of: BigtableRows, mutation: Mutation, call: Any) -> Any:
    calls: Any = of.calls
    if call is not None:
        row = mutation.rows[0][0].decode(errors="replace")
        calls.name(call, kind_of(mutation), f"of {_Rows.whose(mutation)} in {mutation.table} {row}")
    return call


class _Store(BigtableStore):
    _rows = _Rows

    async def aclose(self) -> None:
        self._closed = True
        await self.rows.calls.aclose()
        if self._lease is not None:
            self._lease.end()


def _opening(schema: Schema, options: Options, *, leads: bool = False) -> opening:
    """`perco.open` for the store, as its owner (`leads`) or as a direct client."""
    made = opening(URL, schema, options=options)
    made.leads = made.direct = leads
    return made


class _NoPulse(LoopWatch):
    """Replaces the thread that watches a client's loop."""

    def __init__(self, options: HeartbeatOptions, *_: object) -> None:
        super().__init__(options)

    def start(self) -> None:
        """Do nothing."""


class Direct(Served):
    """One run of a store on Bigtable."""

    service: Service
    rates: ClassVar[Mapping[str, float]] = {"VACUUM answer": 0.12, "LOOKED": 0.006}

    def __init__(self, plan: Plan, options: SimulationOptions) -> None:
        rng = plan.random("direct")
        super().__init__(plan, replace(options, processes=options.processes or rng.choice((2, 3))))
        self._servers = 0
        self.service = Service(self, plan.noise("service"), LATE_S)
        self._call_rate = rng.choice((0.001, 0.005, 0.02))
        self._call_s = rng.choice((0.0, 0.0005, 0.004, 0.02))
        self._leading: ServedActor | None = None

    async def run(self) -> Outcome:
        _Rows.whose = lambda mutation: self.owner_of(start_ts_of(mutation))
        with simulated(self.service, self.plan.noise("random"), lambda path: self.network.connect(path)):
            outcome = await super().run()
        outcome.late += self.service.late
        return outcome

    def _of(self, rng: Random, *, own: bool | None = None) -> BigtableOptions:
        """The Bigtable options of a process. Not all processes have the same."""
        return BigtableOptions(call_s=rng.choice(_CALLS_S), late_s=rng.choice(_LATES_S), lease_s=LEASE_S, own=own)

    # ------------------------------------------------------------ faults

    def takes_s(self, process: Process) -> float:
        return self.rng.random() * self._call_s

    def call(self, process: Process, step: str, about: str, faults: Sequence[str]) -> str:
        if not isinstance(process, ServedActor):
            return ""  # no faults at the end
        name = process.number(f"{process.name} calls: {step} {about}")
        self.digest.update(name.encode())
        rate = self._call_rate
        if step not in _CALLED_OFTEN:
            rate = max(rate, _RATES.get(step, _RARELY))
        rng = process.chances

        def chance() -> str:
            if self._stopping or rng.random() >= rate:
                return ""
            fault = rng.choice(faults)
            if rate < _RARELY and fault in _DEADLY and rng.random() < 0.7:
                fault = DELAY  # so that lives are long enough to get something done
            if fault in (LOSE, LOSE_ANSWER, LATER, FAIL):
                return f"{fault} {rng.choice(('soon', 'soon', 'hangs'))}"
            if fault == DELAY:
                return f"{fault} {rng.choice((0.01, 0.1, 0.7))}"
            if fault == PART:
                return f"{fault} {rng.choice((1, 2, 5))}"
            if fault == STOPS_BEFORE:
                return f"{fault} {rng.choice((0.2, 0.6, 1.2, 3.0))}"
            return fault

        what = self.plan.choose(name, chance, trio.current_time())
        if what:
            self.outcome.fired[step, what.partition(" ")[0]] += 1
            self.digest.update(what.encode())
        return what

    # ------------------------------------------------------------ owners

    async def _owns(self) -> None:
        async with trio.open_nursery() as nursery:
            for machine in ("o", "s"):
                nursery.start_soon(self._owns_at, machine)

    async def _owns_at(self, machine: str) -> None:
        """Run processes that want to own the store, one after the other, on a machine."""
        life = 0
        while not self._stopping:
            actor = ServedActor(self, f"{machine}.{life}")
            self._jump(machine, actor.name)
            self.kernel.start(actor, partial(self._own_or_wait, actor, machine))
            await self._ended(actor)
            life += 1
            if not self._stopping:
                await trio.sleep(self.plan.random(actor.name, "gone").choice((0.0, 0.05, 0.6)))

    async def _own_or_wait(self, actor: ServedActor, machine: str) -> None:
        """Wait until no other process owns the store, own it, and serve it."""
        rng = actor.rng
        options = Options(
            wall=self._wall(machine),
            seed=rng.getrandbits(32),
            wire=self._wire,
            oracle=OracleOptions(range_size=rng.choice((40, 300, 3000))),
            backfill=BackfillOptions(share=1.0, page_rows=8),
            vacuum=VacuumOptions(on=False),
            bigtable=self._of(rng),
        )
        while not self._stopping:
            leading = _opening(Schema(), options, leads=True)
            try:
                async with leading as db:
                    await self._lead(actor, leading, db)
                return
            except (StoreLocked, Unavailable):
                if leading.owned is not None:
                    return
            except BackgroundFailure as error:
                if not isinstance(error.__cause__, StoreLocked):
                    raise
                self.outcome.fired["owner", "DEPOSED"] += 1
                return
            await trio.sleep(_STANDBY_S)

    async def _lead(self, actor: ServedActor, leading: opening, db: Database) -> None:
        server, owned = leading.server, leading.owned
        assert server is not None
        assert owned is not None
        self.outcome.terms += 1
        name = f"/{actor.name}"
        stop = self.network.listen(name, lambda stream: server.connection(stream, None, ADDRESS))
        try:
            await owned.serve_at(f"unix:{name}")
            self._leading = actor
            with trio.move_on_after(self._closes_after_s(actor)):
                await self._all_over.wait()
                await self._settled(server, db)
        finally:
            stop()

    @contextlib.asynccontextmanager
    async def _last(self, world: World, options: Options) -> AsyncIterator[tuple[Database, RowStore]]:
        options = replace(options, vacuum=VacuumOptions(on=False), bigtable=self._of(self.plan.random("the end")))
        while True:
            leading = _opening(world.schema, options, leads=True)
            try:
                db = await leading.__aenter__()
                break
            except StoreLocked:  # a process that has died still has the lease
                await trio.sleep(_STANDBY_S)
        try:
            assert leading.owned is not None
            yield db, leading.owned.store
        finally:
            await leading.__aexit__(None, None, None)

    def _locks(self) -> int:
        tags = tuple(place_of(group)[1] for group in (LOCK, SHARED, PENDING))
        table = self.service.table
        cells = (cell for key in table.in_order() if not key.startswith(b"\x00") for cell in table.cells(key))
        return sum(cell.family == PROTOCOL_FAMILY and cell.name.startswith(tags) for cell in cells)

    # ------------------------------------------------------------ clients

    def _cut_off(self, actor: ServedActor, seconds: float) -> None:
        if not self._stopping and self._leading is not None:
            self.network.cut_off(actor, f"/{self._leading.name}", seconds)
            self.outcome.fired["connect", "CUT_OFF"] += 1

    async def _open_client(self, schema: Schema, options: Options) -> Database:
        process = current()
        assert isinstance(process, ServedActor)
        options = replace(options, bigtable=self._of(process.rng, own=False))
        return await _opening(schema, options)._open()
