"""Each kind of damage gives its finding, and no other. A repair undoes it, or leaves the store as it is."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import msgpack
import pytest

from perco.check.check import CheckOptions
from perco.check.system import groups_of, strange_groups
from perco.database.inside import inside, local_owner
from perco.protocol.failed import FailedCell
from perco.protocol.mutations import Header, Intent, commit, prewrite
from perco.protocol.records import (
    ACK,
    DELETE,
    PUT,
    PUT_DATA,
    READ,
    Cellref,
    ack_head,
    pack_cause,
    pack_lock,
    pack_record,
    pack_trace,
)
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import DATA, FAILED_LIST, LOCK, NOTIFY, PENDING, ROLLBACK, SHARED, TRACE, TS_MAX, WRITE
from tests.component.check.stores import LONG, PARTS, Docs, Store, fill, opened
from tests.support.places import local_of

Cells = dict[tuple[str, str, bytes, int, int], bytes]


@pytest.fixture(autouse=True, params=["owner", "client"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner and a client check and repair alike."""
    monkeypatch.setattr(Store, "where", request.param)


async def found(
    store: Store, severity: str, invariant: str, what: str, remedy: str = "", *, mended: Cells | None = None
) -> None:
    """Exactly one finding, however the rows are read; notes aside. `mended`: what a repair makes of the store."""
    for options in (CheckOptions(pause_s=0.0), PARTS):
        result = await store.check(options)
        findings = [finding for finding in result.findings if finding.severity != "note"]
        assert [(f.severity, f.invariant) for f in findings] == [(severity, invariant)], result.findings
        assert what in findings[0].what
        assert findings[0].remedy
        assert remedy in findings[0].remedy
        assert not result.clean
        assert result.again, "it was looked at again"
    before = await store.cells()
    done = await store.repair()
    if mended is None:
        assert await store.cells() == before, "untouched"
        assert (done.repaired, done.settled) == ((), 0)
        assert [(f.severity, f.invariant) for f in done.after.findings if f.severity != "note"] == [
            (severity, invariant)
        ]
        return
    assert done.repaired == (findings[0],)
    assert done.after.findings == ()
    assert _but_causes(await store.cells()) == _but_causes(mended)
    assert not (await store.repair()).repaired, "once is enough"


def _but_causes(cells: Cells) -> Cells:
    """The cause of a lost notification cannot be known."""
    return {key: b"" if key[1] == NOTIFY else value for key, value in cells.items() if key[0] != SYSTEM_TABLE}


def lock(primary: tuple[bytes, int], kind: int = PUT, body: bytes = b"v", **other: object) -> bytes:
    parts = {"observers": (), "covers": (), "root": 0, "depth": 0, "token": "t", **other}
    return pack_lock((kind, ("docs", *primary), body, *parts.values()))


# ------------------------------------------------------------------ locks


async def test_a_lock_that_does_not_decode() -> None:  # N1
    async with opened() as store:
        await fill(store)
        await store.plant(b"a", (LOCK, store.number(store.docs.rank), await store.draw(), b"no lock"))
        await found(store, "error", "N1", "does not decode")


@pytest.mark.parametrize(
    "parts",
    [
        (9, ("docs", b"a", 1), b"", (), (), 0, 0, "t"),  # no such kind
        (PUT, ("docs", "a", 1), b"", (), (), 0, 0, "t"),  # a row is bytes
        (PUT, ("docs", b"a" * 600, 1), b"", (), (), 0, 0, "t"),  # longer than a row can be
        (PUT, ("docs", b"a", 1), b"", (), ("x",), 0, 0, "t"),
        (PUT_DATA, ("docs", b"a", 1), b"\xff", (), (), 0, 0, "t"),  # no name of a group
        (PUT, ("docs", b"a"), b"", (), (), 0, 0, "t"),
    ],
)
async def test_a_lock_whose_parts_make_no_sense(parts: tuple[object, ...]) -> None:  # N1
    async with opened() as store:
        await store.plant(b"a", (LOCK, store.number(store.docs.rank), await store.draw(), msgpack.packb(parts)))
        await found(store, "error", "N1", "does not decode")


async def test_a_lock_and_a_marker_beside_the_record_of_a_long_value() -> None:  # T1: the data are the record's
    async with opened() as store:
        async with store.db.transaction() as txn:
            txn.set(store.docs.contents, "a", LONG)
        contents, mended = store.number(store.docs.contents), await store.cells()
        value = lock((b"a", contents), PUT_DATA, b"data:raw")
        await store.plant(b"a", (LOCK, contents, txn.start_ts, value), (ROLLBACK, contents, txn.start_ts, b""))
        errors = [finding for finding in (await store.check()).findings if finding.severity == "error"]
        assert [finding.invariant for finding in errors] == ["T5", "T5"]
        done = await store.repair()
        assert [finding.invariant for finding in done.repaired] == ["T5", "T8"], "the marker, then the lock"
        assert (await store.cells(), done.after.findings) == (mended, ())


