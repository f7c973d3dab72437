"""Random graphs of views, with new versions and drops, in processes that are killed: in the end, the store has what the
batch build makes of the sources. `python -m tests.integration.killed.viewing` runs more seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.killed.viewing import History


@pytest.mark.parametrize("seed", range(3))
def test_whichever_process_dies_the_folder_has_what_the_build_makes(seed: int, tmp_path: Path) -> None:  # V1 V7 V15
    history = History(seed, tmp_path / "s", served=False)
    assert history.run() == []
    assert history.killed >= 3


@pytest.mark.parametrize("seed", [11])
def test_whichever_process_dies_a_served_store_has_what_the_build_makes(seed: int, tmp_path: Path) -> None:  # V7 V15
    history = History(seed, tmp_path / "s", served=True)
    assert history.run() == []
    assert history.killed >= 2
