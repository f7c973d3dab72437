"""Pages of documentation, from the source of Python modules (griffe reads it; nothing of it runs).

Only compiled modules of Python itself are imported, because they have no source.
"""

import html
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder
from pathlib import Path
from pkgutil import iter_modules
from tokenize import open as open_source
from urllib.parse import quote

import griffe

from perco.webindex.crawled import DOCS_URL, SHOWN_CHARS, Found, Skipped
from perco.webindex.pages import Page, canonical_url

LEFT_OUT = frozenset({"__main__", "conftest", "demo", "demos", "idle_test", "idlelib", "test", "tests", "turtledemo"})
_LEFT_OUT_WHY = "left out: it holds tests or demos, or is a program"
_WORD = re.compile(r"https?://[^\s<>\"'`)\]]+|[A-Za-z_]\w*")
_ADDRESS = re.compile(r"\s+at\s+0x[0-9A-Fa-f]+")  # in the text of a compiled module's default values
_FOLLOWED_MAX = 50  # imports from module to module, until a class or function is found

_Member = griffe.Class | griffe.Function


@dataclass(frozen=True, slots=True)
class _Module:
    """A module as it was read. `below`: the names of the modules in a package. `why`: the reason why it cannot be
    read; "" if it can."""

    tree: griffe.Module
    below: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()  # the folders of a package
    why: str = ""


class _Modules:
    """The modules that pages are about, and those that they import from: each is read once."""

    def __init__(self) -> None:
        self._read: dict[str, _Module] = {}
        self._trees = griffe.ModulesCollection()

    def get(self, name: str) -> _Module:
        if name not in self._read:
            try:
                with warnings.catch_warnings():  # of escapes in the source, for one
                    warnings.simplefilter("ignore")
                    self._read[name] = self._module(name)
            except Exception as error:  # whatever a source does to its readers, the crawl goes on
                self._read[name] = _unread(name, _reason(error))
        return self._read[name]

    def _module(self, name: str) -> _Module:
        spec = self._find(name)
        if spec is None:
            return _unread(name, "there is no module of this name")
        inside = tuple(spec.submodule_search_locations or ())
        below = tuple(sorted({found.name for found in iter_modules(inside)}))
        if spec.origin is None:  # a package without a source of its own
            return _Module(griffe.Module(name), below, inside)
        if spec.origin.endswith(".py"):
            path = Path(spec.origin)
            with open_source(spec.origin) as source:
                tree = griffe.visit(name, filepath=path, code=source.read(), modules_collection=self._trees)
            return _Module(tree, below, inside)
        if name in sys.stdlib_module_names:
            return _Module(griffe.inspect(name))
        return _unread(name, "it is compiled: it has no source to read")

    def _find(self, name: str) -> ModuleSpec | None:
        package, _, last = name.rpartition(".")
        if not last.isidentifier():
            return None
        if package:
            found = self.get(package)
            return PathFinder.find_spec(name, found.inside) if found.inside else None
        return PathFinder.find_spec(name) or BuiltinImporter.find_spec(name)

    def exports(self, module: griffe.Module, followed: int = 0) -> list[str] | None:
        """What `__all__` names, also where it adds up those of other modules; None: there is no `__all__`."""
        if module.exports is None:
            return None
        names = []
        for export in module.exports:
            if isinstance(export, str):
                names.append(export)
            elif followed < _FOLLOWED_MAX:
                other = self.get(export.canonical_path.rpartition(".")[0])
                names += self.exports(other.tree, followed + 1) or ()
        return list(dict.fromkeys(names))

    def member(self, module: griffe.Module, name: str, followed: int = 0) -> griffe.Object | None:
        """What a name of a module stands for, in whichever module that is defined; None: it is not known."""
        if followed == _FOLLOWED_MAX:
            return None
        found = module.members.get(name)
        if isinstance(found, griffe.Alias):
            return self._at(found.target_path, followed + 1)
        if found is not None:
            return found
        for key, starred in reversed(module.members.items()):
            if key.endswith("/*") and isinstance(starred, griffe.Alias):
                other = self.get(starred.target_path).tree
                exported = self.exports(other)
                if name in exported if exported is not None else not name.startswith("_"):
                    there = self.member(other, name, followed + 1)
                    if there is not None:
                        return there
        return None

    def _at(self, path: str, followed: int) -> griffe.Object | None:
        """What is at the path of an import, as far as it is in a module."""
        package, _, name = path.rpartition(".")
        if not package or not (module := self.get(package)).tree.members:
            return None
        return self.member(module.tree, name, followed)


