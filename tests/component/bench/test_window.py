"""The window benchmark: what it compares, and how it tells that. No figure of it is judged here."""

from __future__ import annotations

from bench import window
from bench.against.load import Load
from bench.against.served import batch_options
from perco.storage import BatchOptions


def test_windows_are_what_clients_are_given() -> None:
    assert batch_options(window.NONE) == BatchOptions(window_s=0.0, adaptive=False)
    assert batch_options(window.LONGEST) == BatchOptions(window_s=0.2, adaptive=False)
    assert batch_options(window.ADAPTIVE[0]) == BatchOptions(window_s=0.001, adaptive=True)


def test_every_scene_is_compared_with_none_and_the_judged_one_with_all() -> None:
    for quick, scenes in ((True, window.QUICK), (False, window.scenes())):
        assert len(set(scenes)) == len(scenes)
        assert all(window.windows(scene, quick=quick)[0] == window.NONE for scene in scenes)
        assert window.JUDGED in scenes
        assert window.LONGEST in window.windows(window.JUDGED, quick=quick)
    popular = window.JUDGED._replace(skew=1)
    assert window.LONGEST in window.windows(popular)
    assert window.LONGEST not in window.windows(popular, quick=True), "some ten seconds a round"


def test_the_mean_is_that_of_transactions_and_the_median_of_rounds() -> None:
    loads = [Load(seconds=1.0, times=times) for times in ([0.1, 0.3], [1.0], [0.2, 0.2, 0.8])]
    assert round(window.mean_ms(loads), 6) == 400
