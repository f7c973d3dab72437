"""A client's side of a served store: a row store and an oracle that call the server, and the session's state.

T4  A mutation whose reply was lost has the verdict NoReply: the driver asks the primary.
T10 A mutation that was sent is waited for, as everywhere.
O2  One call at a time asks for timestamps; tasks that come while it is under way share the next one.
G1  A start timestamp is held by the server from the moment that it is drawn until this client says that it is over.
L1  The server knows whether another client's transaction lives, and waits there for its end.
R5  When the session has ended, its transactions read no more of the store: `lost`. The outcome of a commit under way
    is asked for in the next session.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import trio

from perco.errors import (
    CatalogueChanged,
    PercoError,
    SessionEnded,
    SnapshotTooOld,
    TabletSplit,
    Unavailable,
    UsageError,
)
from perco.rpc.framing import WireError
from perco.rpc.link import Link, LostError
from perco.serve.messages import (
    DRAWS_MAX,
    LOST,
    MET,
    NOT_HERE,
    STALE,
    Method,
    read_page,
    unpack_verdict,
)
from perco.serve.together import Together
from perco.storage import Failed, Mutation, NoReply, ReadRequest, RowCells, ScanPage, ScanRequest, Tablet, Verdict
from perco.txn.commit import Commit
from perco.txn.driver import ConflictAt, Driver
from perco.txn.fates import Fates
from perco.txn.holds import Holds, Pin
from perco.txn.oracle import Oracle, OracleOptions, published
from perco.txn.pins import pins_in
from perco.txn.records import Cellref, Lock

_REACHED_S: Final = 0.2  # how long a tablet server is waited for before it is asked where the tablet is by now
_LOOK_S, _LOOK_MAX_S = 0.01, 0.25  # between two looks where tablets are
_MAP_S: Final = 1.0  # how long a newer map is waited for, by who knows already what has become of what it sent
_UNDO_S, _UNDO_AGAIN_S = 5.0, 0.2  # to drop a pin that nobody has
_AWAY: Final = "the connection to the server was away for too long: what was begun before it has ended"
_READ, _SCAN, _APPLY = int(Method.READ), int(Method.SCAN), int(Method.APPLY)


class RemoteRowStore:
    """The seam, over links: to the owner, and to the tablet servers that have tablets open, if there are any.

    Args:
        link: to the owner.
        reach: makes a link to a tablet server, of a number and a port.
        patience_s: how long a tablet is looked for that no server has.
    """

    groups = True
    queues = False

    def __init__(self, link: Link, reach: Callable[[int, int], Link], patience_s: float, rng: random.Random) -> None:
        self._link, self._reach, self._patience_s, self._rng = link, reach, patience_s, rng
        self._starts: dict[str, list[bytes]] = {}
        self._servers: dict[str, list[int]] = {}  # of each tablet; 0: the owner answers; NOBODY
        self._numbers: dict[str, int] = {}
        self._ports: dict[int, int] = {}
        self._links: dict[int, Link] = {0: link}
        self._version = 0  # how often it was asked where tablets are
        self._refreshing = trio.Lock()
        self._moved = trio.Event()
        self._stale = False  # the map of tablets is known to be an old one
        self.spread = False  # rows are with tablet servers: the owner says so in its greeting
        self.losses = 0  # how often the owner had ended the session (R5)

    async def refresh(self) -> None:
        """Ask which tablets there are, and where."""
        self._stale = False
        placed, ports = await self._link.call(Method.TABLETS, None, again=True)
        self._starts = {table: [start for start, _ in tablets] for table, tablets in placed.items()}
        self._servers = {table: [server for _, server in tablets] for table, tablets in placed.items()}
        number = 0
        for table, starts in self._starts.items():
            self._numbers[table] = number
            number += len(starts)
        for server in [server for server, port in self._ports.items() if ports.get(server) != port]:
            if (gone := self._links.pop(server, None)) is not None:
                gone.end()
        self._ports = dict(ports)
        for server, port in ports.items():
            if server not in self._links:
                self._links[server] = self._reach(server, port)
        self._version += 1

    async def catch_up(self) -> None:
        """The map is out of date: wait briefly for a newer one, for another try."""
        self._stale = True
        with trio.move_on_after(_MAP_S, shield=True), suppress(LostError, Unavailable, SessionEnded):  # T10
            async with self._refreshing:
                if self._stale:
                    await self.refresh()

    def moved(self) -> None:
        """Tablets have moved: tasks that look for one look again."""
        self._stale = True
        self._moved.set()
        self._moved = trio.Event()

    def tables(self) -> list[str]:
        return list(self._starts)

    def tablets(self) -> list[Tablet]:
        """Those of this process: none."""
        return []

    def _of(self, table: str) -> list[bytes]:
        starts = self._starts.get(table)
        if starts is None:
            raise UsageError(f"there is no table {table!r} in this store; declare it in the schema")
        return starts

    def locate(self, table: str, row: bytes) -> int:
        starts = self._of(table)
        return self._numbers[table] + bisect_right(starts, row) - 1

    def bounds(self, table: str) -> list[bytes]:
        return self._of(table)

    def _server(self, table: str, row: bytes) -> int:
        starts = self._of(table)
        return self._servers[table][bisect_right(starts, row) - 1]

    # ------------------------------------------------------------ from the owner alone

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        if self.spread:
            return await self._read_spread(requests)
        if self._stale:
            await self.refresh()
        found = await self._part(requests)
        while len(found) < len(requests):
            found += await self._part(requests[len(found) :])
        return found

    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        """See `RowStore.read_first`; here it is as many as a message holds."""
        if self.spread:
            return await self._read_spread(requests, part=True)
        if self._stale:
            await self.refresh()
        return await self._part(requests)

    async def _part(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        """Of the first ones, where all are too much for a message."""
        found: list[RowCells] = await self._link.call(_READ, requests, again=True, held=True)
        return _checked(found, requests)

    async def scan(self, request: ScanRequest) -> ScanPage:
        if self.spread:
            return await self._scan_spread(request)
        return read_page(await self._link.call(_SCAN, request, again=True, held=True))

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        if self.spread:
            return await self._apply_spread(mutations)
        if self._stale:
            await self.catch_up()
        try:
            answer = await self._link.call(_APPLY, mutations, again=False)
        except LostError as error:
            return [NoReply(str(error))] * len(mutations)
        except (SessionEnded, Unavailable) as error:
            return [Failed(error)] * len(mutations)  # R6, R7: it was not sent, or not made
        verdicts = [unpack_verdict(verdict) for verdict in _for_each(answer, mutations)]
        if any(map(is_split, verdicts)):
            await self.catch_up()
        return verdicts

    # ------------------------------------------------------------ from tablet servers

    async def _read_spread(self, requests: Sequence[ReadRequest], *, part: bool = False) -> list[RowCells]:
        """`part`: of the first ones, if others take another message."""
        found: list[RowCells | None] = [None] * len(requests)

        async def ask(server: int, which: Sequence[int]) -> None:
            while which:
                answer = await self._ask(server, _READ, [requests[i] for i in which])
                if answer is NOT_HERE:
                    break
                for i, cells in zip(which, _checked(answer, which), strict=False):
                    found[i] = cells
                which = () if part else which[len(answer) :]

        search = _Search(self)
        while left := [i for i, cells in enumerate(found) if cells is None]:
            await search.next()
            await _each(self._by_server(left, lambda i: requests[i][:2]), ask)
            search.must_be_held()
            if part and found[0] is not None:
                return found[: found.index(None)] if None in found else found  # type: ignore[return-value]
        return found  # type: ignore[return-value]

    async def _scan_spread(self, request: ScanRequest) -> ScanPage:
        search = _Search(self)
        while True:
            await search.next()
            starts = self._of(request.table)
            at = bisect_right(starts, request.start) - 1
            if request.reverse:
                at = len(starts) - 1 if request.stop is None else max(bisect_left(starts, request.stop) - 1, 0)
            answer = await self._ask(self._servers[request.table][at], _SCAN, request)
            search.must_be_held()
            if answer is not NOT_HERE:
                return read_page(answer)

    async def _ask(self, server: int, method: int, arguments: Any) -> Any:
        """What a server answers; NOT_HERE from one that is not there."""
        link = await self._link_to(server)
        if link is None:
            return NOT_HERE
        try:
            return await link.call(method, arguments, again=True, held=True, here=server > 0)
        except LostError:
            return NOT_HERE

    async def _link_to(self, server: int) -> Link | None:
        link = self._links.get(server)
        if link is None or not server or link.connected.is_set():
            return link
        if link.refused is not None:
            raise link.refused
        with trio.move_on_after(_REACHED_S):
            await link.connected.wait()
        return link if link.connected.is_set() and not link.closed else None

    @trio.lowlevel.enable_ki_protection
    async def _apply_spread(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        verdicts: list[Verdict | None] = [None] * len(mutations)

        async def ask(server: int, which: Sequence[int]) -> None:
            link = await self._link_to(server)
            if link is None:
                return
            try:
                answer = await link.call(_APPLY, [mutations[i] for i in which], again=False)
            except LostError as error:
                answer = [str(error)] * len(which)  # T4
            except (SessionEnded, Unavailable) as error:
                for i in which:
                    verdicts[i] = Failed(error)  # R6, R7, F3: it was not sent, or not made
                return
            for i, packed in zip(which, () if answer is NOT_HERE else _for_each(answer, which), strict=False):
                if packed != LOST:
                    verdicts[i] = unpack_verdict(packed)

        search = _Search(self)
        with trio.CancelScope() as scope:
            while left := [i for i, verdict in enumerate(verdicts) if verdict is None]:
                try:
                    await search.next()
                except (Unavailable, SessionEnded) as error:
                    return [Failed(error) if verdict is None else verdict for verdict in verdicts]
                for i in left:
                    if len(mutations[i].rows) > 1 and self._spans(mutations[i]):
                        verdicts[i] = Failed(TabletSplit(mutations[i].table))  # P3
                left = [i for i in left if verdicts[i] is None]
                await _each(self._by_server(left, lambda i: (mutations[i].table, mutations[i].rows[0][0])), ask)
                scope.shield = any(verdict is not None for verdict in verdicts)  # T10: all or nothing is waited for
        return verdicts  # type: ignore[return-value]

    def _spans(self, mutation: Mutation) -> bool:
        starts = self._of(mutation.table)
        return len(starts) > 1 and len({bisect_right(starts, row) for row, _, _ in mutation.rows}) > 1

    def _by_server(self, which: Sequence[int], row: Callable[[int], tuple[str, bytes]]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for i in which:
            found.setdefault(self._server(*row(i)), []).append(i)
        return found


def is_split(verdict: Verdict) -> bool:
    """Whether it was not made because its rows are not in one tablet any more (P3)."""
    return isinstance(verdict, Failed) and isinstance(verdict.error, TabletSplit)


def _checked(answer: list[RowCells], asked: Sequence[object]) -> list[RowCells]:
    if len(answer) > len(asked) or (asked and not answer):
        raise WireError(f"an answer of {len(answer)} rows to a call for {len(asked)}")
    return answer


def _for_each(verdicts: Any, asked: Sequence[object]) -> Sequence[Any]:
    """T4: of a server that does not answer for each mutation, nobody knows which of them it has made."""
    if type(verdicts) in (list, tuple) and len(verdicts) == len(asked):
        return verdicts  # type: ignore[no-any-return]
    return [f"no answer for each of {len(asked)} mutations"] * len(asked)


class _Search:
    """For tablets that are not where they were: asks the owner again, a while apart, until patience ends."""

    def __init__(self, store: RemoteRowStore) -> None:
        self._store = store
        self._version = -1
        self._pause_s = _LOOK_S
        self._losses = store.losses

    def must_be_held(self) -> None:
        """R5, F3: in a newer session nothing is read for one that has ended. Raises: SessionEnded."""
        if self._losses != self._store.losses:
            raise SessionEnded(_AWAY)

    async def next(self) -> None:
        """At first nothing. Then until the map of tablets is a newer one. Raises: Unavailable, SessionEnded."""
        store = self._store
        if self._version < 0:
            self._version, self._until = store._version, trio.current_time() + store._patience_s
            return
        if trio.current_time() > self._until:
            raise Unavailable(f"no tablet server has had the row for {store._patience_s:g} s")
        with trio.move_on_after(self._pause_s * store._rng.uniform(0.5, 1.5)):
            await store._moved.wait()
        self._pause_s = min(2 * self._pause_s, _LOOK_MAX_S)
        async with store._refreshing:
            if store._version == self._version:
                await store.refresh()
        self._version = store._version
        self.must_be_held()


async def _each(by_server: dict[int, list[int]], ask: Callable[[int, Sequence[int]], Awaitable[None]]) -> None:
    """All at once; the first error comes out as it is, when all have ended."""
    if len(by_server) == 1:
        [(server, which)] = by_server.items()
        await ask(server, which)
        return
    errors: list[Exception] = []

    async def one(server: int, which: Sequence[int]) -> None:
        try:
            await ask(server, which)
        except Exception as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        for server, which in by_server.items():
            nursery.start_soon(one, server, which)
    if errors:
        raise errors[0]


class LostRowStore:
    """The store that a snapshot of an ended session reads from (R5)."""

    groups = True

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        raise SessionEnded(_AWAY)

    def locate(self, table: str, row: bytes) -> int:
        raise SessionEnded(_AWAY)

    def bounds(self, table: str) -> list[bytes]:
        raise SessionEnded(_AWAY)

    async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        raise SessionEnded(_AWAY)

    async def read_first(self, requests: Sequence[ReadRequest], bytes_max: int) -> list[RowCells]:
        raise SessionEnded(_AWAY)

    async def scan(self, request: ScanRequest) -> ScanPage:
        raise SessionEnded(_AWAY)


class _Open(set[int]):
    """Start timestamps of this client. When one is over, the server is told (G1)."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        super().__init__()
        self._tell = tell

    def discard(self, start_ts: object) -> None:
        if start_ts in self:
            super().discard(start_ts)
            self._tell(start_ts)  # type: ignore[arg-type]


