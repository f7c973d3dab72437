"""Faults in `perco/bigtable` that simulated runs do not show within a few seeds, each with the component test that must
find it. Rules about permits, tickets and hints cover for one another in a whole run."""

from __future__ import annotations

import math
from typing import Any, Final

import pytest

from perco.bigtable import client, hints, lease, owner_row, rows, store, tickets
from perco.bigtable.calls import CallFailed
from perco.storage import Refused
from perco.storage.bare import Bare
from tests.testing.mutants_components import by

_STORE: Final = "tests/component/storage/test_bigtable.py::"
_CLIENTS: Final = "tests/component/storage/test_bigtable_clients.py::"
_HANGING: Final = "tests/component/storage/test_bigtable_hanging.py::"


# ------------------------------------------------------------ the owner


@by(
    _STORE + "test_an_owner_that_is_silent_loses_the_store_and_knows[model]",
    "O1 an owner whose lease has ended goes on",
)
def goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store.BigtableStore, "check", lambda self: None)


@by(
    _HANGING + "test_a_claim_that_was_lost_is_not_taken_for_an_earlier_one",
    "O1 a claim whose answer is lost counts as made if an earlier claim is there",
)
def an_earlier_claim(patch: pytest.MonkeyPatch) -> None:
    async def take(self: Any, ours: Any) -> bool:
        try:
            return not (await self._asked(store.change(self.rows.place, ours))).predicate_matched
        except CallFailed:
            return bool((await self._notice()).holder.number)

    patch.setattr(store.BigtableStore, "_take", take)


@by(
    _STORE + "test_a_renewal_whose_answer_is_lost_does_not_count_from_the_next[model]",
    "O1 the lease counts from the answer",
)
def counts_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    right = lease.BigtableLease._change

    def change(self: Any, wanted: Any) -> Any:
        made = right(self, wanted)
        return True if made is None and not self._asked_at else made

    patch.setattr(lease.BigtableLease, "_change", change)


@by(
    _STORE + "test_a_former_owners_mutations_may_be_late[model]",
    "T13 an owner does not wait for what former owners and their clients have sent",
)
def no_former_owner(patch: pytest.MonkeyPatch) -> None:
    right = Bare.__init__

    def init(self: Any, *args: Any, former_s: float = 0.0, **more: Any) -> None:
        right(self, *args, **more)

    patch.setattr(Bare, "__init__", init)


@by(
    _STORE + "test_what_was_made_after_the_lease_is_not_acknowledged[model]",
    "O1 a former owner still acknowledges writes",
)
def acknowledges(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rows.BigtableRows, "_acknowledge", lambda self, sent, verdicts: None)


@by(
    _STORE + "test_a_mutation_without_an_answer_may_have_been_made[model-after-True]",
    "T4 an answer that was lost counts as a refusal",
)
def lost_is_refused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rows.BigtableRows, "_unanswered", lambda self, answer: Refused(0, 0))


# ------------------------------------------------------------ tickets, permits and the floor


def _made_with(patch: pytest.MonkeyPatch, kind: Any, **broken: Any) -> None:
    """Let each tuple of this kind have these values, whatever it is made with."""
    right = kind.__new__
    patch.setattr(kind, "__new__", lambda cls, *args: right(cls, *args)._replace(**broken))


@by(
    _CLIENTS + "test_below_the_floor_a_clients_mutation_is_not_sent[model]",
    "T13 a client does not look at the floor",
)
def blind_to_the_floor(patch: pytest.MonkeyPatch) -> None:
    _made_with(patch, client.Permit, floor=0)


@by(
    _CLIENTS + "test_the_floor_waits_for_what_clients_may_still_send[model]",
    "T13 the owner does not wait until permits with an earlier floor have ended",
)
def floor_at_once(patch: pytest.MonkeyPatch) -> None:
    right = tickets.Tickets.raise_floor

    async def raise_floor(self: Any, ts: int, *, wait: bool) -> None:
        await right(self, ts, wait=False)

    patch.setattr(tickets.Tickets, "raise_floor", raise_floor)


@by(
    _CLIENTS + "test_a_session_that_ended_writes_and_reads_nothing_once_its_permit_has_ended[model]",
    "F3 a ticket does not end with its session",
)
def endless_ticket(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tickets.Tickets, "end", lambda self, ticket: None)


