"""Opens a store on Bigtable, and claims it, so that this process owns it.

One process owns the store, and draws the timestamps. Other processes reach the rows either through the owner, at an
address that it serves, or as direct clients, with tickets from the owner. Transactions commit in two phases.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Any, Final

import trio

from perco.bigtable.address import Place
from perco.bigtable.calls import CallFailed, Scan
from perco.bigtable.lease import CALLS, BigtableLease
from perco.bigtable.options import BigtableOptions
from perco.bigtable.owner_row import Holder, Notice, change, notice, question, serve_at
from perco.bigtable.repeating import AGAIN, pause_of
from perco.bigtable.rows import FORMAT, FORMAT_ROW, BigtableRows, probes
from perco.bigtable.tickets import Tickets
from perco.errors import Unavailable
from perco.schema.catalogue import SYSTEM_TABLE, Catalogue
from perco.storage import ABSENT, APPLIED, DATA, TS_MAX, Mutation, Refused
from perco.storage.bare import Bare, Where
from perco.storage.lease import LeasedStore, command, locked, now

_PASS_S: Final = 60.0  # how long a search of all observed tables may take
_LOOKS: Final = 10  # how often to look at the owner's row within the length of a lease


class Searched(Bare):
    """`Bare` over a store whose cells are counted by a search. `tickets`: the tickets of direct clients, which also
    write; None: there are no direct clients."""

    tickets: Tickets | None = None

    async def raise_floor(self, ts: int, *, wait: bool) -> None:
        """See `OwnerStore.raise_floor`."""
        # The clients' floor comes first: below its own floor, this process rolls back without a marker, so clients must
        # not be able to prewrite there (T13).
        if self.tickets is not None:
            await self.tickets.raise_floor(ts, wait=wait)
            if not wait:
                # Permits with the former floor may not have expired, so this process must not raise its own floor yet.
                # It does not have to, either: this method is called without `wait` only because tables may have been
                # added, and all tables have the same floor.
                return
        await super().raise_floor(ts, wait=wait)

    async def look(self, tables: Collection[str], groups: Sequence[str], *, again: bool = False) -> None:
        """See `OwnerStore.look`. This process does not notice the writes of direct clients, so every look searches
        again. A look reads all these groups of a row as of one moment. So it finds every cell that was there when the
        look began, unless an observer's run has removed the cell or it has been rolled back since; `Idle` notices runs
        (N7)."""
        if self.tickets is None:
            await super().look(tables, groups, again=again)
            return
        async with self._looking:  # one look at a time, so that no look overwrites the counts of a later one
            wanted = [(table, group) for table in tables for group in groups]
            before = {where: -1 if self._may_change(where) else self._sends[where] for where in wanted}
            for where in wanted:  # counts of an earlier look must not be mixed with those of this look
                self._found[where] = -1, self.count(*where)
            counts: dict[Where, int] = {}
            # A caller that gives up asks again later. Without the shield, a pass that takes longer than callers wait
            # would never be completed.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _PASS_S) as scope:
                for table in sorted(tables):
                    found = await self._cells_of(table, groups)
                    counts.update({(table, group): count for group, count in zip(groups, found, strict=True)})
            if scope.cancelled_caught:
                return
            self._found.update({where: (before[where], counts[where]) for where in wanted})


class BigtableStore(LeasedStore):
    """The rows of a store that this process owns. Made by `open`; loop thread only."""

    store: Searched
    rows: BigtableRows
    _rows = BigtableRows

    def __init__(self, rows: BigtableRows, options: BigtableOptions) -> None:
        super().__init__(rows.place.shown, options.lease_s)
        self.rows, self._options = rows, options
        rows.usable, rows.check = self._usable, self.check

    @classmethod
    async def open(cls, url: str, options: BigtableOptions, *, direct: bool = False) -> BigtableStore:
        """Claim the store, whose table `perco bigtable init` has made. `direct`: keep the published address, at which
        clients find the server; otherwise clear it.

        Raises: StoreLocked, if another process owns it; FormatUnknown, Unavailable, UsageError.
        """
        place = Place(url)
        store = cls(cls._rows(place, options), options)
        try:
            store.rows.add(SYSTEM_TABLE, ())
            await store._claim(direct=direct)
            # Mutations of a former owner and of its clients may arrive until `lasts_s` has passed; `Searched` begins to
            # count that time now (T13).
            lasts_s = store._ours.lasts_s
            store.rows.hints.keep_to(store._ours.late_s, lasts_s)
            store.store = Searched(store.rows, store.rows.tables, store._ours.late_s, former_s=lasts_s)
            await store._begin()
        except BaseException:
            with trio.CancelScope(shield=True):
                await store.aclose()
            raise
        return store

    # ------------------------------------------------------------ opening

    async def _asked(self, request: Any) -> Any:
        """The answer to one call. The call may take only a part of the lease's length, because a claim's lease counts
        from before the call.

        Raises: CallFailed."""
        deadline = trio.current_time() + min(self._options.call_s, self._options.lease_s / CALLS)
        [answer] = await self.rows.calls.ask([request], deadline)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _notice(self) -> Notice:
        """Read the owner's row; repeat the read if it fails temporarily. Raises: CallFailed, Corruption."""
        until = trio.current_time() + self._options.call_s
        for attempt in range(1 << 30):
            try:
                return notice((await self._asked(Scan(question(self.rows.place)))).rows)
            except CallFailed as error:
                pause = pause_of(attempt)
                if error.code not in AGAIN or trio.current_time() + pause > until:
                    raise
            await trio.sleep(pause)
        raise AssertionError("the deadline ends the loop first")

    async def _claim(self, *, direct: bool) -> None:
        """Become the owner as soon as the last owner has not renewed its lease for the whole length of the lease (O1).

        Raises: StoreLocked, if the last owner renews its lease; Unavailable.
        """
        place, options = self.rows.place, self._options
        lease_s = options.lease_s
        try:
            holder, address, _, _ = await self._notice()
            seen = now()
            while True:
                if not holder.token or now() - seen >= max(lease_s, holder.lease_s):
                    before = now()
                    # From these times, this owner computes how long it waits until the permits of former owners'
                    # clients have expired. So they are never shorter than those of the former owners.
                    call_s, late_s = max(options.call_s, holder.call_s), max(options.late_s, holder.late_s)
                    # Each claim has a token of its own, so that an earlier claim that takes effect late does not count.
                    ours = Holder(holder.number + 1, secrets.token_hex(8), call_s, late_s, lease_s, command())
                    if await self._take(ours):
                        self._lease = BigtableLease(place, ours, lease_s, before)
                        self._lease.start()
                        self._ours = ours
                        if address and not direct:
                            await self.serve_at("")
                        return
                await trio.sleep(lease_s / _LOOKS)
                current, address, _, _ = await self._notice()
                if current.token and current.token == holder.token and current.number != holder.number:
                    raise locked(place.shown, current.told)
                # Another process has claimed the store (and may have died since), or the store has been released.
                if current.token != holder.token or not current.token:
                    holder, seen = current, now()
        except CallFailed as error:
            raise self.rows.told(error) from error

    async def _take(self, ours: Holder) -> bool:
        """Make a claim. Returns whether this process is the owner now. If the answer is lost, read the owner's row to
        find out."""
        try:
            answer = await self._asked(change(self.rows.place, ours))
            return not answer.predicate_matched
        except CallFailed as error:
            if not error.sent:
                raise
            found = (await self._notice()).holder
            return (found.token, found.number) == (ours.token, ours.number)

    async def _begin(self) -> None:
        """Record or check the store's format, and find out whether the server reads rows in reverse. Raises:
        FormatUnknown, Unavailable."""
        row = (FORMAT_ROW, [(ABSENT, DATA, 0, 0, TS_MAX)], [(DATA, 0, FORMAT, b"")])
        [verdict] = await self.rows.apply([Mutation(SYSTEM_TABLE, (row,))])
        if verdict is not APPLIED:
            if not isinstance(verdict, Refused) and not await self.rows.format():
                raise Unavailable(f"{self.rows.place.shown} cannot be written to: {verdict}")
            await self.rows.must_have_format()
        await self.rows.put(probes(self.rows.place))
        await self.rows.look_backwards()

    # ------------------------------------------------------------ direct clients

    def let_clients_in(self) -> Tickets:
        """Admit direct clients, with tickets, from now on. Call this before anything is committed, because direct
        clients do not see the entries in this process's memory (C4)."""
        if self.store.tickets is None:
            self.store.tickets = Tickets(self.rows, self._ours)
        return self.store.tickets

    async def serve_at(self, address: str) -> None:
        """Publish the address at which this process serves clients. Raises: StoreLocked, Unavailable."""
        self.check()
        await self.rows.put([serve_at(self.rows.place, self._ours.number, address)])
        self.check()

    # ------------------------------------------------------------ the owner's calls

    async def adapt(self, catalogue: Catalogue) -> None:
        """Register the tables and groups that a catalogue names."""
        await trio.lowlevel.checkpoint()
        for name in catalogue.tables:
            self.rows.add(name, list(catalogue.groups(name)))

    def where(self) -> tuple[str, str]:
        """The store's address; and the mark of its durability (S2), "": Bigtable acknowledges only what is durable."""
        return self.rows.place.shown, ""

    async def aclose(self) -> None:
        self._closed = True
        if self.forked:
            return  # the channels and the lease are the parent's
        await self.rows.calls.aclose()  # first: another process may claim the store as soon as the lease is released
        if self._lease is not None:
            await trio.to_thread.run_sync(self._lease.end)
