"""Each run of the simulation collects what the one before it has left: not all the tests' objects with it."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def frozen() -> None:
    gc.collect()
    gc.freeze()
