"""The calls that clients make to a server: the methods, and how messages encode arguments and answers.

Arguments and answers are tuples, as msgpack decodes them. Cells, checks and writes are tuples anyway, so most messages
go to the row store unchanged.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import asdict
from enum import IntEnum, unique
from itertools import product
from typing import Any, Final, NamedTuple

from perco.clock.holds import Holder
from perco.errors import Corruption, PercoError, StoreError, VersionMismatch, WrongToken
from perco.history.vacuumed import VacuumResult
from perco.protocol.commit import Commit
from perco.protocol.mutations import Header, Intent
from perco.protocol.records import BARE, READ, Cellref
from perco.protocol.retention import Removed
from perco.rpc.crossing import pack_error, unpack_error
from perco.rpc.framing import Message, WireError
from perco.serve.tasks import text
from perco.storage import (
    APPLIED,
    WRITE,
    Failed,
    Mutation,
    NoReply,
    Refused,
    ScanPage,
    ScanQuery,
    ScanRequest,
    Verdict,
)
from perco.storage.fencing import NotHere
from perco.storage.walking import Leaves
from perco.txn.operations import OPERATIONS
from perco.txn.shipping import Shipped

WIRE_VERSION: Final = 19
# Limits of one call. A client keeps within them; a server ends the connection on a call that exceeds them (R1).
DRAWS_MAX: Final = 1 << 16  # timestamps
CLAIMS_MAX: Final = 4096  # rows
LEAF_CELLS_MAX: Final = 1 << 24
LEAF_BYTES_MAX: Final = 1 << 16  # of one
# The errors of code that meets arguments of another shape.
UNREADABLE: Final = TypeError, ValueError, KeyError, AttributeError, IndexError, struct.error
_MAGIC: Final = "perco"


@unique
class Method(IntEnum):
    """A client's calls to the owner. Those in `AGAIN` may be repeated (R4)."""

    READ = 1  # requests -> cells of each; if all are too much, only of the first ones (`RowStore.read_first`)
    START = 55  # requests, with 0 for the timestamp -> (the timestamp drawn, catalogue's version, wall time, cells)
    SCAN = 2  # a request -> a page
    LEAVES = 48  # (table, start, stop, a timestamp, how many cells) -> leaves with them (`Prompt.find_leaves`), or None
    APPLY = 3  # mutations -> verdicts
    COMMIT = 4  # (header, part, version) -> the result of a one-step commit (C1)
    OPERATE = 54  # (start_ts, token, *a `Shipped`) -> (what was done, a start timestamp for the next one, or 0) (C9)
    DRAW = 5  # (how many start timestamps, how many others) -> timestamps, catalogue's version, wall time, last issued
    DONE = 6  # start timestamps whose transactions have ended -> no answer
    ALIVE = 24  # a start timestamp -> whether its transaction is alive
    OUTLIVE = 7  # a start timestamp -> nothing, once its transaction has ended, or after a while
    TABLETS = 8  # -> (by table, each tablet's first row and its server's number; by server, where it listens)
    ADOPT = 9  # the catalogue has changed -> its version
    HOLD = 10  # (a number that the client chose, a past timestamp) -> whether it is held; the oldest readable timestamp
    RELEASE = 11  # that number -> no answer
    AT = 12  # a wall time -> (timestamp, wall time)
    OLDEST = 13  # -> the oldest timestamp at which any table can be read
    PIN = 14  # (name, owner, ts, lease, id, the id of the pin that it renews or takes over, or None) -> a pin
    DROP_PIN = 15  # (name, id) -> whether there was one
    CLAIM = 16  # (table, rows, how many at most, whether to halt) -> (a byte for each, rows that others have) (N8)
    UNCLAIM = 17  # (table, row) -> no answer
    WORKS = 18  # ids of the observers that this client has, and of those that it may run -> nothing
    HINTS = 53  # whether the client wants to be told on which rows there may be work (N8) -> no answer
    LOOKED = 43  # True: the client found more than it may run; False: a scanner found nothing, and sleeps -> no answer
    IDLE = 19  # -> whether the store is idle, and more; answered once it is idle, or after a while (N7)
    UP_TO = 25  # (a timestamp, observers to leave out) -> (failed changes, or None: others wait; workers) (V14)
    FRESH = 47  # for each view, observers to leave out -> for each view, how fresh it is (V14)
    LAG = 80  # -> (id, how far it lags behind) of each observer
    VACUUM = 20  # -> what the vacuum did
    BACKFILL = 21  # -> what the backfill did, for each observer
    LAST = 22  # -> the last timestamp that was handed out
    HOLDING = 26  # (numbers of holds, claims): all that this client still has (R7) -> no answer
    ORPHANED = 27  # the client left locks behind -> no answer
    TASKS = 28  # -> what the tasks of all processes wait for
    TASKS_ARE = 29  # (the number of the question, what the client's tasks wait for) -> no answer
    USES = 51  # -> what each process does with the store
    USES_ARE = 52  # (the number of the question, what the client does) -> no answer
    SERVERS = 30  # -> which process has which tablets
    READS = 40  # the arguments of several calls of READ -> an answer for each; None: make that call alone (D8)
    COMMITS = 41  # as READS, for COMMIT
    CLAIMS = 42  # as READS, for CLAIM
    SPLIT = 31  # (table, row; None: in the middle of the table's largest tablet) -> what the split did (P4)
    NOW = 32  # -> (whether the store is idle, changes that wait, changes on the failed list), at this moment (N7)
    FOLDER = 34  # -> the folder, its owner's process, what is in each of its files, and how many processes use it
    COMPACT = 33  # (a table; None: all) -> what the compaction did, for each tablet (P6)
    BEGIN_LOAD = 44  # (names of tables; the build of views to which it belongs, or "") -> a bulk load (P7)
    PUBLISH_LOAD = 45  # (its id; each table, with the first row and the name of each file) -> what was published
    END_LOAD = 46  # its id -> nothing
    PARK = 49  # park the writers -> (the last timestamp; up to which no commit in one step is in progress) (B1)
    GO_ON = 50  # -> whether the writers were parked until now
    TICKET = 35  # -> the client's ticket, once the store accepts mutations under it (F3)
    NEWS = 36  # NOTIFIED or QUIET: a direct client has put or removed notify cells (N7, N8) -> no answer
    BYE = 23  # the session ends


