"""The pages, docstrings and comments use plain words: none that docs/glossary.md avoids, and no relative clause as the
subject of a sentence.

These are a few regular expressions and not vale, because the package that installs vale downloads a program when it
is first run."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs/glossary.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "examples/README.md"])
MODULES = sorted(path for folder in ("perco", "examples", "bench", "tools") for path in (ROOT / folder).rglob("*.py"))
README_LINES = 150

# Words that are still there, by module. A module that loses one is taken off; none is added.
LEFT: dict[str, list[str]] = {}


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


def spoken(source: str) -> str:
    """The docstrings and comments of a module, each on its own line. Names of constants are not words."""
    lines = [""] * (source.count("\n") + 1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = token.string.lstrip("#: ")
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str(text)), lineno=first):
                for number, line in enumerate(text.splitlines(), first):
                    lines[number - 1] = line.strip()
    return re.sub(r"\b[A-Z][A-Z_]+\b", "CODE", "\n".join(lines))


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


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(ROOT)))
def test_a_module_uses_plain_words(module: Path) -> None:
    found = marked(spoken(module.read_text()))
    words = sorted(each.partition(": ")[2].lower() for each in found)
    assert words == LEFT.get(str(module.relative_to(ROOT)), []), found


def test_docstrings_and_comments_are_read_and_code_is_not() -> None:
    source = '''"""Made anew.

Simply so.
"""
nobody = "whoever"  # NOBODY, or nobody
def of() -> None:
    """`anew`"""
    #: Who reads first.
'''
    assert marked(spoken(source)) == ["1: anew", "3: Simply", "5: nobody", "8: Who reads first."]


def test_the_modules_with_words_left_exist() -> None:
    assert {str(module.relative_to(ROOT)) for module in MODULES} >= set(LEFT)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
