"""Fingerprints of functions: has the code changed that made the rows of a view?

A fingerprint covers the function's syntax tree without docstrings, annotations and decorators, so it does not change
with comments, layout, or the version of Python. It also covers what the function names, as far as that can be known
without running it:

    functions and classes     of the program: their own fingerprints, and so on; what decorators have made of them
                              of an installed package: the package's version
    modules                   of the program: what is read from them as `module.name`
                              of an installed package: the package's version
    values                    None, bool, numbers, text, bytes, dates, patterns, members of enums, dataclasses, and
                              tuples, lists, sets and dicts of these, if they have no more than ten thousand items
    defaults, closures        as values
    other objects             their classes

The program is the package or module that has the view's functions, and what is not installed. The fingerprint does
not cover the state of other objects, imports inside of functions, names that a function computes, files and the
environment.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import linecache
import logging
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, time as dt_time, timedelta
from decimal import Decimal
from fractions import Fraction
from hashlib import blake2b
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any, Final
from uuid import UUID

from perco.schema.schema import Column, Signal, Table
from perco.views.cached import Cached

log: logging.Logger = logging.getLogger("perco.code")

_SKIPPED: Final = frozenset({"annotation", "returns", "type_comment", "decorator_list", "kind", "ctx", "type_params"})
_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_GENERATED: Final = frozenset({"<string>", "<attrs generated>"})
_DESCRIPTORS: Final = (types.MemberDescriptorType, types.GetSetDescriptorType)
_ITEMS_MAX: Final = 10_000  # of a set or the like, whose contents count
_UNKNOWN: Final = object()


def fingerprint(*functions: object) -> str:
    """Of functions and all that they name, 32 hex digits; "" if the source of one of them cannot be read, if they are
    nested too deep, or if an object that they name cannot be looked at. (It is for a warning, which must never keep a
    program from running; the logger `perco.code` has the reason.)"""
    own = {_top(each.__module__ or "") for each in functions if isinstance(each, types.FunctionType)}
    found = _Fingerprint(frozenset(own))
    try:
        for function in functions:
            found.value(function)
    except Exception as error:
        log.debug("no fingerprint of %s: %r", ", ".join(map(place_of, filter(callable, functions))), error)
        return ""
    return "" if found.unknown else found.digest.hexdigest()


def place_of(function: object) -> str:
    """Where a function was defined: "app.py:12, index"."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(function)
    name = getattr(function, "__qualname__", code.co_name)
    return f"{code.co_filename}:{code.co_firstlineno}, {name}"


class _Fingerprint:
    """Attributes: `own`: the first parts of the names of the program's modules; `unknown`: True if a function has no
    source."""

    def __init__(self, own: frozenset[str]) -> None:
        self.digest = blake2b(digest_size=16)
        self.own = own
        self.unknown = False
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # so that no id is used again

    def _add(self, *parts: object) -> None:
        for part in parts:
            data = str(part).encode()
            self.digest.update(b"%d " % len(data) + data)

    def value(self, value: object) -> None:
        """Add a value, and what it leads to."""
        if type(value) in _PLAIN:
            self._add(type(value).__name__, repr(value))
            return
        if id(value) in self._seen:
            self._add("again", self._seen[id(value)])
            return
        self._seen[id(value)] = len(self._seen)
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
        elif isinstance(value, functools.partialmethod):
            self._many("partial", [value.func, *value.args])
            self._map(value.keywords)
        elif isinstance(value, types.ModuleType):
            self._add("module", value.__name__, self._installed(value.__name__))
        elif isinstance(value, tuple | list):
            self._many(type(value).__name__, value)
        elif isinstance(value, set | frozenset):
            self._add("set", len(value), *(sorted(map(self._alone, value)) if len(value) <= _ITEMS_MAX else ()))
        elif isinstance(value, Mapping):
            self._map(value)
        elif isinstance(value, re.Pattern):
            self._add("pattern", value.pattern, value.flags)
        elif isinstance(value, enum.Enum):
            self._add("enum", type(value).__qualname__, value.name)
            self.value(value.value)
        elif isinstance(value, date | timedelta | dt_time | Decimal | Fraction | range | UUID | PurePath):
            self._add(type(value).__name__, repr(value))
        elif hasattr(value, "__wrapped__"):  # functools.cache and the like
            self._add("wrapped", type(value).__qualname__)
            self.value(value.__wrapped__)
        elif isinstance(value, Cached):
            self._add("cached", value.id, value.version)
            self.value(value.function)
        elif isinstance(value, Table):
            self._add("perco", f"Table({value.name!r})")  # N18: a rename is no change of the code
        elif isinstance(value, Column | Signal):
            self._add("perco", f"{value.table.name}.{value.first_name}")
        elif dataclasses.is_dataclass(value):
            self.value(type(value))
            self._map({each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)})
        else:
            self._add("object")
            self.value(type(value))

    def _many(self, word: str, values: Sequence[object]) -> None:
        self._add(word, len(values))
        for each in values if len(values) <= _ITEMS_MAX else ():
            self.value(each)

    def _map(self, values: Mapping[Any, Any]) -> None:
        self._add("map", len(values))
        items = [(self._alone(key), key) for key in values] if len(values) <= _ITEMS_MAX else []
        for name, key in sorted(items, key=lambda item: item[0]):
            self._add(name)
            self.value(values[key])

    def _alone(self, value: object) -> str:
        """A value's own digest, which does not depend on what came before."""
        if type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        found = _Fingerprint(self.own)
        found.value(value)
        self.unknown = self.unknown or found.unknown
        return found.digest.hexdigest()

    def _installed(self, module: str) -> str:
        return "" if _top(module) in self.own else _version_of(module)

    def _class(self, found: type) -> None:
        installed = self._installed(found.__module__)
        self._add("class", found.__qualname__)
        if installed:
            self._add(installed)
            return
        self._many("bases", found.__bases__)
        self._add(*vars(found).get("__annotations__", ()))
        for name, value in sorted(vars(found).items()):
            value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            value = value.fget if isinstance(value, property) else value
            value = value.func if isinstance(value, functools.cached_property) else value
            if isinstance(value, types.FunctionType):
                self._add(name)
                made = getattr(value, "__wrapped__", value)
                if made.__code__.co_filename not in _GENERATED:  # such as the methods of a dataclass
                    self.value(value)
            elif not name.startswith("_") and not isinstance(value, _DESCRIPTORS):
                self._add(name)
                self.value(value)

    def _function(self, function: types.FunctionType) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._add("wrapped")
            self.value(wrapped)
        installed = self._installed(function.__module__ or "")
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
        if hasattr(function, "registry") and isinstance(function.registry, Mapping):  # functools.singledispatch
            self._map({kind.__qualname__: each for kind, each in function.registry.items()})
        named = {name: value for tree in trees for name, value in _named(function, tree, self._installed)}
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


