"""Functions that run on a schedule: once for each moment at which it is due, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import trio

import perco
from perco.database.inside import inside
from perco.errors import UsageError
from perco.notify.ticking import Ticker
from perco.schema import schedules
from tests.component.notify.kit import Web, client, get, memory, nothing_is_left, settle

Txn = perco.Transaction
NOON = datetime(2026, 3, 28, 12, tzinfo=UTC)


def options(begin: datetime = NOON) -> perco.Options:
    """A clock that shows `begin` at the beginning of virtual time. Nothing else happens in the hours between."""
    return perco.Options(
        seed=4711,
        wall=lambda: begin.timestamp() + trio.current_time(),
        oracle=perco.options.OracleOptions(note_period_s=3600.0),
        vacuum=perco.options.VacuumOptions(on=False),
    )


class Job:
    """A scheduled function that keeps a list of when it was due, in the store and here."""

    def __init__(self, web: Web, schedule: Callable[[Any], Any]) -> None:
        self.web, self.took_s, self.fails = web, 0.0, 0
        self.called: list[tuple[str, int]] = []

        @schedule
        async def job(txn: Txn, due: perco.Due) -> None:
            self.called.append((f"{due.at:%d. %H:%M:%S%z}", due.attempt))
            await web.add(txn, f"{due.at:%d. %H:%M:%S}")
            await trio.sleep(self.took_s)
            if len(self.called) <= self.fails:
                raise ConnectionError("no answer")

    @property
    def at(self) -> list[str]:
        return [moment[4:12] for moment, _ in self.called]

    async def committed(self, db: perco.Database) -> dict[str, int]:
        async with db.snapshot() as snap:
            return {
                row.key[4:]: row[self.web.count] async for row in snap.scan(self.web.counts, columns=[self.web.count])
            }


async def test_a_function_runs_once_in_every_period(web: Web) -> None:  # N16
    job = Job(web, web.schema.every(hours=1, id="hourly"))
    begin = NOON + timedelta(minutes=10)
    async with perco.open("memory:", web.schema, options=options(begin)) as db, db.worker():
        await trio.sleep(49 * 60)
        assert job.called == []
        await trio.sleep(2 * 60)
        assert job.called == [("28. 13:00:00+0000", 1)]
        await trio.sleep(3 * 3600)
        assert job.at == ["13:00:00", "14:00:00", "15:00:00", "16:00:00"]
        assert await db.is_idle()
        assert nothing_is_left(db)
        assert set((await job.committed(db)).values()) == {1}
        async with db.snapshot() as snap:
            table = db.schema.tables["SCHEDULES"]
            assert await snap.get(table.columns["hourly"], "hourly") == NOON + timedelta(hours=4)


async def test_it_runs_at_the_moment(web: Web) -> None:
    job = Job(web, web.schema.every(seconds=10, id="often"))
    async with perco.open("memory:", web.schema, options=options()) as db, db.worker():
        for n in range(1, 20):
            await trio.sleep_until(10 * n - 0.1)
            assert len(job.called) == n - 1
            await trio.sleep_until(10 * n + 0.1)
            assert len(job.called) == n


@pytest.mark.parametrize(("missed", "at"), [("last", ["15:00:00"]), ("all", ["13:00:00", "14:00:00", "15:00:00"])])
async def test_moments_while_no_worker_runs(web: Web, missed: Any, at: list[str]) -> None:  # N16
    job = Job(web, web.schema.every(hours=1, id="hourly", missed=missed))
    async with perco.open("memory:", web.schema, options=options()) as db:
        async with db.worker():
            await trio.sleep(60)
        await trio.sleep(3 * 3600)
        async with db.worker():
            await trio.sleep(60)
            assert job.at == at
            await trio.sleep(3600)
        assert job.at == [*at, "16:00:00"]
        assert set((await job.committed(db)).values()) == {1}


@pytest.mark.parametrize("missed", ["last", "all"])
async def test_a_run_that_takes_longer_than_the_period(web: Web, missed: Any) -> None:
    """Runs for one schedule do not overlap; with "all", none is left out."""
    job = Job(web, web.schema.every(minutes=1, id="slow", missed=missed))
    job.took_s = 150
    async with perco.open("memory:", web.schema, options=options()) as db, db.worker():
        await trio.sleep(12 * 60)
        job.took_s = 0
        await trio.sleep(5 * 60)
        done = await job.committed(db)
        assert set(done.values()) == {1}
    if missed == "all":
        assert job.at == [f"12:{n:02}:00" for n in range(1, len(job.at) + 1)]
        assert len(job.at) >= 16
    else:
        assert len(job.at) < 12


async def test_a_run_that_fails_is_repeated(web: Web) -> None:
    job = Job(web, web.schema.every(hours=1, id="hourly", attempts=5))
    job.fails = 3
    async with perco.open("memory:", web.schema, options=options()) as db, db.worker():
        await trio.sleep(3600 + 60)
        assert job.called == [("28. 13:00:00+0000", n) for n in (1, 2, 3, 4)]
        assert await job.committed(db) == {"13:00:00": 1}


@pytest.mark.parametrize("missed", ["last", "all"])
async def test_a_moment_that_is_given_up_does_not_stop_the_schedule(web: Web, missed: Any) -> None:  # N16
    job = Job(web, web.schema.every(hours=1, id="hourly", attempts=2, missed=missed))
    job.fails = 2
    async with perco.open("memory:", web.schema, options=options()) as db, db.worker():
        await trio.sleep(3600 + 600)
        [failed] = await db.failed()
        assert (failed.observer, failed.key, failed.attempts) == ("hourly", "hourly", 2)
        await trio.sleep(3600)
        assert job.called[2:] == [("28. 14:00:00+0000", 1)]
        assert await db.failed() == []


@pytest.mark.parametrize("dropped", [False, True])
async def test_no_moment_is_lost_after_one_was_given_up(web: Web, dropped: bool) -> None:  # N16
    """Later moments do not pass each other because an earlier one is on the failed list, nor if it was dropped."""
    job = Job(web, web.schema.every(seconds=10, id="often", attempts=1, missed="all"))
    job.fails = 1
    async with perco.open("memory:", web.schema, options=options()) as db, db.worker():
        await trio.sleep(12)
        assert await db.failed_count() == 1
        if dropped:
            assert await db.drop_failed("often") == 1
        job.took_s = 35
        await trio.sleep(100)
        job.took_s = 0
        await trio.sleep(100)
        assert job.at == [f"12:{10 * n // 60:02}:{10 * n % 60:02}" for n in range(1, len(job.at) + 1)]
        assert len(job.at) >= 20


async def test_a_moment_whose_commit_has_an_unknown_outcome_is_looked_at_again(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(web, web.schema.every(seconds=10, id="often"))
    tick, lost = Ticker._tick, 0

    async def loses(self: Ticker, schedule: Any) -> float:
        nonlocal lost
        found = await tick(self, schedule)
        if lost < 3:
            lost += 1
            raise perco.errors.CommitUnknown("token", "the reply was lost")
        return found

    monkeypatch.setattr(Ticker, "_tick", loses)
    async with perco.open("memory:", web.schema, options=options()) as db, db.worker():
        await trio.sleep(61)
        await settle(db)
    assert lost == 3
    assert job.at == [f"12:00:{n}0" for n in range(1, 6)] + ["12:01:00"]


async def test_an_older_program_does_not_notify_a_newer_schedule() -> None:  # N10, N16
    local, old, new = memory(), Web(), Web()
    before = Job(old, old.schema.every(seconds=1, id="job"))
    after = Job(new, new.schema.every(days=1, id="job", version=2))
    async with (
        client(local, new.schema, options=options()) as db,
        client(local, old.schema, options=options(), beside=db) as older,
        older.worker(),
        db.worker(),
    ):
        await trio.sleep(30)
        assert await get(db, new.schema.tables["SCHEDULES"].columns["job"], "job") is None
        assert await db.is_idle()
    assert (before.called, after.called) == ([], [])


async def test_several_workers_notify_once(web: Web) -> None:  # N16
    job = Job(web, web.schema.every(minutes=1, id="often", missed="all"))
    async with perco.open("memory:", web.schema, options=options()) as db, db.worker():
        tickers = [Ticker(inside(db).engine, list(web.schema.schedules.values())) for _ in range(3)]
        async with trio.open_nursery() as nursery:
            for ticker in tickers:
                nursery.start_soon(ticker.run)
            await trio.sleep(20 * 60 + 1)
            nursery.cancel_scope.cancel()
        assert job.at == [f"12:{n:02}:00" for n in range(1, 21)]
        assert set((await job.committed(db)).values()) == {1}


async def test_a_worker_without_the_schedule_does_not_notify(web: Web) -> None:
    job, other = Job(web, web.schema.every(minutes=1, id="a")), Job(web, web.schema.every(minutes=1, id="b"))
    part = perco.WorkerOptions(only=["a"])
    async with perco.open("memory:", web.schema, options=options()) as db, db.worker(options=part):
        await trio.sleep(601)
        await settle(db)
    assert (len(job.called), len(other.called)) == (10, 0)


@pytest.mark.parametrize(
    ("begin", "moment"),
    [
        ("2026-03-29T00:20", "29. 03:00:00+0200"),  # that night has no 02:30 in Berlin: it goes from 02:00 to 03:00
        ("2026-03-30T00:20", "30. 02:30:00+0200"),
        ("2026-10-25T00:20", "25. 02:30:00+0200"),  # that night has it twice
        ("2026-10-26T01:20", "26. 02:30:00+0100"),
    ],
)
async def test_a_cron_expression_in_a_time_zone(web: Web, begin: str, moment: str) -> None:
    job = Job(web, web.schema.cron("30 2 * * *", id="nightly", zone="Europe/Berlin", missed="all"))
    at = datetime.fromisoformat(begin).replace(tzinfo=UTC)
    async with perco.open("memory:", web.schema, options=options(at)) as db, db.worker():
        await trio.sleep(2 * 3600)
        assert nothing_is_left(db)
    assert job.called == [(moment, 1)]


def test_the_moments_of_cron() -> None:
    zone = ZoneInfo("Europe/Berlin")
    times = schedules.cron("x", "*/15 9-10 * * MON-FRI", "Europe/Berlin")
    friday = datetime(2026, 10, 23, 10, 45, tzinfo=zone)
    assert times.after(friday - timedelta(seconds=1)) == friday
    assert times.last(friday) == friday
    assert times.last(friday - timedelta(seconds=1)) == friday - timedelta(minutes=15)
    assert times.after(friday) == datetime(2026, 10, 26, 9, tzinfo=zone)
    assert times.after(datetime(2026, 10, 24, 0, tzinfo=UTC)) == datetime(2026, 10, 26, 8, tzinfo=UTC), "winter time"


@pytest.mark.parametrize("expression", ["30 2 * * *", "*/20 * * * *", "15 1-3 * * *", "0 3 * * SUN"])
@pytest.mark.parametrize("day", ["2026-03-28", "2026-10-24"])
def test_moments_are_in_order_when_the_clock_changes(expression: str, day: str) -> None:
    """From any moment, the next one is later, and the last one is the latest that is not."""
    times = schedules.cron("x", expression, "Europe/Berlin")
    begin = datetime.fromisoformat(f"{day}T20:00").replace(tzinfo=UTC)
    at, moments = begin, list[datetime]()
    while at < begin + timedelta(hours=36):
        at = times.after(at).astimezone(UTC)
        moments.append(at)
    assert moments == sorted(set(moments))
    for minutes in range(0, 30 * 60, 7):
        now = begin + timedelta(minutes=minutes)
        assert times.after(now).astimezone(UTC) == min(moment for moment in moments if moment > now)
        past = [moment for moment in moments if moment <= now]
        if past:
            assert times.last(now).astimezone(UTC) == max(past)


async def test_a_row_that_is_deleted_begins_anew(web: Web) -> None:
    job = Job(web, web.schema.every(hours=1, id="hourly"))
    async with perco.open("memory:", web.schema, options=options()) as db, db.worker():
        await trio.sleep(3601)
        table = web.schema.tables["SCHEDULES"]
        async with db.transaction() as txn:
            txn.delete(table.columns["hourly"], "hourly")
        await trio.sleep(3600)
        assert job.at == ["13:00:00", "14:00:00"]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({}, "from one second to 366 days"),
        ({"seconds": 0.5}, "from one second"),
        ({"days": 400}, "to 366 days"),
        ({"hours": "1"}, "hours"),
        ({"days": float("inf")}, "days"),
        ({"hours": 1, "missed": "some"}, "missed is 'some'"),
        ({"hours": 1, "version": 0}, "version is 0"),
    ],
)
def test_periods_that_are_none(web: Web, how: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        web.schema.every(id="x", **how)


@pytest.mark.parametrize(
    ("expression", "zone", "why"),
    [
        ("61 * * * *", "UTC", "is no cron expression, such as .*: Bad minute"),
        ("* * *", "UTC", "is no cron expression"),
        ("0 0 31 2 *", "UTC", "cron expression"),
        ("* * * * *", "Mars/Olympus", "'Mars/Olympus' is no time zone"),
        (5, "UTC", "is no cron expression"),
        ("* * * * *", None, "is no time zone"),
    ],
)
def test_expressions_that_are_none(web: Web, expression: Any, zone: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        web.schema.cron(expression, id="x", zone=zone)


def test_declarations_that_are_refused(web: Web) -> None:
    @web.schema.every(hours=1, id="a")
    async def first(txn: Txn, due: perco.Due) -> None: ...

    with pytest.raises(UsageError, match="two observers with the id 'a'"):
        web.schema.every(hours=1, id="a")
    with pytest.raises(UsageError, match="async def"):
        web.schema.every(hours=1, id="b")(lambda txn, due: None)
    mine = perco.Table("SCHEDULES", key=perco.TEXT)
    with pytest.raises(UsageError, match="table name 'SCHEDULES'"):
        perco.Schema(mine).every(hours=1, id="c")


async def test_what_a_run_writes_is_seen(web: Web) -> None:
    Job(web, web.schema.every(hours=1, id="hourly"))
    async with perco.open("memory:", web.schema, options=options()) as db, db.worker():
        await trio.sleep(3601)
        assert await get(db, web.count, "28. 13:00:00") == 1
        states = {state.id: state for state in await db.observers()}
        assert ("counts", "count") in states["hourly"].outputs
        assert (states["hourly"].table, states["hourly"].column) == ("SCHEDULES", "hourly")
