"""A copy is the store at one moment, in another place, and goes on as the store would have."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
from perco.copying import copy as copying, passes
from perco.copying.copy import Copied, CopyOptions, copy
from perco.copying.marker import Marker, marker_of
from perco.copying.passes import FLOOR, Sums
from perco.database.inside import inside
from perco.schema.catalogue import SYSTEM_TABLE, Catalogue
from perco.schema.marker import COPYING, MOVED
from perco.storage import (
    APPLIED,
    PROTOCOL_GROUPS,
    Failed,
    LocalRowStore,
    Mutation,
    NoReply,
    ScanPage,
    ScanQuery,
    ScanRequest,
    Verdict,
)
from tests.integration.copying.stores import (
    KINDS,
    LONG,
    OPTIONS,
    State,
    body,
    count,
    docs,
    fill,
    leave_a_lock,
    must_be_clean,
    opened,
    owned,
    place,
    rank,
    size,
    state_of,
)
from tests.support import postgresql
from tests.support.copies import copy_as_itself

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")


async def made(url: str) -> tuple[State, int, State, int]:
    """A store to copy. Returns what it has; a timestamp of the past, and what it had then; its last timestamp."""
    async with opened(url) as db:
        past = await fill(db)
        await leave_a_lock(db)
        return await state_of(db), past, await state_of(db, past), inside(db).oracle.last


async def copied(source: str, target: str, *, tell: Any = lambda phase, table, sums: None, **options: Any) -> Copied:
    return await copy(source, target, CopyOptions(**options), tell, stores=OPTIONS)


async def cannot_be_opened(url: str, told: str) -> None:
    with pytest.raises(perco.StoreError, match=f"this store {told}"):
        async with opened(url):
            pass


# Each kind once on each side.
PAIRS = [("folder", kind, 1024) for kind in KINDS] + [(kind, "folder", 1024) for kind in KINDS[1:]]
PAIRS += [("folder", kind, 2) for kind in KINDS[1:]]
PAIRS += [("postgresql", "postgresql", 1024), ("postgresql", "bigtable", 1024), ("bigtable", "postgresql", 1024)]


@pytest.mark.parametrize(("before", "after", "cells"), [*PAIRS, ("folder", "folder", 2)])
async def test_a_copy_goes_on_as_the_store_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, cells: int
) -> None:  # M1 O1 N1 N6
    """`cells`: of a group of a row that are read at once."""
    monkeypatch.setattr(passes, "_CELLS", cells)
    source, target = place(before, tmp_path / "s"), place(after, tmp_path / "t")
    state, past, then, last = await made(source)
    done = await copied(source, target)
    assert done.digests.keys() == {"docs", "words", SYSTEM_TABLE}
    assert not done.used_by
    if after == "folder":  # P4: it has noted its own tablets, whatever the source had noted
        partial = copy_as_itself(Path(target), tmp_path / "partial")
        for tablet in (partial / "tablets").glob("docs*"):
            shutil.rmtree(tablet)
        with pytest.raises(perco.errors.Corruption, match="is missing"):
            async with opened(str(partial)):
                pass
    async with opened(target) as db:
        assert await state_of(db) == state
        assert await state_of(db, past) == then != state
        assert inside(db).oracle.last >= last
        assert await db.pending() == 3, "two values and a signal"
        assert await db.failed_count() == 1
        async with db.worker():
            await db.wait_idle()
        async with db.snapshot() as snap:
            assert await snap.get(body, "a") == LONG
            assert [await snap.get(size, key) for key in ("a", "new", "k")] == [len(LONG), 5, 7]
            assert [
                await snap.get(count, ("a", 1)),
                await snap.get(count, ("z", 1)),
                await snap.get(count, ("z", 2)),
            ] == [2, 1, 1]
        assert await db.replay_failed() == 1
        await db.vacuum()
        await must_be_clean(db)
    async with opened(source) as db:
        assert await state_of(db) == state, "the source is as it was"


async def test_what_changes_while_the_store_is_in_use_is_caught_up_with(tmp_path: Path) -> None:  # M1 M2
    source, target = place("folder", tmp_path / "s"), place("folder", tmp_path / "t")
    await made(source)
    changed: list[int] = []
    async with owned(source) as owner:
        assert await owner.tell("split p") == "done"
        for words in (["put a text", "delete k", "work"], ["split f", "vacuum"], ["put z other"]):
            done = await copied(source, target)
            assert "stores" in done.used_by
            changed.append(done.sums.changed)
            await cannot_be_opened(target, f"is an unfinished copy of {source}")
            for word in words:
                assert await owner.tell(word) == "done"
    assert changed[0] > changed[1] > 0
    done = await copied(source, target)
    assert 0 < done.sums.changed < changed[0]
    async with opened(source) as db:
        state = await state_of(db)
        assert len(inside(db).store.bounds("docs")) == 4
    async with opened(target) as db:
        assert await state_of(db) == state
        assert len(inside(db).store.bounds("docs")) == 3, "its tablets are its own"
        await must_be_clean(db)


async def test_it_waits_for_the_end_of_the_process_that_uses_the_store(tmp_path: Path) -> None:
    source, target = place("folder", tmp_path / "s"), place("folder", tmp_path / "t")
    await made(source)
    seen = trio.Event()

    def tell(phase: str, table: str, sums: Sums) -> None:
        if table == "words":
            seen.set()

    async with trio.open_nursery() as nursery:
        result: list[Copied] = []

        async def follow() -> None:
            result.append(await copied(source, target, tell=tell, wait=True, every_s=0.01))

        async with owned(source) as owner:
            nursery.start_soon(follow)
            await seen.wait()
            await owner.tell("put late text")
    assert result[0].passes > 1
    assert not result[0].used_by
    async with opened(target) as db, db.snapshot() as snap:
        assert await snap.get(body, "late") == b"text" * 100


async def test_a_store_is_read_through_its_server(tmp_path: Path) -> None:
    source, target = place("folder", tmp_path / "s"), place("folder", tmp_path / "t")
    await made(source)
    async with owned(source):
        done = await copied(source, target, through=f"unix:{source}/socket")
        assert done.used_by
    again = await copied(source, target)
    assert again.sums.changed < done.sums.changed / 4


class StoppedError(Exception):
    pass


def stopping_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the number-th batch of mutations of any store fail before it is made."""
    apply, seen = LocalRowStore.apply, 0

    async def applied(self: LocalRowStore, mutations: Sequence[Mutation]) -> list[Verdict]:
        nonlocal seen
        seen += 1
        if seen == number:
            raise StoppedError
        return await apply(self, mutations)

    monkeypatch.setattr(LocalRowStore, "apply", applied)


