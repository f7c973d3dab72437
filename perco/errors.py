"""Every exception of perco, sorted by what the caller may do about it.

    PercoError
    ├── TransientError            nothing became visible: run the transaction again (`db.run` does)
    │   ├── WriteConflict         another transaction committed, or is committing, a cell that this one writes or locks
    │   ├── ReadConflict          ... a cell or range that this serializable transaction has read
    │   ├── RolledBack            another process presumed this transaction dead and rolled it back
    │   ├── TabletSplit           rows of one mutation now lie in two tablets (P3)
    │   ├── CatalogueChanged      an observer was registered meanwhile (N10)
    │   └── SessionEnded          the server presumed this client gone, or has restarted, and ended its session
    ├── CommitUnknown             the transaction may have committed: before you run it again, ask `db.outcome`
    ├── SnapshotTooOld            the versions at that time were garbage-collected, or no note of the clock is that old
    │   ├── HistoryGone           the log no longer has all changes since that time; start again with a snapshot
    │   └── OwnerChanged          another process has become the store's owner; take a new snapshot
    ├── StoreError                the store cannot do this now; data are safe; nothing was done (but see WriteUnknown)
    │   ├── StoreFull             no space left
    │   ├── StoreLocked           another process owns the folder
    │   ├── FormatUnknown         not a perco folder, or a folder of another version of perco
    │   ├── UnsuitableFolder      a file system that perco cannot trust, or no permission
    │   ├── NeedsCheck            the machine restarted while writes were only in memory
    │   ├── WrongToken            the client sent no token, or another store's token
    │   ├── VersionMismatch       the server speaks another version of the wire protocol
    │   ├── WriteUnknown          the reply to one of the store's own writes was lost: the write may have been done
    │   └── Unavailable           no answer within the time that the caller allowed
    │       └── NotIdle           ... observers still have work; the error says which, and why
    ├── NotFresh                  views do not reflect changes whose observers have failed for good
    ├── UsageError                the caller's mistake
    │   ├── TransactionClosed     a transaction or snapshot was used after its end
    │   ├── ReadOnly              a write to a store that was opened with readonly=True
    │   ├── TooLarge              something exceeds a limit; raised at `set`, not at commit
    │   ├── SchemaMismatch        the program's schema contradicts the store's catalogue
    │   ├── ChainTooLong          observers trigger each other, again and again
    │   └── UsedAfterFork         a store does not survive os.fork()
    ├── Corruption                stored bytes break an invariant: stop and run `perco check`
    └── BackgroundFailure         one of perco's own tasks died; the cause is attached

Each error has fields, and its message says in one sentence what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


_RETRY_MAX_S = 30 * 86400


class PercoError(Exception):
    """Base of everything that perco raises on purpose. A copy of an error, or an error sent to another process, keeps
    its message."""

    def __reduce__(self) -> tuple[object, ...]:
        # Exception.__reduce__ would call the class with the whole message as its argument.
        return type(self).__new__, (type(self), *self.args), self.__dict__.copy()


class PercoWarning(UserWarning):
    """Something works, but less safely than the caller may expect."""


# ------------------------------------------------------------------ run it again


class TransientError(PercoError):
    """Nothing became visible; the transaction may be run again from its beginning (T11).

    Attributes: `attempts`, the number of attempts after which `db.run` or `db.attempts` gave up; 0 if neither of them
    ran the transaction. `met_on`: the cells of the conflict, if any, in stored form: (table, row, column number).
    """

    attempts = 0
    met_on: tuple[tuple[str, bytes, int], ...] = ()

    def __str__(self) -> str:
        if not self.attempts:
            return f"{super().__str__()}. Run it again (`db.run` and `db.attempts` do so by themselves)."
        tried = f"{self.attempts} attempt{'s' if self.attempts > 1 else ''}"
        return f"{super().__str__()}. Gave up after {tried}; run it later, or allow more: db.options(attempts=...)."


class WriteConflict(TransientError):
    """Another transaction got to a cell first (T7).

    Attributes: `cells`, a tuple of (table, key, column name); `other_ts`, the commit timestamp of the other
    transaction, or its start timestamp while it is still undecided, or 0 if it has yet to commit, and this first
    attempt gave way to it (W5); `start_ts`, this transaction's start timestamp; `read`, True if the other transaction
    has not written the cell, but read it under a lock (T14).
    """

    cells: tuple[tuple[str, object, str], ...]
    other_ts: int
    start_ts: int
    read: bool

    def __init__(
        self, cells: Sequence[tuple[str, object, str]], other_ts: int, start_ts: int, *, read: bool = False
    ) -> None:
        self.cells, self.other_ts, self.start_ts, self.read = tuple(cells), other_ts, start_ts, read
        where = ", ".join(f"{table}[{key!r}].{column}" for table, key, column in self.cells[:3])
        done = "read under a lock" if read else "written"
        super().__init__(
            f"{where}: {done} by another transaction (timestamp {other_ts}), which this transaction (begun at "
            f"{start_ts}) cannot see; this transaction wrote nothing"
            if other_ts
            else f"{where}: this transaction gave way to an older one, whose turn it is there; it wrote nothing"
        )


class ReadConflict(TransientError):
    """Another transaction has written, or is writing, cells that this serializable transaction has read (T14).

    Attributes: `cells`, a tuple of (table, key, column name); `ranges`, a tuple of (table, first key, stop key), with
    None for an open end. Both name only the first conflicts that were found. `start_ts`, `commit_ts`: the timestamps
    of this transaction.
    """

    cells: tuple[tuple[str, object, str], ...]
    ranges: tuple[tuple[str, object, object], ...]
    start_ts: int
    commit_ts: int

    def __init__(
        self,
        cells: Sequence[tuple[str, object, str]],
        ranges: Sequence[tuple[str, object, object]],
        start_ts: int,
        commit_ts: int,
    ) -> None:
        self.cells, self.ranges, self.start_ts, self.commit_ts = tuple(cells), tuple(ranges), start_ts, commit_ts
        where = [f"{table}[{key!r}].{column}" for table, key, column in self.cells[:3]]
        where += [f"the rows of {table} from {low!r} to {high!r}" for table, low, high in self.ranges[:3]]
        super().__init__(
            f"{', '.join(where)}: written by another transaction between this one's start ({start_ts}) and its "
            f"commit timestamp ({commit_ts}), or locked by an undecided transaction; this one wrote nothing"
        )


class RolledBack(TransientError):
    """The store has a rollback marker (T5) at this transaction's start timestamp."""

    def __init__(self, start_ts: int) -> None:
        self.start_ts = start_ts
        super().__init__(
            f"another transaction presumed transaction {start_ts} dead and rolled it back; nothing was written"
        )


