"""What is swept: transactions and observer runs, as `perco.testing.sweep` wants them.

Writers append their name to lists, and all of a transaction's lists shall stay equal: so one sees at the end who
committed, in which order, and that none of it is missing or there twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

import trio

import perco
from perco.check.check import CheckOptions, check
from perco.database.database import Database
from perco.database.inside import inside
from perco.errors import CommitUnknown, SnapshotTooOld, Unavailable, WriteUnknown
from perco.notify.options import WorkerOptions
from perco.protocol.reads import Isolation
from perco.storage import DATA, NOTIFY, PROTOCOL_GROUPS, ROLLBACK, TRACE, TS_MAX, WRITE, ScanQuery, ScanRequest
from perco.testing.sweep import Scenario, bare, observe
from perco.txn.inside import engine_of
from perco.txn.transaction import Transaction
from tests.support.places import local_of, rows_of
from tests.sweep.viewing import VIEWS

T = TypeVar("T")
_DAY_S = 86400.0
LONG = "x" * 300  # does not fit into a write record: it lies in the data group


class World:
    """Lists in three tablets, what observers make of them in two, and a count of runs by change."""

    def __init__(self, keep: perco.Keep | None = None, *, renamed: bool = False) -> None:
        # Both keep logs, which `check` compares with the records (E1).
        table: Any = {"name": "rolls", "was": "lists"} if renamed else {"name": "lists"}
        watched: Any = {"name": "seen", "was": "watched"} if renamed else {"name": "watched"}
        self.lists = perco.Table(**table, key=perco.TEXT, splits=["h", "p"], changes=True)
        self.derived = perco.Table("derived", key=perco.TEXT, splits=["k"], changes=True)
        self.names = self.lists.column("names", perco.MSGPACK)
        self.gone = self.lists.column("gone", perco.TEXT)
        self.watched = self.lists.column(codec=perco.MSGPACK, **watched)
        self.length = self.derived.column("length", perco.INT64)
        self.twice = self.derived.column("twice", perco.INT64)
        self.last = self.lists.column("last", perco.TEXT)
        self.handled = self.derived.column("handled", perco.MSGPACK)
        self.grown = self.derived.signal("grown")
        self.schema = perco.Schema(self.lists, self.derived, keep=keep)
        self.fails = False

    async def note(self, txn: Transaction, change: perco.Change[str, Any], id: str) -> None:
        """In the run's own transaction: which changes an observer has handled."""
        key = f"{id}/{change.key}"
        txn.set(self.handled, key, [*(await txn.get(self.handled, key) or ()), change.commit_ts])

    def observe_length(self, id: str = "length", was: tuple[str, ...] = (), batch: int = 1) -> None:
        @self.schema.observe(self.watched, id=id, was=was, batch=batch)
        async def length(txn: Transaction, change: perco.Change[str, Any]) -> None:
            if self.fails:
                raise RuntimeError("told to fail")
            txn.set(self.length, change.key, len(change.value or ()))
            await self.note(txn, change, "length")

    def observe_twice(self, batch: int = 1) -> None:
        @self.schema.observe(self.length, id="twice", batch=batch)
        async def twice(txn: Transaction, change: perco.Change[str, int]) -> None:
            txn.set(self.twice, change.key, 2 * (change.value or 0))
            await self.note(txn, change, "twice")

    def observe_last(self, batch: int = 1) -> None:
        @self.schema.observe(self.watched, id="last", batch=batch)
        async def last(txn: Transaction, change: perco.Change[str, Any]) -> None:
            txn.set(self.last, change.key, change.value[-1] if change.value else "")
            await self.note(txn, change, "last")

    def observe_grown(self) -> None:
        @self.schema.observe(self.grown, id="grown")
        async def grown(txn: Transaction, change: perco.Change[str, None]) -> None:
            """Stores the number of names, as it is now; it leads on to another hub once."""
            names = await txn.get(self.names, "a") or ()
            txn.set(self.length, change.key, len(names))
            if change.key == "m":
                txn.signal(self.grown, f"+{change.key}")


async def run(
    db: Database, once: Callable[[Transaction], Awaitable[T]], *, bound: bool, isolation: Isolation = "snapshot"
) -> T:
    """`bound`: the oracle's bound is a step too, so there may be no timestamp for a moment (O1); then once more."""
    while True:
        try:
            return await db.options(isolation=isolation).run(once)
        except Unavailable as error:
            if not bound or error.commit_ts:
                raise


async def drawn(db: Database) -> None:
    """Until the process has timestamps to draw from."""
    ts = 0
    while not ts:
        with contextlib.suppress(Unavailable):
            ts = await inside(db).oracle.draw()


