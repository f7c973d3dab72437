"""When an observer runs, and within which limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from perco.errors import UsageError, must_be_number

_WAITS: Final = 10  # the default of max_delay_s, as a multiple of delay_s
_DELAY_MAX_S: Final = 30 * 86400.0
_PRIORITY_MAX: Final = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """When an observer runs, as recorded in the catalogue.

    Attributes:
        delay_s: a run begins no earlier than this long after the change; each newer change restarts the wait.
        max_delay_s: the wait ends at the latest this long after the first of these changes.
        priority: of the changes that wait, those of the highest priority come first.
    """

    delay_s: float = 0.0
    max_delay_s: float = 0.0
    priority: int = 0

    def stated(self) -> dict[str, Any]:
        """Those that differ from the defaults, by name."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}


def manner_of(id: str, delay_s: float, max_delay_s: float | None, priority: int) -> Manner:
    """The manner that an observer declares. Raises: UsageError."""
    must_be_number(f"observer {id!r}: delay_s", delay_s)
    if max_delay_s is not None:
        must_be_number(f"observer {id!r}: max_delay_s", max_delay_s)
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > _PRIORITY_MAX:
        raise UsageError(f"observer {id!r}: priority is an int from -{_PRIORITY_MAX} to {_PRIORITY_MAX}")
    if not delay_s:
        if max_delay_s:
            raise UsageError(f"observer {id!r}: max_delay_s bounds delay_s, which is not given")
        return Manner(priority=priority)
    longest = _WAITS * delay_s if max_delay_s is None else max_delay_s
    if not 0 < delay_s <= longest or not delay_s <= _DELAY_MAX_S:
        raise UsageError(
            f"observer {id!r}: delay_s must be from 0 to {_DELAY_MAX_S:.0f} seconds, and max_delay_s at least delay_s"
        )
    return Manner(delay_s=float(delay_s), max_delay_s=min(float(longest), _WAITS * _DELAY_MAX_S), priority=priority)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of an observer in a worker.

    Attributes:
        concurrency: runs in flight in one worker; 0: no limit of its own.
        attempts: as in `WorkerOptions`; None: as the worker's.
        timeout_s: the longest run, in seconds; 0: any.
        rate: runs that begin per second, in all workers together (N15); 0: any number.
        backoff_s: the first and the longest pause after a failed run, in seconds; None: as in `BackoffOptions`.
        batch: the most runs that share a transaction (N20).
    """

    concurrency: int = 0
    attempts: int | None = None
    timeout_s: float = 0.0
    rate: float = 0.0
    backoff_s: tuple[float, float] | None = None
    batch: int = 1

    def stated(self) -> dict[str, Any]:
        """Those that differ from the defaults, by name."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> Limits:
        """As `stated` gives them, after they were stored. Raises: TypeError."""
        found = dict(stated)
        if "backoff_s" in found:
            first, longest = found["backoff_s"]
            found["backoff_s"] = (float(first), float(longest))
        return cls(**found)


_RATE_LEAST, _RATE_MOST = 1 / 86400, 100_000  # runs per second
_BATCH_MOST = 256


def must_be_batch(whose: str, batch: object) -> None:
    """Raises: UsageError."""
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= _BATCH_MOST:
        raise UsageError(f"{whose}: batch is {batch!r}; it is an int from 1 to {_BATCH_MOST}")


def limits_of(
    id: str,
    concurrency: int | None,
    attempts: int | None,
    timeout_s: float | None,
    rate: float | None,
    backoff_s: tuple[float, float] | None,
    batch: int,
) -> Limits:
    """The limits that an observer declares. Raises: UsageError."""
    for name, value, least in ("concurrency", concurrency, 1), ("attempts", attempts, 0):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise UsageError(f"observer {id!r}: {name} is {value!r}; it is an int of at least {least}")
    must_be_batch(f"observer {id!r}", batch)
    if batch > 1 and rate is not None:
        raise UsageError(f"observer {id!r} has rate= and batch=: runs with a rate do not share transactions")
    if timeout_s is not None:
        must_be_number(f"observer {id!r}: timeout_s", timeout_s)
        if not 0 < timeout_s < float("inf"):
            raise UsageError(f"observer {id!r}: timeout_s is {timeout_s!r}; it is a number of seconds above 0")
    if rate is not None:
        must_be_number(f"observer {id!r}: rate", rate)
        if not _RATE_LEAST <= rate <= _RATE_MOST:
            raise UsageError(
                f"observer {id!r}: rate is {rate!r}; it is a number of runs per second, from {_RATE_LEAST:.7f} (one a "
                f"day) to {_RATE_MOST}"
            )
    return Limits(
        concurrency=concurrency or 0,
        attempts=attempts,
        timeout_s=float(timeout_s or 0),
        rate=float(rate or 0),
        backoff_s=None if backoff_s is None else _pauses(id, backoff_s),
        batch=batch,
    )


def _pauses(id: str, backoff_s: object) -> tuple[float, float]:
    if not isinstance(backoff_s, tuple | list) or len(backoff_s) != 2:
        raise UsageError(f"observer {id!r}: backoff_s is a pair, the first and the longest pause, not {backoff_s!r}")
    first, longest = backoff_s
    for pause in first, longest:
        must_be_number(f"observer {id!r}: backoff_s", pause)
    if not 0 < first <= longest < float("inf"):
        raise UsageError(f"observer {id!r}: backoff_s is {backoff_s!r}; both are above 0, and the first is not longer")
    return float(first), float(longest)
