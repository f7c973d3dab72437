"""`python -m tests.powerloss` run by a test, and what it printed."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.powerloss.__main__ import ROOT


def replay(*arguments: str) -> tuple[int, str]:
    """Returns (exit code, what it printed)."""
    command = [sys.executable, "-m", "tests.powerloss", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


def counts(printed: str) -> tuple[dict[str, int], int, int]:
    """(cases of each kind, cases, how many of them were wrong)."""
    kinds, last = printed.splitlines()[-2:]
    total, wrong = re.fullmatch(r"(\d+) cases in \d+ s, (\d+) wrong", last).groups()  # type: ignore[union-attr]
    return {part.split(" ", 1)[1]: int(part.split(" ")[0]) for part in kinds.split(", ")}, int(total), int(wrong)
