"""Negative numbers are arguments, and everything else that begins with a minus is an option."""

from __future__ import annotations

import pytest

from perco.cli.numbers import rearranged

TAKES = {"--limit", "--at"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("s t k rank -5", "-- s t k rank -5"),
        ("s t -7 rank -0.5 --json", "--json -- s t -7 rank -0.5"),
        ("s t -1e-3", "-- s t -1e-3"),
        ("s t -.5", "-- s t -.5"),
        ("s --limit -3 t -5", "--limit -3 -- s t -5"),
        ("--limit=-3 s t -5", "--limit=-3 -- s t -5"),
        ("s t -5 -- -x --json", "-- s t -5 -x --json"),
        ("s t -5 -x", "-x -- s t -5"),
        ("s t - -5", "-- s t - -5"),
    ],
)
def test_they_go_after_the_options(given: str, wanted: str) -> None:
    assert rearranged(given.split(), TAKES) == wanted.split()


@pytest.mark.parametrize("given", ["s t k rank 5", "s t --limit -3", "s t -- -5", "s -h", "s t -1h", "s --at -1.2.x t"])
def test_other_arguments_stay_as_they_are(given: str) -> None:
    assert rearranged(given.split(), TAKES) == given.split()
