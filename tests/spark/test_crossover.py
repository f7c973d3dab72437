"""`perco crossover --batch spark`, and the CPU time of several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from perco.crossover.on_spark import tree_cpu_s
from tests.acceptance.cli.stores import command
from tests.acceptance.cli.test_crossover import NAME, lines
from tests.acceptance.cli.test_worker import environment

BURN = "import time\nwhile time.process_time() < 0.5: pass\n"


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
    before = tree_cpu_s(os.getpid())
    inner = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\ninput()"
    with subprocess.Popen([sys.executable, "-c", inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        subprocess.run([sys.executable, "-c", BURN], check=True)
        during = tree_cpu_s(os.getpid())
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.wait(timeout=60)
    after = tree_cpu_s(os.getpid())
    assert after - before >= 1.0
    assert before + 0.5 <= during <= after + 0.02