class Order(IntEnum):
    """Orders of a store's owner to a tablet server."""

    OPEN = 64  # (table, number, start, stop, groups, floor) -> the tablet's epoch (F1)
    CLOSE = 65  # (table, number): answered when everything queued has been written
    GROUPS = 66  # (table, number, groups): make these locality groups
    FLOOR = 67  # (table, number, a timestamp): raise the floor to it (T13)
    REPACK = 68  # (table, number, group, start, skip) -> (where to go on, whether it was worth it)
    LISTEN = 69  # (path, host, port, whether to use TLS, whether the path is ours, token, certificate, key) -> the port
    SESSIONS = 70  # (tickets of sessions that began, and of those that ended) -> no answer (F3)
    EXCUSE = 79  # the ticket of a session whose client's loop is held (R10) -> no answer
    STATISTICS = 71  # -> statistics of all tablets
    STOP = 72  # answer calls in flight, and exit
    MIDDLE = 73  # (table, number, stop) -> (a row at which to split it, or None,)
    COPY = 74  # (table, number, split, row, stop, path, groups): copy the rows [row, stop) -> how many cells (P2)
    CUT = 75  # (table, number, split, row): write no rows from there on; answered when the copy is whole, and on disk
    UNCUT = 76  # (table, number, split, stop): the split is void, even if further orders for it arrive
    LET_GO = 77  # (table, number, row): rows from there on belong to another tablet (P1)
    REMOVE = 78  # (table, number, row): remove some of the rows from there on -> whether there may be more (P4)


_LOADS: Final = (Method.BEGIN_LOAD, Method.PUBLISH_LOAD)
_ONCE: Final = {
    *(Method.PARK, Method.APPLY, Method.COMMIT, Method.COMMITS, Method.OPERATE, Method.SPLIT, Method.COMPACT),
    *_LOADS,
}
AGAIN: Final = frozenset(Method) - _ONCE

# Messages that a server pushes.
NOTIFIED: Final = 1  # there may be work for observers (N8)
ANNOUNCED: Final = 2  # a newer version of the catalogue, which writers must know (N10)
MOVED: Final = 4  # tablets have moved
HINTED: Final = 9  # (table, row, numbers of observers) of new notify cells, to clients that want this (N8)
QUIET: Final = 5  # from a tablet server or a client: notify cells have been removed (N7)
DROPPED: Final = 6  # from a tablet server: it has lost a tablet to another process (F1)
RELEASED: Final = 7  # rows the client wanted were released by a process that lacks some of the client's observers (N8)
TASKS_ASKED: Final = 3  # (the question's number): what do the client's tasks wait for? The answer repeats the number
USES_ASKED: Final = 8  # as TASKS_ASKED: what does the client do with the store?

