"""An open store, and the operations that a program calls on it. Made by `perco.open`.

T10 If a deadline or a cancellation comes before the commit is sent, the transaction has not committed.
T14 `isolation="serializable"`, per transaction or for all of a store.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from os import PathLike
from typing import Any, Concatenate, ParamSpec, TypeVar

from perco.blocks import async_block
from perco.clock.holds import Pin
from perco.database import backing, bulk
from perco.database.backing import Backup
from perco.database.options import Options, Statistics
from perco.database.owner import Owner
from perco.database.parts import Parts
from perco.errors import NotFresh, ReadOnly, UsageError, must_be_number
from perco.history.changes import ChangeStream
from perco.history.past import PinnedSnapshot
from perco.history.snapshots import SnapshotBlock, Snapshots
from perco.history.vacuumed import VacuumResult
from perco.naming import told_as
from perco.notify.backfill import BackfillProgress
from perco.notify.concerned import Freshness
from perco.notify.failures import FailedChange, FailedList
from perco.notify.lagging import Lag
from perco.notify.observers import ObserverState, ObserverStates
from perco.notify.options import WorkerOptions
from perco.notify.tracing import Traced, trace
from perco.notify.waiting import Waiting
from perco.notify.workers import WorkerHandle, Workers
from perco.protocol.reads import Isolation
from perco.schema import removing
from perco.schema.schema import Column, Schema, Table, must_be_table
from perco.tablets.compactor import Compacted, what_to_compact
from perco.tablets.loading import Published
from perco.tablets.splitter import Split, where_to_split
from perco.txn.asking import outcome
from perco.txn.attempts import Attempts
from perco.txn.beginning import begin
from perco.txn.engine import Engine
from perco.txn.keeping import Keeper
from perco.txn.operations import Operation, adding, appending, operate
from perco.txn.running import Retrying, TransactionBlock, run
from perco.txn.snapshot import Snapshot
from perco.txn.transaction import Transaction

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


@told_as("Database")
class Database:
    """An open store. Made by `perco.open`; use it only inside the block of that call.

    Attributes: `config`, the options that it was opened with.
    """

    def __init__(
        self, engine: Engine, keeper: Keeper, workers: Workers, waiting: Waiting, owner: Owner, config: Options
    ) -> None:
        self.config = config
        self._engine, self._waiting, self._workers, self._owner = engine, waiting, workers, owner
        self._lag: tuple[dict[str, Lag], float] = {}, 0.0  # as it was last found, and when
        self._snapshots = Snapshots(engine)
        self._failed = FailedList(engine, keeper, workers.running_here)
        self._observers = ObserverStates(engine, keeper, workers.running_here)
        self._parts = Parts(engine, keeper, workers, waiting, self._failed, self._observers, owner)

    @property
    def schema(self) -> Schema:
        """The tables, columns and observers: as the program declared them, or else as the store has recorded them."""
        return self._engine.known.schema

    # ------------------------------------------------------------ transactions

    def run(
        self, function: Callable[Concatenate[Transaction, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Run a function in a transaction and commit; on a TransientError, run it again from the beginning (T11).

            total = await db.run(transfer, source, target, amount)

        Returns what the function returned in the attempt that committed. To get the commit timestamp, for `wait_for` or
        `snapshot(ts=)`, let the function end in `return await txn.commit()`.
        Raises: WriteConflict or ReadConflict after the last attempt; Unavailable past the timeout; CommitUnknown; and
        the function's own exceptions, after discarding its writes.
        """
        return run(self._engine, self._engine.retry, self._engine.serializable, function, args, kwargs)

    def attempts(self) -> Attempts:
        """Like `run`, but without a function: `async for attempt in db.attempts(): async with attempt as txn: ...`.

        The loop ends by itself once an attempt has committed. Do not leave it with `break` or `return`: a commit that
        conflicts needs the next attempt.
        """
        return Attempts(self._engine, self._engine.retry, self._engine.serializable)

    def options(
        self, *, attempts: int | None = None, timeout: float | None = None, isolation: Isolation | None = None
    ) -> Retrying:
        """`run` and `attempts` with other limits: `db.options(attempts=5, timeout=2.0).run(...)`.

        Args:
            attempts: the largest number of attempts, including the first. A run that finds out that the function is
                hasty does not count (T11).
            timeout: seconds for all attempts together. If a commit has been sent by then, the call still waits for its
                outcome (T10).
            isolation: "snapshot" or "serializable" (T14); by default as in `TransactionOptions`.
        """
        retry = self._engine.retry
        if attempts is not None:
            if not isinstance(attempts, int) or attempts < 1:
                raise UsageError(f"attempts is {attempts!r}; it must be an int of at least 1")
            retry = replace(retry, attempts=attempts)
        if timeout is not None:
            must_be_number("timeout", timeout)
            retry = replace(retry, timeout_s=timeout)
        return Retrying(self._engine, retry, self._engine.is_serializable(isolation))

    async def begin(self, *, isolation: Isolation | None = None) -> Transaction:
        """A transaction that the caller ends with `commit` or `discard`; prefer `transaction()` or `run`."""
        return await begin(self._engine, isolation)

    def transaction(self, *, isolation: Isolation | None = None) -> TransactionBlock:
        """One attempt: the transaction commits at the end of the block; an exception discards it.

        Afterwards, `txn.commit_ts` and `txn.outcome` hold the result.

        Args:
            isolation: "snapshot" or "serializable" (T14); by default as in `TransactionOptions`.
        """
        return TransactionBlock(self._engine, isolation)

    # ------------------------------------------------------------ one cell

    async def put(self, column: Column[K, V], key: K, value: V) -> int:
        """Write a cell, in a transaction of its own; returns commit_ts. Observers of the column run, as always.

        In a function that runs in a transaction, or in an observer, this is a transaction apart, and is repeated with
        each attempt: write with `txn.set` there.
        Raises: as `run`; CommitUnknown, after which `outcome` says whether the value was written; TypeError or
        ValueError for a value that the codec cannot encode.
        """
        if value is None:
            raise TypeError(f"None means absent; to remove a value use delete({column!r}, key)")
        return (await operate(self._engine, column, key, Operation("put", value))).commit_ts

    async def delete(self, column: Column[K, Any], key: K) -> int:
        """Remove a cell's value, in a transaction of its own; returns commit_ts. Raises: as `run`."""
        return (await operate(self._engine, column, key, Operation("delete"))).commit_ts

    async def put_if(self, column: Column[K, V], key: K, value: V | None, *, expected: V | None) -> int:
        """Write a cell if it holds the expected value (compare and set). Returns commit_ts, or 0 if it held another.

            if await db.put_if(leader, "jobs", me, expected=None):
                ...

        Args:
            value: None: remove what the cell holds.
            expected: None: the cell must hold nothing. Values are compared with `==`, as they would be read.

        Raises: as `put`.
        """
        return (await operate(self._engine, column, key, Operation("put_if", value, expected))).commit_ts

    async def add(self, column: Column[K, V], key: K, n: V) -> V:
        """Add a number to the number that a cell holds (none counts as zero); returns the new one.

            views = await db.add(pages.views, url, 1)

        Every call is counted once. Calls of this process that add to the cell at the same time share commits (C10).
        Before you repeat one that has raised CommitUnknown, ask `outcome`.
        Raises: as `put`; TypeError if the cell holds no number; Unavailable with its `commit_ts`, if the number was
        added, but the sum is not known.
        """
        value: V = (await operate(self._engine, column, key, adding(n))).value
        return value

    async def append(self, column: Column[K, V], key: K, more: V) -> int:
        """Append to the bytes, the text, or the list that a cell holds (none counts as empty); returns commit_ts.

        Each append rewrites the whole value. Calls of this process that append to the cell at the same time share
        commits (C10), so they may return the same commit_ts. Before you repeat one that has raised CommitUnknown, ask
        `outcome`.
        Raises: as `put`; TypeError if the cell holds something else.
        """
        return (await operate(self._engine, column, key, appending(more))).commit_ts

    # ------------------------------------------------------------ outcomes

    async def outcome(self, token: str) -> int:
        """The outcome of a transaction (T4): its commit_ts, or 0 if it did not commit and never will.

        Args:
            token: from `CommitUnknown.token` or `txn.token`, of any process on this store.

        Raises: UsageError if this is no token, or one of another store; CommitUnknown, for good, if the records of
        the transaction may have been garbage-collected; ReadOnly, because the query itself settles the transaction.
        """
        return await outcome(self._engine, token)

    # ------------------------------------------------------------ the past

    def snapshot(
        self,
        *,
        ts: int | None = None,
        at: datetime | None = None,
        fresh: str | Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> SnapshotBlock:
        """The store as of now, as of a timestamp `ts`, or as of a wall time `at` (an aware datetime).

        `at` is exact to about a second: about once a second, the store notes the wall time and the last timestamp. The
        snapshot is as of the last such note at or before `at`, so a commit from the second before `at` may be missing.
        `snap.wall` is the time of that note.

        Args:
            fresh: ids of views, or of sinks: first wait until they reflect everything that was committed before the
                block was entered (V14). See `wait_for`.
            timeout: seconds for that wait.

        Raises: SnapshotTooOld; UsageError for a moment in the future; with `fresh`, also as `wait_for`.
        """
        views = self._fresh_views(ts, at, fresh, timeout)
        before = None if views is None else partial(self._until_fresh, views, timeout)
        return SnapshotBlock(self._snapshots, ts, at, before)

    async def snapshot_at(
        self,
        *,
        ts: int | None = None,
        at: datetime | None = None,
        fresh: str | Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> Snapshot:
        """Like `snapshot`, but the caller ends the snapshot by calling `end`."""
        views = self._fresh_views(ts, at, fresh, timeout)
        if views is not None:
            await self._until_fresh(views, timeout)
        return await self._snapshots.at(ts=ts, at=at)

    def _fresh_views(
        self, ts: int | None, at: datetime | None, fresh: str | Iterable[str] | None, timeout: float | None
    ) -> list[str] | None:
        if fresh is None:
            if timeout is not None:
                raise UsageError("timeout= bounds the wait for fresh=[...], which is not given")
            return None
        if ts is not None or at is not None:
            raise UsageError("fresh= is for a snapshot of now: give either fresh=, ts= or at=")
        return [fresh] if isinstance(fresh, str) else list(fresh)

    async def _until_fresh(self, views: list[str], timeout: float | None) -> None:
        """Wait until views reflect everything that was committed before this call (V14)."""
        self._must_observe_here()
        await self._until_reflected(await self._engine.oracle.newest(), views, timeout)

    @async_block("async with db.pin(...) as pin:")
    async def pin(
        self,
        name: str,
        *,
        lease_s: float,
        ts: int | None = None,
        at: datetime | None = None,
        owner: str | None = None,
        keep: bool = False,
    ) -> AsyncIterator[PinnedSnapshot]:
        """A snapshot that stays readable for as long as its lease is renewed, under a name that `perco pins` and
        `perco status` show.

            async with db.pin("nightly-export", lease_s=3600) as pin:
                async for row in pin.scan(docs): ...
                await pin.renew()

        Unlike a snapshot, a pin is durable: a program that dies, and is restarted within the lease, continues under the
        same name, at the same timestamp. An expired pin holds back nothing.

        Args:
            name: at most 64 characters. If there is a pin of that name, it is taken over and its lease restarts.
            lease_s: seconds; `renew` restarts it.
            ts, at: the moment to read at; now by default. See `snapshot`.
            owner: a description for human readers; by default the process and its command.
            keep: True: the end of the block does not drop the pin; it stays until its lease expires.

        Raises: SnapshotTooOld; UsageError for a name in use in this process, or pinned at another timestamp than
        `ts`; WriteUnknown if the pin may or may not have been created; if it was, it stays until it is dropped or its
        lease expires.
        """
        async with self._snapshots.pinned(name, lease_s, ts, at, owner, keep) as pin:
            yield pin

    def changes(
        self, *tables: Table[Any] | str, since: int | datetime | None = None, follow: bool = False
    ) -> ChangeStream:
        """What transactions have changed in tables that keep a log (`perco.Table(..., changes=True)`): transaction by
        transaction, in the order of their commit timestamps, with the values before and after (E2, E3).

            async with db.snapshot() as snap: ...                      # copy the table as it is
            async for changes in db.changes(docs, since=snap.start_ts, follow=True):
                for row in changes.rows: ...                           # row.key, row.before, row.after

        Args:
            tables: tables, or their names; the changes of one transaction in all of them come together.
            since: a timestamp: only transactions that committed after it; an aware datetime; None: only those that
                commit from the first iteration on.
            follow: wait for further changes. False: end at the present.

        To resume after a crash, store `changes.commit_ts` together with what was made of the changes, and pass it as
        `since`. (`frontier` of the iterator also advances while nothing changes.)

        Raises: UsageError for a table without a log; ReadOnly for a folder that was opened with readonly=True. While
        iterating: HistoryGone if the vacuum has removed changes since then; UsageError for a timestamp in the future.
        """
        return ChangeStream(self._engine, tables, since, follow)

    async def pins(self) -> list[Pin]:
        """All pins of the store, by name; also expired pins that the vacuum has not dropped yet."""
        return await self._snapshots.pins()

    async def drop_pin(self, name: str) -> bool:
        """Drop a pin; returns whether there was a pin of that name. After that, reads at its timestamp raise
        SnapshotTooOld as soon as the vacuum has removed versions."""
        return await self._snapshots.drop_pin(name)

    async def watermark(self) -> int:
        """The watermark: no open transaction or pin, of any process, reads below this timestamp (G1). It never goes
        back. An exporter may discard what it has recorded about versions below it."""
        self._engine.usable(writing=False)
        return await self._engine.oracle.watermark()

    async def trace(self, table: Table[K], key: K, *, progress: Callable[[int], None] | None = None) -> list[Traced]:
        """The transactions that wrote a row's values, with the observer runs that followed from the same causes, as
        trees, the newest first; [] for a row without values. This reads the write records of the whole store once.

        Args:
            progress: called with the number of rows read so far.
        """
        self._engine.usable(writing=False)
        return await trace(self._engine, must_be_table(table).name, table.row(key), progress or (lambda rows: None))

    async def vacuum(self, *, progress: Callable[[VacuumResult], None] | None = None) -> VacuumResult:
        """At once, remove the old versions that no reader needs any more. (A background task removes them, too.)

        Args:
            progress: called after every page, with the result so far.

        Raises: StoreFull if even the space reserved for a full disk is not enough; ReadOnly.
        """
        self._engine.usable(writing=True)
        return await self._owner.vacuum(progress)

    # ------------------------------------------------------------ tablets

    async def split(self, table: Table[K] | str, key: K | None = None) -> Split:
        """Split a tablet at a key. The new tablet has its own writer and its own file; in a store with tablet servers,
        another server may get it. The background task splits tablets that have become large (`SplitOptions`).

        Args:
            table: a table, or its name; with a name, `key` is the row key in stored form, as bytes.
            key: where the new tablet begins; None: in the middle of the table's largest tablet.

        Reads go on, and so do writes to other rows; writes to the new tablet's rows wait for a moment at the end.
        Raises: UsageError if a tablet already begins at that key, or if all of the tablet is in one row; StoreFull,
        Unavailable: nothing has changed; ReadOnly.
        """
        self._engine.usable(writing=True)
        return await self._owner.split(*where_to_split(table, key))

    async def bulk_load(
        self, tables: Mapping[Table[Any], Iterable[tuple[Any, Mapping[Column[Any, Any], Any]]]]
    ) -> Published:
        """Load whole tables at once, some ten times faster than in transactions: their rows are written to files in
        order, and the files become the tablets of the tables (P7).

            await db.bulk_load({docs: ((key, {title: text}) for key, text in sorted(texts.items()))})

        The tables must be empty. All rows appear in one step, as if one transaction had written them. Observers are
        notified of them. Until then, the store can be used as ever.

        Args:
            tables: for each table, pairs of a key and values by column, in ascending order of the keys. They are
                iterated in a thread.

        Returns the timestamp of the commit, the number of tablets, and for how long writes to the tables waited.
        Raises: UsageError if a table is not empty, the rows are not in order, the store has no files of its own
        (memory, a database, tablet servers) or is on another machine; StoreFull, Unavailable; what the iterables raise.
        Nothing has then been loaded. ReadOnly.
        """
        self._engine.usable(writing=True)
        return await bulk.bulk_load(self._engine, self._owner, tables)

    async def compact(self, table: Table[Any] | str | None = None) -> list[Compacted]:
        """Return unused space in the tablets' files to the file system: each tablet is copied, in key order, to a new
        file, which replaces the old one (P6). Without this, later writes reuse the space, but the file does not shrink.

        Args:
            table: a table, or its name; None: all.

        Returns the result for each tablet. Reads and writes go on; writes to a tablet wait for a moment at the end of
        its compaction. The disk needs room for one tablet's new file next to the old one. A cancellation
        leaves finished tablets compacted, and the one under way unchanged.
        Raises: UsageError for a store in memory, or if tablet servers have the tablets open; StoreFull, Unavailable:
        the current tablet and later ones are unchanged; ReadOnly.
        """
        self._engine.usable(writing=True)
        return await self._owner.compact(what_to_compact(table))

    async def backup(
        self,
        to: str | PathLike[str],
        *,
        full: bool = False,
        bytes_per_s: int = 64 << 20,
        progress: Callable[[int, int], None] | None = None,
    ) -> Backup:
        """Take a backup of the store, as `perco backup` does, in a process of its own (B1). Writes wait for a few
        milliseconds, at the beginning.

        Args:
            to: a folder of backups, which gets an incremental one if it has any; or, ending with .tar, a new file.
            full: store every page.
            bytes_per_s: how fast pages are read, at most; 0: no limit.
            progress: called now and then with the bytes that have been read, and with those that there are, about.

        Nothing is left of a backup that fails or is cancelled. Raises: UsageError if the store is not in a folder on
        this machine, or not shared; StoreLocked, StoreFull, UnsuitableFolder, Unavailable, Corruption,
        ReadOnly.
        """
        self._engine.usable(writing=True)
        path, id = await self._owner.folder_and_id()
        return await backing.backup(path, id, to, progress, full=full, bytes_per_s=bytes_per_s)

    # ------------------------------------------------------------ observers

    @async_block("async with db.worker():")
    async def worker(
        self, *, concurrency: int = 64, scanners: int | None = None, options: WorkerOptions | None = None
    ) -> AsyncIterator[WorkerHandle]:
        """Run the schema's observers while the block lasts.

        Args:
            concurrency: observer runs in flight.
            scanners: tasks that look for work; by default 4, but at most as many as `concurrency`.
            options: all of the above, and more, in one object; `scanners` must not exceed `concurrency`.
        """
        async with self._workers.running(concurrency, scanners, options) as handle:
            yield handle

    async def observers(self) -> list[ObserverState]:
        """All registered observers, by id."""
        return await self._observers.states()

    async def pause(self, id: str) -> None:
        """Pause an observer until it is resumed. The pause applies to all programs, and survives restarts.

        The observer's changes keep waiting. Once this method has returned, no run that was in progress can still
        commit; the change of such a run waits, too.

        Raises: UsageError for an observer that the store does not have; ReadOnly.
        """
        await self._observers.set_paused(id, True)

    async def resume(self, id: str) -> None:
        """Let a paused observer run again.

        Raises: as `pause`.
        """
        await self._observers.set_paused(id, False)

    async def drop_observer(self, id: str | Iterable[str]) -> dict[str, int]:
        """Unregister observers that no program declares any more, and remove the changes that wait for them, or that
        are on the failed list for them (N12).

        They no longer count in `waiting` and `wait_idle`. The rows that their runs have written stay. (For a view, call
        `perco.views.drop`.) A program that still declares such an observer registers it again when it opens the store:
        as a new observer, which is notified of all existing data. If this call is interrupted, call it again.

        Returns how many changes were removed, by id.

        Raises: UsageError for an observer that the store does not have, or that a running worker has; ReadOnly;
        StoreFull.
        """
        ids = [id] if isinstance(id, str) else list(id)
        if not all(isinstance(each, str) for each in ids):
            raise UsageError(f"an observer is named by its id, a str, not {id!r}")
        self._engine.usable(writing=True)
        return await self._observers.drop(ids, await self._owner.workers_now())

    async def drop_column(self, table: str, column: str | Iterable[str]) -> None:
        """Drop columns, or signals, of a table (N17).

        From now on, no transaction writes them. The vacuum removes their cells, once every reader that began before
        the drop has ended. A program that still declares such a column gets a SchemaMismatch where it uses it, from its
        next commit on; until then, a process that only reads may find the column empty. A
        program that declares it when it opens the store makes it again, as a new and empty column. So deploy a program
        without it first.

        Raises: UsageError for a table or a column that the store does not have, or that an observer, a view or a
        conversion needs: drop that first; ReadOnly; WriteUnknown.
        """
        columns = [column] if isinstance(column, str) else list(column)
        if not isinstance(table, str) or not all(isinstance(each, str) for each in columns):
            raise UsageError(f"tables and columns are named by strings, not {table!r} and {column!r}")
        self._engine.usable(writing=True)
        await self._observers.change(partial(removing.without_columns, table=table, columns=columns))

    async def drop_table(self, table: str) -> None:
        """Drop a table, with all of its columns (N17).

        As for `drop_column`. A table that is declared later may have the same name; if its keys have another codec,
        only once the vacuum has removed the rows. The files of the table keep their size until you call `compact`.

        Raises: UsageError for a table that the store does not have, or that observers observe, or views have rows in;
        ReadOnly; WriteUnknown.
        """
        if not isinstance(table, str):
            raise UsageError(f"a table is named by a string, not {table!r}")
        self._engine.usable(writing=True)
        await self._observers.change(partial(removing.without_table, table=table))

    async def paused(self) -> set[str]:
        """Ids of the observers that are paused."""
        return await self._observers.paused()

    async def unserved(self) -> set[str]:
        """Ids of the store's observers that this program's schema lacks (N10)."""
        return await self._observers.unserved()

    async def backfill(self, *, progress: Callable[[BackfillProgress], None] | None = None) -> list[BackfillProgress]:
        """Notify new observers, and new versions of observers, of existing data, at once (N10). (A background task does
        so, too.)

        Args:
            progress: called after every page.

        Returns the progress of each observer that had not been notified of all data. To wait until these observers have
        run, call `wait_idle`.

        Raises: StoreFull, Unavailable: the next call goes on where this one stopped; ReadOnly.
        """
        self._engine.usable(writing=True)
        return await self._owner.backfill(progress)

    async def failed(
        self, observer: str | None = None, *, key: Any = None, limit: int | None = 1000
    ) -> list[FailedChange]:
        """Changes on the failed list, by table and key.

        Args:
            observer: only its changes; `key`: only those of this row.
            limit: the largest number of changes; None: all.

        Raises: UsageError for an observer that the store does not have.
        """
        return await self._failed.changes(observer, key=key, limit=limit)

    async def replay_failed(self, observer: str | None = None, *, key: Any = None) -> int:
        """Replay changes on the failed list: they wait for their observers again. Returns how many.

        Args:
            observer, key: as for `failed`; all by default.

        Raises: UsageError for an observer that the store does not have; ReadOnly; StoreFull.
        """
        return await self._failed.replay(observer, key=key)

    async def drop_failed(self, observer: str, *, key: Any = None) -> int:
        """Acknowledge changes on the failed list: their observer never runs for them. Returns how many.

        Args:
            observer: the observer whose changes to drop; `key`: only those of this row.

        Raises: UsageError for an observer that the store does not have; ReadOnly; StoreFull; CommitUnknown.
        """
        return await self._failed.drop(observer, key=key)

    async def failed_count(self) -> int:
        """How many changes are on the failed list.

        Raises: Unavailable, in a client.
        """
        self._engine.usable(writing=False)
        return (await self._owner.now()).failed

    # ------------------------------------------------------------ waiting

    async def is_idle(self) -> bool:
        """Whether no change waits for an observer at this moment (N7). `wait_idle` waits until that is the case.

        Raises: ReadOnly for a folder that was opened with readonly=True; Unavailable, in a client.
        """
        self._must_observe_here()
        return (await self._owner.now()).idle

    async def pending(self) -> int:
        """How many changes and pending signals (N5) wait for observers. `waiting` counts them by observer.

        Raises: Unavailable, in a client.
        """
        self._engine.usable(writing=False)
        return (await self._owner.now()).pending

    async def waiting(self) -> dict[str, int]:
        """How many changes wait, by observer id. This scans the notify cells once."""
        return await self._waiting.counts()

    async def lag(self) -> dict[str, Lag]:
        """How far each observer lags behind, by id: how many changes wait for it, since when, and more.

        This is cheap at any number of waiting changes. If there are thousands, a background task counts them, and
        `Lag.counted_s` says how long ago. Only the first call waits for a count, and the first one after five minutes
        without calls.

        Raises: Unavailable, in a client.
        """
        self._engine.usable(writing=False)
        found = await self._owner.lag()
        self._lag = found, time.monotonic()
        return found

    async def wait_idle(self, *, timeout: float | None = None) -> int:
        """Wait until no change waits for an observer anywhere (N7). An observer that fails prolongs the wait until its
        change is on the failed list: in tests, give a `timeout`, in seconds, or allow few attempts
        (`WorkerOptions.attempts`).

        Returns how many changes are on the failed list; this method does not wait for those (N6; `db.failed`).
        Raises: UsageError if no process runs the observers, if they are paused, or if all remaining changes wait for
        observers that need asyncio, in a store that does not run on asyncio; NotIdle past the timeout, with counts by
        observer; Corruption if only unreadable cells are left: locks that may stand for notifications, or cells on
        which observers fail.
        """
        self._must_observe_here()
        async with self._waiting.deadline(timeout, "the store did not become idle"):
            return await self._owner.wait_idle()
        raise AssertionError

    async def wait_for(
        self, ts: int, *, views: str | Iterable[str] | None = None, timeout: float | None = None
    ) -> None:
        """Wait until observers have run for every change that was committed at or before `ts` (except changes made by
        observers), and for every change that followed from one of these (N7, N9).

        With `views`, it is sufficient that these views reflect all these changes (V14): a snapshot that is taken
        afterwards has the rows that their definitions give for sources that are at least as new as `ts`. The wait does
        not include observers of other views, unless one of `views` depends on them. Observers that are written by hand
        always count, except those whose `writes=` shows that no view depends on them.

        Args:
            ts: a commit timestamp: `txn.commit_ts`, or the result of `await txn.commit()`.
            views: ids of views, or of sinks, of this program's schema.
            timeout: seconds.

        Raises: UsageError if no process runs the observers, if they are paused, if `ts` has not been
        issued, or for an unknown view; NotIdle past the timeout, with counts by observer; Corruption if only unreadable
        cells are left, and one of them may date from `ts` or earlier; with `views`, NotFresh if all is reflected except
        changes on the failed list.
        """
        self._must_observe_here()
        if views is not None:
            await self._until_reflected(ts, [views] if isinstance(views, str) else list(views), timeout)
            return
        async with self._waiting.deadline(timeout, f"observers have not handled every change committed up to {ts}"):
            await self._waiting.must_be_past(ts)
            await self._owner.wait_for(ts, None)

    async def _until_reflected(self, ts: int, views: list[str], timeout: float | None) -> None:
        names = ", ".join(map(repr, views))
        failed: dict[str, int] = {}
        async with self._waiting.deadline(timeout, f"{names}: not every change committed up to {ts} is reflected"):
            await self._waiting.must_be_past(ts)
            concerned = await self._waiting.concerned_with(views)
            failed = await self._owner.wait_for(ts, sorted(concerned.without))
        if failed:
            raise NotFresh(views, ts, failed)

    async def freshness(self, views: str | Iterable[str] | None = None) -> dict[str, Freshness]:
        """How far views are up to date, by id: up to which timestamp they reflect all changes, and how many changes
        wait (V14). This reads what waits in the whole store.

        Args:
            views: ids of views, or of sinks, of this program's schema; by default, all.

        Raises: UsageError for an unknown view; ReadOnly for a folder that was opened with readonly=True.
        """
        self._must_observe_here()
        return await self._waiting.freshness_of(views, self._owner.freshness)

    def _must_observe_here(self) -> None:
        """Raise ReadOnly in a reader beside the owner: observers run in the owner's process."""
        self._engine.usable(writing=False)
        if self._engine.place.readonly:
            raise ReadOnly(
                "this store was opened with readonly=True: observers do not run here. Wait in the process that runs "
                "the worker, or with `perco wait`."
            )

    # ------------------------------------------------------------ state

    def statistics(self) -> Statistics:
        """Counts since the store was opened."""
        engine = self._engine
        loop, vacuum = self._owner.statistics()
        lag, found_at = self._lag
        since_s = time.monotonic() - found_at
        return Statistics(
            engine.fates.live(),
            engine.oracle.last,
            engine.known.catalogue.version,
            replace(engine.driver.counters),
            tuple(tablet.statistics() for tablet in self._owner.tablets()),
            loop,
            vacuum,
            engine.lines.statistics(),
            engine.prefetch.statistics(),
            damaged=tuple(engine.driver.damaged),
            lag={id: replace(each, counted_s=each.counted_s + since_s) for id, each in lag.items()},
            combined=engine.combining.combined,
        )
