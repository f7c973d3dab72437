"""The inputs of a job that have taken effect: a row for each, written in the input's own transaction.

Spark runs a task again if its Python worker has died, and may run it twice at once if it is slow. The store decides
which run counts: an input's transaction reads the input's row in the ledger, and writes it. If two do so at once, one
conflicts (T1, snapshot isolation's first committer), runs again, and finds that the input has been taken.

    row JOB                name, run    the job, while it is open
    row JOB + input key    run          an input that has taken effect, in that run of the job

Two tablets in one transaction cost two rounds of syncs, and most loaders write to one tablet. If the loader writes a
row under the input's own key, the mark can lie *beside* the loader's cells: in a hidden column of that row, next to the
marks of other jobs. Then the mark costs one more cell, in the same step.

    row KEY                _taken       the runs of jobs that have taken the input of this key

A job that is acknowledged is closed first, and its inputs are removed after that. A task may outlive its job: those of
its transactions that began before see their input's mark, or conflict with its removal; later ones find no job. A job
that is opened again under the same name is another *run*: a task of the earlier run finds that run closed, and its
marks do not count.

Micro-batches of a stream are numbered, and Spark runs the last one again if it does not know whether it has ended.
So a job may have a *batch*: an open run is that of this batch; if none is open, the batch has taken effect.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any, Final, TypeVar

import trio

import perco
from perco.database.database import Database
from perco.errors import CommitUnknown, PercoError, UsageError
from perco.txn.inside import scan_between

T = TypeVar("T")

_JOB_BYTES: Final = 8
_INPUT_BYTES: Final = 16
_RUN_BYTES: Final = 12
_REMOVED: Final = 1000  # inputs in one transaction
_NAME_MAX: Final = 200

_UNKNOWN_MAX: Final = 10  # commits of one transaction whose outcome is unknown
_RUNS_MAX: Final = 64  # open jobs that have taken one key
TAKEN: Final = "_taken"

LEDGER: Final = perco.Table("perco.spark.ledger", keep=perco.Keep(seconds=0))
NAME: Final = LEDGER.column("name", perco.TEXT)
RUN: Final = LEDGER.column("run", perco.BYTES)
CLOSED: Final = LEDGER.column("closed", perco.BYTES)  # the run of a job that is closed, until all its marks are gone
BESIDE: Final = LEDGER.column("beside", perco.TEXT)  # of a job: the table that its marks are in; "": here
BATCH: Final = LEDGER.column("batch", perco.INT64)  # of a job that has batches: the last that was begun
INTO: Final = LEDGER.column("into", perco.TEXT)  # of a job that has batches: the table that they are written to

Mark = tuple[perco.Column[Any, bytes], Any]  # the cell that says whether an input has been taken: a column, and a key


class JobClosed(PercoError):
    """The job has been acknowledged: this task is left over from it, and does nothing."""


class KeyNotUnique(PercoError):
    """Several rows of one load or write have the same key, so only one of them has been taken. It stays.

    Attributes: `keys`, some of the keys, as text, with their numbers of rows; `loaded`, the result of the load; None
    for a write.
    """

    keys: dict[str, int]
    loaded: Any

    def __init__(self, message: str, keys: dict[str, int], loaded: Any = None) -> None:
        self.keys, self.loaded = keys, loaded
        super().__init__(message)


def row_of(job: str) -> bytes:
    if not isinstance(job, str) or not 0 < len(job) <= _NAME_MAX:
        raise UsageError(f"job= is a name of 1 to {_NAME_MAX} characters, not {job!r}")
    return blake2b(job.encode(), digest_size=_JOB_BYTES).digest()


class Ledger:
    """The ledger of a run of a job. A plain value that is sent to the tasks that take its inputs.

    Attributes: `beside`, the table whose rows have the marks, if not the ledger's own.
    """

    job: str
    run: bytes
    beside: str
    row: bytes

    def __init__(self, job: str, run: bytes, beside: str = "") -> None:
        self.job, self.run, self.beside = job, run, beside
        self.row = row_of(job)

    def mark(self, db: perco.Database, key: Any) -> Mark:
        """The cell that says whether an input has been taken; `key`: a key of the table beside, else bytes.

        Raises: TooLarge, TypeError, ValueError for a value that is not a key.
        """
        if self.beside:
            table = db.schema.tables[self.beside]
            return taken_in(table), table.key.decode(table.row(key))  # as it is read back
        return RUN, self.row + blake2b(key, digest_size=_INPUT_BYTES, key=self.row).digest()

    def has(self, value: bytes | None) -> bool:
        """Whether a mark says that this run has taken the input."""
        return self.run in _runs(value)

    async def marked(self, txn: perco.Transaction, before: bytes | None) -> bytes:
        """The mark that says so, made from the previous value of the mark. Raises: PercoError."""
        if not self.beside:
            return self.run
        runs = _runs(before)
        if len(runs) >= _RUNS_MAX:
            jobs_open = {row[RUN] async for row in txn.scan(LEDGER, columns=[NAME, RUN]) if row[NAME] is not None}
            runs = [run for run in runs if run in jobs_open]
        if len(runs) >= _RUNS_MAX:
            raise PercoError(f"{_RUNS_MAX} jobs have taken this key and are open: acknowledge those that have ended")
        return b"".join([*runs, self.run])


def taken_in(table: perco.Table[Any]) -> perco.Column[Any, bytes]:
    """The hidden column of marks in a table."""
    return table.hide(TAKEN, perco.BYTES)


def _runs(mark: bytes | None) -> list[bytes]:
    """The runs of jobs that have taken an input, from its mark."""
    return [mark[at : at + _RUN_BYTES] for at in range(0, len(mark), _RUN_BYTES)] if mark else []


class _Look:
    __slots__ = ("done", "failed", "found", "marks")

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.found: dict[Any, bytes | None] = {}
        self.done, self.failed = trio.Event(), False


class Watch:
    """Looks at marks, and whether the job is open, for many transactions at once.

    A look is a snapshot that is taken after these transactions began. If an input has been taken by then, it stays
    taken. If not, its transaction writes the mark: it takes the input, or conflicts with another that does (T1). And a
    job that is open then was open when they began.
    """

    db: Database

    def __init__(self, db: perco.Database, ledger: Ledger) -> None:
        self.db, self._ledger = db, ledger
        self._next = _Look()
        self._looking = trio.Lock()

    async def before(self, mark: Mark) -> bytes | None:
        """The value of a mark, for a transaction that has begun. Raises: JobClosed."""
        while True:
            look = self._next
            look.marks.append(mark)
            if len(look.marks) == 1:
                await self._look(look)
            else:
                await look.done.wait()
            if not look.failed:
                return look.found[mark[1]]

    async def all_before(self, marks: list[Mark]) -> dict[Any, bytes | None]:
        """The values of many marks, by key, for one transaction, with a look of its own. Raises: JobClosed."""
        look = _Look()
        look.marks += marks
        await self._read(look)
        return look.found

    async def _read(self, look: _Look) -> None:
        ledger, column = self._ledger, look.marks[0][0]
        async with self.db.snapshot() as snap:
            if await snap.get(RUN, ledger.row) != ledger.run:
                raise JobClosed(f"job {ledger.job!r} is over: this task is left over from it")
            look.found.update(await snap.get_many(column, [key for _, key in look.marks]))

    async def _look(self, look: _Look) -> None:
        """Make one look for all transactions that have requested one during the previous look."""
        try:
            async with self._looking:
                self._next = _Look()
                await self._read(look)
        except BaseException:
            look.failed = True  # transactions that wait for it look again
            if self._next is look:
                self._next = _Look()
            raise
        finally:
            look.done.set()


async def take(
    txn: perco.Transaction, ledger: Ledger, watch: Watch, mark: Mark, loader: Callable[..., Awaitable[Any]], value: Any
) -> bool:
    """Take an input, in a transaction of its own; False: it has been taken before.

    Raises: JobClosed; what `loader` raises.
    """
    before = await watch.before(mark)
    if ledger.has(before):
        return False
    written = await ledger.marked(txn, before)
    txn.set(*mark, written)  # first: a loader that commits by itself commits this as well
    await loader(txn, value)
    if txn.outcome == "aborted":
        raise UsageError("the loader has discarded its transaction: to refuse a row, raise an exception")
    return True


async def surely(retrying: perco.Retrying, function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Like `retrying.run`. After a commit of unknown outcome it runs again, and finds its marks, or conflicts with it.

    Raises: CommitUnknown, after too many of them.
    """
    for left in reversed(range(_UNKNOWN_MAX)):
        try:
            return await retrying.run(function, *args)
        except CommitUnknown:
            if not left:
                raise
    raise AssertionError("it has returned, or raised")


