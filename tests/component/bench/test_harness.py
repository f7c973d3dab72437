"""The summary at the end of every benchmark."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

import perco
from bench.harness import Report, Run

FACTS = {"cores": 2, "fsync/s": 9000, "file system": "ext4", "versions": {}, "python": "3"}


def ended(report: Report, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that it prints."""
    monkeypatch.setattr(perco, "tune_gc", lambda: None)  # which is for a process of one's own
    Run("hats", Namespace(quick=True, json=None, folder=".")).finish(report, FACTS)
    return capsys.readouterr().out.splitlines()


def test_a_bar_that_is_missed_is_told_in_one_line_before_the_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report("hats", "power")
    report.ratio("hats, beside bare heads", 0.5, at_least=0.2)
    report.ratio("hats a second", 0.5, at_least=0.9)
    report.bars.append(("a bar with a name that is longer than a line of the table" * 3, 3.0, "at most", 2))
    missed = report.bars[-1][0]
    report.floor("bare heads", 1.0, 2.0)
    *bars, summary, result = ended(report, capsys, monkeypatch)
    assert any(line.startswith("kept    hats, beside bare heads") for line in bars)
    assert summary == (
        f"bars: 1 of 3 kept; MISSED: hats a second, {missed}; VOID, since a baseline is below its floor: bare heads"
    )
    assert json.loads(result.removeprefix("RESULT "))["missed"] == ["hats a second", missed]


def test_bars_that_are_all_kept_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report("hats", "power")
    report.ratio("hats a second", 1.0, at_least=0.9)
    assert ended(report, capsys, monkeypatch)[-2] == "bars: 1 of 1 kept"