@pytest.mark.parametrize("where", ["owner"], indirect=True)  # who settles locks
async def test_where_not_all_errors_are_known_no_lock_is_settled() -> None:
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        await store.plant(b"a", (ROLLBACK, 99 << 16, 1, b""))
        await store.plant(b"b", (ROLLBACK, 99 << 16, 1, b""))
        await store.lock(start_ts, (b"z", rank), (b"z", rank))
        before = await store.cells()
        done = await store.repair(CheckOptions(findings_max=1, pause_s=0.0))
        assert (done.after.dropped, done.settled) == (1, 0)
        assert await store.cells() == before
        assert (await store.repair()).settled == 1


async def test_two_locks_on_a_cell() -> None:  # T7
    async with opened() as store:
        rank = store.number(store.docs.rank)
        first, second = await store.draw(), await store.draw()
        await store.lock(first, (b"a", rank), (b"a", rank))
        await store.plant(b"a", (LOCK, rank, second, lock((b"a", rank))))
        await found(store, "error", "T7", f"by transactions {second}, {first}")


async def test_a_lock_above_the_oracles_bound() -> None:  # O1
    async with opened() as store:
        rank = store.number(store.docs.rank)
        await store.lock(10**9, (b"a", rank), (b"a", rank))
        await found(store, "error", "O1", "above the oracle's bound")


async def test_a_lock_beside_its_rollback_marker() -> None:  # T5
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        await store.plant(b"a", (ROLLBACK, rank, start_ts, b""))
        mended = await store.cells()
        await store.plant(b"a", (LOCK, rank, start_ts, lock((b"a", rank))))
        await found(store, "error", "T5", "stands beside its rollback marker", mended=mended)


async def test_a_lock_that_does_not_decode_beside_its_rollback_marker() -> None:  # N1: its contents do not matter
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        await store.plant(b"a", (ROLLBACK, rank, start_ts, b""))
        mended = await store.cells()
        await store.plant(b"a", (LOCK, rank, start_ts, b"no lock"))
        await found(store, "error", "N1", "does not decode", mended=mended)


async def test_a_lock_that_its_own_commit_left_behind() -> None:  # T8
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        await store.plant(b"a", (WRITE, rank, await store.draw(), pack_record(PUT, start_ts, b"v")))
        mended = await store.cells()
        await store.plant(b"a", (LOCK, rank, start_ts, lock((b"a", rank))))
        await found(store, "error", "T8", "its lock is still there", mended=mended)


async def test_a_record_that_was_let_in_past_a_lock() -> None:  # T7
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        await store.lock(start_ts, (b"z", rank), (b"a", rank))
        other = await store.draw()
        await store.plant(b"a", (WRITE, rank, await store.draw(), pack_record(PUT, other, b"v")))
        await found(store, "error", "T7", f"despite the lock of transaction {start_ts}")


async def test_a_lock_of_a_long_value_without_its_data() -> None:  # T2
    async with opened() as store:
        contents, start_ts = store.number(store.docs.contents), await store.draw()
        await store.plant(b"a", (LOCK, contents, start_ts, lock((b"a", contents), PUT_DATA, b"data:raw")))
        await found(store, "error", "T2", "missing data")


async def test_a_lock_that_names_anothers_group() -> None:  # T2
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        await store.plant(b"a", (LOCK, rank, start_ts, lock((b"a", rank), PUT_DATA, b"data:raw")))
        await found(store, "error", "T2", "the column lies in 'data'")


async def test_a_lock_whose_primary_names_another() -> None:  # T12
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        await store.plant(b"a", (LOCK, rank, start_ts, lock((b"z", rank))))
        await store.plant(b"k", (LOCK, rank, start_ts, lock((b"a", rank))))
        await found(store, "error", "T12", "names docs['a'].rank as primary, but the lock there names another")


async def test_a_lock_whose_primary_is_in_no_table() -> None:  # N1
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        value = pack_lock((PUT, ("nowhere", b"a", rank), b"v", (), (), 0, 0, "t"))
        await store.plant(b"a", (LOCK, rank, start_ts, value))
        await found(store, "error", "N1", "'nowhere'")


async def test_a_lock_that_notifies_unknown_observers() -> None:  # N10
    async with opened() as store:
        contents, start_ts = store.number(store.docs.contents), await store.draw()
        await store.plant(b"a", (LOCK, contents, start_ts, lock((b"a", contents), observers=(1, 77))))
        await found(store, "error", "N10", "unknown observers #77")


async def test_an_acks_lock_whose_primary_is_no_ack() -> None:  # N2
    async with opened() as store:
        await fill(store)
        value = lock((b"a", store.number(store.docs.rank)), ACK, b"")
        await store.plant(b"b", (LOCK, store.ack, await store.draw(), value))
        await found(store, "error", "N2", "no ack of its observer")


async def test_an_acks_lock_that_covers_what_its_run_cannot_have_seen() -> None:  # N2
    async with opened() as store:
        await fill(store)
        start_ts = await store.draw()
        value = lock((b"b", store.ack), ACK, b"", covers=(start_ts + 1,))
        await store.plant(b"b", (LOCK, store.ack, start_ts, value))
        await found(store, "error", "N2", "cannot have seen")


