"""Traces by OpenTelemetry: on every front, in several processes' worth of clients, and through an observer's chain."""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import perco
import perco.aio
import perco.otel
import perco.sync
from perco.database.inside import inside
from perco.errors import UsageError, WriteConflict
from perco.protocol.records import (
    CONTEXT_BYTES,
    context_on,
    longer,
    observers_on,
    pack_cause,
    unpack_cause,
    with_context,
)


class Traced:
    """A provider whose spans stay here."""

    def __init__(self) -> None:
        self.kept = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.kept))
        self.tracer = self.provider.get_tracer("program")

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.kept.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.spans(name)
        return span


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.provider.shutdown()


class Program:
    """A chain of two observers; the second one fails once for a row."""

    def __init__(self, front: Any = perco) -> None:
        self.docs = perco.Table("docs", key=perco.TEXT)
        self.body, self.size = self.docs.column("body", perco.TEXT), self.docs.column("size", perco.INT64)
        self.note = self.docs.column("note", perco.TEXT)
        self.schema = perco.Schema(self.docs)
        self.current: dict[str, trace.SpanContext] = {}
        self.failed = False
        for column, id, function in (self.body, "measure", self.measure), (self.size, "judge", self.judge):
            self.schema.observe(column, id=id)(self.of_front(front, function))  # type: ignore[arg-type]

    def of_front(self, front: Any, function: Any) -> Any:
        if front is perco.sync:
            return perco.sync.observer(function)

        async def observe(txn: Any, change: Any) -> None:
            function(txn, change)

        return perco.aio.observer(observe) if front is perco.aio else observe

    def measure(self, txn: Any, change: Any) -> None:
        self.current["measure"] = trace.get_current_span().get_span_context()
        txn.set(self.size, change.key, len(change.value))

    def judge(self, txn: Any, change: Any) -> None:
        self.current["judge"] = trace.get_current_span().get_span_context()
        if change.key == "bad" and not self.failed:
            self.failed = True
            raise ValueError("the service is down")
        txn.set(self.note, change.key, "long" if change.value > 3 else "short")

    async def store(self, txn: Any, key: str, text: str) -> None:
        txn.set(self.body, key, text)


def is_child(span: ReadableSpan, of: ReadableSpan) -> bool:
    assert span.context is not None
    assert of.context is not None
    return (
        span.context.trace_id == of.context.trace_id
        and span.parent is not None
        and span.parent.span_id == of.context.span_id
    )


def check_chain(traced: Traced, program: Program, request: ReadableSpan) -> None:
    """A request's transaction, and the runs that followed, are one trace."""
    store, measure, judge = traced.one("transaction store"), traced.one("run measure"), traced.one("run judge")
    assert is_child(store, request)
    assert is_child(measure, store)
    assert is_child(judge, measure)
    for span, id in (measure, "measure"), (judge, "judge"):
        assert span.context is not None
        assert span.context.span_id == program.current[id].span_id, "it is the current span in the observer"
        assert span.attributes is not None
        assert span.attributes["messaging.destination.name"] == id
        assert span.attributes["perco.key"] == "a"
        assert span.attributes["perco.outcome"] == "committed"
    assert store.attributes is not None
    assert measure.attributes is not None
    assert measure.attributes["perco.cause"] == store.attributes["perco.commit_ts"]
    assert not trace.get_current_span().get_span_context().is_valid


async def test_a_trace_leads_from_a_request_through_the_chain(traced: Traced) -> None:
    program = Program()
    async with perco.open("memory:", program.schema) as db, db.worker():
        perco.otel.instrument(db, tracer_provider=traced.provider)
        with traced.tracer.start_as_current_span("request"):
            await db.run(program.store, "a", "text")
        await db.wait_idle(timeout=10)
    check_chain(traced, program, traced.one("request"))


def test_on_asyncio(traced: Traced, tmp_path: Path) -> None:
    program = Program(perco.aio)

    async def main() -> None:
        async with perco.aio.open(tmp_path / "store", program.schema) as db, db.worker():
            perco.otel.instrument(db, tracer_provider=traced.provider)
            with traced.tracer.start_as_current_span("request"):
                await db.run(program.store, "a", "text")
            await db.wait_idle(timeout=10)

    asyncio.run(main())
    check_chain(traced, program, traced.one("request"))


