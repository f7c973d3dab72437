"""The baselines of figure 7, on a few documents: their results are right, and each document has a delay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.figure7 import by_batch, by_streaming
from bench.figure7.documents import Documents, same


def test_a_run_of_the_batch_takes_what_has_arrived(spark: Any, tmp_path: Path) -> None:
    documents = Documents(300)
    batch = by_batch.Batch(spark, tmp_path / "batch", documents)
    cycles = batch.cycles(50.0, 2)
    assert [run.documents for run in cycles.runs] == [300 + cycles.runs[0].new, batch.next]
    assert cycles.runs[1].new == batch.next - cycles.runs[0].documents > 0
    assert cycles.runs[1].began >= cycles.runs[0].ended
    assert all(run.cpu_s > 0 for run in cycles.runs)
    assert same(batch.canonicals(), documents.canonicals(batch.next))


def test_the_stream_adds_to_its_state(spark: Any, tmp_path: Path) -> None:
    documents = Documents(300)
    with by_streaming.streaming(spark, tmp_path / "streaming", documents) as streaming:
        assert streaming.backlog(300).documents == 300
        streamed = streaming.arrive(20.0, 1.0)
        assert len(streamed.delays_s) == streaming.next - 300 > 0
        assert min(streamed.delays_s) > 0.0
        assert streamed.triggers > 0
        assert same(streaming.canonicals(), documents.canonicals(streaming.next))