def _unread(name: str, why: str) -> _Module:
    return _Module(griffe.Module(name), why=why)


class _Documentation:
    """Pages for modules, and for their public classes and functions."""

    def __init__(self) -> None:
        self._modules = _Modules()
        self._members_of: dict[str, dict[str, _Member]] = {}

    def tree(self, name: str) -> Iterator[Found]:
        """The module, its members, and what is below it."""
        module = self._modules.get(name)
        if module.why:
            yield Skipped(name, module.why)
            return
        members = self._members(name)
        yield _page(name, partial(self._module, name, module, members))
        for member, value in members.items():
            yield _page(f"{name}.{member}", partial(self._member, value))
        yield from self._missing(name, module)
        for child in module.below:
            if child in LEFT_OUT:
                yield Skipped(f"{name}.{child}", _LEFT_OUT_WHY)
            else:
                yield from self.tree(f"{name}.{child}")

    def _members(self, name: str) -> dict[str, _Member]:
        """The public classes and functions of a module: what `__all__` names, or else what it defines itself."""
        if name not in self._members_of:
            module = self._modules.get(name)
            exported = self._modules.exports(module.tree)
            names = _public(module.tree.members) if exported is None else exported
            found: dict[str, _Member] = {}
            # A module below it has a page of its own, even if a function has the same name (unittest.main).
            for each in sorted(set(names).difference(module.below)):
                if exported is None and module.tree.members[each].is_alias:
                    continue
                value = self._modules.member(module.tree, each)
                if isinstance(value, _Member):
                    found[each] = value
            self._members_of[name] = found
        return self._members_of[name]

    def _missing(self, name: str, module: _Module) -> Iterator[Found]:
        for each in self._modules.exports(module.tree) or ():
            if (
                each not in module.below
                and each not in module.tree.members
                and self._modules.member(module.tree, each) is None
            ):
                yield Skipped(f"{name}.{each}", "__all__ names it, but the source does not define it")

    # ------------------------------------------------------------ pages

    def _module(self, name: str, module: _Module, members: dict[str, _Member]) -> str:
        *parents, last = name.split(".")
        trail = [_link(".".join(parents[: depth + 1]), part) for depth, part in enumerate(parents)]
        parts = [self._prose(module.tree, name)]
        parts += _section("Modules", [_link(f"{name}.{child}", child) for child in module.below])
        for heading, kind in ("Classes", griffe.Class), ("Functions", griffe.Function):
            listed = [
                f"{_link(f'{name}.{member}', member)} {_escape(_docstring(value).partition(chr(10))[0])}"
                for member, value in members.items()
                if isinstance(value, kind)
            ]
            parts += _section(heading, listed)
        parts += _section("Data", list(_data(module.tree, self._modules.exports(module.tree))))
        return _document(".".join([*trail, last]), name, "".join(parts))

    def _member(self, value: _Member) -> str:
        """The page of a class or function. It depends on the object alone, not on the name it was found by: what
        several modules export is the same page at several places."""
        home = value.module.path
        signature = self._class(value) if isinstance(value, griffe.Class) else _escape(_signature(value))
        parts = [f"<p>{signature}</p>\n", self._prose(value, home)]
        if isinstance(value, griffe.Class):
            parts += self._inside(value, home)
        return _document(_escape(value.path), value.path, _link(home, home) + "".join(parts))

    def _class(self, value: griffe.Class) -> str:
        bases = [self._base(base) for base in value.bases]
        return f"class {value.name}" + (f"({', '.join(bases)})" if bases else "")

    def _base(self, base: str | griffe.Expr) -> str:
        """A base class, with a link to its page."""
        path = base if isinstance(base, str) else base.canonical_path
        module, _, name = path.rpartition(".")
        found = self._members(module or "builtins").get(name)
        return _escape(str(base)) if found is None else _link(found.path, _escape(str(base)))

    def _inside(self, value: griffe.Class, home: str) -> Iterator[str]:
        for name, member in value.members.items():
            if isinstance(member, griffe.Alias) or (name.startswith("_") and not _told_of(name, member)):
                continue
            if isinstance(member, griffe.Function):
                head = _escape(_signature(member))
            elif isinstance(member, griffe.Attribute):
                head = _escape(name) + _value(member)
            else:
                head = f"class {_escape(name)}"
            yield f"<dl><dt>{head}</dt><dd>{self._markup(_docstring(member), home)}</dd></dl>\n"

    def _prose(self, thing: griffe.Object, home: str) -> str:
        return f"<p>{self._markup(_docstring(thing), home)}</p>\n"

    def _markup(self, text: str, home: str) -> str:
        """A docstring as HTML, with links to what it names of its module, and to the web."""
        known = self._members(home)
        parts, end = [], 0
        for found in _WORD.finditer(text):
            word = found[0]
            if word in known:
                link = _link(f"{home}.{word}", word)
            elif ":" in word:
                address = word.rstrip(".,;:")
                link = f'<a href="{html.escape(address)}">{_escape(address)}</a>{word[len(address) :]}'
            else:
                continue
            parts += [_escape(text[end : found.start()]), link]
            end = found.end()
        return "".join([*parts, _escape(text[end:])]).replace("\n", "<br>\n")