async def test_a_lock_of_a_kind_that_the_column_cannot_have() -> None:  # N3
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        await store.plant(b"a", (LOCK, rank, start_ts, lock((b"a", rank), ACK, b"")))
        await found(store, "error", "N3", "of kind 4")


# ------------------------------------------------------------------ records


async def test_a_record_that_does_not_decode() -> None:  # T1
    async with opened() as store:
        await fill(store)
        await store.plant(b"a", (WRITE, store.number(store.docs.note), await store.draw(), b"?"))
        await found(store, "error", "T1", "does not decode")


async def test_a_record_of_a_kind_that_the_column_cannot_have() -> None:  # N3
    async with opened() as store:
        start_ts = await store.draw()
        await store.plant(
            b"a", (WRITE, store.number(store.docs.rank), await store.draw(), pack_record(ACK, start_ts, b""))
        )
        await found(store, "error", "N3", "of kind 4")


async def test_a_record_that_began_after_its_commit() -> None:  # T2
    async with opened() as store:
        ts = await store.draw()
        await store.plant(b"a", (WRITE, store.number(store.docs.rank), ts, pack_record(DELETE, ts + 1, b"")))
        await found(store, "error", "T2", "began no earlier")


async def test_a_record_above_the_oracles_bound() -> None:  # O1
    async with opened() as store:
        start_ts = await store.draw()
        await store.plant(b"a", (WRITE, store.number(store.docs.rank), 10**9, pack_record(PUT, start_ts, b"v")))
        await found(store, "error", "O1", "above the oracle's bound")


async def test_a_record_beside_its_rollback_marker() -> None:  # T5
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        await store.plant(b"a", (WRITE, rank, await store.draw(), pack_record(PUT, start_ts, b"v")))
        mended = await store.cells()
        await store.plant(b"a", (ROLLBACK, rank, start_ts, b""))
        await found(store, "error", "T5", "and was rolled back", mended=mended)


async def test_records_of_a_cell_that_overlap() -> None:  # T7: a lost update
    async with opened() as store:
        rank = store.number(store.docs.rank)
        first, second = await store.draw(), await store.draw()
        for start_ts in (first, second):
            await store.plant(b"a", (WRITE, rank, await store.draw(), pack_record(PUT, start_ts, b"v")))
        await found(store, "error", "T7", f"transaction {second}")


async def test_a_record_that_points_at_missing_data() -> None:  # T2
    async with opened() as store:
        await fill(store)
        start_ts = await _start_of_a_long_value(store)
        await store.plant(b"b", ("data:raw", store.number(store.docs.contents), start_ts, None))
        await found(store, "error", "T2", f"points at missing data, at {start_ts} in group 'data:raw'")


async def _start_of_a_long_value(store: Store) -> int:
    """Of the newest but one in b."""
    query = (WRITE, store.number(store.docs.contents), 0, TS_MAX, 9)
    [[records]] = await inside(store.db).driver.store.read([("docs", b"b", [query])])
    assert records[1][1][0] == PUT_DATA
    return int.from_bytes(records[1][1][1:9], "big")


async def test_a_record_that_names_anothers_group() -> None:  # T2
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        record = pack_record(PUT_DATA, start_ts, b"data:raw")
        await store.plant(b"a", (WRITE, rank, await store.draw(), record))
        await found(store, "error", "T2", "the column lies in 'data'")


async def test_data_that_nothing_points_at() -> None:  # T5, of no consequence
    async with opened() as store:
        await fill(store)
        mended = await store.cells()
        await store.plant(b"b", ("data:raw", store.number(store.docs.contents), await store.draw(), b"x" * 300))
        await found(store, "warning", "T5", "without a lock or record", mended=mended)


async def test_data_that_nothing_points_at_below_a_later_record() -> None:  # T5
    async with opened() as store:
        dead = await store.draw()
        await fill(store)
        mended = await store.cells()
        await store.plant(b"b", ("data:raw", store.number(store.docs.contents), dead, b"x" * 300))
        await found(store, "warning", "T5", "without a lock or record", mended=mended)


async def test_data_of_a_transaction_in_another_group_than_its_own() -> None:  # T5
    async with opened() as store:
        await fill(store)
        mended = await store.cells()
        start_ts = await _start_of_a_long_value(store)
        await store.plant(b"b", (DATA, store.number(store.docs.contents), start_ts, b"x" * 300))
        await found(store, "warning", "T5", "in group 'data'", mended=mended)


async def test_a_marker_above_the_oracles_bound() -> None:  # O1
    async with opened() as store:
        await store.plant(b"a", (ROLLBACK, store.number(store.docs.rank), 10**9, b""))
        await found(store, "error", "O1", "above the oracle's bound")


async def test_cells_of_a_column_that_the_catalogue_does_not_have() -> None:  # N10
    async with opened() as store:
        await store.plant(b"a", (ROLLBACK, 99 << 16, 1, b""))
        await found(store, "error", "N10", "column #99")


# ------------------------------------------------------------------ reads under a lock


def shared(primary: tuple[bytes, int], kind: int = READ) -> bytes:
    return lock(primary, kind, b"")


