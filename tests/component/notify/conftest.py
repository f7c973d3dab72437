"""Every test here runs on the memory engine and in virtual time: it jumps ahead when all tasks wait."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.component.notify.kit import Web
from tests.support import everywhere
from tests.support.everywhere import deployment as deployment, pytest_generate_tests as pytest_generate_tests


@pytest.fixture
def web() -> Web:
    return Web()


def _in_virtual_time(*args: Any, clock: object = None, instruments: Sequence[Any] = ()) -> Any:
    return trio.run(*args, clock=trio.testing.MockClock(autojump_threshold=0), instruments=instruments)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    everywhere.pytest_collection_modifyitems(config, items)
    for item in items:
        here = Path(__file__).parent in item.path.parents
        if here and inspect.iscoroutinefunction(getattr(item, "function", None)):
            item.add_marker(pytest.mark.trio(run=_in_virtual_time))
