"""`perco embeddings`, and the demo of it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.acceptance.cli.test_views import run_in

TEA = "Tea is made of leaves that are steeped in hot water for some minutes."


def notes_in(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "tea.md").write_text(f"# Drinks\n\n{TEA}\n")
    (folder / "notes" / "port.txt").write_text("Ships are moored with ropes, and tugs pull the large ones.\n")
    (folder / "notes" / "bad.md").write_bytes(b"\xff\xfe")


def test_a_folder_is_indexed_and_searched(tmp_path: Path) -> None:
    notes_in(tmp_path)
    first = run_in(tmp_path, "embeddings", "index", "notes", "index")
    assert re.match(r"2 files new, 0 changed, 0 gone, 0 as before; 2 chunks embedded in [\d.]+ s\n", first.stdout)
    assert "left out bad.md: " in first.stdout
    again = json.loads(run_in(tmp_path, "embeddings", "index", "notes", "index", "--json").stdout)
    assert (again["added"], again["same"], again["embedded"]) == (0, 2, 0)
    found = run_in(tmp_path, "embeddings", "search", "index", "how", "is", "tea", "made?", "-k", "1")
    assert re.match(r"0\.\d\d  tea\.md: Drinks\n", found.stdout)
    assert TEA in " ".join(found.stdout.split())
    [hit] = json.loads(run_in(tmp_path, "embeddings", "search", "index", "ships", "-k", "1", "--json").stdout)
    assert hit["text"] == "port.txt"


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    notes_in(tmp_path)
    (tmp_path / "models.py").write_text("def encode(some):\n    return [[len(text), 1] for text in some]\nother = 3\n")
    model = ["--embed", "models:encode"]
    assert run_in(tmp_path, "embeddings", "index", "notes", "index", "--match", "*.txt", *model).returncode == 0
    [hit] = json.loads(run_in(tmp_path, "embeddings", "search", "index", "x", *model, "--json").stdout)
    assert hit["text"] == "port.txt"
    for arguments, says in (
        (["search", "index", "x"], "a vector of 512 numbers, and those of the rows have 2"),
        (["search", "nothing", "x"], "index some texts first"),
        (["index", "away", "index"], "there is no folder 'away'"),
        (["search", "index", "x", "--embed", "models:other"], "models:other is int, and no function"),
    ):
        wrong = run_in(tmp_path, "embeddings", *arguments)
        assert (wrong.returncode, says in wrong.stderr) == (2, True), wrong.stderr


def test_the_demo(tmp_path: Path) -> None:
    done: subprocess.CompletedProcess[str] = run_in(tmp_path, "demo", "--embeddings", "--dir", "d")
    assert done.returncode == 0, done.stderr
    assert "equal" in done.stdout
    assert re.search(r"nothing has changed: 0 chunks embedded", done.stdout)
    assert re.search(r"a paragraph at the beginning of http\.client\.md: 1 chunk embedded", done.stdout)
    assert re.search(r"renamed to renamed\.md: 0 chunks embedded", done.stdout)
    assert "queue.md" in done.stdout
