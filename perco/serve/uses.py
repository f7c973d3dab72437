"""How a process uses a store: its transactions, its observer runs, and the cells on which it conflicts."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from perco.clock.holds import Holds
from perco.notify.workers import Workers
from perco.rpc.framing import WireError
from perco.serve.sessions import Session
from perco.serve.shared_ids import SharedIds
from perco.serve.tasks import text
from perco.txn.engine import Engine

_CELLS_MAX: Final = 32
_OBSERVERS_MAX: Final = 4096
_NUMBER_MAX: Final = 1 << 63
_ROW_MAX: Final = 1 << 13
_TABLE_MAX: Final = 1 << 10
_PROCESSES_MAX: Final = 256
_TOLD_OBSERVERS: Final = 256
_NUMBERS: Final = 10  # of `ProcessUse`, besides the process id


class Runs(NamedTuple):
    """Of an observer (`id`) in a process, since its worker began: runs that committed, runs that failed, runs in
    flight."""

    id: str
    commits: int
    failures: int
    running: int


class ContendedCell(NamedTuple):
    """A cell, by its names in the store, and how many transactions of a process conflicted there."""

    table: str
    row: bytes
    column: int
    conflicts: int


class ProcessUse(NamedTuple):
    """How a process uses a store. Counts are since it opened the store; of observers, since its worker began.

    Attributes:
        id: tells processes apart.
        role: "owner" or "client".
        program: the name of what the process runs, without its arguments, which may be secret.
        observers: of its worker.
        contended: the cells with the most conflicts.
        open: how many of its transactions and snapshots are open; `oldest`: the start timestamp of the oldest; 0: none.
        pasts: how many of its snapshots of the past are open; `oldest_past`: the oldest timestamp of these; 0: none.
        rows: on how many rows its observers run, or are about to run.
    """

    id: str
    role: str
    pid: int
    program: str
    observers: list[Runs]
    contended: list[ContendedCell]
    commits: int
    aborts: int
    conflicts: int
    unknown: int
    lock_waits: int
    open: int = 0
    oldest: int = 0
    pasts: int = 0
    oldest_past: int = 0
    rows: int = 0


def here(role: str, engine: Engine, workers: Workers, ids: SharedIds, others: Iterable[Session] = ()) -> ProcessUse:
    """The use of this process. `others`: sessions of other processes, which this one holds timestamps for."""
    worker, counters = workers.running_here(), engine.driver.counters
    observers = [
        Runs(ids.shared(id), each.commits, each.failures, each.running)
        for id, each in (worker.statistics().items() if worker is not None else ())
    ]
    cells = [ContendedCell(*cell, count) for cell, count in engine.driver.contended.most(_CELLS_MAX)]
    holds = engine.oracle.holds
    sessions = list(others)
    own = holds.open.difference(*(session.open for session in sessions))
    past = {*holds.pasts}.difference(*(session.held.values() for session in sessions))
    return ProcessUse(
        *(role, role, os.getpid(), text(_program()), observers, cells),
        *(counters.commits, counters.aborts, counters.conflicts, counters.unknown, counters.lock_waits),
        *(len(own), min(own, default=0), len(past), min(map(holds.past, past), default=0)),
    )


def _program() -> str:
    path = Path(sys.argv[0])
    return (path.parent if path.name == "__main__.py" else path).name or "python"  # `python -m perco` is perco


def held(pid: int) -> ProcessUse:
    """The entry for a client that cannot answer, because its loop is held (R10)."""
    return ProcessUse("", "client", pid, "", [], [], 0, 0, 0, 0, 0)


def joined(session: Session, told: ProcessUse, holds: Holds) -> ProcessUse:
    """A client's answer, completed by the server, which knows the timestamps that the client's session holds."""
    return told._replace(
        id=id_of(session.name),
        open=len(session.open),
        oldest=min(session.open, default=0),
        pasts=len(session.held),
        oldest_past=min(map(holds.past, session.held.values()), default=0),
        rows=len(session.claims),
    )


def read(packed: Any) -> ProcessUse:
    """Decode from the wire; the client is not trusted. Raises: WireError."""
    try:
        id, role, pid, program, observers, cells, *numbers = packed
        runs = [Runs(text(id), *counts) for id, *counts in observers]
        contended = [ContendedCell(*cell) for cell in cells]
        if len(runs) > _OBSERVERS_MAX or len(contended) > _CELLS_MAX or len(numbers) != _NUMBERS:
            raise ValueError("too much")
        for table, row, *_ in contended:
            if type(table) is not str or type(row) is not bytes or len(table) > _TABLE_MAX or len(row) > _ROW_MAX:
                raise ValueError("not a cell")
        counted = [pid, *numbers, *(n for each in runs for n in each[1:])]
        counted += [n for cell in contended for n in (cell.column, cell.conflicts)]
        if not all(type(number) is int and 0 <= number < _NUMBER_MAX for number in counted):
            raise ValueError("not a number")
        return ProcessUse(text(id), text(role), pid, text(program), runs, contended, *numbers)
    except (TypeError, ValueError, AttributeError) as error:
        raise WireError(f"a use of the store that cannot be decoded: {error}") from error


def merged(found: Sequence[ProcessUse]) -> list[ProcessUse]:
    """The same with a bound: the first processes, and the cells with the most conflicts of all, told of the first."""
    counts: Counter[tuple[str, bytes, int]] = Counter()
    for each in found:
        counts.update({cell[:3]: cell.conflicts for cell in each.contended})
    cells = [ContendedCell(*cell, conflicts) for cell, conflicts in counts.most_common(_CELLS_MAX)]
    return [
        each._replace(contended=[] if at else cells, observers=each.observers[:_TOLD_OBSERVERS])
        for at, each in enumerate(found[:_PROCESSES_MAX])
    ]


def id_of(session: str) -> str:
    """A public name for a session's process; the session's own name is a secret."""
    return hashlib.blake2b(session.encode(), digest_size=8).hexdigest()
