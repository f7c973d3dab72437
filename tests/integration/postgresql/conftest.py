from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgresql import Standing


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[Standing]:
    """A server of the test's own."""
    server = Standing(tmp_path)
    yield server
    server.end()