class TabletSplit(TransientError):
    """The rows of one mutation now lie in two tablets, because their tablet was split; nothing was written."""

    def __init__(self, table: str) -> None:
        self.table = table
        super().__init__(f"a tablet of {table!r} was split; nothing was written")


class CatalogueChanged(TransientError):
    """The catalogue changed between this transaction's first write and its commit (N10)."""

    start_ts: int
    version: int

    def __init__(self, start_ts: int, version: int) -> None:
        self.start_ts, self.version = start_ts, version
        super().__init__(
            f"transaction {start_ts} began to commit under an older catalogue than version {version}; "
            "nothing was written"
        )


class SessionEnded(TransientError):
    """The server has ended this client's session: it has not heard from the client, or it was restarted."""

    def __init__(self, said: str = "the server has ended this client's session") -> None:
        super().__init__(said)


# ------------------------------------------------------------------ ask


class CommitUnknown(PercoError):
    """The commit was sent, but its outcome is not known (T4).

    Attributes: `token`, a short str: any process can find the outcome with `await db.outcome(token)`. `for_good`: the
    outcome can no longer be found, because the store may have removed the records that show it.
    """

    token: str
    reason: str
    for_good: bool

    def __init__(self, token: str, reason: str, *, for_good: bool = False) -> None:
        self.token, self.reason, self.for_good = token, reason, for_good
        remedy = (
            "Look at the cells that it would have written. Next time, ask earlier, or keep versions for longer "
            "(perco.Keep)."
            if for_good
            else "Ask `await db.outcome(token)` before you run it again."
        )
        super().__init__(f"transaction {token} may or may not have committed ({reason}). {remedy}")