@pytest.mark.parametrize(
    ("value", "invariant", "what"),
    [
        (b"no lock", "N1", "does not decode"),
        (shared((b"z", 2 << 16), PUT), "T14", "of kind 1, and not for reading"),
    ],
)
async def test_a_shared_lock_that_is_none(value: bytes, invariant: str, what: str) -> None:  # T14
    async with opened() as store:
        await store.plant(b"a", (SHARED, store.number(store.docs.rank), await store.draw(), value))
        await found(store, "error", invariant, what)


async def test_a_shared_lock_in_the_place_of_another() -> None:  # T14
    async with opened() as store:
        rank = store.number(store.docs.rank)
        await store.plant(b"a", (LOCK, rank, await store.draw(), shared((b"z", rank))))
        await found(store, "error", "N3", "of kind 5")


async def test_a_shared_lock_above_the_oracles_bound() -> None:  # O1
    async with opened() as store:
        rank = store.number(store.docs.rank)
        await store.plant(b"a", (SHARED, rank, 10**9, shared((b"z", rank))))
        await found(store, "error", "O1", "above the oracle's bound")


async def test_a_shared_lock_beside_a_writers() -> None:  # T14
    async with opened() as store:
        rank = store.number(store.docs.rank)
        reader, writer = await store.draw(), await store.draw()
        for start_ts in (reader, writer):
            inside(store.db).fates.begin(start_ts)
        await store.lock(writer, (b"a", rank), (b"a", rank))
        await store.plant(b"a", (SHARED, rank, reader, shared((b"z", rank))))
        await found(store, "error", "T14", f"beside the lock of transaction {writer}")


async def test_a_write_that_was_let_in_past_a_shared_lock() -> None:  # T14
    async with opened() as store:
        rank = store.number(store.docs.rank)
        reader, writer = await store.draw(), await store.draw()
        await store.plant(b"a", (SHARED, rank, reader, shared((b"z", rank))))
        await store.plant(b"a", (WRITE, rank, await store.draw(), pack_record(PUT, writer, b"v")))
        await found(store, "error", "T14", f"despite the shared lock of transaction {reader}")


async def test_a_shared_lock_that_its_own_commit_left_behind() -> None:  # T8
    async with opened() as store:
        rank, reader = store.number(store.docs.rank), await store.draw()
        commit_ts = await store.draw()
        await store.plant(b"z", (WRITE, rank, commit_ts, pack_record(PUT, reader, b"v")))
        await store.plant(b"a", (TRACE, rank, commit_ts, pack_trace(reader)))
        mended = await store.cells()
        await store.plant(b"a", (SHARED, rank, reader, shared((b"z", rank))))
        await found(store, "error", "T8", "its shared lock is still there", mended=mended)


async def test_traces_that_are_none() -> None:  # T14 T2 O1
    async with opened() as store:
        rank = store.number(store.docs.rank)
        ts = await store.draw()
        for value, at, invariant, what in (
            (b"?", ts, "T14", "does not decode"),
            (pack_trace(ts + 1), ts, "T2", "began no earlier"),
            (pack_trace(ts), 10**9, "O1", "above the oracle's bound"),
        ):
            await store.plant(b"a", (TRACE, rank, at, value))
            await found(store, "error", invariant, what)
            await store.plant(b"a", (TRACE, rank, at, None))


@pytest.mark.parametrize("order", ["rwcc", "wrcc", "wrdd"])
async def test_a_read_under_a_lock_that_overlaps_a_write(order: str) -> None:  # T14
    async with opened() as store:
        rank = store.number(store.docs.rank)
        first, second, third, fourth = [await store.draw() for _ in range(4)]
        reader, writer = (first, second) if order[0] == "r" else (second, first)
        read, wrote = (third, fourth) if order[2] == "c" else (fourth, third)
        await store.plant(b"a", (TRACE, rank, read, pack_trace(reader)))
        await store.plant(b"a", (WRITE, rank, wrote, pack_record(PUT, writer, b"v")))
        await found(store, "error", "T14", f"overlaps the write that committed at {wrote}")


async def test_a_transaction_that_read_at_another_timestamp_than_it_wrote() -> None:  # T1
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        await store.plant(b"a", (WRITE, rank, await store.draw(), pack_record(PUT, start_ts, b"v")))
        await store.plant(b"z", (TRACE, rank, await store.draw(), pack_trace(start_ts)))
        await found(store, "error", "T1", f"transaction {start_ts} committed at", "there twice")


@pytest.mark.parametrize("where", ["owner"], indirect=True)  # who settles locks
async def test_a_read_under_a_lock_is_as_it_should_be_and_an_orphan_goes() -> None:  # T14 L1
    async with opened() as store:
        docs = store.docs
        for round in range(3):
            async with store.db.transaction() as txn:
                txn.set(docs.rank, "a", round)
            async with store.db.transaction() as txn:
                await txn.get(docs.rank, "a", lock=True)
                txn.set(docs.note, "z", b"%d" % round)
        result = await store.check()
        assert (result.findings, result.locks) == ((), 0)
        before = await store.cells()
        rank, start_ts = store.number(docs.rank), await store.draw()
        await store.plant(b"a", (SHARED, rank, start_ts, shared((b"k", rank))))
        assert (await store.check()).orphans == 1
        assert (await store.repair()).settled == 1
        assert await store.cells() == {**before, ("docs", ROLLBACK, b"k", rank, start_ts): b""}


