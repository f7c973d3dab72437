"""Traces of an open store, by OpenTelemetry: `pip install 'perco[otel]'`.

    async with perco.open("web/", schema) as db, db.worker():
        perco.otel.instrument(db)

Each transaction becomes a span, and so does each observer run. A transaction's notifications carry the context of its
span, so the runs that follow from it are its children, in whichever process they happen, and so on: a trace leads from
the request of a user to the last row that follows from it. If a caller has a current span, its transactions are
children of that, in trio, asyncio and blocking code. In an observer, the run's span is the current one. A worker that
is not instrumented passes the context on.

Spans have OpenTelemetry's names for databases and messaging where these have one. They have keys of rows, and the
messages and tracebacks of errors, but no values. The program's tracer provider decides where spans go, and how many are
kept.
"""

from __future__ import annotations

import json
import logging
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import perco.aio
import perco.sync
from perco.aio import calling as aio_calling
from perco.behind import AnyDatabase, behind_any
from perco.database.database import Database
from perco.database.inside import inside
from perco.errors import TransientError, UsageError
from perco.protocol.claim import Run
from perco.protocol.records import context_on, with_context
from perco.schema.schema import Observer, Signal, Table
from perco.sync import calling as sync_calling
from perco.txn.beginning import BLOCK
from perco.txn.engine import Engine
from perco.txn.runs import carried, carry, starts, traced
from perco.txn.transaction import Transaction

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span as OtelSpan, SpanContext, Tracer, TracerProvider

log: logging.Logger = logging.getLogger("perco.store")

_MISSING: Final = "traces need the package opentelemetry-api: pip install 'perco[otel]'"
_SYSTEM: Final = "perco"
_KEY_CHARACTERS: Final = 200
_HALF: Final = (1 << 64) - 1
_CONTEXT: Final = struct.Struct(">QQQBx")  # trace id (two halves), span id, flags: CONTEXT_BYTES


def instrument(db: AnyDatabase, *, tracer_provider: TracerProvider | None = None) -> None:
    """Trace an open store's transactions and observer runs in this process, from now on.

    Call it inside of the block that opened the store, on the thread of the store's loop or, for `perco.sync`, on any.

    Args:
        tracer_provider: makes the spans; by default, the global one.

    Raises: UsageError if opentelemetry-api is missing.
    """
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise UsageError(_MISSING) from error
    of = behind_any(db)
    spans = _Spans(inside(of).engine, trace.get_tracer("perco", perco.__version__, tracer_provider))
    inside(of).engine.spans = spans
    if isinstance(db, perco.aio.Database):
        aio_calling.portal_behind(db).spans = spans
    elif not isinstance(db, Database):
        sync_calling.portal_behind(db).spans = spans


def traceparent() -> str:
    """The current span's context, as W3C's header "traceparent"; "": there is none, or the program does not use
    OpenTelemetry."""
    if "opentelemetry" not in sys.modules:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def is_configured() -> bool:
    """Whether there is a global provider that records spans. Raises: UsageError if opentelemetry-api is missing."""
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise UsageError(_MISSING) from error
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider | trace.NoOpTracerProvider)


@contextmanager
def resumed(db: Database, traceparent: str) -> Iterator[None]:
    """A block that goes on with another process's trace, in a store that is traced from now on. It does nothing for "",
    and where OpenTelemetry is not installed."""
    token = None
    if traceparent:
        with suppress(ImportError):
            from opentelemetry import context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            instrument(db)
            token = context.attach(TraceContextTextMapPropagator().extract({"traceparent": traceparent}))
    try:
        yield
    finally:
        if token is not None:
            context.detach(token)