class SnapshotTooOld(PercoError):
    """A read of versions that have been garbage-collected (G5), or at a time before the oldest note of the clock (T15).

    Attributes: `asked`, `oldest`: a timestamp (int), or, if a time was asked for, a wall time (float, seconds since
    1970). `table`: the table whose versions were removed, else "".

    Args:
        why: a sentence that replaces the usual remedy, if the versions were not removed by the retention limit.
        newer: True if the store did not exist at that time.
    """

    asked: float
    oldest: float | str
    table: str

    def __init__(
        self, asked: float, oldest: float | str, table: str = "", *, why: str = "", newer: bool = False
    ) -> None:
        self.asked, self.oldest, self.table = asked, oldest, table
        where = f" of table {table!r}" if table else ""
        remedy = why or (
            "Ask for a newer one. To keep the past readable for longer, declare keep=perco.Keep(seconds=...), or hold "
            "it with a pin (db.pin)."
        )
        said = f"the oldest that can be read is {_moment(oldest)}. {remedy}"
        if newer:
            first = oldest if isinstance(oldest, str) else f"first noted at {_moment(oldest)}"
            said = f"the store is newer than that (its clock was {first})"
        super().__init__(f"no snapshot{where} at {_moment(asked)}: {said}")


class HistoryGone(SnapshotTooOld):
    """The log no longer has all changes since a timestamp: the vacuum has removed some of them (E4).

    Attributes: `asked`, `oldest`: timestamps. `table`: the table whose changes were removed.
    """

    asked: float
    oldest: float | str
    table: str

    def __init__(self, asked: int, oldest: int, table: str) -> None:
        self.asked, self.oldest, self.table = asked, oldest, table
        Exception.__init__(
            self,
            f"the changes of table {table!r} since timestamp {asked} are gone; those since {oldest} are kept. Begin "
            "again: read the table in a snapshot, and follow the changes since its start_ts. To keep changes "
            "for longer, declare keep=perco.Keep(seconds=...), or hold them with a pin (db.pin).",
        )


class TimelineLost(HistoryGone):
    """A timestamp was handed out by the store that a backup was taken of, after the backup. This store was restored
    from the backup, so what the timestamp stood for is not in it (B5).

    Attributes: `asked`: the timestamp. `after`, `before`: all timestamps between these two are lost.
    """

    asked: float
    oldest: float | str
    table: str
    after: int
    before: int

    def __init__(self, asked: int, after: int, before: int) -> None:
        self.asked, self.after, self.before = asked, after, before
        self.oldest, self.table = before, ""
        Exception.__init__(
            self,
            f"this store was restored from a backup as of timestamp {after}. The lost store handed out timestamp "
            f"{asked} after it, and some changes up to {asked} are not in this store. Begin again: read the table in a "
            "snapshot, and follow the changes since its start_ts.",
        )


class OwnerChanged(SnapshotTooOld):
    """In a process that reads the owner's files, a snapshot was used that had been taken under a former owner (T9).

    Attributes: `asked` and `oldest`: the snapshot's timestamp.
    """

    asked: float
    oldest: float | str
    table: str

    def __init__(self, asked: int) -> None:
        self.asked, self.oldest, self.table = asked, asked, ""
        Exception.__init__(
            self,
            f"the snapshot at timestamp {asked} has ended: since the snapshot was taken, another process has begun to "
            "write to the store, and may have completed what its predecessor left unfinished. Take a new one with "
            "db.snapshot().",
        )


def _moment(when: float | str) -> str:
    if isinstance(when, int):
        return f"timestamp {when}"
    if isinstance(when, str):
        return when
    try:
        return datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{when} s"


# ------------------------------------------------------------------ the store


class StoreError(PercoError):
    """The store cannot do this now. Acknowledged writes are safe."""