async def test_interrupted_at_any_write_it_continues_and_two_stores_are_never_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # M1 M2 M3
    origin = place("folder", tmp_path / "s")
    state, *_ = await made(origin)
    monkeypatch.setattr(passes, "_TOGETHER", 1)
    number, interrupted, neither = 0, True, 0
    while interrupted:
        number += 1
        source, target = str(tmp_path / f"s{number}"), str(tmp_path / f"t{number}")
        copy_as_itself(Path(origin), Path(source))
        with monkeypatch.context() as patch:
            stopping_at(patch, number)
            try:
                await copied(source, target, switch=True)
                interrupted = False
            except StoppedError:
                if number > 1:  # before the marker is written, the place is empty
                    assert not await opens(target)
                neither += not await opens(source)
        if interrupted:
            await copied(source, target, switch=True)
        assert not await opens(source)
        async with opened(target) as db:
            assert await state_of(db) == state
            await must_be_clean(db)
    assert number > 12
    assert neither == 1, "between the two markers no program can open either"


async def opens(url: str) -> bool:
    try:
        async with opened(url):
            return True
    except perco.PercoError:
        return False


@pytest.mark.parametrize("seed", range(3))
async def test_a_mutation_whose_reply_is_lost_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:  # T4
    source, target = place("folder", tmp_path / "s"), place("folder", tmp_path / "t")
    state, *_ = await made(source)
    monkeypatch.setattr(passes, "_AGAIN_S", 0.001)
    rng, apply, lost = random.Random(seed), LocalRowStore.apply, 0

    async def applied(self: LocalRowStore, mutations: Sequence[Mutation]) -> list[Verdict]:
        nonlocal lost
        verdicts: list[Verdict] = []
        for mutation in mutations:
            if mutation.floor_ts == FLOOR - 1 and rng.random() < 0.4:
                if rng.random() < 0.5:
                    assert await apply(self, [mutation]) == [APPLIED]
                verdicts.append(NoReply("cut"))
                lost += 1
            else:
                verdicts += await apply(self, [mutation])
        return verdicts

    monkeypatch.setattr(LocalRowStore, "apply", applied)
    done = await copied(source, target)
    assert done.sums.unsure == lost > 0
    monkeypatch.undo()
    async with opened(target) as db:
        assert await state_of(db) == state
        await must_be_clean(db)


