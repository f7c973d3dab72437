"""A store for LlamaIndex."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import perco
import perco.sync

pytest.importorskip("llama_index.core")

from perco.llamaindex import TABLES


@pytest.fixture
def db(tmp_path: Path) -> Iterator[perco.sync.Database]:
    with perco.sync.open(tmp_path / "ingested", perco.Schema(*TABLES)) as opened:
        yield opened
