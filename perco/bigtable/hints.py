"""Finds the few rows with notify cells, pending signals or failed changes without a pass over the whole table.

The truth is in the rows: such a cell is written together with the record that it belongs to (N1). But it is one cell
among terabytes, and Bigtable has no index. So before a mutation that puts such a cell into a row is sent, a *hint* is
written: a cell of a *hint row*, which lies in a small range of the same table and has the key of the row that it is
about. A scan of these groups reads the hints, then the rows that they name. A hint about a row that has no such cell
costs a read, and does no harm. Several processes may write hints, and any of them may remove them.

N7  Every row that has such a cell has at least one hint that no process removes. A process writes the hint, and waits
    for the answer, before it sends the mutation that puts the cell. A mutation that only replaces such a cell with
    another one needs no hint. The hint row has a column for each process. A process removes only the hints that it has
    seen, so hints that are written meanwhile stay.
    A hint may be removed once its mutation can no longer take effect. The process that sent the mutation knows when;
    other processes wait for `lasts_s` from the moment at which they first saw the hint. If the mutation replaces a
    lock that was there when the hint was written, the hint may be removed at once: without the lock, the mutation has
    no effect.
    If the row has such a cell or a lock, hints are removed only if there are many, and only once a new hint has been
    written in their place: another process may be removing any of the old ones.
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

_TOKEN_BYTES: Final = 8  # of a token that names a process; the qualifiers of the process's hints end in it
_MANY: Final = 32  # hints about a row that has such a cell or a lock
_AT_ONCE: Final = 10_000  # removed with one call, at most
_SEEN_MAX: Final = 1 << 17  # hints of others that are remembered
_FORGOTTEN: Final = 4  # times `lasts_s`: after that, a hint that was seen may be forgotten
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
    """Whether hints lead to all cells that a scan asks for."""
    return not request.reverse and all(q.group in HINTED and q.columns is None for q in request.queries)


def hint_key(table: str, row: bytes) -> bytes:
    """The key of the hints about a row."""
    return HINT_KEY + row_key(table, row)


class Hints:
    """The hints that one process writes and removes. Loop thread only.

    Attributes:
        lasts_s: for how long a mutation of another process may still take effect after its hint was seen: at least the
            `call_s` plus the `late_s` of that process.
        late_s: for how long a mutation of this process may still take effect if it was not answered.
    """

    lasts_s: float
    late_s: float
    removed: int

    def __init__(self, place: Place, options: BigtableOptions) -> None:
        self._place, self.late_s = place, options.late_s
        self.lasts_s = options.call_s + options.late_s
        self._name = HINT_NAME + secrets.token_bytes(_TOKEN_BYTES)  # no program seeds these
        self._last = 0
        self._flying: set[int] = set()  # stamps of mutations that may still take effect
        self._late: deque[tuple[float, int]] = deque()  # (until when it may take effect, stamp) of each unanswered one
        self._first_seen: OrderedDict[Hint, float] = OrderedDict()  # when each hint of another process was first seen
        self.removed = 0

    def keep_to(self, late_s: float, lasts_s: float) -> None:
        """Adopt these times from the owner of the store, where they are longer than the present ones. They never become
        shorter, because earlier mutations of this process were sent under the longer ones."""
        self.late_s, self.lasts_s = max(self.late_s, late_s), max(self.lasts_s, lasts_s)

    def _stamp(self) -> int:
        self._last += 1
        return self._last

    def begin(self, mutation: Mutation) -> tuple[int, Any]:
        """The stamp of a new hint, and the call that writes it. The mutation may be sent only once the call has been
        answered; after the mutation, call `end`."""
        row, checks, _ = mutation.rows[0]
        replaces = any(kind == PRESENT and group == LOCK for kind, group, *_ in checks)
        stamp = self._stamp()
        self._flying.add(stamp)
        return stamp, self._writing(hint_key(mutation.table, row), stamp, _REPLACES_LOCK if replaces else _OTHER)

    def end(self, stamp: int, *, answered: bool) -> None:
        """Record the end of a mutation. `answered`: it was answered or never sent; otherwise it may still take effect
        for a while."""
        if answered:
            self._flying.discard(stamp)
        else:
            self._late.append((trio.current_time() + self.late_s, stamp))

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
        """The hints that may be removed if the row has no such cell: their mutations have ended, or replace a lock.
        Call it before the row is read."""
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
                    return False  # there is no room to remember it: a later scan sees it again
                del self._first_seen[oldest]  # the hint has gone, or this process has not looked at its row for long
            self._first_seen[hint] = first = now
        return now >= first + self.lasts_s

    def needless(self, removable: dict[bytes, list[Hint]], marked: Collection[bytes]) -> dict[bytes, list[Hint]]:
        """The hints to remove now, by row. For a row with such a cell or a lock (`marked`): only if it has many, and
        only after its `replacement` has been written."""
        return {
            key: found[:_AT_ONCE] for key, found in removable.items() if len(found) > (_MANY if key in marked else 0)
        }

    def replacement(self, key: bytes) -> Any:
        """The call that writes a new hint about a row. This hint belongs to no mutation."""
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
        """Note that the call that removes these hints has been answered."""
        for hint in hints:
            self._first_seen.pop(hint, None)
        self.removed += len(hints)
