"""A component test finds each fault that simulated runs do not show."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from pathlib import Path

import pytest

from perco.storage import lmdb_native
from tests.testing import mutated
from tests.testing.mutants_components import COMPONENTS

ROOT = Path(__file__).parents[2]
_SECONDS_MAX = 120


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_mutant_dies(name: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")  # forks a process that has imported all of perco already
    context.set_forkserver_preload([mutated.__name__])
    said = tmp_path / "said"
    child = context.Process(target=_run, args=(name, str(said)))
    child.start()
    child.join(_SECONDS_MAX)
    if child.exitcode is None:
        child.kill()
        child.join()
    found = said.read_text()
    assert child.exitcode == 1, f"{name}: {found}"
    broken = re.search("(Attribute|Name|Type|Value)Error|^ERROR \\S", found, re.MULTILINE)
    assert not broken, f"the mutant itself is broken: {found}"


def _run(name: str, said: str) -> None:
    """Run the test of a mutant in this process, and exit as pytest does."""
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    os.chdir(ROOT)
    for key in [key for key in os.environ if key.startswith("PYTEST_")]:
        del os.environ[key]
    os.environ[mutated.VARIABLE] = name
    os.environ[lmdb_native.VARIABLE] = "0"  # faults are put into Python code
    options = ["-q", "-x", "-n0", "-p", mutated.__name__, "-p", "no:cacheprovider"]
    code = pytest.main([*options, "-W", "ignore::pytest.PytestAssertRewriteWarning", COMPONENTS[name].test])
    print(end="", flush=True)
    os._exit(code)


def test_the_docs_tell_of_each() -> None:
    rows = [f"| {name} | `{found.test.removeprefix('tests/')}` |" for name, found in COMPONENTS.items()]
    told = (ROOT / "docs" / "testing.md").read_text()
    assert [row for row in rows if row not in told] == []