PULSE: Final = 96  # over a pulse (R10): (process id, for how many seconds its loop has been held (0: it runs), where)

# The result of a one-step commit.
TOLD: Final = 0  # (verdict, commit_ts)
MET: Final = 1  # another transaction's commit of a cell came first: ((table, row, column), that commit's commit_ts)
STALE: Final = 2  # the catalogue is newer than the transaction's: its version


# NOT_HERE, in place of cells, a page or verdicts: the tablet server does not have the tablet, and has done nothing.
# LOST, in place of a verdict: the tablet server has lost the tablet, and has not applied this mutation (F1).
NOT_HERE: Final = None
LOST: Final = 1
NOBODY: Final = -1  # in place of a tablet server's number: no server has the tablet now

_CELL: Final = str, bytes, int  # table, row, column
_INTENT: Final = *_CELL, int
_OPERATION: Final = int, str, tuple, tuple, int, str, str, str
_BYTES_OR_NONE: Final = bytes, type(None)
_OPERATIONS: Final = frozenset((*_OPERATION, *values) for values in product(_BYTES_OR_NONE, repeat=2))
_VIEWS_MAX: Final = 1 << 10  # in one call


# ------------------------------------------------------------------ the greeting


class Hello(NamedTuple):
    """A client's greeting.

    Attributes:
        session: the client's session, or a name for a new one.
        held: start timestamps that the client still needs.
        pulse: the connection is a pulse (R10).
        number: the greeting's, of those that the client has sent; 0: it does not matter.
    """

    version: int
    token: bytes
    session: str
    held: tuple[int, ...]
    pulse: bool = False
    number: int = 0


def hello(token: bytes, session: str, held: Sequence[int], *, pulse: bool = False, number: int = 0) -> Message:
    """See `Hello`."""
    return _MAGIC, *Hello(WIRE_VERSION, token, session, tuple(held), pulse, number)


def read_hello(message: Message) -> Hello:
    """Decode a client's greeting. Raises: WireError."""
    if len(message) < 5 or message[0] != _MAGIC:
        raise WireError("not a perco greeting")
    said = Hello(*message[1:7])  # a client of another version may send fewer fields, or more
    kinds = [type(part) for part in said]
    right = kinds == [int, bytes, str, tuple, bool, int] and 0 < len(said.session) <= 64
    if not right or any(type(ts) is not int for ts in said.held):
        raise WireError("not a perco greeting")
    return said


def welcome(new: bool, kept: bool, info: dict[str, Any]) -> Message:
    """A server's greeting. `new`: the client may not know yet that the session has begun; `kept`: the server still
    holds everything that the client needs; `info`: versions, times, and what else the client must know."""
    return _MAGIC, WIRE_VERSION, new, kept, info


def turned_away(error: PercoError) -> Message:
    """A server's greeting to a client that it refuses."""
    return _MAGIC, WIRE_VERSION, pack_error(error)


def read_welcome(message: Message) -> tuple[bool, bool, dict[str, Any]]:
    """Return (new, kept, info). Raises: the error with which the server refuses the client; VersionMismatch,
    StoreError."""
    if len(message) < 3 or message[0] != _MAGIC:
        raise StoreError(f"the program that listens there is not a perco server: it answers {str(message)[:60]}")
    if type(message[2]) is tuple:
        raise unpack_error(message[2])
    if message[1] != WIRE_VERSION:
        raise VersionMismatch(
            f"the server speaks version {message[1]} of the wire protocol, and this perco version {WIRE_VERSION}; "
            "install the same version of perco on both sides"
        )
    _, _, new, kept, info, *_ = message
    return new, kept, info


def read_claim(asked: Any) -> tuple[str, Sequence[tuple[bytes, int, int]], int, bool]:
    """The arguments of `Method.CLAIM`. Raises: TypeError, ValueError."""
    table, wanted, most, halts = asked
    if (type(table), type(most), type(halts)) != (str, int, bool) or len(wanted) > CLAIMS_MAX:
        raise TypeError("not a table, rows, and how many of them")
    if any((type(row), type(newest), type(root)) != (bytes, int, int) for row, newest, root in wanted):
        raise TypeError("not rows and timestamps")
    return table, wanted, most, halts


