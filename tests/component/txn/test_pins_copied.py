"""Pins in a store that may apply a mutation twice: a late copy changes nothing (T15)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from perco.clock.holds import Holds
from perco.clock.pins import Pins, pins_in
from perco.errors import Unavailable
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import APPLIED, DATA, LocalRowStore, MemoryTablet, Mutation, Verdict
from perco.storage.bare import Bare
from perco.testing.bare import SingleRows

NOW_MS = 1_000_000


class Copying(SingleRows):
    """Keeps a copy of each mutation."""

    def __init__(self, rows: LocalRowStore) -> None:
        super().__init__(rows)
        self.copies: list[Mutation] = []

    async def apply(self, mutations: Sequence[Mutation]) -> list[Verdict]:
        self.copies += mutations
        return await super().apply(mutations)


class Copied:
    """A store whose owner pins; `settled` delivers all copies once more, and tells what the next owner would find."""

    def __init__(self) -> None:
        self.rows = LocalRowStore()
        self.rows.add_table(SYSTEM_TABLE, [MemoryTablet(SYSTEM_TABLE, b"")])
        self.below = Copying(self.rows)
        self.store = Bare(self.below, self.rows.tables, 0.0)
        self.last, self.now_ms = 50, NOW_MS
        self.pins = self.owner()

    def owner(self) -> Pins:
        return Pins(self.store, Holds(), lambda: self.now_ms, lambda: self.last)

    async def settled(self) -> dict[str, tuple[int, int]]:
        for mutation in self.below.copies:
            await self.rows.apply([mutation])
        found = {pin.name: (pin.ts, pin.expires_ms) for pin in await pins_in(self.store)}
        following = self.owner()
        await following.load()
        assert {name: (pin.ts, pin.expires_ms) for name, pin in following._holds.pins.items()} == found
        return found

    def cells(self) -> int:
        [tablet] = self.rows.tablets()
        return tablet.entries(DATA)


@pytest.fixture
async def copied() -> Copied:
    return Copied()


async def test_no_late_copy_changes_a_pin(copied: Copied) -> None:  # T15
    pins = copied.pins
    await pins.put("nightly", "me", 10, 60, "one")
    assert await copied.settled() == {"nightly": (10, NOW_MS + 60_000)}
    await pins.put("nightly", "me", 10, 3600, "one")  # a copy of the first has the shorter lease
    assert await copied.settled() == {"nightly": (10, NOW_MS + 3_600_000)}
    assert await pins.drop("nightly", "one")
    assert await copied.settled() == {}
    await pins.put("nightly", "me", 20, 60, "two")  # a copy of the drop would remove it
    assert await copied.settled() == {"nightly": (20, NOW_MS + 60_000)}
    assert copied.cells() == 1, "older versions are removed with each write"


async def test_a_tombstone_stays_until_no_copy_can_arrive(copied: Copied) -> None:  # T15, T13
    await copied.pins.put("nightly", "me", 10, 60, "one")
    await copied.pins.drop("nightly", "one")
    assert await copied.pins.erase(copied.last) == 0, "writes sent at the floor may still arrive"
    assert copied.cells() == 1
    copied.last = 60
    await copied.store.raise_floor(60, wait=True)
    assert await copied.pins.erase(60) == 1
    assert copied.cells() == 0
    assert await copied.pins.erase(copied.last) == 0


async def test_the_next_owner_knows_of_tombstones(copied: Copied) -> None:  # T15
    await copied.pins.put("nightly", "me", 10, 60, "one")
    await copied.pins.drop("nightly", "one")
    following = copied.owner()
    await following.load()
    assert following.standing("nightly") is None
    await following.put("nightly", "you", 30, 60, "two")
    assert await copied.settled() == {"nightly": (30, NOW_MS + 60_000)}
    copied.last = 60
    assert await following.erase(60) == 0, "it stands for nothing any more"
    await following.drop("nightly", "two")
    copied.last = 70
    third = copied.owner()
    await third.load()
    assert await third.erase(61) == 1


async def test_a_pin_of_an_earlier_format_is_replaced(copied: Copied) -> None:  # T15
    await copied.pins.put("nightly", "me", 10, 60, "one")
    [mutation] = copied.below.copies
    assert mutation.rows[0][2] == [(DATA, 0, 1, mutation.rows[0][2][0][3])], (
        "the first version is that of earlier formats"
    )
    assert await copied.rows.apply([mutation]) != [APPLIED]


async def test_a_store_that_applies_nothing_twice_needs_no_tombstone(copied: Copied) -> None:
    pins = Pins(copied.rows, Holds(), lambda: NOW_MS, lambda: copied.last)
    await pins.put("nightly", "me", 10, 60, "one")
    assert await pins.drop("nightly", "one")
    assert copied.cells() == 0


async def late(copied: Copied) -> Pins:
    """A next owner that has read the pins before a last message of the former one renews a pin."""
    await copied.pins.put("nightly", "me", 10, 60, "one")
    following = copied.owner()
    await following.load()
    await copied.pins.put("nightly", "me", 10, 3600, "one")
    return following


async def test_a_pin_that_a_former_owner_has_changed_late_is_read_again(copied: Copied) -> None:  # T15
    following = await late(copied)
    with pytest.raises(Unavailable, match="former owner"):
        await following.put("nightly", "me", 10, 90, "one")
    assert (await following.put("nightly", "me", 10, 90, "one")).id == "one"


@pytest.mark.parametrize("after_s", [0, 61, 3700])
async def test_a_pin_that_a_former_owner_has_changed_late_is_dropped_if_it_is_still_meant(
    copied: Copied, after_s: int
) -> None:  # T15
    following = await late(copied)
    copied.now_ms += after_s * 1000
    assert await following.drop_expired() == (1 if after_s == 3700 else 0), "after 61 s, the late message renews it"
    assert (following.standing("nightly") is None) == (after_s == 3700)
    assert set(await copied.settled()) == (set() if after_s == 3700 else {"nightly"})
    assert await following.drop("nightly", "one") == (after_s != 3700)
    assert await copied.settled() == {}


async def test_a_pin_that_changes_at_each_attempt_is_dropped_by_the_next_call(copied: Copied) -> None:  # T15
    following = await late(copied)
    renewed = 0

    async def renew_before(mutations: Sequence[Mutation]) -> list[Verdict]:
        nonlocal renewed
        renewed += 1
        copied.below.apply = plain  # type: ignore[method-assign]
        await copied.pins.put("nightly", "me", 10, 3600 + renewed, "one")
        copied.below.apply = renew_before  # type: ignore[method-assign]
        return await plain(mutations)

    plain, copied.below.apply = copied.below.apply, renew_before  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="former owner"):
        await following.drop("nightly", "one")
    assert renewed == 3
    copied.below.apply = plain  # type: ignore[method-assign]
    assert await following.drop("nightly", "one")


async def test_reading_a_pin_again_leaves_the_others_as_they_were(copied: Copied) -> None:  # T15
    former = copied.pins
    await former.put("nightly", "me", 10, 60, "one")
    following = copied.owner()
    await following.load()
    await following.put("weekly", "me", 10, 60, "two")
    known = following.standing("weekly")
    assert known is not None
    following._holds.pins["weekly"] = known._replace(expires_ms=NOW_MS + 3_600_000)  # as after a reply that was lost
    await former.put("nightly", "me", 10, 3600, "one")
    assert await following.drop("nightly", "one")
    found = following.standing("weekly")
    assert found is not None
    assert found.expires_ms == NOW_MS + 3_600_000


async def test_a_late_pin_replaces_its_tombstone(copied: Copied) -> None:  # T15
    former = copied.pins
    await former.put("nightly", "me", 10, 60, "one")
    await former.drop("nightly", "one")
    following = copied.owner()
    await following.load()
    await former.put("nightly", "me", 10, 60, "two")
    with pytest.raises(Unavailable, match="former owner"):
        await following.put("nightly", "you", 20, 60, "three")
    copied.last = 100
    assert await following.erase(100) == 0
    assert following.standing("nightly") is not None


async def test_a_pin_that_a_former_owner_dropped_late_is_gone(copied: Copied) -> None:  # T15
    former = copied.pins
    await former.put("nightly", "me", 10, 60, "one")
    following = copied.owner()
    await following.load()
    await former.drop("nightly", "one")
    with pytest.raises(Unavailable, match="former owner"):
        await following.put("nightly", "me", 10, 90, "one")
    assert following.standing("nightly") is None
