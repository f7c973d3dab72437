"""The stages in a pipe: a line now and then, and none while nothing happens."""

from __future__ import annotations

from typing import Any

import pytest

from perco.webindex import screen


def progress(seconds: float, waiting: int, commits: int) -> dict[str, Any]:
    stage = {"waiting": waiting, "conflicts": 0, "commits": commits, "collapsed": 0, "failures": 0}
    load = {"crawled": 1, "changed": 1, "unchanged": 0, "skipped": 0}
    return {"seconds": seconds, "load": load, "stages": {"parse": stage}, "searchable": commits}


def test_an_idle_index_is_told_once_and_one_that_waits_again_and_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "_LINE_EVERY_S", 0.0)
    monkeypatch.setattr(screen, "console", screen._Console(highlight=False, soft_wrap=True, force_terminal=False))
    with screen.Stages() as stages:
        for seconds, waiting, commits in (
            (0, 1, 0),  # told
            (2, 1, 0),  # told: it waits
            (4, 0, 1),  # told
            (6, 0, 1),
            (8, 0, 1),
            (10, 0, 2),  # told
            (12, 1, 2),  # told
            (14, 0, 2),  # told: idle again
            (16, 0, 2),
        ):
            stages.show(progress(seconds, waiting, commits))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "0.0",
        "2.0",
        "4.0",
        "10.0",
        "12.0",
        "14.0",
    ]
