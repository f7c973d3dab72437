from __future__ import annotations

import random
import sqlite3
from pathlib import Path

from tests.examples.running import run


def test_killed_again_and_again_the_index_and_the_sink_follow_the_files(tmp_path: Path) -> None:
    rng = random.Random(8)
    notes = tmp_path / "notes"
    notes.mkdir()
    for number in range(40):
        (notes / f"{number}.md").write_text(
            "\n\n".join(f"paragraph {part} of the note {number}, which is about things" for part in "ab")
        )
    given = (tmp_path / "store", "--notes", notes, "--ask", "a note about something else")
    for _ in range(2):
        run("notes", *given, killed_at=("ack", rng.randrange(5, 30)))
    assert "\n160 rows, 0 differ from what the definition makes of the files" in run("notes", *given)
    assert "0 paragraphs embedded in 0 calls" in run("notes", *given)
    (notes / "0.md").unlink()
    (notes / "1.md").rename(notes / "moved.md")
    (notes / "2.md").write_text("a note about something else, which nobody has written before")
    done = run("notes", *given)
    assert done.splitlines()[0] == "1 files new, 1 changed, 2 gone; 37 the same"
    assert done.splitlines()[1] == "1 paragraphs embedded in 1 calls"  # not those that have moved
    assert "2.md, paragraph 0" in done.splitlines()[2]
    assert "\n154 rows, 0 differ" in done
    with sqlite3.connect(tmp_path / "store.db") as db:
        assert db.execute("SELECT count(*) FROM paragraphs WHERE file = 'moved.md'").fetchone() == (2,)
