"""A short soak over each database: every harm once."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.against.postgres import NoPostgresError, binaries
from perco.testing.history import OK
from tests.soak import web
from tests.soak.running import STORES, Plan, Soak, told
from tests.support.bigtable import EMULATOR


def must_be_here(store: str) -> None:
    """Skips the test if the store's server is not installed."""
    if store == "bigtable" and not EMULATOR.exists():
        pytest.skip("the Bigtable emulator is not built: make build/bigtable-emulator")
    if store == "postgresql":
        try:
            binaries()
        except NoPostgresError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize("store", STORES)
def test_whatever_is_killed_it_is_snapshot_isolation(store: str, tmp_path: Path) -> None:  # O1 T4 R7 N7
    must_be_here(store)
    plan = Plan(store=store, transactions=300, harm_s=0.3, pause_s=1.0, lose=300)
    outcome = Soak(plan, tmp_path, lambda line: None).run()
    assert outcome.wrong == [], told(outcome)
    assert outcome.statuses[OK] >= 300
    assert outcome.report.edges["rw"] > 20
    assert min(outcome.harm.values()) >= 1, told(outcome)
    assert len(set(outcome.harm) - {"leader deposed by itself"}) == {"bigtable": 14, "postgresql": 11}[store], told(
        outcome
    )


def test_the_web_index_equals_a_batch_build(tmp_path: Path) -> None:  # N7
    must_be_here("bigtable")
    said: list[str] = []
    assert web.run("bigtable", tmp_path, 120, 2000, said.append), said
    assert sum("killed" in line for line in said) == 3
