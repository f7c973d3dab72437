"""The peers' benchmark, on few calls: that all do the work; no figure of it is judged here, no server is needed."""

from __future__ import annotations

import random
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import trio

import perco
from bench import harness
from bench.against import embedded, pipeline, postgres, transfers
from bench.against.load import Load, Zipf, closed_loop

SQLITE = [name for name in embedded.STORES if name.startswith("SQLite")]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "KEYS", embedded.KEYS[:50])
    monkeypatch.setattr(transfers, "ACCOUNTS", 50)
    monkeypatch.setattr(transfers, "ZIPF", Zipf(50, transfers.SKEW))


@pytest.mark.parametrize("name", ["perco", *SQLITE])
def test_a_store_counts_every_call_and_keeps_them(name: str, tmp_path: Path) -> None:
    for _ in range(2):  # the second time the rows are there
        found = embedded.load(name, tmp_path, in_flight=8, seconds=0.02)
        assert found.calls >= 8
        assert found.seconds >= 0.02
        assert found.cpu_s > 0


def test_a_store_that_loses_a_call_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "one_more", lambda old: old)
    with pytest.raises(AssertionError, match="has counted 0 of"):
        embedded.load("perco", tmp_path, in_flight=2, seconds=0.01)


@pytest.mark.parametrize("name", SQLITE)
async def test_calls_of_one_row_in_one_batch_all_count_and_an_error_comes_out(name: str, tmp_path: Path) -> None:
    def fails(old: bytes) -> bytes:
        raise KeyError("the program's own")

    async with embedded.STORES[name](tmp_path) as store:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(store.modify, embedded.KEYS[0], embedded.one_more)
        assert await store.total() == 20
        with pytest.raises(KeyError):
            await store.modify(embedded.KEYS[0], fails)
        await store.modify(embedded.KEYS[0], embedded.one_more)
        assert await store.total() == 21


def test_a_plain_loop_has_a_rate(tmp_path: Path) -> None:
    assert embedded.plain_loop("SQLite", tmp_path, 0.01) > 0


def test_transfers_make_no_money(tmp_path: Path) -> None:
    found = transfers.perco_load(tmp_path, 0.02)
    assert found.calls >= transfers.IN_FLIGHT
    assert found.retries >= 0


def test_all_steps_run(tmp_path: Path) -> None:
    found = pipeline.perco_drain(tmp_path, chains=20, concurrency=4)
    assert found.calls == 60


def test_every_first_write_of_a_chain_has_a_latency(tmp_path: Path) -> None:
    times = pipeline.perco_latencies(tmp_path, 0.1, 100.0)
    assert len(times) > 3


# ------------------------------------------------------------------ the load


def test_zipf_draws_the_first_most_often_and_zero_all_alike() -> None:
    rng = random.Random(1)
    skewed = Counter(Zipf(10, 1.2).draw(rng) for _ in range(20_000))
    assert [rank for rank, _ in skewed.most_common(3)] == [0, 1, 2]
    assert skewed[0] / skewed[1] == pytest.approx(2**1.2, rel=0.1)
    even = Counter(Zipf(10, 0.0).draw(rng) for _ in range(20_000))
    assert min(even.values()) > 1700
    assert set(even) == set(range(10))


def test_distinct_ones_are_distinct() -> None:
    rng = random.Random(1)
    for _ in range(100):
        found = Zipf(10, 1.2).distinct(rng, 10)
        assert sorted(found) == list(range(10))


async def test_a_closed_loop_counts_its_calls() -> None:
    calls: list[float] = []

    async def call(rng: random.Random) -> None:
        calls.append(rng.random())
        await trio.lowlevel.checkpoint()

    found = await closed_loop(call, in_flight=3, seconds=0.01)
    assert found.calls == len(calls) >= 3
    assert len(set(calls[:3])) == 3, "each caller has random numbers of its own"


def test_a_load_has_its_figures() -> None:
    found = Load(seconds=2.0, cpu_s=0.001, retries=5, times=[0.001, 0.003, 0.002, 0.004])
    assert (found.per_s, found.cpu_us, found.retries_per_call, found.ms(0.5)) == (2.0, 250.0, 1.25, 3.0)
    assert Load(seconds=1.0).cpu_us == 0.0


def test_sides_run_interleaved_in_turned_order() -> None:
    ran: list[str] = []
    found = harness.interleaved(3, {name: lambda name=name: ran.append(name) or name for name in "ab"})  # type: ignore
    assert ran == list("abbaab")
    assert found == {"a": ["a"] * 3, "b": ["b"] * 3}


# ------------------------------------------------------------------ without PostgreSQL


def test_without_a_server_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(postgres, "VERSIONS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(postgres.NoPostgresError, match="apt-get install postgresql"):
        postgres.binaries()
    for version in ("9.6", "15", "other"):
        folder = tmp_path / version / "bin"
        folder.mkdir(parents=True)
        for name in ("initdb", "postgres", "pgbench", "psql"):
            (folder / name).touch()
    assert postgres.binaries() == tmp_path / "15" / "bin", "the newest"


def test_what_is_said_is_said_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perco, "tune_gc", lambda: None)  # which is for a process of one's own
    run = harness.Run("peers", Namespace(quick=True, json=None, folder="."))
    run.say("pip install '.[bench]'")
    assert capsys.readouterr().out == "pip install '.[bench]'\n"


def test_a_command_that_fails_is_told() -> None:
    with pytest.raises(postgres.NoPostgresError, match=r"ls: .*no such folder"):
        postgres._run(["ls", "/no such folder"])
