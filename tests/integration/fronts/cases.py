"""The calls of every public method, written once for all fronts (R9).

A case is an `async def`; under `perco.sync` nothing in it ever waits, so it is run to its end in one step. `Asked.told`
makes a call and gives what comes of it, result or error, without what differs from run to run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import trio

import perco
import perco.sync

docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
n = docs.column("n", perco.INT64)
title = docs.column("title", perco.TEXT)
twice = docs.column("twice", perco.INT64)
grown = docs.signal("grown")
sums = perco.Table("sums", key=perco.INT64)
total = sums.column("total", perco.INT64)
loaded = perco.Table("loaded", key=perco.INT64)
size = loaded.column("size", perco.INT64)
logged = perco.Table("logged", key=perco.TEXT, changes=True)
kept = logged.column("kept", perco.INT64)
rest = perco.Table("rest", key=perco.TEXT)
old = rest.column("old", perco.TEXT)
SCHEMA = perco.Schema(docs, sums, loaded, logged, rest, keep=perco.Keep(seconds=0))
elsewhere = perco.Table("elsewhere", key=perco.TEXT).column("n", perco.INT64)  # not in the schema

LONG = 60.0  # seconds, for what ends by itself


@SCHEMA.observe(n, id="double")
async def double(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
    if change.value == 13:
        raise ValueError("thirteen is not doubled")
    txn.set(twice, change.key, 2 * (change.value or 0))


@SCHEMA.observe(grown, id="heard")
async def heard(txn: perco.Transaction, change: perco.Change[str, None]) -> None:
    txn.set(title, change.key, "heard")


# ------------------------------------------------------------------ how it is asked


Case = Callable[["Asked"], Coroutine[Any, Any, Any]]
CASES: dict[str, Case] = {}
COVERED: dict[str, set[str]] = {}  # "Class.name": the cases that use it


def covers(*names: str) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        CASES[case.__name__] = case
        for name in names:
            attribute = name.partition(".")[2]
            assert re.search(rf"\b{attribute}\b", inspect.getsource(case).partition("\nasync def ")[2]) or (
                attribute == "run"
            ), f"{case.__name__} does not use {name}"
            COVERED.setdefault(name, set()).add(case.__name__)
        return case

    return add


class Asked:
    """An open store, and how to ask it."""

    def __init__(self, front: ModuleType, db: Any) -> None:
        self.front, self.db = front, db

    async def call(self, given: Any) -> Any:
        """The result of a call, awaited if it is awaitable."""
        return await given if inspect.iscoroutine(given) else given

    async def told(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The outcome of a call: ("gives", result), or ("raises", type, message)."""
        try:
            return "gives", plain(await self.call(method(*args, **kwargs)))
        except Exception as error:
            return "raises", type(error).__name__, said(error)

    def function(self, body: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        """As the front's `run` takes it."""
        if self.front is not perco.sync:
            return body
        return lambda *args, **kwargs: at_once(body(*args, **kwargs))

    @asynccontextmanager
    async def block(self, given: Any) -> AsyncIterator[Any]:
        if self.front is not perco.sync:
            async with given as held:
                yield held
        else:
            with given as held:
                yield held

    def each(self, given: Any) -> AsyncIterator[Any]:
        return aiter(given) if self.front is not perco.sync else _Each(iter(given))

    async def put(self, **values: int) -> int:
        """Write cells of `n`; returns the commit timestamp."""

        async def body(txn: Any) -> int:
            for key, value in values.items():
                txn.set(n, key, value)
            ts: int = await self.call(txn.commit())
            return ts

        done: int = await self.call(self.db.run(self.function(body)))
        return done

    async def get(self, key: str, column: Any = n) -> Any:
        async with self.block(self.db.snapshot()) as snap:
            return await self.call(snap.get(column, key))

    async def idle(self, **options: Any) -> None:
        """Run the observers until nothing waits."""
        async with self.block(self.db.worker(**options)):
            await self.call(self.db.wait_idle(timeout=LONG))


class _Each(AsyncIterator[Any]):
    def __init__(self, of: Iterator[Any]) -> None:
        self._of = of

    async def __anext__(self) -> Any:
        try:
            return next(self._of)
        except StopIteration:
            raise StopAsyncIteration from None


def at_once(running: Coroutine[Any, Any, Any]) -> Any:
    """The value of what never waits."""
    try:
        running.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a blocking call waits in its thread, not here")


_VARIES = {"seconds", "paused_s", "made_ms", "expires_ms", "owner", "ts", "cause", "wall", "watermark", "traceback"}
_VARIES |= {"cuts", "holder", "before", "after", "repacked", "used_bytes", "commit_ts"}


def plain(value: Any) -> Any:
    """A result, without what differs from run to run: times, timestamps, sizes."""
    if isinstance(value, perco.Row):
        return "row", value.key, value.values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, perco.Pin):
        fields = {**value._asdict(), "id": "random"}
    elif hasattr(value, "_asdict"):
        fields = value._asdict()
    elif isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    elif isinstance(value, list | tuple):
        return [plain(each) for each in value]
    elif isinstance(value, set | frozenset):
        return sorted(value)
    else:
        return value
    varies = {name: type(each).__name__ for name, each in fields.items() if name in _VARIES}
    return {name: varies.get(name, plain(each)) for name, each in fields.items()}