async def test_a_copy_that_differs_is_not_made_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # M2
    source, target = place("folder", tmp_path / "s"), place("folder", tmp_path / "t")
    await made(source)
    raise_floor = LocalRowStore.raise_floor
    rows = 0

    async def spoilt(self: LocalRowStore, ts: int, *, wait: bool) -> None:
        nonlocal rows
        await raise_floor(self, ts, wait=wait)
        if ts == FLOOR:
            rows += 1
            await self.apply([Mutation("words", ((b"\x01", (), (("data", 1, 1, b"stray"),)),))])

    with monkeypatch.context() as patch:
        patch.setattr(LocalRowStore, "raise_floor", spoilt)
        with pytest.raises(perco.StoreError, match=r"'words' of .* is not equal"):
            await copied(source, target, switch=True)
    assert rows == 1
    await cannot_be_opened(target, f"is an unfinished copy of {source}")
    async with opened(source) as db:
        await must_be_clean(db)
    done = await copied(source, target)
    assert done.sums.deleted == 1


async def test_late_mutations_are_waited_for_before_the_last_pass_and_before_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # M2 T13
    """Of the source's former owner, and of passes."""
    source, target = place("folder", tmp_path / "s"), place("folder", tmp_path / "t")
    await made(source)
    events: list[str] = []
    raise_floor = LocalRowStore.raise_floor

    async def noted(self: LocalRowStore, ts: int, *, wait: bool) -> None:
        await raise_floor(self, ts, wait=wait)
        assert wait
        events.append(f"floor {ts}")
        if ts == FLOOR:
            [verdict] = await self.apply([Mutation("docs", ((b"x", (), ()),), FLOOR - 1)])
            assert verdict is not APPLIED

    monkeypatch.setattr(LocalRowStore, "raise_floor", noted)
    await copied(source, target, tell=lambda phase, table, sums: events.append(phase))
    steps = [each for each in dict.fromkeys(events) if each != copying.WAITING]
    assert steps == ["floor 1", copying.READING, f"floor {FLOOR}", copying.VERIFYING]


async def test_a_store_that_has_moved_says_where_and_can_be_moved_back(tmp_path: Path) -> None:  # M3
    source, target = place("folder", tmp_path / "s"), place("folder", tmp_path / "t")
    state, *_ = await made(source)
    done = await copied(source, target, switch=True)
    assert done.moved
    await cannot_be_opened(source, f"has moved to {target}")
    with pytest.raises(perco.StoreError, match=f"has moved to {target}"):
        await copied(source, str(tmp_path / "u"))
    (tmp_path / "t").rename(tmp_path / "elsewhere")  # as a disk that is not mounted
    with pytest.raises(perco.StoreError, match=f"has moved to {target}"):
        await copied(source, target, switch=True)
    await cannot_be_opened(source, f"has moved to {target}")
    shutil.rmtree(target)
    (tmp_path / "elsewhere").rename(target)
    old = await copied(source, str(tmp_path / "old"), moved=True)
    assert not old.used_by
    assert old.moved
    await cannot_be_opened(source, f"has moved to {target}")
    async with opened(str(tmp_path / "old")) as db:
        assert await state_of(db) == state
    async with opened(target) as db, db.transaction() as txn:
        txn.set(rank, "k", 7)
    back = await copied(target, source, switch=True)
    assert 0 < back.sums.changed < 10
    async with opened(source) as db:
        assert await state_of(db) == state | {"docs.rank k": 7}
        await must_be_clean(db)
    await cannot_be_opened(target, f"has moved to {source}")


