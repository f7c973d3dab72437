"""The oracle over a row store: ranges made durable before they are used, notes that map wall time to timestamps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from trio.testing import MockClock

from perco.clock.oracle import Oracle, OracleOptions, durable_bound, newest_note
from perco.database.beside import BesideOracle
from perco.errors import Corruption, SnapshotTooOld, StoreFull, Unavailable, UsageError
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import DATA, Failed, LocalRowStore, MemoryTablet, Mutation, NoReply, ReadRequest, RowCells, Verdict


class Wall:
    """A clock that is set by hand."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Slow(LocalRowStore):
    """Writes take a second; the next may fail. `under_way` counts those at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = self.most = 0
        self.full = False

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await trio.sleep(1)
        self.under_way -= 1
        if self.full:
            return [Failed(StoreFull("here", "full"))]
        return await super().apply(mutations)


def make(store: LocalRowStore | None = None) -> LocalRowStore:
    store = LocalRowStore() if store is None else store
    store.add_table(SYSTEM_TABLE, [MemoryTablet(SYSTEM_TABLE, b"")])
    return store


async def started(store: LocalRowStore, wall: Wall | None = None, size: int = 10) -> Oracle:
    oracle = Oracle(store, OracleOptions(range_size=size), wall or Wall())
    await oracle.start()
    return oracle


async def test_the_bound_is_durable_before_the_first_of_its_timestamps() -> None:  # O1
    store = make()
    oracle = await started(store)
    assert await durable_bound(store) == 0
    for expected in range(1, 35):
        ts = await oracle.draw()
        assert ts == expected
        assert await durable_bound(store) >= ts
    assert oracle.ranges == 4


async def test_on_a_full_disk_the_bound_goes_into_the_reserve() -> None:  # O1 S4
    """Else nobody could read any more when the range is used up."""

    class Noting(LocalRowStore):
        async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
            seen.extend(mutations)
            return await super().apply(mutations)

    seen: list[Mutation] = []
    oracle = await started(make(Noting()))
    await oracle.draw()
    assert [mutation.reserve for mutation in seen] == [True]


async def test_a_restart_goes_on_above_the_durable_bound() -> None:  # O1
    store = make()
    drawn: list[int] = []
    for _ in range(5):
        oracle = await started(store)
        drawn += [await oracle.draw() for _ in range(3)]
    assert drawn == [1, 2, 3, 11, 12, 13, 21, 22, 23, 31, 32, 33, 41, 42, 43]


async def test_a_range_that_could_not_be_made_durable_is_not_used(autojump_clock: MockClock) -> None:  # O1
    store = Slow()
    make(store)
    oracle = await started(store)
    store.full = True
    with pytest.raises(StoreFull):
        await oracle.draw()
    assert oracle.last == 0
    store.full = False
    assert await oracle.draw() == 1


async def test_many_who_wait_share_one_range_and_get_one_timestamp_each(
    autojump_clock: MockClock,
) -> None:  # O1 O2
    store = Slow()
    make(store)
    oracle = await started(store, size=64)
    drawn: list[int] = []

    async def draw() -> None:
        drawn.append(await oracle.draw())

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(draw)
    assert sorted(drawn) == list(range(1, 101))
    assert store.most == 1
    assert oracle.ranges == 2


async def test_a_timestamp_is_drawn_after_it_was_asked_for(autojump_clock: MockClock) -> None:  # O2
    """A request made after an answer was given gets a greater timestamp, also while a range is being extended."""
    store = Slow()
    make(store)
    oracle = await started(store, size=3)
    last = 0

    async def draw() -> None:
        nonlocal last
        for _ in range(10):
            asked_after = last
            ts = await oracle.draw()
            assert ts > asked_after
            last = max(last, ts)

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(draw)
    assert last == 50


async def test_cancelling_one_who_waits_does_not_spoil_the_range_for_others(
    autojump_clock: MockClock,
) -> None:  # O1
    store = Slow()
    make(store)
    oracle = await started(store)
    drawn: list[int] = []

    async def draw() -> None:
        drawn.append(await oracle.draw())

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0.5):
            nursery.start_soon(draw)
            await oracle.draw()
    assert drawn
    assert await durable_bound(store) == 10


async def test_a_bound_that_somebody_else_moved_is_corruption() -> None:  # O1
    """There is one oracle for a folder: a second one, whose folder's lock was broken, may not go on."""
    store = make()
    one, two = await started(store), await started(store)
    assert await one.draw() == 1
    with pytest.raises(Corruption, match="oracle"):
        await two.draw()


class Deaf(LocalRowStore):
    """The reply to the next write is lost; the write is made at once, or before the one after it, or never."""

    def __init__(self, arrives: str) -> None:
        super().__init__()
        self.arrives, self.lost = arrives, 0
        self._late: Sequence[Mutation] = ()

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        if not self.lost:
            self.lost += 1
            if self.arrives == "at once":
                await super().apply(mutations)
            self._late = mutations if self.arrives == "late" else ()
            return [NoReply("lost")]
        late, self._late = self._late, ()
        if late:
            await super().apply(late)
        return await super().apply(mutations)