async def begin(db: perco.Database, job: str, beside: str = "") -> Ledger:
    """Open a job, or continue it. Raises: UsageError if its marks are elsewhere."""
    ledger = await _begin(db, job, beside, None, "")
    assert ledger is not None
    return ledger


async def begin_batch(db: perco.Database, job: str, batch: int, into: str) -> Ledger | None:
    """Open a job for a batch, or continue it; None: this batch has taken effect. Its marks lie in the ledger, because
    forgetting marks beside rows takes a scan of the whole table, and batches are many and small.

    Args: `into`, the table that the batch is written to.

    Raises: UsageError if a later batch has been written, or if the job's batches are written to another table.
    """
    row = row_of(job)
    async with db.snapshot() as snap:
        found = await snap.row(LEDGER, row, columns=[RUN, BATCH, INTO])
    run, last = found[RUN], found[BATCH]
    _must_go(job, found.get(INTO, into), into)
    if run is not None and last is not None and last < batch:
        await _end(db, job, only=run)  # the stream has abandoned that batch; tasks that are left of it find it closed
    return await _begin(db, job, "", batch, into)


async def end_batch(db: perco.Database, job: str, batch: int) -> None:
    """Forget the inputs of a batch that has taken effect, but not its number."""
    async with db.snapshot() as snap:
        found = await snap.row(LEDGER, row_of(job), columns=[RUN, BATCH])
    if found[BATCH] == batch:
        await _end(db, job, only=found[RUN] or b"")


