from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.cli import stores


@pytest.fixture
async def store(tmp_path: Path) -> Path:
    """A filled store that nobody has open."""
    path = tmp_path / "store"
    await stores.make(path)
    return path
