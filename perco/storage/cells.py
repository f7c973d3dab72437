"""The vocabulary of the row store: cells, checks and writes as data.

A cell is (table, row, group, column, timestamp) -> value. `row` and `value` are bytes, `group` names a locality
group, `column` is a small number (the catalogue gives columns their numbers), `timestamp` is at least 1.

This module has no notion of a lock. The one atomic operation on a row is *check, then write*; a `Mutation` applies it
to one row, or to several rows of one tablet as a *group* (S1). Checks, writes and mutations are tuples, because every
transaction builds dozens of them.

S1  The check-then-write of one row is atomic. Each mutation of an `apply` has a verdict of its own. The rows of one
    mutation are a group: it takes effect in all of them or in none, and has one verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

# The protocol's locality groups. A group that a user declares is stored as "data:" + its name.
DATA: Final = "data"
LOCK: Final = "lock"
WRITE: Final = "write"
ROLLBACK: Final = "rollback"
NOTIFY: Final = "notify"
PENDING: Final = "pending"  # pending entries: signals of transactions that are still undecided (N5)
SHARED: Final = "shared"  # read locks (T14)
# The traces that committed transactions leave at read locks (T14) and, if they wrote no cell, at their primaries, which
# are called bare (N5).
TRACE: Final = "trace"
FAILED_LIST: Final = "failed"  # changes whose observers have failed too often (N6)
# Tables that log their changes have this group, too: an index, by timestamp, of their cells in WRITE (E1). A tablet
# that has the group keeps it; its keys are in another order (`keys.log_key`), and only a scan with `log` reads them.
LOG: Final = "log"
_ACK_BITS: Final = 0xFFFF  # set in the columns of acknowledgements and of runs for signals (N3, N5)
PROTOCOL_GROUPS: Final = (DATA, LOCK, WRITE, ROLLBACK, NOTIFY, PENDING, SHARED, TRACE, FAILED_LIST)
GROUPS_MAX: Final = 122  # in one table, not counting the protocol's

TS_MAX: Final = (1 << 53) - 1  # O3: Bigtable's cell timestamp is ours x 1000 and has 63 bits
COLUMN_MAX: Final = (1 << 32) - 1


def is_logged(column: int) -> bool:
    """Whether the log has the records of a column: not those of acknowledgements."""
    return not column & _ACK_BITS


ROW_BYTES_MAX: Final = 400  # LMDB's keys have at most 511 bytes; the rest is for escapes, column and timestamp
VALUE_BYTES_MAX: Final = 8 << 20

# A check: (ABSENT, group, column, from_ts, to_ts) "no cell of (group, column) within [from_ts, to_ts]",
# or (PRESENT, group, column, ts, ts) "a cell at exactly ts".
ABSENT: Final = 0
PRESENT: Final = 1
Check: TypeAlias = tuple[int, str, int, int, int]

# A write: (group, column, ts, value) puts a cell; value None deletes the cell at exactly ts.
Write: TypeAlias = tuple[str, int, int, "bytes | None"]

# (row, checks, writes)
RowMutation: TypeAlias = tuple[bytes, Sequence[Check], Sequence[Write]]


class Mutation(NamedTuple):
    """An atomic check-then-write of rows of one tablet.

    A mutation whose `floor_ts` is below the tablet's floor is refused (T13; the vacuum raises the floor). `reserve`
    lets a mutation use the tablet's reserve of space; it is for mutations that free space or unblock others (S4).
    """

    table: str
    rows: Sequence[RowMutation]
    floor_ts: int | None = None
    reserve: bool = False


class Applied:
    """All checks held, and all writes were made; durably, if the store is durable."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "APPLIED"


APPLIED: Final = Applied()


@dataclass(frozen=True, slots=True)
class Refused:
    """A check did not hold: `checks[check]` of `rows[row]`. Nothing was written. `check` -1: below the floor."""

    row: int
    check: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The store could not write, and nothing was written: `error` says why (S4)."""

    error: Exception


@dataclass(frozen=True, slots=True)
class NoReply:
    """The mutation may or may not have been applied (T4)."""

    reason: str


Verdict: TypeAlias = Applied | Refused | Failed | NoReply

# Cells to read of a row: (group, column, from_ts, to_ts, n): the newest n cells within [from_ts, to_ts], newest first;
# n below 0: the oldest -n cells, oldest first.
Query: TypeAlias = tuple[str, int, int, int, int]
ReadRequest: TypeAlias = tuple[str, bytes, Sequence[Query]]  # (table, row, queries)
Cell: TypeAlias = tuple[int, bytes]  # (ts, value)
RowCells: TypeAlias = list[list[Cell]]  # one list per query


SEEKS_MAX: Final = 4096
SEEKS_FEW: Final = 256  # a page with so few takes no longer than some reads


class ScanQuery(NamedTuple):
    """The cells that a scan reads of each row: for each of `columns`, the newest `n` within [from_ts, to_ts].

    `columns` None: at most `n` cells of the group in the row, of all columns, within [from_ts, to_ts]. Without
    `values`, the page has b"" in place of each value.
    """

    group: str
    columns: tuple[int, ...] | None
    from_ts: int = 0
    to_ts: int = TS_MAX
    n: int = 1
    values: bool = True


class ScanRequest(NamedTuple):
    """One page of a scan over [start, stop) of a table, in key order (or in reverse); stop None: to the end.

    A row is in the page if any query finds a cell in it. `rows_max` and `bytes_max` bound the page; `seeks_max` bounds
    the work on rows in which no query finds a cell, so a page may be empty without being the last.

    With `log`, the scan follows the log of the tablet that has `start` (E1), and its only query is of WRITE. Each entry
    of the page is a row with the cell that was written in it, in the order of (timestamp, row, column). The query's
    `from_ts` and `to_ts` bound the timestamps. Its `n` says what comes with an entry: 0 only (column, ts, b""), 1 the
    cell's value (b"" if that is gone), 2 also the newest older cell of that column. `log` is the position after which
    the page begins: b"", or `keys.log_key` of the last entry that was read. A page with neither `rows_max` entries nor
    `bytes_max` bytes is the last one. The log may still have entries of rows that a split has moved (P4): skip entries
    outside the range. If `next` is not None, the range from there on belongs to another tablet, with a log of its own.
    """

    table: str
    start: bytes
    stop: bytes | None
    queries: tuple[ScanQuery, ...]
    reverse: bool = False
    rows_max: int = 256
    bytes_max: int = 1 << 20
    seeks_max: int = SEEKS_MAX
    log: bytes | None = None


ScanCell: TypeAlias = tuple[int, int, bytes]  # (column, ts, value)
ScanRow: TypeAlias = tuple[bytes, list[list[ScanCell]]]


class ScanPage(NamedTuple):
    """Rows in the scan's order; `next` is where to continue, None at the end. It is the `start` of the next request or,
    if the scan is reversed, its `stop`."""

    rows: list[ScanRow]
    next: bytes | None
