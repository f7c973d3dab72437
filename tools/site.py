"""`python tools/site.py`: write the pages of the documentation site into build/pages; mkdocs makes build/site of them.

The pages are those of docs/, the README, the changelog and the examples. A link to a file of the repository, such as a
test that a page names, leads to a page with the file. The reference has a page for each public package, with all its
names, and one with every command and option. `make docs` runs both; mkdocs refuses a link that leads nowhere.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = ROOT / "build" / "pages"
MOVED: Final = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
PACKAGES: Final = {
    "perco": "perco: for code on trio",
    "perco.options": "perco.options: of perco.open",
    "perco.errors": "perco.errors",
    "perco.aio": "perco.aio: for asyncio",
    "perco.sync": "perco.sync: for blocking code",
    "perco.views": "perco.views: derived tables",
    "perco.sources": "perco.sources: where rows come from",
    "perco.spark": "perco.spark: Spark jobs",
    "perco.embeddings": "perco.embeddings: an index by meaning",
    "perco.langchain": "perco.langchain: LangChain",
    "perco.llamaindex": "perco.llamaindex: LlamaIndex",
    "perco.metrics": "perco.metrics: Prometheus",
    "perco.testing": "perco.testing: for your own tests",
}
_LINK: Final = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]+)(#[^)]*)?\)")
_LANGUAGES: Final = {".py": "python", ".json": "json", ".toml": "toml", ".yml": "yaml", ".ipynb": "json"}


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    files: set[Path] = set()
    for page in sorted([*(ROOT / name for name in MOVED), *(ROOT / "docs").glob("*"), ROOT / "examples" / "README.md"]):
        to = PAGES / _place(page.relative_to(ROOT))
        to.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix == ".md":
            to.write_text(_linked(page, files))
        else:
            shutil.copy(page, to)
    for file in sorted(files):
        _show(file)
    reference = PAGES / "reference"
    reference.mkdir()
    for package, title in PACKAGES.items():
        (reference / f"{package}.md").write_text("\n".join(_names(package, title)))
    (reference / "command-line.md").write_text("\n".join(_commands()))


def _place(file: Path) -> Path:
    """Where a file of the repository is on the site."""
    if str(file) in MOVED:
        return Path(MOVED[str(file)])
    if file.parts[0] == "docs":
        return Path(*file.parts[1:])
    if file == Path("examples/README.md"):
        return Path("examples.md")
    return Path("files") / file.parent / f"{file.name}.md"


def _linked(page: Path, files: set[Path]) -> str:
    """A page, with links as they are on the site. `files`: the files that links lead to are added."""
    here = _place(page.relative_to(ROOT)).parent

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        to = Path(os.path.normpath(page.parent / target))
        if to.is_dir():
            return f"{text[1:-1]}"
        file = to.relative_to(ROOT)
        if _place(file).parts[0] == "files":
            files.add(file)
            anchor = ""
        return f"{text}({os.path.relpath(_place(file), here)}{anchor})"

    parts = re.split(r"(^```.*?^```$)", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def _show(file: Path) -> None:
    """A page with a file of the repository."""
    to = PAGES / _place(file)
    to.parent.mkdir(parents=True, exist_ok=True)
    text = (ROOT / file).read_text()
    if len(text) > 200_000:
        text = text[:200_000] + "\n..."
    head = "---\nsearch:\n  exclude: true\n---\n\n"
    to.write_text(f"{head}# {file}\n\n``````{_LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n``````\n")


# ------------------------------------------------------------ the reference


def _names(package: str, title: str) -> Iterator[str]:
    """The page of a package, with each of its public names."""
    module = importlib.import_module(package)
    yield f"# {title}\n"
    if module.__doc__:
        head, _, rest = module.__doc__.strip().partition("\n\n")
        yield head + "\n"
        if rest.startswith("    "):
            yield f"```python\n{textwrap.dedent(rest.partition(chr(10) + chr(10) + 'N')[0]).rstrip()}\n```\n"
    for name in sorted(_public(module), key=str.lower):
        yield f"::: {package}.{name}\n    options:\n      heading_level: 2\n      show_root_full_path: false\n"


def _public(module: Any) -> Iterator[str]:
    """The names that a module defines, or imports under the same name on purpose (`from x import A as A`)."""
    for node in ast.parse(inspect.getsource(module)).body:
        kinds = (
            (ast.ClassDef,)
            if module.__name__ == "perco.errors"
            else (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        )
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("perco."):
            yield from (each.name for each in node.names if each.asname == each.name)


def _commands() -> Iterator[str]:
    """Every command, with the text of its --help."""
    from perco.cli import app

    yield "# The command line\n"
    yield "Each of these texts is that of the command's `--help`.\n"
    yield from _command(typer.main.get_command(app), "perco", None)


def _command(command: Any, name: str, parent: Any) -> Iterator[str]:
    """A command of click, or of typer's copy of it, and its own commands."""
    context = command.context_class(command, info_name=name, parent=parent, max_content_width=100, terminal_width=100)
    yield f"## {context.command_path}\n"
    yield f"```text\n{command.get_help(context).rstrip()}\n```\n"
    if hasattr(command, "list_commands"):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            if found is not None and not found.hidden:
                yield from _command(found, each, context)


if __name__ == "__main__":
    main()
