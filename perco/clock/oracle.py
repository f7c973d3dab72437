"""The timestamp oracle in this process: durable ranges in the system table, and notes of the wall clock.

Rows of the system table: `oracle` holds the bound (a cell at timestamp = bound), `clock` the notes (a cell at
timestamp = last issued, its value the wall time in milliseconds), `watermark` the last publication of the
watermark and of every table's cut, the oldest timestamp at which the table can be read (a cell at timestamp = the
publication's number).

O1-O3: see `timestamps.py`. There is one oracle per folder because the folder has one owner: the kernel gives the
folder's lock to the next process only when the previous one is gone.
O4  `catalogue_version` comes with every drawn timestamp; `holds` has the watermark.
G1  The watermark is computed between two answers of the oracle, and is durable before anything below it is removed
    (G2).
T15  `at=w` selects the last note at or before w; w may be neither in the future nor before the oldest note.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass
from typing import Final

import msgpack
import trio

from perco.clock.holds import Holder, Holds
from perco.clock.pins import Pins
from perco.clock.timestamps import Timestamps, WallClock
from perco.errors import NOTHING_WRITTEN, Corruption, SnapshotTooOld, Unavailable, UsageError
from perco.schema.catalogue import SYSTEM_TABLE, raise_for as raise_for
from perco.settings import check_options
from perco.storage import (
    ABSENT,
    APPLIED,
    DATA,
    TS_MAX,
    Failed,
    Mutation,
    NoReply,
    Refused,
    RowMutation,
    RowStore,
    Write,
)

BOUND_ROW: Final = b"oracle"
CLOCK_ROW: Final = b"clock"
_WATERMARK_ROW: Final = b"watermark"
_TRIES: Final = 16
_WALL: Final = struct.Struct(">Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleOptions:
    """Attributes:
    range_size: timestamps per durable range; a restart skips the rest of a range.
    note_period_s: seconds between notes of the clock while timestamps are being drawn: the precision of `at=`.
    """

    range_size: int = 100_000
    note_period_s: float = 1.0

    def __post_init__(self) -> None:
        check_options(self)


class Still:
    """An oracle whose durable bound does not change for a moment.

    Attributes: `bound`, that bound: no timestamp above it is handed out.
    """

    bound: int

    def __init__(self, timestamps: Timestamps) -> None:
        self._timestamps, self.bound = timestamps, timestamps.bound

    def row(self, bound: int) -> RowMutation:
        """What makes a higher bound durable, in the system table."""
        return bound_row(self.bound, bound)

    def jump(self, bound: int) -> None:
        """Go on above a bound that is durable now."""
        assert self._timestamps.bound == self.bound, "O1: the bound has not moved"
        self._timestamps.jump(bound)


def bound_row(old: int, bound: int) -> RowMutation:
    """What replaces a durable bound with a higher one."""
    writes: list[Write] = [(DATA, 0, bound, b"")]
    if old:
        writes.append((DATA, 0, old, None))
    return BOUND_ROW, [(ABSENT, DATA, 0, old + 1, TS_MAX)], writes


class Oracle:
    """Draws timestamps. One per store; loop thread only."""

    options: OracleOptions
    holds: Holds
    pins: Pins
    catalogue_version: int
    ranges: int

    def __init__(self, store: RowStore, options: OracleOptions, wall: Callable[[], float]) -> None:
        self._store, self.options, self._wall = store, options, wall
        self._timestamps = Timestamps(0)
        self._clock = WallClock(0)
        self._extending = trio.Lock()
        self._noted = 0
        self._unsure = 0  # a bound that was sent, and whose reply was lost
        self.catalogue_version = 0  # O4: comes with every drawn timestamp
        self.holds = Holds()  # O4: these include the watermark
        self.pins = Pins(store, self.holds, self.wall_ms, lambda: self._timestamps.last)
        self.ranges = 0
        self.on_announced: list[Callable[[int], None]] = []

    async def start(self) -> None:
        """Continue above the durable bound (O1)."""
        [[bound], [note]] = await self._store.read(
            [
                (SYSTEM_TABLE, BOUND_ROW, [(DATA, 0, 1, TS_MAX, 1)]),
                (SYSTEM_TABLE, CLOCK_ROW, [(DATA, 0, 1, TS_MAX, 1)]),
            ]
        )
        self._timestamps = Timestamps(bound[0][0] if bound else 0)
        if note:
            self._clock = WallClock(_wall_ms(note[0][1]))
            self._noted = note[0][0]
        self.holds.take_over(*(await published(self._store))[1:])
        if not self._store.once:
            await self._put_watermark(again=True)
        await self.pins.load()

    async def announce(self, version: int) -> None:
        """From now on every timestamp comes with this version of the catalogue (N10)."""
        self.catalogue_version = version
        for act in self.on_announced:
            act(version)

    @property
    def last(self) -> int:
        """The last timestamp handed out."""
        return self._timestamps.last

    async def newest(self) -> int:
        """The last timestamp handed out, to any process."""
        return self.last

    def draw_nowait(self) -> int:
        """A new timestamp, or 0 if a range must be made durable first (O1)."""
        return self._timestamps.draw()

    async def draw(self) -> int:
        """A new timestamp, drawn after this call was made (O2)."""
        ts = self._timestamps.draw()
        while not ts:
            await self.extend()
            ts = self._timestamps.draw()
        return ts

    async def draw_commit(self) -> int:
        """A new timestamp to commit at; no reader uses it."""
        return await self.draw()

    async def extend(self) -> None:
        """Make the next range durable, if there is none left to draw from (O1)."""
        async with self._extending:
            if self._timestamps.last < self._timestamps.bound:
                return  # another task extended it while we waited
            with trio.CancelScope(shield=True):  # other tasks wait for the same range
                for _ in range(_TRIES):
                    if await self._make_durable(self._timestamps.next_bound(self.options.range_size)):
                        return
                raise Unavailable("there are no timestamps: the store does not answer the request for a new range")

    @asynccontextmanager
    async def still(self) -> AsyncIterator[Still]:
        """While the block lasts, the durable bound stays where it is: draws go on below it, or wait. In the block, the
        caller may make a higher bound durable, together with other rows, and then call `jump` (O1, P7)."""
        async with self._extending:
            yield Still(self._timestamps)

    async def _make_durable(self, bound: int) -> bool:
        """Make a bound durable (O1). If the reply was lost, the write may have arrived, or may still arrive (T4), so
        the next attempt uses the same bound.

        In a store whose writes may take effect late, a bound that is found there may be a former oracle's. If so, that
        range is not handed out, and this returns False: the oracle has to continue above that bound.

        The write may use the reserve: otherwise even reads would stop on a disk that has been full for a long time
        (S4).
        """
        old = self._timestamps.bound
        [verdict] = await self._store.apply([Mutation(SYSTEM_TABLE, (bound_row(old, bound),), None, True)])
        if isinstance(verdict, NoReply):
            self._unsure = bound
        if verdict is not APPLIED and not self._store.once and (found := await durable_bound(self._store)) > old:
            self._timestamps = Timestamps(found)
            self._unsure = 0
            return False
        if verdict is not APPLIED and not (self._unsure == bound == await durable_bound(self._store)):
            if isinstance(verdict, NoReply):  # no timestamp of the range was handed out, whether it is durable or not
                raise Unavailable(
                    f"there are no timestamps: it is not known whether the next range is durable ({verdict.reason})",
                    remedy=NOTHING_WRITTEN,
                )
            raise_for(verdict, "the oracle's range")
        self._timestamps.extend(bound)
        self._unsure = 0
        self.ranges += 1
        return True

    # ------------------------------------------------------------ wall time

    def wall_ms(self) -> int:
        """The oracle's wall time in milliseconds; never goes back (O3, O4)."""
        return self._clock.tell_ms(self._wall())

    async def note(self, visible: Callable[[int], Awaitable[None]] | None = None) -> None:
        """Write a durable note (last timestamp issued, now), if a timestamp was issued since the last note (O3).

        `visible`: returns once readers in other processes can see everything that committed up to a timestamp. These
        readers take the current timestamp from the note alone (C4).
        """
        last, wall_ms = self._timestamps.last, self.wall_ms()
        if last == self._noted or not last:
            return
        if visible is not None:
            await visible(last)
        # A former oracle's note may arrive late, with that oracle's wall time. If it has arrived, the check refuses our
        # note, and we first adopt that wall time.
        checks = [(ABSENT, DATA, 0, self._noted + 1, TS_MAX)]
        row = (CLOCK_ROW, checks, ((DATA, 0, last, _WALL.pack(wall_ms)),))
        [verdict] = await self._store.apply([Mutation(SYSTEM_TABLE, (row,))])
        if verdict is APPLIED:
            self._noted = last
        elif isinstance(verdict, Refused) and (note := await newest_note(self._store)) is not None:
            self._noted = note[0]
            self._clock.tell_ms(note[1])

    # ------------------------------------------------------------ old versions

    async def aged(self, seconds: float) -> int:
        """The newest timestamp that is certainly older than `seconds`; 0: none. For 0 seconds: TS_MAX."""
        if not seconds:
            return TS_MAX
        try:
            return (await note_at(self._store, self.wall_ms() / 1000 - seconds))[0]
        except SnapshotTooOld:
            return 0

    async def publish(self, keep_s: Mapping[str, float], *, least: int = 0) -> Holder:
        """Compute the watermark and the tables' cuts (G1), and make them durable (G2). Returns the hold that keeps the
        watermark from advancing further.

        Args:
            keep_s: for each table, its retention in seconds.
            least: as in `Holds.advance`.
        """
        ages = {seconds: await self.aged(seconds) for seconds in set(keep_s.values())}
        aged = {table: ages[seconds] for table, seconds in keep_s.items()}
        holder = self.holds.advance(self._timestamps.last, self.wall_ms(), aged, least=least)
        await self._put_watermark()
        return holder

    async def _put_watermark(self, *, again: bool = False) -> None:
        """Make the watermark and the cuts durable.

        Args:
            again: publish them under the next number, even if they are durable already (G1, R8). From then on, the
                store refuses a former owner's watermark that arrives late. That watermark could be above timestamps
                that this owner holds for clients that connect to it.
        """
        for _ in range(_TRIES):
            number, watermark, cuts = await published(self._store)
            self.holds.take_over(watermark, cuts)
            if not again and (watermark, cuts) == (self.holds.watermark, self.holds.cuts):
                return
            value = msgpack.packb([self.holds.watermark, self.holds.cuts])
            checks = [(ABSENT, DATA, 0, number + 1, TS_MAX)]
            writes: list[Write] = [(DATA, 0, number + 1, value)]
            if number:
                writes.append((DATA, 0, number, None))
            row = (_WATERMARK_ROW, checks, writes)
            [verdict] = await self._store.apply([Mutation(SYSTEM_TABLE, (row,), None, True)])
            if again and verdict is APPLIED:
                return
            if isinstance(verdict, Failed):
                raise copy(verdict.error)
        raise Unavailable("the watermark could not be made durable")

    async def watermark(self) -> int:
        """The watermark, as it is now published."""
        return self.holds.watermark

    async def oldest(self) -> int:
        """The oldest timestamp at which any table can be read."""
        return self.holds.oldest()

    async def hold(self, ts: int) -> int:
        """T15: hold a past timestamp. Returns the number to pass to `holds.release`.

        Raises: SnapshotTooOld.
        """
        held = self.holds.hold(ts)
        if not held:
            raise SnapshotTooOld(ts, self.holds.oldest())
        return held

    async def cut(self, table: str) -> int:
        """The oldest timestamp at which a table can be read (G5)."""
        return self.holds.cuts.get(table, 0)

    async def at(self, wall_s: float) -> tuple[int, float]:
        """(timestamp, its wall time in seconds) of the last note at or before a wall time (O3, T15).

        Raises: UsageError for the future, SnapshotTooOld before the oldest note.
        """
        if int(wall_s * 1000) > self.wall_ms():
            raise UsageError("there is no snapshot in the future; ask for a time that has passed")
        return await note_at(self._store, wall_s)