@pytest.mark.parametrize("arrives", ["at once", "late", "never"])
async def test_a_range_whose_reply_was_lost_is_asked_for_again(arrives: str) -> None:  # O1 T4
    store = Deaf(arrives)
    make(store)
    oracle = await started(store)
    drawn: list[int] = []
    for _ in range(25):
        try:
            drawn.append(await oracle.draw())
        except Unavailable:
            assert arrives != "at once"
    assert store.lost == 1
    assert drawn == list(range(1, len(drawn) + 1))
    assert len(drawn) >= 24
    assert await durable_bound(store) >= drawn[-1]


async def test_a_reader_beside_takes_no_snapshot_in_the_next_owners_future() -> None:  # T9, T15
    """An owner that begins just after the reader has looked for one issues timestamps above the reader's."""
    store = make()
    await (await started(store)).draw()
    began: list[Oracle] = []

    class Beside:
        """What `BesideOracle` asks of the opened store."""

        looked = False

        @property
        def owner_alive(self) -> bool:
            self.looked = True
            return False

        def find_moved(self) -> None:
            """P6: no file is replaced here."""

    class Racing(LocalRowStore):
        """Reads after that look happen when the next owner has extended the bound."""

        async def read(self, requests: Sequence[ReadRequest]) -> list[RowCells]:
            if local.looked:
                began.append(await started(store))
                await began[0].draw()
            return await store.read(requests)

    local = Beside()
    local.store = Racing()  # type: ignore[attr-defined]
    seen = await BesideOracle(local, OracleOptions(), Wall()).draw()  # type: ignore[arg-type]
    assert local.looked
    assert await (began[0] if began else await started(store)).draw() > seen


async def test_a_reader_beside_does_not_go_back_when_an_owner_has_noted() -> None:  # O3
    class Beside:
        store = make()
        owner_alive = False

        def find_moved(self) -> None:
            """P6: no file is replaced here."""

    beside = Beside()
    former = await started(beside.store)
    await former.draw()
    await former.note()
    commit_ts = await former.draw()  # and its owner dies, before the next note
    reader = BesideOracle(beside, OracleOptions(), Wall())  # type: ignore[arg-type]
    seen = await reader.draw()
    assert seen >= commit_ts
    beside.owner_alive = True
    owner = await started(beside.store)
    await owner.note()
    assert await reader.draw() == reader.last == seen
    fresh = BesideOracle(beside, OracleOptions(), Wall())  # type: ignore[arg-type]
    assert await fresh.draw() == seen
    later = await owner.draw()
    await owner.note()
    assert await reader.draw() == await fresh.draw() == later > seen


async def test_a_reader_beside_waits_for_the_next_owners_first_note(
    autojump_clock: MockClock,
) -> None:  # O3
    """Between the moment when it owns the folder and its first note, the newest note is its predecessor's."""

    class Beside:
        store = make()
        owner_alive = False

        def find_moved(self) -> None:
            """P6: no file is replaced here."""

    beside = Beside()
    former = await started(beside.store)
    await former.draw()
    await former.note()
    reader = BesideOracle(beside, OracleOptions(), Wall())  # type: ignore[arg-type]
    seen = await reader.draw()  # the bound, above that note: nobody is there
    beside.owner_alive = True
    owner = await started(beside.store)
    later = await owner.draw()
    drawn: list[int] = []

    async def draw() -> None:
        drawn.append(await reader.draw())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(draw)
        await trio.sleep(1)
        assert not drawn
        await owner.note()
    assert drawn == [later]
    assert later > seen


# ------------------------------------------------------------ notes


async def noted(oracle: Oracle, wall: Wall, *moments: float) -> dict[float, int]:
    """Draw one timestamp and note it, at each of some wall times; returns the last timestamp at each."""
    out = {}
    for moment in moments:
        wall.now = moment
        out[moment] = await oracle.draw()
        await oracle.note()
    return out


async def test_at_is_the_last_note_at_or_before_it() -> None:  # O3 T15
    wall, store = Wall(), make()
    oracle = await started(store, wall, size=1000)
    moments = [100.0, 101.5, 101.75, 250.0, 1e6, 1e6 + 1]
    notes = await noted(oracle, wall, *moments)
    for moment, ts in notes.items():
        assert await oracle.at(moment) == (ts, moment)
        if moment < wall.now:
            assert await oracle.at(moment + 0.01) == (ts, moment)
    assert await oracle.at(249.999) == (notes[101.75], 101.75)
    assert await oracle.at(999_999) == (notes[250.0], 250.0)


async def test_every_moment_is_found_among_many_notes() -> None:  # O3 T15
    wall, store = Wall(), make()
    oracle = await started(store, wall, size=100_000)
    notes: list[tuple[float, int]] = []
    for i in range(200):
        wall.now = 1000.0 + i * 3
        for _ in range(1 + (i * 7919) % 50):
            ts = await oracle.draw()
        await oracle.note()
        notes.append((wall.now, ts))
    for moment, ts in notes:
        for later in (0, 1, 2):
            if moment + later <= wall.now:
                assert await oracle.at(moment + later) == (ts, moment)