def read_pulse(message: Message) -> tuple[int, float, str]:
    """Return (process id, for how many seconds its loop has been held, where) (R10). Raises: WireError."""
    try:
        _, what, (pid, seconds, where) = message
        if what != PULSE or type(pid) is not int or type(seconds) is not float or not 0 <= seconds < math.inf:
            raise ValueError(f"{what}")
        return pid, seconds, text(where)
    except (TypeError, ValueError) as error:
        raise WireError(f"a pulse that cannot be decoded: {error}") from error


def check_version(version: int) -> VersionMismatch | None:
    """The error for a client of another version; None: the version is right."""
    if version == WIRE_VERSION:
        return None
    older = "older" if version < WIRE_VERSION else "newer"
    return VersionMismatch(
        f"this client speaks version {version} of the wire protocol and is {older} than the server, which "
        f"speaks {WIRE_VERSION}; install the same version of perco on both sides"
    )


def wrong_token(given: bool) -> WrongToken:
    """The error for a client without the store's token."""
    said = "the token given is another store's" if given else "no token was given"
    return WrongToken(
        f"this server needs its store's token, and {said}: it lies in the file `token` in the store's folder. Give it "
        "as perco.open(..., token=...), or in the environment as PERCO_TOKEN."
    )


# ------------------------------------------------------------------ which process has which tablets


class TabletIs(NamedTuple):
    """A tablet: the rows from `start` to before `stop` (None: to the end). `epoch`: how often a process has opened it
    for writing (F1). `batches`, `mutations`: counts since its server opened it; `queued`: how many mutations are queued
    now."""

    table: str
    number: int
    start: bytes
    stop: bytes | None
    epoch: int
    batches: int
    mutations: int
    queued: int
    used_bytes: int


class TabletsOf(NamedTuple):
    """A process, and the tablets that it has open. `number`: the tablet server's number; 0: the process is the store's
    owner."""

    number: int
    process: int
    addresses: list[str]
    tablets: list[TabletIs]


class FileOf(NamedTuple):
    """A tablet's file. `entries`: how many cells each group has; `groups`: the groups in the file."""

    table: str
    start: bytes
    used_bytes: int
    entries: dict[str, int]
    groups: list[str]


class FolderIs(NamedTuple):
    """A store's folder, as its owner sees it. `mark`: see `perco.storage.folder.doubt_of`.

    `clients`: how many are connected, besides the one that made the call; `workers`: how many processes run observers;
    `id`: the store's.
    """

    path: str
    process: int
    command: str
    mark: str
    files: list[FileOf]
    clients: int = 0
    workers: int = 0
    id: str = ""


def read_folder(packed: Any) -> FolderIs:
    path, process, command, mark, files, *more = packed
    return FolderIs(path, process, command, mark, [FileOf(*each) for each in files], *more)


def read_servers(packed: Any) -> list[TabletsOf]:
    return [
        TabletsOf(number, process, list(addresses), [TabletIs(*tablet) for tablet in tablets])
        for number, process, addresses, tablets in packed
    ]


# ------------------------------------------------------------------ verdicts, requests


def pack_verdict(verdict: Verdict) -> Any:
    """Encode a verdict: 0 (applied), `LOST`, a text (the reason why there was no reply), or a tuple (a refusal, or an
    error)."""
    if verdict is APPLIED:
        return 0
    if isinstance(verdict, Failed) and isinstance(verdict.error, NotHere):
        return LOST
    if isinstance(verdict, Refused):
        return verdict.row, verdict.check
    if isinstance(verdict, Failed):
        error = verdict.error
        if not isinstance(error, PercoError):
            error = StoreError(f"{type(error).__name__}: {error}")
        return (pack_error(error),)
    assert isinstance(verdict, NoReply)
    return verdict.reason


def unpack_verdict(packed: Any) -> Verdict:
    if packed == 0:
        return APPLIED
    if type(packed) is str:
        return NoReply(packed)
    if len(packed) == 2:
        return Refused(packed[0], packed[1])
    return Failed(unpack_error(packed[0]))


