"""Every example says what it shows and how to run it, and is in the table."""

from __future__ import annotations

import ast
import re

import pytest

from tests.examples.running import EXAMPLES, ROOT

TABLE = (ROOT / "examples/README.md").read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_how_it_is_run_and_is_listed_and_tested(name: str) -> None:
    told = ast.get_docstring(ast.parse((ROOT / f"examples/{name}.py").read_text())) or ""
    assert f"    python examples/{name}.py [FOLDER]" in told
    assert "Kill it at any moment and start it again" in told
    assert f"\n| [{name}.py]({name}.py) | " in TABLE
    assert (ROOT / f"tests/examples/test_{name}.py").exists()


def test_every_link_of_the_table_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TABLE)
    assert len(links) > len(EXAMPLES) > 0
    for link in links:
        assert (ROOT / "examples" / link).exists(), link
