"""How errors cross the wire: one table that covers all of `perco.errors`.

An error is sent as (name of its class, its parts), and rebuilt on the other side: the same class, fields and message.
An unknown error, from a newer server, arrives as a StoreError that says so. One error changes its class on the way: a
TransactionClosed, raised because this process has closed its store, arrives as a SessionEnded in the processes that it
serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from perco import errors
from perco.errors import PercoError, StoreError

_Parts = Callable[[Any], tuple[Any, ...]]


def _text(error: Any) -> tuple[Any, ...]:
    return (str(error.args[0]) if error.args else str(error),)


def _read_conflict(error: errors.ReadConflict) -> tuple[Any, ...]:
    return error.cells, error.ranges, error.start_ts, error.commit_ts


def _not_idle(error: errors.NotIdle) -> tuple[Any, ...]:
    failures = {
        id: (times, where, f"{type(met).__name__}: {met}") for id, (times, where, met) in error.failures.items()
    }
    return error.what, error.waiting if error.counted else None, failures


def _made_not_idle(what: str, waiting: Any, failures: Any) -> errors.NotIdle:
    met: dict[str, tuple[int, str, BaseException]] = {
        id: (times, where, StoreError(said)) for id, (times, where, said) in failures.items()
    }
    return errors.NotIdle(what, None if waiting is None else dict(waiting), met)


def _made_too_old(asked: Any, oldest: Any, table: Any, text: str) -> errors.SnapshotTooOld:
    made = errors.SnapshotTooOld(asked, oldest, table)
    made.args = (text,)
    return made


# Class -> (takes an error apart, rebuilds it). Classes whose constructor takes only a sentence are in `_SAID`.
_TABLE: Final[dict[type[PercoError], tuple[_Parts, Callable[..., PercoError]]]] = {
    errors.WriteConflict: (
        lambda e: (e.cells, e.other_ts, e.start_ts, e.read),
        lambda cells, other_ts, start_ts, read: errors.WriteConflict(cells, other_ts, start_ts, read=read),
    ),
    errors.ReadConflict: (_read_conflict, errors.ReadConflict),
    errors.RolledBack: (lambda e: (e.start_ts,), errors.RolledBack),
    errors.TabletSplit: (lambda e: (e.table,), errors.TabletSplit),
    errors.CatalogueChanged: (lambda e: (e.start_ts, e.version), errors.CatalogueChanged),
    errors.CommitUnknown: (
        lambda e: (e.token, e.reason, e.for_good),
        lambda token, reason, for_good: errors.CommitUnknown(token, reason, for_good=for_good),
    ),
    errors.SnapshotTooOld: (lambda e: (e.asked, e.oldest, e.table, str(e)), _made_too_old),
    errors.HistoryGone: (lambda e: (e.asked, e.oldest, e.table), errors.HistoryGone),
    errors.TimelineLost: (lambda e: (e.asked, e.after, e.before), errors.TimelineLost),
    errors.OwnerChanged: (lambda e: (e.asked,), errors.OwnerChanged),
    errors.StoreFull: (lambda e: (e.path, e.detail), errors.StoreFull),
    errors.StoreLocked: (lambda e: (e.path, e.pid, e.command, e.remedy), errors.StoreLocked),
    errors.FormatUnknown: (lambda e: (e.path, e.found, e.wanted), errors.FormatUnknown),
    errors.UnsuitableFolder: (lambda e: (e.path, e.reason), errors.UnsuitableFolder),
    errors.NeedsCheck: (lambda e: (e.path,), errors.NeedsCheck),
    errors.CopiedWhileOpen: (lambda e: (e.path,), errors.CopiedWhileOpen),
    errors.Unavailable: (lambda e: (e.what, e.commit_ts, *((e.remedy,) if e.remedy else ())), errors.Unavailable),
    errors.WriteUnknown: (lambda e: (e.what, e.reason, e.remedy), errors.WriteUnknown),
    errors.NotIdle: (_not_idle, _made_not_idle),
    errors.NotFresh: (
        lambda e: (e.views, e.ts, e.failed),
        lambda views, ts, failed: errors.NotFresh(views, ts, dict(failed)),
    ),
    errors.TooLarge: (lambda e: (e.what, e.size, e.limit, e.remedy, *((e.unit,) if e.unit else ())), errors.TooLarge),
    errors.ChainTooLong: (
        lambda e: (e.where, e.observers, e.depth, e.limit, e.cause),
        errors.ChainTooLong,
    ),
    errors.UsedAfterFork: (lambda e: (e.path,), errors.UsedAfterFork),
    errors.Corruption: (
        lambda e: (e.part, e.what, e.cell),
        lambda where, what, cell: errors.Corruption(where, what, cell),
    ),
    errors.BackupDamaged: (
        lambda e: (e.part, e.what, e.cell),
        lambda where, what, cell: errors.BackupDamaged(where, what, cell),
    ),
}
_SAID: Final = (
    errors.PercoError,
    errors.TransientError,
    errors.StoreError,
    errors.UsageError,
    errors.ReadOnly,
    errors.SchemaMismatch,
    errors.BackgroundFailure,
    errors.SessionEnded,
    errors.WrongToken,
    errors.VersionMismatch,
)
_BY_NAME: Final[dict[str, Callable[..., PercoError]]] = {
    **{kind.__name__: make for kind, (_, make) in _TABLE.items()},
    **{kind.__name__: kind for kind in _SAID},
}

ERRORS: Final = frozenset(_BY_NAME)


def pack_error(error: PercoError) -> tuple[Any, ...]:
    """Take an error apart for the wire."""
    if isinstance(error, errors.TransactionClosed):
        error = errors.SessionEnded("the process that serves this store has closed it")
    for kind in type(error).__mro__:
        if kind in _TABLE:
            return kind.__name__, _TABLE[kind][0](error)
        if kind in _SAID:
            return kind.__name__, _text(error)
    raise AssertionError(error)


def unpack_error(packed: Any) -> PercoError:
    """Rebuild an error."""
    name, parts = packed
    make = _BY_NAME.get(name)
    if make is None:
        return StoreError(f"the server runs another version of perco and answers with {name}: {parts!r}")
    return make(*parts)