def said(error: BaseException) -> str:
    """Its message, without numbers and tokens of transactions; as blocking code writes it."""
    text = re.sub(r"\d+/\d+/\w+/\w+/\w+", "TOKEN", str(error))
    text = re.sub(r"\b(await|async) (?!def)|`async def` ", "", text).replace(" an function", " a function")
    return re.sub(r"\d+(\.\d+)?", "N", text)


# ------------------------------------------------------------------ the store


@covers("Database.run", "Retrying.run", "Database.options")
async def running(asked: Asked) -> Any:
    db = asked.db

    async def add(txn: Any, key: str, by: int = 1) -> int:
        value = (await asked.call(txn.get(n, key)) or 0) + by
        txn.set(n, key, value)
        return value

    async def fails(txn: Any) -> None:
        txn.set(n, "run", 99)
        raise ZeroDivisionError("of the function")

    async def overtaken(txn: Any) -> None:
        await asked.call(txn.get(n, "run"))
        await asked.put(run=7)
        txn.set(n, "run", 8)

    add_, fails_, overtaken_ = asked.function(add), asked.function(fails), asked.function(overtaken)
    return [
        await asked.told(db.run, add_, "run"),
        await asked.told(db.run, add_, "run", by=5),
        await asked.told(db.options(attempts=3, timeout=LONG).run, add_, "run"),
        await asked.told(db.run, fails_),
        await asked.told(db.run, 5),
        await asked.told(db.options(attempts=2).run, overtaken_),
        await asked.told(db.options(timeout=0.0).run, add_, "run"),
        await asked.told(db.options, attempts=0),
        await asked.told(db.options, timeout="3"),
        await asked.told(db.options, isolation="weak"),
        await asked.get("run"),
    ]


@covers("Database.run", "Transaction.start_ts")
async def stamped(asked: Asked) -> Any:
    """The timestamp, wanted before and after the first read, and by an operation that needs it at once."""
    before = await asked.put(stamped=1)

    async def first(txn: Any, *, fails: bool = False) -> list[bool]:
        ts = txn.start_ts
        if fails:
            raise ZeroDivisionError("of the function")
        read = await asked.call(txn.get(n, "stamped"))
        return [ts > before, txn.start_ts == ts, read == 1]

    async def swallowed(txn: Any) -> bool:
        ts = 0
        try:
            ts = txn.start_ts
        except Exception:
            txn.set(n, "never", 1)
        return bool(ts > before)

    async def later(txn: Any) -> list[bool]:
        txn.set(n, "stamped", 2)
        read = [await asked.call(txn.get(n, key)) for key in ("stamped", "none")]
        return [txn.start_ts > before, read == [2, None]]

    async def in_batches(txn: Any) -> list[Any]:
        batches = txn.scan(docs, columns=[n], prefix="stamped").to_batches(key="name")
        return [row async for batch in asked.each(batches) for row in batch.to_pylist()]

    async def gives_up(txn: Any) -> Any:
        try:
            return await in_batches(txn)
        except Exception:
            txn.discard()
            return "it gave up"

    async def scanned(txn: Any) -> list[Any]:
        scan = txn.scan(docs, columns=[n], prefix="stamped")
        return [(row.key, row[n], txn.start_ts > before) async for row in asked.each(scan)]

    async def twice_over(txn: Any) -> list[bool]:
        await asked.call(txn.commit())
        return [txn.commit_ts == 0, txn.start_ts > before]

    once = asked.db.options(attempts=1).run
    functions = first, swallowed, in_batches, gives_up, scanned, twice_over, later
    return [
        *[await asked.told(once, asked.function(each)) for each in functions],
        await asked.told(once, asked.function(first), fails=True),
        await asked.get("never"),
    ]


