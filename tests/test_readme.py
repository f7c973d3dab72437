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


def _guide(fence: str) -> str:
    return "".join(re.findall(rf"```{fence}\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL))


def test_the_guide_runs_as_one_program_again_and_again(tmp_path: Path) -> None:
    for apples in "new", "known":
        command = [sys.executable, "-c", _guide("python")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines() == [
            f"Apples: {apples}",
            "['https://a.example']",
            "['Bananas, yellow']",
            "Apples ['fruit', 'red'] True",
            "{'https://a.example': 'Apples', 'https://c.example': None}",
            "not yet an hour old",
            "3 labels",
            "['https://a.example']",
            "Apples",
        ], done.stderr


def test_the_tests_of_the_guide_pass_when_copied(tmp_path: Path) -> None:
    program = _guide("python") + "\n\ndef test_options() -> None:\n    trio.run(quickly)\n"
    for name, text in ("bookmarks.py", program), ("test_bookmarks.py", _guide("py")), ("pytest.ini", _guide("ini")):
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "bookmarks.py", "test_bookmarks.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_the_page_about_data_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    program = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    [printed] = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert done.stdout == printed, done.stderr


def test_both_styles_of_an_observer_fail_with_a_whole_traceback(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "threads-or-events.md").read_text()
    program = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    events, threads = done.stdout.splitlines()
    assert events == "3 frames, the last two in ['count', 'measure']"
    assert re.fullmatch(r"\d+ frames, the last two in \['count_blocking', 'measure'\]", threads)
    assert events in page


def test_every_link_to_a_file_leads_to_one() -> None:
    for name in ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]:
        page = ROOT / name
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{name}: {target}"
