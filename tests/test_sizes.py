"""No module, and no function, is too long to be held in the head; each exception has its reason here."""

from __future__ import annotations

import ast
from pathlib import Path

import perco

ROOT = Path(perco.__file__).parent
MODULE_MAX, FUNCTION_MAX = 600, 70

LONG_MODULES = {
    "storage/lmdb_tablet.py": "one queue and one writer thread: their states are read together",
    "storage/lmdb_engine.py": "one LMDB environment, with every error of LMDB's in one place",
    "database/database.py": "what a program can ask of an open store, documented in one place",
    "errors.py": "every error that a program may have to handle, in one place",
    "testing/sweep.py": "one run of the sweep: processes, faults and moments refer to each other",
}


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_modules_are_short() -> None:
    long = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if lines_of(path) > MODULE_MAX}
    assert long == set(LONG_MODULES)


def test_functions_are_short() -> None:
    long = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
                continue
            if node.end_lineno - node.lineno + 1 > FUNCTION_MAX:
                long.add(f"{path.relative_to(ROOT)} {node.name}")
    assert not long