def test_in_threads(traced: Traced, tmp_path: Path) -> None:
    program = Program(perco.sync)

    def store(txn: Any, key: str, text: str) -> None:
        txn.set(program.body, key, text)

    with perco.sync.open(tmp_path / "store", program.schema) as db, db.worker():
        perco.otel.instrument(db, tracer_provider=traced.provider)
        with traced.tracer.start_as_current_span("request"):
            db.run(store, "a", "text")
        db.wait_idle(timeout=10)
    check_chain(traced, program, traced.one("request"))


async def test_a_worker_elsewhere_goes_on_with_the_trace(traced: Traced, tmp_path: Path) -> None:
    """Of another process, whose spans have another provider; one that is not instrumented passes the context on."""
    program, store = Program(), tmp_path / "store"
    async with perco.open(store, program.schema) as db:
        perco.otel.instrument(db, tracer_provider=traced.provider)
        with traced.tracer.start_as_current_span("request"):
            await db.run(program.store, "a", "text")
        for part in (["measure"], []), (["judge"], ["instrument"]):
            await trio.run_process([sys.executable, "-c", ELSEWHERE, str(store), *part[0], *part[1]], cwd=ROOT)
    told = (store / "spans").read_text().split()
    assert told[:2] == ["run", "judge"]
    wrote = traced.one("transaction store").context
    assert wrote is not None
    assert [int(each, 16) for each in told[2:]] == [wrote.trace_id, wrote.span_id], "that of the last one that traced"


ROOT = Path(perco.__file__).parents[1]
ELSEWHERE = """
import sys, trio, perco, perco.otel
from pathlib import Path
from tests.integration.test_otel import Program, Traced

async def main(store, id, instrument=""):
    program, traced = Program(), Traced()
    options = perco.WorkerOptions(only=[id])
    async with perco.open(store, program.schema) as db, db.worker(options=options):
        if instrument:
            perco.otel.instrument(db, tracer_provider=traced.provider)
        while (await db.waiting())[id]:
            await trio.sleep(0.02)
    if instrument:
        span = traced.one(f"run {id}")
        told = f"{span.name} {span.parent.trace_id:x} {span.parent.span_id:x}"
        (Path(store) / "spans").write_text(told)

trio.run(main, *sys.argv[1:])
"""


async def test_a_failed_run_says_why_and_the_next_is_its_sibling(traced: Traced) -> None:
    program = Program()
    options = perco.WorkerOptions(backoff=perco.options.BackoffOptions(first_s=0.01))
    async with perco.open("memory:", program.schema) as db, db.worker(options=options):
        perco.otel.instrument(db, tracer_provider=traced.provider)
        async with db.transaction() as txn:
            txn.set(program.size, "bad", 1)
        await db.wait_idle(timeout=10)
    first, second = traced.spans("run judge")
    assert first.status.status_code is StatusCode.ERROR
    assert first.attributes is not None
    assert (first.attributes["error.type"], first.attributes["perco.outcome"]) == ("ValueError", "aborted")
    assert [event.name for event in first.events] == ["exception"]
    assert second.status.status_code is not StatusCode.ERROR
    assert second.attributes is not None
    assert second.attributes["perco.attempt"] == 2
    wrote = traced.one("transaction")
    assert is_child(first, wrote)
    assert is_child(second, wrote)


async def test_a_conflict_ends_a_span_and_the_next_attempt_has_its_own(traced: Traced) -> None:
    program, tries = Program(), 0
    async with perco.open("memory:", program.schema) as db:
        perco.otel.instrument(db, tracer_provider=traced.provider)

        async def add(txn: perco.Transaction) -> None:
            nonlocal tries
            tries += 1
            before = await txn.get(program.size, "a")
            if tries == 1:
                async with db.transaction() as other:
                    other.set(program.size, "a", 7)
            txn.set(program.size, "a", (before or 0) + 1)

        await db.run(add)
        first, second = await db.begin(), await db.begin()
        for txn in first, second:
            txn.set(program.size, "b", 1)
        await first.commit()
        with pytest.raises(WriteConflict):
            await second.commit()
        abandoned = await db.begin()
        abandoned.discard()
    lost, won = traced.spans("transaction add")
    assert lost.attributes is not None
    assert won.attributes is not None
    assert (lost.attributes["error.type"], lost.attributes["perco.outcome"]) == ("WriteConflict", "aborted")
    assert not lost.events, "a conflict is not an exception of the program's"
    assert won.attributes["perco.outcome"] == "committed"
    outcomes = [span.attributes["perco.outcome"] for span in traced.spans("transaction") if span.attributes is not None]
    assert outcomes == ["committed", "committed", "aborted", "aborted"]


