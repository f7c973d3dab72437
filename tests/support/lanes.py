"""For the tests that hold a lane against the machine: what transactions write, and runs that can be compared."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest
import trio
import trio.testing
from hypothesis import Phase, strategies as st

import perco

# For each cell: None to delete it, a number, or the length of a body.
Written = dict[tuple[str, str], int | None]
CELLS: Final = st.dictionaries(
    st.tuples(st.sampled_from(["n", "body"]), st.sampled_from("abc")),
    st.sampled_from([None, 1, 2, 300]),
    min_size=1,
    max_size=3,
)

# Under a fault (tests/testing/mutated.py), any failing history will do: a smaller one is not searched for.
PHASES: Final = (Phase.generate,) if "PERCO_MUTANT" in os.environ else tuple(Phase)


def fill(txn: perco.Transaction, written: Written, n: perco.Column[str, int], body: perco.Column[str, Any]) -> None:
    text = "x" if body.codec is perco.TEXT else b"x"
    for (name, key), number in written.items():
        if number is None:
            txn.delete(n if name == "n" else body, key)
        elif name == "n":
            txn.set(n, key, number)
        else:
            txn.set(body, key, text * number)


def run_comparable(patch: pytest.MonkeyPatch, main: Callable[[], Awaitable[None]]) -> None:
    """Run in virtual time. The order of tasks is drawn from a seed: otherwise, two runs of the same history may
    differ."""
    patch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)  # type: ignore[attr-defined]
    patch.setattr(trio._core._run, "_r", random.Random(0))  # type: ignore[attr-defined]
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
