"""Handles failed runs: counts them, and gives up the change at the limit.

N6  Failures are counted in the notify cell itself, so the count survives restarts. When the count reaches the limit,
    the change moves to the failed list. Each step is one checked mutation of the row (`protocol/failed.py`); if the
    store refuses it, another process has already handled the change. If an observer awaits asyncio although it runs on
    trio, its failed run does not count as an attempt: the program is wrong, not the change.
N9  A change whose chain is too long is given up without an attempt.
"""

from __future__ import annotations

import logging
from typing import Any

from perco.errors import ChainTooLong, Corruption, GiveUp, Retry, UsageError
from perco.protocol.claim import Run
from perco.protocol.failed import FailedCell, count_attempt, describe, describe_wholly, give_up, unpack_failed
from perco.protocol.records import ATTEMPTS_MAX, Cellref, observers_on, pack_cause, unpack_cause
from perco.schema.schema import Observer
from perco.storage import APPLIED
from perco.txn.engine import Engine

KINDS_MAX = 256  # how many kinds of failures to remember as already logged with their traceback

log: logging.Logger = logging.getLogger("perco.observer")

_Kind = tuple[str, str, str, int]  # observer, type of error, the file and line that raised it


class ObserverFailedError(Exception):
    """The observer's function, or a codec of its column, raised `error` in the run that began at `start_ts`."""

    error: Exception
    start_ts: int
    run: Run

    def __init__(self, error: Exception, start_ts: int, run: Run) -> None:
        self.error, self.start_ts, self.run = error, start_ts, run
        super().__init__(error)

    @property
    def attempts(self) -> int:
        """Runs that have failed for this change, this one included."""
        return self.run.attempts + 1


class AwaitsAsyncio(UsageError):
    """An observer that runs on trio awaits asyncio."""

    def again(self) -> AwaitsAsyncio:
        """A copy without traceback and cause, to be kept or raised again."""
        return AwaitsAsyncio(str(self))


def awaits_asyncio(engine: Engine, observer: Observer, error: Exception) -> AwaitsAsyncio | None:
    """The error to report for a run that failed because it awaits asyncio on trio; None for any other failure."""
    if isinstance(error, RuntimeError):
        wrong = str(error) == "no running event loop"
    else:
        wrong = isinstance(error, TypeError) and str(error).startswith("trio.run received unrecognized yield message")
    if not wrong or hasattr(observer.function, "perco_needs"):  # it is decorated, and runs on asyncio
        return None
    where = "" if engine.on_asyncio else ", and run it inside `async with perco.aio.open(...) as db, db.worker():`"
    told = AwaitsAsyncio(
        f"observer {observer.id!r} awaits asyncio, but runs on trio. Decorate it with @perco.aio.observer{where}. "
        "Its changes wait until then"
    )
    told.__cause__ = error
    return told