# ------------------------------------------------------------------ whole transactions


async def test_a_transaction_with_two_commit_timestamps() -> None:  # T1
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        for row in (b"a", b"z"):
            await store.plant(row, (WRITE, rank, await store.draw(), pack_record(PUT, start_ts, b"v")))
        await found(store, "error", "T1", f"transaction {start_ts} committed at")


async def test_two_transactions_with_one_commit_timestamp() -> None:  # O1
    async with opened() as store:
        rank = store.number(store.docs.rank)
        first, second, commit_ts = await store.draw(), await store.draw(), await store.draw()
        await store.plant(b"a", (WRITE, rank, commit_ts, pack_record(PUT, first, b"v")))
        await store.plant(b"z", (WRITE, rank, commit_ts, pack_record(PUT, second, b"v")))
        await found(store, "error", "O1", f"both committed at {commit_ts}")


async def test_a_secondary_that_committed_before_its_primary() -> None:  # T3
    async with opened() as store:
        rank = store.number(store.docs.rank)
        header = Header(await store.draw(), Cellref("docs", b"k", rank), 0, 0, "t")
        commit_ts = await store.draw()
        for row in (b"a", b"k", b"z"):
            part = [Intent("docs", row, rank, PUT, b"v")]
            await inside(store.db).driver.store.apply([prewrite(header, part, again=False)])
        await inside(store.db).driver.store.apply([commit(header, [Intent("docs", b"a", rank, PUT, b"v")], commit_ts)])
        await found(store, "error", "T3", "its primary docs['k'].rank is still locked")


async def test_a_committed_secondary_whose_primary_has_no_record() -> None:  # T1, as another secondary's lock tells
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        await store.lock(start_ts, (b"k", rank), (b"z", rank))
        await store.plant(b"a", (WRITE, rank, await store.draw(), pack_record(PUT, start_ts, b"v")))
        await found(store, "error", "T3", "its primary docs['k'].rank has no record")


async def test_a_committed_secondary_whose_primary_was_rolled_back() -> None:  # T3
    async with opened() as store:
        rank, start_ts = store.number(store.docs.rank), await store.draw()
        await store.plant(b"k", (ROLLBACK, rank, start_ts, b""))
        await store.plant(b"a", (WRITE, rank, await store.draw(), pack_record(PUT, start_ts, b"v")))
        await found(store, "error", "T3", "was rolled back: docs['k'].rank")


# ------------------------------------------------------------------ observers


async def test_a_lost_notification() -> None:  # N1
    async with opened() as store:
        await fill(store)
        [[cells]] = await inside(store.db).driver.store.read([("docs", b"a", [(NOTIFY, store.ack, 0, TS_MAX, 9)])])
        assert len(cells) == 1
        mended = await store.cells()
        await store.plant(b"a", (NOTIFY, store.ack, cells[0][0], None))
        lost = f"lost notification: observer 'parse' has not seen the change at {cells[0][0]}"
        await found(store, "error", "N1", lost, mended=mended)
        async with store.db.worker(concurrency=1, scanners=1) as worker:
            await store.db.wait_idle()
        assert worker.statistics()["parse"].commits == 1


async def test_a_lost_notification_of_a_delete() -> None:  # N1
    async with opened() as store:
        await fill(store)
        async with store.db.transaction() as txn:
            txn.delete(store.docs.contents, "a")
        [[cells]] = await inside(store.db).driver.store.read([("docs", b"a", [(NOTIFY, store.ack, 0, TS_MAX, 9)])])
        older = ((NOTIFY, store.ack, ts, None) for ts, _ in cells if ts < txn.commit_ts)
        await store.plant(b"a", *older)
        mended = await store.cells()
        await store.plant(b"a", (NOTIFY, store.ack, txn.commit_ts, None))
        await found(store, "error", "N1", f"has not seen the change at {txn.commit_ts}", mended=mended)


async def test_a_notification_that_a_run_is_just_acknowledging_is_not_lost() -> None:
    async with opened() as store:
        await fill(store)
        [[cells]] = await inside(store.db).driver.store.read([("docs", b"a", [(NOTIFY, store.ack, 0, TS_MAX, 9)])])
        await store.plant(b"a", (NOTIFY, store.ack, cells[0][0], None))
        run = await store.draw()
        inside(store.db).fates.begin(run)
        await store.plant(b"a", (LOCK, store.ack, run, lock((b"a", store.ack), ACK, b"")))
        assert (await store.check()).findings == ()


