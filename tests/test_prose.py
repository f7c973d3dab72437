"""The pages, docstrings and comments use plain words: none that docs/glossary.md avoids, and no relative clause as the
subject of a sentence.

These are a few regular expressions and not vale, because the package that installs vale downloads a program when it
is first run."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs/glossary.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "examples/README.md"])
MODULES = sorted(path for folder in ("perco", "examples", "bench", "tools") for path in (ROOT / folder).rglob("*.py"))
README_LINES = 150

TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))

# A sentence that begins with a clause and its verb, and goes on with a verb of which the clause is the subject: "What a
# run wrote is kept". The expression misses many such sentences, because nothing else may match.
_FINITE = (
    r"is|are|was|were|has|have|had|does|do|did|can|cannot|may|might|must|will|would|holds?|keeps?|reads?|writes?|waits?"
    r"|sends?|gives?|sees?|says?|tells?|locks?|loads?|stores?|knows?|finds?|asks?|belongs?|begins?|began|lies|comes|goes"
    r"|wrote|locked|committed|left|needs?|hangs|fails?|ends"
)
_MAIN = (
    r"is|are|was|were|has|does|did|can|cannot|may|must|will|would|stays|goes|comes|counts|lies|depends|matters|waits|gets"
    r"|needs|makes|takes|ends|begins|leaves|follows|dies|moves"
)
_OTHERS = r"what|that|who|which|if|when|where|how|as|and|or|but|whether|than|because|while|until|after|before"
_SAME = rf"(?:(?!\b(?:{_OTHERS})\b)[^,.;:?()])*?"
CLAUSE = re.compile(
    r"(?:^|(?<=[.!?:;]) |(?<=[.!?:;][\"')`*]) )[*\-`\"'( 0-9.]*"
    r"((?:What|Whatever|Who|Whoever|Whichever|That (?:a|an|the|it|no|each|nothing|some|another)) "
    rf"{_SAME}\b(?:{_FINITE})\b {_SAME}\b(?:{_MAIN})\b(?!-| of\b)[^.?]*[.?]?)",
    re.IGNORECASE,
)

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


def paragraphs(source: str) -> Iterator[tuple[int, str]]:
    """The texts of a module: each block of comments, and each paragraph of a string, with the number of its line."""
    comments: list[tuple[int, str]] = []
    for number, line in enumerate(source.splitlines(), 1):
        if comment := re.search(r"(?:^ *|  )#[#:\- ]*(.*)", line):
            words = comment[1]
            if comments and comments[-1][0] == number - 1:
                words = f"{comments.pop()[1]} {words}"
            comments.append((number, words))
    yield from comments
    inside = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.JoinedStr(values):
                inside.update(map(id, values))
                text = "".join(part.value if isinstance(part, ast.Constant) else "X" for part in values)
            case ast.Constant(str(text)) if id(node) not in inside:
                pass
            case _:
                continue
        if " " in text:
            yield from ((node.lineno, " ".join(paragraph.split())) for paragraph in re.split(r"\n\s*\n", text))


def clauses(texts: Iterable[tuple[int, str]]) -> list[str]:
    """Each sentence whose subject is a clause, as "line: sentence"."""
    found = []
    for line, text in texts:
        found += [f"{line}: {clause}" for clause in CLAUSE.findall(text) if not clause.endswith("?")]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_uses_plain_words(page: Path) -> None:
    text = page.read_text()
    if page == GLOSSARY:
        text = text.partition("## Words that these pages avoid")[0]
    assert not marked(text)
    assert not clauses((0, " ".join(paragraph.split())) for paragraph in re.split(r"\n\s*\n|\n[-|] |\|", text))


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


@pytest.mark.parametrize("folder", ["perco", "bench", "examples", "tools", "tests"])
def test_no_sentence_has_a_clause_as_its_subject(folder: str) -> None:
    modules = [path for path in (*MODULES, *TESTS) if path.relative_to(ROOT).parts[0] == folder]
    found = {str(path.relative_to(ROOT)): clauses(paragraphs(path.read_text())) for path in modules}
    assert {name: sentences for name, sentences in found.items() if sentences} == {}


def test_clauses_are_found_in_docstrings_comments_and_messages() -> None:
    source = '''"""All well. What a run wrote is kept.

What a run does, and where.
"""
def of(n: int) -> None:
    """Whether it is. Whatever the test
    holds is closed."""
    # ---- who has a turn
    # Who is next? That a row is gone is told.
    raise ValueError(f"closed; what {n} wrote is lost")
'''
    assert clauses(paragraphs(source)) == [
        "9: That a row is gone is told.",
        "1: What a run wrote is kept.",
        "6: Whatever the test holds is closed.",
        "10: what X wrote is lost",
    ]


def test_the_modules_with_words_left_exist() -> None:
    assert {str(module.relative_to(ROOT)) for module in MODULES} >= set(LEFT)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
