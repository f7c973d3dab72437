"""The prefetch benchmark, on a few documents of one store in a folder: every read is counted; no figure is judged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import perco
from bench import prefetch
from bench.harness import Report
from bench.prefetch import BOTH, CACHE, MODES, NEITHER, OPERATIONS


def test_a_document_has_the_paper_s_shape() -> None:
    reads = prefetch.reads_of(1, kinds=False)
    assert len(reads) == len(set(reads)) == OPERATIONS == 50
    assert len({(name, row) for name, row, _ in reads}) == 6
    assert len({len(prefetch.reads_of(number, kinds=True)) for number in range(20)}) > 5


@pytest.mark.parametrize(("mode", "rows"), [(NEITHER, 50), (CACHE, 50), (BOTH, 6)])
async def test_every_row_that_is_read_is_counted(mode: str, rows: int, tmp_path: Path) -> None:
    await prefetch.fill(tmp_path / "store", 10)
    found = await prefetch.documents(tmp_path / "store", MODES[mode], kinds=False, count=10)
    assert rows <= found.per_document < rows + 1  # the last document's lock may be met, and looked after
    assert len(found.times) == 10
    assert found.counters.reads == (0 if mode == NEITHER else 10 * rows)
    assert found.counters.sent == (0 if mode == NEITHER else 10 * 50)
    assert found.wasted == 0
    if mode == BOTH:
        assert found.counters.used == found.counters.predicted == 10 * 44


async def test_the_web_index_is_counted_from_its_first_page_on(tmp_path: Path) -> None:
    rows = {}
    for mode in (NEITHER, BOTH):
        at = tmp_path / mode
        found = await prefetch.web(at, tmp_path / f"{mode}.sqlite", MODES[mode], 60)
        assert found.documents == 60
        assert len(found.times) > 60
        rows[mode] = found.rows
    assert 0 < rows[BOTH] < rows[NEITHER]


def test_what_is_wasted_is_in_the_result_as_of_the_kind_that_wastes_most(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(wasted: int) -> prefetch.Found:
        counters = perco.PrefetchCounters(sent=100, wasted=wasted)
        return prefetch.Found(documents=1, rows=1, seconds=1.0, times=[1.0], counters=counters)

    report = Report("prefetch", "power")
    run: Any = SimpleNamespace(table=lambda *told: None)
    kinds = {"the paper's document": 1, "of several kinds": 9, "the web index": 4}
    prefetch._tell_all(run, report, {name: {mode: [found(n)] for mode in MODES} for name, n in kinds.items()})
    assert report.ratios["wasted"] == report.ratios["wasted_several_kinds"] == 0.09
    assert report.ratios["wasted_paper_document"] == 0.01
