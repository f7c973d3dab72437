"""Finds the few rows with notify cells, pending signals or failed changes without a pass over the whole table.

The truth is in the rows: such a cell is written together with the record that it belongs to (N1). But it is one cell
among terabytes, and Bigtable has no index. So before a mutation that puts such a cell is sent, a *hint* is written: a
row of its own, in a small range of the same table, with the key of the row that it is about. A scan of these groups
reads the hints, then the rows that they name. A hint about a row that has no such cell costs a read, and does no harm.

N7  A row that has such a cell has a hint. The hint is written, and answered, before the mutation that puts the cell is
    sent. It is removed only once that mutation cannot take effect any more, and the row, read after that moment, has no
    such cell and no lock. Each hint is a cell with a stamp of its own, and only stamps that were seen are removed:
    hints that others write meanwhile stay. Of a row that has such a cell all hints but one may go; one whose removal
    may be under way does not count.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Final

import trio

from perco.bigtable.address import Place
from perco.bigtable.keys import HINT_KEY, HINT_NAME, HINTED, MICROS, PROTOCOL_FAMILY, micros, row_key
from perco.bigtable.options import BigtableOptions
from perco.bigtable.wire import types
from perco.storage import Mutation, ScanRequest

_COUNT_BITS: Final = 20
_NONCE_BITS: Final = 26  # the emulator's timestamps end at 47 bits of ours


def wants_hint(mutation: Mutation) -> bool:
    """Whether a mutation puts a cell that scans must find."""
    return any(write[0] in HINTED and write[3] is not None for write in mutation.rows[0][2])


def is_hinted(request: ScanRequest) -> bool:
    """Whether hints lead to all that a scan asks for."""
    return not request.reverse and all(q.group in HINTED and q.columns is None for q in request.queries)


def hint_key(table: str, row: bytes) -> bytes:
    """The key of the hints about a row."""
    return HINT_KEY + row_key(table, row)


class Hints:
    """Of one owner, through which all mutations go. Loop thread only.

    Args:
        options: `call_s` and `late_s` say for how long a mutation of a former owner may still take effect.
    """

    removed: int

    def __init__(self, place: Place, options: BigtableOptions) -> None:
        self._place, self._options = place, options
        self._nonces: set[int] = set()
        self._count = 1 << _COUNT_BITS
        self._nonce = 0
        self._flying: set[int] = set()  # stamps of mutations that may still take effect
        self._late: deque[tuple[float, int]] = deque()  # the same, if they were not answered: until when
        self._others_until: float | None = None
        self._removing = False
        self._doomed: set[int] = set()  # stamps whose removal was sent, and not answered
        self.removed = 0

    def _stamp(self) -> int:
        if self._count >= 1 << _COUNT_BITS:
            self._nonce, self._count = secrets.randbits(_NONCE_BITS) + 1, 0  # no program seeds these
            self._nonces.add(self._nonce)
        self._count += 1
        return (self._nonce << _COUNT_BITS) + self._count - 1

    def begin(self, mutation: Mutation) -> tuple[int, Any]:
        """The stamp of a new hint, and the call that writes it. Before the mutation is sent, the call must have been
        answered; after it, call `end`."""
        stamp = self._stamp()
        self._flying.add(stamp)
        cell = {
            "family_name": PROTOCOL_FAMILY,
            "column_qualifier": HINT_NAME,
            "timestamp_micros": micros(stamp),
            "value": b"",
        }
        return stamp, self._mutate(hint_key(mutation.table, mutation.rows[0][0]), [types().Mutation(set_cell=cell)])

    def end(self, stamp: int, *, answered: bool) -> None:
        """The mutation has been answered, or was not sent; else it may take effect for some time."""
        if answered:
            self._flying.discard(stamp)
        else:
            self._late.append((trio.current_time() + self._options.late_s, stamp))

    def _mutate(self, key: bytes, mutations: Sequence[Any]) -> Any:
        return types().MutateRow(
            table_name=self._place.table, app_profile_id=self._place.app_profile, row_key=key, mutations=mutations
        )

    def settled(self, stamps: Sequence[int]) -> list[int]:
        """Of these, the ones whose mutations cannot take effect any more. Call it before the row is read."""
        now, others_ended = trio.current_time(), self._others_ended()
        while self._late and self._late[0][0] <= now:
            self._flying.discard(self._late.popleft()[1])
        return [
            stamp
            for stamp in stamps
            if (stamp not in self._flying if stamp >> _COUNT_BITS in self._nonces else others_ended)
        ]

    # ------------------------------------------------------------ removing them

    def begin_removing(self) -> bool:
        """Whether this scan may remove hints; then call `end_removing`. One scan at a time may: of two, each could keep
        the hint about a row that the other removes."""
        may, self._removing = not self._removing, True
        return may

    def end_removing(self) -> None:
        self._removing = False

    def removals(
        self, stamps: dict[bytes, list[int]], settled: dict[bytes, list[int]], marked: Collection[bytes]
    ) -> list[tuple[Any, list[int]]]:
        """The calls that remove needless hints, each with their stamps: of a row without such cells those that are
        settled; of a row with such cells (`marked`) the same, but one hint stays."""
        out = []
        for key, seen in stamps.items():
            gone = settled[key]
            if key in marked:
                staying = max((stamp for stamp in seen if self._stays(stamp)), default=0)
                gone = [stamp for stamp in gone if staying and stamp != staying]
            if gone:
                out.append((self._removal(HINT_KEY + key, gone), gone))
                self._doomed.update(gone)
        return out

    def _stays(self, stamp: int) -> bool:
        """Whether nobody removes this hint now: no removal of it is under way, by this owner or by a former one."""
        if stamp in self._doomed:
            return False
        return stamp >> _COUNT_BITS in self._nonces or self._others_ended()

    def _others_ended(self) -> bool:
        """Whether nothing that a former owner has sent can take effect any more."""
        if self._others_until is None:
            self._others_until = trio.current_time() + self._options.call_s + self._options.late_s
        return trio.current_time() >= self._others_until

    def removed_all(self, stamps: Sequence[int]) -> None:
        """The call that removes these has been answered."""
        self._doomed.difference_update(stamps)
        self.removed += len(stamps)

    def _removal(self, key: bytes, stamps: Sequence[int]) -> Any:
        where = {"family_name": PROTOCOL_FAMILY, "column_qualifier": HINT_NAME}
        ranges = [
            {"start_timestamp_micros": micros(stamp), "end_timestamp_micros": micros(stamp + 1)} for stamp in stamps
        ]
        return self._mutate(
            key, [types().Mutation(delete_from_column={**where, "time_range": each}) for each in ranges]
        )


def stamps_of(cells: Sequence[Any]) -> list[int]:
    """The stamps of the hints in a row of them."""
    return [cell.micros // MICROS for cell in cells]