async def vacuum(db: Database) -> None:
    """One that may be cut short: the next one goes on."""
    with contextlib.suppress(Unavailable, WriteUnknown):
        await db.vacuum()


async def without_waste(db: Database) -> dict[str, int]:
    """A vacuum leaves nothing to the next one, nor anything that `check` calls waste; returns how many cells there are,
    by group."""
    await db.vacuum()
    again = await db.vacuum()
    assert not again.removed.cells, f"the one before left {again.removed}"
    assert not again.blocked, "G3: no observer waits"
    result = await check(local_of(db).store, ts=inside(db).oracle.last, options=CheckOptions(pause_s=0.0))
    assert (result.clean, result.waste) == (True, 0)
    tablets = [tablet for tablet in rows_of(db).tablets() if tablet.table in db.schema.tables]
    return {group: sum(tablet.entries(group) for tablet in tablets) for group in PROTOCOL_GROUPS}


class Writing(Scenario):
    """One transaction over several cells; those that come later write them as well."""

    keys: ClassVar[tuple[str, ...]] = ()
    deletes: ClassVar[tuple[str, ...]] = ()
    padding: ClassVar[str] = ""
    # How a later process meets the leftovers: "read", "scan", "changes", "write"; else it sweeps.
    meets: ClassVar[str] = ""
    moves_on: ClassVar[bool] = True  # and writes itself

    keep: ClassVar[perco.Keep | None] = None

    def __init__(self) -> None:
        self.world = World(self.keep)
        self.schema = self.world.schema
        self.told: dict[str, str] = {}  # by name of the writer: committed, unknown; others were told nothing
        self.tokens: dict[str, str] = {}
        self.seen: list[tuple[int, dict[str, Any]]] = []  # by snapshot
        self._later = 0

    async def prepare(self, db: Database) -> None:
        async with db.transaction() as txn:
            for key in self.keys:
                txn.set(self.world.names, key, [self.padding, "old"])
            for key in self.deletes:
                txn.set(self.world.gone, key, "old")

    async def append(self, txn: Transaction, name: str, *, delete: bool) -> None:
        world = self.world
        for key in self.keys:
            txn.set(world.names, key, [*(await txn.get(world.names, key) or ()), name])
        for key in self.deletes:
            if delete:
                txn.delete(world.gone, key)
            else:
                txn.set(world.gone, key, (await txn.get(world.gone, key) or "") + name)

    async def write(self, db: Database, name: str, *, delete: bool) -> None:
        async def once(txn: Transaction) -> None:
            await self.append(txn, name, delete=delete)

        try:
            await run(db, once, bound=self.vacuums)
        except CommitUnknown as unknown:
            self.told[name] = "unknown"
            self.tokens[name] = unknown.token
        else:
            self.told[name] = "committed"

    async def first(self, db: Database) -> None:
        await self.write(db, "first", delete=True)

    async def meet(self, db: Database) -> None:
        if self.meets == "write":
            await self.move_on(db)
        elif self.meets == "changes":
            stream, found = db.changes(self.world.lists, since=0), dict.fromkeys(self.keys)
            async for changes in stream:
                for row in changes.rows:
                    before, after = row.before.get("names"), row.after.get("names")
                    assert before == found[row.key], f"E3: {row.key} was {found[row.key]}, and is {before} before it"
                    found[row.key] = after
                assert len(set(map(str, found.values()))) == 1, f"E3: half of a transaction: {found}"
            self.seen.append((stream.frontier, found))
        elif self.meets:
            async with db.snapshot() as snap:
                if self.meets == "scan":
                    found = {row.key: row[self.world.names] async for row in snap.scan(self.world.lists)}
                    found = {key: found.get(key) for key in self.keys}
                else:
                    found = await snap.get_many(self.world.names, self.keys)
                self.seen.append((snap.start_ts, found))

    async def later(self, db: Database) -> None:
        if self.moves_on:
            await self.move_on(db)

    async def move_on(self, db: Database) -> None:
        self._later += 1
        await self.write(db, f"later {self._later}", delete=False)

    async def verify(self, db: Database) -> None:
        for ts, found in self.seen:
            async with db.snapshot(ts=ts) as snap:
                assert found == await snap.get_many(self.world.names, self.keys), f"T2, T9: at {ts} it read {found}"
        async with db.snapshot() as snap:
            lists = await snap.get_many(self.world.names, self.keys)
            assert len(set(lists.values())) == 1, f"T1: not all or nothing: {lists}"
            names = list(lists[self.keys[0]] or ())
            assert names[:2] == [self.padding, "old"], f"lost: {names}"
            assert len(set(names)) == len(names), f"T11: written twice: {names}"
            for name, told in self.told.items():
                assert told != "committed" or name in names, f"{name} was told that it committed: {names}"
            for name, token in self.tokens.items():
                try:
                    assert bool(await db.outcome(token)) == (name in names), f"T4: the outcome of {name}"
                except CommitUnknown as unknown:
                    if not (self.vacuums and unknown.for_good):  # its leftovers may be collected
                        raise
            gone: str | None = "old"
            for name in names[2:]:
                gone = None if name == "first" else (gone or "") + name
            for key in self.deletes:
                assert await snap.get(self.world.gone, key) == gone, f"{key}: not {gone!r}"


