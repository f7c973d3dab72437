"""Histories: what clients did and saw, as one JSON object per line.

    {"id": 7, "client": "a", "begin": 0.10, "end": 0.12, "status": "ok",
     "ops": [["r", "x", []], ["a", "x", 3]]}

`begin` and `end` are times on one clock, in seconds; `status` is "ok", "fail" (certainly not committed) or "unknown".
`ops` are the operations, in the order in which they were made: ["r", key, values] and ["a", key, value] on lists,
["r", key, value] and ["w", key, value] on registers. A value is appended or written to a key only once, so a value that
is read identifies the transaction that wrote it. Keys and values are strings or whole numbers. null is the value of an
absent register; it cannot be written.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import IO, Any, Final

import trio

from perco.database.database import Database
from perco.errors import UsageError
from perco.protocol.reads import Isolation
from perco.txn.transaction import Transaction as Running

OK: Final = "ok"
FAIL: Final = "fail"
UNKNOWN: Final = "unknown"
_STATUS: Final = {"committed": OK, "aborted": FAIL, "unknown": UNKNOWN}

_FIELDS: Final = ("id", "client", "begin", "end", "status", "ops")

Key = str | int
Op = tuple[str, Key, Any]


@dataclass(frozen=True, slots=True)
class Transaction:
    """One transaction of a history; a retry is a transaction of its own."""

    id: int
    client: str
    begin: float
    end: float
    status: str
    ops: tuple[Op, ...]

    def line(self) -> str:
        """The transaction as a line of a file."""
        return json.dumps(
            {
                "id": self.id,
                "client": self.client,
                "begin": self.begin,
                "end": self.end,
                "status": self.status,
                "ops": self.ops,
            },
            separators=(",", ":"),
        )


@dataclass(slots=True)
class Ops:
    """The operations of one transaction, as its caller reports them."""

    made: list[Op] = field(default_factory=list)

    def read(self, key: Key, value: Any) -> None:
        """Note a read of a list (a sequence; [] if the list is absent) or of a register (None if it is absent)."""
        self._note("r", key, list(value) if isinstance(value, tuple | list) else value)

    def append(self, key: Key, value: Any) -> None:
        """Note an append of a value to a list, which takes effect if the transaction commits."""
        self._note("a", key, value)

    def write(self, key: Key, value: Any) -> None:
        """Note a write of a register, which takes effect if the transaction commits."""
        self._note("w", key, value)

    def _note(self, kind: str, key: Key, value: Any) -> None:
        wrong = _wrong(kind, key, value)
        if wrong:
            raise UsageError(wrong)  # here, rather than after the commit
        self.made.append((kind, key, value))


class Recorder:
    """Collects a history. If it has a file, it also writes the history to the file, line by line."""

    def __init__(self, file: IO[str] | None) -> None:
        self._file = file
        self._next = 0
        self.transactions: list[Transaction] = []

    @asynccontextmanager
    async def transaction(
        self, db: Database, client: str, *, isolation: Isolation | None = None
    ) -> AsyncIterator[tuple[Running, Ops]]:
        """Record one attempt of a transaction: `async with recorder.transaction(db, "a") as (txn, ops): ...`.

        The body reports to `ops` what it reads and writes. Raises what `db.transaction()` raises.
        """
        ops, begin = Ops(), trio.current_time()
        txn: Running | None = None
        try:
            async with db.transaction(isolation=isolation) as txn:
                yield txn, ops
        finally:
            status = FAIL if txn is None else _STATUS[txn.outcome]
            self.add(client, begin, trio.current_time(), status, ops.made)

    def add(self, client: str, begin: float, end: float, status: str, ops: Iterable[Op]) -> Transaction:
        """Note a transaction that has ended."""
        done = Transaction(self._next, client, begin, end, status, tuple(ops))
        self._next += 1
        self.transactions.append(done)
        if self._file is not None:
            self._file.write(done.line() + "\n")
        return done


class record:
    """`with record("history.jsonl") as recorder: ...`; without a path, the history is kept only in memory."""

    def __init__(self, path: str | PathLike[str] | None = None) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> Recorder:
        if self._path is not None:
            self._file = open(self._path, "w", encoding="utf-8")
        return Recorder(self._file)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def load(lines: Iterable[str]) -> Iterator[Transaction]:
    """Yields the transactions in the lines of a file.

    Raises: UsageError, with the line's number, if a line is not a transaction.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            if isinstance(found, dict):
                missing = [f'"{name}"' for name in _FIELDS if name not in found]
                if missing:
                    is_are = "is" if len(missing) == 1 else "are"
                    raise UsageError(f"line {number}: {', '.join(missing)} {is_are} missing")
            ops = tuple((kind, key, value) for kind, key, value in found["ops"])
            one = Transaction(
                found["id"], str(found["client"]), float(found["begin"]), float(found["end"]), found["status"], ops
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(f"line {number} is not a transaction of a history: {error!r}") from error
        verify(one, f"line {number}")
        yield one


def verify(one: Transaction, where: str) -> None:
    """Check a transaction. Raises: UsageError, whose text begins with `where`, if the transaction is not valid."""
    if type(one.id) is not int:
        raise UsageError(f"{where}: id {one.id!r}; it is a whole number")
    if one.status not in (OK, FAIL, UNKNOWN):
        raise UsageError(f"{where}: status {one.status!r}; it is ok, fail or unknown")
    if not one.begin <= one.end < math.inf or one.begin == -math.inf:
        raise UsageError(f"{where}: it ends at {one.end}, before it begins at {one.begin}")
    for op in one.ops:
        wrong = _wrong(*op)
        if wrong:
            raise UsageError(f"{where}: {wrong}")


def _wrong(kind: object, key: object, value: object) -> str:
    """The error in an operation; "" if there is none. True and 1.0 are errors, although they equal 1 in Python."""
    if kind not in ("r", "a", "w") or type(key) not in (str, int):
        return f"{[kind, key, value]!r} is not an operation: r, a or w, a key (a string or whole number), and a value"
    if kind == "r":
        plain = value is None or type(value) in (str, int)
        if plain or (type(value) is list and all(type(element) in (str, int) for element in value)):
            return ""
        return f"{value!r} cannot have been read: it is a string, a whole number, null, or a list of the first two"
    if type(value) in (str, int):
        return ""
    return f"a value to be written is a string or a whole number, not {value!r}"
