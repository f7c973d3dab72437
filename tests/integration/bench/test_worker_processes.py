"""Worker processes of the scanners' benchmark, for real: few rows, and no figure is judged."""

from __future__ import annotations

from pathlib import Path

from bench import worker_processes


def test_worker_processes_drain_a_served_store_as_often_as_wanted(tmp_path: Path) -> None:
    with worker_processes.processes(tmp_path, workers=2) as processes:
        for seed, teleport in enumerate([True, False]):
            found = processes.drain(60, teleport=teleport, seed=seed)
            assert len({row for _, _, row in found.claims}) == found.runs == found.rows == 60
            assert {process for _, process, _ in found.claims} <= {0, 1}
            assert len(found.begun) == 2
            assert all(0 <= when <= found.seconds for when, _, _ in found.claims)
            assert not found.teleports or teleport
