"""One Spark for all of these tests but those of a cluster. They run by themselves (`make test-spark`), file by file."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import bigtable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
MISSING = [
    *(["pyspark"] if importlib.util.find_spec("pyspark") is None else []),
    *(["java"] if shutil.which("java") is None and not os.environ.get("JAVA_HOME") else []),
]
SAID = f"NO SPARK: {' and '.join(MISSING)} cannot be found; Java 17 and pip install '.[spark]' are needed"

if MISSING:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))  # pyspark's own


def quiet() -> dict[str, str]:
    """Of a session that is fast to make and says little."""
    return {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.python.filterPushdown.enabled": "true",
    }


def reach() -> None:
    """Executors find this Python, and the modules that this process finds."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    reach()
    with suppress(pytest.skip.Exception):
        bigtable.running()  # first: the executors inherit the environment
    builder = SparkSession.builder.master("local[2,3]")
    for name, value in quiet().items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


def failed_tasks(spark: SparkSession, group: str | None) -> int:
    """How many tasks have failed in the jobs of a group, and, of None, in all jobs that are in no group."""
    tracker = spark.sparkContext.statusTracker()
    jobs = [job for id in tracker.getJobIdsForGroup(group) if (job := tracker.getJobInfo(id)) is not None]
    ids = [id for job in jobs for id in job.stageIds]
    stages = [stage for id in ids if (stage := tracker.getStageInfo(id)) is not None]
    return sum(stage.numFailedTasks for stage in stages)