class OneTablet(Writing):
    name = "one tablet"
    keys = ("a", "b")


class TwoTablets(Writing):
    name = "two tablets"
    keys = ("a", "q", "r")


class TwoTabletsBackwards(TwoTablets):
    """The primary's mutation is the last to arrive."""

    name = "two tablets, backwards"
    backwards = True


class Swept(TwoTabletsBackwards):
    """No process moves on: the store has only the leftovers of the dead one."""

    name = "two tablets, swept"
    moves_on = False


class Read(Swept):
    name = "two tablets, read"
    meets = "read"


class Scanned(Swept):
    name = "two tablets, scanned"
    meets = "scan"


class Followed(TwoTabletsBackwards):
    """A later process first reads the changes, up to a frontier (E2, E3); then it moves on."""

    name = "two tablets, followed"
    meets = "changes"


class WrittenOver(TwoTabletsBackwards):
    name = "two tablets, written"
    meets = "write"


class TwoRows(Writing):
    """Each row goes by itself."""

    name = "two rows, no groups"
    keys = ("a", "b")
    groups = False


class OneStep(OneTablet):
    """No locks: a commit in one step is there or is not (C1)."""

    name = "one step"
    one_step = True


class LastAgent(TwoTablets):
    """One tablet is prewritten, then the primary's commits in one step (C7)."""

    name = "last agent"
    one_step = True


class LongValues(Writing):
    name = "three tablets, long"
    keys = ("a", "i", "q")
    padding = LONG
    backwards = True


class Delete(Writing):
    name = "a delete"
    keys = ("a", "q")
    deletes = ("b", "z")


class OneCell(Writing):
    name = "one cell"
    keys = ("a",)


class Vacuumed(Writing):
    """Old versions go while a snapshot is read, and before and after others write; a vacuum may be the first to meet
    what the dead left (G1 - G4). The snapshot's timestamp is answered later as it was then, or not at all (G5)."""

    name = "vacuum"
    vacuums = True
    keys = ("a", "q")
    deletes = ("b",)
    padding = LONG
    keep = perco.Keep(seconds=0)

    def __init__(self) -> None:
        super().__init__()
        self.was: tuple[int, list[Any]] | None = None  # a timestamp, and what was read at it

    async def prepare(self, db: Database) -> None:
        for _ in range(2):
            await super().prepare(db)

    async def append(self, txn: Transaction, name: str, *, delete: bool) -> None:
        """The primary is what is deleted: its record is gone as soon as it can be (G2)."""
        if delete:
            txn.delete(self.world.gone, "b")
        await super().append(txn, name, delete=delete)

    async def first(self, db: Database) -> None:
        await drawn(db)
        async with db.snapshot() as snap:
            before = await self.read(snap)
            self.was = snap.start_ts, before
            await self.write(db, "first", delete=True)
            await vacuum(db)
            assert await self.read(snap) == before, "G1"
        await vacuum(db)

    async def read(self, snap: perco.Snapshot) -> list[Any]:
        found = await snap.get_many(self.world.names, self.keys)
        return [*found.values(), await snap.get(self.world.gone, "b")]

    async def meet(self, db: Database) -> None:
        await vacuum(db)

    async def later(self, db: Database) -> None:
        await self.move_on(db)
        await vacuum(db)

    async def verify(self, db: Database) -> None:
        await super().verify(db)
        if self.was is not None:
            ts, before = self.was
            with contextlib.suppress(SnapshotTooOld):
                async with db.snapshot(ts=ts) as old:
                    assert await self.read(old) == before, "G2, G5: versions have gone, and nobody knows"
        async with db.snapshot() as snap:
            before = await self.read(snap)
        left = await without_waste(db)
        async with db.snapshot() as snap:
            assert await self.read(snap) == before, "G3"
        cells = len(self.keys) + (before[-1] is not None)
        assert (left[WRITE], left[DATA]) == (cells, len(self.keys)), "G3"
        assert not left[ROLLBACK], "G4"


