"""Opens a store on Bigtable: its table, and the claim by which this process owns it.

One process owns the store: it draws the timestamps, and it alone reads and writes the rows. Its transactions commit in
two phases. Others reach the store through it, at an address that it serves.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import trio

from perco.bigtable.address import Place
from perco.bigtable.calls import CallFailed, Scan, Scanned
from perco.bigtable.keys import row_key
from perco.bigtable.lease import BigtableLease, Holder, change, holder_of, question
from perco.bigtable.options import BigtableOptions
from perco.bigtable.rows import BigtableRows
from perco.bigtable.wire import types
from perco.errors import FormatUnknown, Unavailable
from perco.schema.catalogue import SYSTEM_TABLE, Catalogue
from perco.storage import ABSENT, APPLIED, DATA, TS_MAX, Mutation, Refused
from perco.storage.bare import Bare
from perco.storage.lease import LeasedStore, command, locked, now

_LOOKS: Final = 10  # at the owner's row, while its lease may hold
FORMAT: Final = 1
_FORMAT_ROW: Final = b"format"
_PROBE: Final = "a probe"  # in place of a table's name: two rows by which a server shows that it reads in reverse


class BigtableStore(LeasedStore):
    """The rows of a store that this process owns. Made by `open`; loop thread only."""

    store: Bare
    rows: BigtableRows
    _rows = BigtableRows

    def __init__(self, rows: BigtableRows, options: BigtableOptions) -> None:
        super().__init__(rows.place.shown, options.lease_s)
        self.rows, self._options = rows, options
        rows.usable, rows.check = self._usable, self.check

    @classmethod
    async def open(cls, url: str, options: BigtableOptions) -> BigtableStore:
        """Claim the store, whose table `perco bigtable init` has made.

        Raises: StoreLocked, if another process owns it; FormatUnknown, Unavailable, UsageError.
        """
        place = Place(url)
        store = cls(cls._rows(place, options), options)
        try:
            store.rows.add(SYSTEM_TABLE, ())
            await store._claim()
            # From now on: a former owner's mutations may still arrive (T13).
            former_s = options.call_s + options.late_s
            store.store = Bare(store.rows, store.rows.tables, options.late_s, former_s=former_s)
            await store._begin()
        except BaseException:
            with trio.CancelScope(shield=True):
                await store.aclose()
            raise
        return store

    # ------------------------------------------------------------ opening

    async def _asked(self, request: Any) -> Any:
        """The answer to one call. Raises: CallFailed."""
        deadline = trio.current_time() + self._options.call_s
        [answer] = await self.rows.calls.ask([request], deadline)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _holder(self) -> Holder:
        answer = await self._asked(Scan(question(self.rows.place)))
        assert isinstance(answer, Scanned)
        return holder_of([(cell.micros, cell.value) for row in answer.rows for cell in row.cells])

    async def _claim(self) -> None:
        """Become the owner, once the last one has not renewed its lease for its whole length (O1).

        Raises: StoreLocked, if it does; Unavailable.
        """
        place, lease_s = self.rows.place, self._options.lease_s
        token = secrets.token_hex(8)
        try:
            holder = await self._holder()
            seen = now()
            while True:
                if not holder.token or now() - seen >= lease_s:
                    before = now()
                    if await self._take(holder, token):
                        ours = Holder(holder.number + 1, token, command())
                        self._lease = BigtableLease(place, ours, lease_s, before)
                        self._lease.start()
                        return
                await trio.sleep(lease_s / _LOOKS)
                current = await self._holder()
                if current.token and current.token == holder.token and current.number != holder.number:
                    raise locked(place.shown, current.told)
                if current.token != holder.token:  # a claim that may be that of a process that has died since
                    holder, seen = current, now()
        except CallFailed as error:
            raise self.rows.told(error) from error

    async def _take(self, holder: Holder, token: str) -> bool:
        """Whether this process is the owner now. If the answer is lost, the row tells."""
        try:
            answer = await self._asked(change(self.rows.place, holder.number, token, command()))
            return not answer.predicate_matched
        except CallFailed as error:
            if not error.sent:
                raise
            return (await self._holder()).token == token

    async def _begin(self) -> None:
        """Note the store's format, and find out what the server can do. Raises: FormatUnknown, Unavailable."""
        row = (_FORMAT_ROW, [(ABSENT, DATA, 0, 0, TS_MAX)], [(DATA, 0, FORMAT, b"")])
        [verdict] = await self.rows.apply([Mutation(SYSTEM_TABLE, (row,))])
        if verdict is not APPLIED:
            [[found]] = await self.rows.read([(SYSTEM_TABLE, _FORMAT_ROW, [(DATA, 0, 0, TS_MAX, 1)])])
            if not found and not isinstance(verdict, Refused):
                raise Unavailable(f"{self.rows.place.shown} cannot be written: {verdict}")
            if not found or found[0][0] != FORMAT:
                told = f"format {found[0][0]}" if found else "no format"
                raise FormatUnknown(self.rows.place.shown, told, f"format {FORMAT}")
        self.rows.backwards = await self._reads_backwards()

    async def _reads_backwards(self) -> bool:
        """Whether the server reads rows in reverse. One that does not know the request's field reads them forward,
        without a word."""
        t, place = types(), self.rows.place
        keys = [row_key(_PROBE, b"1"), row_key(_PROBE, b"2")]
        where = {"table_name": place.table, "app_profile_id": place.app_profile}
        cell = {"family_name": "p", "column_qualifier": b"probe", "timestamp_micros": 1000, "value": b""}
        try:
            for key in keys:
                await self._asked(t.MutateRow(**where, row_key=key, mutations=[t.Mutation(set_cell=cell)]))
            request = t.ReadRows(**where, reversed=True, rows_limit=2)
            request.rows.row_keys.extend(keys)
            answer = await self._asked(Scan(request))
        except CallFailed as error:
            raise self.rows.told(error) from error
        return [row.key for row in answer.rows] == keys[::-1]

    # ------------------------------------------------------------ the owner's calls

    async def adapt(self, catalogue: Catalogue) -> None:
        """Take in the tables and groups that a catalogue names."""
        await trio.lowlevel.checkpoint()
        for name in catalogue.tables:
            self.rows.add(name, list(catalogue.groups(name)))

    def where(self) -> tuple[str, str]:
        """The address; and the mark of its durability (S2): Bigtable acknowledges only what is durable."""
        return self.rows.place.shown, ""

    async def aclose(self) -> None:
        self._closed = True
        if self.forked:
            return  # the channels and the lease are the parent's
        await self.rows.calls.aclose()  # first: the next owner may claim the store as soon as the lease is given back
        if self._lease is not None:
            await trio.to_thread.run_sync(self._lease.end)
