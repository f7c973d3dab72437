"""A test that hangs fails: most of what is tested here is that nobody waits for ever."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

_SECONDS = 120


class HangsError(Exception):
    """A test did not end."""


def _hangs(number: int, frame: object) -> None:
    raise HangsError(f"this test has not ended after {_SECONDS} s")


@pytest.fixture(autouse=True)
def hangs_fail() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
