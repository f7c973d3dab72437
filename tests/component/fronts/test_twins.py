"""The three fronts have the same names and the same signatures, `await` and `async` aside."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import perco
import perco.aio
import perco.sync

ROOT = Path(__file__).parents[3]
FRONTS = [perco.sync, perco.aio]
TWINS = [
    ("Database", "Database"),
    ("Snapshot", "Snapshot"),
    ("PinnedSnapshot", "PinnedSnapshot"),
    ("Transaction", "Transaction"),
    ("Scan", "Scan"),
    ("Attempts", "Attempts"),
    ("Attempt", "Attempt"),
    ("Retrying", "Retrying"),
    ("WorkerHandle", "WorkerHandle"),
    ("open", "open"),
]
# Members of the engine's classes without an underscore that the fronts do not offer: loops, caches, pure steps. A new
# member of an engine class goes here, or into the fronts.
ENGINE = {
    "Database": {"schema"},  # a plain attribute there
    "Scan": {"between", "ended", "fetch", "take"},
}


def members(kind: Any) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}


def is_slot(value: object) -> bool:
    return inspect.ismemberdescriptor(value)


CASES = [(front, ours, theirs) for front in FRONTS for ours, theirs in TWINS]


@pytest.mark.parametrize(("front", "ours", "theirs"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_front_has_every_public_name_and_no_other(front: Any, ours: str, theirs: str) -> None:
    there = set(members(getattr(perco, theirs))) - ENGINE.get(theirs, set())
    here = set(members(getattr(front, ours)))
    assert here == there


def told(annotation: Any) -> str:
    """An annotation without what makes it asynchronous or private."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"\b(Coroutine\[Any, Any, (.+)\])$", r"\2", text)
    text = re.sub(r"\bAwaitable\[(\w+)\]", r"\1", text)
    text = re.sub(r"^AsyncIterator\[(.+)\]$", r"Block[\1]", text)
    return text


@pytest.mark.parametrize(("front", "ours", "theirs"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_its_signatures_are_the_same(front: Any, ours: str, theirs: str) -> None:
    compared = 0
    for name, method in members(getattr(perco, theirs)).items():
        if name in ENGINE.get(theirs, ()) or is_slot(method) or isinstance(method, property):
            continue
        there, here = inspect.signature(method), inspect.signature(getattr(getattr(front, ours), name))
        assert list(here.parameters) == list(there.parameters), name
        for one, other in zip(here.parameters.values(), there.parameters.values(), strict=True):
            assert (one.kind, one.default) == (other.kind, other.default), f"{name}({one.name})"
            assert told(one.annotation) == told(other.annotation), f"{name}({one.name})"
        assert told(here.return_annotation) == told(there.return_annotation), name
        compared += 1
    assert compared or theirs in {"Attempt", "Attempts", "open"}
    if theirs == "open":
        there, here = inspect.signature(perco.open), inspect.signature(front.open)
        assert here == there


def test_what_blocks_is_plain_and_what_is_awaited_gives_coroutines() -> None:
    for ours, theirs in TWINS:
        for name, method in members(getattr(perco, theirs)).items():
            if name in ENGINE.get(theirs, ()) or not inspect.isfunction(method):
                continue
            assert not inspect.iscoroutinefunction(getattr(getattr(perco.sync, ours), name)), name
            assert getattr(getattr(perco.sync, ours), name).__doc__, f"perco.sync.{ours}.{name} says nothing"
            assert getattr(getattr(perco.aio, ours), name).__doc__, f"perco.aio.{ours}.{name} says nothing"


def test_a_front_is_there_when_it_is_imported_and_not_before() -> None:
    program = (
        "import sys, perco; assert not {'perco.sync', 'perco.aio', 'perco.fronts'} & set(sys.modules); "
        "import perco.sync; assert 'perco.aio' not in sys.modules; import perco.aio; print('both')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "both\n", done.stderr


class _Port:
    """Calls are made at once."""

    closed = None
    thread = threading.get_ident()

    def must_be_here(self) -> None:
        assert threading.get_ident() == self.thread

    def ask(self, function: Any, args: Any, kwargs: Any, waits: bool = False) -> Any:
        given = function(*args, **kwargs)
        if not inspect.iscoroutine(given):
            return given
        with pytest.raises(StopIteration) as stop:
            given.send(None)
        return stop.value.value


class _Given(SimpleNamespace):
    def __await__(self) -> Generator[None, None, _Given]:
        return self
        yield


@pytest.mark.parametrize("name", ["Database", "Snapshot", "PinnedSnapshot", "Transaction", "WorkerHandle"])
@pytest.mark.parametrize("front", FRONTS)
def test_a_front_calls_what_the_object_has(front: Any, name: str) -> None:  # R9
    """As a client's database has methods of its own."""
    called: list[str] = []

    class Of:
        _open = True

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: called.append(name) or _Given(ended=True)

    kind = getattr(front, name)
    held = kind.__new__(kind)
    held.__dict__.update(_port=_Port(), _of=Of(), _engine=None, _tries=None, _noted=(), _ended=False, _limit=None)
    passed_on = [
        (each, method)
        for each, method in members(kind).items()
        if inspect.isfunction(method) and re.search(rf'self._(ask|now|operate)\("{each}"', inspect.getsource(method))
    ]
    for each, method in passed_on:
        needed = [one for one in [*inspect.signature(method).parameters.values()][1:] if one.default is one.empty]
        named = {one.name: None for one in needed if one.kind is one.KEYWORD_ONLY}
        given = method(held, *[None] * (len(needed) - len(named)), **named)
        if inspect.iscoroutine(given):
            with pytest.raises(StopIteration):
                given.send(None)
        assert called[-1] == each
    assert passed_on


def test_the_fronts_are_what_is_written_from_the_classes_that_run_on_trio() -> None:
    command = [sys.executable, str(ROOT / "tools/fronts.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"run `python tools/fronts.py`: {done.stdout}{done.stderr}"
