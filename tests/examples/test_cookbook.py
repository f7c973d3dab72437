"""Each recipe of the cookbook runs as it stands, and prints what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "cookbook.md"
TEXT = PAGE.read_text()
RECIPES = re.findall(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE
)


def test_all_recipes_are_found() -> None:
    assert len(RECIPES) == TEXT.count("```python\n") == TEXT.count("\n## ") >= 13
    for name, _, _ in RECIPES:
        assert f"(#{name.lower().replace(' ', '-')})" in TEXT, "the table leads to it"


@pytest.mark.parametrize(("name", "program", "prints"), RECIPES, ids=[name for name, _, _ in RECIPES])
def test_a_recipe(tmp_path: Path, name: str, program: str, prints: str) -> None:
    (tmp_path / "recipe.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "recipe.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr or "GiveUp" in program  # a failure is logged
    assert done.stdout == prints
