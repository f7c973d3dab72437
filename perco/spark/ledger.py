"""The ledger: it has a *mark* for each of a job's inputs that has taken effect, written in the input's own transaction.

Spark runs a task again if the task's Python worker has died, and may start a second attempt if the task is slow. The
store decides which attempt counts, because an input's transaction reads the input's mark and writes it (it *takes* the
input). If two attempts do so at once, one of them conflicts (T7), runs again, and finds that the input has been taken.

    row JOB                name, run    the job, while it is open
    row JOB + input key    run          the mark of an input that has taken effect in that run of the job

A transaction that writes to two tablets costs two rounds of syncs, and most loaders write to one tablet. If the loader
writes a row under the input's own key, the mark can be *beside* the loader's cells: in a hidden column of that row,
together with the marks of other jobs. Then the mark costs one more cell, in the same step.

    row KEY                _taken       the runs of jobs that have taken the input of this key

If the partitions of a frame give the same rows in the same order whenever they are read, there can be one mark for many
rows (`perco.spark.chunks`). All attempts at these rows then read and write that mark.

    row JOB + chunk        chunk        which rows of the chunk have taken effect, and in which run

To acknowledge a job, perco first closes the job, and then removes its marks. A task may outlive its job. If the task
tries to load an input that was taken before, a transaction that began before the job was closed finds the input's mark,
or conflicts with the removal of the mark; a later transaction finds no job. A job that is opened again under the same
name is another *run* of the job. Tasks left over from an earlier run find that run closed, and the earlier run's marks
do not count.

Spark numbers the micro-batches of a stream, and runs the last one again if it does not know whether the batch has
ended. So a job may have a *batch*, the number of the last batch begun. If the job has an open run, it is the run of
this batch; if the job has none, this batch has taken effect.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any, Final, TypeVar

import perco
from perco.errors import CommitUnknown, PercoError, UsageError
from perco.spark.chunks import RUN_BYTES, Chunk, ChunkMark, must_be_same
from perco.txn.inside import get_with
from perco.txn.runs import bytes_of
from perco.txn.snapshot import scan_between

T = TypeVar("T")

_JOB_BYTES: Final = 8
_INPUT_BYTES: Final = 16
_PARTITION_BYTES: Final = 4
_FIRST_BYTES: Final = 8
_REMOVED: Final = 1000  # marks that one transaction removes
_READ: Final = 1000  # marks of chunks that are read at once
_NAME_MAX: Final = 200

_UNKNOWN_MAX: Final = 10  # how many commits of one transaction may have an unknown outcome
BYTES: Final = 1 << 20  # a transaction that has written so much takes no more inputs
_RUNS_MAX: Final = 64  # how many open jobs may have taken one key
TAKEN: Final = "_taken"

LEDGER: Final = perco.Table("perco.spark.ledger", keep=perco.Keep(seconds=0))
NAME: Final = LEDGER.column("name", perco.TEXT)
RUN: Final = LEDGER.column("run", perco.BYTES)
CLOSED: Final = LEDGER.column("closed", perco.BYTES)  # the run of a closed job, until all marks of the run are removed
BESIDE: Final = LEDGER.column("beside", perco.TEXT)  # of a job: the table that has its marks; "": the ledger
BATCH: Final = LEDGER.column("batch", perco.INT64)  # of a job that has batches: the last one begun
CUT: Final = LEDGER.column("cut", perco.TEXT)  # of a job with marks of chunks: how the frame is cut; "": it has none
CHUNK: Final = LEDGER.column("chunk", perco.BYTES)  # the mark of a chunk
INTO: Final = LEDGER.column("into", perco.TEXT)  # of a job that has batches: the table they are written to

Mark = tuple[perco.Column[Any, bytes], Any]  # the cell that says whether an input has been taken: a column, and a key


class JobClosed(PercoError):
    """The job has been acknowledged. This task is left over from the job, and does nothing."""


class KeyNotUnique(PercoError):
    """Several rows of one load or write have the same key. Only one of them has taken effect; it stays.

    Attributes: `keys`, some of these keys, as text, each with the number of its rows; `loaded`, the result of the load,
    None for a write.
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
    """The ledger of a run of a job. A plain value that is sent to the tasks that take the job's inputs.

    Attributes:
        beside: the table whose rows have the marks; "": they are in the ledger's own table.
        cut: how the frame is cut into chunks that have marks, as text; "": each input has a mark.
    """

    job: str
    run: bytes
    beside: str
    cut: str
    row: bytes

    def __init__(self, job: str, run: bytes, beside: str = "", cut: str = "") -> None:
        self.job, self.run, self.beside, self.cut = job, run, beside, cut
        self.row = row_of(job)

    def mark_of_chunk(self, partition: int, first: int) -> Mark:
        """The cell that says which rows of a chunk have been taken."""
        return CHUNK, self.row + partition.to_bytes(_PARTITION_BYTES, "big") + first.to_bytes(_FIRST_BYTES, "big")

    def chunk_taken(self, value: bytes | None) -> ChunkMark | None:
        """A mark of this run, decoded."""
        mark = ChunkMark.decode(value) if value is not None else None
        return mark if mark is not None and mark.run == self.run else None

    def mark(self, db: perco.Database, key: Any) -> Mark:
        """The cell that says whether an input has been taken. `key`: a key of the table `beside`; if that is "", bytes.

        Raises: TooLarge, TypeError, ValueError for a value that is not a key.
        """
        if self.beside:
            table = db.schema.tables[self.beside]
            return taken_in(table), table.key.decode(table.row(key))  # as a read returns it
        return RUN, self.row + blake2b(key, digest_size=_INPUT_BYTES, key=self.row).digest()

    def has(self, value: bytes | None) -> bool:
        """Whether a mark says that this run has taken the input."""
        return value is not None and self.run in _runs(value)

    async def marked(self, txn: perco.Transaction, before: bytes | None) -> bytes:
        """The mark's new value, which says that this run has taken the input, too. `before`: its previous value.

        Raises: PercoError.
        """
        if not self.beside or not before:
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
    """The runs of jobs that have taken an input, decoded from its mark."""
    return [mark[at : at + RUN_BYTES] for at in range(0, len(mark), RUN_BYTES)] if mark else []


