"""A component test finds each fault that simulated runs do not show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.mutants_components import COMPONENTS
from tests.testing.mutated import VARIABLE

ROOT = Path(__file__).parents[2]
_SECONDS_MAX = 120


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_mutant_dies(name: str) -> None:
    options = ["-q", "-x", "-n0", "-p", "tests.testing.mutated", "-p", "no:cacheprovider"]
    ours = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *options, COMPONENTS[name].test],
        cwd=ROOT,
        env={**ours, VARIABLE: name},
        capture_output=True,
        text=True,
        timeout=_SECONDS_MAX,
        check=False,
    )
    assert found.returncode == 1, f"{name}: {found.stdout}{found.stderr}"
    broken = re.search("(Attribute|Name|Type|Value)Error|^ERROR ", found.stdout, re.MULTILINE)
    assert not broken, f"the mutant itself is broken: {found.stdout}"


def test_the_docs_tell_of_each() -> None:
    rows = [f"| {name} | `{found.test.removeprefix('tests/')}` |" for name, found in COMPONENTS.items()]
    told = (ROOT / "docs" / "testing.md").read_text()
    assert [row for row in rows if row not in told] == []