async def note_at(store: RowStore, wall_s: float) -> tuple[int, float]:
    """The last note at or before a wall time. Uses a binary search, because timestamps and wall times rise together."""
    wanted = int(wall_s * 1000)
    [[oldest], [newest]] = await store.read(
        [
            (SYSTEM_TABLE, CLOCK_ROW, [(DATA, 0, 1, TS_MAX, -1)]),
            (SYSTEM_TABLE, CLOCK_ROW, [(DATA, 0, 1, TS_MAX, 1)]),
        ]
    )
    if not oldest or _wall_ms(oldest[0][1]) > wanted:
        first = _wall_ms(oldest[0][1]) / 1000 if oldest else "not noted yet"
        raise SnapshotTooOld(wall_s, first, newer=not (await published(store))[1])
    best, high = oldest[0], newest[0]
    if _wall_ms(high[1]) <= wanted:
        return high[0], _wall_ms(high[1]) / 1000
    low_ts, high_ts = best[0], high[0]  # note(low) <= wanted < note(high)
    while high_ts - low_ts > 1:
        middle = (low_ts + high_ts) // 2
        [[found]] = await store.read([(SYSTEM_TABLE, CLOCK_ROW, [(DATA, 0, low_ts + 1, middle, 1)])])
        if not found:
            low_ts = middle
        elif _wall_ms(found[0][1]) <= wanted:
            best, low_ts = found[0], middle
        else:
            high_ts = found[0][0]
    return best[0], _wall_ms(best[1]) / 1000


