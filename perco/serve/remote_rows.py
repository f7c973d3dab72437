"""The row store of a client: sends reads, scans and mutations to the owner or to tablet servers."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import trio

from perco.errors import (
    PercoError,
    SessionEnded,
    TabletSplit,
    Unavailable,
    UsageError,
)
from perco.rpc.framing import WireError
from perco.rpc.link import Link, LostError
from perco.serve.messages import (
    LOST,
    NOT_HERE,
    Method,
    read_leaves,
    read_page,
    unpack_verdict,
)
from perco.storage import Failed, Mutation, NoReply, ReadRequest, RowCells, ScanPage, ScanRequest, Tablet, Verdict
from perco.storage.walking import Leaves

_REACHED_S: Final = 0.2  # how long to wait for a tablet server before asking where its tablet is now


_LOOK_S, _LOOK_MAX_S = 0.01, 0.25  # between two queries for where the tablets are


_MAP_S: Final = 1.0  # how long to wait for a newer map of tablets, before the next call goes by the old one


_AWAY: Final = "the connection to the server was lost for too long: all earlier transactions have ended"


_READ, _SCAN, _APPLY, _START = int(Method.READ), int(Method.SCAN), int(Method.APPLY), int(Method.START)


class RemoteRowStore:
    """A row store over links: to the owner, and to the tablet servers, if there are any.

    Args:
        link: to the owner.
        reach: makes a link to the tablet server with the given number and port.
        patience_s: how long to look for a tablet that no server has.
    """

    groups: bool
    once: bool
    logs: bool
    near = False
    spread: bool
    alone: bool
    losses: int

    chaining = None
    deferring = None
    prompt = None

    def tablets_here(self) -> Sequence[Tablet]:
        return ()

    queues = False

    def __init__(self, link: Link, reach: Callable[[int, int], Link], patience_s: float, rng: random.Random) -> None:
        self._link, self._reach, self._patience_s, self._rng = link, reach, patience_s, rng
        self._starts: dict[str, list[bytes]] = {}
        self._servers: dict[str, list[int]] = {}  # each tablet's; 0: the owner; NOBODY: none has it
        self._numbers: dict[str, int] = {}
        self._ports: dict[int, int] = {}
        self._links: dict[int, Link] = {0: link}
        self._version = 0  # how often the map of tablets was replaced
        self._refreshing = trio.Lock()
        self._moved = trio.Event()
        self._stale = False  # the map of tablets is known to be out of date
        self.groups = self.once = self.logs = True  # as the owner says in its greeting
        self.spread = False  # whether tablet servers have the rows, as the owner says in its greeting
        self.alone = True  # whether all readers of the rows ask the owner, as its greeting says (C4)
        self.losses = 0  # how often the owner has ended the session (R5)

    def greeted(self, info: dict[str, Any]) -> None:
        """Note what the store offers, as the owner's greeting says. Raises: KeyError."""
        self.groups, self.once, self.logs = info["groups"], info["once"], info["logs"]
        self.spread, self.alone = info["spread"], info["alone"]

    def lost(self) -> None:
        """Record that the owner has ended the session (R5)."""
        self.losses += 1

    def close(self) -> None:
        """Do nothing: the tasks that run the links close them."""

    async def refresh(self) -> None:
        """Ask the owner which tablets there are, and which server has each."""
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
        """Wait briefly for a newer map of tablets, because the present one is out of date."""
        self._stale = True
        with trio.move_on_after(_MAP_S, shield=True), suppress(LostError, PercoError):  # T10; later calls raise errors
            async with self._refreshing:
                if self._stale:
                    await self.refresh()

    def moved(self) -> None:
        """Record that tablets have moved: tasks that look for a tablet look again."""
        self._stale = True
        self._moved.set()
        self._moved = trio.Event()

    def tables(self) -> list[str]:
        return list(self._starts)

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
        """See `RowStore.read_first`; here the limit is the size of a message."""
        if self.spread:
            return await self._read_spread(requests, part=True)
        if self._stale:
            await self.refresh()
        return await self._part(requests)

    async def _part(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
        """Read the cells of all requests or, if that is too much for a message, of the first ones."""
        found: list[RowCells] = await self._link.call(_READ, requests, again=True, held=True)
        return _checked(found, requests)

    def start(
        self,
        requests: Sequence[ReadRequest],
        told: Callable[[int, int, int], None],
        started: Callable[[int], bool],
    ) -> Awaitable[list[RowCells] | None]:
        """Have the owner draw a start timestamp and read at it; in the requests, 0 stands for it. As soon as the answer
        has arrived, `told` gets the timestamp, the catalogue's version and the owner's wall time; then `started` gets
        the timestamp, and returns whether the cells are wanted."""

        def arrived(answer: Any) -> list[RowCells] | None:
            ts, version, wall_ms, found = answer
            told(ts, version, wall_ms)
            return _checked(found, requests) if started(ts) else None

        call = self._link.call
        return (
            self._refreshed(requests, arrived) if self._stale else call(_START, requests, again=True, arrived=arrived)
        )

    async def _refreshed(self, requests: Sequence[ReadRequest], arrived: Callable[[Any], Any]) -> Any:
        await self.refresh()
        return await self._link.call(_START, requests, again=True, arrived=arrived)

    async def scan(self, request: ScanRequest) -> ScanPage:
        if self.spread:
            return await self._scan_spread(request)
        return read_page(await self._link.call(_SCAN, request, again=True, held=True))

    async def leaves(self, table: str, start: bytes, stop: bytes | None, ts: int, cells: int) -> Leaves | None:
        """The owner's `find_leaves`, once all commits up to `ts` are in them (C4). None: the owner has no file of the
        tablet, or tablet servers have it. Raises: also WireError."""
        if self.spread:
            return None
        asked = (table, start, stop, ts, cells)
        return read_leaves(await self._link.call(Method.LEAVES, asked, again=True, held=True))

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        if self.spread:
            return await self._apply_spread(mutations)
        if self._stale:
            await self.catch_up()
        try:
            answer = await self._link.call(_APPLY, mutations, again=False)
        except LostError as error:
            return [NoReply(str(error))] * len(mutations)
        except PercoError as error:
            return [Failed(error)] * len(mutations)  # R6, R7: they were not sent, or not applied
        verdicts = [unpack_verdict(verdict) for verdict in _for_each(answer, mutations)]
        if any(map(is_split, verdicts)):
            await self.catch_up()
        return verdicts

    # ------------------------------------------------------------ from tablet servers

    async def _read_spread(self, requests: Sequence[ReadRequest], *, part: bool = False) -> list[RowCells]:
        """`part`: return only the cells of the first requests, if the others would take another message."""
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
        """Call a server. Returns its answer; NOT_HERE, if the server cannot be reached."""
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
            try:
                link = await self._link_to(server)
                if link is None:
                    return
                answer = await link.call(_APPLY, [mutations[i] for i in which], again=False)
            except LostError as error:
                answer = [str(error)] * len(which)  # T4
            except PercoError as error:
                for i in which:
                    verdicts[i] = Failed(error)  # R6, R7, F3: not sent, or not applied
                return
            for i, packed in zip(which, () if answer is NOT_HERE else _for_each(answer, which), strict=False):
                if packed != LOST:
                    verdicts[i] = unpack_verdict(packed)

        search = _Search(self)
        with trio.CancelScope() as scope:
            while left := [i for i, verdict in enumerate(verdicts) if verdict is None]:
                try:
                    await search.next()
                except PercoError as error:
                    return [Failed(error) if verdict is None else verdict for verdict in verdicts]
                for i in left:
                    if len(mutations[i].rows) > 1 and self._spans(mutations[i]):
                        verdicts[i] = Failed(TabletSplit(mutations[i].table))  # P3
                left = [i for i in left if verdicts[i] is None]
                await _each(self._by_server(left, lambda i: (mutations[i].table, mutations[i].rows[0][0])), ask)
                # T10: once one mutation has its verdict, wait for all.
                scope.shield = any(verdict is not None for verdict in verdicts)
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
    """Whether a mutation was not applied because its rows no longer lie in one tablet (P3)."""
    return isinstance(verdict, Failed) and isinstance(verdict.error, TabletSplit)


def _checked(answer: list[RowCells], asked: Sequence[object]) -> list[RowCells]:
    if len(answer) > len(asked) or (asked and not answer):
        raise WireError(f"an answer of {len(answer)} rows to a call for {len(asked)}")
    return answer


def _for_each(verdicts: Any, asked: Sequence[object]) -> Sequence[Any]:
    """The verdicts. T4: if there is not one for each mutation, it is unknown which mutations the server has applied."""
    if type(verdicts) in (list, tuple) and len(verdicts) == len(asked):
        return verdicts  # type: ignore[no-any-return]
    return [f"no answer for each of {len(asked)} mutations"] * len(asked)


class _Search:
    """Looks for tablets that have moved: asks the owner again and again, with pauses, for `patience_s`."""

    def __init__(self, store: RemoteRowStore) -> None:
        self._store = store
        self._version = -1
        self._pause_s = _LOOK_S
        self._losses = store.losses

    def must_be_held(self) -> None:
        """R5, F3: a transaction of a session that has ended reads nothing in a newer one. Raises: SessionEnded."""
        if self._losses != self._store.losses:
            raise SessionEnded(_AWAY)

    async def next(self) -> None:
        """Wait for a newer map of tablets; the first call returns at once. Raises: Unavailable, SessionEnded."""
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
    """Ask all servers at once; when all have answered, raise the first error, not an ExceptionGroup."""
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
    """The row store of the transactions and snapshots of an ended session: each call raises SessionEnded (R5)."""

    groups = True
    once = True
    logs = True
    near = False
    chaining = None
    deferring = None
    prompt = None

    def tablets_here(self) -> Sequence[Tablet]:
        return ()

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