class StoreFull(StoreError):
    """No space for a write. Only the callers of that write failed; reads go on (S4)."""

    path: str
    detail: str

    def __init__(self, path: str, detail: str) -> None:
        self.path, self.detail = path, detail
        super().__init__(
            f"no space left for {path} ({detail}); this write was not made, nothing else is lost. "
            "Free some space and run it again."
        )


class StoreLocked(StoreError):
    """Another process has the store open for writing.

    Attributes: `path`: the folder, or the address of a database; `pid`: the process's id, None if the process may be
    on another host; `command`: the process's command; `remedy`: what to do.
    """

    path: str
    pid: int | None
    command: str
    remedy: str

    def __init__(self, path: str, pid: int | None, command: str, remedy: str = "") -> None:
        self.path, self.pid, self.command, self.remedy = path, pid, command, remedy
        who = f"process {pid or 'unknown'} ({command or 'unknown command'})" if pid or not remedy else command
        remedy = (
            remedy or "Stop that process, or open the store for reading only: perco.open(path, schema, readonly=True)."
        )
        super().__init__(f"{path} is in use by {who}. {remedy}")


class FormatUnknown(StoreError):
    """This version of perco cannot read the folder. `wanted`: the format that it reads, or "" if the folder is not a
    store."""

    path: str
    found: str
    wanted: str

    def __init__(self, path: str, found: str, wanted: str) -> None:
        self.path, self.found, self.wanted = path, found, wanted
        told = f"found {found}, this version of perco reads {wanted}" if wanted else f"not a perco store: {found}"
        super().__init__(f"{path}: {told}{'' if told.endswith('?') else '.'} Nothing was changed.")


class UnsuitableFolder(StoreError):
    """The folder cannot hold a store."""

    path: str
    reason: str

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


class NeedsCheck(StoreError):
    """Writes that were only in memory may have been lost when the machine stopped (S2)."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f'{path} was written with durability="process" and not closed before the machine restarted: '
            "its newest writes may be lost or torn. Run `perco check` on it, then open it with "
            "accept_loss=True, or restore a copy."
        )


class CopiedWhileOpen(StoreError):
    """The folder is a plain copy of a store, and a process had the store open when it was copied (I1)."""

    path: str

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"{path} is a copy of a store that was not closed when it was copied, so it may mix pages of different "
            "moments. Copy a store with `perco backup` and `perco restore`. If this is the store itself, moved to "
            "another disk after its process was killed, run `perco check --accept` on it."
        )


class WrongToken(StoreError):
    """The client gave the server no token, or another store's token."""


class VersionMismatch(StoreError):
    """Client and server speak different versions of the wire protocol."""


class WriteUnknown(StoreError):
    """The reply to one of the store's own writes was lost: the write may have been done, or may still be done (T4). If
    the reply to a transaction's commit is lost, perco raises CommitUnknown instead.

    Attributes: `what`: what was written; `reason`: why there is no reply; `remedy`: what to do.
    """

    what: str
    reason: str
    remedy: str

    def __init__(self, what: str, reason: str, remedy: str = "It is safe to do it again.") -> None:
        self.what, self.reason, self.remedy = what, reason, remedy
        super().__init__(f"{what}: it may or may not have been done ({reason}). {remedy}")


NOTHING_WRITTEN: Final = "Nothing was written; try again, or allow more time."


class Unavailable(StoreError):
    """The operation did not finish within the time that the caller allowed. A transaction that raises this error has
    not committed, unless the message says that it has. For any other call the message says that nothing was written, if
    that is known.

    Attributes: `commit_ts`: if not 0, the transaction had committed by then, and only what its function did afterwards
    was cut short. `remedy`: what to do; "": try again.
    """

    what: str
    commit_ts: int
    remedy: str

    def __init__(self, what: str, commit_ts: int = 0, remedy: str = "") -> None:
        self.what, self.commit_ts, self.remedy = what, commit_ts, remedy
        if commit_ts:
            super().__init__(f"{what}. It had committed at {commit_ts}: do not run it again.")
        else:
            super().__init__(f"{what}. {remedy or 'Try again, or allow more time.'}")