def _without_docstring(node: ast.AST, body: Any) -> Any:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            return body[1:]
    return body


# ------------------------------------------------------------ sources


_Index = dict[tuple[str, int], list[ast.AST]]
_indexes: dict[str, tuple[list[str], _Index]] = {}


def _index_of(function: types.FunctionType) -> _Index:
    """The functions of the module that a function is in: their trees, by name and first line."""
    file = function.__code__.co_filename
    lines = linecache.getlines(file, function.__globals__)
    known = _indexes.get(file)
    if known is not None and known[0] is lines:
        return known[1]
    index: _Index = {}
    try:
        module: ast.Module | None = ast.parse("".join(lines))
    except SyntaxError:
        module = None
    for node in ast.walk(module) if module is not None else ():
        if isinstance(node, ast.Lambda):
            index.setdefault(("<lambda>", node.lineno), []).append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            index.setdefault((node.name, line), []).append(node)
    _indexes[file] = lines, index
    return index


def _trees(function: types.FunctionType) -> list[ast.AST]:
    """The function's syntax tree; of a lambda, all that begin in the same line."""
    code = function.__code__
    return _index_of(function).get((code.co_name, code.co_firstlineno), [])


def _named(function: types.FunctionType, tree: ast.AST, installed: Callable[[str], str]) -> Iterator[tuple[str, Any]]:
    """The values of the names in a function's syntax tree, by name; of modules of the program, `module.name`."""
    closed = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            closed[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet

    def value_of(node: ast.AST) -> object:
        """What a name, or `module.name`, is; `_UNKNOWN` for anything else."""
        if isinstance(node, ast.Name):
            return closed.get(node.id, function.__globals__.get(node.id, _UNKNOWN))
        if isinstance(node, ast.Attribute):
            module = value_of(node.value)
            if is_own(module):
                return getattr(module, node.attr, _UNKNOWN)
        return _UNKNOWN

    def is_own(value: object) -> bool:
        return isinstance(value, types.ModuleType) and not installed(value.__name__)

    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            value = value_of(node)
            if value is not _UNKNOWN and not is_own(value):
                yield ast.unparse(node), value


@functools.lru_cache(maxsize=4096)
def _version_of(module: str) -> str:
    """Names the installed package that a module belongs to, and its version; "" for a module of the program. Python's
    own modules, and perco's, have no version here: views are to stay the same in a newer one."""
    top, file = _top(module), getattr(sys.modules.get(module), "__file__", None)
    if top == "perco":
        return "perco"
    if top in sys.stdlib_module_names and (file is None or _is_below(file, "stdlib", "platstdlib")):
        return "python" if module != "__main__" else ""
    if file is None or not _is_below(file, "stdlib", "platstdlib", "purelib", "platlib"):
        return ""
    try:
        return f"{top} {metadata.version(top)}"
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(top, [])
        return ", ".join([top, *(f"{name} {metadata.version(name)}" for name in names)])


def _is_below(file: str, *places: str) -> bool:
    path = Path(file).resolve()
    return any(path.is_relative_to(Path(sysconfig.get_path(name)).resolve()) for name in places)


def _top(module: str) -> str:
    return module.partition(".")[0]