async def test_what_is_no_place_for_a_copy(tmp_path: Path) -> None:
    source, target, other = (str(tmp_path / name) for name in ("s", "t", "other"))
    await made(source)
    async with opened(other) as db, db.transaction() as txn:
        txn.set(rank, "mine", 1)
    for url, told in [
        (source, "cannot be copied to itself"),
        (f"{source}/../s", "cannot be copied to itself"),
        (other, "there is a store at .*other already"),
        (f"{source}/inner", "lies in the other"),
        ("memory:", "a store in memory"),
        ("tcp://127.0.0.1:1", "a served store"),
    ]:
        with pytest.raises(perco.UsageError, match=told):
            await copied(source, url)
    (tmp_path / "empty").mkdir()
    for url in (str(tmp_path / "nowhere"), str(tmp_path / "empty"), postgresql.fresh()):
        with pytest.raises(perco.PercoError):
            await copied(url, target)
        assert not (tmp_path / "t").exists()
    assert not (tmp_path / "nowhere").exists()
    assert not list((tmp_path / "empty").iterdir())
    async with opened(other) as db, db.snapshot() as snap:
        assert await snap.get(rank, "mine") == 1


async def test_an_unfinished_copy_is_finished_from_its_source_only(tmp_path: Path) -> None:  # M2
    source, target, other = (str(tmp_path / name) for name in ("s", "t", "other"))
    await made(source)
    await made(other)
    async with owned(source):
        await copied(source, target)
    with pytest.raises(perco.UsageError, match=f"is an unfinished copy of {source}"):
        await copied(other, target)
    with pytest.raises(perco.StoreError, match=f"is an unfinished copy of {source}"):
        await copied(target, str(tmp_path / "u"))
    (tmp_path / "link").symlink_to(source)
    await copied(str(tmp_path / "link"), target)
    async with owned(source):
        await copied(source, f"{target}2")
    await copied(other, f"{target}2", replace=True)


async def test_a_marker_that_cannot_be_decoded_is_damage(tmp_path: Path) -> None:
    for data in (b"", b"\xc1", b"\x93\x01\x02\x03", Marker("lost", "x", Catalogue()).pack()):
        with pytest.raises(perco.errors.Corruption):
            Marker.unpack(data)
    for kind in (COPYING, MOVED):
        marker = Marker(kind, "x", Catalogue())
        assert Marker.unpack(marker.pack()) == marker


async def test_a_finished_copy_has_no_marker(tmp_path: Path) -> None:
    source, target = str(tmp_path / "s"), str(tmp_path / "t")
    await made(source)
    await copied(source, target)
    async with opened(target) as db:
        assert await marker_of(inside(db).store) is None
        assert db.schema.tables["docs"] is docs


@pytest.mark.parametrize("cells", [1024, 2])
async def test_a_table_that_only_an_earlier_pass_found_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cells: int
) -> None:  # M2
    """As after passes over another store at the same place. `cells`: of a group of a row that are read at once."""
    monkeypatch.setattr(passes, "_CELLS", cells)
    source, target = place("folder", tmp_path / "s"), place("folder", tmp_path / "t")
    await made(source)
    async with owned(source):
        await copied(source, target)
    shutil.rmtree(source)
    few = perco.Table("docs", key=perco.TEXT)
    only = few.column("only", perco.INT64)
    async with perco.open(source, perco.Schema(few), options=OPTIONS) as db, db.transaction() as txn:
        txn.set(only, "k", 1)
    done = await copied(source, target)
    assert done.digests.keys() == {"docs", SYSTEM_TABLE}
    late = perco.Table("words", key=perco.Tuple(perco.TEXT, perco.INT64))
    raw = few.column("body", perco.BYTES, group="raw")
    late.column("count", perco.INT64)
    async with perco.open(target, perco.Schema(few, late), options=OPTIONS) as db:
        await must_be_clean(db)
        async with db.snapshot() as snap:
            assert [row.key async for row in snap.scan(late)] == []
            assert [(row.key, row[only], row[raw]) async for row in snap.scan(few)] == [("k", 1, None)]
        for table in ("docs", "words"):
            everything = tuple(ScanQuery(group, None, n=99) for group in (*PROTOCOL_GROUPS, "data:raw"))
            rows = (
                await inside(db).store.scan(ScanRequest(table, b"", None, everything[: 10 if table == "docs" else 9]))
            ).rows
            assert len(rows) == (table == "docs")