class VacuumedLastAgent(Vacuumed):
    """Here what the dead left is settled before: the vacuum meets the markers of that (G4)."""

    name = "vacuum, last agent"
    one_step = True

    async def meet(self, db: Database) -> None:
        pass


class VacuumedPinned(Vacuumed):
    """The versions that a pin holds can be read as long as it stands, even if processes die meanwhile (G1, T15)."""

    name = "vacuum, pinned"

    async def first(self, db: Database) -> None:
        await drawn(db)
        with contextlib.suppress(perco.StoreError):
            async with db.pin("nightly", lease_s=_DAY_S, keep=True) as pin:
                assert await self.read(pin) == self.prepared
                await pin.renew()
        await super().first(db)

    @property
    def prepared(self) -> list[Any]:
        return [*((self.padding, "old") for _ in self.keys), "old"]

    async def verify(self, db: Database) -> None:
        for pin in await db.pins():
            async with db.snapshot(ts=pin.ts) as pinned:
                assert await self.read(pinned) == self.prepared, "G1: a pinned version has gone"
            assert await db.drop_pin(pin.name)
        await super().verify(db)


class Dropped(Writing):
    """A column is dropped after a transaction whose primary may lie in it, and the vacuum removes its cells. A later
    process declares the column again, as another one, and drops it if the first process has not (N17)."""

    name = "a dropped column"
    vacuums = True
    keys = ("a", "q")
    padding = LONG
    number = 5  # of the column

    def __init__(self) -> None:
        super().__init__()
        self.doomed = self.world.lists.column("doomed", perco.MSGPACK)

    async def prepare(self, db: Database) -> None:
        await super().prepare(db)
        assert inside(db).catalogue.tables["lists"].columns["doomed"].number == self.number
        async with db.transaction() as txn:
            for key in ("b", "z"):
                txn.set(self.doomed, key, [LONG, "old"])

    async def append(self, txn: Transaction, name: str, *, delete: bool) -> None:
        if "doomed" in engine_of(txn).known.catalogue.tables["lists"].columns:
            txn.set(self.doomed, "b", [*(await txn.get(self.doomed, "b") or ()), name])
        await super().append(txn, name, delete=delete)

    async def drop(self, db: Database) -> None:
        found = inside(db).catalogue.tables["lists"].columns.get("doomed")
        if found is not None and found.number == self.number:
            with contextlib.suppress(Unavailable, WriteUnknown):
                await db.drop_column("lists", "doomed")
        await vacuum(db)

    async def first(self, db: Database) -> None:
        await super().first(db)
        await self.drop(db)

    async def meet(self, db: Database) -> None:
        await drawn(db)
        await self.drop(db)

    async def later(self, db: Database) -> None:
        await super().later(db)
        await self.drop(db)

    async def verify(self, db: Database) -> None:
        while self.number not in inside(db).catalogue.tables["lists"].gone:
            await self.drop(db)
        await super().verify(db)
        await without_waste(db)
        entry = inside(db).catalogue.tables["lists"]
        assert entry.gone[self.number].clean, "N17"
        for tablet in rows_of(db).tablets():
            for group in PROTOCOL_GROUPS if tablet.table == "lists" else ():
                request = ScanRequest("lists", tablet.start, None, (ScanQuery(group, None, 0, TS_MAX, 1 << 16),))
                columns = {column >> 16 for _, [cells] in tablet.scan(request).rows for column, _, _ in cells}
                assert self.number not in columns, f"N17: a cell in {group}"
        if "doomed" in entry.columns:  # another one, which a later process has declared
            async with db.snapshot() as snap:
                names = await snap.get(self.doomed, "b") or []
                assert not {"old", "first"} & set(names), "N17: its number was given again"


class DroppedLastAgent(Dropped):
    """The cells of the other tablets are prewritten, then the primary's commits in one step (C7)."""

    name = "a dropped column, last agent"
    one_step = True


