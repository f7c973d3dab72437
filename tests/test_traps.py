"""docs/traps.md: every test that it names is there, every trap has its row, every row an answer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import perco

ROOT = Path(perco.__file__).parents[1]
PAGE = (ROOT / "docs/traps.md").read_text()
NAMED = re.findall(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\)", PAGE)
ROWS = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("path", sorted({path for _, path in NAMED}))
def test_every_test_that_is_named_exists(path: str) -> None:
    named = {name for name, at in NAMED if at == path}
    assert named <= functions_of(ROOT / path)


def test_every_trap_has_its_row() -> None:
    numbers = [int(row[0]) for row in ROWS if row[0].strip().isdigit()]
    assert numbers == list(range(1, 35))


def test_every_row_names_a_test_or_says_why_there_is_none() -> None:
    heads = {"here", ""}
    for row in ROWS:
        answer = row[-1].strip()
        if answer not in heads:
            assert "](../tests/" in answer or answer.endswith("."), row
    assert len(NAMED) > 90
