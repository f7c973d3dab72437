"""A driver's trace goes on in Spark's tasks, and in the observers that run for what these have written."""

from __future__ import annotations

from pathlib import Path

import trio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pyspark.sql import SparkSession

import perco
import perco.otel
import perco.spark
from tests.spark import app


def test_a_load_and_the_runs_that_follow_belong_to_the_drivers_trace(spark: SparkSession, tmp_path: Path) -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    pages = spark.createDataFrame([(f"k{n:04}", "x") for n in range(20)], "url string, body string")
    assert perco.otel.traceparent() == ""
    with provider.get_tracer("job").start_as_current_span("job") as job:
        assert perco.spark.Store(url="tcp://localhost:1").traceparent == perco.otel.traceparent() != ""
        perco.spark.load(pages, tmp_path / "s", app.load, schema=app.schema, key="url")

    async def observe() -> None:
        async with perco.open(tmp_path / "s", app.schema) as db, db.worker():
            perco.otel.instrument(db, tracer_provider=provider)
            await db.wait_idle(timeout=30)

    trio.run(observe)
    runs = [span for span in kept.get_finished_spans() if span.name == "run size"]
    assert len(runs) == 20
    for run in runs:
        assert run.context is not None
        assert run.context.trace_id == job.get_span_context().trace_id
        # Nothing is recorded in the tasks, which have no provider: the runs are children of the job itself.
        assert run.parent is not None
        assert run.parent.span_id == job.get_span_context().span_id
    provider.shutdown()