@covers("Database.attempts", "Retrying.attempts", "Database.options")
async def attempts(asked: Asked) -> Any:
    db, seen = asked.db, []
    async for attempt in asked.each(db.attempts()):
        async with asked.block(attempt) as txn:
            seen.append(await asked.call(txn.get(n, "attempts")))
            if len(seen) == 1:
                await asked.put(attempts=5)
            txn.set(n, "attempts", 6)

    async def unused() -> None:
        async for _ in asked.each(db.options(attempts=3).attempts()):
            pass

    async def late() -> None:
        async for attempt in asked.each(db.options(timeout=0.0).attempts()):
            async with asked.block(attempt):
                pass

    return seen, await asked.get("attempts"), await asked.told(unused), await asked.told(late)


@covers("Database.transaction", "Database.begin", "Transaction.isolation", "Transaction.outcome")
async def transactions(asked: Asked) -> Any:
    db, states = asked.db, []
    async with asked.block(db.transaction(isolation="serializable")) as txn:
        txn.set(n, "transaction", 1)
        states.append((txn.isolation, txn.outcome))
    states.append((txn.outcome, txn.commit_ts > 0))

    async def fails() -> None:
        async with asked.block(db.transaction()) as txn:
            txn.set(n, "transaction", 2)
            raise ZeroDivisionError("of the block")

    begun = await asked.call(db.begin())
    begun.set(n, "begun", 1)
    states.append((begun.isolation, begun.outcome))
    states.append((await asked.call(begun.commit()) > 0, begun.outcome))

    async def weak() -> None:
        async with asked.block(db.transaction(isolation="weak")):
            pass

    told = [await asked.told(fails), await asked.told(weak), await asked.told(db.begin, isolation="weak")]
    return states, told, await asked.get("transaction"), await asked.get("begun")


@covers("Database.snapshot", "Database.snapshot_at", "Snapshot.end", "Snapshot.start_ts", "Snapshot.wall")
async def snapshots(asked: Asked) -> Any:
    db = asked.db
    first = await asked.put(snap=1)
    second = await asked.put(snap=2)
    async with asked.block(db.snapshot(ts=first)) as snap:
        past = await asked.call(snap.get(n, "snap")), snap.start_ts == first, snap.wall
    taken = await asked.call(db.snapshot_at())
    now = await asked.call(taken.get(n, "snap")), taken.start_ts > second, taken.wall
    taken.end()
    taken.end()
    naive = datetime(2020, 1, 1)
    return [
        past,
        now,
        await asked.told(taken.get, n, "snap"),
        await asked.told(taken.get_many, n, ["snap"]),
        await asked.told(taken.row, docs, "snap"),
        await asked.told(lambda: taken.scan(docs)),
        await asked.told(db.snapshot_at, ts=1 << 60),
        await asked.told(db.snapshot_at, ts="now"),
        await asked.told(db.snapshot_at, ts=0),
        await asked.told(db.snapshot_at, ts=1, at=datetime.now(UTC)),
        await asked.told(db.snapshot_at, at=naive),
        await asked.told(db.snapshot_at, at=datetime(2100, 1, 1, tzinfo=UTC)),
        await asked.told(db.snapshot_at, at=5),
    ]