def _must_go(job: str, known: str, into: str) -> None:
    """Check that a job's batches go to one table: a batch written to one table would look written to another, too."""
    if known != into:
        raise UsageError(
            f"job {job!r} writes its batches to table {known!r}: give what is written to table {into!r} a job of its "
            "own; or forget this one: perco.spark.acknowledge"
        )


async def _begin(db: perco.Database, job: str, beside: str, batch: int | None, into: str) -> Ledger | None:
    row = row_of(job)
    async with db.snapshot() as snap:
        closed = (await snap.row(LEDGER, row, columns=[CLOSED]))[CLOSED]
    if closed is not None:  # an acknowledgement that was interrupted
        await _end(db, job, only=closed)

    async def once(txn: perco.Transaction) -> bytes | None:
        found = await txn.row(LEDGER, row, columns=[BATCH, INTO])
        last = found[BATCH]
        if batch is not None:
            _must_go(job, found.get(INTO, into), into)
        if batch is None:
            if last is not None:
                raise UsageError(f"job {job!r} belongs to a stream's batches: give this one another name")
        elif last is None:
            if await txn.get(RUN, row) is not None:
                raise UsageError(f"job {job!r} is open and has no batches: give the stream's job another name")
            txn.set(BATCH, row, batch)
        elif batch < last:
            raise UsageError(
                f"job {job!r} is at batch {last} and was given batch {batch}: batch numbers go up. If its stream "
                "restarted with another checkpoint, give it another job=; or forget this one: perco.spark.acknowledge"
            )
        elif batch > last:
            if await txn.get(RUN, row) is not None:
                raise UsageError(f"two streams write under job {job!r}: each needs a name of its own")
            txn.set(BATCH, row, batch)
        elif await txn.get(RUN, row) is None:
            return None
        run, where = await txn.get(RUN, row), await txn.get(BESIDE, row)
        if run is None:
            run = secrets.token_bytes(_RUN_BYTES)
            if batch is not None:
                txn.set(INTO, row, into)
            txn.set(RUN, row, run)
            txn.set(NAME, row, job)
            txn.set(BESIDE, row, beside)
        elif where != beside:
            was = f"beside={where!r}" if where else "no beside="
            raise UsageError(f"job {job!r} was begun with {was}; continue it in the same way, or acknowledge it first")
        return run

    run = await db.run(once)
    return None if run is None else Ledger(job, run, beside)