class Undone(Scenario):
    """A cell that was put together with one that stays, and then deleted and removed, does not come back: not by a late
    mutation, not after a restart (T13)."""

    name = "vacuum, undone"
    vacuums = True

    def __init__(self) -> None:
        self.world = World(perco.Keep(seconds=0))
        self.schema = self.world.schema
        self.was_put = self.was_deleted = False  # as they were told

    async def put(self, db: Database) -> None:
        async def once(txn: Transaction) -> None:
            for key in ("a", "q"):
                txn.set(self.world.gone, key, "put")

        with contextlib.suppress(CommitUnknown):
            await run(db, once, bound=True)
            self.was_put = True

    async def delete(self, db: Database) -> None:
        found: str | None = None

        async def once(txn: Transaction) -> None:
            nonlocal found
            found = await txn.get(self.world.gone, "q")
            assert found is None or not self.was_deleted, "T13: it came back"
            if found is not None:
                txn.delete(self.world.gone, "q")

        with contextlib.suppress(CommitUnknown):
            await run(db, once, bound=True)
            self.was_deleted |= found is not None or self.was_put  # if not by this one, by another

    async def first(self, db: Database) -> None:
        await self.put(db)
        await self.delete(db)
        await vacuum(db)

    async def meet(self, db: Database) -> None:
        await drawn(db)  # something may arrive before the vacuum that raises the floor
        await vacuum(db)

    async def later(self, db: Database) -> None:
        await self.delete(db)
        await vacuum(db)

    async def verify(self, db: Database) -> None:
        async with db.snapshot() as snap:
            found = await snap.get_many(self.world.gone, ("a", "q"))
        assert found["q"] is None, "T13: it came back"
        assert found["a"] == "put" or not self.was_put, f"lost: {found}"
        left = await without_waste(db)
        assert (left[WRITE], left[ROLLBACK]) == (found["a"] is not None, 0), "G3, G4"


class Serializable(Scenario):
    """Of two that are on call one may leave, and if the other one is not there, calls it back first (T14)."""

    name = "serializable"
    keys: ClassVar[tuple[str, str]] = ("a", "q")

    def __init__(self) -> None:
        self.world = World(perco.Keep(seconds=0))
        self.schema = self.world.schema
        self.left = 0  # how often, as they were told
        self._later = 0

    async def prepare(self, db: Database) -> None:
        async with db.transaction() as txn:
            for key in self.keys:
                txn.set(self.world.gone, key, "on call")

    async def leave(self, db: Database, who: str, other: str) -> None:
        async def once(txn: Transaction) -> None:
            found = await txn.get_many(self.world.gone, self.keys)
            assert any(found.values()), "T14: write skew"
            if found[other] is None:
                txn.set(self.world.gone, other, "called back")
            txn.delete(self.world.gone, who)

        with contextlib.suppress(CommitUnknown):
            await run(db, once, bound=self.vacuums, isolation="serializable")
            self.left += 1

    async def first(self, db: Database) -> None:
        await self.leave(db, *self.keys)

    async def later(self, db: Database) -> None:
        self._later += 1
        await self.leave(db, *(self.keys if self._later % 2 == 0 else reversed(self.keys)))

    async def verify(self, db: Database) -> None:
        async with db.snapshot() as snap:
            found = await snap.get_many(self.world.gone, self.keys)
        stayed = [key for key, value in found.items() if value is not None]
        assert len(stayed) in ((1,) if self.left else (1, 2)), f"T14: {found}, and {self.left} times somebody left"


class ReadLocked(Scenario):
    """One reads the question under a lock and writes which it answers; another reads the answer and writes which it
    asks after. The later one has seen the other (T14)."""

    name = "read locks"
    backwards = True

    def __init__(self) -> None:
        self.world = World(perco.Keep(seconds=0))
        self.schema = self.world.schema
        self.asks = False  # the first one does; before that it answers

    async def prepare(self, db: Database) -> None:
        await self.ask(db)

    async def ask(self, db: Database) -> None:
        async def once(txn: Transaction) -> None:
            answer = await txn.row(self.world.lists, "a", [self.world.names])
            txn.set(self.world.names, "q", answer.commit_ts(self.world.names))

        with contextlib.suppress(CommitUnknown):
            await run(db, once, bound=self.vacuums)

    async def answer(self, db: Database) -> None:
        async def once(txn: Transaction) -> None:
            question = await txn.row(self.world.lists, "q", [self.world.names], lock=True)
            txn.set(self.world.names, "a", question.commit_ts(self.world.names))

        with contextlib.suppress(CommitUnknown):
            await run(db, once, bound=self.vacuums)

    async def look(self, db: Database) -> None:
        column = self.world.names
        async with db.snapshot() as snap:
            answer, question = [await snap.row(self.world.lists, key, [column]) for key in "aq"]
        earlier, later = sorted((answer, question), key=lambda row: row.commit_ts(column))
        assert later[column] == earlier.commit_ts(column), f"T14: {later} came after {earlier} and had not seen it"

    async def first(self, db: Database) -> None:
        await self.answer(db)
        self.asks = True
        await self.ask(db)

    async def meet(self, db: Database) -> None:
        """Do the part that the first process does not do."""
        await (self.answer if self.asks else self.ask)(db)
        await self.look(db)

    async def later(self, db: Database) -> None:
        await self.look(db)
        await (self.answer if self.asks else self.ask)(db)

    async def verify(self, db: Database) -> None:
        await self.look(db)


