"""A client's side of a served store: an oracle, pins, fates and a driver that call the server.

T4  A mutation whose reply was lost has the verdict NoReply: the driver reads the primary.
T10 As everywhere in perco, a caller waits for the answer to a mutation that was sent, even if the caller is cancelled.
O2  One call at a time draws timestamps; tasks that need one while that call is in flight share the next call.
G1  The server holds a start timestamp from the moment when it is drawn until this client reports that its transaction
    has ended.
L1  The server knows whether another client's transaction is alive. To wait for that transaction's end, this client
    makes a call, which the server answers when the transaction has ended, or after a while.
R5  Once a session has ended, its transactions read no more of the store (`LostRowStore`). If a commit was in flight,
    the client finds out the commit's outcome in the next session.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import trio

from perco.clock.holds import Holds, Pin
from perco.clock.oracle import Oracle, OracleOptions, published
from perco.clock.pins import pins_in
from perco.errors import (
    CatalogueChanged,
    PercoError,
    SessionEnded,
    SnapshotTooOld,
    Unavailable,
)
from perco.outcome import Awaited
from perco.protocol.commit import Commit, State
from perco.protocol.mutations import Header, Intent
from perco.protocol.records import PUT, Cellref, Lock
from perco.rpc.link import Link, LostError
from perco.serve.messages import (
    DRAWS_MAX,
    MET,
    STALE,
    TOLD,
    Method,
    pack_commit,
    unpack_verdict,
)
from perco.serve.remote_rows import LostRowStore, RemoteRowStore, is_split
from perco.serve.together import Together
from perco.storage import APPLIED, NoReply, ReadRequest, RowCells, Verdict
from perco.txn.background import Background
from perco.txn.driver import ConflictAt, Driver
from perco.txn.fates import Fates
from perco.txn.shipping import LOST, Shipped, Shipping
from perco.txn.starting import Start
from perco.txn.timed import timed

_COMMIT = int(Method.COMMIT)
_TOLD_MS = 100  # how much the server's clock may go on before its time is noted again
_SPARE_S = 0.5  # for how long a start timestamp is kept for the next operation
_UNDO_S, _UNDO_AGAIN_S = 5.0, 0.2  # how long to try to drop a pin whose caller has failed, and how often


class _Open(set[int]):
    """Start timestamps of this client's open transactions. Notifies the server when one of these transactions has ended
    (G1)."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        super().__init__()
        self._tell = tell

    def discard(self, start_ts: object) -> None:
        if start_ts in self:
            super().discard(start_ts)
            self._tell(start_ts)  # type: ignore[arg-type]


class RemoteHolds(Holds):
    """This client's holds on old versions; the server holds the same versions."""

    open: _Open

    __slots__ = ("_link", "numbers")

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self.numbers: set[int] = set()  # the numbers of the holds on past timestamps
        self.open = _Open(lambda start_ts: link.tell_merged(Method.DONE, start_ts))

    def number(self) -> int:
        """A number for a new hold."""
        number = next(self._numbers)
        self.numbers.add(number)
        return number

    def release(self, held: int) -> None:
        self.numbers.discard(held)
        self._link.tell(Method.RELEASE, held)  # even if the hold was made in a session that has ended since


class _Waiter(Awaited):
    """A task that waits for a timestamp, which becomes its `value`."""

    __slots__ = ("gone", "starts")

    def __init__(self, starts: bool) -> None:
        super().__init__(trio.lowlevel.current_task())
        self.starts = starts
        self.gone = False

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
        """See `Pins.put`. If a call for a new pin is cancelled, or fails, the pin is dropped."""
        pin = name, owner, ts, lease_s, id, over
        try:
            return Pin(*await self._link.call(Method.PIN, pin, again=True, writes=True))
        except BaseException:
            if over is None:
                self._spawn(lambda: self._undo(name, id))
            raise

    async def _undo(self, name: str, id: str) -> None:
        """Drop a pin whose caller has failed. If that does not succeed soon, the pin ends with its lease."""
        with trio.move_on_after(_UNDO_S), suppress(PercoError, LostError):
            while True:
                with suppress(Unavailable):
                    await self._link.call(Method.DROP_PIN, (name, id), again=True)
                    return
                await trio.sleep(_UNDO_AGAIN_S)

    async def drop(self, name: str, id: str) -> bool:
        """See `Pins.drop`."""
        return bool(await self._link.call(Method.DROP_PIN, (name, id), again=True, writes=True))

    async def drop_named(self, name: str) -> bool:
        """See `Pins.drop_named`."""
        pin = await self._named(name)
        return pin is not None and await self.drop(name, pin.id)


