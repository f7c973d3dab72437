"""Figure 7, on a few documents: its results and counts are right; none of its figures is judged here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet
import pytest
import trio
import trio.testing

import perco
from bench import figure7
from bench.figure7 import Found, by_perco
from bench.figure7.by_batch import Cycles, Ran, delays_s
from bench.figure7.by_perco import Clustering, Load, Repository
from bench.figure7.by_streaming import Backlog, Streamed
from bench.figure7.documents import CLUSTERINGS, SHIFT, Documents, same, smallest
from bench.harness import Report

LOAD = Load(per_s=100.0, seconds=10.0, delays_s=(0.001, 0.003), cpu_s=0.0004, late_s=0.01)


def test_the_canonical_of_a_cluster_is_its_smallest_document() -> None:
    documents = Documents(60)
    found: dict[int, int] = {}
    for document, keys in enumerate(documents.keys(0, 90).tolist()):
        for clustering, key in enumerate(keys):
            found.setdefault(clustering << SHIFT | key, document)
    clusters, firsts = documents.canonicals(90)
    assert dict(zip(clusters.tolist(), firsts.tolist(), strict=True)) == found
    assert len(found) < 90 * CLUSTERINGS, "some clusters have several documents"


def test_keys_stay_the_same_when_more_are_drawn_and_come_from_more_when_the_repository_grows() -> None:
    documents = Documents(1000)
    before = documents.keys(0, 1000).copy()
    assert before.max() < 750
    assert 750 < documents.keys(1000, 1 << 21).max() < 0.75 * (1 << 21)
    assert numpy.array_equal(documents.keys(0, 1000), before)


def test_a_file_has_the_documents(tmp_path: Path) -> None:
    documents = Documents(50)
    documents.write(tmp_path / "some.parquet", 10, 30)
    rows = pyarrow.parquet.read_table(tmp_path / "some.parquet").to_pylist()
    assert [row["id"] for row in rows] == list(range(10, 30))
    assert [[row[f"key{i}"] for i in range(CLUSTERINGS)] for row in rows] == documents.keys(10, 30).tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["some.parquet"], "nothing is left beside it"


def test_results_are_compared_down_to_the_last_cluster() -> None:
    result = smallest(numpy.array([7, 3, 7, 3]), numpy.array([5, 9, 4, 8]))
    assert [each.tolist() for each in result] == [[3, 7], [8, 4]]
    assert same(result, result)
    assert not same(result, (numpy.array([3, 7]), numpy.array([8, 5])))
    assert not same(result, (numpy.array([3, 6]), numpy.array([8, 4])))
    assert not same(result, (numpy.array([3]), numpy.array([8])))


async def test_arrivals_are_clustered_and_each_has_a_delay(autojump_clock: trio.testing.MockClock) -> None:
    documents = Documents(0)
    async with by_perco.clustering("memory:", documents, 0) as clustering:
        load = await clustering.arrive(20.0, 10.0)
        assert 120 < len(load.delays_s) == clustering.next < 300
        assert list(load.delays_s) == pytest.approx([0.0] * clustering.next), "a memory store takes no virtual time"
        assert load.sustained
        few = await clustering.arrive(0.01, 1.0, least=3)
        assert len(few.delays_s) == 3
        assert few.seconds > 1.0
        assert same(await clustering.canonicals(), documents.canonicals(clustering.next))


async def test_a_delay_counts_from_the_intended_arrival(autojump_clock: trio.testing.MockClock) -> None:
    async def slow(self: Repository, txn: perco.Transaction, change: perco.Change[bytes, bytes]) -> None:
        await trio.sleep(2.0)

    documents, repository = Documents(0), Repository(observed=False)
    repository.schema.observe(repository.keys, id="slow")(slow.__get__(repository))
    async with perco.open("memory:", repository.schema) as db, db.worker(concurrency=1) as worker:
        load = await Clustering(db, repository, worker, documents, 0).arrive(1e9, 0.0, least=3)
    assert sorted(load.delays_s) == pytest.approx([2.0, 4.0, 6.0]), "the second and the third have waited"
    assert not load.sustained


async def test_a_smaller_document_that_comes_later_becomes_the_canonical(
    autojump_clock: trio.testing.MockClock,
) -> None:
    repository = Repository(observed=True)
    found = []
    async with perco.open("memory:", repository.schema) as db, db.worker():
        for document in (5, 3, 9):
            async with db.transaction() as txn:
                txn.set(repository.keys, by_perco.row_of(document), by_perco.KEYS.pack(1, 2, 3))
            await db.wait_idle()
            async with db.snapshot() as snap:
                rows = await snap.scan(repository.table, columns=[repository.canonical]).all()
                found.append([int.from_bytes(row[repository.canonical] or b"") for row in rows])
    assert found == [[5] * 3, [3] * 3, [3] * 3]


async def test_what_was_loaded_in_bulk_counts_as_clustered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, ran = Documents(300), list[bytes]()
    cluster = Repository.cluster

    async def noted(self: Repository, txn: perco.Transaction, change: perco.Change[bytes, bytes]) -> None:
        ran.append(change.key)
        await cluster(self, txn, change)

    monkeypatch.setattr(Repository, "cluster", noted)
    await by_perco.load(tmp_path / "store", documents)
    async with by_perco.clustering(tmp_path / "store", documents, 300) as clustering:
        assert same(await clustering.canonicals(), documents.canonicals(300))
        await clustering.capacity(100)
        assert sorted(set(ran)) == [by_perco.row_of(document) for document in range(300, 400)]
        assert same(await clustering.canonicals(), documents.canonicals(400))


@pytest.mark.parametrize(
    ("late_s", "expected"),
    [(0.3, [1100.0, 1045.0, 992.75, 943.1125]), (2.0, [1100.0, 1100.0 / 1.2])],
    ids=["in small steps", "at once to what was clustered, if that is less"],
)
async def test_the_saturation_is_the_first_sustained_rate_from_above(
    monkeypatch: pytest.MonkeyPatch, late_s: float, expected: list[float]
) -> None:
    tried = []

    async def arrive(self: Clustering, per_s: float, seconds: float, least: int = 1) -> Load:
        tried.append(per_s)
        late = 0.0 if per_s < 950.0 else late_s
        return replace(LOAD, per_s=per_s, seconds=seconds, delays_s=(0.001,) * int(per_s * seconds), late_s=late)

    async def capacity(self: Clustering, count: int) -> float:
        return 1000.0

    monkeypatch.setattr(Clustering, "arrive", arrive)
    monkeypatch.setattr(Clustering, "capacity", capacity)
    async with by_perco.clustering("memory:", Documents(0), 0) as clustering:
        assert (await clustering.saturation(10.0)).per_s == pytest.approx(expected[-1])
    assert tried == pytest.approx(expected)


def runs(*moments: float) -> tuple[Ran, ...]:
    return tuple(Ran(began, ended, cpu_s=0.2, documents=1000, new=0) for began, ended in pairwise(moments))


def test_a_document_waits_for_the_end_of_the_next_run() -> None:
    delays = delays_s(runs(10.0, 12.0, 14.0, 16.0))
    assert min(delays) == pytest.approx(2.0, abs=0.01), "it has arrived just before a run began"
    assert max(delays) == 4.0, "it has arrived just after one began"
    assert Cycles(1.0, runs(10.0, 12.0, 14.0, 16.0)).delay_s(0.5) == pytest.approx(3.0, abs=0.01)


def found(perco_cpu_us: float) -> Found:
    load = replace(LOAD, cpu_s=perco_cpu_us / 1e6 * len(LOAD.delays_s))
    return Found(1000, perco={1: [LOAD]}, judged=[load], batch={1: [Cycles(1.0, runs(0.0, 2.0, 4.0, 6.0))]})


def test_both_cost_the_same_where_they_cross() -> None:
    both = found(1000.0)  # a run takes 200 us for each document, old or new
    assert both.run_cpu_us * (1 + both.crossover) / both.crossover == pytest.approx(both.perco_cpu_us)
    assert found(150.0).crossover == float("inf"), "a run costs more even if all is new"


def test_the_ratio_is_that_of_the_medians() -> None:
    assert found(1000.0).ratio == pytest.approx(3.0 / 0.003, rel=0.01)


def test_what_waits_at_the_end_is_not_sustained() -> None:
    late: Sequence[float] = (0.0, by_perco.WAITING_MOST_S, 2 * by_perco.WAITING_MOST_S)
    assert [replace(LOAD, late_s=each).sustained for each in late] == [True, True, False]


def whole(size: int, saturation: float = 5000.0) -> Found:
    each = replace(found(1000.0), size=size, saturated=[replace(LOAD, per_s=saturation)])
    streamed = Streamed(1.0, delays_s=(0.6, 0.9), cpu_s=0.1, triggers=1)
    return replace(each, streaming={1: streamed}, backlogs=[Backlog(20_000, 2.0, 1.0)])


def test_the_largest_repository_is_judged() -> None:
    report = Report("figure7", "power")
    figure7._note(report, whole(100_000, 3000.0), "_1e5")
    figure7._note(report, whole(1_000_000), "_1e6")
    figure7._judge(report, whole(1_000_000), "_1e6")
    assert report.figures["saturation_docs_per_s_1e5"] == 3000.0
    assert report.figures["saturation_docs_per_s"] == report.figures["saturation_docs_per_s_1e6"] == 5000.0
    assert report.ratios["batch_vs_perco_median_1pct"] == report.ratios["batch_vs_perco_median_1pct_1e6"] != "void"
    assert len(report.bars) == 3
    assert not report.missed


def test_a_slow_baseline_voids_its_ratio() -> None:
    report, slow = Report("figure7", "power"), whole(100_000)
    slow.backlogs = [Backlog(20_000, 20.0, 1.0)]
    slow.batch = {1: [Cycles(1.0, runs(0.0, 20.0, 40.0, 60.0))]}
    figure7._note(report, slow, "_1e5")
    figure7._judge(report, slow, "_1e5")
    assert report.ratios["batch_vs_perco_median_1pct"] == report.ratios["streaming_vs_perco_median_1pct"] == "void"
    assert [what for what, *_ in report.bars] == ["p50_ms_60pct", "saturation_docs_per_s"]


class Side:
    """A side that has clustered some documents, and is asked for the rest."""

    def __init__(self, documents: Documents, end: int, wrong: bool) -> None:
        self._documents, self.next, self._wrong = documents, end, wrong

    def take(self, end: int) -> None:
        self.next = end

    backlog = take

    def run(self) -> None: ...

    def measure(self, function: Callable[[Any], Awaitable[Any]]) -> Any:
        return trio.run(function, self)

    async def capacity(self, count: int) -> None:
        self.next += count

    def canonicals(self) -> Any:
        clusters, firsts = self._documents.canonicals(self.next)
        if self._wrong:
            firsts[-1] += 1
        return clusters, firsts


class AsyncSide(Side):
    async def canonicals(self) -> Any:  # type: ignore[override]
        return super().canonicals()


@pytest.mark.parametrize("wrong", [None, "perco", "the batch", "Structured Streaming"])
def test_all_three_results_have_to_be_equal(wrong: str | None) -> None:
    documents = Documents(50)
    sides: Any = (
        AsyncSide(documents, 70, wrong == "perco"),
        Side(documents, 60, wrong == "the batch"),
        Side(documents, 80, wrong == "Structured Streaming"),
    )
    if wrong is None:
        figure7._equal(*sides, documents)
        assert [side.next for side in sides] == [80] * 3
    else:
        with pytest.raises(AssertionError, match=f"the result of {wrong} over 80 documents is wrong"):
            figure7._equal(*sides, documents)
