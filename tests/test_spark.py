"""Where there is no Spark, its tests are left out, and that is said."""

from __future__ import annotations

import os

import pytest

from tests.spark.conftest import MISSING, SAID


def test_spark_is_there_for_the_tests_of_what_runs_on_it() -> None:
    if not MISSING:
        return
    if os.environ.get("CI"):
        pytest.fail(SAID)
    pytest.skip(SAID)
