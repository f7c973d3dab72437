"""Options of a wrong kind or size are told by name when they are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import perco
from perco.check.check import CheckOptions
from perco.storage import BatchOptions, LmdbOptions

wrong: Any = "a"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: perco.options.RetryOptions(attempts=wrong),
            "RetryOptions: attempts is 'a'; it must be an int of at least 1",
        ),
        (lambda: perco.options.RetryOptions(attempts=True), "attempts is True; it must be an int"),
        (lambda: perco.WorkerOptions(concurrency=0), "concurrency is 0; it must be an int of at least 1"),
        (lambda: LmdbOptions(reserve_bytes=-1), "reserve_bytes is -1; it must be an int of at least 0"),
        (lambda: perco.options.RetryOptions(backoff_s=-1.0), "backoff_s is -1.0; it must be a number of at least 0"),
        (lambda: perco.options.RetryOptions(backoff_s=math.nan), "it must be a number of at least 0"),
        (lambda: perco.WorkerOptions(failing_share=1.5), "above 0, and at most 1"),
        (lambda: perco.WorkerOptions(failing_share=wrong), "failing_share is a number, not 'a'"),
        (lambda: perco.options.OracleOptions(note_period_s=timedelta(1)), "has .total_seconds()"),  # type: ignore[arg-type]
        (lambda: perco.options.VacuumOptions(on=wrong), "on is a bool, not 'a'"),
        (lambda: perco.Options(retry=wrong), "retry is a RetryOptions, not 'a'"),
        (lambda: perco.Options(wall=wrong), "wall is a function, not 'a'"),
        (lambda: perco.Options(on_event=wrong), "on_event is a function, not 'a'"),
        (lambda: BatchOptions(bytes_max=wrong), "BatchOptions: bytes_max is 'a'"),
        (
            lambda: perco.options.WireOptions(heartbeat_s=0.0),
            "heartbeat_s is 0; it must be above 0, and less than silence_s (10)",
        ),
        (
            lambda: perco.options.WireOptions(heartbeat_s=10.0),
            "heartbeat_s is 10; it must be above 0, and less than silence_s",
        ),
        (lambda: CheckOptions(looks=0), "CheckOptions: looks is 0"),
    ],
)
def test_what_is_wrong_is_named(make: Callable[[], object], said: str) -> None:
    with pytest.raises(perco.UsageError) as raised:
        make()
    assert said in str(raised.value)


def test_what_is_right_is_taken() -> None:
    perco.Options(seed=-5, on_event=print)
    perco.options.RetryOptions(timeout_s=None, backoff_s=0)
    perco.options.CommitOptions(commit_timeout_s=math.inf)
    LmdbOptions(reserve_bytes=0, ahead_bytes=0)