async def test_a_source_that_splits_or_goes_away_during_a_pass_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = place("folder", tmp_path / "s"), place("folder", tmp_path / "t")
    await made(source)
    troubles: list[Exception] = [perco.errors.TabletSplit("docs"), perco.Unavailable("it stays away")]
    scan = LocalRowStore.scan
    told: list[str] = []
    armed, quiet = True, trio.Event()

    async def scanned(self: LocalRowStore, request: ScanRequest) -> ScanPage:
        nonlocal armed
        if request.table == "words" and troubles and armed:
            armed = False
            raise troubles.pop()
        return await scan(self, request)

    def passed(copied: Copied, trouble: str) -> None:
        nonlocal armed
        armed = True
        told.append(trouble)
        if not trouble:
            quiet.set()

    monkeypatch.setattr(LocalRowStore, "scan", scanned)
    done = trio.Event()
    async with trio.open_nursery() as nursery, owned(source) as owner:

        async def follow() -> None:
            await copy(source, target, CopyOptions(wait=True, every_s=0.01), passed=passed, stores=OPTIONS)
            done.set()

        nursery.start_soon(follow)
        await quiet.wait()
        assert await owner.tell("hello") == "done"
    assert done.is_set()
    assert not troubles
    assert "it stays away" in told[0]
    assert "was split" in told[1]
    troubles.append(perco.errors.TabletSplit("docs"))
    async with owned(source):
        assert (await copied(source, f"{target}2")).used_by
    assert not troubles


async def test_few_mutations_are_sent_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the target has many rows where the source has none."""
    source, target = place("folder", tmp_path / "s"), place("folder", tmp_path / "t")
    sizes: list[int] = []
    apply = LocalRowStore.apply

    async def applied(self: LocalRowStore, mutations: Sequence[Mutation]) -> list[Verdict]:
        if mutations[0].floor_ts == FLOOR - 1:
            sizes.append(len(mutations))
        return await apply(self, mutations)

    async with opened(source) as db:
        for start in range(0, 1000, 250):
            async with db.transaction() as txn:
                for number in range(start, start + 250):
                    txn.set(rank, f"k{number}", number)
    async with owned(source):
        await copied(source, target)
    shutil.rmtree(source)
    await made(source)
    monkeypatch.setattr(LocalRowStore, "apply", applied)
    done = await copied(source, target)
    assert done.sums.deleted >= 1000
    assert max(sizes) == 128


async def test_a_target_that_does_not_answer_for_a_moment_is_asked_again_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = place("folder", tmp_path / "s"), place("folder", tmp_path / "t")
    await made(source)
    monkeypatch.setattr(passes, "_AGAIN_S", 0.0)
    monkeypatch.setattr(passes, "_AGAIN_MAX_S", 0.0)
    apply, away = LocalRowStore.apply, 0

    async def applied(self: LocalRowStore, mutations: Sequence[Mutation]) -> list[Verdict]:
        nonlocal away
        if away and mutations[0].floor_ts == FLOOR - 1:
            away -= 1
            return [Failed(perco.Unavailable("out for lunch"))] * len(mutations)
        return await apply(self, mutations)

    monkeypatch.setattr(LocalRowStore, "apply", applied)
    away = 1000
    with pytest.raises(perco.Unavailable, match="does not answer: out for lunch"):
        await copied(source, target)
    assert 900 < away < 1000
    away = 5
    done = await copied(source, target)
    assert done.sums.unsure >= 5
    assert not away


async def test_an_owner_that_loses_a_store_in_the_last_pass_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not take the source for one that is in use."""
    source, target = place("folder", tmp_path / "s"), place("folder", tmp_path / "t")
    await made(source)

    async def lost(*_: object) -> None:
        raise perco.errors.StoreLocked(target, 1, "another copy")

    monkeypatch.setattr(passes.Pass, "table", lost)
    with pytest.raises(perco.errors.StoreLocked, match="another copy"):
        await copied(source, target)