def read_typed(packed: Any, *kinds: tuple[type, ...]) -> Any:
    """Return the arguments. There must be one for each of `kinds`; each of these lists the types that its argument may
    have. Raises: TypeError."""
    if type(packed) is not tuple or len(packed) != len(kinds):
        raise TypeError(f"{len(kinds)} arguments are expected")
    for argument, types in zip(packed, kinds, strict=True):
        if type(argument) not in types:
            raise TypeError(f"a {type(argument).__name__} in place of {types[0].__name__}")
    return packed


def read_exactly(packed: Any, types: tuple[type, ...]) -> Any:
    """Like `read_typed`, for arguments of one type each, but faster. Raises: TypeError."""
    if type(packed) is not tuple or tuple(map(type, packed)) != types:
        read_typed(packed, *((each,) for each in types))
    return packed


def read_all(packed: Any, kind: type) -> Any:
    """Return the arguments, which must all be of one type. Raises: TypeError."""
    if any(type(argument) is not kind for argument in packed):
        raise TypeError(f"something else in place of {kind.__name__}")
    return packed


def read_holding(packed: Any) -> tuple[Sequence[int], Sequence[tuple[tuple[str, bytes], tuple[int, int]]]]:
    """Decode the holds' numbers, and the claimed rows, each with its newest change and oldest cause. Raises: TypeError,
    ValueError."""
    numbers, claims = packed
    for where, waiting in claims:
        read_typed(where, (str,), (bytes,))
        read_typed(waiting, (int,), (int,))
    return read_all(numbers, int), claims


def read_mutations(packed: Any) -> list[Mutation]:
    """Decode mutations for a tablet's queue. (The tablet reads checks and timestamps later; a mutation in which these
    are invalid fails alone, S4.) Raises: TypeError, ValueError."""
    mutations = [Mutation(*each) for each in packed]
    for table, rows, floor_ts, _ in mutations:
        if type(table) is not str or type(rows) is not tuple or not rows:
            raise TypeError("not a table, and rows of it")
        if floor_ts is not None and type(floor_ts) is not int:
            raise TypeError("not a timestamp for the floor")
        for row, _, writes in rows:
            if type(row) is not bytes or type(writes) is not tuple:
                raise TypeError("not a row, and what is written there")
            for group, _, _, value in writes:
                if type(group) is not str or (value is not None and type(value) is not bytes):
                    raise TypeError("not a group, and a value")
    return mutations


def read_scan(packed: Any) -> ScanRequest:
    """Decode the request of a scan. Raises: TypeError, ValueError."""
    request = ScanRequest(*packed)
    request = request._replace(queries=tuple([ScanQuery(*query) for query in request.queries]))
    if request.log is not None:
        if type(request.log) is not bytes:
            raise TypeError("not a position in a log")
        [query] = request.queries
        if query.group != WRITE or request.reverse:
            raise ValueError("not a scan of a log")
    return request


def read_page(packed: Any) -> ScanPage:
    rows, next = packed
    return ScanPage([(row, [list(cells) for cells in found]) for row, found in rows], next)


def must_be_leaves(asked: Any) -> Any:
    """Return the arguments. Raises: TypeError, ValueError unless this is a call for leaves."""
    read_typed(asked, (str,), (bytes,), (bytes, type(None)), (int,), (int,))
    if not 0 < asked[4] <= LEAF_CELLS_MAX:
        raise ValueError(f"leaves with {asked[4]} cells")
    return asked


def read_leaves(packed: Any) -> Leaves | None:
    """Raises: WireError."""
    if packed is None:
        return None
    page, numbers, data, more, locks, stop = packed
    if type(data) is not bytes or type(page) is not int or not 0 < page <= LEAF_BYTES_MAX:
        raise WireError("an answer that has no leaves")
    if type(numbers) not in (list, tuple) or not all(type(n) is int and 0 <= n < 1 << 64 for n in numbers):
        raise WireError("leaves whose numbers are none")
    return Leaves(page, list(numbers), data, bool(more), list(locks), stop)


def pack_vacuum(result: VacuumResult) -> dict[str, Any]:
    """The result's fields, by name."""
    return asdict(result)


def read_vacuum(packed: dict[str, Any]) -> VacuumResult:
    made = dict(packed)
    made["holder"], made["removed"] = Holder(*made["holder"]), Removed(**made["removed"])
    for name in ("held_up",):
        made[name] = tuple(made[name])
    return VacuumResult(**made)