def reason_of(error: Exception) -> str:
    """The cause that an error names, without its remedy: for a message that has a remedy of its own."""
    return error.what if isinstance(error, Unavailable) else str(error)


class NotIdle(Unavailable):
    """Changes still waited for observers when the time was up. Nothing is lost: the changes go on waiting.

    Attributes: `waiting`: the number of changes, by observer id; `counted`: False if the server did not answer;
    `waiting` is then empty. `failures`: for each observer that has failed since the worker was started: how often, and
    the last cell and error.
    """

    what: str
    commit_ts: int
    remedy: str
    waiting: dict[str, int]
    counted: bool
    failures: dict[str, tuple[int, str, BaseException]]

    def __init__(
        self, what: str, waiting: dict[str, int] | None, failures: dict[str, tuple[int, str, BaseException]]
    ) -> None:
        self.waiting, self.counted, self.failures = waiting or {}, waiting is not None, failures
        parts = []
        for id, count in self.waiting.items():
            part = f"{count} for {id!r}"
            if id in failures:
                times, where, error = failures[id]
                often = "once" if times == 1 else f"{times} times, last"
                part += f", which failed {often} on {where}: {type(error).__name__}: {error}"
            parts.append(part)
        self.what, self.commit_ts, self.remedy = what, 0, ""
        if waiting is None:
            StoreError.__init__(self, f"{what}, and the server does not answer, so it is not known which changes wait")
        else:
            StoreError.__init__(self, f"{what}; waiting: {'; '.join(parts) or 'a transaction under way'}")


class NotFresh(PercoError):
    """Views do not reflect some changes, because these are on the failed list (N6, V14). They reflect all others that
    were waited for.

    Attributes: `views`, the views that were waited for; `ts`, up to which timestamp; `failed`: the number of failed
    changes, by observer.
    """

    views: tuple[str, ...]
    ts: int
    failed: dict[str, int]

    def __init__(self, views: Sequence[str], ts: int, failed: dict[str, int]) -> None:
        self.views, self.ts, self.failed = tuple(views), ts, failed
        names = ", ".join(map(repr, views))
        counts = ", ".join(f"{count} for {id!r}" for id, count in failed.items())
        super().__init__(
            f"{names}: not all changes up to {ts} are reflected, because some were given up: {counts}. `perco failed "
            "list` shows them; run them again (db.replay_failed), or drop them (db.drop_failed)"
        )


# ------------------------------------------------------------------ the caller


class UsageError(PercoError):
    """The caller's mistake; the message says what to write instead."""


