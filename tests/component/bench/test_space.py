"""The space benchmark, on some cells: it tells what stores take, and a store that keeps too much misses a bar."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import perco
from bench import space
from bench.harness import Run

STORES = ("worn", "worn_history_gone", "worn_compacted", "fresh")
CELLS, OVERWRITES = 1000, 10_000


def told(keep: float, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The result of a run; `keep`: the seconds of history that its stores keep, while the benchmark allows for none."""
    monkeypatch.setattr(perco, "tune_gc", lambda: None)  # which is for a process of one's own
    monkeypatch.setattr(space, "CELLS", CELLS)
    monkeypatch.setattr(space, "QUICK", OVERWRITES)
    monkeypatch.setattr(space, "HISTORY_S", 0.0)
    monkeypatch.setattr(space.docs, "keep", perco.Keep(seconds=keep))
    oracle = perco.options.OracleOptions(note_period_s=0.001)  # nobody waits for it
    monkeypatch.setattr(
        space, "OPTIONS", perco.Options(durability="process", vacuum=space.OPTIONS.vacuum, oracle=oracle)
    )
    space.main(Run("space", Namespace(quick=True, json=None, folder=str(folder))))
    result = capsys.readouterr().out.splitlines()[-1]
    return json.loads(result.removeprefix("RESULT "))


def test_every_store_has_its_figures_in_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = told(0, tmp_path, capsys, monkeypatch)
    figures, ratios = result["figures"], result["ratios"]
    for store in STORES:
        assert figures[f"{store}_file_bytes"] >= figures[f"{store}_used_bytes"] > 0
        assert figures[f"{store}_free_bytes"] >= figures[f"{store}_free_list_bytes"] >= 0
        assert {f"{store}_used_of_minimum", f"{store}_used_of_fresh", f"{store}_file_of_fresh"} <= ratios.keys()
    assert figures["worn_history_gone_versions"] == figures["fresh_versions"] == CELLS
    assert ratios["fresh_used_of_minimum"] == ratios["fresh_used_of_fresh"] == ratios["fresh_file_of_fresh"] == 1
    assert figures["bytes_per_version"] * CELLS == figures["fresh_used_bytes"]
    assert figures["overwrites_per_s"] > 0


def test_a_store_whose_history_is_not_removed_misses_its_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = told(3600, tmp_path, capsys, monkeypatch)
    assert result["figures"]["worn_history_gone_versions"] == CELLS + OVERWRITES + 1  # and a delete
    assert result["ratios"]["worn_history_gone_used_of_fresh"] > 5
    assert "pages in use, history gone, beside a fresh store" in result["missed"]
