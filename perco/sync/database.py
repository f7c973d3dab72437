# Written by tools/fronts.py: change the class that it is written from, and run that again.
"""An open store, for threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from os import PathLike
from typing import Any, Concatenate, ParamSpec, TypeVar

from perco.clock.holds import Pin
from perco.database import database as databases
from perco.database.backing import Backup
from perco.database.inside import inside
from perco.database.options import Options, Statistics
from perco.fronts.tries import Tries, limited
from perco.history.vacuumed import VacuumResult
from perco.notify.backfill import BackfillProgress
from perco.notify.concerned import Freshness
from perco.notify.failures import FailedChange
from perco.notify.lagging import Lag
from perco.notify.observers import ObserverState
from perco.notify.options import WorkerOptions
from perco.notify.tracing import Traced
from perco.protocol.reads import Isolation
from perco.schema.schema import Column, Schema, Table
from perco.sync.attempts import Attempts, Retrying
from perco.sync.blocks import Block, SnapshotBlock, TransactionBlock, WorkerHandle
from perco.sync.calling import Calling
from perco.sync.following import ChangeStream
from perco.sync.held import PinnedSnapshot, Snapshot, Transaction
from perco.sync.threads import Threads
from perco.tablets.compactor import Compacted
from perco.tablets.loading import Published
from perco.tablets.splitter import Split

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class Database(Calling):
    """An open store, for any number of threads. Made by `perco.sync.open`; use it inside that block only.

    Attributes: `config`, the options that it was opened with; `schema`, its tables, columns and observers.
    """

    _of: databases.Database

    def __init__(self, port: Threads, of: databases.Database) -> None:
        super().__init__(port, of)
        self.schema: Schema = of.schema
        self.config: Options = of.config
        self._engine = inside(of).engine
        self._default = limited(of, None, None, None)

    def run(self, function: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a transaction and commit; run it again on a TransientError: see
        `perco.Database.run`. The function runs in the calling thread; its transaction begins with its first read, or
        else with the commit.
        """
        return Retrying(self._port, self._engine, *self._default).run(function, *args, **kwargs)

    def attempts(self) -> Attempts:
        """Like `run`, but without a function: `for attempt in db.attempts(): with attempt as txn: ...`.

        The loop ends by itself once an attempt has committed. Do not leave it with `break` or `return`: a commit that
        conflicts needs the next attempt.
        """
        return Attempts(self._port, Tries(self._engine, *self._default))

    def options(
        self, *, attempts: int | None = None, timeout: float | None = None, isolation: Isolation | None = None
    ) -> Retrying:
        """`run` and `attempts` with other limits: see `perco.Database.options`. A thread cannot be stopped: past
        the timeout the function's next read raises Unavailable, or its commit does.
        """
        return Retrying(self._port, self._engine, *limited(self._of, attempts, timeout, isolation))

    def begin(self, *, isolation: Isolation | None = None) -> Transaction:
        """A transaction that the caller ends with `commit` or `discard`; prefer `transaction()` or `run`."""
        return Transaction(self._port, self._engine, self._ask("begin", (), {"isolation": isolation}))

    def transaction(self, *, isolation: Isolation | None = None) -> TransactionBlock:
        """One attempt: the transaction commits at the end of the block; an exception discards it.

        Afterwards, `txn.commit_ts` and `txn.outcome` hold the result.

        Args:
            isolation: "snapshot" or "serializable" (T14); by default as in `TransactionOptions`.
        """
        return TransactionBlock(self.begin, isolation)

    def put(self, column: Column[K, V], key: K, value: V) -> int:
        """Write a cell, in a transaction of its own; returns commit_ts. Observers of the column run, as always.

        In a function that runs in a transaction, or in an observer, this is a transaction apart, and is repeated with
        each attempt: write with `txn.set` there.
        Raises: as `run`; CommitUnknown, after which `outcome` says whether the value was written; TypeError or
        ValueError for a value that the codec cannot encode.
        """
        result: int = self._operate("put", (column, key, value), {})
        return result

    def delete(self, column: Column[K, Any], key: K) -> int:
        """Remove a cell's value, in a transaction of its own; returns commit_ts. Raises: as `run`."""
        result: int = self._operate("delete", (column, key), {})
        return result

    def put_if(self, column: Column[K, V], key: K, value: V | None, *, expected: V | None) -> int:
        """Write a cell if it holds the expected value (compare and set). Returns commit_ts, or 0 if it held another.

            if db.put_if(leader, "jobs", me, expected=None):
                ...

        Args:
            value: None: remove what the cell holds.
            expected: None: the cell must hold nothing. Values are compared with `==`, as they would be read.

        Raises: as `put`.
        """
        result: int = self._operate("put_if", (column, key, value), {"expected": expected})
        return result

    def add(self, column: Column[K, V], key: K, n: V) -> V:
        """Add a number to the number that a cell holds (none counts as zero); returns the new one.

            views = db.add(pages.views, url, 1)

        Every call is counted once. Calls of this process that add to the cell at the same time share commits (C10).
        Before you repeat one that has raised CommitUnknown, ask `outcome`.
        Raises: as `put`; TypeError if the cell holds no number; Unavailable with its `commit_ts`, if the number was
        added, but the sum is not known.
        """
        result: V = self._operate("add", (column, key, n), {})
        return result

    def append(self, column: Column[K, V], key: K, more: V) -> int:
        """Append to the bytes, the text, or the list that a cell holds (none counts as empty); returns commit_ts.

        Each append rewrites the whole value. Calls of this process that append to the cell at the same time share
        commits (C10), so they may return the same commit_ts. Before you repeat one that has raised CommitUnknown, ask
        `outcome`.
        Raises: as `put`; TypeError if the cell holds something else.
        """
        result: int = self._operate("append", (column, key, more), {})
        return result

    def outcome(self, token: str) -> int:
        """The outcome of a transaction (T4): its commit_ts, or 0 if it did not commit and never will.

        Args:
            token: from `CommitUnknown.token` or `txn.token`, of any process on this store.

        Raises: UsageError if this is no token, or one of another store; CommitUnknown, for good, if the records of
        the transaction may have been garbage-collected; ReadOnly, because the query itself settles the transaction.
        """
        result: int = self._ask("outcome", (token,), {})
        return result

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
        block = self._of.snapshot(ts=ts, at=at, fresh=fresh, timeout=timeout)
        return SnapshotBlock(self._port, block, lambda of: Snapshot(self._port, of), "with db.snapshot() as snap:")

    def snapshot_at(
        self,
        *,
        ts: int | None = None,
        at: datetime | None = None,
        fresh: str | Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> Snapshot:
        """Like `snapshot`, but the caller ends the snapshot by calling `end`."""
        how = {"ts": ts, "at": at, "fresh": fresh, "timeout": timeout}
        return Snapshot(self._port, self._ask("snapshot_at", (), how))

    def pin(
        self,
        name: str,
        *,
        lease_s: float,
        ts: int | None = None,
        at: datetime | None = None,
        owner: str | None = None,
        keep: bool = False,
    ) -> Block[PinnedSnapshot]:
        """A snapshot that stays readable for as long as its lease is renewed, under a name that `perco pins` and
        `perco status` show.

            with db.pin("nightly-export", lease_s=3600) as pin:
                for row in pin.scan(docs): ...
                pin.renew()

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
        block = self._of.pin(name, lease_s=lease_s, ts=ts, at=at, owner=owner, keep=keep)
        return Block(self._port, block, lambda of: PinnedSnapshot(self._port, of), "with db.pin(...) as pin:")

    def changes(
        self, *tables: Table[Any] | str, since: int | datetime | None = None, follow: bool = False
    ) -> ChangeStream:
        """What transactions have changed in tables that keep a log (`perco.Table(..., changes=True)`): transaction by
        transaction, in the order of their commit timestamps, with the values before and after (E2, E3).

            with db.snapshot() as snap: ...                      # copy the table as it is
            for changes in db.changes(docs, since=snap.start_ts, follow=True):
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
        of = self._ask("changes", tables, {"since": since, "follow": follow})
        return ChangeStream(of, lambda stream: self._port.ask(stream.fetch, (), {}))

    def pins(self) -> list[Pin]:
        """All pins of the store, by name; also expired pins that the vacuum has not dropped yet."""
        result: list[Pin] = self._ask("pins", (), {})
        return result

    def drop_pin(self, name: str) -> bool:
        """Drop a pin; returns whether there was a pin of that name. After that, reads at its timestamp raise
        SnapshotTooOld as soon as the vacuum has removed versions.
        """
        result: bool = self._ask("drop_pin", (name,), {})
        return result

    def watermark(self) -> int:
        """The watermark: no open transaction or pin, of any process, reads below this timestamp (G1). It never goes
        back. An exporter may discard what it has recorded about versions below it.
        """
        result: int = self._ask("watermark", (), {})
        return result

    def trace(self, table: Table[K], key: K, *, progress: Callable[[int], None] | None = None) -> list[Traced]:
        """The transactions that wrote a row's values, with the observer runs that followed from the same causes, as
        trees, the newest first; [] for a row without values. This reads the write records of the whole store once.

        Args:
            progress: called with the number of rows read so far.
        """
        result: list[Traced] = self._ask("trace", (table, key), {"progress": progress})
        return result

    def vacuum(self, *, progress: Callable[[VacuumResult], None] | None = None) -> VacuumResult:
        """At once, remove the old versions that no reader needs any more. (A background task removes them, too.)

        Args:
            progress: called after every page, with the result so far.

        Raises: StoreFull if even the space reserved for a full disk is not enough; ReadOnly.
        """
        result: VacuumResult = self._ask("vacuum", (), {"progress": progress})
        return result

    def split(self, table: Table[K] | str, key: K | None = None) -> Split:
        """Split a tablet at a key. The new tablet has its own writer and its own file; in a store with tablet servers,
        another server may get it. The background task splits tablets that have become large (`SplitOptions`).

        Args:
            table: a table, or its name; with a name, `key` is the row key in stored form, as bytes.
            key: where the new tablet begins; None: in the middle of the table's largest tablet.

        Reads go on, and so do writes to other rows; writes to the new tablet's rows wait for a moment at the end.
        Raises: UsageError if a tablet already begins at that key, or if all of the tablet is in one row; StoreFull,
        Unavailable: nothing has changed; ReadOnly.
        """
        result: Split = self._ask("split", (table, key), {})
        return result

    def bulk_load(self, tables: Mapping[Table[Any], Iterable[tuple[Any, Mapping[Column[Any, Any], Any]]]]) -> Published:
        """Load whole tables at once, some ten times faster than in transactions: their rows are written to files in
        order, and the files become the tablets of the tables (P7).

            db.bulk_load({docs: ((key, {title: text}) for key, text in sorted(texts.items()))})

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
        result: Published = self._ask("bulk_load", (tables,), {})
        return result

    def compact(self, table: Table[Any] | str | None = None) -> list[Compacted]:
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
        result: list[Compacted] = self._ask("compact", (table,), {})
        return result

    def backup(
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
        result: Backup = self._ask("backup", (to,), {"full": full, "bytes_per_s": bytes_per_s, "progress": progress})
        return result

    def worker(
        self, *, concurrency: int = 64, scanners: int | None = None, options: WorkerOptions | None = None
    ) -> Block[WorkerHandle]:
        """Run the schema's observers while the block lasts, on the store's loop: see `perco.Database.worker`. Plain
        functions become observers with `@perco.sync.observer`.
        """
        block = self._of.worker(concurrency=concurrency, scanners=scanners, options=options)
        return Block(self._port, block, lambda of: WorkerHandle(self._port, of), "with db.worker():")

    def observers(self) -> list[ObserverState]:
        """All registered observers, by id."""
        result: list[ObserverState] = self._ask("observers", (), {})
        return result

    def pause(self, id: str) -> None:
        """Pause an observer until it is resumed. The pause applies to all programs, and survives restarts.

        The observer's changes keep waiting. Once this method has returned, no run that was in progress can still
        commit; the change of such a run waits, too.

        Raises: UsageError for an observer that the store does not have; ReadOnly.
        """
        self._ask("pause", (id,), {})

    def resume(self, id: str) -> None:
        """Let a paused observer run again.

        Raises: as `pause`.
        """
        self._ask("resume", (id,), {})

    def drop_observer(self, id: str | Iterable[str]) -> dict[str, int]:
        """Unregister observers that no program declares any more, and remove the changes that wait for them, or that
        are on the failed list for them (N12).

        They no longer count in `waiting` and `wait_idle`. The rows that their runs have written stay. (For a view, call
        `perco.views.drop`.) A program that still declares such an observer registers it again when it opens the store:
        as a new observer, which is notified of all existing data. If this call is interrupted, call it again.

        Returns how many changes were removed, by id.

        Raises: UsageError for an observer that the store does not have, or that a running worker has; ReadOnly;
        StoreFull.
        """
        result: dict[str, int] = self._ask("drop_observer", (id,), {})
        return result

    def drop_column(self, table: str, column: str | Iterable[str]) -> None:
        """Drop columns, or signals, of a table (N17).

        From now on, no transaction writes them. The vacuum removes their cells, once every reader that began before
        the drop has ended. A program that still declares such a column gets a SchemaMismatch where it uses it, from its
        next commit on; until then, a process that only reads may find the column empty. A
        program that declares it when it opens the store makes it again, as a new and empty column. So deploy a program
        without it first.

        Raises: UsageError for a table or a column that the store does not have, or that an observer, a view or a
        conversion needs: drop that first; ReadOnly; WriteUnknown.
        """
        self._ask("drop_column", (table, column), {})

    def drop_table(self, table: str) -> None:
        """Drop a table, with all of its columns (N17).

        As for `drop_column`. A table that is declared later may have the same name; if its keys have another codec,
        only once the vacuum has removed the rows. The files of the table keep their size until you call `compact`.

        Raises: UsageError for a table that the store does not have, or that observers observe, or views have rows in;
        ReadOnly; WriteUnknown.
        """
        self._ask("drop_table", (table,), {})

    def paused(self) -> set[str]:
        """Ids of the observers that are paused."""
        result: set[str] = self._ask("paused", (), {})
        return result

    def unserved(self) -> set[str]:
        """Ids of the store's observers that this program's schema lacks (N10)."""
        result: set[str] = self._ask("unserved", (), {})
        return result

    def backfill(self, *, progress: Callable[[BackfillProgress], None] | None = None) -> list[BackfillProgress]:
        """Notify new observers, and new versions of observers, of existing data, at once (N10). (A background task does
        so, too.)

        Args:
            progress: called after every page.

        Returns the progress of each observer that had not been notified of all data. To wait until these observers have
        run, call `wait_idle`.

        Raises: StoreFull, Unavailable: the next call goes on where this one stopped; ReadOnly.
        """
        result: list[BackfillProgress] = self._ask("backfill", (), {"progress": progress})
        return result

    def failed(self, observer: str | None = None, *, key: Any = None, limit: int | None = 1000) -> list[FailedChange]:
        """Changes on the failed list, by table and key.

        Args:
            observer: only its changes; `key`: only those of this row.
            limit: the largest number of changes; None: all.

        Raises: UsageError for an observer that the store does not have.
        """
        result: list[FailedChange] = self._ask("failed", (observer,), {"key": key, "limit": limit})
        return result

    def replay_failed(self, observer: str | None = None, *, key: Any = None) -> int:
        """Replay changes on the failed list: they wait for their observers again. Returns how many.

        Args:
            observer, key: as for `failed`; all by default.

        Raises: UsageError for an observer that the store does not have; ReadOnly; StoreFull.
        """
        result: int = self._ask("replay_failed", (observer,), {"key": key})
        return result

    def drop_failed(self, observer: str, *, key: Any = None) -> int:
        """Acknowledge changes on the failed list: their observer never runs for them. Returns how many.

        Args:
            observer: the observer whose changes to drop; `key`: only those of this row.

        Raises: UsageError for an observer that the store does not have; ReadOnly; StoreFull; CommitUnknown.
        """
        result: int = self._ask("drop_failed", (observer,), {"key": key})
        return result

    def failed_count(self) -> int:
        """How many changes are on the failed list.

        Raises: Unavailable, in a client.
        """
        result: int = self._ask("failed_count", (), {})
        return result

    def is_idle(self) -> bool:
        """Whether no change waits for an observer at this moment (N7). `wait_idle` waits until that is the case.

        Raises: ReadOnly for a folder that was opened with readonly=True; Unavailable, in a client.
        """
        result: bool = self._ask("is_idle", (), {})
        return result

    def pending(self) -> int:
        """How many changes and pending signals (N5) wait for observers. `waiting` counts them by observer.

        Raises: Unavailable, in a client.
        """
        result: int = self._ask("pending", (), {})
        return result

    def waiting(self) -> dict[str, int]:
        """How many changes wait, by observer id. This scans the notify cells once."""
        result: dict[str, int] = self._ask("waiting", (), {})
        return result

    def lag(self) -> dict[str, Lag]:
        """How far each observer lags behind, by id: how many changes wait for it, since when, and more.

        This is cheap at any number of waiting changes. If there are thousands, a background task counts them, and
        `Lag.counted_s` says how long ago. Only the first call waits for a count, and the first one after five minutes
        without calls.

        Raises: Unavailable, in a client.
        """
        result: dict[str, Lag] = self._ask("lag", (), {})
        return result

    def wait_idle(self, *, timeout: float | None = None) -> int:
        """Wait until no change waits for an observer anywhere (N7). An observer that fails prolongs the wait until its
        change is on the failed list: in tests, give a `timeout`, in seconds, or allow few attempts
        (`WorkerOptions.attempts`).

        Returns how many changes are on the failed list; this method does not wait for those (N6; `db.failed`).
        Raises: UsageError if no process runs the observers, if they are paused, or if all remaining changes wait for
        observers that need asyncio, in a store that does not run on asyncio; NotIdle past the timeout, with counts by
        observer; Corruption if only unreadable cells are left: locks that may stand for notifications, or cells on
        which observers fail.
        """
        result: int = self._ask("wait_idle", (), {"timeout": timeout})
        return result

    def wait_for(self, ts: int, *, views: str | Iterable[str] | None = None, timeout: float | None = None) -> None:
        """Wait until observers have run for every change that was committed at or before `ts` (except changes made by
        observers), and for every change that followed from one of these (N7, N9).

        With `views`, it is sufficient that these views reflect all these changes (V14): a snapshot that is taken
        afterwards has the rows that their definitions give for sources that are at least as new as `ts`. The wait does
        not include observers of other views, unless one of `views` depends on them. Observers that are written by hand
        always count, except those whose `writes=` shows that no view depends on them.

        Args:
            ts: a commit timestamp: `txn.commit_ts`, or the result of `txn.commit()`.
            views: ids of views, or of sinks, of this program's schema.
            timeout: seconds.

        Raises: UsageError if no process runs the observers, if they are paused, if `ts` has not been
        issued, or for an unknown view; NotIdle past the timeout, with counts by observer; Corruption if only unreadable
        cells are left, and one of them may date from `ts` or earlier; with `views`, NotFresh if all is reflected except
        changes on the failed list.
        """
        self._ask("wait_for", (ts,), {"views": views, "timeout": timeout})

    def freshness(self, views: str | Iterable[str] | None = None) -> dict[str, Freshness]:
        """How far views are up to date, by id: up to which timestamp they reflect all changes, and how many changes
        wait (V14). This reads what waits in the whole store.

        Args:
            views: ids of views, or of sinks, of this program's schema; by default, all.

        Raises: UsageError for an unknown view; ReadOnly for a folder that was opened with readonly=True.
        """
        result: dict[str, Freshness] = self._ask("freshness", (views,), {})
        return result

    def statistics(self) -> Statistics:
        """Counts since the store was opened."""
        result: Statistics = self._ask("statistics", (), {})
        return result
