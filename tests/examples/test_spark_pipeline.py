from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from examples import spark_pipeline as pipeline
from tests.examples.running import ROOT
from tests.spark.conftest import MISSING, SAID

pytestmark = pytest.mark.skipif(bool(MISSING), reason=SAID)
COUNTRY = re.compile(r"country (\w): (\d+) orders, ([\d.]+)")


def begun(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "examples" / "spark_pipeline.py"), str(folder), *more]
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def expected(*days: int) -> dict[str, tuple[int, int]]:
    orders: Counter[str] = Counter()
    cents: Counter[str] = Counter()
    for _, _, customer, amount in (row for day in days for row in pipeline.made(day)):
        country = "abc"[int(customer[1:]) % 3]
        orders[country] += 1
        cents[country] += amount
    return {country: (orders[country], cents[country]) for country in orders}


def test_killed_after_a_load_it_counts_every_order_once(tmp_path: Path) -> None:
    with begun(tmp_path, "--day", "0") as first:
        assert first.stdout is not None
        while not first.stdout.readline().startswith("job 'day 0'"):
            assert first.poll() is None
        first.kill()
    with begun(tmp_path, "--day", "0", "--day", "1", "--draw", str(tmp_path / "totals.png")) as again:
        out, complaints = again.communicate(timeout=200)
    assert again.returncode == 0, complaints
    assert "job 'day 0': 0 committed, 2000 skipped (loaded before), 0 failed" in out
    assert "job 'day 1': 2000 committed, 0 skipped (loaded before), 0 failed" in out
    found = {name: (int(count), round(100 * float(spent))) for name, count, spent in COUNTRY.findall(out)}
    assert found == expected(0, 1)
    assert (tmp_path / "totals.png").read_bytes().startswith(b"\x89PNG")
