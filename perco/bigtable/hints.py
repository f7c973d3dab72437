"""Finds the few rows with notify cells, pending signals or failed changes without a pass over the whole table.

Such a cell is in the observed row, because it is written together with the record that it belongs to (N1). But it is
one cell among terabytes, and Bigtable has no index. So before a process sends a mutation that puts such a cell into a
row, it writes a *hint*: a cell of a *hint row*. Hint rows are in a small key range of the same table, and the key of a
hint row contains the key of the row that its hints are about. A scan for such cells reads the hints, and then the rows
that they name. A hint about a row that has no such cell costs a read, and does no harm. Several processes may write
hints, and each of them may remove any hint.

N7  Every row that has such a cell has at least one hint that no process removes. A process writes the hint, and waits
    for the answer, before it sends the mutation that puts the cell. A mutation that only replaces such a cell with
    another one needs no hint. The hint row has a column for each process. A process removes only hints that it has
    seen, so hints that are written meanwhile stay.
    A hint may be removed once its mutation can no longer take effect. The process that sent the mutation knows when
    that is; other processes wait for `lasts_s` from the moment at which they first saw the hint. If the mutation
    replaces a lock that was there when the hint was written, the hint may be removed at once: without the lock, the
    mutation has no effect.
    If the row has such a cell or a lock, a process removes hints only if there are many of them, and only once it has
    written a new hint in their place, because another process may be removing the old ones.
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

_TOKEN_BYTES: Final = 8  # length of the token that names a process; the qualifiers of the process's hints end in it
_MANY: Final = 32  # up to this many hints stay at a row that has such a cell or a lock
_AT_ONCE: Final = 10_000  # hints that one call removes, at most
_SEEN_MAX: Final = 1 << 17  # hints of other processes that this process remembers
_FORGOTTEN: Final = 4  # times `lasts_s`: once this time has passed since a hint was first seen, it may be forgotten
_REPLACES_LOCK: Final = b"\x01"  # a hint's value: its mutation has no effect without a lock in the row
_OTHER: Final = b""

Hint: TypeAlias = tuple[bytes, int]  # the qualifier, which names the process, and the stamp


def wants_hint(mutation: Mutation) -> bool:
    """Whether a mutation needs a hint: it may put a cell of a group in `HINTED` into a row that had none."""
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
        lasts_s: for how long after a hint was seen the mutation of another process may still take effect: at least the
            `call_s` plus the `late_s` of that process.
        late_s: for how long an unanswered mutation of this process may still take effect.
        removed: how many hints this process has removed.
    """

    lasts_s: float
    late_s: float
    removed: int

    def __init__(self, place: Place, options: BigtableOptions) -> None:
        self._place, self.late_s = place, options.late_s
        self.lasts_s = options.call_s + options.late_s
        # Random even in a program that is seeded, so that no two processes have the same name.
        self._name = HINT_NAME + secrets.token_bytes(_TOKEN_BYTES)
        self._last = 0
        self._flying: set[int] = set()  # stamps of mutations that may still take effect
        self._late: deque[tuple[float, int]] = deque()  # (until when, stamp) of each unanswered mutation
        self._first_seen: OrderedDict[Hint, float] = OrderedDict()  # when each hint of another process was first seen
        self.removed = 0

    def keep_to(self, late_s: float, lasts_s: float) -> None:
        """Adopt the times that the owner of the store states, if they are longer than the present ones. They never
        become shorter, because earlier mutations of this process were sent under the longer times."""
        self.late_s, self.lasts_s = max(self.late_s, late_s), max(self.lasts_s, lasts_s)

    def _stamp(self) -> int:
        self._last += 1
        return self._last

    def begin(self, mutation: Mutation) -> tuple[int, Any]:
        """The stamp of a new hint for a mutation, and the call that writes the hint. The mutation may be sent only once
        that call has been answered; after the mutation, call `end`."""
        row, checks, _ = mutation.rows[0]
        replaces = any(kind == PRESENT and group == LOCK for kind, group, *_ in checks)
        stamp = self._stamp()
        self._flying.add(stamp)
        return stamp, self._writing(hint_key(mutation.table, row), stamp, _REPLACES_LOCK if replaces else _OTHER)

    def end(self, stamp: int, *, answered: bool) -> None:
        """Record the end of a mutation. `answered`: whether it was answered, or never sent; if not, it may still take
        effect for `late_s`."""
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
        """Those hints of a hint row that may be removed if the row that they are about has no cell of `HINTED` and no
        lock: their mutations have ended, or replace a lock. Call this before you read that row."""
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
                    return False  # there is no room to remember this hint; a later scan sees it again
                del self._first_seen[oldest]  # it is gone, or this process has not looked at its row for a long time
            self._first_seen[hint] = first = now
        return now >= first + self.lasts_s

    def needless(self, removable: dict[bytes, list[Hint]], marked: Collection[bytes]) -> dict[bytes, list[Hint]]:
        """The hints to remove now, by row. A row in `marked` has a cell of `HINTED` or a lock. Its hints are
        removed only if there are many, and only after the caller has written their `replacement`."""
        return {
            key: found[:_AT_ONCE] for key, found in removable.items() if len(found) > (_MANY if key in marked else 0)
        }

    def replacement(self, key: bytes) -> Any:
        """The call that writes a new hint about a row. The hint belongs to no mutation."""
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
        """Record that the call that removes these hints has been answered."""
        for hint in hints:
            self._first_seen.pop(hint, None)
        self.removed += len(hints)
