"""Fingerprints of code: what changes them, and what does not."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import perco
from perco.views.code import fingerprint, place_of

BEFORE = '''
import json
import other
from other import helper as renamed

LIMIT = 3
WORDS = {"a", "b"}

class Tool:
    """A class."""
    factor = 2

    def apply(self, x):
        return x * self.factor

    @property
    def size(self):
        return len(WORDS)

def inner(x):
    return x + LIMIT

def f(row, *, start=1):
    """Says what it does."""
    return inner(row) + other.helper(row) + renamed(row) + start + len(json.dumps(row)) + Tool().apply(row)

def made(factor):
    def g(row):
        return row * factor
    return g

twice = made(2)
by = lambda row: row[:1]
'''
OTHER = """
SCALE = 10
UNUSED = 1
def helper(x):
    return x * SCALE
"""

Loaded = Callable[..., ModuleType]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loaded]:
    """Loads the module after a replacement in its text, or in that of the other module."""
    count = 0

    def load(old: str = "", new: str = "") -> ModuleType:
        nonlocal count
        assert not old or old in BEFORE + OTHER
        folder = tmp_path / str(count)
        count += 1
        folder.mkdir()
        (folder / "subject.py").write_text(BEFORE.replace(old, new) if old else BEFORE)
        (folder / "other.py").write_text(OTHER.replace(old, new) if old else OTHER)
        for name in ("subject", "other"):
            sys.modules.pop(name, None)
        monkeypatch.syspath_prepend(folder)
        importlib.invalidate_caches()
        return importlib.import_module("subject")

    yield load
    for name in ("subject", "other"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("inner(row) + other", "inner(row) - other"),
        ("start=1", "start=2"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("return x + LIMIT", "return x - LIMIT"),  # a helper without any decorator
        ("factor = 2", "factor = 3"),
        ("return x * self.factor", "return x"),
        ('{"a", "b"}', '{"a", "c"}'),  # named by a method of a class that is named
        ("SCALE = 10", "SCALE = 11"),  # of another module
        ("return x * SCALE", "return x"),
    ],
)
def test_what_the_function_names_counts(loaded: Loaded, old: str, new: str) -> None:
    assert fingerprint(loaded().f) != fingerprint(loaded(old, new).f) != ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Says what it does."""', '"""Says something else."""'),
        ('"""A class."""', ""),
        ("def inner(x):\n", "def inner(x: int) -> int:\n    # adds\n\n"),
        ("UNUSED = 1", "UNUSED = 2"),
        ("by = lambda row: row[:1]", "by = lambda row: row[:2]"),
        ("def made(factor)", "\n\n\ndef made(factor)"),
    ],
)
def test_layout_and_what_it_does_not_name_do_not_count(loaded: Loaded, old: str, new: str) -> None:
    assert fingerprint(loaded().f) == fingerprint(loaded(old, new).f) != ""


def test_closures_lambdas_partials_and_values_count(loaded: Loaded) -> None:
    subject, other = loaded(), loaded("made(2)", "made(3)")
    assert fingerprint(subject.twice) != fingerprint(other.twice)
    assert fingerprint(subject.by) != fingerprint(loaded("row[:1]", "row[:2]").by)
    f = subject.f
    found = [functools.partial(f, start=1), functools.partial(f, start=2), functools.partial(f, 1), f]
    assert len({fingerprint(each) for each in found}) == 4
    assert fingerprint(f, 1) != fingerprint(f, "1") != fingerprint(f, ("1",))
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


def test_columns_count_by_their_names() -> None:
    table = perco.Table("t", key=perco.TEXT)
    one, two = table.column("one", perco.TEXT), table.column("two", perco.TEXT)
    assert fingerprint(one) != fingerprint(two)


def test_functions_that_name_each_other_end(loaded: Loaded) -> None:
    subject = loaded("return x + LIMIT", "return f(x)")
    assert fingerprint(subject.f) != ""


def test_a_function_without_source_has_no_fingerprint() -> None:
    scope: dict[str, Any] = {}
    exec("def f(row):\n    return 1", scope)
    assert fingerprint(scope["f"]) == ""
    assert fingerprint(json.dumps) != ""  # of an installed package: its name and version