def asked_by(error: BaseException) -> Retry | GiveUp | None:
    """The request of an observer, which may have come through a nursery."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, Retry | GiveUp) else None


class Unrunnable:
    """Rows on which an observer cannot run, because cells are unreadable, or because it awaits asyncio (N7). Of too
    many, the oldest is forgotten."""

    def __init__(self, most: int) -> None:
        self._found: dict[Cellref, tuple[int, Corruption | AwaitsAsyncio]] = {}
        self._most = most

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._found)

    def note(self, ack: Cellref, ts: int, error: Corruption | AwaitsAsyncio) -> None:
        """The observer cannot run for changes up to a timestamp."""
        self._found[ack] = ts, error.again()
        if len(self._found) > self._most:
            del self._found[next(iter(self._found))]

    def forget(self, ack: Cellref) -> None:
        self._found.pop(ack, None)

    def why(self, ack: Cellref, ts: int) -> Corruption | AwaitsAsyncio | None:
        """Why the observer cannot run for a change. None: it can run."""
        found = self._found.get(ack)
        return found[1] if found is not None and ts <= found[0] else None


class FailureLog:
    """Logs failed runs: the first of a kind with its whole traceback, each later one in one line.

    The reason: if a service is down, the runs for all waiting changes fail, again and again, with the same error. No
    traceback is lost, because each change that is given up keeps its own on the failed list. Beyond `KINDS_MAX` kinds,
    the oldest one is forgotten.
    """

    def __init__(self) -> None:
        self._told: dict[_Kind, None] = {}

    def failed(self, id: str, where: str, failed: ObserverFailedError) -> None:
        """Log a failed run; `where`: the row, in readable form."""
        kind = _kind(id, failed.error)
        if kind in self._told:
            text = describe(failed.error)
            log.error(
                *("observer %s failed on %s (attempt %d): %s", id, where, failed.attempts, text),
                extra=fields(id, where, attempt=failed.attempts),
            )
            return
        if len(self._told) >= KINDS_MAX:
            del self._told[next(iter(self._told))]
        self._told[kind] = None
        told = fields(id, where, attempt=failed.attempts)
        log.error("observer %s failed on %s", id, where, exc_info=failed.error, extra=told)

    def given_up(self, id: str, where: str) -> None:
        """Log that a change was moved to the failed list."""
        text = "observer %s: %s is on the failed list now (perco failed show; db.replay_failed)"
        log.error(text, id, where, extra=fields(id, where))


def fields(observer: str, row: str = "", **more: Any) -> dict[str, Any]:
    """The `extra` of a log record about an observer; `perco serve --log-json` shows these fields."""
    return {"perco": {"observer": observer, **({"row": row} if row else {}), **more}}


def _kind(id: str, error: BaseException) -> _Kind:
    while isinstance(error, BaseExceptionGroup):  # from a nursery: take the error of its first task
        error = error.exceptions[0]
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file, line = ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return id, type(error).__qualname__, file, line


async def note_failure(engine: Engine, ack: Cellref, failed: ObserverFailedError, attempts_max: int) -> bool:
    """Count a failure, or give up the change; returns whether the change is on the failed list now.

    If the store has no space for the count or for the entry on the list, the change keeps waiting, and the next failed
    run tries to write it again.

    Args:
        attempts_max: how many runs may fail for a change; 0: any number.
    """
    if isinstance(failed.error, Corruption):
        return False  # the store is damaged: the change waits until it has been repaired
    driver, run = engine.driver, failed.run
    too_long = isinstance(failed.error, ChainTooLong)
    at_once = too_long or isinstance(failed.error, GiveUp)
    if not at_once and not 0 < attempts_max <= failed.attempts:
        root, depth, path, _ = unpack_cause(run.cause)
        cause = pack_cause(root, depth, path, min(failed.attempts, ATTEMPTS_MAX))
        await driver.store.apply([count_attempt(ack, run.covers[0], cause)])
        return False
    before = run.failed[0] if run.failed is not None else 0
    cell = _cell(engine, ack, failed, attempts=0 if too_long else failed.attempts)
    with driver.observing():
        mutation = give_up(ack, failed.start_ts, run.covers, before, max(run.covers[0], before), cell)
        [verdict] = await driver.store.apply([mutation])
    return verdict is APPLIED


def _cell(engine: Engine, ack: Cellref, failed: ObserverFailedError, attempts: int) -> FailedCell:
    _, depth, path, _ = unpack_cause(failed.run.cause)
    root = failed.run.root
    if failed.run.failed is not None:  # the new entry replaces that of a change given up earlier
        try:
            root = min(root, unpack_failed(failed.run.failed[1]).root)
        except Corruption as error:
            engine.driver.note_damage(engine.driver.at(ack, error))
    text = describe_wholly(failed.error) if attempts else ""
    return FailedCell(root, depth, path, attempts, describe(failed.error), text, engine.oracle.wall_ms())


def too_long(engine: Engine, where: str, run: Run, path: bytes, limit: int) -> ChainTooLong:
    """The error for a chain over the limit. `path`: of the chain, including the observer that would run now."""
    return ChainTooLong(where, names_on(engine, path), run.depth, limit, run.root)


def too_old(observer: Observer, version: int) -> str:
    """The message about an observer of which the store has a higher version than this program."""
    return (
        f"observer {observer.id!r} is version {version} in this store, but version {observer.version} in this program, "
        f"which therefore does not run it: its changes wait for a program that has version {version}. To go back to "
        f"the older function, declare it as version {version + 1}."
    )


def names_on(engine: Engine, path: bytes) -> list[str]:
    """The ids of the observers on a path."""
    names = {entry.number: id for id, entry in engine.known.catalogue.observers.items()}
    return [names.get(number, f"#{number}") for number in observers_on(path)]


def where_of(engine: Engine, table: str, row: bytes) -> str:
    """A row, in readable form."""
    try:
        return f"{table}[{engine.known.schema.tables[table].key.decode(row)!r}]"
    except ValueError:
        return f"{table}[{row!r}]"
