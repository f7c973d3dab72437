"""`perco crossover --batch spark`, and the CPU time of several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.acceptance.cli.stores import command
from tests.acceptance.cli.test_crossover import NAME, lines
from tests.acceptance.cli.test_worker import environment

BURN = "import time\nwhile time.process_time() < 0.5: pass\n"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\ninput()"
MEASURED = f"""
import json, os, subprocess, sys
from perco.crossover.on_spark import tree_cpu_s

before = tree_cpu_s(os.getpid())
with subprocess.Popen([sys.executable, "-c", {PARENT!r}], stdin=subprocess.PIPE) as process:
    subprocess.run([sys.executable, "-c", {BURN!r}], check=True)
    during = tree_cpu_s(os.getpid())
    process.communicate(b"\\n")
print(json.dumps([before, during, tree_cpu_s(os.getpid())]))
"""


def test_a_spark_job_is_the_batch(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(lines())
    args = ("--rows", file, "--seconds", 2, "--sample", 150, "--batch", "spark", "--json", "--folder", tmp_path)
    done = subprocess.run(
        command("crossover", NAME, *args), capture_output=True, text=True, env=environment(), timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["equal"] is True
    assert found["batch"]["what"].startswith("perco.spark.build")
    assert all(each["cpu_s"] > 0 for round in found["batch"]["runs"] for each in round)
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_the_cpu_time_is_that_of_all_processes() -> None:
    """Measured in a process of its own: in this one, processes that other tests have started may end meanwhile."""
    done = subprocess.run([sys.executable, "-c", MEASURED], stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    before, during, after = json.loads(done.stdout)
    assert after - before >= 1.0
    assert before + 0.5 <= during <= after + 0.02
