"""Which tests of the suites that run everywhere are left out, over which deployments, and why."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CLIENTS: Final = ("folder", "tls", "tablets", "direct", "bigtable_direct")
BARE: Final = "bare"
POSTGRESQL, DIRECT = "postgresql", "direct"
BIGTABLE, BIGTABLE_DIRECT = "bigtable", "bigtable_direct"
_BIGTABLES: Final = (BIGTABLE, BIGTABLE_DIRECT)
NO_LOGS: Final = (POSTGRESQL, DIRECT, *_BIGTABLES)


@dataclass(frozen=True)
class LeftOut:
    """Attributes:
    because: why these tests mean nothing there, in a sentence.
    tests: files below `tests/`, each with the functions that are left out (none: all of the file). A function may be
        followed by a pattern of the parameters, in brackets.
    over: the deployments.
    """

    because: str
    tests: dict[str, tuple[str, ...]]
    over: tuple[str, ...] = CLIENTS

    def names(self, path: str, function: str, id: str) -> bool:
        functions = self.tests.get(path)
        if not functions:
            return functions is not None
        for each in functions:
            name, bracket, pattern = each.partition("[")
            if name == function and (not bracket or fnmatch.fnmatch(id, f"*{pattern.removesuffix(']')}*")):
                return True
        return False


_OVER_SPLITS: Final = (
    "test_splits_lose_nothing_and_return_nothing_twice",
    "test_a_split_at_any_moment_of_a_step_loses_nothing",
)
_VACUUM, _PINS = "scenarios/test_vacuum.py", "scenarios/test_pins.py"
_ONE_STEP, _SPLITS = "scenarios/test_one_step.py", "scenarios/test_splits.py"
_SERIALIZABLE, _READ_LOCKS = "scenarios/test_serializable.py", "scenarios/test_read_locks.py"

CLIENTS_LEFT_OUT: Final[tuple[LeftOut, ...]] = (
    LeftOut(
        "hours go by in these tests; tablet servers renew their leases, and connections are looked after, every second "
        "of them, which takes minutes. They run over the socket of a folder",
        {"component/notify/test_schedules.py": ()},
        ("tls", "tablets"),
    ),
    LeftOut(
        "a run of another observer of the same table is under way: the owner knows on which rows a client runs "
        "observers, but not which ones, so it waits for all of the table",
        {"component/notify/test_views_fresh.py": ("test_a_run_in_flight_is_waited_for_if_it_is_concerned",)},
    ),
    LeftOut(
        "looks for what waits in the test's process: for a client, the owner does that",
        {
            "component/notify/test_views_fresh.py": ("test_a_look_that_a_run_passed_does_not_count",),
            "component/notify/test_lagging.py": (
                "test_many_changes_are_counted_in_the_background",
                "test_calls_at_the_same_time_share_a_count",
            ),
        },
    ),
    LeftOut(
        "counts pages of tours that pause between pages: beside tablet servers, no process sees all commits, so tours "
        "hurry",
        {
            "component/notify/test_hints.py": (
                "test_a_change_beside_many_of_a_slow_observer_is_run_at_once",
                "test_tours_hurry_until_one_ends_that_began_when_hints_were_wanted",
            )
        },
        ("tablets", DIRECT, BIGTABLE_DIRECT),
    ),
    LeftOut(
        "loses replies to mutations of the system table, which only the owner writes, or inspects the pins in the "
        "owner's memory",
        {
            "scenarios/test_lost_replies.py": (),
            _PINS: (
                "test_a_pin_of_an_earlier_version_is_read_taken_up_and_dropped",
                "test_ids_of_pins_that_were_dropped_are_bounded",
            ),
        },
    ),
    LeftOut(
        "starts its own processes: an owner that is killed, readers beside it, a child after a fork",
        {"scenarios/test_processes.py": ()},
    ),
    LeftOut(
        "stops, loses or counts single mutations of the vacuum, which always runs in the owner",
        {
            "scenarios/test_vacuum_crash.py": (),
            "scenarios/test_collected.py": ("test_the_total_never_changes_while_old_versions_go",),
            _VACUUM: (
                "test_a_delete_marker_does_not_go_before_what_it_hides",
                "test_the_watermark_is_durable_before_anything_else_happens",
            ),
        },
    ),
    LeftOut(
        "stops a one-step commit after it has been entered in the owner's memory, and before it is written: for a "
        "client, the owner does both",
        {
            _ONE_STEP: (
                "test_a_blind_write_that_began_after_the_first_follows_it",
                "test_a_reader_that_began_later_waits",
                "test_a_second_writer_of_a_cell_waits_for_the_first",
                "test_cancelled_before_it_is_sent_it_leaves",
                "test_cancelled_when_it_was_sent_it_stays_until_it_is_written",
                "test_the_clock_is_noted_when_all_below_it_can_be_seen",
                "test_waiting_for_a_timestamp_waits_for_what_commits_below_it",
                "test_what_nobody_knows_stays_entered_until_somebody_asks",
                "test_who_holds_locks_does_not_wait_for_an_entry",
                "test_who_validates_waits_for_what_commits_before_it",
            ),
            _SERIALIZABLE: (
                "test_a_lock_above_its_commit_does_not_matter",
                "test_it_validates_after_the_draw",
                "test_what_is_committing_in_one_step_refuses_at_once",
            ),
            _VACUUM: ("test_a_commit_whose_answer_did_not_come_holds_it_until_it_is_known",),
            "scenarios/test_catalogue.py": ("test_what_commits_while_an_observer_is_registered_is_notified[one step]",),
            "scenarios/test_changes.py": ("test_a_one_step_commit_below_the_frontier_is_waited_for",),
        },
    ),
    LeftOut(
        "compares two runs step by step: no seed determines which of two sockets is read first",
        {"scenarios/test_bank.py": ("test_the_same_seed_gives_the_same_history",)},
    ),
    LeftOut(
        "commits in one step: such a commit requires that one process keeps the entries and serves all reads (C4), "
        "and here there are several",
        {
            _ONE_STEP: (),
            "scenarios/test_outcomes.py": (
                "test_a_reader_that_comes_first_settles_it[one step-]",
                "test_asked_by_another_database_on_the_same_store[one step-]",
                "test_asking_tells_and_what_it_tells_stays_true[one step-]",
                "test_the_token_of_a_dead_client_tells_what_became_of_it[True-3]",
            ),
            "scenarios/test_cancellation.py": (
                "test_cancelled_while_the_store_is_silent_the_outcome_is_unknown[True]",
            ),
            _READ_LOCKS: ("test_two_that_commit_in_one_step_may_lock_what_both_only_read",),
        },
        over=("tablets", DIRECT, BIGTABLE_DIRECT),
    ),
    LeftOut(
        "expects `is_idle` to answer without a search of the store: here the owner has to search, because it does not "
        "see what direct clients write",
        {"component/notify/test_idle.py": ("test_it_is_not_idle_from_the_very_moment_that_a_lock_is_left_behind",)},
        over=(DIRECT, BIGTABLE_DIRECT),
    ),
    LeftOut(
        "delivers a commit request late, over a connection that its sender has given up: a server reads nothing more "
        "from such a connection (R4)",
        {_ONE_STEP: ("test_what_nobody_knows_is_settled_before_the_store_is_idle[DELAY]",)},
    ),
    LeftOut(
        "opens a folder again, or looks for its files: here there is no folder, because the tablet servers keep "
        "the tablets in memory",
        {
            "scenarios/test_outcomes.py": ("test_asked_after_the_folder_was_opened_again",),
            "scenarios/test_changes.py": ("test_a_program_that_does_not_declare_the_log_keeps_it_too",),
            "scenarios/test_time_travel.py": ("test_who_opens_a_store_notes_at_once_what_was_committed_before",),
            _READ_LOCKS: ("test_a_store_of_before_has_read_locks_once_it_is_opened",),
        },
        over=("tablets",),
    ),
    LeftOut(
        "accesses the oracle's pins directly, or makes their mutations fail: the owner keeps the pins of its clients",
        {
            _PINS: (
                "test_a_pin_renewed_while_it_is_forgotten_holds_all_the_time",
                "test_a_pin_taken_while_its_predecessor_is_forgotten_holds",
                "test_a_pin_that_is_not_durable_holds_nothing",
                "test_a_pin_that_may_be_durable_holds",
                "test_a_pin_that_may_not_have_been_replaced_holds_as_well",
                "test_what_was_renewed_before_its_turn_is_not_forgotten",
            )
        },
    ),
    LeftOut(
        "stops a split between two of its steps, or raises the floor by hand: for a client, both happen in the owner",
        {
            _SPLITS: (
                "test_a_floor_that_is_raised_meanwhile_is_raised_in_both",
                "test_a_split_at_any_step",
                "test_what_is_let_go_of_after_a_split_is_let_go_of_by_cell",
            )
        },
    ),
    LeftOut(
        "needs a store without mutations of several rows: for clients, the fixture chooses the store",
        {
            _READ_LOCKS: (
                "test_a_failed_transaction_takes_its_read_locks_away[False]",
                "test_a_lost_reply_at_any_step_is_not_an_abort[False-]",
                "test_a_reader_settles_the_write_and_leaves_the_read_locks_to_others[False-?-]",
                "test_a_sweeper_settles_read_locks[False-?-]",
                "test_a_writer_that_reads_nothing_settles_the_read_locks_it_meets[False-?-]",
                "test_all_that_the_dead_sent_may_come_again[False-?-]",
                "test_an_old_writer_that_settles_a_committed_read_lock_meets_its_trace[False-?-]",
            ),
        },
    ),
    LeftOut(
        "inspects the memory of the process that waits, sweeps or dies: for a client, that process is the owner",
        {
            "scenarios/test_failures.py": ("test_what_was_committed_before_a_failure_is_safe",),
            "scenarios/test_locks.py": (
                "test_a_recovery_that_crashed_is_finished_by_the_next",
                "test_crossing_transfers_keep_the_total",
            ),
            "scenarios/test_time_travel.py": ("test_a_machine_suspended_for_an_hour",),
        },
    ),
    LeftOut(
        "drops a client at one mutation of its row store: over a wire, the owner still hears from the client, so "
        "the client's transactions stay alive (R7)",
        {
            "component/notify/test_crash.py": (),
            "component/notify/test_registering.py": ("test_what_a_dead_writer_had_not_committed_is_not_there",),
        },
    ),
    LeftOut(
        "steps through the backfill of a new observer, makes it fail, or damages it: backfills run in the owner",
        {
            "component/notify/test_backfill.py": (),
            "component/notify/test_registering.py": (
                "test_a_back_fill_that_dies_half_way_is_resumed",
                "test_a_back_fill_whose_reply_is_lost_is_not_done",
                "test_a_new_observer_runs_for_what_is_there",
                "test_another_program_resumes_a_back_fill",
            ),
        },
    ),
    LeftOut(
        "looks at a store in a folder from outside, without its owner",
        {
            "component/notify/test_signals.py": (
                "test_what_only_signals_leaves_a_mark_for_who_looks_from_outside",
                "test_who_looks_from_outside_sees_what_is_pending",
            ),
        },
    ),
    LeftOut(
        "checks how `perco.open` itself responds to the wrong kind of `with`",
        {"scenarios/test_limits.py": ("test_what_wants_async_with_says_so_however_else_it_is_used",)},
    ),
)

BARE_LEFT_OUT: Final[tuple[LeftOut, ...]] = (
    LeftOut(
        "commits in one step: such a commit requires a store that applies no mutation twice (C6)",
        {
            _ONE_STEP: (),
            "scenarios/test_outcomes.py": (
                "test_a_reader_that_comes_first_settles_it[one step-]",
                "test_asked_by_another_database_on_the_same_store[one step-]",
                "test_asking_tells_and_what_it_tells_stays_true[one step-]",
                "test_the_token_of_a_dead_client_tells_what_became_of_it[True-3]",
            ),
            "scenarios/test_cancellation.py": (
                "test_cancelled_while_the_store_is_silent_the_outcome_is_unknown[True]",
            ),
            "scenarios/test_catalogue.py": ("test_what_commits_while_an_observer_is_registered_is_notified[one step]",),
            "scenarios/test_failures.py": ("test_what_was_committed_before_a_failure_is_safe",),
            _SERIALIZABLE: ("test_what_is_committing_in_one_step_refuses_at_once",),
            _VACUUM: ("test_a_commit_whose_answer_did_not_come_holds_it_until_it_is_known",),
            _READ_LOCKS: ("test_two_that_commit_in_one_step_may_lock_what_both_only_read",),
            "scenarios/test_changes.py": ("test_a_one_step_commit_below_the_frontier_is_waited_for",),
        },
        over=(BARE, *_BIGTABLES),
    ),
    LeftOut(
        "counts tours: where a commit takes several mutations, those after the first one wake scanners, too",
        {"component/notify/test_told.py": ("test_a_chain_of_observers_runs_without_a_tour",)},
        over=(BARE,),
    ),
    LeftOut(
        "looks at a store in a folder from outside, or sends the store copies of mutations that its owner does not "
        "know of",
        {
            "component/notify/test_signals.py": (
                "test_a_pending_entry_that_nobody_settles_is_not_waited_for",
                "test_what_only_signals_leaves_a_mark_for_who_looks_from_outside",
                "test_who_looks_from_outside_sees_what_is_pending",
            ),
        },
        over=(BARE, *_BIGTABLES),
    ),
    LeftOut(
        "expects steps that only a store with mutations of several rows takes, or an order of runs that results from "
        "them",
        {
            "component/notify/test_crash.py": ("test_a_group_is_rolled_forward_although_one_cell_of_it_was",),
            "component/notify/test_delayed.py": ("test_what_waits_is_run_in_the_order_of_priority[1]",),
            "component/notify/test_registering.py": ("test_a_back_fill_that_dies_half_way_is_resumed[604]",),
            "component/notify/test_twins.py": ("test_a_change_that_only_one_of_the_twins_saw_is_run_again",),
        },
        over=(BARE, *_BIGTABLES),
    ),
    LeftOut(
        "splits a tablet, or looks at the floors of tablets",
        {
            _SPLITS: (),
            "scenarios/test_changes.py": _OVER_SPLITS,
            "scenarios/test_slices.py": (
                "test_parts_by_rows_and_by_time_are_all_and_stay_the_same",
                "test_a_split_at_any_moment_of_a_part_loses_nothing",
            ),
        },
        over=(BARE, *_BIGTABLES),
    ),
    LeftOut(
        "counts mutations, and expects that one mutation can span several rows",
        {
            "scenarios/test_locks.py": (
                "test_a_reader_rolls_back_what_died_before_its_commit",
                "test_a_reader_rolls_forward_what_died_after_its_commit",
                "test_a_store_that_is_opened_sweeps_what_the_dead_left",
            ),
            _VACUUM: ("test_the_watermark_is_durable_before_anything_else_happens",),
            _READ_LOCKS: (
                "test_a_failed_transaction_takes_its_read_locks_away[True]",
                "test_a_reader_settles_the_write_and_leaves_the_read_locks_to_others[True-?-]",
                "test_a_sweeper_settles_read_locks[True-?-]",
                "test_a_writer_that_reads_nothing_settles_the_read_locks_it_meets[True-?-]",
                "test_all_that_the_dead_sent_may_come_again[True-?-]",
                "test_an_old_writer_that_settles_a_committed_read_lock_meets_its_trace[True-?-]",
            ),
        },
        over=(BARE, *_BIGTABLES),
    ),
)
POSTGRESQL_LEFT_OUT: Final[tuple[LeftOut, ...]] = (
    LeftOut(
        "splits a tablet, or counts pages that end where a tablet ends: perco itself does not divide a database's "
        "tables",
        {
            _SPLITS: (),
            "component/notify/test_backfill.py": (
                "test_it_goes_on_where_it_was_cut_short",
                "test_it_tells_how_far_it_is",
            ),
        },
        over=(POSTGRESQL, DIRECT, *_BIGTABLES),
    ),
    LeftOut(
        "opens the files of a folder, with or without its owner, or starts processes that do",
        {
            "component/notify/test_signals.py": (
                "test_what_only_signals_leaves_a_mark_for_who_looks_from_outside",
                "test_who_looks_from_outside_sees_what_is_pending",
            ),
            "scenarios/test_limits.py": ("test_a_file_is_no_store", "test_who_only_reads_waits_for_no_observers"),
            _PINS: ("test_pins_are_seen_from_beside_and_not_made_there",),
            "scenarios/test_processes.py": (),
            _READ_LOCKS: ("test_a_store_of_before_has_read_locks_once_it_is_opened",),
        },
        over=(POSTGRESQL, DIRECT, *_BIGTABLES),
    ),
    LeftOut(
        "checks how `perco.open` itself responds to an address: here the fixture's `open` chooses the address",
        {"scenarios/test_limits.py": ("test_urls_that_this_version_does_not_open",)},
        over=(POSTGRESQL, DIRECT, *_BIGTABLES),
    ),
    LeftOut(
        "expects an order or an overlap of tasks that an external server does not guarantee",
        {
            "component/notify/test_delayed.py": ("test_what_waits_is_run_in_the_order_of_priority",),
            "scenarios/test_bank.py": ("test_the_same_seed_gives_the_same_history",),
            "scenarios/test_locks.py": ("test_crossing_transfers_keep_the_total",),
        },
        over=(POSTGRESQL, DIRECT, *_BIGTABLES),
    ),
    LeftOut(
        "counts mutations, or sends copies of them that the owner does not know of: without direct clients, the owner "
        "assumes that it is the only writer, and searches for new cells only after a mutation of its own",
        {
            "component/notify/test_signals.py": ("test_a_pending_entry_that_nobody_settles_is_not_waited_for",),
            _VACUUM: ("test_the_watermark_is_durable_before_anything_else_happens",),
        },
        over=(POSTGRESQL, BIGTABLE),
    ),
)
BIGTABLE_LEFT_OUT: Final[tuple[LeftOut, ...]] = (
    LeftOut(
        "expects that tasks collide: with a round trip for each call, they rarely do",
        {"scenarios/test_turns.py": ("test_observers_take_turns_too",)},
        over=_BIGTABLES,
    ),
    LeftOut(
        "expects that no time passes between two vacuums: here a vacuum waits until the permits of clients have "
        "expired",
        {_VACUUM: ("test_of_each_cell_the_newest_version_stays",)},
        over=(BIGTABLE_DIRECT,),
    ),
    LeftOut(
        "puts 65 000 cells into a row in one call, for which the emulator takes the better part of a minute",
        {"component/notify/test_signals.py": ("test_the_cause_of_one_among_a_great_many_cells_of_a_row_is_found",)},
        over=_BIGTABLES,
    ),
    LeftOut(
        "makes a repair whose checks Bigtable cannot combine: one column must have a cell, and a higher column must "
        "have none",
        {"component/notify/test_backfill.py": ("test_a_lost_notification_of_a_backfill_is_found_and_put_right",)},
        over=_BIGTABLES,
    ),
)
NO_LOGS_LEFT_OUT: Final[tuple[LeftOut, ...]] = (
    LeftOut(
        "reads a log of changes: a store in a database keeps none, and refuses such a table",
        {
            "scenarios/test_changes.py": (
                "test_transactions_come_whole_and_in_order_with_values_before_and_after",
                "test_each_transaction_is_a_place_to_resume_at",
                "test_by_default_only_what_commits_from_now_on_is_returned",
                "test_what_is_not_known_or_not_logged_is_refused",
                "test_a_log_cannot_be_added_later",
                "test_a_program_that_does_not_declare_the_log_keeps_it_too",
                "test_a_transaction_is_not_passed_while_its_second_phase_is_under_way",
                "test_a_lock_below_the_frontier_is_settled_even_if_that_is_lost_at_first",
                "test_a_commit_that_is_still_to_be_sent_holds_the_frontier_back",
                "test_a_one_step_commit_below_the_frontier_is_waited_for",
                "test_a_transaction_that_is_rolled_back_leaves_nothing",
                "test_follow_waits_for_further_changes",
                "test_a_call_that_is_cancelled_loses_nothing",
                "test_splits_lose_nothing_and_return_nothing_twice",
                "test_a_split_at_any_moment_of_a_step_loses_nothing",
                "test_a_vacuum_at_any_moment_of_a_step_is_noticed",
                "test_a_large_transaction_comes_whole",
                "test_changes_that_the_vacuum_has_removed_are_an_error",
                "test_a_vacuum_while_a_reader_is_half_way_is_noticed",
                "test_a_pin_keeps_changes",
            ),
            "scenarios/test_slices.py": (),
        },
        over=NO_LOGS,
    ),
)
LEFT_OUT: Final = (*CLIENTS_LEFT_OUT, *BARE_LEFT_OUT, *POSTGRESQL_LEFT_OUT, *BIGTABLE_LEFT_OUT, *NO_LOGS_LEFT_OUT)

# ------------------------------------------------------------------ docs/testing.md

PAGE: Final = Path(__file__).parents[2] / "docs" / "testing.md"
BEGIN, END = "<!-- written by python -m tests.support.left_out -->\n", "<!-- end -->\n"


def table() -> str:
    """As it stands in the page."""
    lines = ["| left out on | tests | reason: each of these tests ... |", "|---|---|---|"]
    for left in LEFT_OUT:
        over = "all clients" if left.over == CLIENTS else ", ".join(left.over)
        files = [f"`{path}`: {_counted(functions)}" for path, functions in left.tests.items()]
        lines.append(f"| {over} | {'; '.join(files)} | {left.because} |")
    return "\n".join(lines) + "\n"


def _counted(functions: tuple[str, ...]) -> str:
    if not functions:
        return "all"
    return functions[0].partition("[")[0] if len(functions) == 1 else str(len(functions))


def written(page: str) -> str:
    """The page with the table in it."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
