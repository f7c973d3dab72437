from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import perco
from perco import cli
from perco.tuning import collecting_less


@pytest.fixture
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collector")
def test_the_collector_leaves_alone_what_is_there_and_waits_for_more_objects() -> None:
    perco.tune_gc(threshold=12_345)
    assert gc.get_threshold()[0] == 12_345
    assert gc.get_freeze_count()


@pytest.mark.usefixtures("collector")
def test_it_still_collects_cycles() -> None:
    class Node:
        me: Node

    perco.tune_gc(threshold=1000)
    ended = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal ended
        ended += phase == "stop" and info["collected"] > 0

    gc.callbacks.append(count)
    try:
        for _ in range(5000):
            node = Node()
            node.me = node
    finally:
        gc.callbacks.remove(count)
    assert ended


def test_a_threshold_that_would_switch_it_off_is_refused() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="at least 1"):
        perco.tune_gc(0)
    assert gc.get_threshold() == before


@pytest.mark.usefixtures("collector")
def test_the_command_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", lambda **_: None)
    cli.run()
    assert gc.get_threshold()[0] == 50_000


@pytest.mark.usefixtures("collector")
def test_for_the_length_of_a_block() -> None:
    gc.set_threshold(600, 11, 12)
    with collecting_less():
        assert gc.get_threshold()[0] == 50_000
    assert gc.get_threshold() == (600, 11, 12)
    assert not gc.get_freeze_count()


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("threshold", [0, 200_000])
def test_who_collects_less_already_is_left_alone(threshold: int) -> None:
    gc.set_threshold(threshold, 11, 12)
    with collecting_less():
        assert gc.get_threshold() == (threshold, 11, 12)