class RemoteHolds(Holds):
    """The old versions that this client needs; the server knows them."""

    __slots__ = ("_link", "numbers")

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self.numbers: set[int] = set()  # of holds on past timestamps
        self.open = _Open(lambda start_ts: link.tell_merged(Method.DONE, start_ts))

    def number(self) -> int:
        """For another hold."""
        number = next(self._numbers)
        self.numbers.add(number)
        return number

    def release(self, held: int) -> None:
        self.numbers.discard(held)
        self._link.tell(Method.RELEASE, held)  # even if it was asked for in a session that has ended since


class _Waiter:
    """Somebody who waits for a timestamp; its own `outcome.Outcome`."""

    __slots__ = ("error", "gone", "starts", "task", "ts")

    def __init__(self, starts: bool) -> None:
        self.task = trio.lowlevel.current_task()
        self.starts = starts
        self.ts = 0
        self.error: BaseException | None = None
        self.gone = False

    def unwrap(self) -> int:
        if self.error is not None:
            raise self.error
        return self.ts

    def abort(self, _: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        self.gone = True
        return trio.lowlevel.Abort.SUCCEEDED


class RemotePins:
    """The pins of a served store."""

    def __init__(self, link: Link, oracle: RemoteOracle, spawn: Callable[[Callable[[], Any]], None]) -> None:
        self._link, self._oracle, self._spawn = link, oracle, spawn

    async def find(self, name: str) -> Pin | None:
        """The pin of that name, if its lease has not run out."""
        pin = await self._named(name)
        return pin if pin is not None and pin.expires_ms > self._oracle.wall_ms() else None

    async def _named(self, name: str) -> Pin | None:
        return next((pin for pin in await pins_in(self._oracle.store) if pin.name == name), None)

    async def put(self, name: str, owner: str, ts: int, lease_s: float, id: str, over: str | None = None) -> Pin:
        """As `Pins.put`. A call that is cancelled, or fails, leaves no new pin: it drops the pin."""
        pin = name, owner, ts, lease_s, id, over
        try:
            return Pin(*await self._link.call(Method.PIN, pin, again=True, writes=True))
        except BaseException:
            if over is None:
                self._spawn(lambda: self._undo(name, id))
            raise

    async def _undo(self, name: str, id: str) -> None:
        """Drop a pin that nobody has; if that does not succeed soon, its lease bounds it."""
        with trio.move_on_after(_UNDO_S), suppress(PercoError, LostError):
            while True:
                with suppress(Unavailable):
                    await self._link.call(Method.DROP_PIN, (name, id), again=True)
                    return
                await trio.sleep(_UNDO_AGAIN_S)

    async def drop(self, name: str, id: str) -> bool:
        """As `Pins.drop`."""
        return bool(await self._link.call(Method.DROP_PIN, (name, id), again=True, writes=True))

    async def drop_named(self, name: str) -> bool:
        """As `Pins.drop_named`."""
        pin = await self._named(name)
        return pin is not None and await self.drop(name, pin.id)


class RemoteOracle(Oracle):
    """Asks the server for timestamps."""

    def __init__(self, store: RemoteRowStore, link: Link, spawn: Callable[[Callable[[], Any]], None]) -> None:
        super().__init__(store, OracleOptions(), lambda: 0.0)
        self.store, self._link, self._spawn = store, link, spawn
        self.holds: RemoteHolds = RemoteHolds(link)
        self.pins = RemotePins(link, self, spawn)  # type: ignore[assignment]
        self._waiting: list[_Waiter] = []
        self._asking = False
        self._told = 0, 0.0  # wall time in ms, and when it was told
        self._last = 0

    def told(self, version: int, wall_ms: int, last: int) -> None:
        """Note what every answer tells (O4)."""
        self.catalogue_version = max(self.catalogue_version, version)
        self._told = wall_ms, trio.current_time()
        self._last = max(self._last, last)

    def drawn_elsewhere(self, ts: int) -> None:
        """The server has drawn a timestamp for us."""
        self._last = max(self._last, ts)

    @property
    def last(self) -> int:
        return self._last

    def draw_nowait(self) -> int:
        return 0

    async def draw(self) -> int:
        return await self._draw(starts=True)

    async def draw_commit(self) -> int:
        return await self._draw(starts=False)

    @trio.lowlevel.enable_ki_protection  # as `Link.call`
    async def _draw(self, *, starts: bool) -> int:
        waiter = _Waiter(starts)
        self._waiting.append(waiter)
        if not self._asking:
            self._asking = True
            self._spawn(self._ask)
        ts: int = await trio.lowlevel.wait_task_rescheduled(waiter.abort)
        return ts

    async def _ask(self) -> None:
        """O2: tasks that wait now share a call, as far as it takes them, in the order in which they came; later ones
        share the next."""
        try:
            while self._waiting:
                waiters, self._waiting = self._waiting[:DRAWS_MAX], self._waiting[DRAWS_MAX:]
                waiters.sort(key=lambda waiter: not waiter.starts)  # the server holds what it gives the first ones
                starts = sum(waiter.starts for waiter in waiters)
                drawn: Sequence[int] = ()
                error: Exception | None = None
                try:
                    drawn, version, wall_ms, last = await self._link.call(
                        Method.DRAW, (starts, len(waiters) - starts), again=True
                    )
                    self.told(version, wall_ms, last)
                except Exception as failure:
                    error = failure
                self._hand_out(waiters, drawn, error)
        finally:
            self._asking = False

    def _hand_out(self, waiters: list[_Waiter], drawn: Sequence[int], error: Exception | None) -> None:
        reschedule = trio.lowlevel.reschedule
        for i, waiter in enumerate(waiters):
            if error is None:
                waiter.ts = drawn[i]
                if waiter.starts:
                    self.holds.open.add(waiter.ts)
            else:
                waiter.error = error
            if waiter.gone:
                self.holds.open.discard(waiter.ts)
            else:
                reschedule(waiter.task, waiter)  # type: ignore[arg-type]

    def wall_ms(self) -> int:
        wall_ms, told = self._told
        return wall_ms + int(1000 * (trio.current_time() - told))

    async def announce(self, version: int) -> None:
        """The server has been told (`ADOPT`)."""
        self.catalogue_version = max(version, self.catalogue_version)

    async def watermark(self) -> int:
        return (await published(self.store))[1]

    async def cut(self, table: str) -> int:
        return (await published(self.store))[2].get(table, 0)

    async def newest(self) -> int:
        self._last = max(self._last, await self._link.call(Method.LAST, None, again=True))
        return self._last

    async def oldest(self) -> int:
        return int(await self._link.call(Method.OLDEST, None, again=True))

    async def hold(self, ts: int) -> int:
        number = self.holds.number()
        try:
            held, oldest = await self._link.call(Method.HOLD, (number, ts), again=True)
            if not held:
                raise SnapshotTooOld(ts, oldest)
        except BaseException:
            self.holds.release(number)  # it may have arrived
            raise
        self.holds.numbers.add(number)  # of the session that has answered, which may be a newer one
        return number

    async def at(self, wall_s: float) -> tuple[int, float]:
        ts, wall = await self._link.call(Method.AT, wall_s, again=True)
        return ts, wall


class RemoteFates(Fates):
    """Others' transactions live as long as the server says so."""

    __slots__ = ("_link", "_mine", "_store")

    exact = False

    def __init__(self, link: Link, store: RemoteRowStore, mine: str) -> None:
        super().__init__()
        self._link, self._store, self._mine = link, store, mine

    @property
    def alone(self) -> bool:
        """One-step commits are made in the owner, whose memory every reader asks (C4); not if tablet servers answer
        reads."""
        return not self._store.spread

    async def lives_elsewhere(self, start_ts: int, lock: Lock) -> bool:
        if lock.token == self._mine:
            return False  # ours, and over
        return bool(await self._link.call(Method.ALIVE, start_ts, again=True))

    async def wait(self, start_ts: int) -> None:
        if self.alive(start_ts):
            await super().wait(start_ts)
        else:
            await self._link.call(Method.OUTLIVE, start_ts, again=True)


class _Orphaned:
    """In place of the event: locks were left behind, and the server sweeps (T5)."""

    def __init__(self, link: Link) -> None:
        self._link, self._set = link, False

    def set(self) -> None:
        self._set = True  # told once more with the next greeting, should this not arrive
        self._link.tell(Method.ORPHANED, None)

    def is_set(self) -> bool:
        return self._set


class RemoteDriver(Driver):
    """Lets the server make the commits in one step."""

    def __init__(
        self,
        link: Link,
        together: Together | None,
        drawn: Callable[[int], None],
        catch_up: Callable[[], Awaitable[None]],
        *args: Any,
    ) -> None:
        super().__init__(*args)
        self._link, self._together, self._drawn, self._catch_up = link, together, drawn, catch_up
        self.orphaned = _Orphaned(link)  # type: ignore[assignment]

    async def _in_one_step(self, commit: Commit, version: int) -> None:
        """C1: the server draws, enters and writes; here it is only asked for, once (C6)."""
        arguments = commit.header, commit.primary_part, version
        try:
            if self._together is not None:
                answer = await self._together.commit(*arguments)
            else:
                answer = await self._link.call(Method.COMMIT, arguments, again=False)
        except LostError as error:
            commit.sent_in_one_step(0)
            commit.primary_told(NoReply(str(error)))
            return
        what, told, *more = answer
        if what == STALE:
            raise CatalogueChanged(commit.header.start_ts, told)
        if what == MET:
            self.counters.conflicts += 1
            raise ConflictAt(Cellref(*told), more[0], commit.header.start_ts)
        commit.sent_in_one_step(more[0])
        self._drawn(more[0])
        verdict = unpack_verdict(told)
        if is_split(verdict):
            await self._catch_up()
        commit.primary_told(verdict)

    def _leave(self, commit: Commit) -> None:
        """The server's memory, and its affair."""

    def _leave_behind(self, commit: Commit) -> None:
        """The same."""
