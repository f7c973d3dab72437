"""The cost of assertions is measured in processes with and without them; none of its figures is judged here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench import overhead
from bench.harness import Cell, Report


@pytest.mark.parametrize("flags", [[], ["-O"]])
def test_a_child_does_what_is_measured(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "ASSERTED_S", 0.01)
    assert overhead.in_a_child(*flags) > 0


def test_a_child_has_assertions_unless_told_otherwise() -> None:
    for flags, wanted in (([], "True"), (["-O"], "False")):
        assert overhead.child(flags, "print(__debug__)").strip() == wanted


def test_batching_off_is_set_against_single_puts_and_batching_on_against_as_many_as_are_in_flight() -> None:
    rates = {
        "bare 1": 100.0,
        "bare 128": 2000.0,
        "perco 1": 80.0,
        "perco 1, two phases": 40.0,
        "perco 128": 1000.0,
        "perco 128, two phases": 400.0,
        "perco 128, batching off": 90.0,
        "perco 128, two phases, batching off": 45.0,
    }
    report = Report("overhead", "power")
    report.figures["bytes_per_inflight"] = 1.0
    tables: list[Any] = []
    run: Any = SimpleNamespace(table=lambda *told: tables.append(told), say=lambda text: None)
    cells = {name: Cell((rate,)) for name, rate in rates.items()}
    overhead._tell(run, report, cells, {name: Cell((1.0,)) for name in ("raw", "bare", "get")})
    assert report.ratios["write_batching_off_vs_bare_lmdb_1"] == 0.9
    assert report.ratios["two_phases_batching_off_vs_bare_lmdb_1"] == 0.45
    assert report.ratios["write_vs_bare_lmdb_128"] == 0.5
    assert report.ratios["two_phases_vs_bare_lmdb_128"] == 0.2
    told = {row[0]: row[2] for row in tables[0][2]}
    assert told["perco 128, batching off"] == "0.90 of 1"
    assert told["perco 128, two phases"] == "0.20 of 128"


def test_the_figure_shows_all_of_its_bars_and_nothing_over_them() -> None:
    """Where a disk is slow, a group of commits beats single puts: its bar is far higher than the others."""
    report = Report("overhead", "power")
    report.ratios |= {"read_vs_raw": 0.7, "two_phases_batching_off_vs_bare_lmdb_1": 0.7}
    report.ratios |= {"write_batching_off_vs_bare_lmdb_1": 1.9, "two_phases_vs_bare_lmdb_128": 0.2}
    report.ratios |= {"write_vs_bare_lmdb_128": "void"}
    drawn: list[str] = []

    def look(figure: Any, name: str) -> None:
        figure.canvas.draw()
        [axis] = figure.axes
        plot, legend = axis.get_window_extent(), axis.get_legend().get_window_extent()
        assert {text.get_text() for text in axis.texts} == {"0.94", "0.70", "0.23", "1.90", "0.20", "void"}
        for text in axis.texts:
            told = text.get_window_extent()
            assert plot.y0 <= told.y0 < told.y1 <= plot.y1, text
        assert not legend.overlaps(plot)
        assert not any(legend.overlaps(tick.get_window_extent()) for tick in axis.get_xticklabels())
        drawn.append(name)

    run: Any = SimpleNamespace(figure=look)
    overhead._draw(run, report)
    assert drawn == ["overhead"]
