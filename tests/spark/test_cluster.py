"""A standalone cluster on this machine, a master and two workers: some of them die, and no secrets leak."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
import trio

import perco
from perco.check.check import check
from perco.database.inside import inside
from tests.spark import app
from tests.spark.conftest import ROOT
from tests.spark.driver import ROWS

SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
ONCE = {f"n{n}": ROWS // 5 for n in range(5)}


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._logs = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        self._environment |= {"PYTHONPATH": str(ROOT), "SPARK_DAEMON_MEMORY": "256m"}
        master = self._start("master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        self.master = self._said(master, r"Starting Spark master at (spark://\S+)")
        for host in ("127.0.0.1", "127.0.0.2"):  # a copy of a task runs on another host only
            self._environment["SPARK_LOCAL_IP"] = host
            place = ("--host", host, "--cores", "1", "--memory", "700m", "--webui-port", "0")
            worker = self._start("worker.Worker", *place, "--work-dir", str(folder / "work"), self.master)
            self._said(worker, r"Successfully registered with master ()")
        self._environment["SPARK_LOCAL_IP"] = "127.0.0.1"

    def _start(self, name: str, *arguments: str) -> Path:
        self._logs += 1
        log = self.folder / f"log-{self._logs}"
        with log.open("wb") as file:
            command = [str(SPARK_CLASS), f"org.apache.spark.deploy.{name}", *arguments]
            self._processes.append(
                subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
                )
            )
        return log

    def _said(self, log: Path, pattern: str) -> str:
        """What a process has written, as soon as it has."""
        process = self._processes[-1]
        while (found := re.search(pattern, log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)  # there is nothing to wait for but the file
        return found[1]

    def driver(self, store: Path, what: str, folder: Path) -> Driver:
        folder.mkdir(exist_ok=True)
        return Driver([self.master, str(store), what, str(folder)], folder, self._environment)

    def texts(self) -> Iterator[tuple[Path, str]]:
        """All that master, workers, executors and drivers have written."""
        for path in self.folder.rglob("*"):
            if path.is_file() and path.name != "secrets" and "store" not in path.parts:
                yield path, path.read_text(errors="replace")

    def end(self) -> None:
        for process in self._processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Driver:
    def __init__(self, arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.log = folder / "stderr"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.driver", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=ROOT,
                text=True,
            )

    def said(self, what: str) -> Any:
        """The next that it says of something."""
        return self.whole(what)[what]

    def whole(self, what: str) -> dict[str, Any]:
        """The same, with what it says in one breath."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if what in answer:
                return answer
        raise AssertionError(self.log.read_text()[-5000:])

    def ended(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0, self.log.read_text()[-5000:]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.end()


def counted(store: Path) -> dict[str, int]:
    """As its owner, and with nothing left to repair."""

    async def main() -> dict[str, int]:
        async with perco.open(store, app.schema, options=perco.Options(shared=False)) as db, db.snapshot() as snap:
            assert (await check(inside(db).driver.store, ts=inside(db).oracle.last)).clean
            return {row.key: row.get(app.count, 0) async for row in snap.scan(app.counts)}

    return trio.run(main)


def command_lines() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_text()
        except OSError:  # it has ended
            continue


def test_an_executor_that_is_killed_and_nobody_sees_what_is_secret(cluster: Cluster) -> None:
    store, folder = cluster.folder / "store-1", cluster.folder / "kill"
    driver = cluster.driver(store, "kill", folder)
    said = driver.whole("url")
    assert said["url"] == said["at"]
    assert said["at"].startswith("tls://")
    seen = "".join(command_lines())
    said = driver.whole("committed")
    seen += "".join(command_lines())
    counts, rows, done = driver.said("counts"), driver.said("rows"), driver.whole("drained")
    driver.ended()
    assert (folder / "once").exists()
    assert (folder / "twice").exists()  # while it ran observers
    assert counts == ONCE
    assert rows == 10
    assert done == {"drained": 2, "wrong": 0, "sized": 300}
    assert said["committed"] + said["skipped"] == ROWS  # rows that the dead executor committed were skipped later
    assert {name: n for name, n in counted(store).items() if not name.startswith("copy")} == ONCE
    token, certificate = (folder / "secrets").read_text().split()
    assert len(token) == 48
    looked = 0
    for path, text in cluster.texts():
        assert token not in text, path
        assert "PRIVATE KEY" not in text, path
        assert certificate not in text, path
        looked += 1
    assert looked > 10
    assert "spark.eventLog.dir" in (folder / "pages").read_text()
    assert "SparkListenerTaskEnd" in "".join(path.read_text() for path in folder.rglob("events_*"))
    assert token not in seen
    assert "tests.spark.driver" in seen


def test_a_task_of_which_spark_runs_a_copy(cluster: Cluster) -> None:
    store, folder = cluster.folder / "store-2", cluster.folder / "speculate"
    driver = cluster.driver(store, "speculate", folder)
    assert driver.said("at") == f"unix:{store}/socket"
    committed = driver.said("committed")
    driver.ended()
    assert (folder / "once").exists()
    assert committed < ROWS  # of the slow task's inputs the copy found most taken
    log = "".join(path.read_text() for path in folder.rglob("events_*"))
    assert re.search(r'"SparkListenerTaskEnd".*"Reason":"Success".*"Speculative":true', log)
    assert counted(store) == ONCE


def test_a_driver_that_is_killed_leaves_a_folder_that_opens_and_a_job_that_goes_on(cluster: Cluster) -> None:
    store, folder = cluster.folder / "store-3", cluster.folder / "wait"
    driver = cluster.driver(store, "wait", folder)
    driver.said("loaded")
    driver.process.kill()
    driver.process.communicate()
    died = time.monotonic()
    while True:
        try:
            assert counted(store) == ONCE
            break
        except perco.errors.StoreLocked:
            assert time.monotonic() < died + 10
            time.sleep(0.05)  # there is no event: the owner is no child of this process
    again = cluster.driver(store, "plain", cluster.folder / "again")
    said = again.whole("committed")
    assert (said["committed"], said["skipped"]) == (0, ROWS)
    again.ended()
    assert counted(store) == ONCE
