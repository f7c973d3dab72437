"""The seam to a tracer of transactions and observer runs (`perco.otel`); without one, nothing is traced.

A transaction's notifications carry the trace context of its span, in the path of their cause (N9), so that the runs
that follow belong to the same trace, in whichever process they happen.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from perco.protocol.claim import Run
from perco.schema.schema import Observer

Transaction: TypeAlias = Any  # `perco.txn.transaction.Transaction`, which imports this module


class Span(Protocol):
    """The span of a transaction, or of an observer run and its transaction. Loop thread only.

    Attributes:
        commits: whether the transaction has begun to commit.
    """

    commits: bool

    async def commit(self, txn: Transaction) -> int:
        """Commit the transaction; its notifications carry the span's context."""
        ...

    def failed(self, error: BaseException) -> None:
        """Note why the transaction will not commit, or has not."""
        ...

    def end(self, txn: Transaction, outcome: str = "") -> None:
        """The transaction has ended: so does the span, unless it has ended before. `outcome`: if it is not the
        transaction's own."""
        ...

    def leave(self) -> None:
        """The span is no longer the current one. Called by the task that began it."""
        ...


class Spans(Protocol):
    """Makes spans. Loop thread only, except `capture`."""

    def begun(self, txn: Transaction, function: str) -> Span | None:
        """The span of a program's transaction, which begins now. `function`: the name of what runs in it."""
        ...

    def run(self, txn: Transaction, observer: Observer, row: bytes, run: Run, attempt: int) -> None:
        """Begin the span of an observer's run, and make it the current one until `leave`."""
        ...

    def capture(self) -> Any:
        """The trace context of the caller, for `attach`. Any thread."""
        ...

    def attach(self, context: Any) -> Any:
        """Make a context the current one. Returns a token for `detach`."""
        ...

    def detach(self, token: Any) -> None:
        """Make the context the current one that was so before."""
        ...
