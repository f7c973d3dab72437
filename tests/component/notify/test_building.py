"""Observers whose work a job does for all that is there (N10): no backfill comes before it, and none after it."""

from __future__ import annotations

from typing import Any

import pytest

import perco
from perco.check.check import CheckOptions, check
from perco.database.inside import inside
from perco.schema import building
from perco.schema.catalogue import Catalogue, load
from tests.component.notify.kit import Web, client, get, memory, notified, put, settle
from tests.support.places import local_of

ALWAYS = perco.Options(seed=3, backfill=perco.options.BackfillOptions(share=1.0, page_rows=8))


async def findings(db: perco.Database) -> list[str]:
    result = await check(local_of(db).store, options=CheckOptions(pause_s=0.0))
    return [finding.invariant for finding in result.findings if finding.severity != "note"]


async def begin(db: perco.Database, web: Web) -> None:
    await inside(db).observers.change(lambda catalogue: building.begin(catalogue, web.schema, ["count"], "b1"))


async def end(db: perco.Database, seen_ts: int, published_ts: int = 0) -> None:
    await inside(db).observers.change(
        lambda catalogue: building.end(catalogue, ["count"], "b1", (seen_ts, published_ts))
    )


async def building_store(web: Web) -> tuple[Any, list[perco.Change[Any, Any]]]:
    """A store with a value that was there before its observer, which is being built, was registered."""
    local, plain = memory(), Web()
    async with client(local, plain.schema, options=ALWAYS) as db:
        await put(db, plain.body, "old", "text")
    seen = web.counting(web.body, id="count")
    async with client(local, Web().schema, options=ALWAYS, backfilled=False) as db:
        await begin(db, web)
    return local, seen


async def test_nothing_runs_meanwhile_and_later_changes_wait(web: Web) -> None:  # N10
    local, seen = await building_store(web)
    async with client(local, web.schema, options=ALWAYS, backfilled=False) as db, db.worker():
        assert await db.paused() == {"count"}
        seen_ts = await put(db, web.body, "seen", "by the job")
        await put(db, web.body, "new", "text")
        with pytest.raises(perco.UsageError, match="paused"):
            await db.wait_idle(timeout=1000)
        assert seen == []
        assert {row for row, _ in notified(db, "count")} == {b"seen", b"new"}  # nobody was notified of the old value
        await end(db, seen_ts)
        await settle(db)
        assert {change.key for change in seen} == {"seen", "new"}
        assert await findings(db) == []


async def test_changes_that_the_job_has_seen_count_as_seen(web: Web) -> None:  # N10 N1
    local, seen = await building_store(web)
    async with client(local, web.schema, options=ALWAYS, backfilled=False) as db:
        published_ts = 0
        await inside(db).observers.change(lambda catalogue: without_observers(catalogue))
        seen_ts = await put(db, web.body, "seen", "by the job")
        await put(db, web.body, "between", "the two")
        published_ts = await put(db, web.body, "published", "by the job")
        await begin(db, web)
        await end(db, seen_ts, published_ts)
        assert await findings(db) == ["N1"]  # of the change between, nobody was notified
        assert seen == []


def without_observers(catalogue: Catalogue) -> Catalogue:
    return Catalogue(catalogue.version + 1, catalogue.tables, {}, catalogue.keep, catalogue.version + 1)


async def test_a_job_that_is_given_up(web: Web) -> None:  # N10
    local, seen = await building_store(web)
    async with client(local, web.schema, options=ALWAYS, backfilled=False) as db, db.worker():
        await put(db, web.body, "new", "text")
        await db.resume("count")  # the backfill begins
        await settle(db)
        assert {change.key for change in seen} == {"old", "new"}
        assert await get(db, web.count, "count/old") == 1
        assert await findings(db) == []


async def test_it_survives_in_the_store(web: Web) -> None:
    local, _ = await building_store(web)
    async with client(local, web.schema, options=ALWAYS, backfilled=False) as db:
        entry = (await load(inside(db).store)).observers["count"]
        assert (entry.building, entry.paused, entry.ready) == ("b1", True, False)
        await end(db, 17, 18)
        entry = (await load(inside(db).store)).observers["count"]
        assert (entry.building, entry.paused, entry.ready, entry.built) == ("", False, True, (17, 18))


async def test_a_build_that_has_published_rows_has_to_be_completed(web: Web) -> None:  # N10
    """Runs would not find the memories that are still to be written."""
    local, _ = await building_store(web)
    async with client(local, web.schema, options=ALWAYS, backfilled=False) as db:
        await inside(db).observers.change(lambda catalogue: building.publish(catalogue, "b1", 9))
        version = inside(db).catalogue.version
        await inside(db).observers.change(lambda catalogue: building.publish(catalogue, "b1", 9))
        assert inside(db).catalogue.version == version
        assert building.must_be_completed(inside(db).catalogue, ["count"])
        with pytest.raises(perco.UsageError, match=r"call perco\.spark\.build again"):
            await db.resume("count")
        await begin(db, web)  # another call
        await end(db, 17)
        assert not await db.paused()


async def test_a_build_ends_when_another_begins_or_an_observer_is_resumed(web: Web) -> None:  # N10
    local, _ = await building_store(web)
    async with client(local, web.schema, options=ALWAYS, backfilled=False) as db:

        def other(catalogue: Catalogue) -> Catalogue:
            return building.begin(catalogue, web.schema, ["count"], "b2")

        building.must_go_on(inside(db).catalogue, ["count"], "b1")
        await inside(db).observers.change(other)
        with pytest.raises(perco.UsageError, match="another one has begun"):
            building.must_go_on(inside(db).catalogue, ["count"], "b1")
        with pytest.raises(perco.UsageError, match="another one has begun"):
            await end(db, 17)
        await db.resume("count")
        with pytest.raises(perco.UsageError, match="resumed"):
            building.must_go_on(inside(db).catalogue, ["count"], "b2")
