"""perco's programs in the benchmark of derived tables, as processes that are restarted and killed: few documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.deriving import running, scenario, systems
from bench.deriving.scenario import Side


@pytest.fixture(autouse=True)
def hastily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario, "PAUSE_S", 0.0)


@pytest.mark.parametrize("system", [systems.PERCO_ROWS, systems.PERCO_FILES], ids=lambda system: system.key)
def test_a_side_goes_through_all_steps(system: systems.System, tmp_path: Path) -> None:
    side = Side(system, 30, tmp_path, 120.0)
    side.step("build", side.build)
    side.step("round", lambda: side.round(3, 60.0, last=True))
    side.step("change", side.change)
    side.step("kill the build", side.kill_build)
    side.step("kill an edit", lambda: side.kill_edits(2))
    found = side.found
    assert (found.failed, found.unequal, found.compared, found.killed) == ("", {}, 6, 3)
    assert found.build is not None
    assert found.changed is not None
    assert found.build.calls == found.changed.calls == 30
    assert found.disk_mib > 0
    assert [len(round.edits_ms) for round in found.rounds] == [3]
    assert found.rounds[0].restart.calls == 1, "after a restart, only the document that was edited is derived again"


def test_a_wrong_table_is_found_and_a_step_that_fails_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario, "SETTLE_S", 0.0)
    side = Side(systems.PERCO_ROWS, 10, tmp_path, 120.0)
    side.corpus.edit(4)  # which the system is not told
    side.step("build", side.build)
    assert "stale" in side.found.unequal["cold build"] or "of" in side.found.unequal["cold build"]

    def late() -> None:
        raise running.LateError("not ready within 1 s")

    side.step("change", late)
    side.step("kill the build", side.kill_build)
    assert side.found.failed == "change: not ready within 1 s"
    assert side.found.killed == 0
