"""docs/isolation.md says what is so: its table is what the anomalies do, and its example runs (T14)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.hermitage import ANOMALIES, MODES, PAGE, Mode, shows, table, written

POSSIBLE = {
    ("G2-item (write skew)", "by default"),
    ("G2 (write skew by a predicate)", "by default"),
    ("G2 (write skew by a predicate)", "read locks"),
    ("G2 (seen by a read-only transaction)", "by default"),
}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("anomaly", ANOMALIES)
async def test_an_anomaly_is_possible_just_where_it_should_be(anomaly: str, mode: Mode) -> None:  # T2 T7 T9 T14
    assert await shows(anomaly, mode) == ((anomaly, mode.name) in POSSIBLE)


async def test_the_page_has_the_table_that_came_of_it() -> None:
    page = PAGE.read_text()
    assert page == written(page, await table()), "run `python -m tests.scenarios.hermitage`"


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["0 on call", "1 on call", "1 on call"], done.stderr
