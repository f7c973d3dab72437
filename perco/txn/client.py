"""A store opened for transactions: `run`, `attempts`, `transaction`, `snapshot`, `outcome`.

T10 A deadline or a cancellation before the commit is sent means that it did not happen.
T11 A retry runs the function again, with a new start_ts; the writes of a failed attempt are never replayed.
T14 `isolation="serializable"`, per transaction or for all of a store.
T15 A snapshot at a past timestamp is checked against what was issued and what was kept.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import secrets
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import trio

from perco.errors import (
    AsyncOnly,
    CommitUnknown,
    PercoError,
    ReadConflict,
    ReadOnly,
    SchemaMismatch,
    SnapshotTooOld,
    TransientError,
    Unavailable,
    UsageError,
    WriteUnknown,
    async_block,
    must_be_number,
)
from perco.naming import told_as
from perco.options import check_options
from perco.rpc.channel import WireOptions
from perco.storage import Batching, BatchOptions, LmdbOptions, RowStore, TabletStatistics
from perco.txn.attempts import Attempts, RetryOptions, late
from perco.txn.backfill import Backfill, BackfillOptions, BackfillProgress
from perco.txn.background import Background
from perco.txn.catalogue import Bound, Catalogue, change, load
from perco.txn.codecs import codec_named
from perco.txn.compactor import Compacted, Compactor, what_to_compact
from perco.txn.driver import CommitOptions, Counters, Driver, StaleAt, read_token
from perco.txn.fates import Fates
from perco.txn.heartbeat import Heartbeat
from perco.txn.holds import Pin
from perco.txn.local import LocalStore
from perco.txn.loopwatch import HeartbeatOptions, LoopStatistics, LoopWatch
from perco.txn.oracle import Oracle, OracleOptions, oldest_wall
from perco.txn.past import PastSnapshot, PinnedSnapshot
from perco.txn.pins import must_be_name, pins_in
from perco.txn.prefetch import Predictor, PrefetchCounters, PrefetchOptions, name_of
from perco.txn.reads import Isolation, Reads, is_serializable
from perco.txn.records import Cellref
from perco.txn.schema import Column, Schema, Signal, Table
from perco.txn.splitter import Split, SplitOptions, Splitter, where_to_split
from perco.txn.transaction import Snapshot, Transaction
from perco.txn.turns import Lines, Turn, TurnCounters
from perco.txn.vacuum import Vacuum, VacuumOptions, VacuumResult, VacuumStatistics

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")


_GIVE_BACK_S: Final = 10.0  # for giving back a pin that was not to be taken over after all
_GIVE_BACK_AGAIN_S: Final = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TransactionOptions:
    """Limits of one transaction, and what it is like unless it is begun otherwise.

    Attributes:
        cells_max: cells it writes; and cells it locks without writing them.
        bytes_max: bytes of values.
        reads_max: cells and scans that a serializable transaction reads.
        isolation: "snapshot", which allows write skew, or "serializable" (T14).
    """

    cells_max: int = 100_000
    bytes_max: int = 256 << 20
    reads_max: int = 100_000
    isolation: Isolation = "snapshot"

    def __post_init__(self) -> None:
        check_options(self)
        is_serializable(self.isolation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """All that can be set for a store. Each part is a frozen dataclass of its component.

    Attributes:
        durability: "power": an acknowledged write survives power loss; "process": only the death of the process (S2).
            The process that opens the folder decides, as it does for lmdb, oracle, vacuum, backfill and split; a client
            of it gets what was decided there (`perco serve --durability`).
        shared: let other processes of the same user open the folder too, through this one; and open one through its
            owner. False: the folder is this process's alone.
        wire: how clients and servers talk.
        wall: the machine's clock, seconds since 1970.
        seed: of every random choice; None: from the system.
        on_event: called on the loop with the name of each step of the store ("prewrite", "commit", "secondaries",
            "recovery", "ack"; of a vacuum "watermark", "floor", "locks", "vacuum"): for tests that stop it anywhere,
            and for tracing.
    """

    durability: str = "power"
    shared: bool = True
    wire: WireOptions = field(default_factory=WireOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    lmdb: LmdbOptions = field(default_factory=LmdbOptions)
    oracle: OracleOptions = field(default_factory=OracleOptions)
    commit: CommitOptions = field(default_factory=CommitOptions)
    retry: RetryOptions = field(default_factory=RetryOptions)
    transaction: TransactionOptions = field(default_factory=TransactionOptions)
    prefetch: PrefetchOptions = field(default_factory=PrefetchOptions)
    heartbeat: HeartbeatOptions = field(default_factory=HeartbeatOptions)
    vacuum: VacuumOptions = field(default_factory=VacuumOptions)
    backfill: BackfillOptions = field(default_factory=BackfillOptions)
    split: SplitOptions = field(default_factory=SplitOptions)
    wall: Callable[[], float] = time.time
    seed: int | None = None
    on_event: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        check_options(self, free=("seed",))
        if self.durability not in ("power", "process"):
            raise UsageError(f'durability is "power" or "process", not {self.durability!r}')


@dataclass(frozen=True, slots=True)
class Statistics:
    """A store's statistics since it was opened.

    Attributes: `prefetch`: by observer and function that has run; "transaction" and "snapshot" are those opened as
    blocks. `damaged`: stored cells that tasks of the store's own could not read and went on without, the first
    1000; `perco check` finds them all.
    """

    live_transactions: int
    last_ts: int
    catalogue_version: int
    counters: Counters
    tablets: tuple[TabletStatistics, ...]
    loop: LoopStatistics
    vacuum: VacuumStatistics
    turns: TurnCounters
    prefetch: Mapping[str, PrefetchCounters]
    damaged: tuple[str, ...] = ()


@told_as("Database")
class Client:
    """Transactions over one opened store. Loop thread only; made by `perco.open`."""

    _served = False  # whether the store is in another process
    _on_asyncio = False  # whether its loop is the guest of one of asyncio's
    _borrowed = False  # whether the schema is the store's own: then columns are told by what they declare

    def __init__(self, local: LocalStore, schema: Schema, options: Options) -> None:
        self.local, self.schema, self.config = local, schema, options
        self.bounds: dict[Column[Any, Any], Bound] = {}
        self.signals: dict[Signal[Any], Bound] = {}
        self.catalogue = Catalogue()
        self.fates = Fates()
        self._serializable = is_serializable(options.transaction.isolation)
        self.random = random.Random(options.seed)
        self.lease_token = f"{self.random.getrandbits(64):016x}"
        self.oracle = Oracle(local.store, options.oracle, options.wall)
        self.background = Background()
        self.lines = Lines()  # of those who conflict
        self.prefetch = Predictor(options.prefetch, served=self._served)
        self._pinned: set[str] = set()  # names of pins whose block has not ended
        store = self._windowed(options)
        self.driver = Driver(store, self.oracle, self.fates, options.commit, self.background, options.on_event)
        self.driver.name = self.name_of
        self.heartbeat: LoopWatch = Heartbeat(options.heartbeat, local.store, options.wall, self.lease_token)
        self.vacuuming = Vacuum(local, self.driver, options.vacuum, lambda: self.catalogue, options.on_event)
        self.backfilling = Backfill(
            self.driver, self.background, options.backfill, lambda: self.catalogue, self.change_catalogue
        )
        self.splitting = Splitter(local, self.background, options.split, lambda: self.catalogue, self._adopt)
        self.compacting = Compactor(local, self.background, self.splitting)

    def _windowed(self, options: Options) -> RowStore:
        """The store, as transactions see it: with a window, if the options have one (D3). An adaptive window has no use
        in the owner: its reads do not wait, and its mutations gather behind each other anyway."""
        if options.batch.window_s and not options.batch.adaptive and not self._served:
            return Batching(self.local.store, options.batch, self.background.spawn)
        return self.local.store

    # ------------------------------------------------------------ transactions

    def run(
        self, function: Callable[Concatenate[Transaction, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Run a function in a transaction and commit; again from its beginning on a TransientError (T11).

            total = await db.run(transfer, source, target, amount)

        Returns what the function returned in the attempt that committed. To get the commit timestamp, for `wait_for` or
        `snapshot(ts=)`, let the function end in `return await txn.commit()`.
        Raises: WriteConflict or ReadConflict after the last attempt; Unavailable past the timeout; CommitUnknown; and
        the function's own exceptions, after discarding its writes.
        """
        return self._run_as(self.config.retry, self._serializable, function, args, kwargs)

    def _run_as(
        self,
        retry: RetryOptions,
        serializable: bool,
        function: Callable[..., Awaitable[T]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Coroutine[Any, Any, T]:
        run = self._run if retry.timeout_s is None else self._run_until
        running = run(retry, serializable, function, args, kwargs)
        running.__qualname__ = "Database.run"  # type: ignore[attr-defined]  # for Python's "never awaited" warning
        return running

    async def _run_until(
        self,
        retry: RetryOptions,
        serializable: bool,
        function: Callable[..., Awaitable[T]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> T:
        assert retry.timeout_s is not None
        _must_be_async(function, None)
        last: list[Transaction] = []
        met: list[TransientError] = []

        @functools.wraps(function)
        def noted(txn: Transaction, *args: Any, **kwargs: Any) -> Awaitable[T]:
            last[:] = [txn]
            return function(txn, *args, **kwargs)

        with trio.move_on_after(retry.timeout_s):
            return await self._run(retry, serializable, noted, args, kwargs, met)
        raise late(retry, met, last[0] if last else None)

    async def _run(
        self,
        retry: RetryOptions,
        serializable: bool,
        function: Callable[..., Awaitable[T]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        met: list[TransientError] | None = None,
    ) -> T:
        """`met`: is told each failure."""
        failed = 0
        turn: Turn | None = None  # once it has met others
        background, local = self.background, self.local
        while True:
            if background.ended or local.forked or local.readonly:
                self.usable(writing=True)
            txn = Transaction(self, self.oracle.draw_nowait() or await self.oracle.draw())
            if self.prefetch.on:
                txn._ahead = self.prefetch.begin(name_of(function))
            if serializable:
                txn._reads = Reads(self.config.transaction.reads_max)
            running: Awaitable[T] | None = None
            try:
                running = function(txn, *args, **kwargs)
                if running is None:
                    raise UsageError("db.run takes an `async def` function")
                result = await running
                if txn.outcome == "open":
                    await txn.commit()
                return result
            except TypeError:
                _must_be_async(function, running)
                raise
            except TransientError as error:
                failed += 1
                if met is not None:
                    met.append(error)
                    del met[:-1]
                if txn.outcome == "committed":  # by the function itself: not twice
                    raise
                error.attempts = failed
                if failed >= retry.attempts:
                    raise
                met_on = error.met_on
            finally:
                txn.discard()
                if turn is not None:
                    turn.leave()
            if turn is None:
                turn = Turn(self.lines, retry.turn_s)
            if turn.met(met_on):
                await trio.sleep(retry.delay_s(turn.lost, self.random))
            await turn.take()

    def attempts(self) -> Attempts:
        """The same without a function: `async for attempt in db.attempts(): async with attempt as txn: ...`.

        The loop ends by itself once an attempt has committed. Leave it neither with `break` nor with `return`: a commit
        that meets another one needs the next attempt.
        """
        return Attempts(self, self.config.retry, self._serializable)

    def options(
        self, *, attempts: int | None = None, timeout: float | None = None, isolation: Isolation | None = None
    ) -> Retrying:
        """`run` and `attempts` with other limits: `db.options(attempts=5, timeout=2.0).run(...)`.

        Args:
            attempts: the largest number of attempts, including the first.
            timeout: seconds for all attempts together. A commit that was sent by then is still waited for (T10).
            isolation: "snapshot" or "serializable" (T14); by default as in `TransactionOptions`.
        """
        retry = self.config.retry
        if attempts is not None:
            if not isinstance(attempts, int) or attempts < 1:
                raise UsageError(f"attempts is {attempts!r}; it is an int, and at least one is needed")
            retry = replace(retry, attempts=attempts)
        if timeout is not None:
            must_be_number("timeout", timeout)
            retry = replace(retry, timeout_s=timeout)
        return Retrying(self, retry, self._is_serializable(isolation))

    def _is_serializable(self, isolation: Isolation | None) -> bool:
        return self._serializable if isolation is None else is_serializable(isolation)

    async def begin(self, *, isolation: Isolation | None = None) -> Transaction:
        """A transaction that the caller ends with `commit` or `discard`; prefer `transaction()` or `run`."""
        return await self._begin_as("transaction", isolation)

    async def _begin_as(self, function: str, isolation: Isolation | None) -> Transaction:
        """`function`: by whose past it is read ahead."""
        self.usable(writing=True)
        serializable = self._is_serializable(isolation)
        return self._begun(self.oracle.draw_nowait() or await self.oracle.draw(), serializable, function)

    def begin_nowait(self, *, isolation: Isolation | None = None) -> Transaction | None:
        """As `begin` where there is nothing to wait for, else None."""
        return self._begin_nowait_as("transaction", isolation)

    def _begin_nowait_as(self, function: str, isolation: Isolation | None) -> Transaction | None:
        self.usable(writing=True)
        serializable = self._is_serializable(isolation)
        start_ts = self.oracle.draw_nowait()
        return self._begun(start_ts, serializable, function) if start_ts else None

    def _begun(self, start_ts: int, serializable: bool, function: str) -> Transaction:
        txn = Transaction(self, start_ts)
        if self.prefetch.on:
            txn._ahead = self.prefetch.begin(function)
        if serializable:
            txn._reads = Reads(self.config.transaction.reads_max)
        return txn

    def transaction(self, *, isolation: Isolation | None = None) -> TransactionBlock:
        """One try: commits at the end of the block; an exception discards it.

        Afterwards `txn.commit_ts` and `txn.outcome` tell what came of it.

        Args:
            isolation: "snapshot" or "serializable" (T14); by default as in `TransactionOptions`.
        """
        return TransactionBlock(self, isolation)

    def snapshot(self, *, ts: int | None = None, at: datetime | None = None) -> SnapshotBlock:
        """The store as of now, of a timestamp `ts`, or of a wall time `at` (an aware datetime).

        `at` is exact to about a second: what is read is the last note of the clock at or before it, so a commit of the
        last second may be missing; `snap.wall` says which note it was.

        Raises: SnapshotTooOld, UsageError for a moment that has not come.
        """
        return SnapshotBlock(self, ts, at)

    async def snapshot_at(self, *, ts: int | None = None, at: datetime | None = None) -> Snapshot:
        """As `snapshot`; whoever takes it calls its `end`."""
        self.usable(writing=False)
        if ts is not None and at is not None:
            raise UsageError("give either ts= or at=, not both")
        if ts is not None and (isinstance(ts, bool) or not isinstance(ts, int)):
            raise UsageError(f"ts= takes a timestamp, an int as in txn.commit_ts, not {ts!r}; for times there is at=")
        if at is not None:
            if not isinstance(at, datetime):
                raise UsageError(
                    f"at= takes an aware datetime, not {at!r}: datetime.now(timezone.utc) - timedelta(hours=1), or "
                    "datetime.fromtimestamp(seconds, timezone.utc)"
                )
            if at.tzinfo is None:
                raise UsageError("at= needs an aware datetime: datetime.now(timezone.utc), or .astimezone()")
            found, wall = await self.oracle.at(at.timestamp())
            try:
                snap = await self._held(found)
            except SnapshotTooOld:  # to be said in the terms in which it was asked
                oldest = await oldest_wall(self.local.store, await self.oracle.oldest())
                raise SnapshotTooOld(at.timestamp(), oldest) from None
            snap.wall = wall
            return snap
        if self.local.readonly:
            term = self.local.term  # asked first: what is drawn is of this term, or ends at its first read
            newest = await self.oracle.draw()
            if ts is None:
                return PastSnapshot(self, newest, 0, term)
        if ts is not None:
            if not 1 <= ts <= self.oracle.last:
                raise UsageError(f"there is no snapshot at {ts}: timestamps so far are 1 to {self.oracle.last}")
            return await self._held(ts)
        snap = Snapshot(self, await self.oracle.draw())
        if self.prefetch.on:
            snap._ahead = self.prefetch.begin("snapshot")
        self.oracle.holds.open.add(snap.start_ts)
        return snap

    async def _held(self, ts: int) -> Snapshot:
        """A snapshot at a past timestamp, checked and held in one step (T15); beside the owner it is only checked."""
        if self.local.readonly:
            return PastSnapshot(self, ts, 0, self.local.term)
        return PastSnapshot(self, ts, await self.oracle.hold(ts))

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
        """A snapshot that stays readable however long it takes, under a name that `perco pins` and `perco status` show.

            async with db.pin("nightly-export", lease_s=3600) as pin:
                async for row in pin.scan(docs): ...
                await pin.renew()

        Unlike `snapshot` it is durable: a process that died continues under the same name, at the same timestamp, if it
        comes back within the lease. After its lease a pin holds nothing any more.

        Args:
            name: at most 64 characters. If there is a pin of that name, it is taken over and its lease restarts.
            lease_s: seconds; `renew` restarts it.
            ts, at: which moment; now by default. See `snapshot`.
            owner: for people; by default the process and its command.
            keep: leave the pin at the end of the block, until its lease runs out.

        Raises: SnapshotTooOld; UsageError for a name in use here, or pinned at another timestamp than `ts`;
        WriteUnknown if nobody knows whether the pin is there: it holds until it is dropped, or its lease runs out.
        """
        self.usable(writing=True)
        must_be_number("a pin's lease_s", lease_s)
        must_be_name(name)
        if owner is not None and not isinstance(owner, str):
            raise UsageError(f"a pin's owner is a str, for people, not {owner!r}")
        owner = owner or f"{os.getpid()} {' '.join(sys.argv)}"
        owner = owner.encode(errors="backslashreplace").decode()  # a command may have file names that are not UTF-8
        if name in self._pinned:
            raise UsageError(f"pin {name!r} is in use in this process; choose another name")
        self._pinned.add(name)
        try:
            pin, wall = await self._take_pin(name, lease_s, ts, at, owner)
            snap = PinnedSnapshot(self, pin, lease_s)
            snap.wall = wall
            try:
                yield snap
            finally:
                snap.end()
                if not keep:
                    with trio.CancelScope(shield=True):
                        await self.oracle.pins.drop(name, pin.id)
        finally:
            self._pinned.discard(name)

    async def _take_pin(
        self, name: str, lease_s: float, ts: int | None, at: datetime | None, owner: str
    ) -> tuple[Pin, float | None]:
        standing = await self.oracle.pins.find(name)
        if standing is not None:
            if at is not None or ts not in (None, standing.ts):
                raise UsageError(
                    f"pin {name!r} stands at timestamp {standing.ts}; drop it first (await db.drop_pin({name!r})), or "
                    "take it up as it is, without ts= or at="
                )
            id = secrets.token_hex(8)
            try:
                return await self.oracle.pins.put(name, owner, standing.ts, lease_s, id, standing.id), None
            except BaseException:
                self.background.spawn(lambda: self._give_back(standing, id))
                raise
        snap = await self.snapshot_at(ts=ts, at=at)  # which holds its timestamp until the pin does
        try:
            pin = await self.oracle.pins.put(name, owner, snap.start_ts, lease_s, secrets.token_hex(8))
            return pin, snap.wall
        finally:
            snap.end()

    async def _give_back(self, former: Pin, id: str) -> None:
        """Return a pin to its former holder, for the rest of its lease. Nobody knows whether it was taken over under
        the id. If this does not succeed soon, the pin stands until the new lease runs out."""
        pins = self.oracle.pins
        with trio.move_on_after(_GIVE_BACK_S), contextlib.suppress(PercoError):
            while True:
                left_s = (former.expires_ms - self.oracle.wall_ms()) / 1000
                try:
                    if left_s <= 0:
                        await pins.drop(former.name, id)
                    else:
                        await pins.put(former.name, former.owner, former.ts, left_s, former.id, id)
                    return
                except (Unavailable, WriteUnknown):
                    await trio.sleep(_GIVE_BACK_AGAIN_S)

    async def pins(self) -> list[Pin]:
        """All pins of the store, by name; those whose lease has run out until the next vacuum forgets them."""
        self.usable(writing=False)
        return await pins_in(self.local.store)

    async def drop_pin(self, name: str) -> bool:
        """End a pin; returns whether there was one of that name. Reads at it raise SnapshotTooOld from then on, as soon
        as the versions have gone."""
        self.usable(writing=True)
        return await self.oracle.pins.drop_named(name)

    async def outcome(self, token: str) -> int:
        """The outcome of a transaction (T4): its commit_ts, or 0: it did not commit and never will.

        Args:
            token: from `CommitUnknown.token` or `txn.token`, of any process on this store.

        Raises: UsageError for another value, or another store's token; CommitUnknown, for good, if nobody can tell any
        more; ReadOnly, because asking settles the transaction.
        """
        self.usable(writing=True)
        if not isinstance(token, str):
            raise UsageError(f"{token!r} is not a transaction's token, which is a str: txn.token, CommitUnknown.token")
        try:
            start_ts, primary = read_token(token)
        except ValueError as error:
            raise UsageError(f"{token!r} is not a transaction's token") from error
        # Another process of the store may have been given later timestamps than this one; none that is still to come.
        drawn = 0 < start_ts <= self.oracle.last or 0 < start_ts <= await self.oracle.newest()
        if not drawn or not self.catalogue.has(primary.table, primary.column):
            raise UsageError(f"{token!r} is the token of a transaction on another store")
        return await self.driver.outcome(start_ts, primary)

    async def vacuum(self, *, progress: Callable[[VacuumResult], None] | None = None) -> VacuumResult:
        """Remove old versions that nobody can read any more, now; in the background it happens by itself.

        Args:
            progress: called after every page, with what was done so far.

        Raises: StoreFull where not even the reserve of a full disk suffices; ReadOnly.
        """
        self.usable(writing=True)
        return await self.vacuuming.run(tell=progress)

    async def backfill(self, *, progress: Callable[[BackfillProgress], None] | None = None) -> list[BackfillProgress]:
        """Notify new observers, and higher versions of them, of what is there, now (N10); in the background it happens
        by itself.

        Args:
            progress: called after every page.

        Returns what was done for each observer that had not been told of all. Whether they have run is another
        question: `wait_idle`.

        Raises: StoreFull, Unavailable: the same call goes on from there; ReadOnly.
        """
        self.usable(writing=True)
        return await self.backfilling.run(tell=progress)

    async def split(self, table: Table[K] | str, key: K | None = None) -> Split:
        """Have a tablet of its own begin at a key: with a writer of its own, a file, and where tablet servers serve, a
        server. In the background that happens to tablets that have become large (`SplitOptions`).

        Args:
            table: which, or its name; then a key is the row as it is stored, in bytes.
            key: where; None: in the middle of the table's largest tablet.

        Reads go on, and so do writes to other rows; writes to those of the new tablet wait for a moment at the end.
        Raises: UsageError where a tablet begins at that key, or all is in one row; StoreFull, Unavailable: nothing has
        changed; ReadOnly.
        """
        self.usable(writing=True)
        return await self.splitting.split(*where_to_split(table, key))

    async def compact(self, table: Table[Any] | str | None = None) -> list[Compacted]:
        """Give unused space of the tablets' files back: each tablet is written to a new file, in order, which replaces
        the old one (P6). Without this, later writes reuse the space, but the file does not shrink.

        Args:
            table: a table, or its name; None: all.

        Returns the result for each tablet. Reads and writes go on; writes to a tablet wait for a moment at its end.
        The disk needs room for one tablet's new file next to the old one. If cancelled, finished tablets stay
        compacted, and the one under way is unchanged.
        Raises: UsageError for a memory: store, or if tablet servers have the tablets; StoreFull, Unavailable: that
        tablet and those after it are unchanged; ReadOnly.
        """
        self.usable(writing=True)
        return await self.compacting.compact(what_to_compact(table))

    # ------------------------------------------------------------ the catalogue

    async def reload(self) -> None:
        """Take over the newest catalogue: another process has changed it (N10)."""
        await self._adopt(await load(self.driver.store))
        self.backfilling.wake()

    async def _catch_up(self) -> None:
        """Bring the catalogue up to date before it is asked for observers. Nothing to do for the owner, which is told
        of every change."""

    async def change_catalogue(self, step: Callable[[Catalogue], Catalogue]) -> None:
        """Replace the newest catalogue by the next one, and announce it (N10)."""
        await self._adopt(await change(self.driver.store, step))
        await self.oracle.announce(self.catalogue.binds)

    async def _adopt(self, catalogue: Catalogue) -> None:
        await self.local.adapt(catalogue)
        if catalogue.version > self.catalogue.version:  # it never goes back
            self.catalogue = catalogue
            self.forget_bounds()
            self.driver.quiet()  # N10: whoever waits shall look whether its observers have been told

    def forget_bounds(self) -> None:
        """The catalogue has changed: columns and signals are looked up again."""
        self.bounds.clear()
        self.signals.clear()

    # ------------------------------------------------------------ names

    def bind(self, column: Column[Any, Any]) -> Bound:
        """A column's numbers in this store; looked up once.

        Raises: SchemaMismatch for a column that was not in the schema the store was opened with.
        """
        self.must_be_column(column)
        bound = self.bounds[column] = Bound(column, self.catalogue)
        return bound

    def bind_signal(self, signal: Signal[Any]) -> Bound:
        """The same for a signal. Raises: UsageError for what is none; SchemaMismatch as `bind` does."""
        bound = self.signals.get(signal) if isinstance(signal, Signal) else None
        if bound is None:
            self.must_be_signal(signal)
            bound = self.signals[signal] = Bound(signal, self.catalogue)
        return bound

    def must_be_column(self, column: object) -> None:
        """Raises what `bind` does; changes nothing. Any thread."""
        if isinstance(column, Signal):
            raise UsageError(f"{column!r} is a signal: it has no value; raise it with txn.signal({column.name}, key)")
        if not isinstance(column, Column):
            raise UsageError(f"expected a column, as made by Table.column, not {column!r}")
        self._must_be_declared(column)

    def must_be_signal(self, signal: object) -> None:
        """The same for `bind_signal`."""
        if not isinstance(signal, Signal):
            hint = "; a column is written with txn.set" if isinstance(signal, Column) else ""
            raise UsageError(f"expected a signal, as made by Table.signal, not {signal!r}{hint}")
        self._must_be_declared(signal)

    def _must_be_declared(self, column: Column[Any, Any] | Signal[Any]) -> None:
        known = self.schema.tables.get(column.table.name)
        if known is not column.table and not (self._borrowed and known is not None and _declares(known, column)):
            raise SchemaMismatch(f"{column!r} is not in the schema that this store was opened with")
        if column.name not in self.catalogue.tables[column.table.name].columns:
            raise SchemaMismatch(f"{column!r} was declared after the store was opened; open it with the whole schema")

    def name_of(self, cell: Cellref) -> tuple[str, Any, str]:
        """(table, key, column) of a cell, for people."""
        name = self.catalogue.column_name(cell.table, cell.column)
        return cell.table, self._key(cell.table, cell.row), name

    def read_conflict(self, found: StaleAt) -> ReadConflict:
        """What a serializable transaction's reads ran into, for people."""
        ranges = [(r.table, self._key(r.table, r.low), self._key(r.table, r.high)) for r in found.stale.ranges]
        cells = [self.name_of(cell) for cell in found.stale.cells]
        met = ReadConflict(cells, ranges, found.start_ts, found.commit_ts)
        met.met_on = (*found.stale.cells, *((r.table, r.low or b"", -1) for r in found.stale.ranges))
        return met

    def _key(self, table: str, row: bytes | None) -> Any:
        """The end of a range as a key, or as it is: not every row is one. An owner may have no schema of its own."""
        known, entry = self.schema.tables.get(table), self.catalogue.tables.get(table)
        if row is None or (known is None and entry is None):
            return row
        try:
            return (codec_named(entry.key) if known is None else known.key).decode(row)  # type: ignore[union-attr]
        except (ValueError, struct.error):
            return row

    def is_unknown(self, error: BaseException) -> bool:
        return isinstance(error, CommitUnknown)

    # ------------------------------------------------------------ state

    def usable(self, *, writing: bool) -> None:
        """Raises what keeps this store from being used: closed, failed, forked, read-only."""
        self.background.check()
        self.local.check()
        if writing and self.local.readonly:
            raise ReadOnly("this store was opened with readonly=True; open it without to write")

    def statistics(self) -> Statistics:
        """Counts since the store was opened."""
        return Statistics(
            self.fates.live(),
            self.oracle.last,
            self.catalogue.version,
            replace(self.driver.counters),
            tuple(tablet.statistics() for tablet in self.local.store.tablets()),
            self.heartbeat.statistics(),
            self.vacuuming.statistics(),
            self.lines.statistics(),
            self.prefetch.statistics(),
            damaged=tuple(self.driver.damaged),
        )


def _declares(table: Table[Any], column: Column[Any, Any] | Signal[Any]) -> bool:
    """Whether a table declares a column just as another declaration does."""
    if table.key.name != column.table.key.name:
        return False
    if isinstance(column, Signal):
        return column.name in table.signals
    known = table.columns.get(column.name) or table.hidden.get(column.name)
    return known is not None and (known.codec.name, known.group) == (column.codec.name, column.group)


def _must_be_async(function: object, running: object) -> None:
    """Raises UsageError if it is for these that a run met a TypeError: the function, and what it gave."""
    if not callable(function):
        if inspect.iscoroutine(function):
            function.close()
        raise UsageError(
            f"db.run takes an `async def` function, and then its arguments: db.run(function, ...), not {function!r}"
        ) from None
    if running is not None and not inspect.isawaitable(running):
        raise UsageError(f"db.run takes an `async def` function; {function!r} gave {running!r}") from None


class Retrying:
    """`run` and `attempts` with limits and isolation of their own; from `db.options(...)`."""

    def __init__(self, client: Client, retry: RetryOptions, serializable: bool) -> None:
        self._client, self._retry, self._serializable = client, retry, serializable

    def run(
        self, function: Callable[Concatenate[Transaction, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """As `Client.run`."""
        return self._client._run_as(self._retry, self._serializable, function, args, kwargs)

    def attempts(self) -> Attempts:
        """As `Client.attempts`."""
        return Attempts(self._client, self._retry, self._serializable)


class TransactionBlock(AsyncOnly):
    """`async with db.transaction() as txn:`: one try, committed at the end of the block."""

    _write = "async with db.transaction() as txn:"

    def __init__(self, client: Client, isolation: Isolation | None) -> None:
        self._client, self._isolation = client, isolation
        self._txn: Transaction | None = None

    async def __aenter__(self) -> Transaction:
        if self._txn is not None:
            raise UsageError("a transaction's block is entered once; call db.transaction() again")
        txn = self._txn = await self._client.begin(isolation=self._isolation)
        return txn

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        txn = self._txn
        assert txn is not None
        try:
            if error is None and txn.outcome == "open":
                await txn.commit()
        finally:
            txn.discard()


class SnapshotBlock(AsyncOnly):
    """`async with db.snapshot() as snap:`: a snapshot while the block lasts."""

    _write = "async with db.snapshot() as snap:"

    def __init__(self, client: Client, ts: int | None, at: datetime | None) -> None:
        self._client, self._ts, self._at = client, ts, at
        self._snap: Snapshot | None = None

    async def __aenter__(self) -> Snapshot:
        if self._snap is not None:
            raise UsageError("a snapshot's block is entered once; call db.snapshot() again")
        snap = self._snap = await self._client.snapshot_at(ts=self._ts, at=self._at)
        return snap

    async def __aexit__(self, *_: object) -> None:
        assert self._snap is not None
        self._snap.end()
