"""The examples of the README and the guide run as they stand there, and their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_ten_lines_print_what_they_should(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found is not None
    done = subprocess.run([sys.executable, "-c", found[1]], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[('greeting', 2), ('parting', 4)]\n", done.stderr


def test_the_guide_runs_as_one_program(tmp_path: Path) -> None:
    program = "".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "['https://a.example']",
        "['Bananas, yellow']",
        "Apples ['fruit', 'red'] True",
        "{'https://a.example': 'Apples', 'https://c.example': None}",
        "not yet an hour old",
    ], done.stderr


def test_every_link_to_a_file_leads_to_one() -> None:
    for name in ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]:
        page = ROOT / name
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{name}: {target}"