class RemoteOracle(Oracle):
    """Asks the server for timestamps."""

    catalogue_version: int
    pins: RemotePins  # type: ignore[assignment]

    store: RemoteRowStore

    def __init__(self, store: RemoteRowStore, link: Link, background: Background) -> None:
        super().__init__(store, OracleOptions(), lambda: 0.0)
        self.store, self._link, self._background = store, link, background
        self._spawn = background.spawn
        self.holds: RemoteHolds = RemoteHolds(link)
        self.pins = RemotePins(link, self, background.spawn)
        self._waiting: list[_Waiter] = []
        self._asking = False
        self._spares: deque[tuple[int, float]] = deque()  # see `spare`; and until when
        self._letting_go = False
        self._told = 0, 0.0  # wall time in ms, and when it arrived
        self._last = 0

    def told(self, version: int, wall_ms: int, last: int) -> None:
        """Note what the server sends with timestamps (O4), and with its greeting."""
        self.catalogue_version = max(self.catalogue_version, version)
        self._told = wall_ms, trio.current_time()
        self._last = max(self._last, last)

    def told_one(self, ts: int, version: int, wall_ms: int) -> None:
        """Like `told`, for one timestamp of many: notes the wall time only now and then."""
        if version > self.catalogue_version or not 0 <= wall_ms - self._told[0] < _TOLD_MS:
            self.told(version, wall_ms, ts)
        elif ts > self._last:
            self._last = ts

    def drawn_elsewhere(self, ts: int) -> None:
        """Note a commit timestamp that the server has drawn for this client."""
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

    @trio.lowlevel.enable_ki_protection  # see `Link.call`
    async def _draw(self, *, starts: bool) -> int:
        waiter = _Waiter(starts)
        self._waiting.append(waiter)
        if not self._asking:
            self._asking = True
            self._spawn(self._ask)
        ts: int = await trio.lowlevel.wait_task_rescheduled(waiter.abort)
        return ts

    async def _ask(self) -> None:
        """O2: tasks that wait now share a call, up to its limit, in their order of arrival. Tasks that arrive later
        share the next call."""
        try:
            while self._waiting:
                waiters, self._waiting = self._waiting[:DRAWS_MAX], self._waiting[DRAWS_MAX:]
                waiters.sort(key=lambda waiter: not waiter.starts)  # the server holds the first `starts` timestamps
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
        for i, waiter in enumerate(waiters):
            if error is None:
                waiter.value = drawn[i]
                if waiter.starts:
                    self.holds.open.add(waiter.value)
            else:
                waiter.error = error
            if waiter.gone:
                self.holds.open.discard(waiter.value)
            else:
                waiter.wake()

    def spare(self) -> int:
        """A start timestamp that has not been used, drawn a moment ago; 0: there is none."""
        while self._spares:
            ts, until = self._spares.pop()
            if ts in self.holds.open and trio.current_time() < until:
                return ts
            self.holds.open.discard(ts)
        return 0

    def spares_one(self, ts: int) -> None:
        """Keep a start timestamp that the server has sent, for `spare`; but not for long, because the server keeps old
        versions for it (G1)."""
        self.holds.open.add(ts)
        self._spares.append((ts, trio.current_time() + _SPARE_S))
        if not self._letting_go:
            self._letting_go = True
            self._background.start(self._let_spares_go, "spares")

    async def _let_spares_go(self) -> None:
        try:
            while self._spares:
                await trio.sleep_until(self._spares[0][1])
                while self._spares and trio.current_time() >= self._spares[0][1]:
                    self.holds.open.discard(self._spares.popleft()[0])
        finally:
            self._letting_go = False

    def wall_ms(self) -> int:
        wall_ms, told = self._told
        return wall_ms + int(1000 * (trio.current_time() - told))

    async def announce(self, version: int) -> None:
        """Note the version; the server already knows it (`ADOPT`)."""
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
            self.holds.release(number)  # the call may have arrived
            raise
        self.holds.numbers.add(number)  # the call may have been answered in a newer session
        return number

    async def at(self, wall_s: float) -> tuple[int, float]:
        ts, wall = await self._link.call(Method.AT, wall_s, again=True)
        return ts, wall


