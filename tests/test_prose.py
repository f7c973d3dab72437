"""The pages use plain words: none that docs/glossary.md avoids, and no relative clause as the subject of a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs/glossary.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "examples/README.md"])
README_LINES = 150


def avoided() -> list[str]:
    """The words in the first column of the last table of the glossary."""
    table = GLOSSARY.read_text().partition("## Words that these pages avoid")[2]
    cells = [line.strip("| ").split(" | ")[0] for line in table.splitlines() if line.startswith("| ")]
    return [word.strip() for cell in cells[1:] for word in cell.partition("(")[0].split(",")]


def prose(text: str) -> list[tuple[int, str]]:
    """Numbered lines without code: neither blocks, nor what stands in backticks, nor comments."""
    text = re.sub(r"```.*?```|<!--.*?-->", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "CODE", text)
    return list(enumerate(text.splitlines(), 1))


def marked(text: str) -> list[str]:
    """Each place that somebody would read twice, as "line: word"."""
    words = re.compile(rf"\b(?:{'|'.join(re.escape(word) for word in avoided())})\b", re.IGNORECASE)
    found = []
    for number, line in prose(text):
        found += [f"{number}: {word}" for word in words.findall(line)]
        for sentence in re.findall(r"(?:^|[.:;] )((?:Who|Whoever) [^.?]*[.?]?)", line):
            if not sentence.endswith("?"):
                found.append(f"{number}: {sentence}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_uses_plain_words(page: Path) -> None:
    text = page.read_text()
    if page == GLOSSARY:
        text = text.partition("## Words that these pages avoid")[0]
    assert not marked(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Nobody knows.", ["1: Nobody"]),
        ("All well.\nA store of before is opened.", ["2: A store of before"]),
        ("Who has lost it takes turns.", ["1: Who has lost it takes turns."]),
        ("Who knows?", []),
        ("`nobody` and\n```\nnobody\n```\nthen whoever", ["5: whoever"]),
        ("A client that writes anew", ["1: anew"]),
    ],
)
def test_the_words_are_found(text: str, found: list[str]) -> None:
    assert marked(text) == found


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
