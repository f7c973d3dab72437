"""perco exempts modules from garbage collection in Spark's Python workers."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from perco.spark import workers
from perco.spark.workers import working


@pytest.fixture(autouse=True)
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workers, "_exempt", 0)
    yield
    gc.unfreeze()


def in_process(monkeypatch: pytest.MonkeyPatch, module: str | None) -> None:
    """As if the process had been started with `python -m` and this module; None: with a script."""
    spec = None if module is None else SimpleNamespace(name=module)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)


def test_modules_are_exempted_from_collection_once(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch, "pyspark.daemon")
    with working():
        found = gc.get_freeze_count()
        assert found > 10_000
        kept = [{n: [n]} for n in range(10_000)]
        monkeypatch.setitem(sys.modules, "perco_tests_another", ModuleType("perco_tests_another"))
    assert gc.get_freeze_count() <= found, "objects of a task are not exempt"
    del kept
    with working():
        again = gc.get_freeze_count()
    kept = [{n: [n]} for n in range(10_000)]
    with working():
        assert gc.get_freeze_count() <= again, "only new modules are a reason"
    assert len(kept) == 10_000


def test_new_modules_are_exempted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch, "pyspark.daemon")
    with working():
        found = gc.get_freeze_count()
    another = ModuleType("perco_tests_another")
    another.names = [{n: [n]} for n in range(10_000)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "perco_tests_another", another)
    with working():
        assert gc.get_freeze_count() >= found + 10_000


@pytest.mark.parametrize("module", [None, "pytest", "my.pyspark.job"])
def test_other_processes_are_left_alone(monkeypatch: pytest.MonkeyPatch, module: str | None) -> None:
    in_process(monkeypatch, module)
    before = gc.get_threshold()
    with working():
        assert gc.get_threshold()[0] >= before[0]
    assert not gc.get_freeze_count()
    assert gc.get_threshold() == before


def test_garbage_is_not_exempted(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch, "pyspark.worker")
    ended = []

    class Node:
        def __del__(self) -> None:
            ended.append(self)

    gc.disable()
    try:
        node = Node()
        node.me = node  # type: ignore[attr-defined]
        del node
        with working():
            pass
    finally:
        gc.enable()
    assert ended
