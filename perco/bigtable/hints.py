"""Finds the few rows with notify cells, pending signals or failed changes without a pass over the whole table.

The truth is in the rows: such a cell is written together with the record that it belongs to (N1). But it is one cell
among terabytes, and Bigtable has no index. So before a mutation that puts such a cell into a row is sent, a *hint* is
written: a row of its own, in a small range of the same table, with the key of the row that it is about. A scan of these
groups reads the hints, then the rows that they name. A hint about a row that has no such cell costs a read, and does no
harm. Several processes may write hints, and any of them may remove them.

N7  A row that has such a cell has a hint that nobody removes. The hint is written, and answered, before the mutation
    that puts the cell is sent. A mutation that only replaces such a cell by another one needs none. Each hint is a cell
    of its own, with a column for each process, and only those that were seen are removed: hints that are written
    meanwhile stay.
    A hint may be removed if its mutation has ended. Whether it has, the process that sent it knows; others wait for
    `lasts_s` from the moment at which they first saw the hint. It may also be removed if its mutation replaces a
    lock, which was there when the hint was written: without the lock it has no effect.
    From a row that has such a cell or a lock, hints are removed only if there are many, and only once a new one has
    been written in their place: another process may be removing any of the old ones.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, TypeAlias

import trio

from perco.bigtable.address import Place
from perco.bigtable.chunks import ReadCell
from perco.bigtable.keys import HINT_KEY, HINT_NAME, HINTED, MICROS, PROTOCOL_FAMILY, micros, row_key
from perco.bigtable.options import BigtableOptions
from perco.bigtable.wire import types
from perco.storage import LOCK, PRESENT, Mutation, ScanRequest

_TOKEN_BYTES: Final = 8  # of a process; the qualifiers of its hints end in it
_MANY: Final = 32  # hints about a row that has something
_AT_ONCE: Final = 10_000  # removed with one call, at most
_SEEN_MAX: Final = 1 << 17  # hints of others that are remembered
_FORGOTTEN: Final = 4  # times as long as a mutation lasts
_REPLACES_LOCK: Final = b"\x01"  # the values of hints: the mutation has no effect without a lock in the row
_OTHER: Final = b""

Hint: TypeAlias = tuple[bytes, int]  # the qualifier, which names the process, and the stamp


def wants_hint(mutation: Mutation) -> bool:
    """Whether a mutation may put a cell that scans must find into a row that had none."""
    _, checks, writes = mutation.rows[0]
    if not any(write[0] in HINTED and write[3] is not None for write in writes):
        return False
    return not any(kind == PRESENT and group in HINTED for kind, group, *_ in checks)


def is_hinted(request: ScanRequest) -> bool:
    """Whether hints lead to all that a scan asks for."""
    return not request.reverse and all(q.group in HINTED and q.columns is None for q in request.queries)


def hint_key(table: str, row: bytes) -> bytes:
    """The key of the hints about a row."""
    return HINT_KEY + row_key(table, row)


class Hints:
    """Of one process. Loop thread only.

    Attributes:
        lasts_s: for how long a mutation of another process may still take effect after its hint was seen: at least
            `call_s` and `late_s` of that process.
    """

    lasts_s: float
    removed: int

    def __init__(self, place: Place, options: BigtableOptions) -> None:
        self._place, self._late_s = place, options.late_s
        self.lasts_s = options.call_s + options.late_s
        self._name = HINT_NAME + secrets.token_bytes(_TOKEN_BYTES)  # no program seeds these
        self._last = 0
        self._flying: set[int] = set()  # stamps of mutations that may still take effect
        self._late: deque[tuple[float, int]] = deque()  # the same, if they were not answered: until when
        self._first_seen: OrderedDict[Hint, float] = OrderedDict()  # of other processes
        self.removed = 0

    def _stamp(self) -> int:
        self._last += 1
        return self._last

    def begin(self, mutation: Mutation) -> tuple[int, Any]:
        """The stamp of a new hint, and the call that writes it. Before the mutation is sent, the call must have been
        answered; after it, call `end`."""
        row, checks, _ = mutation.rows[0]
        replaces = any(kind == PRESENT and group == LOCK for kind, group, *_ in checks)
        stamp = self._stamp()
        self._flying.add(stamp)
        return stamp, self._writing(hint_key(mutation.table, row), stamp, _REPLACES_LOCK if replaces else _OTHER)

    def end(self, stamp: int, *, answered: bool) -> None:
        """The mutation has been answered, or was not sent; else it may take effect for some time."""
        if answered:
            self._flying.discard(stamp)
        else:
            self._late.append((trio.current_time() + self._late_s, stamp))

    def _writing(self, key: bytes, stamp: int, value: bytes) -> Any:
        where = {"family_name": PROTOCOL_FAMILY, "column_qualifier": self._name}
        return self._mutate(
            key, [types().Mutation(set_cell={**where, "timestamp_micros": micros(stamp), "value": value})]
        )

    def _mutate(self, key: bytes, mutations: Sequence[Any]) -> Any:
        return types().MutateRow(
            table_name=self._place.table, app_profile_id=self._place.app_profile, row_key=key, mutations=mutations
        )

    # ------------------------------------------------------------ removing them

    def removable(self, cells: Iterable[ReadCell]) -> list[Hint]:
        """Of the hints about a row those that may go, if the row allows it: of mutations that have ended, or that
        replace a lock. Call it before the row is read."""
        now = trio.current_time()
        while self._late and self._late[0][0] <= now:
            self._flying.discard(self._late.popleft()[1])
        hints = [((cell.name, cell.micros // MICROS), cell.value) for cell in cells]
        return [hint for hint, value in hints if value == _REPLACES_LOCK or self._has_ended(hint, now)]

    def _has_ended(self, hint: Hint, now: float) -> bool:
        if hint[0] == self._name:
            return hint[1] not in self._flying
        first = self._first_seen.get(hint)
        if first is None:
            while self._first_seen and len(self._first_seen) >= _SEEN_MAX:
                oldest, since = next(iter(self._first_seen.items()))
                if now < since + _FORGOTTEN * self.lasts_s:
                    return False  # there is no room for it: it is seen again
                del self._first_seen[oldest]  # it has gone, or nobody has looked at its row for long
            self._first_seen[hint] = first = now
        return now >= first + self.lasts_s

    def needless(self, removable: dict[bytes, list[Hint]], marked: Collection[bytes]) -> dict[bytes, list[Hint]]:
        """Of these hints those that go now, by row: from a row that has such a cell or a lock (`marked`) only if there
        are many, and once there is a new hint (`replacement`)."""
        return {
            key: found[:_AT_ONCE] for key, found in removable.items() if len(found) > (_MANY if key in marked else 0)
        }

    def replacement(self, key: bytes) -> Any:
        """The call that writes a new hint about a row, which stands for no mutation."""
        return self._writing(HINT_KEY + key, self._stamp(), _OTHER)

    def removal(self, key: bytes, hints: Sequence[Hint]) -> Any:
        """The call that removes hints about a row."""
        made = []
        for name, stamp in hints:
            within = {"start_timestamp_micros": micros(stamp), "end_timestamp_micros": micros(stamp + 1)}
            where = {"family_name": PROTOCOL_FAMILY, "column_qualifier": name}
            made.append(types().Mutation(delete_from_column={**where, "time_range": within}))
        return self._mutate(HINT_KEY + key, made)

    def gone(self, hints: Sequence[Hint]) -> None:
        """The call that removes these has been answered."""
        for hint in hints:
            self._first_seen.pop(hint, None)
        self.removed += len(hints)