class _Spans:
    """See `perco.txn.spans.Spans`."""

    def __init__(self, engine: Engine, tracer: Tracer) -> None:
        from opentelemetry import context, trace

        self._engine, self._tracer = engine, tracer
        self._context, self._trace = context, trace

    def begun(self, txn: Transaction, function: str) -> _Span | None:
        attributes: dict[str, Any] = {
            "db.system.name": _SYSTEM,
            "db.operation.name": "transaction",
        }
        name = "transaction"
        if function and function != BLOCK:
            attributes["code.function.name"] = function
            name = f"transaction {function.rpartition('.')[2]}"
        with _told():
            span = self._tracer.start_span(name, kind=self._trace.SpanKind.CLIENT, attributes=attributes)
            return _Span(self, span)
        return None

    def run(self, txn: Transaction, observer: Observer, row: bytes, run: Run, attempt: int) -> None:
        with _told():
            self._run(txn, observer, row, run, attempt)

    def _run(self, txn: Transaction, observer: Observer, row: bytes, run: Run, attempt: int) -> None:
        table = observer.column.table
        attributes: dict[str, Any] = {
            "messaging.system": _SYSTEM,
            "messaging.operation.type": "process",
            "messaging.operation.name": "run",
            "messaging.destination.name": observer.id,
            "perco.table": table.title,
            "perco.key": _key(table, row),
            "perco.signal" if isinstance(observer.column, Signal) else "perco.column": observer.column.name,
            "perco.cause": run.root,
            "perco.depth": run.depth,
            "perco.attempt": attempt,
            "perco.collapsed": run.collapsed,
            "perco.start_ts": txn.start_ts,
        }
        cause = self._context.Context()  # not the runner's own: the run belongs to the trace of what it follows from
        if carried_here := context_on(run.path):
            cause = self._trace.set_span_in_context(self._trace.NonRecordingSpan(_unpacked(carried_here)), cause)
        kind = self._trace.SpanKind.CONSUMER
        span = self._tracer.start_span(f"run {observer.id}", cause, kind=kind, attributes=attributes)
        token = self._context.attach(self._trace.set_span_in_context(span, cause))
        traced(txn, _Span(self, span, token))

    def capture(self) -> Context | None:
        return self._context.get_current() or None

    def attach(self, context: Context) -> Any:
        return self._context.attach(context)

    def detach(self, token: Any) -> None:
        self._context.detach(token)

    def failed(self, span: OtelSpan, error: BaseException) -> None:
        """Note on a span why it failed."""
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, type(error).__name__))
        if not isinstance(error, TransientError):
            span.record_exception(error)


class _Span:
    """See `perco.txn.spans.Span`. `token`: the span is the current one until `leave`."""

    commits: bool

    __slots__ = ("_ended", "_failed", "_span", "_spans", "_token", "commits")

    def __init__(self, spans: _Spans, span: OtelSpan, token: Any = None) -> None:
        self._spans, self._span, self._token = spans, span, token
        self._failed: BaseException | None = None
        self.commits = self._ended = False

    async def commit(self, txn: Transaction) -> int:
        self.commits = True
        with _told():
            carry(txn, with_context(carried(txn), _packed(self._span.get_span_context())))
        try:
            return await txn.commit()
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            self.end(txn)

    def failed(self, error: BaseException) -> None:
        self._failed = self._failed or error

    def end(self, txn: Transaction, outcome: str = "") -> None:
        if self._ended:
            return
        self._ended = True
        with _told():
            if not starts(txn):
                self._span.set_attribute("perco.start_ts", txn.start_ts)
            if txn.commit_ts:
                self._span.set_attribute("perco.commit_ts", txn.commit_ts)
            self._span.set_attribute("perco.outcome", outcome or txn.outcome)
            if self._failed is not None and txn.outcome != "committed":
                self._spans.failed(self._span, self._failed)
            self._span.end()

    def leave(self) -> None:
        if self._token is not None:
            self._spans.detach(self._token)
            self._token = None


@contextmanager
def _told() -> Iterator[None]:
    """A block whose errors, such as those of a span processor, are logged: no transaction fails because of its span."""
    try:
        yield
    except Exception:
        log.exception("a span failed")


def _key(table: Table[Any], row: bytes) -> str:
    try:
        key = table.key.decode(row)
    except (ValueError, struct.error):
        return row.hex()[:_KEY_CHARACTERS]
    # As the command line takes keys: text as it is, tuples as JSON.
    text = json.dumps(key, ensure_ascii=False, default=str) if isinstance(key, tuple) else str(key)
    return text[:_KEY_CHARACTERS]


def _packed(context: SpanContext) -> bytes:
    """A context as it is carried; b"": it is invalid."""
    if not context.is_valid:
        return b""
    return _CONTEXT.pack(context.trace_id >> 64, context.trace_id & _HALF, context.span_id, context.trace_flags)


def _unpacked(carried: bytes) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    high, low, span, flags = _CONTEXT.unpack(carried)
    return SpanContext(high << 64 | low, span, is_remote=True, trace_flags=TraceFlags(flags))
