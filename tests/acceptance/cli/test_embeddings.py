"""`perco embeddings`, and the demo of it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.acceptance.cli.test_views import command, environment, run_in

TEA = "Tea is made of leaves that are steeped in hot water for some minutes."


def notes_in(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "tea.md").write_text(f"# Drinks\n\n{TEA}\n")
    (folder / "notes" / "port.txt").write_text("Ships are moored with ropes, and tugs pull the large ones.\n")
    (folder / "notes" / "bad.md").write_bytes(b"\xff\xfe")


def test_a_folder_is_indexed_and_searched(tmp_path: Path) -> None:
    notes_in(tmp_path)
    first = run_in(tmp_path, "embeddings", "index", "notes", "index")
    assert re.match(r"2 files: 2 new; 2 chunks embedded in [\d.]+ s\n  left out bad\.md: it is not UTF-8", first.stdout)
    again = json.loads(run_in(tmp_path, "embeddings", "index", "notes", "index", "--json").stdout)
    assert (again["added"], again["same"], again["embedded"]) == (0, 2, 0)
    found = run_in(tmp_path, "embeddings", "search", "index", "how", "is", "tea", "made?", "-k", "1")
    assert re.match(r"0\.\d\d  tea\.md: Drinks\n      Tea is made", found.stdout)
    assert all(line.startswith("      ") for line in found.stdout.splitlines()[1:])
    [hit] = json.loads(run_in(tmp_path, "embeddings", "search", "index", "ships", "-k", "1", "--json").stdout)
    assert hit["name"] == "port.txt"
    nothing = run_in(tmp_path, "embeddings", "search", "index", "helicopters")
    assert (nothing.returncode, nothing.stdout) == (1, "nothing in the index is like this\n")
    assert run_in(tmp_path, "embeddings", "check", "index").stdout.endswith("equal\n")
    assert run_in(tmp_path, "set", "index/store", "texts", "tea.md", "text", "no worker sees this").returncode == 0
    checked = run_in(tmp_path, "embeddings", "check", "index", "--json")
    assert (checked.returncode, json.loads(checked.stdout)["equal"]) == (1, False)


def test_an_index_remembers_its_model(tmp_path: Path) -> None:
    notes_in(tmp_path)
    (tmp_path / "models.py").write_text(
        "def encode(some):\n    return [[len(text), 1] for text in some]\nother = 3\n"
        "def more(some):\n    return [[1, 2, 3] for _ in some]\ndef none(some):\n    return []\n"
    )
    index = ["index", "notes", "index", "--match", "*.txt"]
    for arguments, says in (
        ([*index, "--embed", "models:undefined"], "undefined"),
        ([*index, "--embed", "models:other"], "models:other is int, and no function"),
        ([*index, "--embed", "models:none"], "returned 0 vectors for one text"),
        (["index", "away", "index"], "'away' is not a folder; nothing was indexed"),
        (["search", "index", "x"], "index some texts first"),
        (["check", "index"], "there is no index in index"),
    ):
        wrong = run_in(tmp_path, "embeddings", *arguments)
        assert (wrong.returncode, says in wrong.stderr, wrong.stderr.count("\n")) == (2, True, 1), wrong.stderr
    assert not (tmp_path / "index").exists()
    assert run_in(tmp_path, "embeddings", *index, "--embed", "models:encode").returncode == 0
    [hit] = json.loads(run_in(tmp_path, "embeddings", "search", "index", "x", "--json").stdout)
    assert hit["name"] == "port.txt"
    again = json.loads(run_in(tmp_path, "embeddings", *index, "--json").stdout)
    assert (again["same"], again["embedded"]) == (1, 0)
    wrong = run_in(tmp_path, "embeddings", *index, "--embed", "models:more")
    assert "was made with --embed models:encode. To embed all of it again with another model" in wrong.stderr
    newer = run_in(tmp_path, "embeddings", *index, "--embed", "models:more", "--embed-version", "2", "--json")
    assert json.loads(newer.stdout)["embedded"] == 1
    assert run_in(tmp_path, "embeddings", "search", "index", "x").returncode == 0
    assert "leave out --embed-version" in run_in(tmp_path, "embeddings", *index, "--embed-version", "1").stderr
    assert run_in(tmp_path, "embeddings", "check", "index").returncode == 0


def test_what_a_model_could_not_embed_is_tried_again(tmp_path: Path) -> None:
    notes_in(tmp_path)
    model = "def encode(some):\n    assert {}\n    return [[len(text), 1] for text in some]\n"
    (tmp_path / "models.py").write_text(model.format("some == ['a text']"))
    index = ["embeddings", "index", "notes", "index", "--embed", "models:encode"]
    with subprocess.Popen(
        command(*index), cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    ) as failing:
        assert failing.stderr is not None
        for line in failing.stderr:
            if "failed on texts" in line:
                failing.kill()
                break
    (tmp_path / "models.py").write_text(model.format("True"))
    assert run_in(tmp_path, *index).returncode == 0
    assert run_in(tmp_path, "embeddings", "check", "index").stdout.endswith("equal\n")


def test_the_demo(tmp_path: Path) -> None:
    done: subprocess.CompletedProcess[str] = run_in(tmp_path, "demo", "--embeddings", "--dir", "d")
    assert done.returncode == 0, done.stderr
    assert "equal" in done.stdout
    assert re.search(r"nothing has changed: 0 chunks embedded", done.stdout)
    assert re.search(r"a paragraph at the beginning of http\.client\.md: 1 chunk embedded", done.stdout)
    assert re.search(r"renamed to renamed\.md: 0 chunks embedded", done.stdout)
    assert "queue.md" in done.stdout