def _public(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith("_") and name.isidentifier()]


def _told_of(name: str, member: griffe.Object) -> bool:
    """Whether a name with an underscore is a special method of which the docstring says something."""
    return name.startswith("__") and name.endswith("__") and name.strip("_") != "doc" and member.docstring is not None


def _docstring(thing: griffe.Object) -> str:
    return _ADDRESS.sub("", thing.docstring.value) if thing.docstring is not None else ""


def _signature(function: griffe.Function) -> str:
    return _ADDRESS.sub("", function.signature())


def _value(attribute: griffe.Attribute) -> str:
    """The source text of a value. That of a compiled module would be the value on this machine: it is not shown."""
    if attribute.value is None or attribute.filepath is None or attribute.lineno is None:
        return ""
    text = str(attribute.value)
    return f" = {_escape(text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + '...')}"


def _data(module: griffe.Module, exported: list[str] | None) -> Iterator[str]:
    for name in sorted(_public(module.members) if exported is None else exported):
        value = module.members.get(name)
        if isinstance(value, griffe.Attribute):
            yield f"<strong>{_escape(name)}</strong>{_value(value)}"


def _escape(text: str) -> str:
    return html.escape(text, quote=False)


def _link(target: str, text: str) -> str:
    return f'<a href="/{quote(target)}">{text}</a>'


def _section(heading: str, lines: list[str]) -> list[str]:
    return [f"<h2>{heading}</h2>\n" + "<br>\n".join(lines) + "\n"] if lines else []


def _document(heading: str, title: str, content: str) -> str:
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{_escape(title)}</title></head>\n'
        f"<body><h1>{heading}</h1>\n{content}</body></html>\n"
    )


def _page(name: str, make: Callable[[], str]) -> Found:
    url = canonical_url(DOCS_URL + quote(name))
    if url is None:
        return Skipped(name, "its URL would be too long")
    try:
        return Page(url, 200, "text/html", "utf-8", make().encode("utf-8", "replace"))
    except Exception as error:
        return Skipped(name, _reason(error))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def documentation(names: Iterable[str]) -> Iterator[Found]:
    """Pages for the modules of these names and for all below them."""
    logging.getLogger("griffe").setLevel(logging.CRITICAL)  # what it cannot make out gives no page
    pages = _Documentation()
    for name in names:
        if name in LEFT_OUT:
            yield Skipped(name, _LEFT_OUT_WHY)
        else:
            yield from pages.tree(name)


def standard_library() -> list[str]:
    """The modules at the top of the running Python's library."""
    return sorted(sys.stdlib_module_names)
