"""Fingerprints of functions: has the code changed that made the rows of a view?

A fingerprint covers the function's syntax tree without docstrings, annotations and decorators, so it does not change
with comments, layout, or the version of Python. It also covers what the function names, as far as that can be known
without running it:

    functions and classes     of the program: their own fingerprints, and so on
                              of an installed package: the package's version
    modules                   of the program: what is read from them as `module.name`
                              of an installed package: the package's version
    values                    None, bool, int, float, str, bytes, and tuples, lists, sets and dicts of these
    defaults, closures        as values

It does not cover what a function reaches through an object (a method of an object that is no module and no class), by a
name that it computes, or from files and the environment.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from perco.schema.schema import Column, Signal, Table
from perco.views.cached import Cached

_SKIPPED: Final = frozenset({"annotation", "returns", "type_comment", "decorator_list", "kind", "ctx", "type_params"})
_INSTALLED: Final = ("stdlib", "platstdlib", "purelib", "platlib")


def fingerprint(*functions: object) -> str:
    """Of functions and all that they name, 32 hex digits; "" if the source of one of them cannot be read."""
    found = _Fingerprint()
    for function in functions:
        found.value(function)
    return "" if found.unknown else found.digest.hexdigest()


def place_of(function: object) -> str:
    """Where a function was defined: "app.py:12, index"."""
    function = _unwrapped(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(function)
    name = getattr(function, "__qualname__", code.co_name)
    return f"{code.co_filename}:{code.co_firstlineno}, {name}"


class _Fingerprint:
    """Attributes: `unknown`: True if a function has no source."""

    def __init__(self) -> None:
        self.digest = blake2b(digest_size=16)
        self.unknown = False
        self._seen: set[int] = set()
        self._kept: list[object] = []  # so that no id is used again

    def _add(self, *parts: object) -> None:
        for part in parts:
            data = str(part).encode()
            self.digest.update(b"%d " % len(data) + data)

    def value(self, value: object) -> None:
        """Add a value, and what it leads to."""
        value = _unwrapped(value)
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self._add(type(value).__name__, repr(value))
            return
        if id(value) in self._seen:
            self._add("again")
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, functools.partial):
            self._many("partial", [value.func, *value.args])
            self._map(value.keywords)
        elif isinstance(value, types.MethodType):
            self.value(value.__func__)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self._add("module", value.__name__, _version_of(value.__name__))
        elif isinstance(value, tuple | list):
            self._many(type(value).__name__, value)
        elif isinstance(value, set | frozenset):
            self._many("set", sorted(value, key=repr))
        elif isinstance(value, Mapping):
            self._map(value)
        elif isinstance(value, Cached):
            self._add("cached", value.id, value.version)
            self.value(value.function)
        elif isinstance(value, Table | Column | Signal):
            self._add("perco", repr(value))
        else:
            self._add("object", type(value).__module__, type(value).__qualname__, _version_of(type(value).__module__))

    def _many(self, word: str, values: object) -> None:
        found = list(values)  # type: ignore[call-overload]
        self._add(word, len(found))
        for each in found:
            self.value(each)

    def _map(self, values: Mapping[Any, Any]) -> None:
        self._add("map", len(values))
        for key, value in sorted(values.items(), key=lambda item: repr(item[0])):
            self.value(key)
            self.value(value)

    def _class(self, found: type) -> None:
        installed = _version_of(found.__module__)
        self._add("class", found.__qualname__)
        if installed:
            self._add(installed)
            return
        self._many("bases", found.__bases__)
        for name, value in sorted(vars(found).items()):
            value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            value = value.fget if isinstance(value, property) else value
            if isinstance(value, types.FunctionType) or not name.startswith("__"):
                self._add(name)
                self.value(value)

    def _function(self, function: types.FunctionType) -> None:
        installed = _version_of(function.__module__ or "")
        if installed:
            self._add("function", function.__module__, function.__qualname__, installed)
            return
        trees = list(_trees(function))
        if not trees:
            self.unknown = True
            return
        for tree in trees:
            self._tree(tree)
        self._many("defaults", function.__defaults__ or ())
        self._map(function.__kwdefaults__ or {})
        named = {name: value for tree in trees for name, value in _named(function, tree)}
        self._map(named)

    def _tree(self, node: object) -> None:
        if isinstance(node, ast.AST):
            self._add(type(node).__name__)
            for name, part in ast.iter_fields(node):
                if name in _SKIPPED or part is None or part == []:
                    continue
                self._add(name)
                self._tree(_without_docstring(node, part) if name == "body" else part)
        elif isinstance(node, list):
            self._add(len(node))
            for part in node:
                self._tree(part)
        else:
            self._add(type(node).__name__, repr(node))


def _unwrapped(value: object) -> object:
    """What `functools.wraps` has wrapped."""
    while isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


def _without_docstring(node: ast.AST, body: Any) -> Any:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            return body[1:]
    return body


# ------------------------------------------------------------ sources


@functools.lru_cache(maxsize=64)
def _module_tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def _trees(function: types.FunctionType) -> Iterator[ast.AST]:
    """The function's syntax tree; of a lambda, all that begin in the same line."""
    code = function.__code__
    module = _module_tree("".join(linecache.getlines(code.co_filename, function.__globals__)))
    for node in ast.walk(module) if module is not None else ():
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
            yield node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            lines = [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
            if min(lines) == code.co_firstlineno:
                yield node


def _named(function: types.FunctionType, tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """The values of the names in a function's syntax tree, by name; of modules of the program, `module.name`."""
    closed = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            closed[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    scope = {**function.__globals__, **closed}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in scope:
            value = scope[node.id]
            if not (isinstance(value, types.ModuleType) and not _version_of(value.__name__)):
                yield node.id, value
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = scope.get(node.value.id)
            if isinstance(module, types.ModuleType) and not _version_of(module.__name__):
                yield f"{node.value.id}.{node.attr}", getattr(module, node.attr, None)


@functools.lru_cache(maxsize=4096)
def _version_of(module: str) -> str:
    """Names the installed package that a module belongs to, and its version; "" for a module of the program. Python's
    own modules, and perco's, have no version here: views are to stay the same in a newer one."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return "python"
    if top == "perco":
        return "perco"
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not _is_installed(file):
        return ""
    try:
        return f"{top} {metadata.version(top)}"
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(top, [])
        return ", ".join([top, *(f"{name} {metadata.version(name)}" for name in names)])


def _is_installed(file: str) -> bool:
    path = Path(file).resolve()
    return any(path.is_relative_to(Path(sysconfig.get_path(name)).resolve()) for name in _INSTALLED)
