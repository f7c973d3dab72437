"""Faults in the code of a store on Bigtable and of its direct clients, switched on one at a time: `perco/bigtable`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
import trio

from perco.bigtable import client, filters, hints, lease, owner_row, rows, store, tickets
from perco.bigtable.calls import CallFailed
from perco.bigtable.wire import types
from perco.serve import direct as serving
from perco.storage import Failed, NoReply, lease as leases
from perco.storage.bare import Bare
from perco.testing import direct as simulated
from tests.testing.mutants import Mutant

DIRECT: Final[dict[str, Mutant]] = {}


def direct(name: str) -> Callable[[Mutant], Mutant]:
    def note(function: Mutant) -> Mutant:
        DIRECT[name] = function
        return function

    return note


# ------------------------------------------------------------ the owner


@direct("O1 the next owner does not wait for the lease to end")
def claims_at_once(patch: pytest.MonkeyPatch) -> None:
    right, plain = store.BigtableStore._claim, simulated._Lease.__init__

    async def claim(self: Any, *, direct: bool) -> None:
        options, self._options = self._options, replace(self._options, lease_s=0.05)
        try:
            await right(self, direct=direct)
        finally:
            self._options = options

    def lasts(self: Any, place: Any, holder: Any, lease_s: float, claimed_at: float) -> None:
        plain(self, place, holder, simulated.LEASE_S, claimed_at)

    patch.setattr(store.BigtableStore, "_claim", claim)
    patch.setattr(simulated._Lease, "__init__", lasts)


@direct("O1 an owner whose lease has ended goes on")
def never_checks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leases.LeasedStore, "check", leases.LeasedStore._usable)


def _whatever(place: Any, holder: Any) -> Any:
    """A change of the owner's row that is made in any case."""
    made = owner_row.change(place, holder)
    made.predicate_filter.CopyFrom(types().RowFilter(block_all_filter=True))
    return made


@direct("O1 a claim is made whatever has changed")
def claims_blindly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store, "change", _whatever)


@direct("O1 a former owner renews its lease after it was taken over")
def renews_blindly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "change", _whatever)


@direct("O1 a claim whose answer is lost counts if an earlier one is there")
def earlier_claim(patch: pytest.MonkeyPatch) -> None:
    async def take(self: Any, ours: Any) -> bool:
        try:
            return not (await self._asked(owner_row.change(self.rows.place, ours))).predicate_matched
        except CallFailed:
            return True

    patch.setattr(store.BigtableStore, "_take", take)


@direct("O1 the lease counts from the answer")
def counts_from_answer(patch: pytest.MonkeyPatch) -> None:
    right = leases.Lease._renew

    def renew(self: Any) -> None:
        right(self)
        if not self.said and self.deposed is None:
            self.until = leases.now() + self._lease_s

    patch.setattr(leases.Lease, "_renew", renew)


@direct("O1 what a former owner acknowledges is not checked")
def acknowledges(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rows.BigtableRows, "_acknowledge", lambda self, sent, verdicts: None)


@direct("O1 an owner does not wait for what former owners and their clients have sent")
def former(patch: pytest.MonkeyPatch) -> None:
    right = store.Searched

    def searched(rows: Any, tables: Any, late_s: float, *, former_s: float) -> Any:
        return right(rows, tables, late_s, former_s=0.0)

    patch.setattr(store, "Searched", searched)


# ------------------------------------------------------------ tickets and permits


@direct("T13 a client does not look at the floor")
def floorless(patch: pytest.MonkeyPatch) -> None:
    right = client.ClientRows._renew

    async def renew(self: Any) -> bool:
        good = await right(self)
        self._permit = self._permit._replace(floor=0)
        return good

    patch.setattr(client.ClientRows, "_renew", renew)


@direct("T13 the owner does not wait until permits with an earlier floor have ended")
def hasty_floor(patch: pytest.MonkeyPatch) -> None:
    async def raise_floor(self: Any, ts: int, *, wait: bool) -> None:
        if wait:
            await self.settle()
        if ts > self._floor:
            await self._rows.put([owner_row.raise_floor(self._rows.place, ts)])
            self._floor = ts

    patch.setattr(tickets.Tickets, "raise_floor", raise_floor)


@direct("T13 the floor is not told to clients")
def untold_floor(patch: pytest.MonkeyPatch) -> None:
    async def raise_floor(self: Any, ts: int, *, wait: bool) -> None:
        await trio.lowlevel.checkpoint()

    patch.setattr(tickets.Tickets, "raise_floor", raise_floor)