def read_stuck(packed: Any) -> Corruption:
    """Decode the error of a lock that cannot be read. Raises: TypeError, ValueError."""
    error = unpack_error(packed)
    if not isinstance(error, Corruption):
        raise ValueError(f"a lock that cannot be read, for {type(error).__name__}")
    return error


def pack_commit(header: Header, part: Sequence[Intent], version: int) -> tuple[Any, ...]:
    """A one-step commit, as `read_commit` decodes it."""
    assert all(intent.cause is None for intent in part), "N20: in clients, runs do not share a transaction"
    return header, [intent[:-1] for intent in part], version


def read_part(packed: Any, last: int) -> tuple[Header, list[Intent], int]:
    """Decode a one-step commit: its header, its only part, and the version of the catalogue that its transaction noted
    (N10). Check everything on which the entering of its cells relies (C2). Raises: TypeError, ValueError.

    The session need not hold the transaction's start timestamp: a transaction whose session has ended may still commit
    in one step, if it has already read all that it needs (R5). If the commit comes too late, the floor refuses it
    (T13).

    Args:
        last: the last timestamp that was issued.
    """
    (start_ts, primary, *more), packed_part, version = packed
    header = Header(start_ts, Cellref(*read_exactly(primary, _CELL)), *more)
    part = [Intent(*intent) for intent in packed_part]
    if type(start_ts) is not int or type(version) is not int or not 0 < start_ts <= last:
        raise ValueError("not a start timestamp that was issued, and a version")
    for intent in part:
        read_exactly(intent[:4], _INTENT)
    if part[0][:3] != header.primary or READ <= part[0].kind != BARE:
        raise ValueError("the primary must lead (T12), and get a record, or a trace")
    if len(part) > 1:
        written = [intent[:3] for intent in part if intent.kind < READ]
        if len(set(written)) != len(written):
            raise ValueError("the same cell twice")  # it would be entered once, and leave twice (C3)
    return header, part, version


def read_commit(packed: Any, last: int) -> tuple[Commit, int]:
    """Like `read_part`; makes the commit."""
    header, part, version = read_part(packed, last)
    return Commit(header, [part], one_step=True), version


def read_operation(packed: Any, last: int) -> tuple[Header, Shipped]:
    """Decode an operation (C9), and the header of its commit. `last`: the last timestamp that was issued. Raises:
    TypeError, ValueError."""
    if type(packed) is not tuple:
        raise TypeError(f"a {type(packed).__name__} in place of an operation")
    if tuple(map(type, packed)) not in _OPERATIONS:
        read_exactly(packed[:8], _OPERATION)
        read_typed(packed[8:], _BYTES_OR_NONE, _BYTES_OR_NONE)
    start_ts, token, *rest = packed
    asked = Shipped(*rest)
    read_exactly(asked.cell, _CELL)
    if asked.observers:
        read_all(asked.observers, int)
    if not 0 < start_ts <= last or asked.what not in OPERATIONS:
        raise ValueError("not a start timestamp that was issued, and an operation")
    return Header(start_ts, Cellref(*asked.cell), 0, 0, token), asked


def must_be_up_to(asked: Any) -> None:
    """Check that a call's arguments are a timestamp and numbers of observers. Raises: TypeError."""
    _, without = read_typed(asked, (int,), (tuple, type(None)))
    read_all(without or (), int)


def must_be_views(withouts: Any) -> None:
    """Check that a call's arguments are numbers of observers, for each of some views. Raises: TypeError, ValueError."""
    if len(read_all(withouts, tuple)) > _VIEWS_MAX:
        raise ValueError("too many views")
    for without in withouts:
        read_all(without, int)


def must_be_timestamp(ts: Any) -> None:
    """Check that a call's argument is a timestamp. Raises: TypeError."""
    read_typed((ts,), (int,))


def must_be_two_texts(texts: Any) -> None:
    """Check that a call's arguments are two texts. Raises: TypeError."""
    read_typed(texts, (str,), (str,))


def must_be_wall_time(wall_s: Any) -> None:
    """Check that a call's argument is a wall time, in seconds. Raises: TypeError, ValueError."""
    read_typed((wall_s,), (float, int))
    if not math.isfinite(wall_s):
        raise ValueError("a time")


def must_be_pin(pin: Any) -> None:
    """Check the arguments of `Pins.put`. Raises: TypeError."""
    read_typed(pin, (str,), (str,), (int,), (float, int), (str,), (str, type(None)))