async def test_a_lost_notification_of_an_observer_that_was_registered_without_the_past() -> None:  # N1
    async with opened(docs=Docs(observe=False)) as store:
        docs = store.docs
        async with store.db.transaction() as txn:
            txn.set(docs.contents, "old", b"1")
        docs.schema.observe(docs.contents, id="parse", backfill=False)(docs.parse)
        await local_owner(store.db).declare()
        await store.db.backfill()
        async with store.db.transaction() as txn:
            txn.set(docs.contents, "seen", b"1")
        async with store.db.worker(concurrency=1, scanners=1):
            await store.db.wait_idle()
        async with store.db.transaction() as txn:
            txn.set(docs.contents, "lost", b"1")
        assert (await store.check()).findings == ()
        mended = await store.cells()
        await store.plant(b"lost", (NOTIFY, store.ack, txn.commit_ts, None))
        await found(store, "error", "N1", f"has not seen the change at {txn.commit_ts}", mended=mended)


async def test_a_lost_notification_of_a_delete_that_no_run_ever_saw() -> None:  # N1
    async with opened() as store:
        await fill(store)
        async with store.db.transaction() as txn:
            txn.delete(store.docs.contents, "never")
        mended = await store.cells()
        await store.plant(b"never", (NOTIFY, store.ack, txn.commit_ts, None))
        await found(store, "error", "N1", f"has not seen the change at {txn.commit_ts}", mended=mended)


async def test_an_ack_that_points_at_the_future() -> None:  # N3: it would swallow every change until then
    async with opened() as store:
        await fill(store)
        await store.plant(b"b", (WRITE, store.ack, await store.draw(), pack_record(ACK, 10**9, b"")))
        await found(store, "error", "N3", "in the future")


async def test_a_notify_cell_that_does_not_say_why() -> None:  # N9
    async with opened() as store:
        await fill(store)
        [[cells]] = await inside(store.db).driver.store.read([("docs", b"a", [(NOTIFY, store.ack, 0, TS_MAX, 9)])])
        mended = await store.cells()
        await store.plant(b"a", (NOTIFY, store.ack, cells[0][0], b"?"))
        await found(store, "error", "N9", "does not say what caused it", mended=mended)
        [[cells]] = await inside(store.db).driver.store.read([("docs", b"a", [(NOTIFY, store.ack, 0, TS_MAX, 9)])])
        assert cells[0][1] == pack_cause(1, 0), "a wait for any cause waits for this"


async def test_a_notify_cell_that_was_caused_by_what_came_later() -> None:  # N9
    async with opened() as store:
        await fill(store)
        [[cells]] = await inside(store.db).driver.store.read([("docs", b"a", [(NOTIFY, store.ack, 0, TS_MAX, 9)])])
        mended = await store.cells()
        await store.plant(b"a", (NOTIFY, store.ack, cells[0][0], pack_cause(cells[0][0] + 1, 0)))
        await found(store, "error", "N9", "does not say what caused it", mended=mended)


async def test_a_notify_cell_of_an_unknown_observer() -> None:  # N10
    async with opened() as store:
        contents, ts = store.number(store.docs.contents), await store.draw()
        await store.plant(b"a", (NOTIFY, contents | 77, ts, pack_cause(ts, 0)))
        await found(store, "error", "N10", "observer #77")


async def test_a_notify_cell_of_an_observer_of_another_column() -> None:  # N10
    async with opened() as store:
        ts = await store.draw()
        [number] = inside(store.db).known.bind(store.docs.contents).observers
        mended = await store.cells()
        await store.plant(b"a", (NOTIFY, store.number(store.docs.rank) | number, ts, pack_cause(ts, 0)))
        await found(store, "error", "N10", "'parse', which observes docs.contents", mended=mended)


async def test_a_notify_cell_for_no_observer() -> None:  # N10
    async with opened() as store:
        ts = await store.draw()
        mended = await store.cells()
        await store.plant(b"a", (NOTIFY, store.number(store.docs.contents), ts, pack_cause(ts, 0)))
        await found(store, "error", "N10", "for no observer", mended=mended)


async def test_a_notify_cell_for_a_change_that_is_not_there() -> None:  # N1, of no consequence
    async with opened() as store:
        ts = await store.draw()
        mended = await store.cells()
        await store.plant(b"new", (NOTIFY, store.ack, ts, pack_cause(ts, 0)))
        await found(store, "warning", "N1", "a change that is not there", mended=mended)


async def test_a_notify_cell_for_a_change_that_is_not_there_in_place_of_one_that_is() -> None:  # N1
    async with opened() as store:
        await fill(store)
        [[cells]] = await inside(store.db).driver.store.read([("docs", b"a", [(NOTIFY, store.ack, 0, TS_MAX, 9)])])
        mended = await store.cells()
        ts = await store.draw()
        await store.plant(b"a", (NOTIFY, store.ack, cells[0][0], None), (NOTIFY, store.ack, ts, pack_cause(ts, 0)))
        await found(store, "warning", "N1", "a change that is not there", mended=mended)


async def test_an_ack_that_points_above_its_own_commit() -> None:  # N3
    async with opened() as store:
        await fill(store)
        ts = await store.draw()
        await store.plant(b"b", (WRITE, store.ack, ts, pack_record(ACK, ts + 1, b"")))
        await found(store, "error", "N3", f"points at {ts + 1}, in the future")