@direct("F3 a ticket does not end with its session")
def undying_ticket(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tickets.Tickets, "end", lambda self, ticket: None)


@direct("F3 a read counts although its permit has expired")
def late_reads(patch: pytest.MonkeyPatch) -> None:
    async def ask(self: Any, calls: Any) -> Any:
        session = self._session
        await self._permitted(session)
        answers = await rows.BigtableRows._ask(self, calls)
        self._must_be_in(session)
        return answers

    patch.setattr(client.ClientRows, "_ask", ask)


@direct("R5 a read of a session that has ended counts")
def ended_reads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(client.ClientRows, "_must_be_in", lambda self, session: self._usable())


@direct("F3 a permit lasts for ever")
def endless_permit(patch: pytest.MonkeyPatch) -> None:
    right = client.ClientRows._renew

    async def renew(self: Any) -> bool:
        good = await right(self)
        self._permit = self._permit._replace(renew_at=1e18, until=1e18)
        return good

    patch.setattr(client.ClientRows, "_renew", renew)


# ------------------------------------------------------------ mutations


@direct("T4 an answer that was lost counts as a refusal")
def lost_is_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rows.BigtableRows, "_unanswered", lambda self, failure: Failed(self.told(failure)))


@direct("T4 a mutation whose answer was lost is sent again")
def sent_again(patch: pytest.MonkeyPatch) -> None:
    right = rows.BigtableRows._send

    async def send(self: Any, indices: Any, calls: Any, verdicts: Any, deadline: float) -> Any:
        refused = await right(self, indices, calls, verdicts, deadline)
        lost = [at for at, index in enumerate(indices) if isinstance(verdicts[index], NoReply)]
        if lost and trio.current_time() < deadline:
            refused += await right(self, [indices[at] for at in lost], [calls[at] for at in lost], verdicts, deadline)
        return refused

    patch.setattr(rows.BigtableRows, "_send", send)


@direct("S1 a check that a cell is present is not made")
def unchecked(patch: pytest.MonkeyPatch) -> None:
    right = filters.predicate
    patch.setattr(filters, "predicate", lambda checks: right([check for check in checks if check[0] != "present"]))


# ------------------------------------------------------------ hints


@direct("N7 no hint is written")
def hintless(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rows, "wants_hint", lambda mutation: False)


@direct("N7 a mutation is sent although its hint was lost")
def lost_hint(patch: pytest.MonkeyPatch) -> None:
    async def hint(self: Any, mutations: Any, left: Any, calls: Any, verdicts: Any, attempt: Any, stamps: Any) -> None:
        written = []
        for index in left:
            if hints.wants_hint(mutations[index]):
                stamps[index], call = self.hints.begin(mutations[index])
                written.append(call)
        await self.calls.ask(written, attempt.deadline)

    patch.setattr(rows.BigtableRows, "_hint", hint)


@direct("N7 a process removes its hint while the mutation is in flight")
def hasty_own(patch: pytest.MonkeyPatch) -> None:
    right = hints.Hints._has_ended

    def has_ended(self: Any, hint: Any, now: float) -> bool:
        return True if hint[0] == self._name else right(self, hint, now)

    patch.setattr(hints.Hints, "_has_ended", has_ended)


@direct("N7 a process removes the hints of others at once")
def hasty_others(patch: pytest.MonkeyPatch) -> None:
    right = hints.Hints._has_ended

    def has_ended(self: Any, hint: Any, now: float) -> bool:
        return right(self, hint, now) if hint[0] == self._name else True

    patch.setattr(hints.Hints, "_has_ended", has_ended)


@direct("N7 hints of a row that has something are removed")
def hasty_marked(patch: pytest.MonkeyPatch) -> None:
    right = hints.Hints.needless

    def needless(self: Any, removable: Any, marked: Any) -> Any:
        return right(self, removable, ())

    patch.setattr(hints.Hints, "needless", needless)


@direct("N7 an unanswered mutation counts as ended")
def hasty_late(patch: pytest.MonkeyPatch) -> None:
    right = hints.Hints.end
    patch.setattr(hints.Hints, "end", lambda self, stamp, *, answered: right(self, stamp, answered=True))


@direct("N7 an owner trusts what it has counted, although clients write")
def trusted_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store.Searched, "look", Bare.look)


@direct("N8 a client does not tell of its notify cells")
def no_news(patch: pytest.MonkeyPatch) -> None:
    async def apply(self: Any, mutations: Any) -> Any:
        return await self.rows.apply(mutations)

    patch.setattr(serving.DirectRowStore, "apply", apply)