async def test_outcomes_of_spans(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    docs = perco.Table("docs", key=perco.TEXT)
    body, ping = docs.column("body", perco.TEXT), docs.signal("ping")
    schema = perco.Schema(docs)
    inside_of: list[bool] = []

    @schema.observe(body, id="commits")
    async def commits(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
        await txn.commit()
        inside_of.append(trace.get_current_span().get_span_context().is_valid)

    @schema.observe(ping, id="only handles")
    async def handles(txn: perco.Transaction, change: perco.Change[str, None]) -> None: ...

    async with perco.open("memory:", schema) as db, db.worker():
        perco.otel.instrument(db, tracer_provider=traced.provider)
        async with db.transaction() as txn:
            txn.set(body, "a", "x")
            txn.signal(ping, "a")
        await db.wait_idle(timeout=10)

        async def fails() -> None:
            async with db.transaction() as txn:
                txn.set(body, "b", "x")
                raise KeyError("b")

        with pytest.raises(KeyError):
            await fails()
        tries = 0

        async def conflicts(txn: perco.Transaction) -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise perco.errors.RolledBack(txn.start_ts)

        await db.run(conflicts)
        try:
            raise KeyError("of the program's own")
        except KeyError:
            (await db.begin()).discard()
    found = [
        (span.name, span.attributes["perco.outcome"], span.attributes.get("error.type"))
        for span in traced.kept.get_finished_spans()
        if span.attributes is not None
    ]
    assert sorted(found, key=str) == sorted(
        [
            ("transaction", "committed", None),
            ("run commits", "committed", None),
            ("run only handles", "handled", None),
            ("transaction", "aborted", "KeyError"),
            ("transaction conflicts", "aborted", "RolledBack"),
            ("transaction conflicts", "committed", None),
            ("transaction", "aborted", None),
        ],
        key=str,
    )
    assert inside_of == [True], "the span is the current one until the observer returns"
    assert not caplog.records


FAILED = ("aborted", "KeyError")


def outcomes(traced: Traced) -> list[tuple[Any, Any]]:
    spans = [span.attributes or {} for span in traced.kept.get_finished_spans() if span.name.startswith("transaction")]
    return [(attributes["perco.outcome"], attributes.get("error.type")) for attributes in spans]


async def raise_in_each_way(db: Any, program: Program) -> None:
    """In a database of trio, or of asyncio."""

    async def fails(txn: Any) -> None:
        raise KeyError(await txn.get(program.size, "a"))

    async def block() -> None:
        async with db.transaction() as txn:
            await fails(txn)

    async def attempts() -> None:
        async for attempt in db.attempts():
            async with attempt as txn:
                await fails(txn)

    for way in lambda: db.run(fails), block, attempts:
        with pytest.raises(KeyError):
            await way()


async def test_errors_of_programs_are_told_on_trio(traced: Traced) -> None:
    program = Program()
    async with perco.open("memory:", program.schema) as db:
        perco.otel.instrument(db, tracer_provider=traced.provider)
        await raise_in_each_way(db, program)
    assert outcomes(traced) == [FAILED] * 3


def test_errors_of_programs_are_told_on_asyncio(traced: Traced, tmp_path: Path) -> None:
    program = Program(perco.aio)

    async def main() -> None:
        async with perco.aio.open(tmp_path / "store", program.schema) as db:
            perco.otel.instrument(db, tracer_provider=traced.provider)
            await raise_in_each_way(db, program)

    asyncio.run(main())
    assert outcomes(traced) == [FAILED] * 3


def test_errors_of_programs_are_told_in_threads(traced: Traced, tmp_path: Path) -> None:
    program = Program(perco.sync)
    with perco.sync.open(tmp_path / "store", program.schema) as db:
        perco.otel.instrument(db, tracer_provider=traced.provider)

        def fails(txn: perco.sync.Transaction) -> None:
            raise KeyError(txn.get(program.size, "a"))

        def block() -> None:
            with db.transaction() as txn:
                fails(txn)

        def attempts() -> None:
            for attempt in db.attempts():
                with attempt as txn:
                    fails(txn)

        for way in lambda: db.run(fails), block, attempts:
            with pytest.raises(KeyError):
                way()
    assert outcomes(traced) == [FAILED] * 3


async def test_a_run_is_not_in_the_trace_of_another_nor_of_who_started_the_worker(traced: Traced) -> None:
    program = Program()
    async with perco.open("memory:", program.schema) as db:
        await db.run(program.store, "a", "before")  # nobody traced it
        with traced.tracer.start_as_current_span("start"):
            async with db.worker(concurrency=1):
                perco.otel.instrument(db, tracer_provider=traced.provider)
                await db.wait_idle(timeout=10)
                assert traced.one("run measure").parent is None
                inside(db).engine.spans = None
                await db.run(program.store, "a", "after")
                await db.wait_idle(timeout=10)
    start = traced.one("start").context
    assert start is not None
    assert program.current["measure"].span_id in (0, start.span_id), "not the span of the run before"


async def test_a_context_that_is_none_and_a_span_that_fails_stop_nothing(
    traced: Traced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program()
    async with perco.open("memory:", program.schema) as db, db.worker():
        perco.otel.instrument(db, tracer_provider=traced.provider)
        monkeypatch.setattr(perco.otel, "_packed", lambda context: b"\x01\x02")
        await db.run(program.store, "a", "text")
        await db.wait_idle(timeout=10)
        assert traced.one("run measure").parent is None

        def broken(*_: object) -> None:
            raise RuntimeError("no span")

        monkeypatch.setattr(perco.otel, "_key", broken)
        await db.run(program.store, "a", "longer")
        await db.wait_idle(timeout=10)
        assert len(traced.spans("run measure")) == 1
        assert program.current["measure"] == trace.INVALID_SPAN_CONTEXT
    assert {record.message for record in caplog.records} == {"a span failed"}


async def test_what_is_not_sampled_is_not_recorded_but_carried(traced: Traced) -> None:
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

    off = TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    off.add_span_processor(SimpleSpanProcessor(traced.kept))
    program = Program()
    async with perco.open("memory:", program.schema) as db, db.worker():
        perco.otel.instrument(db, tracer_provider=off)
        await db.run(program.store, "a", "text")
        await db.wait_idle(timeout=10)
        assert not traced.kept.get_finished_spans()
        assert program.current["judge"].trace_id == program.current["measure"].trace_id != 0
        with traced.tracer.start_as_current_span("request"):  # a caller that is sampled
            await db.run(program.store, "a", "longer")
        await db.wait_idle(timeout=10)
    check_chain(traced, program, traced.one("request"))
    off.shutdown()


async def test_without_it_nothing_is_carried(traced: Traced) -> None:
    program = Program()
    async with perco.open("memory:", program.schema) as db, db.worker():
        await db.run(program.store, "a", "text")
        await db.wait_idle(timeout=10)
        assert not traced.kept.get_finished_spans()
        assert not program.current["judge"].is_valid


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(UsageError, match=r"perco\[otel\]"):
        perco.otel.instrument(None)  # type: ignore[arg-type]


# ------------------------------------------------------------------ how a context is carried (N9)

CONTEXT = bytes(range(CONTEXT_BYTES))


def test_a_path_carries_a_context_beside_its_observers() -> None:
    path = b""
    for number in range(1, 50):
        path = longer(path, struct.pack(">H", number))
    carried = with_context(path, CONTEXT)
    assert observers_on(carried) == observers_on(path) == list(range(18, 50))
    assert (context_on(path), context_on(carried)) == (b"", CONTEXT)
    further = longer(carried, struct.pack(">H", 50))
    assert (observers_on(further), context_on(further)) == (list(range(19, 51)), CONTEXT)
    assert with_context(with_context(carried, bytes(CONTEXT_BYTES)), b"") == path
    assert context_on(with_context(b"", bytes(CONTEXT_BYTES))) == bytes(CONTEXT_BYTES)
    assert unpack_cause(pack_cause(7, 3, carried, 2)) == (7, 3, carried, 2)


def test_the_module_is_not_imported_unless_asked_for() -> None:
    code = "import sys, perco; assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