class ReadLockedVacuumed(ReadLocked):
    """Traces of read locks go, and the markers of those that the dead left (G4)."""

    name = "read locks, vacuum"
    vacuums = True

    async def first(self, db: Database) -> None:
        await super().first(db)
        await vacuum(db)

    async def meet(self, db: Database) -> None:
        await drawn(db)
        await vacuum(db)
        await self.look(db)

    async def verify(self, db: Database) -> None:
        await super().verify(db)
        left = await without_waste(db)
        await super().verify(db)
        assert left[WRITE] in (1, 2), "G3"  # nobody may have answered
        assert (left[TRACE], left[ROLLBACK]) == (0, 0), "G4"


class Observing(Scenario):
    """Changes wait for observers; a later process makes another change."""

    keys: ClassVar[tuple[str, ...]] = ("a",)
    observers: ClassVar[tuple[str, ...]] = ("length",)
    loads: ClassVar[bool] = False  # whether the first process makes the changes as well
    more: ClassVar[dict[str, Any]] = {}  # options of the observers
    keep: ClassVar[perco.Keep | None] = None

    def __init__(self) -> None:
        self.world = World(self.keep)
        for id in self.observers:
            getattr(self.world, f"observe_{id}")(**self.more)
        self.schema = self.world.schema
        self.acknowledged: list[str] = []
        self._later = 0

    async def load(self, db: Database, name: str) -> None:
        async def once(txn: Transaction) -> None:
            for key in self.keys:
                txn.set(self.world.watched, key, [*(await txn.get(self.world.watched, key) or ()), name])

        try:
            await run(db, once, bound=self.vacuums)
        except CommitUnknown:
            return
        self.acknowledged.append(name)

    async def prepare(self, db: Database) -> None:
        if not self.loads:
            await self.load(db, "old")

    async def first(self, db: Database) -> None:
        if self.loads:
            await self.load(db, "first")
        await observe(db)

    async def later(self, db: Database) -> None:
        self._later += 1
        await self.load(db, f"later {self._later}")

    async def verify(self, db: Database) -> None:
        world = self.world
        async with db.snapshot() as snap:
            lists = await snap.get_many(world.watched, self.keys)
            assert len(set(lists.values())) == 1, f"T1: not all or nothing: {lists}"
            names = list(lists[self.keys[0]] or ())
            assert len(set(names)) == len(names), f"T11: written twice: {names}"
            assert set(self.acknowledged) <= set(names), f"lost: {self.acknowledged}, and found {names}"
            for key in self.keys:
                expected = {"length": len(names), "twice": 2 * len(names), "last": names[-1]}
                for id in self.observers:
                    column: Any = getattr(world, id)
                    found = await snap.get(column, key)
                    assert found == expected[id], f"N1: {id} of {key} is {found}, not {expected[id]}"
                    handled = await snap.get(world.handled, f"{id}/{key}") or []
                    assert len(set(handled)) == len(handled), f"N3: {id} committed twice for a change: {handled}"
        assert await db.is_idle(), "N7"


class ObserverRun(Observing):
    """The ack is the primary; the run's writes lie in another tablet."""

    name = "observer run"


class ObserverLastAgent(ObserverRun):
    name = "observer, last agent"
    one_step = True


class ObserverChain(Observing):
    name = "chain of two"
    observers = ("length", "twice")


class Batched(Observing):
    """The runs of an observer on two rows share transactions (N20)."""

    name = "runs that share transactions"
    keys = ("a", "b")
    more: ClassVar[dict[str, Any]] = {"batch": 2}


class BatchedInOneStep(Batched):
    name = "runs that share transactions, in one step"
    observers = ("last",)
    one_step = True


