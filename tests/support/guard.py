"""A test that hangs ends the run: most of what is tested here is that nobody waits for ever."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

_SECONDS = 120


class HangsError(Exception):
    """A test did not end."""


@pytest.fixture(autouse=True)
def hangs_fail(request: pytest.FixtureRequest) -> Iterator[None]:
    hung = False

    def hangs(number: int, frame: object) -> None:
        nonlocal hung
        hung = True
        raise HangsError(f"this test has not ended after {_SECONDS} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    if hung:  # the event loop was torn down: the tests that follow would be blamed for it
        pytest.exit(f"{request.node.nodeid} hangs", 1)
