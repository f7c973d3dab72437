"""Pages of documentation, made from the modules of this Python.

The modules are imported. From their source alone, a fifth of the pages could not be made, including most of those of
`os`, `socket`, `ast` and `ctypes`: a module often computes what it exports, and a module written in C has no Python
source.
"""

import faulthandler
import html
import importlib
import importlib.util
import inspect
import os
import pkgutil
import pydoc
import re
import signal
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TextIO, TypeVar
from urllib.parse import quote

from perco.webindex.crawled import DEFAULT_LIMITS, DOCS_URL, PATIENCE, CrawlLimits, Found, Skipped
from perco.webindex.pages import Page, canonical_url

_T = TypeVar("_T")


# Importing some of these opens a browser or prints a poem; the others have nothing but tests and demos.
NOT_IMPORTED = frozenset({"__main__", "antigravity", "idlelib", "test", "this", "turtledemo"})


_NOT_IMPORTED_PARTS = frozenset({"__main__", "conftest", "demo", "demos", "idle_test", "test", "tests"})


_NOT_IMPORTED_WHY = "not imported: it holds tests or demos, or opens a window"


_STDERR = 2


_SHOWN_VALUES = (bool, int, float, complex, str, bytes, type(None))


SHOWN_CHARS = 200


_ADDRESS = re.compile(r"\s+at\s+0x[0-9A-Fa-f]+")


class _TooSlow(BaseException):
    """Raised by the timer. A BaseException, so that no `except Exception` of a module catches it."""


def _too_slow(signum: int, frame: object) -> NoReturn:
    raise _TooSlow


@contextmanager
def _docstrings_only() -> Iterator[None]:
    """Keep pydoc from reading the comments above objects without a docstring. For these comments, pydoc parses every
    source file again and again, which takes two thirds of the time of a crawl."""
    getcomments = inspect.getcomments
    inspect.getcomments = lambda object: None
    try:
        yield
    finally:
        inspect.getcomments = getcomments


def _link(target: str, text: str) -> str:
    return f'<a href="/{target}">{text}</a>'


def _text_of(value: object) -> str:
    return value if isinstance(value, str) else ""


class _Html(pydoc.HTMLDoc):
    """pydoc's HTML, with links to the pages of this crawl, and only with values that are the same everywhere.

    pydoc itself prints the current value of every name, even the environment with its secrets.
    """

    def __init__(self, scrub: Callable[[str], str]) -> None:
        self._scrub = scrub

    def classlink(self, object: Any, modname: str) -> str:
        name, module = object.__name__, sys.modules.get(object.__module__)
        shown = pydoc.classname(object, modname)
        if module is None or name.startswith("_") or getattr(module, name, None) is not object:
            return shown
        return _link(f"{module.__name__}.{name}", shown)

    def modulelink(self, object: Any) -> str:
        return _link(object.__name__, object.__name__)

    def namelink(self, name: str, *dicts: Any) -> str:
        for targets in dicts:
            target = targets.get(name)
            if target is not None and not target.startswith("#"):
                return _link(target, name)
        return name

    def escape(self, text: str) -> str:
        return html.escape(text, quote=False)

    def preformat(self, text: str) -> str:
        # pydoc turns every space into &nbsp;, which makes up most of its output.
        return self.escape(text.expandtabs()).replace("\n", "<br>\n")

    def docother(self, object: Any, name: str | None = None, mod: str | None = None, *ignored: Any) -> str:
        value = self.escape(self._shown(object))
        return f"<strong>{name}</strong> = {value}" if name else value

    def _shown(self, value: object) -> str:
        if type(value) not in _SHOWN_VALUES:
            return f"<{type(value).__name__} object>"
        # Scrub before shortening, because half a path would not be recognised.
        return pydoc.cram(self._scrub(repr(value)), SHOWN_CHARS)


def _own_paths() -> list[tuple[str, str]]:
    """(folder of this machine that may occur in documentation, text that replaces it), the longest first."""
    named = dict.fromkeys(sys.path, "site-packages") | {
        sysconfig.get_path("stdlib"): "lib/python",
        sysconfig.get_path("platstdlib"): "lib/python",
        sysconfig.get_path("purelib"): "site-packages",
        sysconfig.get_path("platlib"): "site-packages",
        os.path.dirname(sys.executable): "bin",
        sys.prefix: "prefix",
        sys.base_prefix: "prefix",
        sys.exec_prefix: "prefix",
        os.path.expanduser("~"): "~",
        os.getcwd(): "tmp",
    }
    both = {where: instead for path, instead in named.items() for where in (path, os.path.realpath(path))}
    # "/usr" is the prefix of many Pythons, but a text about /usr/bin/env reveals nothing about the machine: keep it.
    telling = [(path, instead) for path, instead in both.items() if path.count("/") > 1 or instead == "~"]
    return sorted((pair for pair in telling if len(pair[0]) > 2), key=lambda pair: -len(pair[0]))