async def test_a_pending_entry_in_a_column_that_is_no_signal() -> None:  # N5
    async with opened() as store:
        await store.plant(b"a", (PENDING, store.number(store.docs.rank), await store.draw(), b""))
        await found(store, "error", "N5", "in a column that is not a signal")


async def test_a_notify_cell_above_the_oracles_bound() -> None:  # O1
    async with opened() as store:
        await store.plant(b"a", (NOTIFY, store.ack, 10**9, pack_cause(1, 0)))
        await found(store, "error", "O1", "above the oracle's bound")


# ------------------------------------------------------------------ the failed list


async def waiting(store: Store) -> int:
    """When the change was committed that waits in row a."""
    [[cells]] = await inside(store.db).driver.store.read([("docs", b"a", [(NOTIFY, store.ack, 0, TS_MAX, 9)])])
    return cells[0][0]


def failed(ts: int) -> bytes:
    return FailedCell(ts, 0, b"", 3, "ValueError: no", "Traceback", 0).pack()


async def test_a_change_that_has_failed_is_nothing_to_complain_about() -> None:  # N6
    async with opened() as store:
        await fill(store)
        ts = await waiting(store)
        await store.plant(b"a", (NOTIFY, store.ack, ts, None), (FAILED_LIST, store.ack, ts, failed(ts)))
        result = await store.check()
        assert (result.findings, result.failed, result.notifications) == ((), 1, 0)


async def test_a_failed_change_that_waits_as_well() -> None:  # N6
    async with opened() as store:
        await fill(store)
        ts, mended = await waiting(store), await store.cells()
        await store.plant(b"a", (FAILED_LIST, store.ack, ts, failed(ts)))
        await found(store, "error", "N6", "still waits for its observer", mended=mended)


async def test_a_failed_change_that_has_been_acknowledged() -> None:  # N6
    async with opened() as store:
        await fill(store)
        [[changes]] = await inside(store.db).driver.store.read(
            [("docs", b"b", [(WRITE, store.number(store.docs.contents), 0, TS_MAX, 1)])]
        )
        ts, mended = changes[0][0], await store.cells()
        await store.plant(b"b", (FAILED_LIST, store.ack, ts, failed(ts)))
        await found(store, "error", "N6", "has been acknowledged", mended=mended)


async def test_a_failed_change_that_cannot_be_read() -> None:  # N6: it waits again
    async with opened() as store:
        await fill(store)
        ts, mended = await waiting(store), await store.cells()
        await store.plant(b"a", (NOTIFY, store.ack, ts, None), (FAILED_LIST, store.ack, ts, b"?"))
        await found(store, "error", "N6", "does not decode", mended=mended)


async def test_a_change_that_has_failed_twice() -> None:  # N6: one place for a row and observer
    async with opened() as store:
        await fill(store)
        ts = await waiting(store)
        await store.plant(b"a", (NOTIFY, store.ack, ts, None), (FAILED_LIST, store.ack, ts, failed(ts)))
        mended = await store.cells()
        await store.plant(b"a", (FAILED_LIST, store.ack, ts - 1, failed(ts - 1)))
        await found(store, "error", "N6", f"the failed change at {ts - 1} stands beside a newer one", mended=mended)


async def test_a_failed_change_of_a_cell_that_is_not_there() -> None:  # N6
    async with opened() as store:
        ts, mended = await store.draw(), await store.cells()
        await store.plant(b"new", (FAILED_LIST, store.ack, ts, failed(ts)))
        await found(store, "error", "N6", "of a change that is not there", mended=mended)


async def test_a_failed_change_above_the_oracles_bound() -> None:  # O1
    async with opened() as store:
        await store.plant(b"a", (FAILED_LIST, store.ack, 10**9, failed(1)))
        await found(store, "error", "O1", "above the oracle's bound")


async def test_an_older_failed_change_does_not_stand_for_a_newer_one() -> None:  # N1
    async with opened() as store:
        await fill(store)
        ts = await waiting(store)
        mended = await store.cells() | {("docs", FAILED_LIST, b"a", store.ack, ts - 1): failed(ts - 1)}
        await store.plant(b"a", (NOTIFY, store.ack, ts, None), (FAILED_LIST, store.ack, ts - 1, failed(ts - 1)))
        await found(store, "error", "N1", "lost notification", mended=mended)


# ------------------------------------------------------------------ the system table


async def system_finding(
    store: Store, invariant: str, what: str, *, mended: Cells | None = None, severity: str = "error"
) -> None:
    [finding] = (await store.check()).findings
    assert (finding.severity, finding.invariant) == (severity, invariant)
    assert what in finding.what
    before = await store.cells()
    done = await store.repair()
    assert done.repaired == (() if mended is None else (finding,))
    assert await store.cells() == (before if mended is None else mended)
    assert done.after.clean == (mended is not None)


async def test_a_note_of_the_clock_above_the_bound() -> None:  # O1
    async with opened() as store:
        await inside(store.db).oracle.note()
        mended = await store.cells()
        wall = inside(store.db).oracle.wall_ms() + 10**6
        await store.plant(b"clock", (DATA, 0, 10**9, wall.to_bytes(8, "big")), table=SYSTEM_TABLE)
        await system_finding(store, "O1", "above the bound", mended=mended)


