"""Each run of the simulation collects the garbage of the run before it; frozen, the tests' own objects are left out."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def frozen() -> None:
    gc.collect()
    gc.freeze()
