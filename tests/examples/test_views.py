from __future__ import annotations

import random
from pathlib import Path

from tests.examples.running import run


def test_killed_again_and_again_the_tables_are_what_their_definition_says(tmp_path: Path) -> None:
    rng = random.Random(8)
    for event in "ack", "commit", "ack":
        run("views", tmp_path / "store", killed_at=(event, rng.randrange(50, 300)))
    assert " 0 differ from what the definition makes of the pages" in run("views", tmp_path / "store")
