"""Records which columns each observer writes: the edges of the pipeline that are not declared anywhere.

The system table has a row for each pair of an observer and a column. The row's key is `output/`, the observer's number,
the column's number, and the table's name. A worker puts the row after the first run that writes there; putting it again
changes nothing. If the process dies before that, the next run that writes there puts it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from perco.protocol.records import observer_of
from perco.schema.catalogue import SYSTEM_TABLE, raise_for
from perco.storage import APPLIED, DATA, Mutation, RowStore, ScanQuery, ScanRequest
from perco.txn import runs
from perco.txn.background import Background
from perco.txn.transaction import Transaction

_PREFIX: Final = b"output/"
_AFTER: Final = b"output0"

Where = tuple[str, bytes, int]


class Output(NamedTuple):
    """A column that an observer writes; `column`: its number in the store."""

    observer: int
    table: str
    column: int


class Outputs:
    """Notes what the runs of one worker write. Loop thread only."""

    def __init__(self, store: RowStore, background: Background, observers: Iterable[int]) -> None:
        self._store, self._background = store, background
        self.seen: dict[int, set[tuple[str, int]]] = {number: set() for number in observers}

    def note_run(self, observer: int, txn: Transaction) -> None:
        """Record what the committed transaction of a run has written."""
        known = self.seen[observer]
        for table, _, column in runs.written(txn):
            if (table, column) not in known:
                self.note(observer, table, column)

    def note(self, observer: int, table: str, column: int) -> None:
        """Record that a run has committed a write to a column that is not in `seen` yet."""
        if observer_of(column):
            return  # the run's own acknowledgement
        self.seen[observer].add((table, column))
        self._background.spawn(lambda: self._put(observer, table, column))

    async def _put(self, observer: int, table: str, column: int) -> None:
        row = _PREFIX + f"{observer}/{column}/{table}".encode()
        [verdict] = await self._store.apply([Mutation(SYSTEM_TABLE, ((row, (), ((DATA, 0, 1, b""),)),))])
        if verdict is not APPLIED:  # the next run notes it again
            self.seen[observer].discard((table, column))


async def forget_outputs(store: RowStore, observer: int) -> None:
    """Remove the notes of a dropped observer. It does no harm if one is put again: no observer has its number (N12)."""
    rows = [
        _PREFIX + f"{output.observer}/{output.column}/{output.table}".encode()
        for output in await outputs_in(store)
        if output.observer == observer
    ]
    mutations = [Mutation(SYSTEM_TABLE, ((row, (), ((DATA, 0, 1, None),)),)) for row in rows]
    for verdict in await store.apply(mutations) if mutations else ():
        if verdict is not APPLIED:
            raise_for(verdict, "the notes of what a dropped observer wrote")


async def outputs_in(store: RowStore) -> list[Output]:
    """All outputs that were noted in a store."""
    found: list[Output] = []
    start: bytes | None = _PREFIX
    while start is not None:
        page = await store.scan(ScanRequest(SYSTEM_TABLE, start, _AFTER, (ScanQuery(DATA, (0,), 1, 1),)))
        for row, _ in page.rows:
            observer, column, table = row[len(_PREFIX) :].decode().split("/", 2)
            found.append(Output(int(observer), table, int(column)))
        start = page.next
    return found