async def note_below(store: RowStore, ts: int) -> tuple[int, float] | None:
    """The newest note at or below a timestamp: at the note's wall time, the timestamp had not been handed out yet, or
    only just had been."""
    [[cells]] = await store.read([(SYSTEM_TABLE, CLOCK_ROW, [(DATA, 0, 1, ts, 1)])])
    return (cells[0][0], _wall_ms(cells[0][1]) / 1000) if cells else None


async def note_from(store: RowStore, ts: int) -> int | None:
    """The wall time, in ms, of the first note at or above a timestamp: by then, the timestamp had been handed out."""
    [[cells]] = await store.read([(SYSTEM_TABLE, CLOCK_ROW, [(DATA, 0, ts, TS_MAX, -1)])])
    return _wall_ms(cells[0][1]) if cells else None


async def oldest_wall(store: RowStore, ts: int) -> float | str:
    """The wall time of the oldest note at or above a timestamp: the oldest time that `at=` accepts."""
    [[cells]] = await store.read([(SYSTEM_TABLE, CLOCK_ROW, [(DATA, 0, ts, TS_MAX, -1)])])
    return _wall_ms(cells[0][1]) / 1000 if cells else "not noted yet"


async def newest_note(store: RowStore) -> tuple[int, float] | None:
    """The newest note: all that a reader beside the owner can know about the current time."""
    [[cells]] = await store.read([(SYSTEM_TABLE, CLOCK_ROW, [(DATA, 0, 1, TS_MAX, 1)])])
    return (cells[0][0], _wall_ms(cells[0][1]) / 1000) if cells else None


async def published(store: RowStore) -> tuple[int, int, dict[str, int]]:
    """(number, watermark, cuts) of the last publication that is durable."""
    [[cells]] = await store.read([(SYSTEM_TABLE, _WATERMARK_ROW, [(DATA, 0, 1, TS_MAX, 1)])])
    if not cells:
        return 0, 0, {}
    try:
        watermark, cuts = msgpack.unpackb(cells[0][1])
        return cells[0][0], int(watermark), {str(table): int(ts) for table, ts in cuts.items()}
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise Corruption("watermark", f"cannot be decoded: {error}") from error


async def durable_bound(store: RowStore) -> int:
    """The durable bound: no timestamp above it was ever handed out."""
    [[cells]] = await store.read([(SYSTEM_TABLE, BOUND_ROW, [(DATA, 0, 1, TS_MAX, 1)])])
    return cells[0][0] if cells else 0


def _wall_ms(value: bytes) -> int:
    if len(value) != _WALL.size:
        raise Corruption("clock", f"not a wall time: {value[:16].hex()}")
    return int(_WALL.unpack(value)[0])