class RemoteFates(Fates):
    """Transactions of other clients are alive for as long as the server says so."""

    __slots__ = ("_link", "_mine", "_store")

    exact = False

    def __init__(self, link: Link, store: RemoteRowStore, mine: str) -> None:
        super().__init__()
        self._link, self._store, self._mine = link, store, mine

    @property
    def alone(self) -> bool:
        """Whether commits can be made in one step. The owner makes them, so every reader must ask the owner, whose
        memory has the entries (C4). False, if other processes answer reads."""
        return self._store.alone

    async def lives_elsewhere(self, start_ts: int, lock: Lock) -> bool:
        if lock.token == self._mine:
            return False  # a transaction of this client, which has ended
        return bool(await self._link.call(Method.ALIVE, start_ts, again=True))

    async def wait(self, start_ts: int) -> None:
        if self.alive(start_ts):
            await super().wait(start_ts)
        else:
            await self._link.call(Method.OUTLIVE, start_ts, again=True)


class _Orphaned:
    """Takes the place of the driver's event. When it is set, locks were left behind, and the server is asked to sweep
    them (T5)."""

    def __init__(self, link: Link) -> None:
        self._link, self._set = link, False

    def set(self) -> None:
        self._set = True  # repeated after each greeting: this message may be lost
        self._link.tell(Method.ORPHANED, None)

    def is_set(self) -> bool:
        return self._set


def _shipped_commit(start_ts: int, shipped: Shipped, token: str, commit_ts: int, verdict: Verdict) -> Commit:
    """The commit of an operation, in the state in which the owner has left it. `commit_ts` 0: it is unknown."""
    cell = Cellref(*shipped.cell)
    part = [Intent(*cell, PUT, b"", shipped.observers)]
    commit = Commit(Header(start_ts, cell, 0, 0, token), [part], one_step=True)
    commit.sent_in_one_step(commit_ts)
    commit.primary_told(verdict)
    return commit