async def marks_before(txn: perco.Transaction, ledger: Ledger, marks: list[Mark]) -> dict[Any, bytes | None]:
    """The values of marks, by key, for a transaction that has read nothing yet.

    If an input has no mark then, but another transaction takes it later, the two conflict, because both write the mark
    (T7). Once a job is over, its marks may be gone, so the transaction reads at the same time whether the job is open.

    Raises: JobClosed.
    """
    found, run = await get_with(txn, marks[0][0], [key for _, key in marks], RUN, ledger.row)
    if run != ledger.run:
        raise JobClosed(f"job {ledger.job!r} is over: this task is left over from it")
    return found


async def take(
    txn: perco.Transaction, ledger: Ledger, mark: Mark, loader: Callable[..., Awaitable[Any]], value: Any
) -> bool:
    """Take an input: mark it and run `loader` for it, in `txn`, the input's own transaction. Returns False if the input
    had been taken before.

    Raises: JobClosed; what `loader` raises.
    """
    group = Group([(mark, value)])
    await take_all(txn, ledger, group, loader)
    return bool(group.taken)


class Group:
    """Inputs that one transaction takes, and how far it has come in this attempt.

    Attributes:
        inputs: the mark and the row of each. In a group of a chunk's rows: the number of the row, counted from the
            chunk's first row, and the row.
        chunk: the chunk that has them; None: each input has a mark.
        done: how many inputs it has dealt with: it has taken them, or they had been taken before.
        taken: how many of them it has taken.
        loading: whether the loader runs, for input number `done`.
    """

    inputs: list[tuple[Any, Any]]
    chunk: Chunk | None
    done: int
    taken: int
    loading: bool

    __slots__ = ("chunk", "done", "inputs", "loading", "taken")

    def __init__(self, inputs: list[tuple[Any, Any]], chunk: Chunk | None = None) -> None:
        self.inputs, self.chunk = inputs, chunk
        self.done = self.taken = 0
        self.loading = False

    def parts(self) -> list[Group]:
        """The groups to try instead, after an error. If a loader has raised the error, its input is alone in one of
        them; otherwise, they are halves."""
        inputs, at = self.inputs, self.done
        cuts = (0, at, at + 1, len(inputs)) if self.loading else (0, len(inputs) // 2, len(inputs))
        return [Group(inputs[low:high], self.chunk) for low, high in itertools.pairwise(cuts) if low < high]

    def rest(self) -> Group:
        """The inputs that it has not dealt with."""
        return Group(self.inputs[self.done :], self.chunk)

    async def load(self, txn: perco.Transaction, loader: Callable[..., Awaitable[Any]], value: Any) -> None:
        """Run the loader for input number `done`, which is marked already: so a loader that commits by itself commits
        the mark, too. Raises: what `loader` raises; UsageError."""
        self.loading = True
        await loader(txn, value)
        if txn.outcome == "aborted":
            raise UsageError("the loader has discarded its transaction: to refuse a row, raise an exception")
        self.loading = False
        self.taken += 1


async def take_all(txn: perco.Transaction, ledger: Ledger, group: Group, loader: Callable[..., Awaitable[Any]]) -> None:
    """Take the inputs of a group, one after another, in `txn`: mark each input, and run `loader` for it. The loader
    sees its own writes for the earlier inputs. If two inputs have one mark, the second is skipped.

    The transaction may end before the group does: if it has written much, or if a loader has committed it.

    Raises: JobClosed; what `loader` raises.
    """
    group.done = group.taken = 0
    group.loading = False
    found = await marks_before(txn, ledger, [mark for mark, _ in group.inputs])
    for mark, value in group.inputs:
        column, at = mark
        before = found[at]
        if not ledger.has(before):
            found[at] = written = await ledger.marked(txn, before)
            txn.set(column, at, written)
            await group.load(txn, loader, value)
        group.done += 1
        if txn.outcome != "open" or bytes_of(txn) >= BYTES:
            break


async def take_of_chunk(
    txn: perco.Transaction, ledger: Ledger, group: Group, loader: Callable[..., Awaitable[Any]]
) -> None:
    """Like `take_all`, for a group of a chunk's rows. Their mark is that of the chunk. If the group is empty, mark the
    chunk without any row, so that its digest is known.

    Raises: JobClosed; FrameChanged; what `loader` raises.
    """
    chunk = group.chunk
    assert chunk is not None
    group.done = group.taken = 0
    group.loading = False
    column, key = ledger.mark_of_chunk(chunk.partition, chunk.first)
    mark = ledger.chunk_taken((await marks_before(txn, ledger, [(column, key)]))[key])
    if mark is None:
        mark = ChunkMark(ledger.run, chunk.digest, [])
        txn.set(column, key, mark.encode())
    must_be_same(ledger.job, chunk, mark)
    for number, value in group.inputs:
        if not mark.has(number):
            mark.add(number)
            txn.set(column, key, mark.encode())
            await group.load(txn, loader, value)
        group.done += 1
        if txn.outcome != "open" or bytes_of(txn) >= BYTES:
            break


async def chunks_taken(
    db: perco.Database, ledger: Ledger, partition: int, first: int
) -> tuple[list[tuple[int, ChunkMark]], int | None]:
    """Marks of a partition's chunks: (the number of the chunk's first row, the mark) of those from row number `first`
    on; and where to read on, None: there are no more."""
    low, high = ledger.mark_of_chunk(partition, first)[1], ledger.mark_of_chunk(partition, (1 << 64) - 1)[1]
    marks = []
    count = 0
    async with db.snapshot() as snap:
        async for found in scan_between(snap, LEDGER, low, high, columns=[CHUNK], limit=_READ):
            count += 1
            first = int.from_bytes(found.key[-_FIRST_BYTES:], "big")
            if (mark := ledger.chunk_taken(found[CHUNK])) is not None:
                marks.append((first, mark))
    return marks, first + 1 if count == _READ else None


async def surely(retrying: perco.Retrying, function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Like `retrying.run`, but if the outcome of a commit is unknown, run `function` again. It then finds the marks of
    that commit, or conflicts with it.

    Raises: CommitUnknown, if this happens too often.
    """
    for left in reversed(range(_UNKNOWN_MAX)):
        try:
            return await retrying.run(function, *args)
        except CommitUnknown:
            if not left:
                raise
    raise AssertionError("it has returned, or raised")


async def begin(db: perco.Database, job: str, beside: str = "", cut: str = "") -> Ledger:
    """Open a job, or continue it. Raises: UsageError if the job was begun with its marks in another place, or with a
    frame that is cut in another way."""
    ledger = await _begin(db, job, beside, None, "", cut)
    assert ledger is not None
    return ledger


async def begin_batch(db: perco.Database, job: str, batch: int, into: str) -> Ledger | None:
    """Open a job for a batch, or continue it; None: this batch has taken effect. The marks are in the ledger's own
    table, because removing marks beside rows takes a scan of the whole table, and there are many small batches.

    Args: `into`, the table that the batch is written to.

    Raises: UsageError if a later batch has been begun, or if the job's batches are written to another table.
    """
    row = row_of(job)
    async with db.snapshot() as snap:
        found = await snap.row(LEDGER, row, columns=[RUN, BATCH, INTO])
    run, last = found[RUN], found[BATCH]
    _must_go(job, found.get(INTO, into), into)
    if run is not None and last is not None and last < batch:
        await _end(db, job, only=run)  # the stream has abandoned that batch; its left-over tasks find it closed
    return await _begin(db, job, "", batch, into, "")


async def end_batch(db: perco.Database, job: str, batch: int) -> None:
    """Remove the marks of a batch that has taken effect, but keep the batch's number."""
    async with db.snapshot() as snap:
        found = await snap.row(LEDGER, row_of(job), columns=[RUN, BATCH])
    if found[BATCH] == batch:
        await _end(db, job, only=found[RUN] or b"")


def _must_go(job: str, known: str, into: str) -> None:
    """Check that all batches of a job go to one table: a batch written to one would count as written to another."""
    if known != into:
        raise UsageError(
            f"job {job!r} writes its batches to table {known!r}: give what is written to table {into!r} a job of its "
            "own; or forget this one: perco.spark.acknowledge"
        )


async def _begin(db: perco.Database, job: str, beside: str, batch: int | None, into: str, cut: str) -> Ledger | None:
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
        was_cut = await txn.get(CUT, row) or ""
        if run is None:
            run = secrets.token_bytes(RUN_BYTES)
            if batch is not None:
                txn.set(INTO, row, into)
            txn.set(RUN, row, run)
            txn.set(NAME, row, job)
            txn.set(BESIDE, row, beside)
            txn.set(CUT, row, cut)
        elif was_cut != cut:
            raise _cut_otherwise(job, was_cut, cut)
        elif where != beside:
            was = f"beside={where!r}" if where else "no beside="
            raise UsageError(f"job {job!r} was begun with {was}; continue it in the same way, or acknowledge it first")
        return run

    run = await db.run(once)
    return None if run is None else Ledger(job, run, beside, cut)


def _cut_otherwise(job: str, was: str, now: str) -> UsageError:
    """The error of a job whose frame had other chunks when the job began."""
    said = [f"chunks=True and {each}" if each else "no chunks=True" for each in (was, now)]
    return UsageError(
        f"job {job!r} was begun with {said[0]}; this call has {said[1]}. Continue the job with the same files, the "
        "same options and as many cores, because Spark cuts files by the number of cores; or acknowledge it first"
    )


async def acknowledge(db: perco.Database, job: str) -> int:
    """Close a job and remove its marks; returns their number. If it is interrupted, the next call continues."""
    return await _end(db, job)


async def taken(db: perco.Database, ledger: Ledger) -> int | None:
    """How many inputs a run has taken; None: the run is no longer open."""
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
    """The range of the ledger's rows that have the marks of a job's inputs."""
    return row + b"\0", row + b"\xff" * (_INPUT_BYTES + 1)


async def _end(db: perco.Database, job: str, *, only: bytes | None = None) -> int:
    """Close a job and remove its marks. `only`: end this run only, open or closed, and keep the number of its batch."""
    row = row_of(job)

    async def close(txn: perco.Transaction) -> tuple[bytes | None, str, str]:
        run = await txn.get(RUN, row)
        if only is None:
            txn.delete(BATCH, row)
            txn.delete(INTO, row)
        if run is not None and only in (None, run):
            txn.delete(RUN, row)
            txn.set(CLOSED, row, run)
        cut = await txn.get(CUT, row)
        return await txn.get(CLOSED, row), await txn.get(BESIDE, row) or "", cut or ""

    run, beside, cut = await db.run(close)
    if run is None:
        return 0
    total = await _forget(db, LEDGER, CHUNK if cut else RUN, run, *_inputs_of(row))
    if beside and beside in db.schema.tables:
        table = db.schema.tables[beside]
        total += await _forget(db, table, taken_in(table), run, b"", None)

    async def forget_job(txn: perco.Transaction) -> None:
        if await txn.get(CLOSED, row) == run:
            txn.delete(CLOSED, row)
            if await txn.get(RUN, row) is None:
                txn.delete(NAME, row)
                txn.delete(BESIDE, row)
                txn.delete(CUT, row)

    await db.run(forget_job)  # last, so that `jobs` still lists a job whose removal was interrupted
    return total


async def _forget(
    db: perco.Database,
    table: perco.Table[Any],
    column: perco.Column[Any, bytes],
    run: bytes,
    low: bytes,
    high: bytes | None,
) -> int:
    """Remove a run from all marks in a range of rows; returns how many inputs it had taken."""

    async def remove(txn: perco.Transaction, keys: list[Any]) -> int:
        changed = 0
        for key, mark in (await txn.get_many(column, keys)).items():
            left = b"" if column is CHUNK else b"".join(each for each in _runs(mark) if each != run)
            if left:
                txn.set(column, key, left)
            else:
                txn.delete(column, key)
            changed += ChunkMark.decode(mark or b"").rows if column is CHUNK else left != mark
        return changed

    total = 0
    keys: list[Any] = []
    # Transactions that begin from now on find the job closed; those in flight may still write marks.
    async with db.snapshot() as snap:
        async for found in scan_between(snap, table, low, high, columns=[column]):
            if run in _runs(found[column]):
                keys.append(found.key)
            if len(keys) == _REMOVED:
                total += await db.run(remove, keys)
                keys = []
    return total + (await db.run(remove, keys) if keys else 0)


async def jobs(db: perco.Database) -> dict[str, bool]:
    """The jobs that have not been completely acknowledged, by name; False: the removal of marks was interrupted."""
    found = {}
    async with db.snapshot() as snap:
        async for row in snap.scan(LEDGER, columns=[NAME, RUN]):
            if row[NAME] is not None:
                found[row.get(NAME, "")] = row[RUN] is not None
    return found