async def test_notes_of_the_clock_that_go_back() -> None:  # O3: either of the two may be wrong
    async with opened() as store:
        await store.draw()
        mended = await store.cells()
        await inside(store.db).oracle.note()
        ts = await store.draw()
        await store.plant(b"clock", (DATA, 0, ts, (1).to_bytes(8, "big")), table=SYSTEM_TABLE)
        await system_finding(store, "O3", "has a later wall time than the one at", mended=mended)


async def test_a_note_of_the_clock_that_is_no_time() -> None:  # O3
    async with opened() as store:
        ts = await store.draw()
        mended = await store.cells()
        await store.plant(b"clock", (DATA, 0, ts, b"noon"), table=SYSTEM_TABLE)
        await system_finding(store, "O3", "not a wall time", mended=mended)


@pytest.mark.parametrize(
    ("value", "invariant", "what"),
    [
        (b"?", "G1", "cannot be decoded"),
        (msgpack.packb([10**9, {}]), "O1", "above the bound"),
        (msgpack.packb([3, {"docs": 4}]), "G1", "a table is cut at 4"),
    ],
)
async def test_a_watermark_that_cannot_be(value: bytes, invariant: str, what: str) -> None:  # G1
    async with opened() as store:
        await store.draw()
        await store.plant(b"watermark", (DATA, 0, 1, value), table=SYSTEM_TABLE)
        await system_finding(store, invariant, what)


async def test_a_locality_group_that_the_catalogue_does_not_have(tmp_path: pathlib.Path) -> None:  # N10
    async with opened(tmp_path / "s") as store:
        for tablet in local_of(store.db).store.tablets():
            if tablet.table == "words":
                await tablet.add_groups(["data:strange"])
        await system_finding(store, "N10", "has a group 'data:strange'")


async def test_how_far_a_backfill_is_does_not_read() -> None:  # N10
    async with opened() as store:
        mended = await store.cells()
        number = inside(store.db).catalogue.observers["parse"].number
        await store.plant(b"backfill", (DATA, number, 1, b"?"), table=SYSTEM_TABLE)
        await system_finding(store, "N10", "its progress cannot be decoded", mended=mended, severity="warning")


async def test_an_ack_of_a_version_that_the_catalogue_does_not_have() -> None:  # N10
    async with opened() as store:
        ack = store.number(store.docs.contents) | inside(store.db).catalogue.observers["parse"].number
        start_ts = await store.draw()
        record = pack_record(ACK, start_ts, ack_head(2) + pack_cause(start_ts, 0))
        await store.plant(b"a", (WRITE, ack, await store.draw(), record))
        await found(store, "error", "N10", "is of version 2, which the catalogue does not have")


async def test_tablets_of_a_table_that_the_catalogue_does_not_have() -> None:  # N10
    """As where the catalogue was damaged while the store was open."""
    async with opened() as store:
        catalogue = inside(store.db).catalogue
        assert not list(strange_groups(groups_of(local_of(store.db).store), catalogue))
        gone = replace(catalogue, tables={name: of for name, of in catalogue.tables.items() if name != "docs"})
        tablets = [start for table, start, _ in groups_of(local_of(store.db).store) if table == "docs"]
        for start, finding in zip(tablets, strange_groups(groups_of(local_of(store.db).store), gone), strict=True):
            assert (finding.severity, finding.invariant, finding.where) == ("error", "N10", "docs")
            assert finding.what == f"there is a tablet from {start!r} on, but the catalogue has no such table"


async def test_an_old_version_of_the_catalogue_that_does_not_read() -> None:  # N10
    async with opened() as store:
        async with store.db.transaction() as txn:
            txn.set(store.docs.rank, "a", 1)
        await inside(store.db).keeper.change(lambda catalogue: replace(catalogue, version=catalogue.version + 1))
        await store.plant(b"catalogue", (DATA, 0, 1, b"?"), table=SYSTEM_TABLE)
        result = await store.check()
        assert [finding.invariant for finding in result.findings] == ["N10"]


# ------------------------------------------------------------------ limits


async def test_findings_beyond_the_limit_are_counted() -> None:
    async with opened() as store:
        for number in range(5):
            await store.plant(b"%d" % number, (ROLLBACK, 99 << 16, 1, b""))
        result = await store.check(CheckOptions(findings_max=2, pause_s=0.0))
    assert len(result.findings) == 2
    assert result.dropped == 3
    assert result.errors == 5


async def test_beyond_the_limit_transactions_are_sampled() -> None:
    async with opened() as store:
        rank = store.number(store.docs.rank)
        for number in range(40):
            start_ts = await store.draw()
            await store.plant(b"%d" % number, (WRITE, rank, await store.draw(), pack_record(PUT, start_ts, b"v")))
        result = await store.check(CheckOptions(tracked_max=8, pause_s=0.0))
    assert result.findings == ()
    assert result.sampled >= 4
