"""The page about changing a schema: its programs and commands run as they stand there, one after the other."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "evolving.md"


def blocks() -> list[tuple[str, str]]:
    return re.findall(r"```(python|console)\n(.*?)```", PAGE.read_text(), re.DOTALL)


def commands(block: str) -> list[tuple[list[str], list[str]]]:
    """Each command, and the lines that it prints."""
    out: list[tuple[list[str], list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            out.append((shlex.split(line[2:]), []))
        else:
            out[-1][1].append(line)
    return out


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:  # N17, N18, N19
    environment = {**os.environ, "PYTHONWARNINGS": "error", "COLUMNS": "200"}
    ran = 0
    for kind, block in blocks():
        if kind == "python":
            (tmp_path / "shop.py").write_text(block)
            continue
        for (name, *arguments), expected in commands(block):
            assert name == "perco"
            done = subprocess.run(
                [sys.executable, "-m", "perco", *arguments],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode in (0, 1), f"{arguments}: {done.stderr}"
            printed = [line.rstrip() for line in done.stdout.splitlines()]
            assert not expected or all(
                line.startswith(wanted) for line, wanted in zip(printed, expected, strict=True)
            ), f"{arguments} prints\n{done.stdout}"
            ran += 1
    assert ran >= 20