@by(
    _CLIENTS + "test_a_session_that_ended_writes_and_reads_nothing_once_its_permit_has_ended[model]",
    "F3 a permit lasts for ever",
)
def endless_permit(patch: pytest.MonkeyPatch) -> None:
    _made_with(patch, client.Permit, renew_at=math.inf, until=math.inf)


@by(
    _CLIENTS + "test_what_another_owner_lets_in_meanwhile_is_read_again[model]",
    "F3 a read counts although its permit has expired",
)
def expired_read(patch: pytest.MonkeyPatch) -> None:
    async def ask(self: Any, calls: Any) -> Any:
        session = self._session
        await self._permitted(session)
        answers = await rows.BigtableRows._ask(self, calls)
        self._must_be_in(session)
        return answers

    patch.setattr(client.ClientRows, "_ask", ask)


@by(
    _CLIENTS + "test_what_a_session_has_begun_the_next_one_does_not_send[model]",
    "R5 a client goes on under its next session",
)
def goes_on_in_the_next(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(client.ClientRows, "_must_be_in", lambda self, session: None)


@by(
    _CLIENTS + "test_a_process_that_was_asleep_sends_nothing[model]",
    "T13 a client does not look at the clock before it sends",
)
def sleeper_sends(patch: pytest.MonkeyPatch) -> None:
    def must_go_on(self: Any, session: int, permit: Any) -> None:
        self._must_be_in(session)

    patch.setattr(client.ClientRows, "_must_go_on", must_go_on)


@by(
    _CLIENTS + "test_the_next_owner_lets_no_client_of_the_last_one_write[model]",
    "O1 the tickets of a former owner are good",
)
def former_tickets(patch: pytest.MonkeyPatch) -> None:
    _made_with(patch, owner_row.Notice, admitted=True)


@by(
    _CLIENTS + "test_an_ended_ticket_stays_ended_whatever_arrives_late[model]",
    "F3 a late admission makes an ended ticket good",
)
def late_admission(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(owner_row, "_ENDED", owner_row._GIVEN)


# ------------------------------------------------------------ hints


@by(
    _STORE + "test_the_hint_of_a_mutation_that_may_still_arrive_stays[model]",
    "N7 an unanswered mutation counts as ended",
)
def answered(patch: pytest.MonkeyPatch) -> None:
    right = hints.Hints.end
    patch.setattr(hints.Hints, "end", lambda self, stamp, *, answered: right(self, stamp, answered=True))


@by(
    _STORE + "test_the_hint_of_another_process_stays_as_long_as_its_mutation_may_arrive[model]",
    "N7 a process removes the hints of others at once",
)
def removes_others(patch: pytest.MonkeyPatch) -> None:
    def has_ended(self: Any, hint: Any, now: float) -> bool:
        return hint[0] != self._name or hint[1] not in self._flying

    patch.setattr(hints.Hints, "_has_ended", has_ended)


@by(
    _STORE + "test_what_waits_is_found_by_hints_which_go_when_it_has_gone[model]",
    "N7 hints are removed while their row needs them",
)
def removes_marked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        hints.Hints,
        "needless",
        lambda self, removable, marked: {key: found for key, found in removable.items() if found},
    )


@by(
    _STORE + "test_a_mutation_whose_hint_is_lost_is_not_sent[model]",
    "N7 a mutation is sent before its hint is answered",
)
def sent_without(patch: pytest.MonkeyPatch) -> None:
    async def hint(self: Any, mutations: Any, left: Any, calls: Any, verdicts: Any, attempt: Any, stamps: Any) -> None:
        written = []
        for index in left:
            if hints.wants_hint(mutations[index]):
                stamps[index], call = self.hints.begin(mutations[index])
                written.append(call)
        await self.calls.ask(written, attempt.deadline)

    patch.setattr(rows.BigtableRows, "_hint", hint)


@by(
    _CLIENTS + "test_every_look_counts_what_clients_have_written[model]",
    "N7 an owner trusts what it has counted, although clients write",
)
def trusts_its_counts(patch: pytest.MonkeyPatch) -> None:
    async def look(self: Any, tables: Any, groups: Any, *, again: bool = False) -> None:
        await Bare.look(self, tables, groups, again=again)

    patch.setattr(store.Searched, "look", look)