def must_be_number(what: str, value: object) -> None:
    """Raises UsageError if the value is not a number of seconds; a timedelta, for example, is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        hint = "; a timedelta has .total_seconds()" if hasattr(value, "total_seconds") else ""
        raise UsageError(f"{what} is a number of seconds, not {value!r}{hint}")


class TransactionClosed(UsageError):
    """A transaction or snapshot was used after its end."""


class ReadOnly(UsageError):
    """A write to a store that was opened with readonly=True."""


class TooLarge(UsageError):
    """Something exceeds one of perco's limits.

    Attributes: `what`, `size`, `limit`, `remedy`; `unit`: the unit of the size and the limit, "" if `what` names it.
    """

    what: str
    size: int
    limit: int
    remedy: str
    unit: str

    def __init__(self, what: str, size: int, limit: int, remedy: str, unit: str = "") -> None:
        self.what, self.size, self.limit, self.remedy, self.unit = what, size, limit, remedy, unit
        of = f" {unit}" if unit else ""
        super().__init__(f"{what}: {size}{of} is over the limit of {limit}{of}. {remedy}")


class SchemaMismatch(UsageError):
    """The program's schema contradicts the store's catalogue (N10)."""


class ChainTooLong(UsageError):
    """Observers trigger each other more often than `WorkerOptions.chain_max` allows (N9).

    Attributes: `where`, the row that the chain has reached; `observers`, the ids of its last observers, in order;
    `cycle`, the observers that repeat, or () if none repeat; `depth`; `limit`; `cause`, the commit timestamp of the
    transaction that began the chain.
    """

    where: str
    observers: tuple[str, ...]
    depth: int
    limit: int
    cause: int
    cycle: tuple[str, ...]

    def __init__(self, where: str, observers: Sequence[str], depth: int, limit: int, cause: int) -> None:
        self.where, self.observers, self.depth, self.limit, self.cause = where, tuple(observers), depth, limit, cause
        self.cycle = _cycle(self.observers)
        if self.cycle:
            said = f"observers trigger each other in a cycle: {' > '.join((*self.cycle, self.cycle[0]))}"
        else:
            said = f"its last observers: {' > '.join(self.observers)}"
        super().__init__(
            f"{where}: a chain that began at {cause} would have {depth} observers, over the limit of {limit}; {said}. "
            "Write only what has changed, so that the chain ends; or raise WorkerOptions.chain_max. "
            "Then replay the change."
        )


def _cycle(path: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest sequence that is repeated at the end of a path; () if there is none."""
    for length in range(1, len(path) // 2 + 1):
        if path[-length:] == path[-2 * length : -length]:
            return path[-length:]
    return ()


class UsedAfterFork(UsageError):
    """LMDB environments do not survive a fork (S5)."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"{path} was opened before os.fork(); it cannot be used in the child. Open it after the fork.")


# ------------------------------------------------------------------ perco itself


class Corruption(PercoError):
    """Stored bytes break an invariant.

    Attributes: `where`, `what`; `cell`, a tuple of (table, key, column name), or None; `part`: `where` without the
    cell. If there is a `cell`, only that cell, and the cells that the same transaction has locked, cannot be used.
    """

    what: str
    cell: tuple[str, object, str] | None
    part: str
    where: str

    _remedy = "Stop writing to this store and run `perco check`."

    def __init__(self, where: str, what: str, cell: tuple[str, object, str] | None = None) -> None:
        self.where, self.what, self.cell, self.part = where, what, cell, where
        remedy = self._remedy
        if cell is not None:
            table, key, column = cell
            self.where = f"{table}[{key!r}].{column}" + (f", {where}" if where else "")
            remedy = "Run `perco check`; other cells can be used."
        super().__init__(f"{self.where}: {what}. {remedy}")

    def at(self, cell: tuple[str, object, str]) -> Corruption:
        """This error, with the cell added if it has none."""
        return self if self.cell is not None else Corruption(self.where, self.what, cell)

    def again(self) -> Corruption:
        """A copy without traceback and causes, to be kept or raised once more."""
        return Corruption(self.part, self.what, self.cell)


class BackupDamaged(Corruption):
    """A backup, or one that it needs, is not what was written, or parts of it are missing (B4). The store is not
    affected."""

    _remedy = "The store itself is not affected: take a full backup (`perco backup --full`)."


class BackgroundFailure(PercoError):
    """A background task of perco died; `__cause__` is the exception that killed it."""


# ------------------------------------------------------------------ raised by observers


class Retry(Exception):
    """An observer raises it to be run again for its change later, for example because a service is busy:

        raise perco.Retry(after_s=30)

    Nothing of the run commits. It is no failed attempt (N6). Other worker processes, and this one after a restart, may
    run the observer earlier.

    Args:
        after_s: seconds, up to 30 days. The run begins no earlier, in this worker.
        reason: for `perco.observer`'s log.
    """

    after_s: float
    reason: str

    def __init__(self, after_s: float, reason: str = "") -> None:
        must_be_number("after_s", after_s)
        if not 0 <= after_s <= _RETRY_MAX_S:
            raise UsageError(f"after_s is {after_s!r}; it is a number of seconds from 0 to {_RETRY_MAX_S} (30 days)")
        self.after_s, self.reason = float(after_s), str(reason)
        super().__init__(f"again in {self.after_s:g} s" + (f": {reason}" if reason else ""))


class GiveUp(Exception):
    """An observer raises it for a change that it can never handle: the change is moved to the failed list at once, with
    the reason, and whatever its number of attempts (N6).

        raise perco.GiveUp("the image is damaged")
    """
