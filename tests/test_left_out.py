"""The tests left out of the suites that run everywhere exist, and docs/testing.md says why they are left out."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support import everywhere, left_out

ROOT = Path(__file__).parent


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_what_is_left_out_exists() -> None:
    for left in left_out.LEFT_OUT:
        for path, functions in left.tests.items():
            assert {function.partition("[")[0] for function in functions} <= functions_of(ROOT / path), path


def test_nothing_is_left_out_over_the_owner_and_every_reason_is_a_clause() -> None:
    for left in left_out.LEFT_OUT:
        assert left.over
        assert set(left.over) <= set(everywhere.DEPLOYMENTS) - {everywhere.OWNER}
        assert left.because[0].islower()
        assert not left.because.endswith(".")
    reasons = [left.because for left in left_out.LEFT_OUT]
    assert len(reasons) == len(set(reasons)), "one place for each reason"


def test_the_page_has_the_table() -> None:
    page = left_out.PAGE.read_text()
    assert page == left_out.written(page), "run `python -m tests.support.left_out`"
