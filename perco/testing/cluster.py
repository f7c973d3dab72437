"""Several processes on one store: who gives them timestamps, and how they know of each other.

A coordinator serves timestamps, leases and the catalogue's version. There are two; one serves, the other takes over
when the first one's lease has run out. They die, stand still, and their clocks drift and jump.

O1  The lease is a cell of the system table that its holder replaces by the next one, by check-then-write. Who wants to
    take over has seen it unchanged for the lease's time plus the drift bound, by its own clock; the holder counts from
    before it asked for the cell, and looks at its clock again *after* it has formed a reply.
O2  A process asks for many waiters in one call; whoever comes while a call is under way shares the next one.
O4  Replies carry the catalogue's version and the wall time.
L1  A process renews its lease, and its transactions' locks. A lock is alive if its lease is, and if it is not stale.
L3  A coordinator that has just begun takes a token that it does not know for alive, for one whole time-to-live.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

from perco.errors import Corruption, StoreError, Unavailable
from perco.storage import ABSENT, APPLIED, DATA, TS_MAX, Mutation, NoReply, RowStore, Write
from perco.txn import catalogue as catalogues
from perco.txn.catalogue import SYSTEM_TABLE
from perco.txn.fates import Fates
from perco.txn.oracle import Oracle, OracleOptions
from perco.txn.records import Lock

SERVES_ROW: Final = b"serves"
LEASE_S: Final = 0.4  # of the coordinator
DRIFT: Final = 0.05  # how far a clock may go wrong, in either direction
TTL_S: Final = 0.4  # of a process's lease
STALE_S: Final = 1.0  # a lock of this age is dead, whoever lives
REFRESH_S: Final = 0.1
TIMEOUT_S: Final = 0.7  # of a question to a coordinator
_ASKS_MAX: Final = 40


class NotServingError(Exception):
    """Ask the other one."""


class Leases:
    """Which clients live, as far as this coordinator knows. Times are its own clock."""

    def __init__(self, began: float) -> None:
        self._sure_from = began + TTL_S  # L3
        self._until: dict[str, float] = {}

    def renew(self, token: str, now: float) -> None:
        self._until[token] = now + TTL_S

    def alive(self, token: str, now: float) -> bool:
        until = self._until.get(token)
        return now < (self._sure_from if until is None else until)


class Coordinator:
    """One that may serve: `run` until cancelled."""

    def __init__(
        self, name: str, store: RowStore, options: OracleOptions, wall: Callable[[], float], rng: random.Random
    ) -> None:
        self.name = name
        self._store, self._options, self._wall = store, options, wall
        self._rate = 1 + rng.uniform(-DRIFT, DRIFT)
        self._oracle = Oracle(store, options, wall)
        self._leases = Leases(0.0)
        self._until = 0.0  # of our lease, by our clock
        self._serving = False
        self.terms = 0

    def clock(self) -> float:
        return trio.current_time() * self._rate

    # ------------------------------------------------------------ the lease

    async def run(self) -> None:
        """Wait for our turn, serve, and again."""
        while True:
            try:
                number = await self._acquire()
                oracle = Oracle(self._store, self._options, self._wall)
                await oracle.start()
                await oracle.announce((await catalogues.load(self._store)).binds)
                self._oracle, self._leases = oracle, Leases(self.clock())
                self._serving = True
                self.terms += 1
                await self._renew(number)
            except StoreError:
                pass
            finally:
                self._serving = False
            await trio.sleep(0.05)

    async def _holder(self) -> tuple[int, bytes]:
        """(number, name) of the newest lease."""
        [[cells]] = await self._store.read([(SYSTEM_TABLE, SERVES_ROW, [(DATA, 0, 1, TS_MAX, 1)])])
        return cells[0] if cells else (0, b"")

    async def _acquire(self) -> int:
        seen, since = await self._holder(), self.clock()
        wait_s = LEASE_S * (1 + DRIFT) / (1 - DRIFT) if seen[0] else 0.0
        while True:
            if self.clock() - since >= wait_s and await self._take(seen[0]):
                return seen[0] + 1
            await trio.sleep(0.03)
            now = await self._holder()
            if now != seen:
                seen, since = now, self.clock()
                wait_s = LEASE_S * (1 + DRIFT) / (1 - DRIFT)

    async def _take(self, number: int) -> bool:
        """Whether the lease after that one is ours."""
        asked = self.clock()
        writes: list[Write] = [(DATA, 0, number + 1, self.name.encode())]
        if number:
            writes.append((DATA, 0, number, None))
        row = (SERVES_ROW, ((ABSENT, DATA, 0, number + 1, TS_MAX),), writes)
        [verdict] = await self._store.apply([Mutation(SYSTEM_TABLE, (row,))])
        ours = verdict is APPLIED
        if isinstance(verdict, NoReply):
            ours = await self._holder() == (number + 1, self.name.encode())
        if ours:
            self._until = asked + LEASE_S
        return ours

    async def _renew(self, number: int) -> None:
        while self._serving and not self.expired():
            await trio.sleep(LEASE_S / 5)
            if not await self._take(number):
                if (await self._holder())[1] != self.name.encode():
                    return
            else:
                number += 1
            await self._oracle.note()

    def expired(self) -> bool:
        """Whether somebody else may serve by now (O1)."""
        return self.clock() >= self._until

    # ------------------------------------------------------------ what is asked of it

    async def serve(self, what: str, argument: Any, still: Callable[[], Awaitable[None]]) -> Any:
        """Answer a question. `still`: a machine may stand still anywhere.

        Raises: NotServingError.
        """
        term = self.terms
        await still()
        if not self._serving:
            raise NotServingError
        try:
            reply = await self._form(what, argument)
        except Corruption:  # the bound is another's: a message of a former term has arrived, or there is a newer oracle
            self._serving = False
            raise NotServingError from None
        await still()
        # Of this very term: a reply that was formed when the lease had run out is not saved by the next lease.
        if self.expired() or not self._serving or term != self.terms:
            raise NotServingError
        return reply

    async def _form(self, what: str, argument: Any) -> Any:
        oracle = self._oracle
        match what:
            case "draw":  # so many timestamps, the catalogue's version, the wall time
                drawn = [await oracle.draw() for _ in range(argument)]
                return drawn, oracle.catalogue_version, oracle.wall_ms()
            case "announce":  # timestamps drawn from now on are told with this version of the catalogue (N10)
                await oracle.announce(max(argument, oracle.catalogue_version))
            case "renew":
                self._leases.renew(argument, self.clock())
            case "alive":
                return self._leases.alive(argument, self.clock())
            case _:
                raise AssertionError(what)


Ask = Callable[[str, Any], Awaitable[Any]]  # (what, its argument) -> the reply; Unavailable: there is none


class RemoteOracle(Oracle):
    """The oracle of a process that has to ask for its timestamps."""

    def __init__(
        self, store: RowStore, options: OracleOptions, ask: Ask, spawn: Callable[[Callable[[], Awaitable[None]]], None]
    ) -> None:
        super().__init__(store, options, lambda: 0.0)
        self._ask, self._spawn = ask, spawn
        self._waiting: list[Waiter] = []
        self._asking = False
        self._told = 0, 0.0  # wall time in ms, and when it was told
        self._last = 0

    async def start(self) -> None:
        await self.draw()

    @property
    def last(self) -> int:
        return self._last

    async def newest(self) -> int:
        return await self.draw()

    def draw_nowait(self) -> int:
        return 0

    async def draw(self) -> int:
        waiter = Waiter()
        self._waiting.append(waiter)
        if not self._asking:
            self._asking = True
            self._spawn(self._ask_for_all)
        await waiter.done.wait()
        if waiter.error is not None:
            raise waiter.error
        return waiter.ts

    async def _ask_for_all(self) -> None:
        """O2: those who wait now share a call; who comes later shares the next one."""
        while self._waiting:
            waiters, self._waiting = self._waiting, []
            error: Exception | None = None
            drawn: list[int] = []
            try:
                drawn, version, wall_ms = await self._ask("draw", len(waiters))
                self.catalogue_version = max(self.catalogue_version, version)
                self._told = wall_ms, trio.current_time()
                self._last = max(self._last, *drawn)
            except Exception as failure:
                error = failure
            self._hand_out(waiters, drawn, error)
        self._asking = False

    def _hand_out(self, waiters: list[Waiter], drawn: list[int], error: Exception | None) -> None:
        for i, waiter in enumerate(waiters):
            waiter.error = error
            waiter.ts = drawn[i] if error is None else 0
            waiter.done.set()

    def wall_ms(self) -> int:
        wall_ms, told = self._told
        return wall_ms + int(1000 * (trio.current_time() - told))

    async def announce(self, version: int) -> None:
        await self._ask("announce", version)
        await super().announce(max(version, self.catalogue_version))

    async def lives(self, token: str) -> bool:
        try:
            return bool(await self._ask("alive", token))
        except Unavailable:
            return True  # nobody knows: it is waited for

    async def renew(self, token: str) -> None:
        await self._ask("renew", token)


class Waiter:
    """Somebody who waits for a timestamp."""

    __slots__ = ("done", "error", "ts")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: Exception | None = None
        self.ts = 0


class LeasedFates(Fates):
    """Other processes' transactions live by their leases."""

    __slots__ = ("_oracle", "_token", "asked", "broken")

    exact = False
    alone = False

    def __init__(self, oracle: RemoteOracle, token: str) -> None:
        super().__init__()
        self._oracle, self._token = oracle, token
        self.asked = self.broken = 0

    async def lives_elsewhere(self, start_ts: int, lock: Lock) -> bool:
        if lock.token == self._token:
            return False  # ours, and over
        self.asked += 1
        fresh = lock.wall_ms + int(1000 * STALE_S) > self._oracle.wall_ms()
        lives = fresh and await self._oracle.lives(lock.token)
        self.broken += not lives
        return lives


async def ask_one_of(count: int, what: str, send: Callable[[int], Awaitable[Any]]) -> Any:
    """Ask one of so many, then the next, until one answers. `send` is the network: what is lost takes for ever.

    Raises: Unavailable.
    """
    for turn in range(_ASKS_MAX):
        try:
            with trio.fail_after(TIMEOUT_S):
                return await send(turn % count)
        except NotServingError:
            await trio.sleep(0.02)
        except trio.TooSlowError:
            pass
    raise Unavailable(f"no coordinator answers: {what}")