class _Scrubber:
    """Removes from a text everything that differs from run to run, or from machine to machine."""

    def __init__(self, paths: Sequence[tuple[str, str]]) -> None:
        self._instead = dict(paths)
        alternatives = "|".join(re.escape(path) for path, _ in paths)
        self._paths = re.compile(rf"(?:{alternatives})(?![\w.-])")

    def __call__(self, text: str) -> str:
        text = _ADDRESS.sub("", text)
        return self._paths.sub(lambda found: self._instead[found[0]], text)


@dataclass(frozen=True, slots=True)
class _Loaded:
    module: types.ModuleType
    members: tuple[tuple[str, Any], ...]
    below: tuple[str, ...]
    problems: tuple[Skipped, ...]


class _Documentation:
    """Pages for modules and for their public classes and functions."""

    def __init__(self, limits: CrawlLimits, nowhere: TextIO) -> None:
        self._limits = limits
        self._nowhere = nowhere
        self._scrub = _Scrubber(_own_paths())
        self._html = _Html(self._scrub)
        self._names: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
        self._cwd = os.getcwd()

    def tree(self, name: str) -> Iterator[Found]:
        """The pages of a module, of its members, and of the modules below it."""
        loaded = self._guarded(name, lambda: self._load(name))
        if isinstance(loaded, Skipped):
            yield loaded
            return
        yield from loaded.problems
        yield self._page(name, lambda: self._module(name, loaded))
        for member, value in loaded.members:
            yield self._page(f"{name}.{member}", partial(self._member, value))
        for child in loaded.below:
            if child in _NOT_IMPORTED_PARTS:
                yield Skipped(f"{name}.{child}", _NOT_IMPORTED_WHY)
            else:
                yield from self.tree(f"{name}.{child}")

    def _guarded(self, name: str, work: Callable[[], _T]) -> _T | Skipped:
        """The result of the work, or why it failed or took too long.

        Nothing that the documented code does stops the crawl: the code may print, hang or raise SystemExit.
        """
        try:
            self._start_timer()
            try:
                with redirect_stdout(self._nowhere), redirect_stderr(self._nowhere), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return work()
            except _TooSlow:
                raise
            except BaseException as error:
                # The timer is left running here, because the text of the exception may come from code of the module.
                return Skipped(name, self._scrub(_reason(error)))
            finally:
                self._stop_timer()
        except _TooSlow:
            # The timer may have fired after the end of the work, before it was stopped.
            self._stop_timer()
            return Skipped(name, f"took longer than {self._limits.module_seconds:g} s")
        finally:
            os.chdir(self._cwd)

    def _start_timer(self) -> None:
        seconds = self._limits.module_seconds
        # Set the handler every time, because a module may have set its own.
        signal.signal(signal.SIGALRM, _too_slow)
        # The timer fires repeatedly, because a module may catch the exception.
        signal.setitimer(signal.ITIMER_REAL, seconds, min(seconds, 1.0))
        # If a module keeps catching the exception, or never returns from C code, the process ends. The reader of
        # the stream then sees that the crawl died; the traceback on the standard error shows where the code hung.
        faulthandler.dump_traceback_later(seconds * PATIENCE, exit=True, file=_STDERR)

    def _stop_timer(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()

    def _load(self, name: str) -> _Loaded:
        module = importlib.import_module(name)
        members, problems = _members(module)
        return _Loaded(module, members, _below(module), problems)

    def _page(self, name: str, make: Callable[[], str]) -> Found:
        made = self._guarded(name, make)
        if isinstance(made, Skipped):
            return made
        url = canonical_url(DOCS_URL + quote(name))
        if url is None:
            return Skipped(name, "its URL would be too long")
        return Page(url, 200, "text/html", "utf-8", made.encode("utf-8", "replace"))

    def _document(self, title: str, extras: str, content: str) -> str:
        heading = self._html.heading(f'<strong class="title">{title}</strong>', extras)
        plain_title = re.sub(r"<[^>]*>", "", title)
        return self._scrub(
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{plain_title}</title></head>'
            f"<body>{heading}{content}</body></html>\n"
        )

    def _module(self, name: str, loaded: _Loaded) -> str:
        page = self._html
        functions, classes = self._targets(name, loaded.members)
        content = [self._prose(loaded.module, functions, classes)]
        if loaded.below:
            below = [_link(f"{name}.{child}", child) for child in loaded.below]
            content.append(page.bigsection("Package Contents", "pkg-content", "<br>\n".join(below)))
        for heading, kind, wanted in (("Classes", "index", inspect.isclass), ("Functions", "functions", _is_function)):
            listed = [self._listed(name, member, value) for member, value in loaded.members if wanted(value)]
            if listed:
                content.append(page.bigsection(heading, kind, "\n".join(listed)))
        data = [page.docother(value, member) for member, value in _data(loaded.module)]
        if data:
            content.append(page.bigsection("Data", "data", "<br>\n".join(data)))
        *parents, last = name.split(".")
        trail = [_link(".".join(parents[: depth + 1]), part) for depth, part in enumerate(parents)]
        return self._document(".".join([*trail, last]), "module", "".join(content))

    def _prose(self, thing: Any, functions: dict[str, str], classes: dict[str, str]) -> str:
        page = self._html
        return f"<p>{page.markup(pydoc.getdoc(thing), page.preformat, functions, classes)}</p>\n"

    def _listed(self, name: str, member: str, value: Any) -> str:
        synopsis = pydoc.getdoc(value).partition("\n")[0]
        return f"<dt>{_link(f'{name}.{member}', member)}</dt><dd>{self._html.escape(synopsis)}</dd>"

    def _member(self, value: Any) -> str:
        """The page of a class or function. Its content depends only on the object, not on the name by which the
        object was found: if several modules export the object, their pages for it have the same content."""
        home = _text_of(getattr(value, "__module__", None))
        name = f"{home}.{value.__qualname__}" if home else value.__qualname__
        functions, classes = self._targets_of(home)
        write = self._html.docclass if inspect.isclass(value) else self._html.docroutine
        content = write(value, value.__name__, home, functions, classes)
        return self._document(self._html.escape(name), _link(home, home) if home else "", content)

    def _targets_of(self, home: str) -> tuple[dict[str, str], dict[str, str]]:
        if home not in self._names:
            module = sys.modules.get(home)
            members = () if module is None else _members(module)[0]
            self._names[home] = self._targets(home, members)
        return self._names[home]

    def _targets(self, name: str, members: Iterable[tuple[str, Any]]) -> tuple[dict[str, str], dict[str, str]]:
        """(functions, classes): the link targets of the names that a text of this module may mention."""
        functions: dict[str, str] = {}
        classes: dict[str, str] = {}
        for member, value in members:
            (classes if inspect.isclass(value) else functions)[member] = f"{name}.{member}"
        return functions, classes


def _reason(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:
        # The exception cannot even be printed.
        return type(error).__name__


def _is_function(value: object) -> bool:
    return not inspect.isclass(value)


def _below(module: types.ModuleType) -> tuple[str, ...]:
    """The names of the modules in a package."""
    path = vars(module).get("__path__")
    return () if path is None else tuple(sorted({found.name for found in pkgutil.iter_modules(path)}))


def _members(module: types.ModuleType) -> tuple[tuple[tuple[str, Any], ...], tuple[Skipped, ...]]:
    """The public classes and functions of a module, and those that could not be read. As in pydoc, a name is public
    if `__all__` contains it or, without `__all__`, if pydoc does not hide it as private (`pydoc.visiblename`) and it
    is defined in the module itself."""
    exported = vars(module).get("__all__")
    names = {str(name) for name in (vars(module) if exported is None else exported)}
    members, problems = [], []
    # A submodule has a page of its own, even if a function has the same name (unittest.main).
    for name in sorted(names.difference(_below(module))):
        if not name.isidentifier() or not pydoc.visiblename(name, exported, module):
            continue
        try:
            value = getattr(module, name)
        except Exception as error:
            problems.append(Skipped(f"{module.__name__}.{name}", _reason(error)))
            continue
        if not inspect.isclass(value) and not inspect.isroutine(value):
            continue
        own = inspect.isbuiltin(value) or getattr(value, "__module__", None) == module.__name__
        if exported is not None or own:
            members.append((name, value))
    return tuple(members), tuple(problems)


def _data(module: types.ModuleType) -> list[tuple[str, Any]]:
    exported = vars(module).get("__all__")
    return sorted(
        (name, value)
        for name, value in vars(module).items()
        if not name.startswith("__") and pydoc.isdata(value) and pydoc.visiblename(name, exported, module)
    )


def documentation(names: Iterable[str], nowhere: TextIO, limits: CrawlLimits = DEFAULT_LIMITS) -> Iterator[Found]:
    """Pages for the modules with these names, and for all modules below them. This imports the modules, so call it in a
    process that does nothing else. Output of the modules goes to `nowhere`."""
    pages = _Documentation(limits, nowhere)
    with _docstrings_only():
        for name in names:
            if name in NOT_IMPORTED:
                yield Skipped(name, _NOT_IMPORTED_WHY)
            else:
                yield from pages.tree(name)


def standard_library() -> list[str]:
    """The names of the top-level modules of the running Python's library."""
    return sorted(sys.stdlib_module_names)
