"""Faults that simulated runs do not show, each with the component test that must find it.

They only delay a result or waste work (N8), or they lie in code that the simulation does not drive: a client's thread
(R10), a reader beside the owner (P5). One other shows up in few of its runs (D7); one of G2 is checked twice.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import pytest

from perco.history.changes import ChangeStream
from perco.history.slices import Slice, _Counted
from perco.notify.idle import Idle
from perco.notify.rowlocks import DONE, HELD, RowLocks
from perco.notify.scanner import Scanner
from perco.notify.sweeper import Sweeper
from perco.protocol.changes import Source, Taken
from perco.serve import client, sessions, wakes
from perco.serve.messages import hello
from perco.serve.pulse import Pulse
from perco.storage import TS_MAX, lmdb_engine, splitting
from perco.storage.lmdb_engine import LmdbEngine
from perco.txn.combining import Combining
from perco.txn.operations import Done, Operation
from perco.txn.transaction import Transaction
from tests.testing.mutants import MUTANTS, Mutant
from tests.testing.mutants_served import SERVED

_NOTIFY: Final = "tests/component/notify"
_SERVE: Final = "tests/component/serve"
_STORAGE: Final = "tests/integration/storage"


class Found(NamedTuple):
    """A fault, and the node id of the test that finds it."""

    mutant: Mutant
    test: str


COMPONENTS: dict[str, Found] = {}


def by(test: str, name: str) -> Any:
    def note(function: Mutant) -> Mutant:
        COMPONENTS[name] = Found(function, test)
        return function

    return note


async def nothing(*_: Any) -> None:
    """Takes the place of a step that a mutant leaves out."""


# ------------------------------------------------------------ wakes, claims and scanners


@by(
    f"{_SERVE}/test_workers.py::test_a_change_wakes_one_process_and_is_asked_for_once",
    "N8 a change wakes all worker processes",
)
def all_woken(patch: pytest.MonkeyPatch) -> None:
    right = wakes.Wakes._wake

    def wake(self: Any, group: Any, now: float, but: Any = None) -> Any:
        right(self, group, now, but)
        return list(group.members)

    patch.setattr(wakes.Wakes, "_wake", wake)


@by(
    f"{_SERVE}/test_workers.py::test_a_process_that_does_not_answer_delays_a_change_only_for_a_moment",
    "N8 no other process is woken in place of one that does not answer",
)
def not_replaced(patch: pytest.MonkeyPatch) -> None:
    def overdue(self: Any, now: float) -> list[Any]:
        for group in self._groups.values():
            for process in group.members:
                if process.asked_at + wakes.ANSWER_S <= now:
                    process.asked_at = math.inf
        return []

    patch.setattr(wakes.Wakes, "overdue", overdue)


@by(
    f"{_SERVE}/test_workers.py::test_a_process_that_does_not_answer_delays_a_change_only_for_a_moment",
    "N8 no worker process is woken",
)
def nobody_woken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions.Sessions, "wake", lambda self, sessions: None)


@by(
    f"{_NOTIFY}/test_told.py::test_a_row_that_changes_during_its_run_runs_again[owner-1]",
    "N8 a row that a scanner has passed during its run is not looked at again",
)
def passed_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowLocks, "passed", lambda self, table, row: None)


@by(
    f"{_NOTIFY}/test_told.py::test_a_row_that_cannot_be_looked_at_is_found_by_a_tour[owner-error0]",
    "N8 a scanner that could not look at the rows for which it was woken sleeps on",
)
def no_tour(patch: pytest.MonkeyPatch) -> None:
    right = Scanner._follow_told

    async def follow(self: Any, nursery: Any, until: float) -> bool:
        await right(self, nursery, until)
        return True

    patch.setattr(Scanner, "_follow_told", follow)


@by(
    f"{_NOTIFY}/test_told.py::test_all_observers_of_a_row_run[owner]",
    "N8 a scanner that was woken for a row reads only the first of its notify cells",
)
def first_cell(patch: pytest.MonkeyPatch) -> None:
    right = Scanner._page

    async def page(self: Any, place: Any, rows: int, *, reverse: bool = False, cells: int = 1) -> Any:
        return await right(self, place, rows, reverse=reverse)

    patch.setattr(Scanner, "_page", page)


@by(
    f"{_SERVE}/test_workers.py::test_scanners_of_several_processes_teleport_away_from_each_other",
    "N8 a scanner does not teleport from a row that another process has claimed",
)
def stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scanner, "_jumps", lambda self, walk: False)


@by(
    f"{_SERVE}/test_sessions.py::test_whoever_is_refused_a_row_for_other_observers_is_told_of_its_end_however_many_others_have",
    "N8 a row that another process has claimed counts as done",
)
def done_already(patch: pytest.MonkeyPatch) -> None:
    right = sessions.Sessions.claim

    def claim(self: Any, *args: Any, **how: Any) -> Any:
        states, others = right(self, *args, **how)
        return bytes(DONE if state == HELD else state for state in states), others

    patch.setattr(sessions.Sessions, "claim", claim)


# ------------------------------------------------------------ clients whose loops are held


@by(
    f"{_SERVE}/test_pulses.py::test_a_client_whose_loop_is_held_keeps_its_session_and_its_connection",
    "R10 a pulse does not count as a sign of life of its client",
)
def unheard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions.Sessions, "beat", lambda self, session, now, stuck: None)


@by(
    f"{_SERVE}/test_pulses.py::test_a_pulse_keeps_a_session_whose_connection_has_broken",
    "R10 a pulse excuses a silent connection, but does not keep the session",
)
def excused_only(patch: pytest.MonkeyPatch) -> None:
    right = sessions.Sessions.beat

    def beat(self: Any, session: Any, now: float, stuck: Any) -> None:
        heard = session.last_heard
        right(self, session, now, stuck)
        session.last_heard = heard

    patch.setattr(sessions.Sessions, "beat", beat)


@by("tests/core/serve/test_pulse.py", "R10 a pulse does not say that the loop runs again")
def never_over(patch: pytest.MonkeyPatch) -> None:
    right = Pulse.say
    patch.setattr(Pulse, "say", lambda self, held, now: b"" if held is None else right(self, held, now))


# ------------------------------------------------------------ readers beside the owner


@by(
    "tests/component/storage/test_copying.py::test_who_reads_beside_finds_the_rows_or_the_mark",
    "P5 the removal of moved rows leaves no mark",
)
def no_mark(patch: pytest.MonkeyPatch) -> None:
    right, mark = LmdbEngine.remove_from, lmdb_engine._STOP

    def remove_from(self: Any, row: bytes, cells: int) -> bool:
        patch.setattr(lmdb_engine, "_STOP", b"\0another")
        try:
            return right(self, row, cells)
        finally:
            patch.setattr(lmdb_engine, "_STOP", mark)

    patch.setattr(LmdbEngine, "remove_from", remove_from)


@by(
    f"{_NOTIFY}/test_told.py::test_a_commit_whose_answer_was_lost_and_that_is_made_before_the_sweep_is_found[owner]",
    "N8 workers do not look after a sweep",
)
def unswept(patch: pytest.MonkeyPatch) -> None:
    right = Sweeper.run

    async def run(self: Any) -> None:
        self._driver.on_notified = [lambda where: None]  # of these, the worker's is the only one
        await right(self)

    patch.setattr(Sweeper, "run", run)


@by(
    f"{_NOTIFY}/test_told.py::test_a_wait_finds_what_came_late[owner-False]",
    "N8 a wait does not have workers look for what came late",
)
def only_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Idle, "_wake_workers", lambda self: None)


@by(
    f"{_SERVE}/test_hostile.py::test_a_greeting_that_arrives_after_a_later_one_changes_nothing",
    "R7 a greeting that arrives late is answered",
)
def unnumbered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(client, "hello", lambda *said, number=0, **more: hello(*said, **more))


# ------------------------------------------------------------ turns, and operations that share commits


@by(
    "tests/scenarios/test_turns.py::test_a_first_attempt_gives_way_to_one_that_lost_in_its_turn[owner-by_run]",
    "W5 no first attempt gives way",
)
def gives_no_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transaction, "_give_way", lambda self, lines, intents: None)


_COMBINING: Final = "tests/component/txn/test_combining.py"


@by(
    f"{_COMBINING}::test_after_a_conflict_each_is_carried_out_once",
    "C10 operations that shared a commit end although it has failed",
)
def never_given_back(patch: pytest.MonkeyPatch) -> None:
    def give_back(self: Combining, where: Any, taken: list[Any]) -> None:
        for asked in taken:
            asked.value = Done(1, asked.value)
            self.done(asked)

    patch.setattr(Combining, "give_back", give_back)


@by(
    f"{_COMBINING}::test_only_those_that_add_share_a_commit",
    "C10 operations that replace the value share a commit",
)
def all_combined(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Operation, "adds", property(lambda self: self.what in ("add", "append", "put")))


@by(
    f"{_COMBINING}::test_one_that_waits_can_be_cancelled_and_one_that_was_taken_has_an_outcome",
    "C10, T10 an operation that was taken ends when it is cancelled",
)
def ends_though_taken(patch: pytest.MonkeyPatch) -> None:
    right = Combining.take

    def take(self: Combining, where: Any, column: object) -> Any:
        asked = right(self, where, column)
        if asked is not None:
            asked.taken = False
            self._waiting[where].append(asked)  # from where its cancellation removes it
        return asked

    patch.setattr(Combining, "take", take)


# ------------------------------------------------------------ faults that few runs show


_BY_TABLE: Final = "G2 collection settles locks and deletes versions one table at a time"
by("tests/scenarios/test_vacuum.py::test_locks_of_all_tables_are_settled_before_anything_of_one_goes", _BY_TABLE)(
    MUTANTS[_BY_TABLE]
)
_SENT: Final = "D7 a waiting read is sent although its session has ended"
by("tests/component/batching/test_window.py::test_a_read_whose_session_ends_while_it_waits_is_not_sent", _SENT)(
    SERVED[_SENT]
)
_COMBINED: Final = "D8 a combined read ignores entered cells instead of answering None"
by(f"{_SERVE}/test_together.py::test_what_a_commit_is_under_way_in_is_read_alone", _COMBINED)(SERVED[_COMBINED])
_IN_TWO: Final = "P3 a mutation whose rows lie in two tablets is written to one of them"
by("tests/scenarios/test_splits.py::test_a_split_at_any_step[owner-two phases-c-4]", _IN_TWO)(SERVED[_IN_TWO])


# ------------------------------------------------------------ logs of changes


@by(
    f"{_STORAGE}/test_changes.py::test_what_is_written_while_a_tablet_is_copied_is_in_the_new_log",
    "E1 what is written during a split has no entry in the new tablet's log",
)
def split_forgets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(splitting, "is_logged", lambda column: False)


@by(
    "tests/scenarios/test_changes.py::test_a_split_at_any_moment_of_a_step_loses_nothing",
    "E3 after a split, the log of the new tablet is not read",
)
def divided(patch: pytest.MonkeyPatch) -> None:
    right = Source.divide

    def divide(self: Source, row: bytes) -> Source:
        other = right(self, row)
        other.ended = True
        return other

    patch.setattr(Source, "divide", divide)


@by(
    "tests/scenarios/test_changes.py::test_a_vacuum_at_any_moment_of_a_step_is_noticed",
    "E4 the cut is read before the logs",
)
def cut_first(patch: pytest.MonkeyPatch) -> None:
    right, kept = ChangeStream._fetch, ChangeStream._must_be_kept

    async def fetch(self: ChangeStream) -> None:
        await kept(self)
        await right(self)

    async def nothing(self: ChangeStream) -> None:
        """Check nothing."""

    patch.setattr(ChangeStream, "_must_be_kept", nothing)
    patch.setattr(ChangeStream, "_fetch", fetch)


@by(
    "tests/scenarios/test_slices.py::test_what_is_reached_has_no_half_of_a_transaction",
    "E5 changes are divided up to a timestamp that is no frontier",
)
def no_frontier(patch: pytest.MonkeyPatch) -> None:
    right = ChangeStream._settle

    async def settle(self: ChangeStream, table: str, frontier: int) -> None:
        if not isinstance(self, _Counted):
            await right(self, table, frontier)

    patch.setattr(ChangeStream, "_settle", settle)


@by(
    "tests/scenarios/test_slices.py::test_parts_by_rows_and_by_time_are_all_and_stay_the_same[owner-0]",
    "E5 an unwritten column is read as it is now",
)
def read_now(patch: pytest.MonkeyPatch) -> None:
    right = Slice._records

    async def records(self: Slice, taken: list[Taken], wanted: Any) -> Any:
        return await right(self, [each._replace(commit_ts=TS_MAX) for each in taken], wanted)

    patch.setattr(Slice, "_records", records)