@covers("Database.pin", "Database.pins", "Database.drop_pin", "PinnedSnapshot.renew", "PinnedSnapshot.pin")
async def pins(asked: Asked) -> Any:
    db = asked.db
    ts = await asked.put(pinned=1)
    told: list[Any] = []
    async with asked.block(db.pin("held", lease_s=LONG, ts=ts, owner="a test")) as pin:
        await asked.put(pinned=2)
        told.append((pin.pin.name, pin.pin.owner, pin.pin.ts == ts, pin.start_ts == ts, pin.wall))
        told.append(await asked.call(pin.get(n, "pinned")))
        before = pin.pin.expires_ms
        told.append(await asked.told(pin.renew, 2 * LONG))
        told.append(pin.pin.expires_ms > before)
        told.append(await asked.told(pin.renew, "a minute"))
        told.append(await asked.told(db.pins))

        async def again() -> None:
            async with asked.block(db.pin("held", lease_s=LONG)):
                pass

        told.append(await asked.told(again))
    told.append(await asked.told(pin.renew))
    told.append(await asked.told(db.pins))
    async with asked.block(db.pin("kept", lease_s=LONG, keep=True)):
        pass

    async def elsewhere_in_time() -> None:
        async with asked.block(db.pin("kept", lease_s=LONG, ts=1)):
            pass

    async def no_lease() -> None:
        async with asked.block(db.pin("none", lease_s="long")):
            pass

    async def nobodys(name: str, owner: Any) -> Any:
        async with asked.block(db.pin(name, lease_s=LONG, owner=owner)) as pin:
            return pin.pin.owner

    told += [await asked.told(elsewhere_in_time), await asked.told(no_lease)]
    told += [await asked.told(nobodys, name, owner) for name, owner in (("a", 5), ("\ud800", "x"), ("a", "\udcff"))]
    told += [await asked.told(db.drop_pin, "kept"), await asked.told(db.drop_pin, "kept"), await asked.told(db.pins)]
    return told


@covers("Database.outcome", "Transaction.token", "Transaction.commit_ts")
async def outcomes(asked: Asked) -> Any:
    db = asked.db
    txn = await asked.call(db.begin())
    txn.set(n, "outcome", 1)
    before = txn.token
    ts = await asked.call(txn.commit())
    read_only = await asked.call(db.begin())
    await asked.call(read_only.commit())
    return [
        before,
        ts == txn.commit_ts == await asked.call(db.outcome(txn.token)),
        (read_only.token, read_only.commit_ts),
        await asked.told(db.outcome, "not a token"),
        await asked.told(db.outcome, 5),
        await asked.told(db.outcome, txn.token.replace(str(txn.start_ts), str(1 << 50), 1)),
    ]


@covers("Database.put", "Database.put_if", "Database.add", "Database.append", "Database.delete")
async def operations(asked: Asked) -> Any:
    db = asked.db
    first, second = await asked.call(db.put(n, "o", 5)), await asked.call(db.add(n, "o", 2))
    told = [
        first > 0,
        second,
        await asked.call(db.put_if(n, "o", 8, expected=7)) > first,
        await asked.call(db.put_if(n, "o", 9, expected=7)),
        await asked.call(db.delete(n, "o")) > first,
    ]
    for method, *given in (
        (db.put, n, "o", None),
        (db.put, n, "o", "text"),
        (db.put, n, 5, 1),
        (db.put, n, "o" * 500, 1),
        (db.put, "n", "o", 1),
        (db.put, docs, "o", 1),
        (db.delete, None, "o"),
        (db.add, n, "o", "1"),
        (db.add, n, "o", True),
        (db.add, n, "o", 0.5),
        (db.add, "n", "o", 1),
        (db.append, n, "o", 1),
        (db.append, n, "o", "x"),
    ):
        told.append(await asked.told(method, *given))
    told.append(await asked.told(db.put_if, "n", "o", 1, expected=2))
    return told


@covers("Database.watermark", "Database.trace")
async def traces(asked: Asked) -> Any:
    db = asked.db
    ts = await asked.put(traced=1)
    before = await asked.call(db.watermark())
    [found] = await asked.call(db.trace(docs, "traced"))
    later = await asked.call(db.watermark())
    return [
        0 <= before <= later,
        found.commit_ts == ts,
        found.observer,
        found.asked,
        await asked.told(db.trace, docs, "nothing there"),
        await asked.told(db.trace, "docs", "traced"),
    ]


@covers("Database.vacuum")
async def vacuum(asked: Asked) -> Any:
    for value in range(5):
        await asked.put(vacuumed=value)
    await asked.idle()
    shown: list[Any] = []
    result = await asked.call(asked.db.vacuum(progress=shown.append))
    assert shown, "progress is told at least the end"
    return result.removed.versions > 0, shown[-1].removed.versions == result.removed.versions, sorted(plain(result))


@covers("Database.split", "Database.compact")
async def upkeep(asked: Asked) -> Any:
    db = asked.db
    await asked.put(split_a=1, split_b=2)
    await asked.idle()  # a lock of an observer's run that is still to be settled would be copied as well
    return [
        (await asked.told(db.split, docs, "split_b"))[0],
        await asked.told(db.split, docs, "split_b"),
        await asked.told(db.split, "nowhere"),
        await asked.told(db.split, docs, 5),
        await asked.told(db.split, sums),
        await asked.told(db.compact, "nowhere"),
        await asked.told(db.compact, 5),
        (await asked.get("split_a"), await asked.get("split_b")),
    ]


