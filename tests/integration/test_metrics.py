"""Metrics for Prometheus, on every front, of owners and clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

import perco
import perco.aio
import perco.metrics
import perco.sync
from perco.clock.durations import BOUNDS_S, Durations
from perco.errors import UsageError
from perco.serve.opening import SOCKET

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(url: str) -> Values:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Program:
    def __init__(self, front: Any) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT)
        self.body, self.size = self.docs.column("body", perco.TEXT), self.docs.column("size", perco.INT64)
        self.schema = perco.Schema(self.docs)
        options: dict[str, Any] = {"id": "measure", "attempts": 2}
        observe = self.schema.observe(self.body, **options)
        if front is perco.sync:
            observe(perco.sync.observer(self.measure))
        else:

            async def measure(txn: Any, change: Any) -> None:
                self.measure(txn, change)

            observe(perco.aio.observer(measure) if front is perco.aio else measure)

    def measure(self, txn: Any, change: Any) -> None:
        if change.value == "bad":
            raise ValueError("bad")
        txn.set(self.size, change.key, len(change.value))

    def write(self, txn: Any) -> None:
        for key in "abcd":
            txn.set(self.body, key, "bad" if key == "d" else "hello")


def until(url: str, condition: Callable[[Values], bool]) -> Values:
    """Scrape until the values show something; the sample of the process is taken now and then."""
    deadline = time.monotonic() + 30
    while not condition(values := scraped(url)):
        assert time.monotonic() < deadline, values
        threading.Event().wait(0.02)
    return values


def check(values: Values, place: str) -> None:
    on = (("observer", "measure"),)
    assert values["perco_observer_commits_total", on] == 3
    assert values["perco_observer_failures_total", on] == 2
    assert values["perco_observer_given_up_total", on] == 1
    assert values["perco_observer_tripped", on] == 0
    assert values["perco_transactions_total", (("outcome", "committed"),)] >= 4
    commits = (("db_operation_name", "commit"), ("db_system_name", "perco"))
    assert values["db_client_operation_duration_seconds_count", commits] >= 1
    assert values["db_client_operation_duration_seconds_bucket", (*commits, ("le", "+Inf"))] >= 1
    for operation in "read", "scan":
        those = (("db_operation_name", operation), ("db_system_name", "perco"))
        assert values["db_client_operation_duration_seconds_count", those] >= 1, operation
    runs = (("messaging_destination_name", "measure"), ("messaging_system", "perco"))
    assert values["messaging_process_duration_seconds_count", runs] <= 3
    assert ("process_cpu_seconds_total", ()) in values
    if place == "owner":
        assert values["perco_observer_waiting", on] == 0
        assert values["perco_observer_failed", on] == 1
        assert values["perco_observer_workers", on] == 1
        docs = (("table", "docs"),)
        assert values["perco_mutations_total", docs] > 4
        assert values["perco_batch_duration_seconds_count", docs] >= 1
        assert values["perco_mutation_queue_duration_seconds_count", docs] >= 1
    else:
        assert ("perco_observer_waiting", on) not in values, "the owner reports it"


def sampled(values: Values) -> bool:
    return ("perco_transactions_open", ()) in values


def done(values: Values) -> bool:
    on = (("observer", "measure"),)
    given_up = values.get(("perco_observer_given_up_total", on))
    failed = values.get(("perco_observer_failed", on), 1)
    waiting = values.get(("perco_observer_waiting", on), 0)
    return (given_up, failed, waiting) == (1, 1, 0)


@pytest.mark.parametrize("place", ["owner", "client"])
@pytest.mark.parametrize("front", [perco, perco.aio, perco.sync], ids=["trio", "asyncio", "blocking"])
def test_metrics_of_a_program(tmp_path: Path, front: Any, place: str) -> None:
    program = Program(front)
    where = tmp_path if place == "owner" else f"unix:{tmp_path / SOCKET}"
    if front is perco.sync:
        with contextlib.ExitStack() as stack:
            if place == "client":
                stack.enter_context(perco.sync.open(tmp_path, perco.Schema(program.docs)))
            db = stack.enter_context(perco.sync.open(where, program.schema))
            url = perco.metrics.serve(db, "127.0.0.1:0", every_s=0.02)
            until(url, sampled)
            with db.worker():
                with db.transaction() as txn:
                    program.write(txn)
                assert db.wait_idle() == 1
                with db.snapshot() as snap:
                    assert len(list(snap.scan(program.docs))) == 4
                    assert snap.scan(program.docs).to_arrow().read_all()["key"].to_pylist() == [*"abcd"]
                check(until(url, done), place)
        with pytest.raises(OSError, match="refused"):
            scraped(url)
        return

    async def main(thread: Callable[..., Any]) -> str:
        async with contextlib.AsyncExitStack() as stack:
            if place == "client":
                await stack.enter_async_context(front.open(tmp_path, perco.Schema(program.docs)))
            db = await stack.enter_async_context(front.open(where, program.schema))
            url = perco.metrics.serve(db, "127.0.0.1:0", every_s=0.02)
            await thread(until, url, sampled)
            async with db.worker():
                async with db.transaction() as txn:
                    program.write(txn)
                assert await db.wait_idle() == 1
                async with db.snapshot() as snap:
                    assert len([row async for row in snap.scan(program.docs)]) == 4
                check(await thread(until, url, done), place)
        return url

    if front is perco:
        url = trio.run(main, trio.to_thread.run_sync)
    else:
        url = asyncio.run(main(asyncio.to_thread))
    with pytest.raises(OSError, match="refused"):
        scraped(url)


def test_a_collector_beside_the_metrics_of_the_program(tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    program, registry = Program(perco.sync), CollectorRegistry()
    with perco.sync.open(tmp_path, program.schema) as db:
        collector = perco.metrics.collector(db, every_s=0.02)
        assert collector.wait(30)
        registry.register(collector)  # type: ignore[arg-type]
        assert b"perco_transactions_open 0.0" in generate_latest(registry)
    assert list(collector.collect()) == [], "the store is closed"


def test_two_collectors_of_one_store(tmp_path: Path) -> None:
    program = Program(perco.sync)
    with perco.sync.open(tmp_path, program.schema) as db:
        collectors = [perco.metrics.collector(db, every_s=0.02) for _ in range(2)]
        assert all(collector.wait(30) for collector in collectors)
        for n in range(5):
            with db.transaction() as txn:
                txn.set(program.size, f"{n}", n)
        url = perco.metrics.serve(db, "127.0.0.1:0", every_s=0.02)
        commits = (("db_operation_name", "commit"), ("db_system_name", "perco"))
        name = "db_client_operation_duration_seconds_count"
        until(url, lambda values: values.get((name, commits)) == 5)
        for collector in collectors:
            [count] = [
                sample.value
                for metric in collector.collect()
                for sample in metric.samples
                if sample.name == name and sample.labels["db_operation_name"] == "commit"
            ]
            assert count == 5


@pytest.mark.parametrize(
    ("address", "why"),
    [("9464", "HOST:PORT"), ("unix:x", "HOST:PORT"), ("127.0.0.1:99999", "HOST:PORT"), ("240.0.0.1:1", "cannot be")],
)
def test_addresses_that_are_none(tmp_path: Path, address: str, why: str) -> None:
    with perco.sync.open(tmp_path, Program(perco.sync).schema) as db, pytest.raises(UsageError, match=why):
        perco.metrics.serve(db, address)


def test_a_period_that_is_none(tmp_path: Path) -> None:
    with perco.sync.open(tmp_path, Program(perco.sync).schema) as db, pytest.raises(UsageError, match="every_s"):
        perco.metrics.collector(db, every_s=0)


def test_buckets() -> None:
    durations = Durations()
    for seconds in (0.0, 0.0001, 0.00011, 59.0, 61.0):
        durations.note(seconds)
    at = BOUNDS_S.index(0.0001)
    assert [durations.counts[0], *durations.counts[at : at + 2]] == [1, 1, 1]
    assert durations.counts[-2:] == [1, 1]
    assert durations.cumulative()[-1] == 5
    assert len(durations.cumulative()) == len(BOUNDS_S) + 1
    assert durations.total_s == pytest.approx(120.00021)


def test_the_dashboard_and_the_alerts_use_metrics_that_are_there(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs"
    panels = json.loads((docs / "grafana.json").read_text())["panels"]
    exprs = [target["expr"] for panel in panels for target in panel["targets"]]
    exprs += re.findall(r"expr: ([^,}]+)", (docs / "operating.md").read_text())
    assert len(exprs) > 15
    program = Program(perco.sync)
    with perco.sync.open(tmp_path, program.schema) as db, db.worker():
        url = perco.metrics.serve(db, "127.0.0.1:0", every_s=0.02)
        with db.transaction() as txn:
            program.write(txn)
        db.wait_idle()
        names = {name for name, _ in until(url, done)}
    used = {name for expr in exprs for name in re.findall(r"\b(?:perco|db|messaging)_[a-z_]+(?=[\[{ )]|$)", expr)}
    labels = {"messaging_destination_name", "messaging_system", "db_system_name", "db_operation_name"}
    assert used - labels <= names, used - labels - names
    assert len(used) > 12


def test_tablets_that_come_and_go_are_counted_once(tmp_path: Path) -> None:
    program = Program(perco.sync)
    with perco.sync.open(tmp_path, program.schema) as db:
        collector = perco.metrics.collector(db, every_s=0.02)
        assert collector.wait(30)

        def told(name: str) -> float:
            return sum(
                sample.value
                for metric in collector.collect()
                for sample in metric.samples
                if sample.name == name and sample.labels["table"] == "docs"
            )

        def write(n: int) -> None:
            for i in range(n):
                with db.transaction() as txn:
                    txn.set(program.size, f"{i}", i)

        def until_told(n: float, name: str = "perco_mutation_queue_duration_seconds_count") -> None:
            deadline = time.monotonic() + 30
            while told(name) != n:
                assert time.monotonic() < deadline, told(name)
                threading.Event().wait(0.02)

        write(8)
        until_told(8)
        db.split(program.docs, "4")
        until_told(2, "perco_tablets")
        write(8)
        until_told(16)
        db.compact()
        write(8)
        until_told(24)
