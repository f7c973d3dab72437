"""What a transaction has written, as the protocol stores it."""

from __future__ import annotations

from perco.protocol.mutations import Intent
from perco.protocol.records import DELETE, PUT, PUT_DATA, SHORT_VALUE_BYTES
from perco.schema.catalogue import Bound

Where = tuple[str, bytes, int]  # (table, row, column)


def stored(bound: Bound, data: bytes | None) -> tuple[int, bytes, bytes | None]:
    """The kind and body of a cell's record, and the value if it is too long for that. `data` None: it is deleted."""
    if data is None:
        return DELETE, b"", None
    if len(data) <= SHORT_VALUE_BYTES:
        return PUT, data, None
    return PUT_DATA, bound.group.encode(), data


def intent_of(where: Where, write: tuple[Bound, bytes | None]) -> Intent:
    """A write as the protocol's core takes it."""
    kind, body, data = stored(*write)
    return Intent(*where, kind, body, write[0].observers, (), data)