async def acknowledge(db: perco.Database, job: str) -> int:
    """Close a job, and forget its inputs; returns how many there were. Idempotent: it continues where it stopped."""
    return await _end(db, job)


async def taken(db: perco.Database, ledger: Ledger) -> int | None:
    """How many inputs a run has taken; None: it is not open any more."""
    table: perco.Table[Any] = LEDGER
    column, (low, high) = RUN, _inputs_of(ledger.row)
    if ledger.beside:
        table = db.schema.tables[ledger.beside]
        column, low, high = taken_in(table), b"", None
    count = 0
    async with db.snapshot() as snap:
        if await snap.get(RUN, ledger.row) != ledger.run:
            return None
        async for found in scan_between(snap, table, low, high, columns=[column]):
            count += ledger.has(found[column])
    return count


def _inputs_of(row: bytes) -> tuple[bytes, bytes | None]:
    """The range of the ledger's rows that a job's inputs have."""
    return row + b"\0", row + b"\xff" * (_INPUT_BYTES + 1)


async def _end(db: perco.Database, job: str, *, only: bytes | None = None) -> int:
    """End a job; `only`: end this run only, open or closed, and keep the number of its batch."""
    row = row_of(job)

    async def close(txn: perco.Transaction) -> tuple[bytes | None, str]:
        run = await txn.get(RUN, row)
        if only is None:
            txn.delete(BATCH, row)
            txn.delete(INTO, row)
        if run is not None and only in (None, run):
            txn.delete(RUN, row)
            txn.set(CLOSED, row, run)
        return await txn.get(CLOSED, row), await txn.get(BESIDE, row) or ""

    run, beside = await db.run(close)
    if run is None:
        return 0
    total = await _forget(db, LEDGER, RUN, run, *_inputs_of(row))
    if beside and beside in db.schema.tables:
        table = db.schema.tables[beside]
        total += await _forget(db, table, taken_in(table), run, b"", None)

    async def forget_job(txn: perco.Transaction) -> None:
        if await txn.get(CLOSED, row) == run:
            txn.delete(CLOSED, row)
            if await txn.get(RUN, row) is None:
                txn.delete(NAME, row)
                txn.delete(BESIDE, row)

    await db.run(forget_job)  # last, so that a job whose removal was interrupted is still listed
    return total


async def _forget(
    db: perco.Database,
    table: perco.Table[Any],
    column: perco.Column[Any, bytes],
    run: bytes,
    low: bytes,
    high: bytes | None,
) -> int:
    """Remove a run from all marks of a range; returns from how many."""

    async def remove(txn: perco.Transaction, keys: list[Any]) -> int:
        changed = 0
        for key, mark in (await txn.get_many(column, keys)).items():
            left = b"".join(each for each in _runs(mark) if each != run)
            if left:
                txn.set(column, key, left)
            else:
                txn.delete(column, key)
            changed += left != mark
        return changed

    total = 0
    keys: list[Any] = []
    # Transactions that begin now find the job closed; those in flight may still mark inputs that were not taken.
    async with db.snapshot() as snap:
        async for found in scan_between(snap, table, low, high, columns=[column]):
            if run in _runs(found[column]):
                keys.append(found.key)
            if len(keys) == _REMOVED:
                total += await db.run(remove, keys)
                keys = []
    return total + (await db.run(remove, keys) if keys else 0)


async def jobs(db: perco.Database) -> dict[str, bool]:
    """The jobs that have not been acknowledged completely, by name; False: the removal was interrupted."""
    found = {}
    async with db.snapshot() as snap:
        async for row in snap.scan(LEDGER, columns=[NAME, RUN]):
            if row[NAME] is not None:
                found[row.get(NAME, "")] = row[RUN] is not None
    return found