@covers("Database.compact")
async def compacting(asked: Asked) -> Any:
    return await asked.told(asked.db.compact, sums)


@covers("Database.backup")
async def backing(asked: Asked) -> Any:
    """Twice: a full one, and what has changed since."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = [await asked.told(asked.db.backup, f"{folder}/backups") for _ in range(2)]
        if any(outcome[0] == "raises" for outcome in outcomes):
            return outcomes[0]
        full = await asked.call(asked.db.backup(f"{folder}/backups", full=True))
        return "gives", [sorted(outcome[1]) for outcome in outcomes], full.base, full.stored == full.pages


@covers("Database.bulk_load")
async def bulk_loading(asked: Asked) -> Any:
    db = asked.db

    def broken() -> Iterator[Any]:
        yield 1, {size: 1}
        raise ZeroDivisionError("in the rows")

    told = [
        await asked.told(db.bulk_load, {docs: [("a", {n: 1})]}),  # it is not empty
        await asked.told(db.bulk_load, {"loaded": []}),
        await asked.told(db.bulk_load, {loaded: [(2, {size: 1}), (1, {size: 1})]}),
        await asked.told(db.bulk_load, {loaded: [(1, {n: 1})]}),
        await asked.told(db.bulk_load, {loaded: broken()}),
        await asked.told(db.bulk_load, {loaded: ((key, {size: 2 * key}) for key in range(50))}),
        await asked.told(db.bulk_load, {loaded: []}),
    ]
    async with asked.block(db.snapshot()) as snap:
        told.append([row[size] async for row in asked.each(snap.scan(loaded))])
    return told


@covers("Database.changes")
async def changes(asked: Asked) -> Any:
    db = asked.db
    async with asked.block(db.snapshot()) as snap:
        since = snap.start_ts
    for value in (1, 2):
        async with asked.block(db.transaction()) as txn:
            txn.set(kept, "followed", value)
    found = [each.rows async for each in asked.each(db.changes(logged, since=since))]
    return [
        [(row.table, row.key, row.after) for rows in found for row in rows],
        await asked.told(db.changes),
        await asked.told(db.changes, docs, since=since),
        await asked.told(db.changes, "nowhere"),
        await asked.told(db.changes, logged, since=-1),
    ]


@covers("Database.backfill", "Database.observers", "Database.unserved")
async def observers(asked: Asked) -> Any:
    db = asked.db
    return [
        await asked.told(db.backfill),
        await asked.told(db.backfill, progress=lambda _: None),
        [(each.id, each.table, each.column, each.version, each.paused) for each in await asked.call(db.observers())],
        await asked.told(db.unserved),
    ]


@covers("Database.drop_observer")
async def dropping(asked: Asked) -> Any:
    db = asked.db
    told = [await asked.told(db.drop_observer, which) for which in ("none", ["none"], [], [7], 7)]
    async with asked.block(db.worker()):
        told += [await asked.told(db.drop_observer, "double")]
    return told


@covers("Database.drop_column", "Database.drop_table")
async def removing(asked: Asked) -> Any:
    db = asked.db
    wrong: list[Any] = [("docs", "none"), ("none", "x"), ("docs", [7]), (7, ""), ("docs", "n")]
    told = [await asked.told(db.drop_column, *which) for which in wrong]
    told += [await asked.told(db.drop_table, which) for which in ("none", 7, "docs")]
    told += [await asked.told(db.drop_column, "rest", ["old"]), await asked.told(db.drop_column, "rest", "old")]
    told += [await asked.told(db.drop_table, "rest"), await asked.told(db.drop_table, "rest")]
    async with asked.block(db.snapshot()) as snap:
        told.append(await asked.told(snap.get, old, "key"))
    return told


@covers("Database.freshness")
async def of_views(asked: Asked) -> Any:
    db = asked.db
    ts = await asked.put(fresh=1)
    return [
        *[await asked.told(db.freshness, *views) for views in ((), ("none",), (["none"],), ([],), ([7],))],
        *[await asked.told(db.wait_for, ts, views=views) for views in ("none", [], [7], ["none", "nor this"])],
        *[await asked.told(db.snapshot_at, **how) for how in ({"fresh": "none"}, {"fresh": [], "ts": ts})],
        await asked.told(db.snapshot_at, timeout=1.0),
    ]


@covers("Database.lag")
async def lagging(asked: Asked) -> Any:
    db = asked.db

    async def lag() -> dict[str, Any]:
        found = await asked.call(db.lag())
        return {
            id: (each.waiting, each.failing, each.attempts, each.failed, each.workers) for id, each in found.items()
        }

    told = [await lag()]
    await asked.put(lags=1, fails=13)
    told.append(await lag())
    async with asked.block(db.worker(options=perco.WorkerOptions(attempts=1))):
        await asked.call(db.wait_idle(timeout=LONG))
        told.append(await lag())
    await asked.call(db.drop_failed("double"))
    told.append(await lag())
    return told


@covers("Database.waiting", "Database.pending", "Database.is_idle", "Database.wait_idle", "Database.wait_for")
async def waiting(asked: Asked) -> Any:
    db = asked.db
    told = [await asked.told(db.is_idle), await asked.told(db.wait_idle)]
    ts = await asked.put(waiting=1, waited=2)
    told += [await asked.told(db.is_idle), await asked.told(db.pending), await asked.told(db.waiting)]
    told += [await asked.told(db.wait_idle), await asked.told(db.wait_for, ts), await asked.told(db.wait_for, ts - 1)]
    told += [await asked.told(db.wait_for, 1 << 60), await asked.told(db.wait_for, "now")]
    told += [await asked.told(db.wait_idle, timeout="soon"), await asked.told(db.wait_for, ts, timeout="soon")]
    await asked.call(db.pause("double"))
    async with asked.block(db.worker()):
        told += [await asked.told(db.wait_idle), await asked.told(db.wait_idle, timeout=0.0)]
        told += [await asked.told(db.wait_for, ts), await asked.told(db.wait_for, ts, timeout=0.0)]
        await asked.call(db.resume("double"))
        told += [await asked.told(db.wait_for, ts, timeout=LONG), await asked.told(db.wait_idle, timeout=LONG)]
    told += [await asked.told(db.is_idle), await asked.told(db.pending), await asked.told(db.waiting)]
    return told


@covers("Database.pause", "Database.resume", "Database.paused")
async def pausing(asked: Asked) -> Any:
    db = asked.db
    return [
        await asked.told(db.pause, "double"),
        await asked.told(db.pause, "double"),
        await asked.told(db.paused),
        await asked.told(db.resume, "double"),
        await asked.told(db.resume, "double"),
        await asked.told(db.paused),
        await asked.told(db.pause, "nobody"),
        await asked.told(db.resume, "nobody"),
        await asked.told(db.pause, 5),
    ]


@covers("Database.failed", "Database.failed_count", "Database.replay_failed", "Database.drop_failed")
async def failing(asked: Asked) -> Any:
    db = asked.db
    await asked.put(fails=13, fails_too=13)
    told = [await asked.told(db.failed), await asked.told(db.failed_count)]
    await asked.idle(options=perco.WorkerOptions(attempts=1))
    told += [await asked.told(db.failed), await asked.told(db.failed_count), await asked.told(db.failed, limit=1)]
    told += [await asked.told(db.failed, "double", key="fails"), await asked.told(db.failed, "nobody")]
    told += [await asked.told(db.failed, key="fails"), await asked.told(db.failed, limit=0)]
    told += [await asked.told(db.replay_failed, "double", key="fails"), await asked.told(db.failed_count)]
    told += [await asked.told(db.waiting), await asked.told(db.replay_failed, "nobody")]
    await asked.put(fails=1)
    await asked.idle()
    told += [await asked.told(db.drop_failed, "double"), await asked.told(db.drop_failed, "double")]
    told += [await asked.told(db.drop_failed, None), await asked.told(db.failed_count), await asked.told(db.waiting)]
    return told


@covers(
    *("Database.worker", "WorkerHandle.statistics", "WorkerHandle.scanner_statistics", "WorkerHandle.on_run"),
    "WorkerHandle.drain",
)
async def workers(asked: Asked) -> Any:
    db, runs = asked.db, []

    async def another(**more: Any) -> None:
        async with asked.block(db.worker(**more)):
            pass

    async with asked.block(db.worker(concurrency=4, scanners=2)) as worker:
        told = [await asked.told(worker.on_run, lambda id, key, seconds: runs.append((id, key)))]
        told.append(await asked.told(another))
        await asked.put(worked=21)
        await asked.call(db.wait_idle(timeout=LONG))
        counts = await asked.call(worker.statistics())
        told.append({id: (each.commits, each.failures) for id, each in counts.items()})
        told.append(len(await asked.call(worker.scanner_statistics())))
        told += [await asked.told(worker.drain, timeout="soon"), await asked.told(worker.drain, timeout=LONG)]
        await asked.put(drained=1)
        told += [await asked.told(db.wait_idle, timeout=0.1), await asked.told(worker.drain)]
    told += [await asked.told(another, scanners=0), await asked.told(another, options=5)]
    return told, runs, await asked.get("worked", twice)


@covers("Database.statistics")
async def statistics(asked: Asked) -> Any:
    """Of this process. A client has no tablets open."""
    before = await asked.call(asked.db.statistics())
    ts = await asked.put(counted=1)
    after = await asked.call(asked.db.statistics())
    names = [field.name for field in dataclasses.fields(after)]
    return names, after.last_ts >= ts > before.last_ts - 1, after.live_transactions, after.damaged


# ------------------------------------------------------------------ what is held


@covers("Snapshot.get", "Snapshot.get_many", "Snapshot.row")
async def reading(asked: Asked) -> Any:
    await asked.put(read=1, red=2)
    async with asked.block(asked.db.snapshot()) as snap:
        return [
            await asked.told(snap.get, n, "read"),
            await asked.told(snap.get, n, "nowhere"),
            await asked.told(snap.get, n, 5),
            await asked.told(snap.get, n, "read", lock=True),
            await asked.told(snap.get, elsewhere, "read"),
            await asked.told(snap.get, grown, "read"),
            await asked.told(snap.get, n, "k" * 1000),
            await asked.told(snap.get_many, n, ["red", "nowhere", "read"]),
            await asked.told(snap.get_many, n, []),
            await asked.told(snap.get_many, n, [5]),
            await asked.told(snap.row, docs, "read", [n, title]),
            await asked.told(snap.row, docs, "nowhere"),
            await asked.told(snap.row, docs, "read", []),
            await asked.told(snap.row, sums, "read"),
            await asked.told(snap.row, docs, "read", [total]),
        ]


@covers("Snapshot.scan", "Scan.all")
async def scanning(asked: Asked) -> Any:
    await asked.put(scan_a=1, scan_b=2, scan_c=3)

    async with asked.block(asked.db.snapshot()) as snap:

        def keys(**more: Any) -> Any:
            return snap.scan(docs, columns=[n], prefix="scan_", **more).all()

        left = []
        async for row in asked.each(snap.scan(docs, columns=[n], prefix="scan_")):
            left.append((row.key, row[n]))
            if len(left) == 2:
                break
        return [
            left,
            await asked.told(keys),
            await asked.told(keys, reverse=True, limit=2),
            await asked.told(keys, start="scan_b"),
            await asked.told(keys, stop="scan_b"),
            await asked.told(keys, limit=0),
            await asked.told(keys, limit=-1),
            await asked.told(keys, lock=True),
            await asked.told(lambda: snap.scan(sums, prefix=5).all()),
            await asked.told(lambda: snap.scan(5).all()),
            await asked.told(lambda: snap.scan(docs, columns=[total]).all()),
        ]


@covers("Scan.to_batches", "Scan.to_arrow")
async def columnar(asked: Asked) -> Any:
    await asked.put(arrow_a=1, arrow_b=2, arrow_c=3)

    async def in_batches(snap: Any, **how: Any) -> Any:
        batches = snap.scan(docs, columns=[n], prefix="arrow_", **how).to_batches(key="name")
        return [row async for batch in asked.each(batches) for row in batch.to_pylist()]

    async with asked.block(asked.db.snapshot()) as snap:
        reader = snap.scan(docs, columns=[n], prefix="arrow_").to_arrow()
        if asked.front is perco.sync:
            table = reader.read_all()
        else:
            to_thread = trio.to_thread.run_sync if asked.front is perco else asyncio.to_thread
            table = await to_thread(reader.read_all)
        return [
            table.to_pylist(),
            str(table.schema),
            await asked.told(in_batches, snap),
            await asked.told(in_batches, snap, reverse=True),
            await asked.told(in_batches, snap, limit=2),
            await asked.told(lambda: snap.scan(docs, columns=[n]).to_arrow(key="n")),
            await asked.told(lambda: snap.scan(docs).to_batches(key=["a", "b"])),
        ]


@covers("Transaction.set", "Transaction.delete", "Transaction.signal", "Transaction.discard", "Transaction.commit")
async def writing(asked: Asked) -> Any:
    db = asked.db
    txn = await asked.call(db.begin())
    told = [
        await asked.told(txn.set, n, "write", 1),
        await asked.told(txn.set, title, "gone", "x"),
        await asked.told(txn.delete, title, "gone"),
        await asked.told(txn.signal, grown, "write"),
        await asked.told(txn.get, n, "write"),
        await asked.told(txn.get, title, "gone"),
        await asked.told(lambda: txn.scan(docs, columns=[n], prefix="write").all()),
        await asked.told(txn.set, n, "write", None),
        await asked.told(txn.set, n, "write", "one"),
        await asked.told(txn.set, n, 5, 1),
        await asked.told(txn.set, title, "write", "x" * (9 << 20)),
        await asked.told(txn.set, elsewhere, "write", 1),
        await asked.told(txn.set, grown, "write", 1),
        await asked.told(txn.delete, n, 5),
        await asked.told(txn.delete, elsewhere, "write"),
        await asked.told(txn.signal, n, "write"),
        await asked.told(txn.signal, grown, 5),
    ]
    told.append((await asked.told(txn.commit))[0])
    told += [await asked.told(txn.set, n, "write", 2), await asked.told(txn.get, n, "write")]
    told += [await asked.told(txn.delete, n, "write"), await asked.told(txn.signal, grown, "write")]
    told += [await asked.told(txn.commit), txn.outcome]
    await asked.idle()
    gone = await asked.call(db.begin())
    gone.set(n, "write", 3)
    told += [await asked.told(gone.discard), await asked.told(gone.discard), await asked.told(gone.commit)]
    return told, gone.outcome, await asked.get("write"), await asked.get("write", title)


@covers("Transaction.commit", "Transaction.get", "Transaction.get_many", "Transaction.row", "Transaction.scan")
async def conflicts(asked: Asked) -> Any:
    db = asked.db
    await asked.put(met=1)
    written = await asked.call(db.begin())
    locked = await asked.call(db.begin())
    checked = await asked.call(db.begin(isolation="serializable"))
    told = [
        await asked.told(written.get_many, n, ["met"]),
        await asked.told(locked.get, n, "met", lock=True),
        await asked.told(checked.row, docs, "met", [n]),
        await asked.told(lambda: checked.scan(docs, columns=[n], prefix="met").all()),
    ]
    await asked.put(met=2)
    for txn, key in (written, "met"), (locked, "other"), (checked, "another"):
        txn.set(n, key, 9)
        told += [await asked.told(txn.commit), txn.outcome, txn.commit_ts]
    return told, await asked.get("met"), await asked.get("other"), await asked.get("another")


@covers("Transaction.set", "Transaction.start_ts", "Transaction.wall", "Transaction.end")
async def limits(asked: Asked) -> Any:
    txn = await asked.call(asked.db.begin())

    async def many() -> None:
        for i in range(1000):
            txn.set(title, f"limit {i}", "x")
        await asked.call(txn.get(n, "limit"))

    told = [await asked.told(many), txn.start_ts > 0, txn.wall]
    txn.end()
    return told, await asked.told(txn.get, n, "limit")


@covers(
    *("PinnedSnapshot.get", "PinnedSnapshot.get_many", "PinnedSnapshot.row", "PinnedSnapshot.scan"),
    *("PinnedSnapshot.start_ts", "PinnedSnapshot.wall", "PinnedSnapshot.end"),
)
async def pinned_reads(asked: Asked) -> Any:
    ts = await asked.put(pinned_read=1)
    async with asked.block(asked.db.pin("reads", lease_s=LONG, ts=ts)) as pin:
        await asked.put(pinned_read=2)
        told = [
            await asked.told(pin.get, n, "pinned_read"),
            await asked.told(pin.get_many, n, ["pinned_read"]),
            await asked.told(pin.row, docs, "pinned_read", [n]),
            await asked.told(lambda: pin.scan(docs, columns=[n], prefix="pinned_read").all()),
            (pin.start_ts == ts, pin.wall),
        ]
        pin.end()
        told.append(await asked.told(pin.get, n, "pinned_read"))
    return told
