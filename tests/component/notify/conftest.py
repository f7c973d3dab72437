"""Every test here runs in virtual time on the memory engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio.testing

from tests.component.notify.kit import Web


@pytest.fixture
def web() -> Web:
    return Web()


@pytest.fixture(autouse=True)
def virtual_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Asks for the autojump clock where the test is a coroutine function."""
    import inspect

    if inspect.iscoroutinefunction(request.function):
        request.getfixturevalue("autojump_clock")
    yield