class RemoteDriver(Driver):
    """A driver that has the server make the one-step commits."""

    orphaned: _Orphaned  # type: ignore[assignment]

    oracle: RemoteOracle
    store: RemoteRowStore

    @property
    def start(self) -> Start | None:
        """Only if the owner has the rows, reads go there unchanged, and no delay window gathers them."""
        store = self.store
        return self._start if type(store) is RemoteRowStore and not store.spread and self._together is None else None

    def _start(
        self, requests: Sequence[ReadRequest], started: Callable[[int], bool]
    ) -> Awaitable[list[RowCells] | None]:
        found = self.store.start(requests, self.oracle.told_one, started)
        return found if self.timings is None else timed(found, self.timings)

    @property
    def shipping(self) -> Shipping | None:
        return self if self.one_step else None

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
        self.orphaned = _Orphaned(link)

    @property
    def laned(self) -> bool:  # type: ignore[override]
        """Not with a delay window, which gathers commits."""
        return Driver.laned and self._together is None

    @trio.lowlevel.enable_ki_protection  # see `Link.call`
    async def lane(self, header: Header, parts: Sequence[Sequence[Intent]], version: int, *, observed: bool) -> int:
        """See `lane.py`: what `Driver.commit` does in one step, without a `Commit` as long as all goes as usual."""
        start_ts, [part] = header.start_ts, parts
        began = time.perf_counter() if self.timings is not None else 0.0
        self.fates.begin(start_ts)
        if observed:
            self.fates.observed += 1
        try:
            answer = await self._link.call(_COMMIT, pack_commit(header, part, version), again=False)
        except LostError as error:
            answer = error
        except BaseException:
            self.never_sent(start_ts, observed=observed)
            raise
        if type(answer) is tuple and answer[0] == TOLD and answer[1] == 0:  # it has been applied
            commit_ts: int = answer[2]
            self._drawn(commit_ts)
            self.committed(start_ts, commit_ts, began)
            if observed:
                self.tell_workers([(each.table, each.row, each.observers) for each in part if each.observers])
            return commit_ts
        commit = Commit(header, parts, one_step=True)
        return await self.go_on(commit, began, observed=observed, version=version, asked=(answer,))

    async def _in_one_step(self, commit: Commit, version: int, asked: tuple[Any] | None = None) -> None:
        """C1: ask the server for a one-step commit, only once (C6). The server draws the commit timestamp, enters the
        commit's cells in its memory (C2), and writes them. `asked`: it was asked, and this is its answer, or the
        LostError."""
        header, part = commit.header, commit.primary_part
        answer: Any = None if asked is None else asked[0]
        if asked is None:
            try:
                if self._together is not None:
                    answer = await self._together.commit(header, part, version)
                else:
                    answer = await self._link.call(_COMMIT, pack_commit(header, part, version), again=False)
            except LostError as error:
                answer = error
        if isinstance(answer, LostError):
            commit.sent_in_one_step(0)
            commit.primary_told(NoReply(str(answer)))
            return
        what, told, *more = answer
        if what == STALE:
            raise CatalogueChanged(commit.header.start_ts, told)
        if what == MET:
            raise ConflictAt(self._met(Cellref(*told)), more[0], commit.header.start_ts)
        commit.sent_in_one_step(more[0])
        self._drawn(more[0])
        verdict = unpack_verdict(told)
        if is_split(verdict):
            await self._catch_up()
        commit.primary_told(verdict)

    @trio.lowlevel.enable_ki_protection  # see `Link.call`
    async def ship(self, shipped: Shipped, token: str) -> tuple[int, Any] | None:
        """See `Shipping`. An operation takes a start timestamp that came with the answer to an earlier one. If that
        is too old, because the cell has changed since, the answer brings another one, which is tried."""
        done = await self._ship(self.oracle.spare() or await self.oracle.draw(), shipped, token)
        if done is None and (again := self.oracle.spare()):
            done = await self._ship(again, shipped, token)
        return done

    async def _ship(self, start_ts: int, shipped: Shipped, token: str) -> tuple[int, Any] | None:
        observed = bool(shipped.observers)
        began = time.perf_counter() if self.timings is not None else 0.0
        self.fates.begin(start_ts)
        if observed:
            self.fates.observed += 1
        try:
            done, spare = await self._link.call(Method.OPERATE, (start_ts, token, *shipped), again=False)
        except LostError as error:
            commit = _shipped_commit(start_ts, shipped, token, 0, NoReply(str(error)))
            return await self.go_on(commit, began, observed=observed, version=shipped.version), LOST
        except BaseException:
            self.never_sent(start_ts, observed=observed)
            raise
        if spare:
            self.oracle.spares_one(spare)
        commit_ts, told, value = done or (0, None, None)
        if not commit_ts:
            self._settled(start_ts, 0, observed=observed)
            return None if done is None else (0, value)
        self._drawn(commit_ts)
        verdict = unpack_verdict(told)
        if verdict is APPLIED:
            self.committed(start_ts, commit_ts, began)
            if observed:
                self.tell_workers([(*shipped.cell[:2], shipped.observers)])
            return commit_ts, value
        commit = _shipped_commit(start_ts, shipped, token, commit_ts, verdict)
        if commit.state is State.ASK:
            return await self.go_on(commit, began, observed=observed, version=shipped.version), value
        self._settled(start_ts, 0, observed=observed)  # the tablet has refused it, and written nothing (C6)
        return None

    async def _draw_commit(self) -> int:
        """T13: a transaction of an ended session gets no commit timestamp. Its locks may have been rolled back without
        a marker, and its prewrites may have arrived after that. Raises: SessionEnded."""
        ts = await super()._draw_commit()
        if isinstance(self.reads, LostRowStore):
            raise SessionEnded()
        return ts

    def _leave(self, commit: Commit) -> None:
        """Do nothing: the server does this, because the entries are in its memory."""

    def _leave_behind(self, commit: Commit) -> None:
        """Do nothing: the server does this, too."""