def test_the_place_of_a_function(loaded: Loaded) -> None:
    assert place_of(loaded().f).endswith("subject.py:23, f")
    assert place_of(len) == "<built-in function len>"


MORE = """
import dataclasses, enum, functools, re, typing
from datetime import date
from decimal import Decimal
import pk.mod

@dataclasses.dataclass
class Point:
    x: int
    y: int = 2

class Pair(typing.NamedTuple):
    a: int

class Kind(enum.Enum):
    ONE = 1

class Tool:
    def __call__(self, x):
        return x

@functools.cache
def cached(x):
    return x

def scale(factor):
    def wrap(function):
        @functools.wraps(function)
        def inner(x):
            return function(x) * factor
        return inner
    return wrap

@scale(2)
def scaled(x):
    return x

def a(x): return 1
def b(x): return 2
WIRING = {"x": a, "y": b, "z": a}
PATTERN, PRICE, DAY, POINT, TOOL = re.compile("x+"), Decimal("1.5"), date(2026, 1, 2), Point(1), Tool()
NESTED = {frozenset({"a", "b"}), frozenset({"c", "d"}), frozenset({"e"})}

def f(row):
    return (Point, Pair, Kind.ONE, cached, scaled, WIRING, PATTERN, PRICE, DAY, POINT, TOOL, NESTED, pk.mod.helper(row))
"""
HELPER = "def helper(x):\n    return x + 1\n"


def more(folder: Path, old: str = "", new: str = "", *, name: str = "more") -> str:
    (folder / "pk").mkdir(parents=True)
    (folder / "pk" / "__init__.py").write_text("")
    assert not old or old in MORE + HELPER
    (folder / f"{name}.py").write_text(MORE.replace(old, new) if old else MORE)
    (folder / "pk" / "mod.py").write_text(HELPER.replace(old, new) if old else HELPER)
    program = f"import sys; from perco.views.code import fingerprint; from {name} import f; print(fingerprint(f))"
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.getcwd()}"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y: int = 2", "y: int = 3"),
        ("y: int = 2", "y: int = 2\n    z: int = 2"),
        ("    a: int", "    a: int\n    b: int"),
        ("ONE = 1", "ONE = 2"),
        ("def cached(x):\n    return x", "def cached(x):\n    return -x"),
        ("@scale(2)", "@scale(3)"),
        ('"z": a}', '"z": b}'),
        ("x+", "y+"),
        ("1.5", "1.6"),
        ("2026, 1, 2", "2026, 1, 3"),
        ("Point(1)", "Point(2)"),
        ("def __call__(self, x):\n        return x", "def __call__(self, x):\n        return -x"),
        ('{"e"}', '{"f"}'),
        ("return x + 1", "return x + 2"),
    ],
)
def test_values_of_many_kinds_count(tmp_path: Path, old: str, new: str) -> None:
    assert more(tmp_path / "1") != more(tmp_path / "2", old, new) != ""


def test_a_fingerprint_is_the_same_in_each_process_and_under_each_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for seed in range(4):
        monkeypatch.setenv("PYTHONHASHSEED", str(seed))
        found.add(more(tmp_path / str(seed), name=f"more{seed}"))
    assert len(found) == 1


def test_code_that_is_nested_too_deep_has_no_fingerprint() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert fingerprint(deep) == ""


def test_an_object_that_cannot_be_looked_at_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Proxy:
        @property
        def __wrapped__(self) -> Any:
            raise RuntimeError("outside of a request")

    with caplog.at_level("DEBUG", logger="perco.code"):
        assert fingerprint(Proxy()) == ""
    assert "outside of a request" in caplog.text


def test_keys_of_any_kind_are_put_in_order() -> None:
    class Key:
        pass

    first, second = Key(), Key()
    assert fingerprint({first: 1, second: 2}) == fingerprint({second: 1, first: 2}) != ""


def test_a_module_is_read_once(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    right = ast.parse

    def parse(source: str) -> ast.Module:
        parsed.append(source)
        return right(source)

    monkeypatch.setattr(ast, "parse", parse)
    subject = loaded()
    fingerprint(subject.f, subject.twice, subject.by)
    assert len(parsed) == 2  # the module, and the other one