class VacuumedObserver(Observing):
    """A deleted cell stays until its observer has run; of an ack the newest stays (G3, G4)."""

    name = "vacuum, observer"
    vacuums = True
    keep = perco.Keep(seconds=0)

    async def prepare(self, db: Database) -> None:
        await super().prepare(db)
        async with db.transaction() as txn:
            txn.set(self.world.watched, "q", ["gone"])
        async with db.transaction() as txn:
            txn.delete(self.world.watched, "q")

    async def first(self, db: Database) -> None:
        await vacuum(db)
        await observe(db)
        await vacuum(db)

    async def meet(self, db: Database) -> None:
        await vacuum(db)

    async def later(self, db: Database) -> None:
        await super().later(db)
        await vacuum(db)

    async def verify(self, db: Database) -> None:
        await super().verify(db)
        async with db.snapshot() as snap:
            assert await snap.get(self.world.length, "q") == 0, "G3: its observer was told of the end"
            before = [await snap.get(self.world.length, key) for key in "aq"]
        left = await without_waste(db)
        async with db.snapshot() as snap:
            assert [await snap.get(self.world.length, key) for key in "aq"] == before, "G3"
        # The watched cell and its ack, of one key; the derived cell, and the notes of it, of both.
        assert (left[WRITE], left[NOTIFY], left[ROLLBACK]) == (2 + 2 * 2, 0, 0), "G3, G4"


class Renamed(Observing):
    """An older program made the change; a newer one, which calls the table, the column and the observer otherwise, runs
    the observer for it, and makes another one (N18)."""

    name = "renamed"

    def __init__(self) -> None:
        super().__init__()
        self.old, self.world = self.world, World(renamed=True)
        self.world.observe_length("size", ("length",))
        self.before, self.schema = self.old.schema, self.world.schema

    async def prepare(self, db: Database) -> None:
        new, self.world = self.world, self.old
        await super().prepare(db)
        self.world = new

    async def verify(self, db: Database) -> None:
        await super().verify(db)
        catalogue = inside(db).catalogue
        assert list(catalogue.observers) == ["size"], "N18"
        assert (catalogue.title("lists"), "seen" in catalogue.tables["lists"].columns) == ("rolls", True), "N18"


class TwoObservers(Observing):
    name = "two on one column"
    observers = ("length", "last")


class Load(Observing):
    """The loader dies before or after the commit point: the locks are the pending notifications (N1)."""

    name = "load and observe"
    keys = ("a", "q")
    loads = True
    backwards = True


class Signalling(Scenario):
    """Transactions raise a signal, in a tablet where they write nothing; a run of its observer raises another (N5)."""

    name = "signals"
    backwards = True
    writes: ClassVar[bool] = True
    hub: ClassVar[str] = "m"  # not in the tablet of its own "+m"

    def __init__(self) -> None:
        self.world = World()
        self.world.observe_grown()
        self.schema = self.world.schema
        self.acknowledged: list[str] = []
        self._later = 0

    async def write(self, db: Database, name: str) -> None:
        async def once(txn: Transaction) -> None:
            if self.writes:
                txn.set(self.world.names, "a", [*(await txn.get(self.world.names, "a") or ()), name])
            txn.signal(self.world.grown, self.hub)
            txn.signal(self.world.grown, f"a {name}")

        try:
            await db.run(once)
        except CommitUnknown:
            return
        self.acknowledged.append(name)

    async def prepare(self, db: Database) -> None:
        async with db.transaction() as txn:
            txn.set(self.world.names, "a", ["old"])

    async def first(self, db: Database) -> None:
        await self.write(db, "first")
        await observe(db)

    async def later(self, db: Database) -> None:
        self._later += 1
        await self.write(db, f"later {self._later}")

    async def verify(self, db: Database) -> None:
        world = self.world
        async with db.snapshot() as snap:
            names = await snap.get(world.names, "a") or []
            assert len(set(names)) == len(names), f"T11: written twice: {names}"
            for name in self.acknowledged:
                assert not self.writes or name in names, f"lost: {name}"
                for row in (self.hub, f"+{self.hub}", f"a {name}"):
                    assert await snap.get(world.length, row), f"N5: nobody has run for the signal of {row}"
            async for row in snap.scan(world.derived, prefix="a ", columns=[world.length]):
                name = row.key.removeprefix("a ")
                assert not self.writes or name in names, f"N5: {name} was never committed, and its signal was run for"
            for row in (self.hub, f"+{self.hub}"):
                if self.acknowledged:
                    assert await snap.get(world.length, row) == len(names), f"N5: {row} has not seen {names}"
        assert await db.is_idle(), "N7"


class OnlySignalling(Signalling):
    """They write nothing: their primaries are bare."""

    name = "signals alone"
    writes = False


class SignallingInOneStep(OnlySignalling):
    name = "signals, last agent"
    one_step = True