async def test_before_the_oldest_note_is_too_old() -> None:  # T15
    wall, store = Wall(), make()
    oracle = await started(store, wall)
    with pytest.raises(SnapshotTooOld, match="not noted yet"):
        await oracle.at(wall.now)
    await noted(oracle, wall, 2_000_000.0)
    with pytest.raises(SnapshotTooOld) as caught:
        await oracle.at(1_999_999.9)
    assert caught.value.oldest == 2_000_000.0


async def test_now_is_not_the_future() -> None:  # T15
    """Though the clock is kept in milliseconds."""
    wall, store = Wall(2_000_000.0009), make()
    oracle = await started(store, wall)
    [ts] = (await noted(oracle, wall, wall.now)).values()
    assert await oracle.at(wall.now) == (ts, 2_000_000.0)


async def test_the_future_is_an_error() -> None:  # T15
    wall, store = Wall(), make()
    oracle = await started(store, wall)
    await noted(oracle, wall, 2_000_000.0)
    with pytest.raises(UsageError, match="future"):
        await oracle.at(2_000_000.1)


async def test_a_clock_set_back_stands_still_until_it_is_passed(  # O3
) -> None:
    wall, store = Wall(), make()
    oracle = await started(store, wall)
    first = await noted(oracle, wall, 10_000.0)
    wall.now -= 3600
    ts = await oracle.draw()
    await oracle.note()
    assert oracle.wall_ms() == 10_000_000
    assert await oracle.at(10_000.0) == (ts, 10_000.0)
    with pytest.raises(SnapshotTooOld):
        await oracle.at(9_999.0)  # not even the new, earlier time gives the past a note
    wall.now = 10_001.0
    later = await oracle.draw()
    await oracle.note()
    assert await oracle.at(10_000.5) == (ts, 10_000.0)
    assert await oracle.at(10_001.0) == (later, 10_001.0)
    assert first[10_000.0] < ts < later


async def test_a_clock_set_back_while_the_store_was_closed() -> None:  # O3
    wall, store = Wall(), make()
    await noted(await started(store, wall), wall, 10_000.0)
    wall.now -= 3600
    oracle = await started(store, wall)
    assert oracle.wall_ms() == 10_000_000
    ts = await oracle.draw()
    await oracle.note()
    assert await oracle.at(10_000.0) == (ts, 10_000.0)


async def test_a_late_note_of_a_former_oracle_never_goes_before_ours() -> None:  # O3
    """Its clock was hours ahead; the note arrives when the new oracle has begun, or after its first note."""
    for early in (True, False):
        store, wall, ahead = make(), Wall(10_000.0), Wall(13_600.0)
        old = await started(store, ahead)
        await old.draw()
        await old.note()
        await old.draw()
        ahead.now = 17_200.0
        sent: list[Mutation] = []
        store.apply = apply = Keeping(store, sent)  # type: ignore[method-assign, assignment]
        await old.note()
        store.apply = apply.right  # type: ignore[method-assign]
        await store.apply([])
        new = await started(store, wall)
        assert len(sent) == 1
        if early:
            await store.apply(sent)
        last = await new.draw()
        await new.note()  # refused where the late one has come: it is read, and the next one stands above it
        if not early:
            await store.apply(sent)
        last = await new.draw()
        wall.now += 1
        await new.note()
        assert await newest_note(store) == (last, 17_200.0 if early else 13_600.0)
        [[notes]] = await store.read([(SYSTEM_TABLE, b"clock", [(DATA, 0, 1, last, 100)])])
        assert [value for _, value in notes] == sorted((value for _, value in notes), reverse=True)


class Keeping:
    """Keeps what is sent, and loses the reply."""

    def __init__(self, store: LocalRowStore, sent: list[Mutation]) -> None:
        self.right, self._sent = store.apply, sent

    async def __call__(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        await trio.lowlevel.checkpoint()
        self._sent += mutations
        return [NoReply("lost")] * len(mutations)


async def test_nothing_is_noted_while_nothing_is_drawn() -> None:  # O3
    wall, store = Wall(), make()
    oracle = await started(store, wall)
    wall.now = 50.0
    await oracle.note()
    assert await newest_note(store) is None
    await noted(oracle, wall, 100.0)
    for moment in (200.0, 300.0):
        wall.now = moment
        await oracle.note()
    assert await newest_note(store) == (1, 100.0)
    assert await oracle.at(250.0) == (1, 100.0)
    [tablet] = store.tablets()
    assert tablet.entries(DATA) == 2  # the bound, and one note


async def test_a_broken_note_is_corruption() -> None:
    wall, store = Wall(), make()
    oracle = await started(store, wall)
    await store.apply([Mutation(SYSTEM_TABLE, ((b"clock", (), ((DATA, 0, 5, b"soon"),)),))])
    with pytest.raises(Corruption, match="clock"):
        await oracle.at(wall.now)
