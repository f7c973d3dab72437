"""Most scenarios run three times: over the embedded store; over the wire, as a client of whoever owns it; and as a
client whose rows are with tablet servers."""

from __future__ import annotations

import pytest

import perco
from tests.support.served import ServedOpen, SpreadOpen

SERVED = {
    *("test_anomalies", "test_hermitage", "test_locks", "test_outcomes", "test_read_locks", "test_reads"),
    *("test_retries", "test_serializable", "test_time_travel", "test_turns"),
}
# What looks into the memory of the process that commits, or stops a mutation that another process makes there.
EMBEDDED_ONLY = {
    "test_a_cancelled_transaction_lets_go_of_its_read_locks",
    "test_a_full_store_is_not_retried",
    "test_a_lock_above_its_commit_does_not_matter",
    "test_a_machine_suspended_for_an_hour",
    "test_a_reader_that_comes_first_settles_it",
    "test_a_store_of_before_has_read_locks_once_it_is_opened",
    "test_a_writer_waits_for_readers_that_hold_the_cell",
    "test_asking_tells_and_what_it_tells_stays_true",
    "test_crossing_transfers_keep_the_total",
    "test_it_validates_after_the_draw",
    "test_two_may_lock_what_both_only_read",
    "test_two_that_commit_in_one_step_may_lock_what_both_only_read",
    "test_what_is_committing_in_one_step_refuses_at_once",
    "test_writers_that_cross_do_not_wait_for_each_other_for_ever",
}
# What opens a folder twice: tablet servers in this process have their tablets in memory.
NOT_SPREAD = {
    "test_asked_after_the_folder_was_opened_again",
    "test_who_opens_a_store_notes_at_once_what_was_committed_before",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    if name in SERVED and metafunc.function.__name__ not in EMBEDDED_ONLY:
        over = ["embedded", "served", "spread"]
        metafunc.parametrize("over", over[: 2 + (metafunc.function.__name__ not in NOT_SPREAD)], indirect=True)


@pytest.fixture(autouse=True)
def over(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transactions run."""
    over = getattr(request, "param", "embedded")
    if over != "embedded":
        monkeypatch.setattr(perco, "open", {"served": ServedOpen, "spread": SpreadOpen}[over])