class GivenUp(Observing):
    """The first process gives up all changes at once, old ones and those that it loads; a later one replays them
    (N6)."""

    name = "given up, replayed"
    loads = True

    async def first(self, db: Database) -> None:
        self.world.fails = True
        await self.load(db, "first")
        async with db.worker(options=WorkerOptions(concurrency=2, scanners=1, attempts=1, outputs=False)):
            await db.wait_idle(timeout=3600)
        await db.replay_failed()
        self.world.fails = False
        await observe(db)

    async def meet(self, db: Database) -> None:
        self.world.fails = False

    async def later(self, db: Database) -> None:
        await db.replay_failed()
        await super().later(db)

    async def verify(self, db: Database) -> None:
        self.world.fails = False
        await db.replay_failed()
        await observe(db)
        assert await db.failed_count() == 0, "N6: it has failed, and nothing fails any more"
        await super().verify(db)


class GivenUpInOneStep(GivenUp):
    name = "given up, one step"
    one_step = True


class Growing(Scenario):
    """A newer program comes up: it has a higher version of an observer, and one more (N10)."""

    name = "a newer program"
    keys: ClassVar[tuple[str, ...]] = ("a", "q")
    changed: ClassVar[str] = "q"

    def __init__(self) -> None:
        world = self.world = World()
        self.before = world.schema
        self.schema = perco.Schema(world.lists, world.derived)
        world.observe_length()

        @self.schema.observe(world.watched, id="length", version=2)
        async def longer(txn: Transaction, change: perco.Change[str, Any]) -> None:
            txn.set(world.length, change.key, 1000 + len(change.value or ()))
            await world.note(txn, change, "length 2")

        @self.schema.observe(world.watched, id="last")
        async def last(txn: Transaction, change: perco.Change[str, Any]) -> None:
            txn.set(world.last, change.key, change.value[-1] if change.value else "")
            await world.note(txn, change, "last")

    async def load(self, db: Database, name: str, *keys: str) -> None:
        async def once(txn: Transaction) -> None:
            for key in keys:
                txn.set(self.world.watched, key, [*(await txn.get(self.world.watched, key) or ()), name])

        with contextlib.suppress(CommitUnknown):
            await db.run(once)

    async def prepare(self, db: Database) -> None:
        await self.load(db, "old", *self.keys)
        async with db.worker(options=WorkerOptions(concurrency=2, scanners=1)) as worker:
            while worker.statistics()["length"].commits < len(self.keys):  # noqa: ASYNC110
                await trio.sleep(0.01)
        await self.load(db, "older", self.changed)  # nobody has run for this

    async def first(self, db: Database) -> None:
        await observe(db)

    async def verify(self, db: Database) -> None:
        world = self.world
        assert not inside(db).catalogue.unready(), "N10"
        assert await db.is_idle(), "N7"
        async with db.snapshot() as snap:
            for key in self.keys:
                names = await snap.get(world.watched, key) or []
                assert await snap.get(world.length, key) == 1000 + len(names), f"N10: {key} was not run for again"
                assert await snap.get(world.last, key) == names[-1], f"N10: the new observer was not told of {key}"
                for id in ("length", "length 2", "last"):
                    handled = await snap.get(world.handled, f"{id}/{key}") or []
                    assert len(set(handled)) == len(handled), f"N3: {id} committed twice for a change: {handled}"


class GrowingInOneStep(Growing):
    name = "a newer program, one step"
    one_step = True


_OVER_TABLETS: list[type[Scenario]] = [
    OneCell,
    OneTablet,
    OneStep,
    LastAgent,
    TwoTablets,
    TwoTabletsBackwards,
    Swept,
    Read,
    Scanned,
    Followed,
    WrittenOver,
    TwoRows,
    LongValues,
    Delete,
    Serializable,
    ReadLocked,
    ReadLockedVacuumed,
    Vacuumed,
    VacuumedLastAgent,
    VacuumedPinned,
    Dropped,
    DroppedLastAgent,
    Undone,
    ObserverRun,
    ObserverLastAgent,
    ObserverChain,
    Batched,
    BatchedInOneStep,
    VacuumedObserver,
    Renamed,
    TwoObservers,
    Load,
    Signalling,
    OnlySignalling,
    SignallingInOneStep,
    GivenUp,
    GivenUpInOneStep,
    Growing,
    GrowingInOneStep,
]

# Transactions that commit in one step over tablets commit in two phases over a store without any capability.
# Over such a store, no runs share transactions.
_BARE = [bare(make) for make in _OVER_TABLETS if make.groups and not make.one_step and not issubclass(make, Batched)]

SCENARIOS: list[type[Scenario]] = [*_OVER_TABLETS, *_BARE, *VIEWS, bare(VIEWS[0])]
