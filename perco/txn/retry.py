"""How often a transaction is retried, and how long it waits before each retry."""

from __future__ import annotations

import random
from dataclasses import dataclass

from perco.settings import check_options


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryOptions:
    """How a transaction is retried after a TransientError.

    Attributes:
        attempts: the largest number of attempts, including the first.
        timeout_s: seconds for all attempts together; None: no limit.
        backoff_s, backoff_max_s: the wait before attempt n is random within backoff_s * 2^n, capped.
        turn_s: after a conflict on a cell, the longest time to wait for a turn at that cell (`turns.py`); after that,
            the transaction tries out of turn. The first wait in a cell's queue replaces the random wait, so n counts
            only the attempts that failed although they had queued. 0: no turns, every attempt waits for a random time.
    """

    attempts: int = 64
    timeout_s: float | None = None
    backoff_s: float = 0.001
    backoff_max_s: float = 0.5
    turn_s: float = 5.0

    def __post_init__(self) -> None:
        check_options(self)

    def delay_s(self, failed: int, rng: random.Random) -> float:
        """The wait, in seconds, after `failed` failed attempts."""
        return rng.uniform(0, min(self.backoff_s * 2.0 ** min(failed, 64), self.backoff_max_s))
