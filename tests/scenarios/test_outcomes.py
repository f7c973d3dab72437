"""When nobody knows whether it committed: ask by its token, later, from anywhere (T4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.database.inside import inside
from perco.protocol.records import Cellref
from perco.txn.resolver import make_token
from tests.support.faults import Fault, faulty, gated, on
from tests.support.machines import CrashedError, Machine
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT, splits=["h", "p"])
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)
KEYS = ["a", "i", "q"]

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")


@pytest.fixture(params=[False, True], ids=["two phases", "one step"])
def quick(request: pytest.FixtureRequest) -> perco.Options:
    return perco.Options(commit=perco.options.CommitOptions(commit_timeout_s=5, one_step=request.param))


async def begin(db: perco.Database, value: int = 1) -> perco.Transaction:
    txn = await db.begin()
    for key in KEYS:
        txn.set(n, key, value)
    return txn


async def values(db: perco.Database) -> set[int | None]:
    async with db.snapshot() as snap:
        return set((await snap.get_many(n, KEYS)).values())


async def unknown(db: perco.Database, *, made: bool) -> perco.Transaction:
    """A transaction whose commit was made, or not, and whose store then said nothing more."""
    one_step = db.config.commit.one_step
    store = faulty(db, on("one step" if one_step else "commit", Fault.LOSE_REPLY if made else Fault.LOSE_REQUEST))
    txn = await begin(db)

    async def deaf(mutation: object) -> None:
        store.deaf = len(store.log) >= 3 - one_step

    store.after = deaf
    with pytest.raises(perco.CommitUnknown) as caught:
        await txn.commit()
    assert caught.value.token == txn.token
    assert caught.value.token in str(caught.value)
    assert txn.outcome == "unknown"
    assert db.statistics().counters.unknown == 1
    assert sum(store.fired.values()) == 1
    store.deaf = False
    store.after = None
    return txn


@pytest.mark.parametrize("made", [True, False])
async def test_asking_tells_and_what_it_tells_stays_true(
    autojump_clock: trio.testing.MockClock, quick: perco.Options, made: bool
) -> None:
    """T4 T5: an unsent commit is made impossible by asking."""
    async with perco.open("memory:", SCHEMA, options=quick) as db:
        txn = await unknown(db, made=made)
        outcome = await db.outcome(txn.token)
        assert (outcome > txn.start_ts) == made
        assert outcome == 0 or made
        assert await db.outcome(txn.token) == outcome
        assert await values(db) == ({1} if made else {None})
        await trio.sleep(60)
        assert sum(tablet.entries("lock") for tablet in local_of(db).store.tablets()) == 0


@pytest.mark.parametrize("made", [True, False])
async def test_a_reader_that_comes_first_settles_it(
    autojump_clock: trio.testing.MockClock, quick: perco.Options, made: bool
) -> None:  # T4
    async with perco.open("memory:", SCHEMA, options=quick) as db:
        txn = await unknown(db, made=made)
        assert await values(db) == ({1} if made else {None})
        assert (await db.outcome(txn.token) > 0) == made


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("swept", [True, False])
async def test_asked_by_another_database_on_the_same_store(
    autojump_clock: trio.testing.MockClock, quick: perco.Options, made: bool, swept: bool
) -> None:  # T4 T5
    machine = Machine(SCHEMA)
    async with machine.opened(quick) as db:
        txn = await unknown(db, made=made)
    if swept:
        await machine.swept()
    async with machine.opened() as db:
        outcome = await db.outcome(txn.token)
        assert (outcome > txn.start_ts) == made
        assert await values(db) == ({1} if made else {None})
    async with machine.opened() as db:
        assert await db.outcome(txn.token) == outcome


@pytest.mark.parametrize(("one_step", "number"), [(False, n) for n in range(7)] + [(True, n) for n in range(6)])
async def test_the_token_of_a_dead_client_tells_what_became_of_it(one_step: bool, number: int) -> None:  # T4 C6
    machine = Machine(SCHEMA, one_step=one_step)
    decides = 4 - one_step
    async with machine.crashing(number, made=False) as (db, _):
        txn = await begin(db)
        try:
            await txn.commit()
        except CrashedError:
            assert number < decides
        await trio.testing.wait_all_tasks_blocked()
    async with machine.opened() as db:
        outcome = await db.outcome(txn.token)
        assert (outcome > 0) == (number >= decides)
        if outcome:
            assert outcome == txn.commit_ts
        assert await values(db) == ({1} if outcome else {None})


async def test_asked_after_the_folder_was_opened_again(tmp_path: Path) -> None:  # T4
    options = perco.Options(durability="process")
    async with perco.open(tmp_path / "store", SCHEMA, options=options) as db:
        good, bad = await begin(db, 1), await begin(db, 2)
        await good.commit()
        with pytest.raises(perco.WriteConflict):
            await bad.commit()
    async with perco.open(tmp_path / "store", SCHEMA, options=options) as db:
        assert await db.outcome(good.token) == good.commit_ts
        assert await db.outcome(bad.token) == 0


async def test_asking_for_a_living_one_waits_for_it() -> None:  # L1 T4
    async with perco.open("memory:", SCHEMA) as db:
        gate = await gated(db, "commit")
        txn = await begin(db)
        found: list[int] = []

        async def ask() -> None:
            found.append(await db.outcome(txn.token))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(txn.commit)
            await gate.reached()
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert not found
            gate.open()
        assert found == [txn.commit_ts]


async def test_every_end_leaves_its_outcome() -> None:  # T10
    async with perco.open("memory:", SCHEMA) as db:
        txn = await begin(db)
        assert (txn.outcome, txn.token, txn.commit_ts) == ("open", "", 0)
        await txn.commit()
        assert txn.outcome == "committed"
        assert txn.commit_ts > txn.start_ts
        txn.discard()
        assert txn.outcome == "committed"
        txn = await begin(db)
        txn.discard()
        assert (txn.outcome, txn.token) == ("aborted", "")
        txn = await db.begin()
        assert await txn.commit() == 0
        assert (txn.outcome, txn.commit_ts, txn.token) == ("committed", 0, "")


@pytest.mark.parametrize(
    "token", ["", "nonsense", "5", "5/6/docs", "x/1/docs/61", "5/1/docs/zz", "5/1/else/61", [], None]
)
async def test_what_is_no_token_is_an_error(token: Any) -> None:
    async with perco.open("memory:", SCHEMA) as db:
        with pytest.raises(perco.UsageError):
            await db.outcome(token)


async def test_a_token_survives_slashes_and_zero_bytes() -> None:
    table = perco.Table("a/b", key=perco.TEXT)
    column = table.column("c/d", perco.INT64)
    async with perco.open("memory:", perco.Schema(table)) as db:
        async with db.transaction() as txn:
            txn.set(column, "e/\0/f", 1)
        assert await db.outcome(txn.token) == txn.commit_ts
        assert len(txn.token) < 100


async def test_a_token_that_was_cut_short_is_an_error_and_rolls_nobody_back() -> None:  # T5
    async with perco.open("memory:", SCHEMA) as db:
        txn = await begin(db)
        await txn.commit()
        for cut in range(len(txn.token)):
            with pytest.raises(perco.UsageError):
                await db.outcome(txn.token[:cut])
        assert await db.outcome(txn.token) == txn.commit_ts
        assert sum(tablet.entries("rollback") for tablet in local_of(db).store.tablets()) == 0


async def test_a_token_of_another_store_is_an_error_and_leaves_no_marker() -> None:  # T5
    async with perco.open("memory:", SCHEMA) as db:
        async with db.transaction() as txn:
            txn.set(n, "key", 1)
        column, last = inside(db).known.bind(n).column, inside(db).oracle.last
        for start_ts, cell in [
            (last + 1, Cellref("docs", b"key", column)),
            (0, Cellref("docs", b"key", column)),
            (-1, Cellref("docs", b"key", column)),
            (1 << 80, Cellref("docs", b"key", column)),
            (1, Cellref("docs", b"key", column + (1 << 16))),
            (1, Cellref("docs", b"key", -1)),
            (1, Cellref("docs", b"key", 1 << 40)),
            (1, Cellref("_perco", b"key", column)),
            (1, Cellref("else", b"key", column)),
        ]:
            with pytest.raises(perco.UsageError, match="another store"):
                await db.outcome(make_token(start_ts, cell))
        assert not sum(tablet.entries("rollback") for tablet in local_of(db).store.tablets())
