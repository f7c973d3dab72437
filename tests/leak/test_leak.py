"""Transactions leave nothing behind in memory. `python -m tests.leak` makes ten million of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from perco.txn import fates
from tests.leak.running import Sample, leaked, main


def test_memory_does_not_grow_with_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fates, "_REMEMBERED", 256)  # its memory is full before the first sample
    assert main(tmp_path / "store", 40_000, 3, seed=1) == ""


def test_what_grows_is_told() -> None:
    first = Sample(1_000_000, 100 << 20, 3_000)
    assert leaked([first, Sample(10_000_000, 110 << 20, 3_500)]) == ""
    assert "bytes more" in leaked([first, Sample(10_000_000, 117 << 20, 3_500)])
    assert "objects more" in leaked([first, Sample(10_000_000, 105 << 20, 13_000)])
    assert "bytes more" in leaked([Sample(4_000, 30 << 20, 3_000), Sample(40_000, 47 << 20, 3_000)])
